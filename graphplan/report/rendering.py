"""Reports as text, JSON, or one HTML page that needs no other file.

The page contains its drawings as SVG, and a few lines of script for its search.
"""

from __future__ import annotations

import io
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from graphplan.errors import OptionError
from graphplan.report.figures import Figures

COLORS = {
    "eager": "#9aa0a6", "traced": "#f29900", "captured": "#d93025", "replayed": "#188038", "verified": "#1a73e8",
}  # fmt: skip
"""Colors by kind of call. Any other kind is drawn black."""
_FORMATS = ("text", "json", "html")


class Reports(ABC):
    """The base class of objects that report on their calls and programs in several formats."""

    @abstractmethod
    def text(self) -> str:
        """Return the report as text."""

    @abstractmethod
    def data(self) -> dict[str, Any]:
        """Return the report as plain data."""

    def report(self, format: str = "text") -> str:
        """Report on the calls so far, the reasons for eager calls, and the programs.

        Args:
            format: ``"text"``, ``"json"`` (the same as data, with each program) or ``"html"`` (this data as a page with
                drawings).

        Raises:
            OptionError: for an unknown format, or if the libraries that draw a page are not installed.
        """
        check_format(format)
        if format == "text":
            return self.text()
        return json.dumps(self.data(), indent=2) if format == "json" else page([("calls", self.data())])


def check_format(format: str) -> None:
    """Raise OptionError for an unknown format. The error names the known ones."""
    if format not in _FORMATS:
        raise OptionError(f"format is {format!r}; expected one of: {', '.join(_FORMATS)}")


def report_of_runs(runs: Sequence[tuple[str, Figures]], format: str) -> str:
    """Return one report on the figures of a callback's runs. Each run is training or evaluation."""
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


def page(sections: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the titled data of steps as an HTML page. Raises OptionError if jinja2 or matplotlib is not installed."""
    try:
        from jinja2 import Environment
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(
            f"a report with format='html' is drawn by jinja2 and matplotlib, and {error.name} is not installed: "
            'pip install "graphplan[plot]"'
        ) from error
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("graphplan.report").joinpath("page.html").read_text(encoding="utf-8"))
    drawn = {"Calls": _draw_calls, "Time": _draw_times}

    def drawings(data: Mapping[str, Any]) -> dict[str, str]:
        return {name: _svg(Figure(figsize=(9, 2.2), layout="constrained"), draw, data) for name, draw in drawn.items()}

    return template.render(sections=[(title, data, drawings(data)) for title, data in sections], colors=COLORS)


def _svg(figure: Any, draw: Callable[[Any, Mapping[str, Any]], None], data: Mapping[str, Any]) -> str:
    draw(figure.subplots(), data)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    # The lines before this tag are only for separate SVG files.
    _, tag, rest = text.getvalue().partition("<svg")
    return tag + rest


def _draw_calls(axes: Any, data: Mapping[str, Any]) -> None:
    """Draw one bar of calls, in the colors of their kinds."""
    timeline = data["timeline"]
    for kind in dict.fromkeys(stretch["kind"] for stretch in timeline):
        spans = [(stretch["first"], stretch["count"]) for stretch in timeline if stretch["kind"] == kind]
        axes.broken_barh(spans, (0, 1), color=COLORS.get(kind, "black"), label=kind)
    axes.set(yticks=[], xlabel="call")
    if timeline:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.35), ncols=6, frameon=False)


def _draw_times(axes: Any, data: Mapping[str, Any]) -> None:
    """Draw the milliseconds per call of each stretch, and of a step without graphplan and with replays."""
    for stretch in data["timeline"]:
        if stretch["seconds"]:
            ms = stretch["seconds"] / stretch["count"] * 1e3
            ends = [stretch["first"], stretch["first"] + stretch["count"]]
            axes.plot(ends, [ms, ms], color=COLORS.get(stretch["kind"], "black"), linewidth=2, solid_capstyle="butt")
    for kind, style in (("eager", "--"), ("replayed", ":")):
        us = data["step_us"][kind]
        if us is not None:
            axes.axhline(us / 1e3, color=COLORS[kind], linestyle=style, label=f"{kind}: {us / 1e3:.3g} ms")
    axes.set(xlabel="call", ylabel="ms per call", yscale="log")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
