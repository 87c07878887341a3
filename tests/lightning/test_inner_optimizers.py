"""Modules and optimizers that a ``training_step`` makes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD

from graphplan import HostEffectError
from tests.lightning.parts import LitDigits, assert_fit_equals_eager, assert_same_fits, fit, tape, with_step
from tests.twins import line_of


def _adapted(module: Any, batch: Any) -> tuple[Any, Tensor]:
    """A copy of the network after a few steps on the batch, and its loss."""
    x, y = batch
    inner = copy.deepcopy(module.net)
    descent = SGD(inner.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        descent.zero_grad()
        loss = F.cross_entropy(inner(x), y)
        loss.backward()
        descent.step()
    return inner, loss.detach()


def _distance_to_adapted(self: Any, batch: Any, batch_idx: int) -> Tensor:
    inner, loss = _adapted(self, batch)
    self.log("inner_loss", loss)
    pairs = zip(self.net.parameters(), inner.parameters(), strict=True)
    return sum((outer - adapted.detach()).square().sum() for outer, adapted in pairs)


def _reptile(self: Any, batch: Any, batch_idx: int) -> None:
    inner, _ = _adapted(self, batch)
    for outer, adapted in zip(self.net.parameters(), inner.parameters(), strict=True):
        outer.grad = (outer - adapted).detach()
    self.optimizers().step()


def _keep_copy(self: Any, batch: Any, batch_idx: int) -> Tensor:
    self.before = copy.deepcopy(self.net)  # culprit
    return self.loss_of(batch)


class Manual(LitDigits):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__(schedule=None)
        self.automatic_optimization = False


def test_an_inner_optimizer_in_automatic_optimization(tmp_path: Path) -> None:
    assert_fit_equals_eager(with_step(_distance_to_adapted), tmp_path, replayed=21)


def test_an_inner_optimizer_in_manual_optimization(tmp_path: Path) -> None:
    assert_fit_equals_eager(with_step(_reptile, Manual), tmp_path, replayed=21)


def test_a_copy_that_stays_on_the_module(tmp_path: Path) -> None:
    make = with_step(_keep_copy)
    with pytest.raises(HostEffectError, match=rf"model\.before \(Sequential, at {line_of(_keep_copy)}"):
        fit(make, tmp_path / "raise", tape(), max_epochs=1)
    expected = fit(make, tmp_path / "eager", max_epochs=1)
    with pytest.warns(UserWarning, match=r"the step creates model\.before"):
        found = fit(make, tmp_path / "graphed", tape(on_failure="eager"), max_epochs=1)
    assert_same_fits(expected, found)
