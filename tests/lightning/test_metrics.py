"""Metrics of torchmetrics that are updated in the training step, as most templates have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import classification

from tests.lightning.measured import METRICS, measured
from tests.lightning.parts import assert_fit_equals_eager, fit, tape


@pytest.mark.parametrize("name", METRICS)
def test_metrics_in_the_step(name: str, tmp_path: Path) -> None:
    """A metric and a mean of the loss, logged in each step and for the epoch."""
    found = assert_fit_equals_eager(measured(name), tmp_path, replayed=15, max_epochs=3)
    assert found.callback.plan.branches


def test_metrics_that_are_logged_again_move_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning has each logged metric moved to its device, with all its attributes, in each step."""
    moved: list[str] = []
    move = _ResultMetric.to
    monkeypatch.setattr(_ResultMetric, "to", lambda self, *args: (moved.append(self.meta.name), move(self, *args))[1])
    found = fit(measured("accuracy"), tmp_path, tape(), max_epochs=3)
    assert found.callback.stats.replayed >= 15
    assert moved.count("metric") <= len(found.observer.batches) - found.callback.stats.replayed


def test_another_metric_under_a_name_is_logged_by_lightning(tmp_path: Path) -> None:
    """The second half of the steps logs another one, as Lightning allows."""

    class Changing(measured("accuracy")):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.other = classification.MulticlassAccuracy(10, average="micro")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            logits = self(x)
            metric = self.metric if self.global_step < 14 else self.other
            metric(logits, y)
            self.log("metric", metric, on_step=True, on_epoch=True, metric_attribute="metric")
            return F.cross_entropy(logits, y)

    assert_fit_equals_eager(Changing, tmp_path, replayed=8, max_epochs=3)
