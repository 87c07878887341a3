"""Rows 23 to 29: host memory, memory that is freed, and gradients."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from graphplan import CaptureError, HostScalarError, HostSyncError
from tests.failure_modes.naive import (
    PLAIN,
    WHEN,
    assert_handled,
    assert_naive_is_wrong,
    changing_rig,
    loss_of,
    naive,
    run_eagerly,
    seeded,
    stay,
)
from tests.models import Box, Memory, Mlp, float_batches
from tests.twins import (
    CAPTURED,
    WARMUP,
    Rig,
    assert_refused,
    assert_same_runs,
    build,
    by_chance,
    drive,
    line_of,
    managed,
)


def _reads_value(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(model, x, y)
    if complex(loss.detach()).real > 100:  # culprit
        loss = loss * 2
    return loss


def _reads_array(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(model, x, y) * float(np.asarray(x).mean() > 9)  # culprit


def _selects(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(model, x, y) + x[by_chance(x) > 0].mean()  # culprit


@pytest.mark.parametrize("loss", [_reads_value, _reads_array, _selects])
def test_row_23_host_sync(loss: Callable[..., Tensor]) -> None:
    """Reading a value is refused before any capture, with the line and the fix."""
    make = partial(changing_rig, stay, loss)
    assert_refused(make, HostSyncError, line_of(loss), r"eager_if", done=WARMUP)
    if loss is not _selects:
        rig = build(make)
        with pytest.raises(CaptureError, match="reads values on the host"):
            drive(rig, naive(rig.step))


def _staged(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(model, x * torch.tensor([[random.random()] * 8]), y)  # culprit


def test_row_24_temporary_host_tensor() -> None:
    """Values staged in a temporary are those of the capture for ever: line and values are named."""
    make = partial(changing_rig, stay, _staged, prepare=seeded)
    assert_naive_is_wrong(make)
    assert_refused(make, HostScalarError, line_of(_staged), "tensor made from a Python value", done=WARMUP + 3)


def box_rig(change: Callable[[dict[str, Tensor]], object]) -> Rig:
    """A step that reads a tensor through a dictionary which only its closure holds."""
    rig, box = changing_rig(stay), {"scale": torch.ones(8)}
    model, optimizer = rig.owners.values()

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x * box["scale"], y)
        loss.backward()
        optimizer.step()
        return loss

    rig.step, rig.after = train_step, lambda index: change(box) if index == WHEN else None
    rig.extra["box"] = box
    return rig


def test_row_25_external_tensor_is_kept_alive() -> None:
    """A tensor that only the recording still needs is not freed, and the plan lists it."""
    box = Box(torch.ones(8))
    rig = build(partial(changing_rig, stay, lambda model, x, y: loss_of(model, x * box.item, y)))
    step = managed(rig)
    drive(rig, step)
    address = box.item.data_ptr()
    box.item = None
    gc.collect()
    (external,) = [e for e in step.plan.params if e.name.startswith("unowned")]
    assert external.spec.shape == (8,) and external.tensor.data_ptr() == address
    # Whether it lives on is not all: the step itself no longer finds it, which the next check would show.
    with pytest.raises(TypeError, match="NoneType"):
        rig.step(*rig.calls[0])


BOXES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "in place": lambda box: box["scale"].fill_(2.0),
    "by another tensor": lambda box: box.update(scale=torch.arange(8.0)),
    "by other memory": lambda box: setattr(box["scale"], "data", torch.arange(8.0)),
}


@pytest.mark.parametrize("how", BOXES)
def test_row_25_external_tensor_changed(how: str) -> None:
    """A tensor that nobody named may get other values, other memory, or be replaced: its name in the code is known."""
    expected = run_eagerly(partial(box_rig, BOXES[how]))
    rig = build(partial(box_rig, BOXES[how]))
    step = managed(rig)
    assert_same_runs(expected, drive(rig, step))
    assert step.stats.replayed >= WHEN - 5
    if how != "in place":
        assert_naive_is_wrong(partial(box_rig, BOXES[how]))


def test_row_26_gradients_set_to_none() -> None:
    """Whoever drops the gradients between two calls finds them after the next one."""
    drop = lambda model, optimizer, index: optimizer.zero_grad() if index % 4 == 3 and index < 23 else None  # noqa: E731
    assert_handled(partial(changing_rig, stay, each=drop))


def accumulating_rig(*, set_to_none: bool, between: Callable[[Any], object] = lambda model: None) -> Rig:
    """Every third call steps and zeroes; ``between`` is called once between two micro-batches."""
    model = Mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)

    def train_step(x: Tensor, y: Tensor, update: bool) -> Tensor:
        loss = loss_of(model, x, y) / 3
        loss.backward()
        if update:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return loss

    calls = [(x, y, index % 3 == 2) for index, (x, y) in enumerate(float_batches(60))]
    after = lambda index: between(model) if index == 45 else None  # noqa: E731
    return Rig(train_step, {"model": model, "optimizer": optimizer}, list(calls), after)


def _halve(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5


def _move(model: Any) -> None:
    model.double().float()


@pytest.mark.parametrize("between", [_halve, _move])
def test_row_27_gradients_replaced_between_micro_batches(between: Callable[[Any], object]) -> None:
    """Accumulating and stepping are two programs over the same gradients, which may be replaced or moved."""
    make = partial(accumulating_rig, set_to_none=False, between=between)
    assert_handled(make, replayed=40)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_row_28_accumulated_micro_batches(set_to_none: bool) -> None:
    """The usual accumulation loop: ``zero_grad`` after each update, as torch does it by default and in place."""
    assert_handled(partial(accumulating_rig, set_to_none=set_to_none), replayed=30)


@pytest.mark.twice
def test_row_29_results_are_the_callers() -> None:
    """Losses kept from earlier calls stay what they were, whoever writes into them."""
    rig = build(PLAIN)
    results = [rig.step(*args).detach() for args in rig.calls]
    rig = build(PLAIN)
    step = managed(rig)
    found = []
    for args in rig.calls:
        found.append(step(*args))
        found[-1].detach().add_(0.0)
    assert torch.equal(torch.stack(results), torch.stack([loss.detach() for loss in found]))
    assert step.stats.replayed == 24 - WARMUP - 2 - CAPTURED
    rig = build(PLAIN)
    again = naive(rig.step)
    stale = [again(*args).detach() for args in rig.calls]
    assert len({loss.item() for loss in stale}) == 3


def test_row_29_a_gradient_that_the_caller_keeps() -> None:
    """Eager makes new gradients in each step, so that one kept from an earlier step stays what it was."""

    def make() -> Rig:
        rig, kept = changing_rig(stay), Memory()
        model = rig.owners["model"]
        rig.extra["kept"] = kept

        def after(index: int) -> None:
            if index == WHEN:
                kept.grad = model[0].weight.grad

        rig.after = after
        return rig

    assert_handled(make)
