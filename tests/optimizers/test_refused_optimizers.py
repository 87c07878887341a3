"""Optimizers that a program cannot contain: refused by name with the alternative; forgotten ones are found."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adam, AdamW, RMSprop, SparseAdam
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

from graphplan import HostScalarError, HostSyncError, OptimizerError, RefusalError, SkipReason
from tests.models import CALLS, Lookahead, Mlp, float_batches, training_rig
from tests.twins import (
    SECOND_TRACE,
    WARMUP,
    Rig,
    assert_equals_eager,
    assert_falls_back,
    assert_refused,
    build,
    drive,
    managed,
)


def stock_rig() -> Rig:
    """Stock AdamW under a constant lr: only its step counter changes from step to step."""
    rig = training_rig("mlp", "adamw", fused=None, sizes=(8,) * 10)
    rig.after = lambda index: None
    return rig


def test_stock_adamw_that_may_not_be_prepared() -> None:
    """It reads its step counter on the host and computes with the number: operator, line and the fix are named."""
    error = refusal(stock_rig, prepare_optimizers=False)
    assert isinstance(error, HostSyncError | HostScalarError)
    assert error.component == "optimizer"
    done = WARMUP if isinstance(error, HostSyncError) else SECOND_TRACE
    patterns = [r"aten\.\w+", r"models\.py:\d+", r"optimizer\.step\(\)", "fused=True"]
    assert_refused(stock_rig, type(error), *patterns, done=done, prepare_optimizers=False)
    assert_falls_back(stock_rig, error.reason, "fused=True", prepare_optimizers=False)


def refusal(make: Callable[[], Rig], **options: Any) -> RefusalError:
    """The refusal that a rig runs into."""
    rig = build(make)
    with pytest.raises(RefusalError) as caught:
        drive(rig, managed(rig, **options))
    return caught.value


def test_a_violation_in_the_step_is_not_the_optimizers() -> None:
    """``component`` says which part of the step is to blame."""

    def make() -> Rig:
        rig = training_rig("mlp", "adamw", sizes=(8,) * 10)
        inner = rig.step
        rig.step = lambda x, y: complex(inner(x, y).mul(1).detach()).real
        return rig

    error = assert_refused(make, HostSyncError, r"test_refused_optimizers\.py")
    assert isinstance(error, RefusalError)
    assert error.component == "step"


class Counting(torch.optim.Optimizer):
    """It counts in its state, and decides by the count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["step"] = state.get("step", 0) + 1
            if state["step"] % 50 == 0:
                param.mul_(0.9)
            param.add_(param.grad, alpha=-0.1)


def test_an_optimizer_that_reads_its_own_count() -> None:
    """Its user cannot count elsewhere, but step it outside."""
    text = r"the optimizer's code reads optimizer\.state\[.*\]\.step, .* Move optimizer\.step\(\) out of the step"
    error = refusal(lambda: scheduled_rig(Counting, gamma=1.0))
    assert isinstance(error, HostScalarError)
    assert error.component == "optimizer"
    assert re.search(text, str(error))


def scheduled_rig(make_optimizer: Callable[..., torch.optim.Optimizer], gamma: float = 0.9) -> Rig:
    """An MLP with any optimizer, and a schedule that changes its lr after every call unless gamma is 1."""
    model = Mlp()
    optimizer = make_optimizer(model.parameters())
    scheduler = ExponentialLR(optimizer, gamma)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    owners = {"model": model, "optimizer": optimizer}
    return Rig(train_step, owners, list(float_batches(CALLS)), lambda index: scheduler.step())


def test_rmsprop_under_a_schedule() -> None:
    """RMSprop takes its lr as a Python number on CPU: refused, naming RMSprop, lr and what to do."""
    make = partial(scheduled_rig, partial(RMSprop, lr=0.01))
    error = refusal(make)
    assert isinstance(error, OptimizerError | HostScalarError)
    done = SECOND_TRACE if isinstance(error, HostScalarError) else WARMUP
    fixes = "fused|AdamW|outside|on_failure|components"
    assert_refused(make, type(error), "RMSprop", r"\blr\b", fixes, done=done)
    assert_falls_back(make, error.reason, "RMSprop")


def test_rmsprop_with_a_constant_lr() -> None:
    """Without a schedule nothing about RMSprop changes from step to step."""
    assert_equals_eager(partial(scheduled_rig, partial(RMSprop, lr=0.01), gamma=1.0))


def cycling_rig(kind: Callable[..., Any], schedule: Callable[[Any], Any]) -> Rig:
    """A step whose optimizer has other hyper-parameters in each call."""
    model = Mlp()
    optimizer = kind(model.parameters(), lr=0.01, fused=True)
    scheduler = schedule(optimizer)
    step = lambda x, y: descend(model, optimizer, x, y)  # noqa: E731
    owners = {"model": model, "optimizer": optimizer}
    return Rig(step, owners, list(float_batches(10)), after=lambda index: scheduler.step())


