"""``self.log`` inside a step: noted while the step runs, carried out after it.

Lightning's result collection rebinds its metric states on every log, which a replay could not repeat on the host. So
while a managed step runs, the collection's ``log`` and ``reset`` are replaced on the instance; the logged tensors leave
the step as outputs, and after it (eager, captured or replayed alike) each call is made for real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor


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

        def log(fx: str, name: str, value: Any, **options: Any) -> None:
            if isinstance(value, Tensor) and value.dtype is torch.float64 and not self._in_double:
                # A learning rate that the step reads is a float64 device tensor; as a Python float it would have been
                # logged in the default dtype.
                value = value.to(torch.get_default_dtype())
            notes.append((LogCall(fx, name, tuple(options.items())), value))

        results.log = log
        results.reset = lambda *args, **kwargs: None
        try:
            yield notes
        finally:
            del results.log, results.reset

    def last_hook(self) -> str | None:
        """Lightning's note of the hook that logged last, which decides whether an epoch's first log resets."""
        return self._trainer._logger_connector._current_fx

    def carry_out(self, notes: Sequence[tuple[LogCall, Any]], last_hook: str | None) -> None:
        """Log for real, with the resets that ``LightningModule.log`` would have made."""
        connector: Any = self._trainer._logger_connector
        results: Any = self._trainer._results
        connector._current_fx = last_hook
        for call, value in notes:
            if connector.should_reset_tensors(call.fx):
                results.reset(metrics=False, fx=call.fx)
            results.log(call.fx, call.name, value, **dict(call.options))
            connector._current_fx = call.fx


def with_logs(notes: LogNotes, body: Callable[[], Any]) -> dict[str, Any]:
    """``body``'s result and what it logged, as one pytree."""
    with notes.noting() as noted:
        result = body()
    return {"result": result, "logs": noted}
