"""Rows 16 to 37 inside a Lightning Trainer."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from graphplan import HostEffectError, HostScalarError, HostSyncError, NotCapturedError
from tests.failure_modes.naive_trainer import FULL, assert_naive_fit_is_wrong, with_callbacks
from tests.lightning.endings import assert_nothing_installed, run_until
from tests.lightning.parts import (
    LitDigits,
    assert_fit_equals_eager,
    digits,
    fit,
    ignore_lightning_warnings,
    tape,
    trainer_of,
    with_step,
)


class Thaw(BaseFinetuning):
    """Freezes the first layer for an epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0], train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=1e-3)


def test_row_16_unfreezing_in_a_trainer(tmp_path: Path) -> None:
    """``BaseFinetuning`` adds a parameter group between two epochs."""
    make = with_callbacks(Thaw)
    assert_naive_fit_is_wrong(make, tmp_path)
    assert_fit_equals_eager(make, tmp_path, replayed=12)


def test_row_21_random_branch_in_a_trainer(tmp_path: Path) -> None:
    """A path taken now and then: eager's numbers, or a refusal, but no other numbers."""

    def step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(batch) * (2.0 if random.random() < 0.1 else 1.0)

    def make() -> LitDigits:
        random.seed(4)
        return with_step(step)()

    try:
        assert_fit_equals_eager(make, tmp_path, replayed=0)
    except (HostScalarError, HostSyncError):
        return


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.crossed(2)
def test_row_28_accumulation_in_a_trainer(every: int, tmp_path: Path) -> None:
    """No micro-batch is lost."""
    options: dict[str, Any] = {"accumulate_grad_batches": every, "max_epochs": 6, "gradient_clip_val": 0.5}
    assert_naive_fit_is_wrong(LitDigits, tmp_path, **options)
    assert_fit_equals_eager(LitDigits, tmp_path, replayed=18, **options)


class Hooked(LitDigits):
    """Logs in the hooks inside the step."""

    def on_after_backward(self) -> None:
        self.log("after", self.net[0].weight.grad.norm())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("before", self.net[0].weight.grad.abs().max())


class Counting(Callback):
    """Counts backward passes and keeps norms."""

    def __init__(self) -> None:
        self.count, self.norms = 0, []  # type: ignore[var-annotated]

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.count += 1
        self.norms.append(module.net[0].weight.grad.norm())


def test_row_30_logs_and_hooks_in_a_trainer(tmp_path: Path) -> None:
    """Logged values and callbacks' counters go on through replays."""
    kept: list[Counting] = []

    def counting() -> Counting:
        kept.append(Counting())
        return kept[-1]

    make = with_callbacks(counting, base=Hooked)
    assert_naive_fit_is_wrong(make, tmp_path)
    kept.clear()
    assert_fit_equals_eager(make, tmp_path, replayed=FULL)
    assert [callback.count for callback in kept] == [30, 30]
    assert torch.equal(*(torch.stack(callback.norms) for callback in kept))


SEEN: list[int] = []


class Listing(Callback):
    """Appends to a list that is no attribute of anything."""

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        SEEN.append(1)


def test_row_30_a_hook_that_changes_what_nobody_owns(tmp_path: Path) -> None:
    """Repeated or refused by name, but not left out."""
    SEEN.clear()
    try:
        fit(with_callbacks(Listing), tmp_path, tape())
    except HostEffectError:
        return
    assert len(SEEN) == 30


class Shuffled(RandomSampler):
    """Shuffles by epoch and notes what it is told."""

    def __init__(self, data: Any) -> None:
        super().__init__(data, generator=torch.Generator())
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)
        self.generator.manual_seed(epoch)


class Wrapped:
    """A prefetching loader as it is often written: Lightning finds no sampler to call ``set_epoch`` on."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return iter(list(self.loader))

    def __len__(self) -> int:
        return len(self.loader)


def fit_shuffled(folder: Path, wrap: Callable[[Any], Any], callback: Any) -> tuple[Any, list[int], L.Trainer]:
    """Fit with a sampler that takes epochs."""
    torch.manual_seed(0)
    sampler = Shuffled(digits()[0])
    loader = wrap(DataLoader(digits()[0], 32, sampler=sampler, drop_last=True))
    trainer, module = trainer_of(folder, [callback] if callback else []), LitDigits()
    with warnings.catch_warnings():
        ignore_lightning_warnings()
        trainer.fit(module, loader, DataLoader(digits()[1], 50))
    assert trainer.train_dataloader is loader
    return module.net[0].weight.detach(), sampler.epochs, trainer


def test_row_31_the_loader_is_the_users(tmp_path: Path) -> None:
    """``set_epoch`` arrives and the batches are eager's; behind a wrapper it would not arrive."""
    same = lambda loader: loader  # noqa: E731
    expected = fit_shuffled(tmp_path / "eager", same, None)
    found = fit_shuffled(tmp_path / "graphed", same, tape())
    assert found[1] == expected[1] == [0, 1, 2]
    assert torch.equal(found[0], expected[0])
    assert fit_shuffled(tmp_path / "wrapped", Wrapped, None)[1] == []


class Mine(Exception):
    """Raised by a training step in here."""


@pytest.mark.parametrize("at", [1, 4, 5])
def test_row_35_exception_in_a_trainer(at: int, tmp_path: Path) -> None:
    """In warm-up, trace and capture: the Trainer is the user's again."""

    def step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == at:
            raise Mine("from the step")
        return self.loss_of(batch)

    assert_nothing_installed(*run_until(Mine, "from the step", with_step(step), tmp_path, tape(allow=("trainer.*",))))


def test_row_37_capture_never_engaged_in_a_trainer(tmp_path: Path) -> None:
    """Another shape for each batch is an error; a name in each batch too."""
    with pytest.raises(NotCapturedError, match=r"no step was captured in \d+ steps.*shape"):
        fit(LitDigits, tmp_path, tape(), sizes=range(2, 62))
    found = fit(LitDigits, tmp_path / "counted", tape())
    assert "22" in found.callback.report()
