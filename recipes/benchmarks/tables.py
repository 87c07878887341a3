"""How the benchmark's result is shown: tables for people, for documents, and a bar chart."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from recipes.benchmarks.catalogue import Contender

# "replayed" is the share of all steps; "warm-up s" is the time of the steps before the first block, compilers and the
# first checks included; "capture ms" counts traces and captures; "peak" is memory allocated, "held" what the allocator
# reserved for it.
COLUMNS = (
    "workload", "contender", "us/step", "/ floor", "speed-up", "replayed", "warm-up s", "capture ms", "peak MiB",
    "held MiB",
)  # fmt: skip
BAR_COLUMNS = ("workload", "contender", "against", "measured", "bar", "")
Row = dict[str, Any]
Lines = list[list[str]]


def label(row: Row) -> str:
    """What a row's contender is called."""
    return Contender(row["contender"]).label


def _number(value: float | None, digits: int, suffix: str = "") -> str:
    return "" if value is None else f"{value:.{digits}f}{suffix}"


def cells(row: Row) -> list[str]:
    """One row as the table shows it."""
    if "us" not in row:
        said = "failed" if "error" in row else "not installed"
        return [row["workload"], label(row), said, *[""] * (len(COLUMNS) - 3)]
    phases = row.get("phases")
    once = None if phases is None else 1e3 * sum(phases.get(name, 0.0) for name in ("trace", "capture"))
    calls = sum(row.get(name, 0) for name in ("eager", "traced", "captured", "replayed"))
    replayed = 100 * row["replayed"] / calls if calls else None
    memory = [row[name] and row[name] / 2**20 for name in ("max_memory_allocated", "max_memory_reserved")]
    return [
        row["workload"], label(row), _number(row["us"], 1), _number(row["ratio_to_floor"], 3),
        _number(row["speedup"], 2, "x"), _number(replayed, 1, "%"), _number(row.get("warmup_seconds"), 1),
        _number(once, 1), *(_number(value, 0) for value in memory),
    ]  # fmt: skip


def bar_cells(bar: Row) -> list[str]:
    """One bar as its table shows it: a multiple of the other's time, or a speed-up over it."""
    near = bar["at_most"] is not None
    bound = f"<= {bar['at_most']:.2f}" if near else f">= {bar['at_least']:.2f}x"
    names = [Contender(bar[name]).label for name in ("contender", "against")]
    return [bar["workload"], *names, _number(bar["value"], 3, "" if near else "x"), bound, bar["verdict"]]


def plain_table(columns: tuple[str, ...], cells: Lines, *, left: int = 2) -> str:
    """A table as plain text, its first columns flush left."""
    lines = [list(columns), *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for line in lines:
        padded = map(str.ljust, line[:left], widths[:left]), map(str.rjust, line[left:], widths[left:])
        texts.append("  ".join([*padded[0], *padded[1]]).rstrip())
    return "\n".join([texts[0], "-" * len(texts[0]), *texts[1:]])


def markdown_table(columns: tuple[str, ...], cells: Lines, *, left: int = 2) -> str:
    """A table in Markdown, its first columns flush left."""
    rule = ["---"] * left + ["---:"] * (len(columns) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(columns), rule, *cells]) + "\n"


def markdown(result: Row, *, with_bars: bool) -> str:
    """The tables as markdown."""
    text = markdown_table(COLUMNS, [cells(row) for row in result["rows"]])
    if with_bars:
        text += "\n" + markdown_table(BAR_COLUMNS, [bar_cells(bar) for bar in result["bars"]], left=3)
    return text


def show(result: Row, *, with_bars: bool) -> None:
    """Print what failed, the bars if they are asked for, and last the table."""
    rows = result["rows"]
    for row in rows:
        if "us" not in row:
            print(f"{row['workload']}, {label(row)}: {row.get('error') or row['missing']}")
    if with_bars:
        print(plain_table(BAR_COLUMNS, [bar_cells(bar) for bar in result["bars"]], left=3), end="\n\n")
    lines, title = [cells(row) for row in rows], f"{result['device']}, torch {result['torch']}"
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title)
        for index, name in enumerate(COLUMNS):
            table.add_column(name, justify="left" if index < 2 else "right", no_wrap=index < 2)
        for line in lines:
            table.add_row(*line)
        Console().print(table)
    else:
        print(title, plain_table(COLUMNS, lines), sep="\n")


def draw(result: Row, path: Path) -> None:
    """Write a bar chart: one panel for each workload, one bar for each contender."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result["rows"] if "us" in row]
    panels = list(dict.fromkeys(row["workload"] for row in rows))
    if not panels:
        return
    across = min(len(panels), 3)
    down = -(-len(panels) // across)
    most = max(sum(row["workload"] == panel for row in rows) for panel in panels)
    height = down * (0.9 + 0.24 * most)
    figure, axes = pyplot.subplots(down, across, figsize=(1 + 4.8 * across, height), squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        mine = [row for row in rows if row["workload"] == panel][::-1]
        ours = ["graph_step" in row["contender"] or "callback" in row["contender"] for row in mine]
        colors = ["tab:blue" if own else "tab:gray" for own in ours]
        drawn = axis.barh([label(row) for row in mine], [row["us"] for row in mine], color=colors)
        axis.bar_label(drawn, fmt="%.0f", padding=3, fontsize=8)
        axis.tick_params(axis="y", labelsize=7)
        axis.margins(x=0.3)
        axis.set(title=panel, xlabel="µs per step")
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_axis_off()
    figure.suptitle(f"{result['device']}, torch {result['torch']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
