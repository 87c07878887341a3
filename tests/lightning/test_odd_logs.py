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
