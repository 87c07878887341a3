"""Learning-rate schedulers that a manual-optimization ``training_step`` steps itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from graphplan.callback.patches import Patches
from graphplan.errors import HostEffectError
from graphplan.observe.source import find_source
from graphplan.tensors.trees import Literals
from graphplan.trace.mode import refuse_trace


class Schedules:
    """The schedulers of a fit with manual optimization. ``scheduler.step()`` in a step is made after the step.

    A recording must not depend on the new learning rates. So the rest of the step is watched. If it uses a scheduler
    that was stepped, or a learning rate of its optimizer, a trace is refused. Any other step then makes the deferred
    scheduler steps at once.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._schedulers: dict[str, Any] = {}
        self._rates: dict[int, Any] = {}
        self._noted: list[str] = []
        self._watch = Patches()

    def start(self) -> None:
        """Before a call, note the schedulers and their learning rates, which are numbers."""
        configs = enumerate(self._trainer.lr_scheduler_configs)
        self._schedulers = {f"lr_schedulers[{number}]": config.scheduler for number, config in configs}
        every = self._schedulers.values()
        self._rates = {id(group): group["lr"] for scheduler in every for group in _groups(scheduler)}

    @contextmanager
    def noting(self) -> Iterator[list[str]]:
        """While the step's Python runs, collect the names of the schedulers that step."""
        self._noted = []
        with Patches() as left:
            for name, scheduler in self._schedulers.items():
                if self._is_host_work(scheduler):
                    left.method(scheduler, "step", partial(self._step, name))
            left.callback(self._watch.close)
            yield self._noted

    def _is_host_work(self, scheduler: Any) -> bool:
        """Return True if the scheduler sets numbers, not a tensor of the user's, and its ``step`` is its class's."""
        rates = [self._rates[id(group)] for group in _groups(scheduler) if id(group) in self._rates]
        return bool(rates) and not any(isinstance(rate, Tensor) for rate in rates) and "step" not in vars(scheduler)

    def _step(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Run in place of a scheduler's ``step``."""
        scheduler = self._schedulers[name]
        if args or kwargs:
            self._use(f"passes a value to {name}.step()")
            type(scheduler).step(scheduler, *args, **kwargs)
            return
        if name not in self._noted:
            self._watch_scheduler(scheduler)
            self._watch_rates(scheduler.optimizer.param_groups)
        self._noted.append(name)

    def _watch_scheduler(self, scheduler: Any) -> None:
        kind: Any = type(scheduler)
        use = self._use

        def read(self: Any, name: str) -> Any:
            if name not in ("step", "optimizer") and not name.startswith("__"):
                use(f"reads {name!r} of a scheduler that it has stepped")
            return kind.__getattribute__(self, name)

        def write(self: Any, name: str, value: Any) -> None:
            use(f"writes {name!r} of a scheduler that it has stepped")
            kind.__setattr__(self, name, value)

        watched = {"__module__": kind.__module__, "__getattribute__": read, "__setattr__": write}
        self._watch.kind(scheduler, type(kind.__name__, (kind,), watched))

    def _watch_rates(self, groups: list[dict[str, Any]]) -> None:
        for index, group in enumerate(groups):
            if not isinstance(group, _WatchedGroup):
                groups[index] = _WatchedGroup(group, self._use)
                self._watch.callback(groups.__setitem__, index, group)

    def _use(self, what: str) -> None:
        """Handle a use of values that deferred scheduler steps change: refuse a trace, or make the steps now."""
        refuse_trace(
            HostEffectError,
            f"the step {what} at {find_source()}; graphplan steps the schedulers after each replay, without a value. "
            "Call scheduler.step() at the end of training_step and without a value, or in on_train_batch_end or "
            "on_train_epoch_end",
        )
        self._watch.close()
        noted = list(self._noted)
        self._noted.clear()
        for name in noted:
            scheduler = self._schedulers[name]
            for group in _groups(scheduler):
                if isinstance(group["lr"], Tensor) and id(group) in self._rates:
                    # In a capture, and while an optimizer steps, a tensor replaces the number.
                    group["lr"] = self._rates[id(group)]
            type(scheduler).step(scheduler)

    def finish(self, stepped: Literals) -> None:
        """After a call, make the scheduler steps that were deferred in it, or in the captured call that it replays."""
        for name in stepped:
            self._schedulers[name].step()


def _groups(scheduler: Any) -> list[dict[str, Any]]:
    optimizer = scheduler.optimizer if isinstance(scheduler, LRScheduler) else None
    return optimizer.param_groups if isinstance(optimizer, Optimizer) else []


class _WatchedGroup(dict[str, Any]):
    """Replaces a parameter group of an optimizer. Calls ``use`` for each access except to the parameters."""

    def __init__(self, group: dict[str, Any], use: Callable[[str], None]) -> None:
        super().__init__(group)
        self.group, self.use = group, use


def _watching(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def method(self: _WatchedGroup, *args: Any, **kwargs: Any) -> Any:
        if not args or args[0] != "params":
            self.use("uses a learning rate of an optimizer whose scheduler it has stepped")
        return plain(self.group, *args, **kwargs)

    method.__name__ = name
    return method


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__iter__", "get", "pop", "setdefault", "update", "items", "keys",
    "values", "copy",
):  # fmt: skip
    setattr(_WatchedGroup, _name, _watching(_name))
