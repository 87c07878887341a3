"""What a Trainer may be told to do: clipping, precision, schedules, accumulation, limits; equal to the eager fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, LearningRateMonitor
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from graphplan import prepare_optimizer
from tests.facts import assert_same
from tests.lightning.parts import (
    Fit,
    LitDigits,
    Observer,
    assert_fit_equals_eager,
    assert_same_fits,
    fit,
    ignore_lightning_warnings,
    loaders,
    per_step,
    tape,
    trainer_of,
    with_step,
)

FULL = 21


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradient_clipping(algorithm: str, tmp_path: Path) -> None:
    """The Trainer's clipping is part of the replayed step, and does something."""
    options = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    found = assert_fit_equals_eager(LitDigits, tmp_path, replayed=FULL, **options)
    unclipped = fit(LitDigits, tmp_path / "unclipped")
    assert not torch.equal(unclipped.module.net[0].weight, found.module.net[0].weight)


def _stock(parameters: list[Tensor], *, prepare: bool) -> Optimizer:
    optimizer = AdamW(parameters, lr=3e-3)
    if prepare:
        prepare_optimizer(optimizer)
    return optimizer


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precision(precision: str, clip: float | None, tmp_path: Path) -> None:
    """Autocast and cast modules with a stock AdamW; Lightning refuses to clip a fused one under autocast."""

    def step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(batch)

    options = {"precision": precision, "gradient_clip_val": clip}
    base = with_step(step)
    expected = fit(partial(base, partial(_stock, prepare=True)), tmp_path / "eager", **options)
    found = fit(partial(base, partial(_stock, prepare=False)), tmp_path / "graphed", tape(), **options)
    left, right = expected.state, found.state
    for state in (left, right):
        for path in [path for path in state if "fused" in path or "foreach" in path or path.endswith(".keys")]:
            del state[path]
    assert_same(left, right)
    assert found.callback.stats.replayed == FULL


def _plateau(optimizer: Optimizer) -> dict[str, Any]:
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
    return {"scheduler": scheduler, "monitor": "val_loss", "interval": "epoch"}


