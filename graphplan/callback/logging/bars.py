"""Progress bars: drawn ten times a second, with the latest numbers that have arrived from the device.

Lightning's ``TQDMProgressBar`` writes two lines to the terminal after every ``refresh_rate`` batches, one by default,
which takes longer than a small replay. A bar that reads its numbers after every batch gets those that arrived last.
They lag behind by what the device has yet to do. At an epoch's end, and where a bar reads them now and then, they are
exact.
"""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector

from graphplan.callback.lightning_code import is_known
from graphplan.callback.logging.connector import LazyConnector
from graphplan.callback.logging.late_numbers import LaggingNumbers
from graphplan.callback.patches import InstancePatch, Recover

_INTERVAL = 0.1
"""Seconds between two drawn updates, as tqdm's own ``mininterval``."""
_SLOW_START = 64
"""The first updates of a bar, which are all drawn: short runs are looked at batch by batch."""


class LazyNumbers:
    """Gives the Trainer's logger connector the class :class:`LazyConnector`, unless it has one of the user's own, and
    notes which bars read their numbers after every batch.
    """

    def __init__(self, trainer: Trainer, recover: Recover) -> None:
        self._trainer, self.recover = trainer, recover
        self._connector: Any = trainer._logger_connector
        self._numbers = LaggingNumbers()
        self._asked = -1
        bars = [callback for callback in getattr(trainer, "callbacks", []) if isinstance(callback, ProgressBar)]
        bars = [bar for bar in bars if "get_metrics" not in vars(bar)]
        self._patches = [InstancePatch(bar, "get_metrics", partial(self._ask, bar)) for bar in bars]

    def install(self) -> None:
        """Put it in."""
        if type(self._connector) is _LoggerConnector and is_known("logs"):
            self._connector.__class__ = LazyConnector
            vars(self._connector)["recover"] = self.recover
            for patch in self._patches:
                patch.install()

    def remove(self) -> None:
        """Fill the dictionaries of metrics, and give the connector its class back."""
        for patch in self._patches:
            patch.remove()
        if isinstance(self._connector, LazyConnector):
            self._connector.settle()
            self._connector._progress_bar_metrics = convert_tensors_to_scalars(self._connector._progress_bar_metrics)
            del vars(self._connector)["recover"]
            self._connector.__class__ = _LoggerConnector  # type: ignore[assignment]

    def _ask(self, bar: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of a bar's ``get_metrics``."""
        batch = self._trainer.fit_loop.epoch_loop.total_batch_idx
        asks_always = batch - self._asked <= 1 and self._connector._first_loop_iter is not None
        self._asked = batch
        if not asks_always:
            return type(bar).get_metrics(bar, *args, **kwargs)
        self._connector.lagging = self._numbers
        try:
            return type(bar).get_metrics(bar, *args, **kwargs)
        finally:
            vars(self._connector).pop("lagging", None)


class ThrottledBar:
    """Replaces ``_should_update`` of the Trainer's bar, unless the bar overrides it.

    An update that is not drawn still sets the bar's count, so that whatever draws the bar next shows where it is.

    Attributes:
        patches: to be installed; none for a bar that overrides the method.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._bar: Any = trainer.progress_bar_callback
        bar = self._bar
        known = isinstance(bar, TQDMProgressBar) and type(bar)._should_update is TQDMProgressBar._should_update
        self.patches = [InstancePatch(bar, "_should_update", self._should_update)] if known and is_known("bar") else []
        self._asked = 0
        self._drawn = 0.0

    def _should_update(self, current: int, total: int | None) -> bool:
        if not TQDMProgressBar._should_update(self._bar, current, total):  # type: ignore[arg-type]
            return False
        self._asked += 1
        now = perf_counter()
        if self._asked > _SLOW_START and current != total and now - self._drawn < _INTERVAL:
            bar = self._bar.train_progress_bar if self._trainer.training else self._bar.val_progress_bar
            bar.n = current
            return False
        self._drawn = now
        return True

    def rests(self, batch_idx: int) -> bool:
        """Return True if no update is due after this training batch: the bar's hook need not be called."""
        if self._asked <= _SLOW_START or perf_counter() - self._drawn >= _INTERVAL:
            return False
        bar, current = self._bar, batch_idx + 1
        if current == bar.train_progress_bar.total:
            return False
        if bar.is_enabled and current % bar.refresh_rate == 0:
            bar.train_progress_bar.n = current
        return True
