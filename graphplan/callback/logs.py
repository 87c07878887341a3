"""``self.log`` inside a step: noted while the step runs, carried out after it.

Lightning's result collection rebinds its metric states on every log, which a replay could not repeat on the host. So
while a managed step runs, the collection only notes what is logged; the logged tensors leave the step as outputs, and
after it (eager, captured or replayed alike) each call is made for real. Where the step itself reads the collection, the
calls noted so far are made at once, so that it reads what it has logged, and a trace is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor

from graphplan.errors import HostSyncError
from graphplan.tracer import find_source, refuse_trace


@dataclass(frozen=True)
class LogCall:
    """One call of the result collection's ``log`` without its value."""

    fx: str
    name: str
    options: tuple[tuple[str, Any], ...]

    def __repr__(self) -> str:
        return f"self.log({self.name!r}) in {self.fx}"


class LogNotes:
    """Notes the log calls of one step, and carries out a step's notes."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        tensors = trainer.lightning_module.state_dict().values()
        self._in_double = any(isinstance(t, Tensor) and t.dtype is torch.float64 for t in tensors)

    @contextmanager
    def noting(self) -> Iterator[list[tuple[LogCall, Any]]]:
        """Collect ``(call, value)`` pairs instead of logging."""
        results: Any = self._trainer._results
        notes: list[tuple[LogCall, Any]] = []
        if results is None:
            yield notes
            return

        def note(fx: str, name: str, value: Any, **options: Any) -> None:
            if isinstance(value, Tensor) and value.dtype is torch.float64 and not self._in_double:
                # A learning rate that the step reads is a float64 device tensor; as a Python float it would have been
                # logged in the default dtype.
                value = value.to(torch.get_default_dtype())
            notes.append((LogCall(fx, name, tuple(options.items())), value))

        def log_now() -> None:
            refuse_trace(
                HostSyncError,
                f"the step reads logged metrics at {find_source()}; a replay would not read them again. Move that code "
                "to on_train_batch_end",
            )
            results.__class__ = _ResultCollection
            try:
                self.carry_out(notes)
            finally:
                results.__class__ = _NotingResults
            notes.clear()

        results.note, results.log_now = note, log_now
        results.__class__ = _NotingResults
        try:
            yield notes
        finally:
            results.__class__ = _ResultCollection
            del results.note, results.log_now

    def start(self) -> None:
        """Keep Lightning's note of the hook that logged last: it decides whether an epoch's first log resets."""
        self._last_hook: str | None = self._trainer._logger_connector._current_fx

    def carry_out(self, notes: list[tuple[LogCall, Any]]) -> None:
        """Log for real, with the resets that ``LightningModule.log`` would have made."""
        connector: Any = self._trainer._logger_connector
        results: Any = self._trainer._results
        connector._current_fx = self._last_hook
        for call, value in notes:
            if connector.should_reset_tensors(call.fx):
                results.reset(metrics=False, fx=call.fx)
            results.log(call.fx, call.name, value, **dict(call.options))
            connector._current_fx = self._last_hook = call.fx


class _NotingResults(_ResultCollection):
    """The class of a result collection while a managed step runs."""

    note: Callable[..., None]
    log_now: Callable[[], None]

    def log(self, fx: str, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Note it."""
        self.note(fx, name, value, *args, **options)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Nothing: resets come with the calls that are made later."""


def _reading(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def method(self: _NotingResults, *args: Any) -> Any:
        self.log_now()
        return plain(self, *args)

    method.__name__ = name
    return method


for _name in ("__contains__", "__getitem__", "__iter__", "__len__", "get", "items", "keys", "values"):
    setattr(_NotingResults, _name, _reading(_name))


def with_logs(notes: LogNotes, body: Callable[[], Any]) -> dict[str, Any]:
    """``body``'s result and what it logged, as one pytree."""
    with notes.noting() as noted:
        result = body()
    return {"result": result, "logs": noted}
