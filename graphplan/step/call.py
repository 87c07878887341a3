"""One call of a step, and what is found out about it on its way to a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from graphplan.errors import GraphPlanError, SkipReason
from graphplan.feed.signature import Feed
from graphplan.owners.slots import Walk
from graphplan.program.program import Program
from graphplan.step.programs import Entry, Line

Before = Callable[[Program | None, SkipReason | None, str], None]
"""Told what is about to run: a program, or Python (None), and if that does not lead to a program, why."""


class NotRunError(GraphPlanError):
    """Raised by a :data:`Before`: the call is to be made in another way, and nothing of it has run. ``reason`` and
    ``detail`` are what it was told.
    """

    def __init__(self, reason: SkipReason | None, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(slots=True)
class Call:
    """``around`` is what is active around the call; ``is_flat``: there is a ``feed``; ``is_found``: if there is a
    ``program``, it serves the call. ``walk`` is over the owners as they are before it.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: Before | None = None
    around: str | None = None
    is_flat: bool = False
    is_found: bool = False
    feed: Feed = field(init=False)
    entry: Entry = field(init=False)
    program: Program | None = None
    line: Line = field(init=False)
    walk: Walk = field(init=False)
    is_on_way: bool = False

    def tell(self, program: Program | None, reason: SkipReason | None = None, detail: str = "") -> None:
        """Tell ``before`` what is about to run."""
        if self.before is not None:
            self.before(program, reason, detail)