def descend(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


CYCLES = r": the 3rd new value .* also cycle betas or momentum: cycle_momentum=False prevents that\."


@pytest.mark.parametrize(
    ("name", "kind"), [("betas", Adam), ("momentum", partial(SGD, momentum=0.9))], ids=["betas", "momentum"]
)
def test_cycled_momentum(name: str, kind: Callable[..., Any]) -> None:
    """What ``OneCycleLR`` does by default: the refusal says so, and without it the same schedule is replayed."""
    cycling = partial(OneCycleLR, max_lr=0.05, total_steps=30)
    assert_refused(partial(cycling_rig, kind, cycling), OptimizerError, rf"param_groups\[0\]\.{name}: .*{CYCLES}")
    assert_equals_eager(partial(cycling_rig, kind, partial(cycling, cycle_momentum=False)))


def test_a_decay_that_changes_with_each_step() -> None:
    error = refusal(partial(cycling_rig, Adam, _Decay))
    assert isinstance(error, OptimizerError)
    assert "weight_decay: 0.2 then 0.3: the 3rd new value" in str(error)


class _Decay:
    """A schedule of the user's own."""

    def __init__(self, optimizer: Any) -> None:
        self._group, self._steps = optimizer.param_groups[0], 0

    def step(self) -> None:
        self._steps += 1
        self._group["weight_decay"] = self._steps / 10


def lbfgs_rig() -> Rig:
    """LBFGS evaluates its closure as often as it likes."""
    model = nn.Linear(8, 4)
    optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def train_step(x: Tensor, y: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(10)))


def sparse_adam_rig() -> Rig:
    """Sparse gradients have a number of entries that depends on the batch."""
    model = nn.Embedding(20, 4, sparse=True)
    optimizer = SparseAdam(model.parameters(), lr=0.1)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    calls = [(torch.randint(20, (5,)),) for _ in range(10)]
    return Rig(train_step, {"model": model, "optimizer": optimizer}, calls)


def lookahead_rig() -> Rig:
    """An optimizer around another one, which never called ``Optimizer.__init__``."""
    model = Mlp()
    optimizer = Lookahead(AdamW(model.parameters(), lr=0.01, fused=True))

    def train_step(x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(10)))


def test_a_wrapper_without_hooks_that_nobody_named() -> None:
    """It turns up after its first step."""

    def make() -> Rig:
        rig = lookahead_rig()
        return Rig(rig.step, {"model": rig.owners["model"]}, rig.calls, extra=rig.owners)

    text = r"Lookahead cannot be captured: it did not call torch\.optim\.Optimizer\.__init__"
    assert_refused(make, OptimizerError, text, "Use the wrapped optimizer", done=1)
    assert_falls_back(make, SkipReason.OPTIMIZER, text)


UNFIT = [("LBFGS", lbfgs_rig), ("SparseAdam", sparse_adam_rig), ("Lookahead", lookahead_rig)]


@pytest.mark.parametrize(("name", "make"), UNFIT)
def test_optimizers_that_no_program_can_contain(name: str, make: Callable[[], Rig]) -> None:
    """Refused by name before anything is traced."""
    rig = build(make)
    with pytest.raises(OptimizerError, match=rf"{name}.*(AdamW|eager|outside)"):
        drive(rig, managed(rig))
    assert_falls_back(make, SkipReason.OPTIMIZER, name)


@pytest.mark.parametrize("owned", ["model", "nothing"])
def test_a_forgotten_optimizer_is_found(owned: str) -> None:
    """Owners that are not named are discovered: the schedule's lr reaches every replay."""

    def make() -> Rig:
        rig = training_rig("mlp", "adamw", sizes=(8,) * 20)
        kept = {"model": rig.owners["model"]} if owned == "model" else {}
        return Rig(rig.step, kept, rig.calls, rig.after, extra=rig.owners)

    step = assert_equals_eager(make)
    assert any(external.name.endswith("param_groups[0].lr") for external in step.plan.state)


@pytest.mark.twice
def test_owners_as_a_sequence() -> None:
    """Owners without names of their own are named after their classes or positions, and work alike."""
    make = partial(training_rig, "mlp", "adamw", sizes=(8,) * 20)
    rig = build(make)
    expected = [rig.step(*args).detach() for args in rig.calls]
    rig = build(make)
    step = managed(rig, owners=list(rig.owners.values()))
    assert all(torch.equal(a, step(*args)) for a, args in zip(expected, rig.calls, strict=True))
    assert step.stats.replayed == 14
