"""The recipes' networks as LightningModules. They know nothing about graphs: the callback does all of that."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from recipes.networks import GPT as GPT
from recipes.networks import DigitsMLP as DigitsMLP
from recipes.schedules import Schedule, Update, adamw, cosine_schedule

Batch = tuple[Tensor, Tensor]


class Classifier(pl.LightningModule):
    """Trains a network whose last dimension scores classes, by cross-entropy, and logs loss and accuracy."""

    def __init__(self, network: nn.Module, update: Update, schedule: Schedule) -> None:
        super().__init__()
        self.network = network
        self.update = update
        self.schedule = schedule

    @override
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(x)
        return logits

    def _score(self, batch: Batch, stage: str, *, on_step: bool) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
        accuracy = (logits.argmax(-1) == y).float().mean()
        scores = {f"{stage}/loss": loss, f"{stage}/accuracy": accuracy}
        self.log_dict(scores, on_step=on_step, on_epoch=True, batch_size=x.shape[0])
        return loss

    @override
    def training_step(self, batch: Batch) -> Tensor:
        return self._score(batch, "train", on_step=True)

    @override
    def validation_step(self, batch: Batch) -> None:
        self._score(batch, "val", on_step=False)

    @override
    def predict_step(self, batch: Batch) -> dict[str, Tensor]:
        """The most likely class of everything in the batch, and whether that is right."""
        x, y = batch
        predicted = self(x).argmax(-1)
        return {"predicted": predicted, "correct": predicted == y}

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.update(self.parameters())
        schedule = self.schedule(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class DigitsClassifier(Classifier):
    """Classifies the 8x8 digits with an MLP that has batch norm and dropout."""

    def __init__(
        self,
        *,
        width: int = 128,
        depth: int = 2,
        dropout: float = 0.1,
        update: Update = adamw,
        schedule: Schedule = cosine_schedule,
    ) -> None:
        super().__init__(DigitsMLP(width=width, depth=depth, dropout=dropout), update, schedule)


class CharGPT(Classifier):
    """Predicts the next character of a text with a small GPT."""

    def __init__(
        self,
        *,
        block_size: int = 64,
        layers: int = 2,
        heads: int = 4,
        width: int = 64,
        dropout: float = 0.0,
        update: Update = adamw,
        schedule: Schedule = cosine_schedule,
    ) -> None:
        network = GPT(block_size=block_size, layers=layers, heads=heads, width=width, dropout=dropout)
        super().__init__(network, update, schedule)
