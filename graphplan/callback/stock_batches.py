"""Batches of a fit that Lightning trains on without graphplan."""

from __future__ import annotations

from typing import Any

from graphplan.errors import SkipReason
from graphplan.report.stats import Stats


class StockBatches:
    """Counts the batches before the seam is installed and after it was removed, from Lightning's own progress.
    ``reason`` tells why the current ones run without graphplan; None for those that are timed.
    """

    def __init__(self, trainer: Any = None) -> None:
        # Not the Trainer, which a callback must not keep.
        self._progress: Any = None
        self._optimizers: list[Any] = []
        if trainer is not None:
            loop = trainer.fit_loop.epoch_loop
            self._progress = loop.batch_progress.total
            automatic, manual = loop.automatic_optimization.optim_progress.optimizer, loop.manual_optimization
            self._optimizers = [automatic.step.total, manual.optim_step_progress.total]
        self._updates_before = self._updates()
        self._since: int | None = None
        self._past = Stats()
        self._detail = ""
        self.reason: SkipReason | None = None

    def _updates(self) -> int:
        return sum(progress.completed for progress in self._optimizers)

    @property
    def updates(self) -> int | None:
        """Steps of the Trainer's optimizers since the fit began; None without a Trainer."""
        return self._updates() - self._updates_before if self._optimizers else None

    def begin(self, reason: SkipReason | None, detail: str = "") -> None:
        """Count from the next batch on."""
        self.end()
        self._since, self.reason, self._detail = self._progress.ready, reason, detail

    def end(self) -> None:
        """Count no batch after the current one."""
        self._past, self._since = self.added_to(Stats()), None

    @property
    def count(self) -> int:
        """Batches since :meth:`begin`; 0 after :meth:`end`."""
        count: int = 0 if self._since is None else self._progress.ready - self._since
        return count

    def added_to(self, stats: Stats) -> Stats:
        """``stats`` with these batches among the eager ones."""
        total = Stats()
        total.merge(self._past)
        total.merge(stats)
        total.count_stock(self.count, self.reason, self._detail)
        return total
