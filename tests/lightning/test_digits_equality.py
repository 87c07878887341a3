"""A fit with the callback is the fit without it: weights, optimizer, schedule, rows, metrics and checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from graphplan import prepare_optimizer
from tests.facts import assert_same, flatten
from tests.lightning.parts import (
    STEPS_PER_EPOCH,
    LitDigits,
    assert_fit_equals_eager,
    fit,
    tape,
)
from tests.twins import BEFORE_REPLAY, FURTHER, WARMUP

EPOCHS = 3


@pytest.mark.twice
def test_three_epochs_are_bitwise_equal(tmp_path: Path) -> None:
    """27 full batches: three eager, two traced, one captured, 21 replayed; three ragged ones: one eager, two traced."""
    found = assert_fit_equals_eager(LitDigits, tmp_path, replayed=21)
    stats = found.callback.stats
    assert (stats.traced, stats.captured, stats.replayed) == (2 + 2, 1, 21)
    assert stats.eager == WARMUP + 1
    rows = found.rows.splitlines()
    assert len(rows) > EPOCHS * STEPS_PER_EPOCH
    assert float(found.observer.epochs[-1]["val_acc"]) > 0.5


def test_a_longer_fit_replays_the_ragged_batch_too(tmp_path: Path) -> None:
    """From its fifth time on the ragged batch is replayed; both programs share the weights and the schedule."""
    found = assert_fit_equals_eager(LitDigits, tmp_path, replayed=8 * 10 - BEFORE_REPLAY - FURTHER, max_epochs=8)
    assert found.callback.stats.captured == 2


def _stock(prepare: bool) -> LitDigits:
    def make(parameters: list[Tensor]) -> Optimizer:
        optimizer = AdamW(parameters, lr=3e-3)
        if prepare:
            prepare_optimizer(optimizer)
        return optimizer

    return LitDigits(make_optimizer=make)


@pytest.mark.twice
def test_a_stock_optimizer_is_prepared(tmp_path: Path) -> None:
    """A stock AdamW trains as one that was prepared by hand, and stays close to the unprepared one."""
    prepared = fit(partial(_stock, True), tmp_path / "prepared")
    found = fit(partial(_stock, False), tmp_path / "graphed", tape())
    assert_same(flatten(model=prepared.module), flatten(model=found.module))
    assert prepared.rows == found.rows
    assert found.callback.stats.replayed == 21
    plain = fit(partial(_stock, False), tmp_path / "plain")
    for left, right in zip(plain.observer.batches, found.observer.batches, strict=True):
        torch.testing.assert_close(left["out"]["loss"], right["out"]["loss"], rtol=0, atol=1e-3)


@pytest.mark.twice
def test_the_flags_of_a_prepared_optimizer_are_put_back(tmp_path: Path) -> None:
    """After the fit, and in its checkpoints, a stock optimizer has the options that the user gave it."""
    plain = fit(partial(_stock, False), tmp_path / "plain")
    found = fit(partial(_stock, False), tmp_path / "graphed", tape())
    assert found.callback.stats.replayed == 21
    for left, right in (
        (plain.checkpoint["optimizer_states"], found.checkpoint["optimizer_states"]),
        ([o.state_dict() for o in plain.trainer.optimizers], [o.state_dict() for o in found.trainer.optimizers]),
    ):
        expected, got = left[0]["param_groups"][0], right[0]["param_groups"][0]
        assert_same(flatten(group=expected), flatten(group=got))


def test_checkpoints_hold_plain_values(tmp_path: Path) -> None:
    """Learning rates are floats, nothing of graphplan is saved, and the callback adds no state."""
    found = fit(LitDigits, tmp_path, tape())
    checkpoint = found.checkpoint
    (optimizer,) = checkpoint["optimizer_states"]
    assert all(type(group["lr"]) is float for group in optimizer["param_groups"])
    assert {key for state in optimizer["state"].values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}
    assert not any("GraphPlan" in key for key in checkpoint["callbacks"])
    assert found.callback.state_dict() == {}
    safe = torch.load(found.last, weights_only=True)
    assert safe["global_step"] == EPOCHS * STEPS_PER_EPOCH
