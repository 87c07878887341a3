"""What a step knows about one key: how warm it is, its traces, its programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from graphplan.errors import RefusalError
from graphplan.plan import Plan
from graphplan.program import Program
from graphplan.tracer import Trace

Variant = tuple[bool, ...]
"""Which parameters have a gradient on entry: a step that accumulates has one program per answer."""


@dataclass(slots=True)
class Line:
    """One variant on its way to a program: traces, then a plan, then the program.

    ``state`` are the paths of the optimizer state that the latest trace found.
    """

    traces: list[Trace] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    plan: Plan | None = None
    program: Program | None = None


@dataclass(slots=True)
class Entry:
    """One key. ``any_program`` serves whatever gradients there are, since its step drops them unread."""

    warm: int = 0
    eager_calls: int = 0
    lines: dict[Variant, Line] = field(default_factory=dict)
    any_program: Program | None = None
    refusal: RefusalError | None = None
    recapture: bool = False
    wants_grad: bool = False

    def select(self, variant: Callable[[], Variant]) -> Program | None:
        """The program for the gradients that there are now, if it is ready."""
        if self.any_program is not None or not self.lines:
            return self.any_program
        line = self.lines.get(variant())
        if line is not None and line.program is not None:
            return line.program
        # Gradients that the step drops unread may differ from those of the traced calls (validation clears them).
        return next((program for program in self.programs() if program.guards.gradients_fit()), None)

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


def environment() -> tuple[Any, ...]:
    """Global modes that a program bakes in."""
    cuda = torch.is_autocast_enabled("cuda")
    cpu = torch.is_autocast_enabled("cpu")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype("cuda") if cuda else None,
        torch.get_autocast_dtype("cpu") if cpu else None,
        torch.are_deterministic_algorithms_enabled(),
    )
