"""Gradient scalers: the whole scaled step is one replay, skipped steps included, with the numbers of the host's way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from graphplan import SkipReason, compile_plan, prepare_optimizer
from tests.crossing import each, pairs
from tests.facts import assert_same
from tests.failure_modes.naive import loss_of
from tests.models import Mlp, float_batches
from tests.twins import (
    BEFORE_REPLAY,
    Rig,
    assert_equals_eager,
    assert_same_as_eager,
    build,
    drive,
    managed,
    state_of,
)

CALLS = 24
ODD = {"init_scale": 10.0, "growth_factor": 1.5, "backoff_factor": 0.7, "growth_interval": 4}
"""Constants that are no powers of two, so that dividing by the scale is not multiplying by its inverse."""
MAKERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": partial(AdamW, lr=1e-2),
    "amsgrad": partial(Adam, lr=1e-2, amsgrad=True),
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "adagrad": partial(Adagrad, lr=0.1),
}


def prepared(make: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """``make``, with the flags that graphplan would set: then the eager twin runs the same kernels."""

    def maker(params: Iterable[Tensor]) -> Optimizer:
        optimizer = make(params)
        prepare_optimizer(optimizer)
        return optimizer

    return maker


def scaled_rig(
    make: Callable[..., Optimizer] = MAKERS["adamw"],
    *,
    clips: bool = True,
    overflows: Sequence[int] = (8, 15, 16),
    inside: Sequence[str] = ("backward", "step"),
    count: int = CALLS,
    device: str = "cpu",
    **constants: Any,
) -> Rig:
    """Training with a scaler. The gradients of the calls in ``overflows`` are infinite; the halves of the work that are
    not ``inside`` the step run before and after it.
    """
    model = Mlp()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler(device, **{**ODD, **constants})

    def backward(x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y) * factor
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.5)
        return loss

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    def train_step(*batch: Tensor) -> Tensor:
        loss = backward(*batch) if "backward" in inside else batch[0].sum()
        if "step" in inside:
            step()
        return loss

    factors = [torch.tensor(float("inf") if index in overflows else 1.0) for index in range(count)]
    calls = [(*batch, factor) for batch, factor in zip(float_batches(count), factors, strict=True)]
    scales: list[float] = []

    def after(index: int) -> None:
        if "step" not in inside:
            step()
        if "backward" not in inside and index + 1 < count:
            backward(*calls[index + 1])
        scales.append(scaler.get_scale())

    if "backward" not in inside:
        backward(*calls[0])
    owners = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return Rig(train_step, owners, calls, after, {"scales": scales})


def without(name: str | None, make: Callable[[], Rig]) -> Callable[[], Rig]:
    """``make``, with one owner that graphplan is not told of."""

    def maker() -> Rig:
        rig = make()
        if name is not None:
            rig.extra[name] = rig.owners.pop(name)
        return rig

    return maker


@each(clips=[True, False], name=MAKERS)
def test_a_prepared_optimizer_is_replayed_with_its_scaler(name: str, clips: bool) -> None:
    """Growth, backoff and skipped steps are those of the same optimizer when the host decides."""
    make = partial(scaled_rig, prepared(MAKERS[name]), clips=clips)
    assert_equals_eager(make)
    rig = build(make)
    drive(rig, rig.step)
    scales = rig.extra["scales"]
    changes = [b / a for a, b in pairwise(scales)]
    assert max(changes) > 1 > min(changes[BEFORE_REPLAY:]), "neither growth nor backoff: the test shows nothing"


@pytest.mark.parametrize("clips", [True, False])
def test_an_optimizer_that_says_it_takes_found_inf(clips: bool) -> None:
    """``fused=True`` from the start: torch's own way, in which the kernel also unscales what nobody unscaled."""
    assert_equals_eager(partial(scaled_rig, partial(AdamW, lr=1e-2, fused=True), clips=clips))


@pytest.mark.parametrize("overflow", range(BEFORE_REPLAY + 2))
def test_an_overflow_in_any_stage(overflow: int) -> None:
    """Warm-up, trace, capture and replay skip alike; a skipped first step only makes the warm-up longer."""
    rigs = partial(scaled_rig, prepared(MAKERS["momentum"]), overflows=[overflow])
    longer = int(overflow == 0)
    assert_equals_eager(rigs, replayed=CALLS - BEFORE_REPLAY - longer)


@pairs(name=["adamw", "momentum"], warmup_steps=[1, 3], missing=[None, "optimizer"])
def test_the_first_steps_overflow(name: str, warmup_steps: int, missing: str | None) -> None:
    """A scale that starts too high: the optimizer has no state until a step is not skipped, as in eager."""
    make = without(missing, partial(scaled_rig, prepared(MAKERS[name]), overflows=range(5)))
    step = assert_equals_eager(make, replayed=CALLS - 5 - warmup_steps - 3, warmup_steps=warmup_steps)
    assert step.stats.skipped == {SkipReason.UNBORN: 5}
    assert "scaler skipped the step" in step.report()


