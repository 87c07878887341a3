"""What an event may change: one twin of a run, and the registry of events."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer


@dataclass
class Bench:
    """One twin: all that a step touches, and the graphed step if this is the graphed one."""

    model: Any
    optimizers: list[Optimizer]
    schedulers: list[Any]
    scaler: GradScaler | None
    calls: list[tuple[Any, ...]]
    step: Callable[..., Any]
    settings: Any
    graphed: Any = None
    releases: list[Callable[[], None]] = field(default_factory=list)
    """What makes the optimizers of the eager twin stock."""
    stock_from: int | None = None
    """The first call that is made with stock optimizers, because the graphed step has stood down."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The model's ``state_dict`` of the last checkpoint; ``moments`` are those of the optimizers."""
    moments: list[dict[str, Any]] = field(default_factory=list)

    def save(self) -> None:
        """Take a checkpoint."""
        self.weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.moments = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]

    def groups(self) -> list[dict[str, Any]]:
        """All parameter groups."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def group(self, number: int) -> dict[str, Any]:
        """One of all parameter groups."""
        groups = self.groups()
        return groups[number % len(groups)]

    def parameter(self, number: int) -> nn.Parameter:
        """One of the model's parameters."""
        parameters = list(self.model.parameters())
        return parameters[number % len(parameters)]

    def module(self, number: int) -> nn.Module:
        """One of the model's inner modules."""
        modules = list(self.model.modules())[1:]
        return modules[number % len(modules)]

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """One of the batches."""
        x, y = self.calls[number % len(self.calls)][:2]
        return x, y


Event = Callable[[Bench, int], None]
EVENTS: dict[str, Event] = {}
"""Every event by its name. Each takes a number that selects a place or a value, and none of them makes eager fail."""


def event(function: Event) -> Event:
    """Register an event."""
    EVENTS[function.__name__] = function
    return function
