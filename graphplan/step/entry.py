"""What a step knows about one key: how warm it is, its traces, its programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from graphplan.errors import GraphPlanError
from graphplan.plan import Plan
from graphplan.program import Program
from graphplan.tracer import Trace

Variant = tuple[bool, ...]
"""Which parameters have a gradient on entry: a step that accumulates has one program per answer."""


class Phase(Enum):
    """Where a variant of a key stands."""

    WARMUP = "warm-up"
    TRACE = "trace"
    CAPTURE = "capture"


@dataclass(slots=True)
class Line:
    """One variant on its way to a program."""

    traces: list[Trace] = field(default_factory=list)
    plan: Plan | None = None
    program: Program | None = None

    def phase(self) -> Phase:
        """What the next call of this variant is for."""
        return Phase.CAPTURE if self.plan is not None else Phase.TRACE


@dataclass(slots=True)
class Entry:
    """One key. ``any_program`` serves whatever gradients there are, since its step drops them unread."""

    warm: int = 0
    eager_calls: int = 0
    lines: dict[Variant, Line] = field(default_factory=dict)
    any_program: Program | None = None
    refusal: GraphPlanError | None = None
    recapture: bool = False

    def programs(self) -> list[Program]:
        """Programs that are ready, each once."""
        ready = [line.program for line in self.lines.values() if line.program is not None]
        if self.any_program is not None and self.any_program not in ready:
            ready.append(self.any_program)
        return ready

    def drop(self) -> None:
        """Close the programs and start again from one warm step."""
        for program in self.programs():
            program.close()
        self.lines.clear()
        self.any_program = None
        self.recapture = True
