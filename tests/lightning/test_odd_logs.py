"""Batch sizes, batches and logged values that are not what one expects: the fit is what it is without the callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lightning.parts import LitDigits, assert_same_fits, fit, tape, with_step

RAGGED = [32] * 9 + [12, 32, 7, 32]
FULL_AND_LAST = [32] * 9 + [12]


def _logs_in_hook(self: Any, optimizer: Any) -> None:
    self.log("weight", self.net[0].bias.sum(), on_step=True, on_epoch=True)


def _plain(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss: Tensor = self.loss_of(batch)
    return loss


def _half_a_sample(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss: Tensor = self.loss_of(batch)
    self.log("loss", loss, on_step=True, on_epoch=True, batch_size=2.5)
    return loss


def _as_many_as(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss: Tensor = self.loss_of(batch)
    self.log("loss", loss, on_step=True, on_epoch=True, batch_size=(batch[1] > 3).sum())
    return loss


@pytest.mark.parametrize("step", [_half_a_sample, _as_many_as])
def test_batch_sizes_that_are_no_integers(step: Any, tmp_path: Path) -> None:
    callback = tape(warmup_steps=1)
    make = with_step(step)
    assert_same_fits(fit(make, tmp_path / "eager"), fit(make, tmp_path / "graphed", callback))
    assert callback.stats.replayed > 10


class OnlyTheLast(LitDigits):
    """A module that logs, or returns, a parameter itself where a batch is short."""

    returns = False

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Another kind of value for each kind of batch."""
        loss = self.loss_of(batch) * self.scale
        if len(batch[0]) < 32:
            self.log("value", self.scale, on_step=True, on_epoch=True)
            return self.scale if self.returns else loss
        self.log("value", loss.detach() * 2, on_step=True, on_epoch=True)
        return loss


class ReturnsTheLast(OnlyTheLast):
    """Likewise."""

    returns = True


@pytest.mark.parametrize("make", [OnlyTheLast, ReturnsTheLast])
def test_what_one_program_may_leave_out_and_another_may_not(make: Any, tmp_path: Path) -> None:
    """A parameter that the optimizer changes afterwards is copied, whatever was logged by that name before."""
    options: dict[str, Any] = {"sizes": FULL_AND_LAST, "max_epochs": 5}
    callback = tape(warmup_steps=1)
    assert_same_fits(fit(make, tmp_path / "eager", **options), fit(make, tmp_path / "graphed", callback, **options))
    assert callback.stats.captured == 2


class Uncopied(Tensor):
    """A tensor that can neither be stacked nor unbound."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse both, and copy as a checkpoint does."""
        if func is Tensor.__deepcopy__:
            return args[0].clone()
        if getattr(func, "__name__", "") in ("stack", "unbind"):
            raise TypeError(f"{func.__name__} is not supported")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_tensors_of_another_class(tmp_path: Path) -> None:
    """No operators but Lightning's run on them, and what callbacks see has the class that Lightning gives it."""

    def step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss_of(batch).as_subclass(Uncopied)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("twice", loss * 2, on_epoch=True)
        return loss

    callback, make = tape(warmup_steps=1), with_step(step)
    expected, found = fit(make, tmp_path / "eager"), fit(make, tmp_path / "graphed", callback)
    assert_same_fits(expected, found)
    assert callback.stats.replayed > 10
    kinds = [{key: type(value) for key, value in run.trainer.callback_metrics.items()} for run in (expected, found)]
    assert kinds[0] == kinds[1]
    assert Uncopied in kinds[0].values()
