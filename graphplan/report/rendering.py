"""Reports in the form that was asked for."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any

from graphplan.errors import OptionError
from graphplan.program.program import Program
from graphplan.report.figures import Figures
from graphplan.report.page import page

_FORMATS = ("text", "json", "html")
_LABEL = 64
"""Characters of a name that a drawing shows; names of kernels have their template arguments in them."""


class Reports(ABC):
    """Something whose calls and programs can be reported in several forms."""

    @abstractmethod
    def text(self) -> str:
        """The report as text."""

    @abstractmethod
    def data(self) -> dict[str, Any]:
        """The report as plain data."""

    @abstractmethod
    def drawn(self) -> Sequence[Program]:
        """The programs to draw."""

    def report(self, format: str = "text", program: int | None = None) -> str:
        """What the calls so far were, why some were eager, and what there is to replay.

        Args:
            format: ``"text"``, ``"json"`` (the same as data, and each program with its nodes), ``"html"`` (that as a
                page of its own, with drawings) or ``"dot"`` (the programs' nodes as a drawing for graphviz).
            program: the number of the program to draw, as JSON lists them; all without it.

        Raises:
            OptionError: for a format or a program that there is not, or where what draws a page is not installed.
        """
        check_format(format, "dot")
        if program is not None and format != "dot":
            raise OptionError(f"program is given with format={format!r}; expected format='dot', which draws one or all")
        if format == "text":
            return self.text()
        if format == "json":
            return json.dumps(self.data(), indent=2)
        if format == "html":
            return page([("calls", self.data())])
        return _draw(_chosen(self.drawn(), program))


def check_format(format: str, *more: str) -> None:
    """Refuse a form that there is not.

    Raises:
        OptionError: naming those that there are.
    """
    known = (*_FORMATS, *more)
    if format not in known:
        raise OptionError(f"format is {format!r}; expected one of: {', '.join(known)}")


def report_of_runs(runs: Sequence[tuple[str, Figures]], format: str) -> str:
    """The figures of a callback's runs, each with what ran (training, evaluation), as one report."""
    if format == "text" and len(runs) == 1:
        return runs[0][1].text()
    of_each, numbers = Counter(part for part, _ in runs), Counter[str]()
    sections = []
    for part, figures in runs:
        numbers[part] += 1
        sections.append((f"{part} {numbers[part]}" if of_each[part] > 1 else part, figures))
    if format == "text":
        return "\n".join(f"{title}:\n{figures.text()}" for title, figures in sections)
    data = [(title, figures.data()) for title, figures in sections]
    return page(data) if format == "html" else json.dumps(dict(data), indent=2)


def _chosen(programs: Sequence[Program], number: int | None) -> list[tuple[int, Program]]:
    numbered = list(enumerate(programs))
    if number is None:
        return numbered
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(numbered):
        raise OptionError(
            f"program is {number!r}, and there are {len(numbered)} of them; expected a number from 0, or None for all"
        )
    return [numbered[number]]


def _draw(programs: Sequence[tuple[int, Program]]) -> str:
    """A graph in graphviz's language: a cluster for each program, an edge to each node from what it follows."""
    lines = ["digraph graphplan {", "  node [shape=box];"]
    for number, program in programs:
        nodes = program.nodes
        title = f"{number}: {program.plan.name}({program.plan.feed}), {program.replays} replays"
        lines += [f"  subgraph cluster_{number} {{", f"    label={_quote(title)};"]
        if nodes.missing:
            lines.append(f"    p{number} [shape=note, label={_quote(nodes.missing)}];")
        for index, node in enumerate(nodes.all):
            label = node.name or node.type
            short = label if len(label) <= _LABEL else f"{label[: _LABEL - 1]}…"
            lines.append(f"    p{number}_{index} [label={_quote(short)}, tooltip={_quote(label)}];")
        lines += [
            f"    p{number}_{before} -> p{number}_{index};"
            for index, node in enumerate(nodes.all)
            for before in node.after
        ]
        lines.append("  }")
    return "\n".join([*lines, "}"])


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
