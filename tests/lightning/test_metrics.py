"""Metrics of torchmetrics that are updated in the training step, as most templates have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import classification

from graphplan import HostEffectError
from tests.lightning.measured import METRICS, measured
from tests.lightning.parts import LitDigits, assert_fit_equals_eager, assert_same_fits, fit, tape


@pytest.mark.crossed(2)
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


def test_a_metric_that_divides_where_a_mask_selects(tmp_path: Path) -> None:
    """R2Score divides by the sums of its outputs that are not zero. None is, and replays compare that."""

    class Regressing(LitDigits):
        def __init__(self) -> None:
            super().__init__()
            self.metric = torchmetrics.R2Score(multioutput="variance_weighted")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            logits = self(x)
            self.metric(logits[:, :2], torch.stack([y, y % 3], dim=1).float())
            self.log("metric", self.metric, on_step=True, on_epoch=True)
            return F.cross_entropy(logits, y)

    found = assert_fit_equals_eager(Regressing, tmp_path, replayed=15, max_epochs=3)
    assert any("raw_scores[cond]" in place for place in found.callback.plan.branches)


class Resetting(LitDigits):
    """Logs a metric, and resets it or updates it further in the same step."""

    further = False

    def __init__(self) -> None:
        super().__init__()
        self.metric = classification.MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.metric(logits, y)
        self.log("metric", self.metric, on_step=True, on_epoch=False)
        if self.further:
            self.metric(logits, y.flip(0))
        else:
            self.metric.reset()
        return F.cross_entropy(logits, y)


class Updating(Resetting):
    further = True


@pytest.mark.parametrize("make", [Resetting, Updating])
def test_a_metric_that_changes_after_it_was_logged(make: type[Resetting], tmp_path: Path) -> None:
    """Lightning logs the value of before. A replay could not tell."""
    text = r"self\.log\('metric'\) in training_step at test_metrics\.py.* gets a metric that the step updates or"
    with pytest.raises(HostEffectError, match=text):
        fit(make, tmp_path / "raise", tape(), max_epochs=1)
    expected = fit(make, tmp_path / "eager")
    with pytest.warns(UserWarning, match=text):
        found = fit(make, tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)
