"""Two hundred graphed training steps equal two hundred eager ones, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from graphplan import Role, prepare_optimizer
from tests.crossing import each
from tests.models import CALLS, MODELS, OPTIMIZERS, float_batches, training_rig
from tests.twins import (
    BEFORE_REPLAY,
    Record,
    Rig,
    assert_equals_eager,
    assert_same_runs,
    build,
    drive,
    managed,
    prepare_steps,
)

STEPS, FEWER = 200, 80
COMBINATIONS = [
    *((model, "adamw") for model in MODELS),
    *(("mlp", optimizer) for optimizer in OPTIMIZERS if optimizer != "adamw"),
    *zip(["transformer", "lstm", "cnn"], ["amsgrad", "nesterov", "adagrad"], strict=True),
]
"""Each model and each optimizer beside the plainest other, and each of the rest once more."""


@cache
def eager(model: str, optimizer: str) -> Record:
    """The eager run of two hundred steps."""
    rig = build(partial(training_rig, model, optimizer))
    return drive(rig, rig.step)


def losses(outputs: list[Tensor]) -> Tensor:
    """All returned losses as one tensor."""
    return torch.stack(outputs)


@pytest.mark.parametrize(("model", "optimizer"), COMBINATIONS)
@pytest.mark.twice
def test_graphed_steps_equal_eager_steps(model: str, optimizer: str) -> None:
    """Losses, parameters, gradients, buffers, optimizer state, param_groups and the generator; one capture."""
    expected = eager(model, optimizer)
    rig = build(partial(training_rig, model, optimizer))
    step = managed(rig)
    assert_same_runs(expected, drive(rig, step))
    stats = step.stats
    assert (stats.eager, stats.traced, stats.captured, stats.replayed) == (3, 2, 1, STEPS - BEFORE_REPLAY)


@pytest.mark.parametrize("model", MODELS)
def test_the_eager_oracle_trains(model: str) -> None:
    """The runs that the equality is about are not degenerate: the loss falls and every step differs."""
    curve = losses(eager(model, "adamw").outputs)
    assert curve[-20:].mean() < 0.95 * curve[:20].mean()
    assert len(curve.unique()) > 0.9 * STEPS


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.twice
def test_stock_optimizers_are_prepared(optimizer: str) -> None:
    """A stock optimizer equals an eager one prepared alike, and stays within 1e-3 of the unprepared loss curve."""
    stock = partial(training_rig, "mlp", optimizer, fused=None, sizes=(8,) * FEWER)
    rig = build(stock)
    unprepared = drive(rig, rig.step)
    rig = build(partial(stock, prepare=prepare_steps))
    prepared = drive(rig, rig.step)
    rig = build(stock)
    step = managed(rig)
    found = drive(rig, step)
    assert_same_runs(prepared, found)
    assert step.stats.replayed == FEWER - BEFORE_REPLAY
    torch.testing.assert_close(losses(found.outputs), losses(unprepared.outputs), rtol=0, atol=1e-3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_tensor_lr_changes_nothing(optimizer: str) -> None:
    """A float64 tensor standing in for the float learning rate gives the same bits, so the shadow lr does too."""
    floats = partial(training_rig, "mlp", optimizer, sizes=(8,) * FEWER)
    rig = build(floats)
    expected = drive(rig, rig.step)
    rig = build(floats)
    found = drive(rig, partial(_with_tensor_lr, rig))
    assert_same_runs(expected, found)


def _with_tensor_lr(rig: Rig, x: Tensor, y: Tensor) -> Tensor:
    (group,) = rig.owners["optimizer"].param_groups
    lr = group["lr"]
    group["lr"] = torch.tensor(lr, dtype=torch.float64)
    try:
        return rig.step(x, y)
    finally:
        group["lr"] = lr


@pytest.mark.parametrize("model", MODELS)
def test_a_ragged_batch_gets_its_own_program(model: str) -> None:
    """Every tenth batch is smaller: one capture per shape, both kept, and the order of the steps is eager's."""
    sizes = [5 if index % 10 == 9 else 8 for index in range(FEWER)]
    make = partial(training_rig, model, "adamw", sizes=sizes)
    step = assert_equals_eager(make, captured=2, further=1)
    assert step.stats.recaptured == 0


