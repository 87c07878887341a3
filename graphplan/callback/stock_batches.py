"""Counts of the batches that Lightning trains on without graphplan."""

from __future__ import annotations

from typing import Any

from graphplan.errors import SkipReason
from graphplan.report.stats import Stats


class StockBatches:
    """Counts, from Lightning's progress, the batches before the seam is installed and after it is removed. ``reason``
    is why the current batches run without graphplan, or None while they are timed.
    """

    def __init__(self, trainer: Any = None) -> None:
        # A callback must not hold the Trainer, so keep only its progress.
        self._progress: Any = None if trainer is None else trainer.fit_loop.epoch_loop.batch_progress.total
        self._since: int | None = None
        self._past = Stats()
        self._detail = ""
        self.reason: SkipReason | None = None

    def begin(self, reason: SkipReason | None, detail: str = "") -> None:
        """Start to count with the next batch."""
        self.end()
        self._since, self.reason, self._detail = self._progress.ready, reason, detail

    def end(self) -> None:
        """Stop counting after the current batch."""
        self._past, self._since = self.added_to(Stats()), None

    @property
    def count(self) -> int:
        """Number of batches since :meth:`begin`; 0 after :meth:`end`."""
        count: int = 0 if self._since is None else self._progress.ready - self._since
        return count

    def added_to(self, stats: Stats) -> Stats:
        """Return ``stats`` with these batches counted as eager."""
        total = Stats()
        total.merge(self._past)
        total.merge(stats)
        total.count_stock(self.count, self.reason, self._detail)
        return total
