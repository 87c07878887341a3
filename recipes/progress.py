"""A bar for what takes long, on a terminal where rich is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


def draws_bars() -> bool:
    """Whether :func:`bar` draws: standard error is a terminal, and rich is installed."""
    return sys.stderr.isatty() and find_spec("rich") is not None


@contextmanager
def bar(title: str, total: int, *, is_shown: bool = True) -> Iterator[Callable[[str], None]]:
    """A bar of ``total`` parts on standard error, gone at the end; nothing unless it :func:`draws_bars`.

    Yields:
        A function to be called when a part begins, with the part's name: those before it are done.
    """
    if not (is_shown and draws_bars()):
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        begun = 0

        def begin(text: str) -> None:
            nonlocal begun
            progress.update(task, completed=begun, description=f"{title}: {text}", refresh=True)
            begun += 1

        yield begin
        progress.update(task, completed=total)
