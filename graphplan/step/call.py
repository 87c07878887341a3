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


class BeforeError(GraphPlanError):
    """Holds what a :data:`Before` has raised, past what handles other errors."""


@dataclass(slots=True)
class Call:
    """``around`` is what is active around the call; ``is_flat``: there is a ``feed``. ``walk`` is over the owners as
    they are before it.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: Before | None = None
    around: str | None = None
    is_flat: bool = False
    feed: Feed = field(init=False)
    entry: Entry = field(init=False)
    program: Program | None = None
    line: Line = field(init=False)
    walk: Walk = field(init=False)
    is_on_way: bool = False

    def tell(self, program: Program | None, reason: SkipReason | None = None, detail: str = "") -> None:
        """Before anything runs."""
        if self.before is None:
            return
        try:
            self.before(program, reason, detail)
        except Exception as error:
            raise BeforeError(error) from error
