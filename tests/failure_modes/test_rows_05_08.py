"""Rows 5 to 8: numbers in the step, optimizer state, and gradient scalers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, RMSprop

from graphplan import HostEffectError, HostScalarError, HostSyncError
from tests.failure_modes.naive import (
    ADAMW,
    WHEN,
    assert_change_handled,
    assert_handled,
    assert_naive_is_wrong,
    changing_rig,
    loss_of,
    stay,
)
from tests.models import Memory, Mlp, attributes, float_batches
from tests.twins import SECOND_TRACE, WARMUP, Rig, assert_equals_eager, assert_refused, managed

GENERATOR = random.Random(1)


def _decayed(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(model, x, y) * GENERATOR.random()


def test_row_05_a_number_that_changes_in_each_step_is_refused() -> None:
    """Two traces give an operator two numbers: its name, its line and both numbers are in the message."""
    make = partial(changing_rig, stay, _decayed, prepare=lambda model: GENERATOR.seed(1))
    assert_refused(make, HostScalarError, r"aten\.mul", r"test_rows_05_08\.py:\d+", "tensor", done=WARMUP + 1)


def _weighted(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(model, x, y) * model.weight


def test_row_05_a_number_on_the_model() -> None:
    """A loss weight that the host sets anew later."""
    assert_change_handled(
        lambda model, optimizer: setattr(model, "weight", 2.0), _weighted, prepare=attributes(weight=0.5)
    )


def clipped_rig(change: Any) -> Rig:
    """Gradients clipped to a number on an object among the owners."""
    rig = changing_rig(stay)
    model, optimizer, options = *rig.owners.values(), Memory(max_norm=0.5)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        clip_grad_norm_(model.parameters(), options.max_norm)
        optimizer.step()
        return loss

    rig.step, rig.owners["options"] = train_step, options
    rig.after = lambda index: setattr(options, "max_norm", change) if index == WHEN else None
    return rig


def test_row_05_a_clip_value() -> None:
    """``max_norm`` is guarded through the owner that holds it."""
    assert_handled(partial(clipped_rig, 0.01), control=partial(clipped_rig, 0.5))


def closure_rig(scale: Callable[[Any, Tensor], Tensor], change: Callable[[Any], object], **values: Any) -> Rig:
    """A step whose loss goes through ``scale(holder, loss)``; nobody names ``holder`` to graphplan."""
    model, holder = Mlp(), Memory(**copy.deepcopy(values))
    optimizer = SGD(model.parameters(), lr=0.05, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = scale(holder, loss_of(model, x, y))
        loss.backward()
        optimizer.step()
        return loss

    def after(index: int) -> None:
        if index == WHEN:
            change(holder)

    return Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(24)), after)


CONFIG = {"weight": 0.5}


def _set(holder: Any) -> None:
    holder.weight, holder.table["weight"], CONFIG["weight"] = 2.0, 2.0, 2.0


HIDDEN = {
    "an attribute of a closure's object": lambda holder, loss: loss * holder.weight,
    "a closure's dictionary": lambda holder, loss: loss * holder.table["weight"],
    "a global dictionary": lambda holder, loss: loss * CONFIG["weight"],
}


@pytest.mark.parametrize("where", HIDDEN)
def test_row_05_a_number_that_no_owner_holds(where: str) -> None:
    """Options that live beside the model."""

    def make(change: Any = _set) -> Rig:
        CONFIG["weight"] = 0.5
        return closure_rig(HIDDEN[where], change, weight=0.5, table={"weight": 0.5})

    assert_handled(make, control=partial(make, lambda holder: None))


def test_row_05_a_number_in_a_closure() -> None:
    """A free variable of the step."""

    def make() -> Rig:
        weight = 0.5
        rig = changing_rig(stay, lambda model, x, y: loss_of(model, x, y) * weight)

        def after(index: int) -> None:
            nonlocal weight
            weight = 0.5 if index < WHEN else 2.0

        rig.after = after
        return rig

    assert_handled(make)


def test_row_06_optimizer_state_is_made_before_the_trace() -> None:
    """A step recorded on its first call would make its moments anew in each replay."""
    make = partial(changing_rig, stay)
    assert_naive_is_wrong(make, at=1)
    step = assert_equals_eager(make, warmup_steps=1, replayed=24 - 4)
    assert [e.name for e in step.plan.state if e.name.endswith("[model.0.weight].exp_avg")]


def scaled_rig(*, split: bool = False, growth: float | None = None, optimizer: Any = ADAMW, device: str = "cpu") -> Rig:
    """Mixed precision with a scaler; one batch overflows. ``split`` leaves ``step`` and ``update`` to the caller."""
    model = Mlp()
    optimizer, scaler = optimizer(model.parameters()), torch.amp.GradScaler(device, init_scale=8.0, growth_interval=4)

    def backward(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        return loss

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = backward(x, y)
        scaler.step(optimizer)
        scaler.update()
        return loss

    scales: list[float] = []

    def after(index: int) -> None:
        scales.append(scaler.get_scale())
        if index == WHEN and growth is not None:
            scaler.set_growth_factor(growth)
        if split:
            scaler.step(optimizer)
            scaler.update()

    calls = list(float_batches(24))
    calls[15] = (calls[15][0] * float("inf"), calls[15][1])
    owners = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return Rig(backward if split else train_step, owners, calls, after, {"scales": scales})


def test_row_07_the_whole_scaled_step() -> None:
    """Unscale, clip, step and update are all inside; a recording that ends at ``unscale_`` unscales twice."""
    assert_naive_is_wrong(partial(scaled_rig, split=True))
    assert_equals_eager(scaled_rig)


def test_row_07_half_of_the_scaled_step() -> None:
    """That recording is refused: the message says which calls belong together."""
    make = partial(scaled_rig, split=True)
    assert_refused(make, HostEffectError, r"scaler\.stage\[optimizer\]", "step and update", done=SECOND_TRACE)


def test_row_08_scaler_constants() -> None:
    """The growth factor is a Python number in the recording: another one is another capture."""
    assert assert_handled(partial(scaled_rig, growth=4.0)).stats.recaptured == 1


@pytest.mark.parametrize("make_optimizer", [AdamW, RMSprop])
def test_row_08_a_scaler_that_reads_found_inf(make_optimizer: Any) -> None:
    """Without a fused kernel the scaler asks on the host whether to step: the message names the flag to set."""
    make = partial(scaled_rig, optimizer=partial(make_optimizer, lr=1e-2))
    assert_refused(make, HostSyncError, r"test_rows_05_08\.py:\d+", r"fused=True", prepare_optimizers=False)


@pytest.mark.twice
def test_row_08_a_stock_optimizer_with_a_scaler() -> None:
    """A stock AdamW is prepared to be fused; the scaler then has to use the fused kernel too."""
    rig = scaled_rig(optimizer=partial(AdamW, lr=1e-2))
    step = managed(rig)
    for args in rig.calls[:8]:
        step(*args)
    assert step.stats.replayed == 2
