"""Optimizers that stay outside the replay: forward, backward and clipping are replayed, their step is eager."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from torch.optim import LBFGS, AdamW, NAdam, Optimizer, RMSprop

from tests.lightning.endings import assert_nothing_installed
from tests.lightning.parts import (
    LitDigits,
    assert_fit_equals_eager,
    assert_same_fits,
    fit,
    tape,
)

AFTER_THE_SWITCH = 18
"""Replays of three epochs: 27 full batches, three of them before the switch and six of the new program's own."""
COMPONENTS: dict[str, Callable[..., Optimizer]] = {
    "RMSprop": partial(RMSprop, lr=1e-3, momentum=0.5),
    "NAdam": partial(NAdam, lr=3e-3),
}


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", COMPONENTS)
def test_an_optimizer_that_stays_eager(name: str, clip: float | None, tmp_path: Path) -> None:
    """Forward, backward and clipping are replayed, the optimizer steps eagerly after them, and the report says why."""
    make = partial(LitDigits, COMPONENTS[name])
    found = assert_fit_equals_eager(make, tmp_path, replayed=AFTER_THE_SWITCH, gradient_clip_val=clip)
    report = found.callback.report()
    assert name in report and "optimizer" in report


def test_lbfgs(tmp_path: Path) -> None:
    """An optimizer that evaluates its closure again and again: each evaluation is a replay, the update is eager."""
    make = partial(LitDigits, partial(LBFGS, lr=0.1, max_iter=2), schedule=None)
    expected = fit(make, tmp_path / "eager")
    found = fit(make, tmp_path / "graphed", tape())
    assert_same_fits(expected, found)
    assert_nothing_installed(found.trainer, found.module)
    assert found.callback.stats.replayed == 2 * 27 - 6
    assert "LBFGS" in found.callback.report()


def test_unprepared_optimizers_go_the_component_way(tmp_path: Path) -> None:
    """With ``prepare_optimizers=False`` a stock AdamW is left alone: only its own step runs eagerly."""
    make, unprepared = partial(LitDigits, partial(AdamW, lr=3e-3)), tape(prepare_optimizers=False)
    found = assert_fit_equals_eager(make, tmp_path, replayed=AFTER_THE_SWITCH, callback=unprepared)
    assert "AdamW" in found.callback.report()
