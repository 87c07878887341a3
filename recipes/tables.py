"""How the benchmark's result is shown: a table for people, one for documents, and a bar chart."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

LABELS = {
    "eager": "eager loop",
    "floor": "CUDA graph by hand (floor)",
    "graph_step": "graph_step",
    "trainer": "Trainer",
    "trainer_callback": "Trainer + GraphPlanCallback",
}
# "capture ms" counts the traces too; "peak" is memory allocated, "held" what the allocator reserved for it.
COLUMNS = ("workload", "contender", "us/step", "/ floor", "speed-up", "capture ms", "peak MiB", "held MiB")
Row = dict[str, Any]


def cells(row: Row) -> list[str]:
    """One row as the table shows it."""

    def number(value: float | None, digits: int, suffix: str = "") -> str:
        return "" if value is None else f"{value:.{digits}f}{suffix}"

    label = LABELS.get(row["contender"], row["contender"])
    if "error" in row:
        return [row["workload"], label, "failed", "", "", "", "", ""]
    phases = row.get("phases")
    once = None if phases is None else 1e3 * sum(phases.get(name, 0.0) for name in ("trace", "capture"))
    memory = [row[name] and row[name] / 2**20 for name in ("max_memory_allocated", "max_memory_reserved")]
    times = [number(row["us"], 1), number(row["ratio_to_floor"], 2), number(row["speedup"], 2, "x")]
    return [row["workload"], label, *times, number(once, 1), *(number(value, 0) for value in memory)]


def plain_table(rows: list[Row]) -> str:
    """The table as plain text."""
    lines = [list(COLUMNS), *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for line in lines:
        padded = [line[0].ljust(widths[0]), line[1].ljust(widths[1]), *map(str.rjust, line[2:], widths[2:])]
        texts.append("  ".join(padded).rstrip())
    return "\n".join([texts[0], "-" * len(texts[0]), *texts[1:]])


def markdown_table(rows: list[Row]) -> str:
    """The table as markdown."""
    rule = ["---", "---", *["---:"] * (len(COLUMNS) - 2)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(COLUMNS), rule, *map(cells, rows)]) + "\n"


def show(result: Row) -> None:
    """Print the table, then what failed and whether the bars were met."""
    rows = result["rows"]
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"{result['device']}, torch {result['torch']}, {result['optimizer_impl']} optimizers")
        for index, name in enumerate(COLUMNS):
            table.add_column(name, justify="left" if index < 2 else "right", no_wrap=index < 2)
        for row in rows:
            table.add_row(*cells(row))
        Console().print(table)
    else:
        print(plain_table(rows))
    for row in rows:
        if "error" in row:
            print(f"{row['workload']}, {LABELS.get(row['contender'], row['contender'])}: {row['error']}")
    for bar in result["bars"]:
        verdict = "met" if bar["met"] else "missed"
        print(f"bar: {bar['workload']}: tape {bar['speedup']:.2f}x eager, at least {bar['least']:.1f}x: {verdict}")


def draw(result: Row, path: Path) -> None:
    """Write a bar chart: one panel for each workload, one bar for each contender."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result["rows"] if "us" in row]
    panels = list(dict.fromkeys(row["workload"] for row in rows))
    if not panels:
        return
    contenders = {tuple(row["contender"] for row in rows if row["workload"] == panel) for panel in panels}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(1 + 3.6 * len(panels), 3.2), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        mine = [row for row in rows if row["workload"] == panel][::-1]
        colors = ["tab:blue" if row["contender"] in ("graph_step", "trainer_callback") else "tab:gray" for row in mine]
        drawn = axis.barh([LABELS[row["contender"]] for row in mine], [row["us"] for row in mine], color=colors)
        axis.bar_label(drawn, fmt="%.0f", padding=3, fontsize=8)
        axis.margins(x=0.18)
        axis.set(title=panel, xlabel="µs per step")
        if axis is not axes[0][0] and len(contenders) == 1:
            axis.set_yticklabels([])
    figure.suptitle(f"{result['device']}, torch {result['torch']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
