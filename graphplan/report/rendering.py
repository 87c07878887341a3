"""Reports in the form that was asked for."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any

from graphplan.errors import OptionError
from graphplan.report.figures import Figures
from graphplan.report.page import page

_FORMATS = ("text", "json", "html")


class Reports(ABC):
    """Something whose calls and programs can be reported in several forms."""

    @abstractmethod
    def text(self) -> str:
        """The report as text."""

    @abstractmethod
    def data(self) -> dict[str, Any]:
        """The report as plain data."""

    def report(self, format: str = "text") -> str:
        """What the calls so far were, why some were eager, and what there is to replay.

        Args:
            format: ``"text"``, ``"json"`` (the same as data, with each program) or ``"html"`` (that as a page of its
                own, with drawings).

        Raises:
            OptionError: for an unknown format, or if the libraries that draw a page are not installed.
        """
        check_format(format)
        if format == "text":
            return self.text()
        return json.dumps(self.data(), indent=2) if format == "json" else page([("calls", self.data())])


def check_format(format: str) -> None:
    """Check that a format is known.

    Raises:
        OptionError: naming those that there are.
    """
    if format not in _FORMATS:
        raise OptionError(f"format is {format!r}; expected one of: {', '.join(_FORMATS)}")


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
