"""Device-to-host copies for loggers, without host synchronization. Loggers get a step's row in one of the next steps.
Any other logged row, and each use of a logger's ``experiment``, first waits for the pending rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from graphplan.callback.patches import Patches
from graphplan.environment.devices import current_stream, is_accelerator, module_of
from graphplan.feed.call_arguments import hands_over
from graphplan.tensors.attributes import PLAIN_KINDS

_MOST = 2  # Maximum number of pending rows.

_ROWS: WeakKeyDictionary[Any, PendingRows] = WeakKeyDictionary()  # Pending rows by logger. A copy of a logger has none.


class AsyncHostCopy:
    """An asynchronous copy of ``tensor`` to host memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        if not is_accelerator(tensor.device):
            self._host = tensor.detach().to("cpu", copy=True)
            return
        # The copy is in pinned memory.
        self._host = tensor.detach().to("cpu", non_blocking=True)
        self._event = module_of(tensor.device).Event()
        self._event.record(current_stream(tensor.device))

    def has_arrived(self) -> bool:
        """Return True if the copy has completed."""
        return self._event is None or self._event.query()

    def wait(self) -> Tensor:
        """Wait for the copy and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def _late(kind: Any) -> Any:
    """Return the property ``experiment`` of the logger class ``kind``, which now writes the pending rows first."""

    def experiment(self: Any) -> Any:
        if self in _ROWS:
            _ROWS[self].settle()
        return kind.experiment.fget(self)

    return property(experiment)


class LateCSVLogger(CSVLogger):
    """The class of a ``CSVLogger`` with pending rows."""

    experiment = _late(CSVLogger)


class LateTensorBoardLogger(TensorBoardLogger):
    """The class of a ``TensorBoardLogger`` with pending rows."""

    experiment = _late(TensorBoardLogger)


_KINDS: dict[type, type] = {CSVLogger: LateCSVLogger, TensorBoardLogger: LateTensorBoardLogger}


class _Row(NamedTuple):
    loggers: list[Any]
    metrics: dict[str, Any]
    numbers: AsyncHostCopy
    step: int


class PendingRows:
    """The pending rows of one fit, for Lightning's ``CSVLogger`` and ``TensorBoardLogger``."""

    def __init__(self, trainer: Trainer, patches: Patches) -> None:
        self._trainer = trainer
        self.pending: deque[_Row] = deque()
        for logger in trainer.loggers:
            late = _KINDS.get(type(logger))
            if late is not None:
                _ROWS[logger] = self
                patches.callback(_ROWS.pop, logger)
                patches.kind(logger, late)

    def settle(self) -> None:
        """Write all pending rows."""
        while self.pending:
            self._write()

    def end(self) -> None:
        """Write all pending rows. Suppress errors of the loggers: earlier writes have raised them."""
        while self.pending:
            with suppress(Exception):
                self.settle()

    def take(self, metrics: Mapping[str, Any]) -> bool:
        """Start the copy of a step's row for all loggers. Return False if the row has to be written at once."""
        values, loggers = list(metrics.values()), list(self._trainer.loggers)
        is_plain = all(type(v) in PLAIN_KINDS and v.numel() == 1 and v.is_floating_point() for v in values)
        if not values or not is_plain or len({value.device for value in values}) > 1:
            return False
        if "step" in metrics or not all(logger in _ROWS for logger in loggers):
            return False
        if len(self.pending) >= _MOST:
            self._write()
        # In float64, each value equals the number that ``item()`` would give.
        numbers = AsyncHostCopy(torch.stack([value.detach().reshape(()).double() for value in values]))
        epoch, step = self._trainer.current_epoch, self._trainer.fit_loop.epoch_loop._batches_that_stepped
        self.pending.append(_Row(loggers, {**metrics, "epoch": metrics.get("epoch", epoch)}, numbers, step))
        return True

    def look(self) -> None:
        """Write the rows whose numbers have arrived."""
        while self.pending and self.pending[0].numbers.has_arrived():
            self._write()

    def _write(self) -> None:
        """Wait for the numbers of the oldest row, and log it as Lightning does."""
        row, scalars = self.pending.popleft(), dict[str, float]()
        try:
            # If the step did not log ``epoch``, it comes last and is not among the copied numbers.
            scalars = dict(zip(row.metrics, row.numbers.wait().tolist(), strict=False))
        finally:
            self._hand_out(row, {**row.metrics, **scalars})

    @hands_over
    def _hand_out(self, row: _Row, scalars: dict[str, Any]) -> None:
        later, self.pending = self.pending, deque()
        try:
            for logger in row.loggers:
                logger.log_metrics(metrics=scalars, step=row.step)
                logger.save()
        finally:
            self.pending.extend(later)
