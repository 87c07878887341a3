"""Rows 2 to 14 inside a Lightning Trainer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD, RMSprop
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from tests.failure_modes.naive_trainer import FULL, assert_naive_fit_is_wrong
from tests.lightning.parts import (
    LitDigits,
    assert_fit_equals_eager,
    assert_same_fits,
    fit,
    per_step,
    tape,
    with_step,
)


def test_row_02_one_cycle_in_a_trainer(tmp_path: Path) -> None:
    """OneCycleLR cycles betas too: the optimizer goes outside, forward and backward are replayed."""
    make = partial(LitDigits, schedule=lambda optimizer: per_step(OneCycleLR(optimizer, 0.01, 30)))
    assert_naive_fit_is_wrong(make, tmp_path)
    found = assert_fit_equals_eager(make, tmp_path, replayed=15)
    assert "betas" in found.callback.report()


def test_row_02_momentum_cycled_in_a_trainer(tmp_path: Path) -> None:
    """Likewise for SGD, whose momentum is cycled."""
    make = partial(
        LitDigits,
        make_optimizer=partial(SGD, lr=0.1, momentum=0.9, fused=True),
        schedule=lambda optimizer: per_step(OneCycleLR(optimizer, 0.1, 30)),
    )
    found = assert_fit_equals_eager(make, tmp_path, replayed=15)
    assert "momentum" in found.callback.report()


def by_epoch(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch) * (1 + self.current_epoch)


def by_progress(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch) * self.trainer.fit_loop.epoch_progress.current.ready


def by_scheduler(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch) * (1000 * self.lr_schedulers().get_last_lr()[0])


@pytest.mark.parametrize("step", [by_epoch, by_progress, by_scheduler])
def test_row_05_a_number_of_the_trainer(step: Callable[..., Tensor], tmp_path: Path) -> None:
    """Annealing by epoch, as the module, the loop or the scheduler counts it."""
    schedule = lambda optimizer: {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "epoch"}  # noqa: E731
    make = partial(with_step(step), schedule=schedule)
    assert_naive_fit_is_wrong(make, tmp_path)
    assert_fit_equals_eager(make, tmp_path, replayed=8)


class Annealed(LitDigits):
    """Another criterion from the third epoch on."""

    def on_train_epoch_start(self) -> None:
        self.criterion = partial(F.cross_entropy, label_smoothing=0.2) if self.current_epoch > 1 else F.cross_entropy

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.criterion(self(batch[0]), batch[1])


def test_row_05_another_criterion_in_a_trainer(tmp_path: Path) -> None:
    """A function on the module is no number, and is frozen all the same."""
    assert_naive_fit_is_wrong(Annealed, tmp_path)
    assert_fit_equals_eager(Annealed, tmp_path, replayed=12)


@pytest.mark.parametrize(("fused", "clip"), [(True, None), (None, 0.5)])
def test_row_07_scaler_in_a_trainer(fused: bool | None, clip: float | None, tmp_path: Path) -> None:
    """``precision="16-mixed"``: scale, unscale, clip, step and update are replayed."""
    make = partial(LitDigits, make_optimizer=partial(SGD, lr=0.1, fused=fused))
    assert_scaled_fit_equals_eager(make, clip, FULL, tmp_path)


def test_row_08_a_trainers_scaler_that_reads_found_inf(tmp_path: Path) -> None:
    """RMSprop has no kernel that takes ``found_inf``: the scaler and the optimizer stay Lightning's."""
    make = partial(LitDigits, make_optimizer=partial(RMSprop, lr=1e-3), schedule=None)
    assert_scaled_fit_equals_eager(make, 0.5, 18, tmp_path)


def assert_scaled_fit_equals_eager(make: Callable[[], Any], clip: float | None, least: int, tmp_path: Path) -> None:
    """Fit with a scaler that grows every four steps, without and with the callback."""
    runs = []
    for name, callback in (("eager", None), ("graphed", tape())):
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4))
        runs.append(fit(make, tmp_path / name, callback, plugins=[plugin], gradient_clip_val=clip))
        assert plugin.scaler is not None and plugin.scaler.get_scale() > 8.0
    assert_same_fits(*runs)
    assert runs[1].callback.stats.replayed >= least, runs[1].callback.report()


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_row_14_batch_cast_in_a_trainer(precision: Any, tmp_path: Path) -> None:
    """The strategy casts the batch into a new tensor: inputs are copied after that."""
    assert_fit_equals_eager(LitDigits, tmp_path, replayed=FULL, precision=precision)


def _augmented(self: Any, batch: Any, dataloader_idx: int) -> Any:
    return batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]


def test_row_14_on_after_batch_transfer(tmp_path: Path) -> None:
    """What the hook made is what is trained on."""
    make = with_step(LitDigits.training_step, on_after_batch_transfer=_augmented)
    assert_fit_equals_eager(make, tmp_path, replayed=FULL)
