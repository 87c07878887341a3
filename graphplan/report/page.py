"""Reports as one HTML page that needs no other file: drawings are SVG within it, and a few lines of script search."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from graphplan.errors import OptionError

COLORS = {
    "eager": "#9aa0a6", "traced": "#f29900", "captured": "#d93025", "replayed": "#188038", "verified": "#1a73e8",
}  # fmt: skip
"""Of the kinds of calls; any other kind is drawn black."""


def page(sections: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The reports of one or several steps, each with its title, as an HTML document.

    Args:
        sections: titles, and data as :func:`graphplan.report.figures.Figures.data` gives it.

    Raises:
        OptionError: if jinja2 or matplotlib is not installed.
    """
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
    """A drawing as an SVG element."""
    draw(figure.subplots(), data)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    # The lines before it are for files of their own.
    _, tag, rest = text.getvalue().partition("<svg")
    return tag + rest


def _draw_calls(axes: Any, data: Mapping[str, Any]) -> None:
    """One bar of calls, in the colours of their kinds."""
    timeline = data["timeline"]
    for kind in dict.fromkeys(stretch["kind"] for stretch in timeline):
        spans = [(stretch["first"], stretch["count"]) for stretch in timeline if stretch["kind"] == kind]
        axes.broken_barh(spans, (0, 1), color=COLORS.get(kind, "black"), label=kind)
    axes.set(yticks=[], xlabel="call")
    if timeline:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.35), ncols=6, frameon=False)


def _draw_times(axes: Any, data: Mapping[str, Any]) -> None:
    """Milliseconds per call of each stretch, and of a step without graphplan and with replays."""
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
