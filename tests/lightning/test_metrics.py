"""Metrics of torchmetrics that are updated in the training step, as most templates have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lightning.measured import METRICS, measured
from tests.lightning.parts import assert_fit_equals_eager


@pytest.mark.parametrize("name", METRICS)
def test_metrics_in_the_step(name: str, tmp_path: Path) -> None:
    """A metric and a mean of the loss, logged in each step and for the epoch."""
    found = assert_fit_equals_eager(measured(name), tmp_path, replayed=15, max_epochs=3)
    assert found.callback.plan.branches
