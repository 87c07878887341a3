"""Rows for the loggers, written when their numbers have arrived from the device, and not by waiting for them.

Every ``log_every_n_steps`` steps Lightning turns what was logged into numbers, one after the other, and hands them to
the loggers, which write files: the device has nothing to do from the moment that the host asks until the host is back
in the loop. Here the numbers are sent, and the loggers get them in one of the next steps. They get the same rows in the
same order: whatever else is logged, and whoever wants to have to do with a logger's writer, comes after the rows on
their way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from graphplan.callback.logging.async_copies import SentNumbers
from graphplan.feed.call_arguments import hands_over

_MOST = 2
"""Rows on their way at a time."""
_ROWS: WeakKeyDictionary[Any, LateRows] = WeakKeyDictionary()
"""Whose rows come late, by logger. A logger's copy is not among them."""


def _late(kind: Any) -> Any:
    """``experiment`` of loggers of that kind, before which the rows on their way are written."""

    def experiment(self: Any) -> Any:
        if self in _ROWS:
            _ROWS[self].settle()
        return kind.experiment.fget(self)

    return property(experiment)


class LateCSVLogger(CSVLogger):
    """The class of a ``CSVLogger`` while its rows may come late."""

    experiment = _late(CSVLogger)


class LateTensorBoardLogger(TensorBoardLogger):
    """The class of a ``TensorBoardLogger`` while its rows may come late."""

    experiment = _late(TensorBoardLogger)


_KINDS: dict[type, type] = {CSVLogger: LateCSVLogger, TensorBoardLogger: LateTensorBoardLogger}


class _Row(NamedTuple):
    loggers: list[Any]
    metrics: dict[str, Any]
    sent: SentNumbers
    step: int


class LateRows:
    """The rows of one fit. ``install`` and ``remove`` are inverse."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.on_their_way: deque[_Row] = deque()
        self._kinds: dict[Any, type] = {}

    def install(self) -> None:
        """Have those of the Trainer's loggers that are Lightning's own take rows late."""
        for logger in self._trainer.loggers:
            kind = type(logger)
            if kind in _KINDS:
                self._kinds[logger], _ROWS[logger] = kind, self
                logger.__class__ = _KINDS[kind]

    def remove(self) -> None:
        """Write what is on its way, and give the loggers their classes back."""
        while self.on_their_way:
            # What fails here has failed before, and was told then.
            with suppress(Exception):
                self._write()
        for logger, kind in self._kinds.items():
            del _ROWS[logger]
            logger.__class__ = kind
        self._kinds = {}

    def take(self, metrics: Mapping[str, Any]) -> bool:
        """Send the row of a step to all loggers; False if it cannot come late."""
        tensors = {name: value for name, value in metrics.items() if isinstance(value, Tensor)}
        loggers = list(self._trainer.loggers)
        plain = 0 < len(tensors) == len(metrics) and all(value.numel() == 1 for value in tensors.values())
        if not plain or "step" in metrics or not all(logger in _ROWS for logger in loggers):
            return False
        if len(self.on_their_way) >= _MOST:
            self._write()
        epoch, step = self._trainer.current_epoch, self._trainer.fit_loop.epoch_loop._batches_that_stepped
        row = {**metrics, "epoch": metrics.get("epoch", epoch)}
        self.on_their_way.append(_Row(loggers, row, SentNumbers(tensors), step))
        return True

    def look(self) -> None:
        """Write the rows that have arrived."""
        while self.on_their_way and self.on_their_way[0].sent.has_arrived():
            self._write()

    def settle(self) -> None:
        """Write all rows that are on their way."""
        while self.on_their_way:
            self._write()

    def _write(self) -> None:
        """What Lightning does with the oldest row, once its numbers are there."""
        row, scalars = self.on_their_way.popleft(), {}
        try:
            scalars = row.sent.numbers()
        finally:
            self._hand_out(row, {**row.metrics, **scalars})

    @hands_over
    def _hand_out(self, row: _Row, scalars: dict[str, Any]) -> None:
        later, self.on_their_way = self.on_their_way, deque()
        try:
            for logger in row.loggers:
                logger.log_metrics(metrics=scalars, step=row.step)
                logger.save()
        finally:
            self.on_their_way.extend(later)
