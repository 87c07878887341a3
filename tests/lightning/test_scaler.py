"""``precision="16-mixed"`` in a Trainer: the scaled step and its clipping are replayed, or Lightning steps after it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.optim import SGD, AdamW, Optimizer, RMSprop

from tests.facts import assert_same
from tests.lightning.endings import assert_nothing_installed
from tests.lightning.parts import FUSED_ADAMW, Fit, LitDigits, assert_same_fits, fit, tape
from tests.test_gradient_scaler import prepared

BEFORE_REPLAY, STEPS = 6, 27
"""Batches before the first replay, and full batches of three epochs."""
FULL, AFTER_THE_SWITCH = STEPS - BEFORE_REPLAY, STEPS - BEFORE_REPLAY - 3
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": partial(AdamW, lr=3e-3),
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
}


class Scaled(LitDigits):
    """Keeps the scale after each batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scales: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def scaled_fit(
    make: Callable[..., Optimizer], folder: Path, callback: Any, *, scale: float = 2.0**14, **options: Any
) -> Fit:
    """A fit whose scale doubles after every two steps, until gradients overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    return fit(partial(Scaled, make, schedule=None), folder, callback, plugins=[plugin], **options)


def assert_scaled_fits(
    make: Callable[..., Optimizer], folder: Path, *, replayed: int, callback: Any = None, **options: Any
) -> Fit:
    """Fit twice, without and with the callback, and check that replayed steps grew the scale and were skipped."""
    expected = scaled_fit(make, folder / "eager", None, **options)
    found = scaled_fit(make, folder / "graphed", callback or tape(), **options)
    assert_same_fits(expected, found)
    assert found.module.scales == expected.module.scales
    late = found.module.scales[BEFORE_REPLAY:]
    changes = {b / a for a, b in pairwise(late)}
    assert changes == {0.5, 1.0, 2.0}
    assert found.callback.stats.replayed == replayed, found.callback.report()
    assert_nothing_installed(found.trainer, found.module)
    assert "_maybe_opt_step" not in vars(found.trainer.precision_plugin.scaler)
    return found


@pytest.mark.parametrize(("clip", "algorithm"), [(None, None), (0.5, "norm"), (0.01, "value")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stock_optimizer_is_replayed(name: str, clip: float | None, algorithm: Any, tmp_path: Path) -> None:
    """Lightning unscales, clips and steps as for any optimizer, and all of it is in the replay."""
    make = prepared(OPTIMIZERS[name])
    assert_scaled_fits(make, tmp_path, replayed=FULL, gradient_clip_val=clip, gradient_clip_algorithm=algorithm)


def test_an_optimizer_that_unscales_by_itself(tmp_path: Path) -> None:
    """``fused=True`` from the start."""
    assert_scaled_fits(FUSED_ADAMW, tmp_path, replayed=FULL)


CLIPPED: list[dict[str, Any]] = [
    {"gradient_clip_val": 0.5},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
]


@pytest.mark.parametrize("options", CLIPPED, ids=str)
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_a_fused_optimizer_is_clipped(precision: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """Lightning alone refuses it; the numbers are those of the same kernel where Lightning does not know of it."""

    def run(make: Callable[..., Optimizer], folder: Path, callback: Any) -> Fit:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2) if precision[0] == "1" else None
        plugin = MixedPrecision(precision, "cpu", scaler)
        return fit(partial(LitDigits, make, schedule=None), folder, callback, plugins=[plugin], **options)

    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        run(FUSED_ADAMW, tmp_path / "refused", None)
    expected = run(prepared(OPTIMIZERS["adamw"]), tmp_path / "eager", None)
    found = run(FUSED_ADAMW, tmp_path / "graphed", tape())
    told = lambda fit: {path: value for path, value in fit.state.items() if "fused" not in path}  # noqa: E731
    assert_same(told(expected), told(found))
    assert found.callback.stats.replayed > 5, found.callback.report()
    assert_nothing_installed(found.trainer, found.module)


def test_accumulated_gradients(tmp_path: Path) -> None:
    """Scaling is in every program, the scaler's step in that of the batch that steps."""
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": 5}
    assert_scaled_fits(prepared(OPTIMIZERS["adamw"]), tmp_path, replayed=32, scale=2.0**16, **options)


def test_a_scale_that_starts_too_high(tmp_path: Path) -> None:
    """The first steps are skipped, so that the optimizer has no state yet: the warm-up waits for it."""
    found = assert_scaled_fits(prepared(OPTIMIZERS["adamw"]), tmp_path, replayed=15, scale=2.0**22)
    assert "the gradient scaler skipped the step" in found.callback.report()


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", ["RMSprop", "AdamW"])
def test_an_optimizer_that_only_the_host_can_skip(name: str, clip: float | None, tmp_path: Path) -> None:
    """Forward and backward are replayed; Lightning unscales, clips, steps and updates after them."""
    make = {"RMSprop": partial(RMSprop, lr=1e-3), "AdamW": OPTIMIZERS["adamw"]}[name]
    callback = tape(prepare_optimizers=name != "AdamW")
    found = assert_scaled_fits(make, tmp_path, replayed=AFTER_THE_SWITCH, callback=callback, gradient_clip_val=clip)
    report = found.callback.report()
    assert f"whether to step {name}" in report
    assert "recapture" not in report