def _halve(step: int) -> float:
    return 0.5 ** (step // 4)


SCHEDULES: dict[str, Callable[[Optimizer], Any] | None] = {
    "none": None,
    "per epoch": lambda optimizer: StepLR(optimizer, 1, gamma=0.5),
    "per step": lambda optimizer: per_step(LambdaLR(optimizer, _halve)),
    "every third step": lambda optimizer: {**per_step(LambdaLR(optimizer, _halve)), "frequency": 3},
    "plateau": _plateau,
    "one cycle without momentum": lambda optimizer: per_step(
        OneCycleLR(optimizer, 0.01, total_steps=40, cycle_momentum=False)
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_the_learning_rate(name: str, tmp_path: Path) -> None:
    """Every replay uses its step's lr; schedulers and monitors see floats."""
    make = partial(LitDigits, schedule=SCHEDULES[name])
    found = assert_fit_equals_eager(make, tmp_path, replayed=FULL)
    lrs = {lr for batch in found.observer.batches for lr in batch["lr"]}
    assert all(type(lr) is float for lr in lrs)
    assert (len(lrs) > 1) == (name != "none")


def test_one_cycle_that_cycles_betas(tmp_path: Path) -> None:
    """Betas are Python numbers to every optimizer, so the optimizer's step stays eager; they are never frozen."""
    make = partial(LitDigits, schedule=lambda optimizer: per_step(OneCycleLR(optimizer, 0.01, total_steps=40)))
    found = assert_fit_equals_eager(make, tmp_path, replayed=18)
    assert found.trainer.optimizers[0].param_groups[0]["betas"] != (0.9, 0.999)
    assert "betas" in found.callback.report()


def fit_with(folder: Path, callbacks: list[Any], **options: Any) -> Fit:
    """Fit with further callbacks beside the observer."""
    torch.manual_seed(0)
    module, observer = LitDigits(), Observer()
    trainer = trainer_of(folder, [observer, *callbacks], **options)
    torch.manual_seed(1)
    ignore_lightning_warnings()
    trainer.fit(module, *loaders())
    return Fit(module, trainer, observer, callbacks[-1], folder)


def assert_callback_is_undisturbed(make: Callable[[], Any], folder: Path, **options: Any) -> Fit:
    """Fit with a stock callback, without and with graphplan beside it; both fits are the same."""
    expected = fit_with(folder / "eager", [make()], **options)
    found = fit_with(folder / "graphed", [make(), tape()], **options)
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed > 0
    return found


def test_a_learning_rate_monitor(tmp_path: Path) -> None:
    """LearningRateMonitor's rows are the eager ones."""
    found = assert_callback_is_undisturbed(partial(LearningRateMonitor, "step"), tmp_path)
    assert "lr-AdamW" in found.rows


@pytest.mark.parametrize("batch", [32, 20])
@pytest.mark.parametrize("every", [2, 3])
def test_gradient_accumulation(every: int, batch: int, tmp_path: Path) -> None:
    """Batches that only accumulate and batches that step are programs of their own, ragged ends included."""
    options = {"accumulate_grad_batches": every, "batch": batch, "max_epochs": 6}
    found = assert_fit_equals_eager(LitDigits, tmp_path, replayed=30, **options)
    per_epoch = -(-300 // batch)
    assert found.trainer.global_step == 6 * -(-per_epoch // every)


def test_an_accumulation_schedule(tmp_path: Path) -> None:
    """GradientAccumulationScheduler changes the number of batches per step between epochs."""
    make = partial(GradientAccumulationScheduler, {0: 1, 2: 2, 4: 3})
    found = assert_callback_is_undisturbed(make, tmp_path, max_epochs=6)
    assert found.trainer.global_step == 2 * (10 + 5 + 4)


LIMITS: dict[str, dict[str, Any]] = {
    "max_steps": {"max_steps": 17, "max_epochs": -1},
    "limit_train_batches": {"limit_train_batches": 7, "max_epochs": 4},
    "overfit_batches": {"overfit_batches": 2, "max_epochs": 12},
    "validation twice per epoch": {"val_check_interval": 0.5},
    "validation across epochs": {"val_check_interval": 4, "check_val_every_n_epoch": None},
    "no sanity check": {"num_sanity_val_steps": 0},
    "rows now and then": {"log_every_n_steps": 5},
    "gradients are tracked": {"detect_anomaly": False, "inference_mode": False},
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_and_intervals(name: str, tmp_path: Path) -> None:
    """Fits that end early, validate often or log rarely."""
    assert_fit_equals_eager(LitDigits, tmp_path, replayed=8, **LIMITS[name])


def test_early_stopping(tmp_path: Path) -> None:
    """A monitor stops the fit in the epoch in which it stops the eager one."""
    make = partial(EarlyStopping, "val_loss", patience=0, min_delta=0.2)
    found = assert_callback_is_undisturbed(make, tmp_path, max_epochs=20)
    assert found.trainer.global_step < 200


def test_frozen_layers(tmp_path: Path) -> None:
    """A frozen first layer gets no gradient and stays."""

    def make() -> LitDigits:
        module = LitDigits()
        module.net[0].requires_grad_(False)
        return module

    assert_fit_equals_eager(make, tmp_path, replayed=FULL)


@pytest.mark.filterwarnings("ignore:graphplan")
def test_an_overridden_optimizer_step(tmp_path: Path) -> None:
    """A warm-up of the lr in the user's ``optimizer_step`` goes on running on the host."""

    def optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (self.trainer.global_step + 1) / 20)
        optimizer.step(closure=optimizer_closure)

    make = partial(with_step(LitDigits.training_step, optimizer_step=optimizer_step), schedule=None)
    expected = fit(make, tmp_path / "eager")
    found = fit(make, tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)
    assert len({batch["lr"][0] for batch in found.observer.batches}) == 20


@pytest.mark.filterwarnings("ignore:graphplan")
def test_overridden_hooks_inside_the_step(tmp_path: Path) -> None:
    """Device work in in-step hooks is part of the step."""

    def on_after_backward(self: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def configure_gradient_clipping(
        self: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    hooks = {"on_after_backward": on_after_backward, "configure_gradient_clipping": configure_gradient_clipping}
    make = with_step(LitDigits.training_step, **hooks)
    expected = fit(make, tmp_path / "eager")
    found = fit(make, tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)
    plain = fit(LitDigits, tmp_path / "plain")
    assert not torch.equal(plain.module.net[0].weight, found.module.net[0].weight)


def test_sgd_with_momentum(tmp_path: Path) -> None:
    """Another fused optimizer under a per-step schedule."""
    make = partial(LitDigits, partial(SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True))
    assert_fit_equals_eager(make, tmp_path, replayed=FULL)
