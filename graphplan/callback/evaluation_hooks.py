"""Lightning's hooks around validation, test and prediction: they all begin and end alike."""

from __future__ import annotations

from abc import abstractmethod

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class EvaluationHooks(Callback):
    """A callback that does something when an evaluation starts, and something when it ends."""

    @abstractmethod
    def _start_evaluation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An evaluation starts."""

    @abstractmethod
    def _end_evaluation(self, trainer: Trainer) -> None:
        """An evaluation ends."""

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the seam of evaluation."""
        self._start_evaluation(trainer, pl_module)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the seam of evaluation."""
        self._start_evaluation(trainer, pl_module)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the seam of evaluation."""
        self._start_evaluation(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the seam of evaluation, except in a fit."""
        self._end_evaluation(trainer)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the seam of evaluation."""
        self._end_evaluation(trainer)

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the seam of evaluation."""
        self._end_evaluation(trainer)
