"""One call of a step, and what is found out about it on its way to a program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphplan.feed.signature import Feed
from graphplan.owners.slots import Walk
from graphplan.program.program import Program
from graphplan.step.programs import Entry, Line


@dataclass(slots=True)
class Call:
    """``around`` is what is active around the call; ``is_flat``: there is a ``feed``; ``is_found``: if there is a
    ``program``, it serves the call. ``walk`` is over the owners as they are before it.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    around: str | None = None
    is_flat: bool = False
    is_found: bool = False
    feed: Feed = field(init=False)
    entry: Entry = field(init=False)
    program: Program | None = None
    line: Line = field(init=False)
    walk: Walk = field(init=False)
    is_on_way: bool = False
