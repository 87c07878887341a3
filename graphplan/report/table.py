"""The summary of a fit as a table on a terminal, where rich is installed."""

from __future__ import annotations

from graphplan.report.stats import Stats


def show(stats: Stats, headline: str) -> bool:
    """Print a table to the terminal, headed with ``headline``; False, and nothing, without rich or a terminal."""
    try:
        from rich import get_console
        from rich.table import Table
    except ImportError:
        return False
    console = get_console()
    if not console.is_terminal:
        return False
    table = Table(title=headline, title_justify="left")
    for column in ("", "steps", "seconds"):
        table.add_column(column, justify="left" if not column else "right")
    for name, count, phase in (
        ("eager", stats.eager, "warmup"),
        ("traced", stats.traced, "trace"),
        ("captured", stats.captured, "capture"),
        ("replayed", stats.replayed - stats.verified, "steady"),
        ("checked", stats.verified, "verify"),
    ):
        table.add_row(name, str(count), f"{stats.phases[phase]:.2f}")
    console.print(table)
    return True
