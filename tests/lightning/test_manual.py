"""Manual optimization: the whole ``training_step`` is the captured step, with its optimizers, toggles and counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from graphplan import OptionError, RefusalError
from tests.lightning.parts import LitDigits, assert_fit_equals_eager, assert_same_fits, fit, tape

FULL = 21
"""Replays of three epochs: 27 full batches less the six before the first replay."""


class Manual(LitDigits):
    """The digits' classifier with its optimizer stepped by hand."""

    def __init__(self, **options: Any) -> None:
        super().__init__(schedule=None, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss_of(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "size": loss.new_tensor(1.0)}


class Gan(LitDigits):
    """A generator and a critic of digits, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__(schedule=None)
        self.automatic_optimization = False
        self.make = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))
        self.judge = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def critic_loss(self, real: Tensor) -> Tensor:
        fake = self.make(torch.randn(len(real), 8, device=real.device)).detach()
        return F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(fake)).mean()

    def generator_loss(self, real: Tensor) -> Tensor:
        return F.softplus(-self.judge(self.make(torch.randn(len(real), 8, device=real.device)))).mean()

    def turn(self, optimizer: Any, loss_of: Any, real: Tensor, name: str) -> None:
        self.toggle_optimizer(optimizer)
        loss = loss_of(real)
        self.log(name, loss, on_step=True, on_epoch=True)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()  # type: ignore[misc]
        self.turn(critic, self.critic_loss, batch[0], "critic")
        self.turn(generator, self.generator_loss, batch[0], "generator")

    def configure_optimizers(self) -> Any:
        generator = AdamW(self.make.parameters(), lr=2e-3, betas=(0.5, 0.9), fused=True)
        return [generator, SGD(self.judge.parameters(), lr=0.05, momentum=0.9, fused=True)], []


class Alternating(Gan):
    """Two batches for the critic, then one for the generator."""

    def is_generators_turn(self, batch: Any, batch_idx: int) -> bool:
        return batch_idx % 3 == 2

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()  # type: ignore[misc]
        if batch_idx % 3 == 2:
            self.turn(generator, self.generator_loss, batch[0], "generator")
        else:
            self.turn(critic, self.critic_loss, batch[0], "critic")


class Accumulating(Manual):
    """Gradients of two batches per step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss_of(batch) / 2)
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


class ByEpoch(Gan):
    """Schedulers stepped by hand where that is free of the graph: at an epoch's end."""

    def configure_optimizers(self) -> Any:
        optimizers, _ = super().configure_optimizers()
        return optimizers, [StepLR(optimizer, 1, 0.5) for optimizer in optimizers]

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step()


@pytest.mark.parametrize("make", [Manual, Gan, ByEpoch])
def test_the_whole_training_step_is_replayed(make: type[LitDigits], tmp_path: Path) -> None:
    found = assert_fit_equals_eager(make, tmp_path, replayed=FULL)
    assert found.callback.stats.captured == 1
    steps = 1 if make is Manual else 2
    assert found.trainer.global_step == 30 * steps, "counted for each optimizer, as without the callback"


def test_one_program_for_the_critic_and_one_for_the_generator(tmp_path: Path) -> None:
    callback = tape(variant="is_generators_turn", warmup_steps=1)
    found = assert_fit_equals_eager(Alternating, tmp_path, replayed=18, callback=callback)
    assert found.callback.stats.captured == 2


def test_variant_may_be_a_function(tmp_path: Path) -> None:
    callback = tape(variant=lambda batch, batch_idx: (batch_idx % 3 == 2, "turn"), warmup_steps=1)
    found = assert_fit_equals_eager(Alternating, tmp_path, replayed=18, callback=callback)
    assert found.callback.stats.captured == 2


def test_accumulation_by_hand(tmp_path: Path) -> None:
    callback = tape(variant=lambda batch, batch_idx: batch_idx % 2, warmup_steps=1)
    assert_fit_equals_eager(Accumulating, tmp_path, replayed=15, callback=callback)


def test_alternating_without_variant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusalError, match=r"computes with batch_idx at .*variant= for"):
        fit(Alternating, tmp_path, tape())


class Stepping(Manual):
    """A scheduler stepped inside the step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [StepLR(optimizer, 2, 0.9)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.lr_schedulers().step()  # type: ignore[union-attr]


def test_a_scheduler_stepped_inside_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusalError, match=r"lr|scheduler"):
        fit(Stepping, tmp_path / "refused", tape())


def test_a_scheduler_stepped_inside_runs_eagerly_where_that_is_allowed(tmp_path: Path) -> None:
    expected = fit(Stepping, tmp_path / "eager")
    with pytest.warns(UserWarning, match="graphplan runs this step eagerly"):
        found = fit(Stepping, tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)


def test_a_scaled_step(tmp_path: Path) -> None:
    """16-mixed: Lightning scales in manual_backward and steps through the scaler."""

    class Unclipped(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer: Any = self.optimizers()
            loss = self.loss_of(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    from lightning.pytorch.plugins import MixedPrecision

    def plugins() -> list[Any]:
        return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4))]

    expected = fit(Unclipped, tmp_path / "eager", plugins=plugins())
    found = fit(Unclipped, tmp_path / "graphed", tape(), plugins=plugins())
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed >= FULL, found.callback.report()


@pytest.mark.parametrize("variant", [3, ["a"]])
def test_what_variant_may_be(variant: Any) -> None:
    with pytest.raises(OptionError, match=r"variant is .*; expected a function of \(batch, batch_idx\)"):
        tape(variant=variant)


def test_a_method_that_the_module_lacks(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="variant is 'nowhere', and Manual has no such method"):
        fit(Manual, tmp_path, tape(variant="nowhere"))
