"""Modules that update metrics of torchmetrics in the training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torchmetrics
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import classification

from tests.lightning.parts import LitDigits

METRICS: dict[str, Callable[[], Any]] = {
    "accuracy": lambda: classification.MulticlassAccuracy(10),
    "a collection": lambda: torchmetrics.MetricCollection(
        [classification.MulticlassF1Score(10), classification.MulticlassRecall(10)]
    ),
    "of predicted classes": lambda: classification.MulticlassAccuracy(10),
    "among three": lambda: classification.MulticlassAccuracy(10, top_k=3),
    "a confusion matrix": lambda: classification.MulticlassCohenKappa(10),
    "unvalidated": lambda: classification.MulticlassJaccardIndex(10, validate_args=False),
}


def measured(name: str) -> type[LitDigits]:
    """A module with the metric of that name, a mean of the loss, and the largest logit."""

    class Measured(LitDigits):
        def __init__(self) -> None:
            super().__init__()
            self.metric, self.mean, self.largest = METRICS[name](), torchmetrics.MeanMetric(), torchmetrics.MaxMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            logits = self(x)
            loss = F.cross_entropy(logits, y)
            self.mean(loss)
            self.metric(logits.argmax(1) if name == "of predicted classes" else logits, y)
            self.largest.update(logits)
            self.log("loss", self.mean, on_step=True, on_epoch=True)
            if isinstance(self.metric, torchmetrics.MetricCollection):
                self.log_dict(self.metric, on_step=False, on_epoch=True)
            else:
                self.log("metric", self.metric, on_step=True, on_epoch=True)
            self.log("largest", self.largest, on_epoch=True)
            return loss

    return Measured
