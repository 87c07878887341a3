"""Seams whose steps are made anew when the Trainer gets other optimizers in the middle of a fit.

A program reads the optimizers that it was captured with, and in training writes to their state. So when the Trainer has
others, the steps so far are closed, with their memory, and new ones are made; what was counted goes on.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import Any

from typing_extensions import override

from graphplan.callback.loop.seam import Figures, Seam
from graphplan.errors import FeedError, RecaptureError, RefusalError, SkipReason
from graphplan.report.stats import Stats

_PAYS = 16
"""Replays after which optimizers have stayed for long enough: fewer count against ``max_recaptures``."""


class RenewingSeam(Seam):
    """A seam that is told, before a step, that the Trainer has other optimizers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._past = Figures()
        self._unpaid = 0
        self._refused: RecaptureError | None = None
        self._fetches: FeedError | None = None

    @abstractmethod
    def _begin(self) -> None:
        """Make the steps, for the optimizers that the Trainer has now."""

    @abstractmethod
    def _end(self) -> None:
        """Forget the steps, and the optimizers that they are for."""

    @property
    @override
    def figures(self) -> Figures:
        """With those of steps for the optimizers before."""
        now, past = super().figures, self._past
        stats = Stats()
        stats.merge(past.stats)
        stats.merge(now.stats)
        stats.bytes_verified = max(past.stats.bytes_verified, now.stats.bytes_verified)
        return Figures(stats, past.plans + now.plans, [*dict.fromkeys((*past.notes, *now.notes))], now.plan)

    @override
    def _must_raise(self) -> bool:
        return super()._must_raise() and self._past.stats.replayed == 0

    def _renew(self) -> bool:
        """The Trainer has other optimizers. Whether there are steps for them now; if not, this one counts as eager.

        Raises:
            RecaptureError: if that happens too often, and no step was ever replayed.
        """
        if self._refused is None:
            self._check_churn()
            self._past = self.figures
            # A plan keeps tensors.
            self._past.plan, self._past.stats.bytes_static = None, 0
            for step in self._steps:
                step.close()
            self._steps, self._counters, self.notes, self._context = [], [], [], None
            self._end()
        if self._refused is not None:
            self._count(self._refused)
            self._give_up(self._refused.reason, str(self._refused))
            return False
        if self._options.backend != "eager":
            self._past.stats.note("another optimizer: the step is captured anew")
        self._begin()
        return True

    def _count(self, error: RefusalError) -> None:
        """Count a step that is eager because of ``error``, and not through one of the graphed steps."""
        self._past.stats.eager += 1
        if self._options.backend == "eager":
            self._past.stats.skip(SkipReason.BACKEND_EAGER)
        else:
            self._past.stats.skip(error.reason, str(error))

    def _refuse_fetching(self) -> None:
        """Count a step that takes its batches from the loader itself: nothing is known of them before it runs.

        Raises:
            FeedError: if no step was ever replayed, and the user wants to know.
        """
        if self._fetches is None:
            error = FeedError(
                "training_step takes dataloader_iter and fetches its batches itself, so that nothing could be copied "
                "to where a replay reads. Expected a step that is given its batch: take batch in training_step, "
                "def training_step(self, batch, batch_idx)"
            )
            self._tell(error)
            self._fetches = error
        self._count(self._fetches)
        if self._options.backend != "eager":
            self._give_up(self._fetches.reason, str(self._fetches))

    def _tell(self, error: RefusalError) -> None:
        """Raise, or say once that steps are eager."""
        if self._options.backend == "eager":
            return
        if self._must_raise():
            raise error
        warnings.warn(f"graphplan runs this step eagerly: {error}", UserWarning, stacklevel=5)

    def _check_churn(self) -> None:
        """Count optimizers that did not stay for long enough, where nothing else keeps training eager."""
        stats, most = super().figures.stats, self._options.max_recaptures
        is_eager = self._options.backend == "eager" or stats.skipped.keys() - {SkipReason.SHAPE}
        if is_eager or self._options.mode != "train":
            return
        self._unpaid = self._unpaid + 1 if stats.replayed < _PAYS else 0
        if self._unpaid < most:
            return
        error = RecaptureError(
            f"the Trainer got another optimizer {most} times in a row after fewer than {_PAYS} replays each, and the "
            "step has to be captured anew each time. Expected an optimizer to stay for a while. Keep it, and change "
            f"its groups or load a state into it (optimizer.load_state_dict), or raise max_recaptures (now {most})"
        )
        self._tell(error)
        self._refused = error
