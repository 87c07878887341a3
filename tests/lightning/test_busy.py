"""Fits whose steps wait with their programs, since the device is busy all the time. The device is made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.optim import AdamW

from graphplan import SkipReason
from tests.devices import pretend
from tests.lightning.parts import assert_same_fits, fit, tape
from tests.lightning.test_evaluation import Evaluated
from tests.twins import BEFORE_REPLAY

EPOCHS, BATCHES, CHECKED = 6, 20, 2
CALLS = EPOCHS * BATCHES
OPTIONS: dict[str, Any] = {"sizes": [20] * BATCHES, "max_epochs": EPOCHS, "num_sanity_val_steps": 0}
WARM = 3
LOOKED_AT = 4


class Flags(Evaluated):
    """Notes in each training step whether the optimizer is to run fused kernels."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.are_fused: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.are_fused.append(bool(self.optimizers(use_pl_optimizer=False).param_groups[0]["fused"]))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("idle", [0.0, 1.0])
def test_validation_neither_waits_nor_has_to_do_with_training_that_does(
    idle: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its programs come at once, optimizers are training's, and nobody drops anybody's program."""
    pretend(monkeypatch, idle)
    found = fit(
        lambda: Flags(make_optimizer=AdamW),
        tmp_path,
        tape(min_speedup=1.0, eval=True, allow=("model.are_fused",)),
        **OPTIONS,
    )
    stats, evaluated = found.callback.stats, found.callback.eval_stats
    assert (evaluated.captured, evaluated.recaptured, evaluated.replayed) == (1, 0, EPOCHS * CHECKED - BEFORE_REPLAY)
    assert evaluated.skipped == {}
    waits = LOOKED_AT if idle else CALLS - WARM
    assert stats.skipped == {SkipReason.BUSY: waits}, found.callback.report()
    # A warm-up step more, and the traces and the capture.
    assert (stats.captured, stats.recaptured, stats.replayed) == (
        (1, 0, CALLS - WARM - waits - 4) if idle else (0, 0, 0)
    )
    prepared = WARM + LOOKED_AT
    after = found.module.are_fused[prepared:]
    assert found.module.are_fused[:prepared] == [True] * prepared
    assert after == [bool(idle)] * len(after)


def test_a_fit_that_waits_is_the_fit_without_the_callback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Waits begin, end after nine steps, and validation is replayed meanwhile."""
    pretend(monkeypatch, *[0.0] * 3, 1.0)
    expected = fit(Evaluated, tmp_path / "eager", **OPTIONS)
    found = fit(Evaluated, tmp_path / "graphed", tape(min_speedup=1.0, eval=True), **OPTIONS)
    assert_same_fits(expected, found)
    assert found.callback.stats.skipped == {SkipReason.BUSY: 9}
    assert found.callback.stats.replayed == CALLS - WARM - 9 - 4
    assert found.callback.eval_stats.replayed == EPOCHS * CHECKED - BEFORE_REPLAY
