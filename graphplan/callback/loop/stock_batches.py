"""Batches of a fit that Lightning trains on alone: before the seam is installed, and after it was taken out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphplan.callback.loop.seam import Figures
from graphplan.errors import SkipReason
from graphplan.report.stats import Stats


class StockBatches:
    """Counts such batches by Lightning's own progress, without a look at each.

    Attributes:
        reason: why the current ones are not graphplan's; None for those that are timed.
    """

    def __init__(self, trainer: Any = None) -> None:
        # Not the Trainer, which a callback must not keep.
        self._progress: Any = None if trainer is None else trainer.fit_loop.epoch_loop.batch_progress.total
        self._since: int | None = None
        self._past = Stats()
        self._detail = ""
        self.reason: SkipReason | None = None

    def begin(self, reason: SkipReason | None, detail: str = "") -> None:
        """From the next batch on, Lightning is alone."""
        self._since, self.reason, self._detail = self._begun(), reason, detail

    def end(self) -> None:
        """The current batch was the last one."""
        self._past, self._since = self._counted(), None

    @property
    def count(self) -> int:
        """Batches since :meth:`begin`; 0 after :meth:`end`."""
        return 0 if self._since is None else self._begun() - self._since

    def _begun(self) -> int:
        begun: int = self._progress.ready
        return begun

    def _counted(self) -> Stats:
        stats = Stats()
        stats.merge(self._past)
        if self.count:
            stats.eager += self.count
            if self.reason is not None:
                stats.skip(self.reason, self._detail, self.count)
        return stats

    def added_to(self, figures: Figures) -> Figures:
        """``figures`` with these batches among the eager ones."""
        stats = Stats()
        stats.merge(figures.stats)
        stats.merge(self._counted())
        return replace(figures, stats=stats)
