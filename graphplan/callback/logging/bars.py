"""Progress bars that draw, and read device values, ten times a second at most. Values at an epoch's end are exact."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar

from graphplan.callback.lightning_code import is_known
from graphplan.callback.patches import Patches
from graphplan.environment.devices import is_accelerator

_INTERVAL = 0.1  # Seconds between two drawn updates, equal to tqdm's ``mininterval``.


class ThrottledBar:
    """Replaces the bar's ``_should_update`` if it is Lightning's, and ``get_metrics`` on an accelerator."""

    def __init__(self, trainer: Trainer, patches: Patches) -> None:
        self._trainer = trainer
        self._bar: Any = trainer.progress_bar_callback
        self._drawn, self._read = 0.0, 0.0
        self._metrics: dict[str, Any] = {}
        kind = type(self._bar)
        if getattr(kind, "_should_update", None) is TQDMProgressBar._should_update and is_known("bar"):
            patches.method(self._bar, "_should_update", self._should_update)
        on_device = is_accelerator(trainer.strategy.root_device)
        if on_device and isinstance(self._bar, ProgressBar) and "get_metrics" not in vars(self._bar):
            patches.method(self._bar, "get_metrics", self._get_metrics)

    def _get_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run in place of the bar's own method. Within an epoch, metrics may be up to a tenth of a second old."""
        connector: Any = self._trainer._logger_connector
        now = perf_counter()
        if connector._first_loop_iter is None or now - self._read >= _INTERVAL:
            self._metrics, self._read = type(self._bar).get_metrics(self._bar, *args, **kwargs), now
        return dict(self._metrics)

    def _should_update(self, current: int, total: int | None) -> bool:
        if not TQDMProgressBar._should_update(self._bar, current, total):  # type: ignore[arg-type]
            return False
        now = perf_counter()
        if current != total and now - self._drawn < _INTERVAL:
            # The next redraw shows this position.
            bar = self._bar.train_progress_bar if self._trainer.training else self._bar.val_progress_bar
            bar.n = current
            return False
        self._drawn = now
        return True