def _unnamed_rig(kind: type[torch.amp.GradScaler]) -> Rig:
    model = Mlp()
    optimizer = prepared(MAKERS["adamw"])(model.parameters())
    scaler = kind("cpu", **ODD)

    def train_step(x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y) * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    rig = scaled_rig(prepared(MAKERS["adamw"]))
    return Rig(train_step, {}, rig.calls, extra={"model": model, "optimizer": optimizer, "scaler": scaler})


def test_a_scaler_that_the_step_has_a_name_for() -> None:
    """It need not be named: modules, optimizers and scalers are found alike."""
    assert_equals_eager(lambda: _unnamed_rig(torch.amp.GradScaler))


class _Own(torch.amp.GradScaler):
    """Of a class of the user's."""


@pytest.mark.filterwarnings("ignore:graphplan runs this step eagerly")
def test_a_scaler_of_the_users_that_the_step_has_a_name_for() -> None:
    """It is an object like others, of which the code is looked at."""
    step = assert_same_as_eager(lambda: _unnamed_rig(_Own), on_failure="eager")
    assert "scaler.step(optimizer)" in step.report()


def test_two_optimizers_with_one_scaler() -> None:
    """An overflow skips the step of one, and backs off for both."""

    def make() -> Rig:
        rig = scaled_rig(prepared(MAKERS["adamw"]), clips=False)
        scaler, inner = rig.owners["scaler"], rig.step
        weight = torch.nn.Parameter(torch.ones(8))
        second = prepared(MAKERS["momentum"])([weight])

        def step(x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
            second.zero_grad()
            scaler.scale((x * weight).square().mean()).backward()
            scaler.step(second)
            return inner(x, y, factor)

        return Rig(step, {**rig.owners, "second": second}, rig.calls, rig.after, rig.extra)

    assert_equals_eager(make)


def test_a_scaler_whose_state_is_loaded() -> None:
    """Scale and growth tracker are state, the constants are guarded."""

    def make() -> Rig:
        rig = scaled_rig(prepared(MAKERS["adamw"]))
        scaler, after = rig.owners["scaler"], rig.after

        def load(index: int) -> None:
            after(index)
            if index == 12:
                scaler.load_state_dict(
                    {**scaler.state_dict(), "scale": 4.0, "growth_interval": 2, "_growth_tracker": 1}
                )

        rig.after = load
        return rig

    assert assert_equals_eager(make, captured=2, replayed=7 + 7).stats.recaptured == 1


def test_a_disabled_scaler() -> None:
    """It passes everything through."""
    assert_equals_eager(partial(scaled_rig, prepared(MAKERS["adamw"]), overflows=(), enabled=False))


def test_nothing_of_ours_stays_on_the_scaler_or_the_optimizer() -> None:
    """Between calls, and after a call that fails: Lightning reads the flag, and the host's own way has to work."""
    rig = build(partial(scaled_rig, overflows=[3, 10]))
    optimizer, scaler = rig.owners["optimizer"], rig.owners["scaler"]
    names = {*vars(optimizer), *vars(scaler)}
    step = managed(rig)
    for args in rig.calls:
        step(*args)
        assert {*vars(optimizer), *vars(scaler)} - names <= {"_need_device_dtype_check_for_fused"}
    assert step.stats.replayed > 0
    inner = optimizer.step
    optimizer.step = lambda: inner("no closure")
    with pytest.raises(TypeError, match="not callable"):
        step(*[torch.cat([leaf, leaf]) if leaf.ndim else leaf for leaf in rig.calls[0]])
    del optimizer.step
    assert {*vars(optimizer), *vars(scaler)} - names <= {"_need_device_dtype_check_for_fused"}


def test_scaling_alone_may_be_inside() -> None:
    """Forward, scaling and backward are replayed; unscaling, stepping and updating stay the host's."""
    assert_equals_eager(partial(scaled_rig, prepared(MAKERS["adamw"]), clips=False, inside=["backward"]))


@pytest.mark.parametrize("make", [MAKERS["sgd"], partial(AdamW, lr=1e-2, fused=True)])
def test_compiling_leaves_a_forgotten_optimizer_as_it_was(make: Callable[..., Optimizer]) -> None:
    """An optimizer that is found in its first step holds ``found_inf`` and a device learning rate at that moment."""
    rig = build(without("optimizer", partial(scaled_rig, prepared(make), clips=False)))
    optimizer = rig.extra["optimizer"]
    before, names = state_of(rig), {*vars(optimizer)}
    compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    assert_same(before, state_of(rig))
    assert {*vars(optimizer)} == names
