"""What every managed call of a step shares: its owners, prepared optimizers, device learning rates, fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphplan.errors import OptimizerError
from graphplan.guards import Fingerprint
from graphplan.optimizers import LearningRates, Preparation, check_optimizer
from graphplan.owners import Discovery, Walk, free_name, name_owners, walk_owners

_CHURN = 3
"""A hyper-parameter that has a value never seen before in this many consecutive calls is on a per-step schedule."""


class Managed:
    """Owners of one step, named and discovered, and the optimizers among them."""

    def __init__(
        self, fn: Callable[..., Any], owners: Mapping[str, Any] | Sequence[Any] | None, *, prepare: bool
    ) -> None:
        self._fn = fn
        self._prepare = prepare
        self.owners = name_owners(owners)
        self.rates = LearningRates()
        self._preparations: dict[int, Preparation] = {}
        self._fingerprint: Fingerprint | None = None
        self._last: tuple[Any, ...] | None = None
        self._last_id = 0
        self._seen: dict[tuple[Any, ...], int] = {}
        self._streak = 0
        for owner in self.owners.values():
            if isinstance(owner, torch.optim.Optimizer):
                self.manage(owner)

    def walk(self) -> Walk:
        """Walk the owners."""
        return walk_owners(self.owners)

    def manage(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare an optimizer and shadow its learning rate, once."""
        if id(optimizer) in self._preparations:
            return
        if self._prepare:
            self._preparations[id(optimizer)] = Preparation(optimizer)
        else:
            check_optimizer(optimizer)
        self.rates.attach([optimizer])

    @property
    def changes(self) -> list[str]:
        """What was changed on the optimizers."""
        return [change for preparation in self._preparations.values() for change in preparation.changes]

    def discover(self, call: Callable[[], Any], on_first_sight: Callable[[Any], None] = lambda thing: None) -> Any:
        """Run ``call`` and take in the modules and optimizers that it turns out to use."""
        with Discovery(self.manage, on_first_sight) as discovery:
            result = call()
        for name, owner in discovery.unknown(self.walk(), self._fn).items():
            self.owners[free_name(name, self.owners)] = owner
        return result

    def refresh(self) -> None:
        """Look at the owners anew: after a warm-up step, or when containers were replaced."""
        walk = self.walk()
        self.rates.attach(walk.optimizers.values())
        self._fingerprint = Fingerprint(walk, self.rates.shadowed)
        self._parameters = [param for _, param in walk.parameters.values()]

    def fingerprint(self) -> int:
        """A number for the Python values that a program bakes in; equal values have equal numbers.

        Raises:
            OptimizerError: if a hyper-parameter keeps taking new values, which no number of programs could follow.
        """
        if self._fingerprint is None:
            return -1
        values = self._fingerprint.values()
        if values == self._last:
            self._streak = 0
            return self._last_id
        number = self._seen.get(values)
        if number is None:
            number = self._seen[values] = len(self._seen)
            self._check_churn(values)
        self._last, self._last_id = values, number
        return number

    def _check_churn(self, values: tuple[Any, ...]) -> None:
        assert self._fingerprint is not None
        changed = self._fingerprint.changed(self._last, values) if self._last is not None else []
        self._streak = self._streak + 1 if changed else 0
        if self._streak >= _CHURN:
            self._streak = 0
            raise OptimizerError(
                f"{'; '.join(changed[:3])}: a new value in each of the last {_CHURN} steps, which the kernel takes as a "
                "Python number, so that every step would need its own capture. Expected a constant, or an lr that "
                "the optimizer reads from the device (AdamW, Adam, SGD, Adagrad with fused=True; on CUDA any with "
                "capturable=True). Use one of those, change the value once per epoch, or leave optimizer.step() out "
                "of the step (in a Trainer that is done for you)",
                component="optimizer",
            )

    def grad_presence(self) -> tuple[bool, ...]:
        """Which parameters have a gradient now."""
        return tuple(param.grad is not None for param in self._parameters)

    def release(self) -> None:
        """Put the optimizers' flags back."""
        for preparation in self._preparations.values():
            preparation.undo()
        self._preparations = {}
