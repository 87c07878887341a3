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
        self._progress: Any = None if trainer is None else trainer.fit_loop.epoch_loop.batch_progress.total
        self._since: int | None = None
        self._past = Stats()
        self._detail = ""
        self.reason: SkipReason | None = None

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
