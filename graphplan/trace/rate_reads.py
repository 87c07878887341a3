"""A check that only the optimizer of a traced step, not the step's own code, uses a learning rate on the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from torch import Tensor

from graphplan.errors import LearningRateError
from graphplan.observe.source import SCHEDULERS, Source, is_run_by
from graphplan.owners.slots import Walk
from graphplan.tensors.storages import storage_id
from graphplan.trace.records import Trace

_COPIES = tuple(f"aten.{name}.default" for name in ("clone", "detach", "_to_copy", "alias", "squeeze"))
_FIX = (
    "Set the rate outside the step; if the step needs it, pass the number as an argument, keep it in a tensor that is "
    "filled between steps, or move optimizer.step() out of the step (in a Trainer with automatic optimization, "
    "graphplan does this)"
)
_LOGGED = "Log it after the step: a parameter group has the number then"
_SCHEDULED = "Call scheduler.step() after the step: a replay reads the current rate"


class RateWatch:
    """A watch on learning rates, whose storages ``rates`` returns, and their copies. A step may copy one, to log it."""

    def __init__(self, trace: Trace, rates: Callable[[], Collection[int]]) -> None:
        self._trace = trace
        self._rates = rates
        self._seen: set[int | None] = set()

    def meet(self, storage: int) -> None:
        """Note a storage from outside that the step uses."""
        if storage in self._rates():
            self._seen.add(storage)

    def check(self, name: str, operands: Sequence[Tensor], results: Iterable[Tensor], source: Source) -> None:
        """Check an operator that has run."""
        if not self._seen or source.component == "optimizer" or self._seen.isdisjoint(map(storage_id, operands)):
            return
        if name in _COPIES:
            self._seen |= set(map(storage_id, results))
        else:
            fix = _SCHEDULED if is_run_by(SCHEDULERS) else _FIX
            self._refuse(f"computes with a learning rate at {source}", fix)

    def finish(self, after: Walk, returned: Iterable[object]) -> None:
        """Check the values that the step returned, and the owners' slots after the step."""
        rates = self._rates()
        if not rates:
            return
        if any(isinstance(value, Tensor) and storage_id(value) in rates for value in returned):
            self._refuse("returns a learning rate", f"{_LOGGED}. {_FIX}")
        known = {slot.path for storage in rates for slot in self._trace.entry_slots.get(storage, ())}
        for path, slot in after.slots.items():
            if path not in known and any(storage_id(tensor) in rates for tensor in slot.tensors()):
                self._refuse(f"keeps a learning rate in {path}", f"{_LOGGED}. {_FIX}")

    def _refuse(self, what: str, fix: str) -> None:
        text = (
            f"the step's own code {what}; expected only the optimizer to use the learning rate: it reads the rate "
            f"from the device, but a replay would freeze a number in other code. {fix}"
        )
        self._trace.refuse(LearningRateError(text, component="optimizer"))