LOSSES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss, F.binary_cross_entropy_with_logits)


@each(loss=LOSSES, reduction=["mean", "sum", "none"])
def test_losses_of_floats(loss: Callable[..., Tensor], reduction: str) -> None:
    """Regression: torch's ``out=`` kernels of these need another size than their result, and warn about it."""

    def make() -> Rig:
        model = nn.Linear(8, 4)
        optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)

        def train_step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            value = loss(model(x), y, reduction=reduction)
            value.sum().backward()
            optimizer.step()
            return value

        calls = [(x, x[:, :4].sigmoid()) for x, _ in float_batches(CALLS)]
        return Rig(train_step, {"model": model, "optimizer": optimizer}, calls)

    assert_equals_eager(make, verify="off")


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_one_element(loss: Callable[..., Tensor], capfd: pytest.CaptureFixture[str]) -> None:
    """Regression: torch gave the recorded result of these another size and back, and said so at each replay."""

    def make() -> Rig:
        model = nn.Linear(8, 1)
        optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)

        def train_step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            value = loss(model(x), y)
            value.backward()
            optimizer.step()
            return value

        calls = [(x[:1], x[:1, :1].sigmoid()) for x, _ in float_batches(CALLS)]
        return Rig(train_step, {"model": model, "optimizer": optimizer}, calls)

    assert_equals_eager(make)
    assert "resized" not in capfd.readouterr().err


def test_preparing_says_what_it_changed() -> None:
    """``prepare_optimizer`` names the change, and has nothing to say the second time or about a fused optimizer."""
    optimizer = build(partial(training_rig, "mlp", "adamw", fused=None)).owners["optimizer"]
    changes = prepare_optimizer(optimizer)
    assert any("fused" in change for change in changes)
    assert optimizer.param_groups[0]["fused"] is True
    assert prepare_optimizer(optimizer) == []
    fused: Optimizer = build(partial(training_rig, "mlp", "adamw")).owners["optimizer"]
    assert prepare_optimizer(fused) == []


def test_the_plan_names_what_it_found() -> None:
    """Externals have the owners' paths and their roles; the lr is device state although the group keeps a float."""
    rig = build(partial(training_rig, "mlp", "adamw", sizes=(8,) * 8))
    step = managed(rig)
    assert step.plan is None
    drive(rig, step)
    plan = step.plan
    names = {external.name: external for external in plan.externals}
    assert {e.name for e in plan.inputs} == {"args[0]", "args[1]"}
    assert names["model.0.weight"].role is Role.PARAM and names["model.0.weight"].mutated
    for name in ("model.1.running_mean", "optimizer.state[model.0.weight].exp_avg", "optimizer.param_groups[0].lr"):
        assert names[name].role is Role.STATE, name
    assert set(plan.externals) == {*plan.inputs, *plan.params, *plan.state}
    assert len(plan.externals) == len(plan.inputs) + len(plan.params) + len(plan.state)
    assert isinstance(rig.owners["optimizer"].param_groups[0]["lr"], float)
    for name in ("args[0]", "model.0.weight", "optimizer.state[model.0.weight].exp_avg"):
        assert name in str(plan)


def test_statistics_add_up() -> None:
    """Copied bytes and the time of each phase are counted."""
    rig = build(partial(training_rig, "mlp", "adamw", sizes=(8,) * 20))
    step = managed(rig)
    drive(rig, step)
    stats = step.stats
    per_batch = sum(t.nbytes for t in rig.calls[0])
    assert stats.bytes_copied >= stats.replayed * per_batch
    assert {"warmup", "trace", "capture", "first_replay", "steady"} <= set(stats.phases)
    assert all(seconds >= 0 for seconds in stats.phases.values())
    assert not stats.skipped
