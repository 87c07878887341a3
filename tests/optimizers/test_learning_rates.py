"""Learning rates are numbers for the step's own code, as in an eager step; only optimizers see tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, LRScheduler, MultiplicativeLR, StepLR

from graphplan import (
    HostEffectError,
    HostSyncError,
    LearningRateError,
    SkipReason,
    compile_plan,
    graph_step,
)
from tests.facts import assert_same
from tests.models import Box
from tests.twins import (
    WARMUP,
    Rig,
    assert_falls_back,
    assert_refused,
    assert_same_as_eager,
    build,
    drive,
    line_of,
    managed,
    state_of,
)

Use = Callable[[Tensor, Any, nn.Module], Any]


def reading_rig(use: Use, calls: int = 12) -> Rig:
    """A step whose result is what ``use`` makes of its loss, the learning rate and the model."""
    model = nn.Linear(4, 3)
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)

    def train_step(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = use(model(x).square().mean(), optimizer.param_groups[0]["lr"], model)
        (loss[0] if isinstance(loss, tuple) else loss).backward()
        optimizer.step()
        return loss

    owners = {"model": model, "optimizer": optimizer}
    return Rig(train_step, owners, [(torch.randn(5, 4),) for _ in range(calls)])


def multiply(loss: Tensor, lr: Any, model: nn.Module) -> Any:
    return loss * lr  # culprit


def logarithm(loss: Tensor, lr: Any, model: nn.Module) -> Any:
    return loss * math.log(lr)  # culprit


def copied(loss: Tensor, lr: Any, model: nn.Module) -> Any:
    return loss * torch.full((2,), lr).sum()  # culprit


def compared(loss: Tensor, lr: Any, model: nn.Module) -> Any:
    return loss * 2 if lr > 0.05 else loss  # culprit


def read_before(loss: Tensor, lr: Any, model: nn.Module) -> Any:
    """Something else comes first that speaks against the step."""
    return loss * lr if loss.item() else loss  # culprit


USES = {"*": multiply, "log": logarithm, "full": copied, ">": compared, "after item": read_before}


@pytest.mark.parametrize("name", USES)
def test_a_step_that_computes_with_the_lr(name: str) -> None:
    """Refused by name in the first trace; on the way there, and ever after, it gets the number that eager code gets."""
    make = partial(reading_rig, USES[name])
    where = line_of(USES[name])
    assert_refused(
        make, LearningRateError, rf"computes with a learning rate at {where}.*Set the rate outside .* pass the number"
    )
    assert_falls_back(make, SkipReason.HOST_SCALAR, rf"computes with a learning rate at {where}")


def returned(loss: Tensor, lr: Any, model: nn.Module) -> Any:
    return loss, lr


def kept(loss: Tensor, lr: Any, model: Any) -> Any:
    model.seen = lr
    return loss


@pytest.mark.parametrize(("use", "text"), [(returned, "returns a"), (kept, r"keeps a .* in model\.seen")])
def test_a_step_that_hands_the_lr_on(use: Use, text: str) -> None:
    """A number would leave the eager step, and a tensor this one."""
    make = partial(reading_rig, use)
    assert_refused(make, LearningRateError, text, "Log it after the step")
    assert_falls_back(make, SkipReason.HOST_SCALAR, text)


def test_a_plan_of_a_step_that_computes_with_the_lr() -> None:
    """``compile_plan`` says the same, and leaves everything as it was."""
    rig = build(partial(reading_rig, multiply))
    before = state_of(rig)
    with pytest.raises(LearningRateError, match="computes with a learning rate at"):
        compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    assert_same(before, state_of(rig))


def accumulating_rig(calls: int = 24) -> Rig:
    """Every other call steps the optimizer; only then does the code that names the rate run."""
    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    turn = SimpleNamespace(count=0)

    def train_step(x: Tensor) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        if turn.count % 2 == 0:
            return loss, None
        rate = torch.as_tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64).clone()
        optimizer.step()
        optimizer.zero_grad()
        return loss, rate

    def after(index: int) -> None:
        turn.count += 1
        optimizer.param_groups[0]["lr"] *= 0.9 if index % 4 == 3 else 1

    owners = {"model": model, "optimizer": optimizer, "turn": turn}
    return Rig(train_step, owners, [(torch.randn(5, 4),) for _ in range(calls)], after)


def test_a_way_that_names_a_rate_and_steps_no_optimizer() -> None:
    """What stands in for the rate is no tensor that this way depends on: it is a number again before the next call."""
    step = assert_same_as_eager(accumulating_rig)
    assert (step.stats.captured, step.stats.traced) == (2, 4), step.report()
    assert step.stats.replayed == 15


def watching_rig(closure: bool, seen: list[type]) -> Rig:
    """The user's hooks on the optimizer, and a closure, note what kind of thing the learning rate is."""
    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    look: Callable[..., None] = lambda *_: seen.append(type(optimizer.param_groups[0]["lr"]))  # noqa: E731
    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)

    def train_step(x: Tensor) -> Tensor:
        def loss_of() -> Tensor:
            look()
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(loss_of) if closure else (loss_of(), optimizer.step())[0]

    owners = {"model": model, "optimizer": optimizer}
    return Rig(train_step, owners, [(torch.randn(5, 4),) for _ in range(3)])


@pytest.mark.parametrize("closure", [False, True])
def test_hooks_and_closures_see_numbers_in_eager_calls(closure: bool) -> None:
    seen: list[type] = []
    rig = build(partial(watching_rig, closure, seen))
    drive(rig, managed(rig), 3)
    assert len(seen) == 9 and set(seen) == {float}


def scheduled_rig() -> Rig:
    """A scheduler that steps inside the step."""
    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    schedule = ExponentialLR(optimizer, 0.9)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()  # culprit
        return loss

    owners = {"model": model, "optimizer": optimizer, "schedule": schedule}
    return Rig(train_step, owners, [(torch.randn(5, 4),) for _ in range(12)])


def test_a_scheduler_inside_the_step() -> None:
    """It computes with the learning rate too."""
    assert_refused(scheduled_rig, LearningRateError, rf"computes with a learning rate at {line_of(scheduled_rig)}")
    assert_falls_back(scheduled_rig, SkipReason.HOST_SCALAR, "computes with a learning rate")


def setting_rig(when: str) -> Rig:
    """A step that sets the learning rate, from a count of its own or from what it has read."""
    model, count = nn.Linear(4, 3), [0]
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    group = optimizer.param_groups[0]

    def train_step(x: Tensor) -> Tensor:
        if when == "before":
            group["lr"] = 0.1 / (count[0] + 1)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if when != "before":
            group["lr"] = 0.1 / (count[0] + 1) if when == "after" else loss.item()
        count[0] += 1
        return loss

    owners = {"model": model, "optimizer": optimizer, "count": count}
    return Rig(train_step, owners, [(torch.randn(5, 4),) for _ in range(12)])


SCHEDULES: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "by steps": lambda optimizer: StepLR(optimizer, step_size=20, gamma=0.5),
    "constant for some": lambda optimizer: ConstantLR(optimizer, factor=0.5, total_iters=20),
    "by a factor": lambda optimizer: MultiplicativeLR(optimizer, lambda epoch: 0.5 if epoch == 20 else 1.0),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("rate", ["a number", "a tensor"])
def test_a_scheduler_in_the_step_that_leaves_a_rate_alone_for_a_while(name: str, rate: str) -> None:
    """It reads in code of torch's how far it has counted: the rate changes in the step in which it does so eagerly."""

    def make() -> Rig:
        model = nn.Linear(4, 3)
        kind = partial(RMSprop, lr=0.01) if rate == "a number" else partial(AdamW, lr=torch.tensor(0.01), fused=True)
        optimizer = kind(model.parameters())
        scheduler = SCHEDULES[name](optimizer)

        def train_step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss.detach()

        owners = {"model": model, "optimizer": optimizer}
        return Rig(train_step, owners, [(torch.randn(5, 4),) for _ in range(50)], extra={"scheduler": scheduler})

    step = assert_same_as_eager(make, verify="off")
    assert step.stats.replayed >= 20, step.report()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_sets_the_lr(when: str) -> None:
    """As many training loops do at their beginning or at their end: replays compute it."""
    step = assert_same_as_eager(partial(setting_rig, when), verify=1)
    assert (step.stats.captured, step.stats.replayed) == (1, 4), step.report()
    assert re.search(
        r"left: optimizer\.param_groups\[0\]\.lr = a number that is computed from count\[0\]", str(step.plan)
    )


@pytest.mark.parametrize("kind", [SGD, AdamW, Adam])
@pytest.mark.parametrize("closure", [False, True])
def test_a_rate_of_each_group_by_a_count(kind: type[Optimizer], closure: bool) -> None:
    """Before the optimizer's step, or in its closure; one group keeps the number that it has."""

    def make() -> Rig:
        torch.manual_seed(0)
        model, state = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), SimpleNamespace(count=0)
        groups: Any = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}]
        optimizer = kind(groups, lr=0.1, fused=True)  # type: ignore[call-arg]

        def compute(x: Tensor) -> Tensor:
            optimizer.param_groups[0]["lr"] = 0.1 * math.cos(0.01 * state.count)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        def train_step(x: Tensor) -> Any:
            if closure:
                loss: Any = optimizer.step(lambda: compute(x))  # type: ignore[arg-type]
            else:
                loss = compute(x)
                optimizer.step()
            return loss.detach(), optimizer.param_groups[0]["lr"]

        def after(index: int) -> None:
            state.count = index + 1
            if index % 5 == 4:
                optimizer.param_groups[1]["lr"] *= 0.5

        owners = {"model": model, "optimizer": optimizer, "state": state}
        return Rig(train_step, owners, [(torch.randn(5, 4),) for _ in range(30)], after=after)

    step = assert_same_as_eager(make, verify=1)
    assert step.stats.captured == 1
    assert step.stats.replayed >= 20, step.report()


def _put_back(group: Any, optimizer: Optimizer, rate: float) -> None:
    before = group["lr"]
    group["lr"] = rate
    optimizer.step()
    group["lr"] = before


def _twice(group: Any, optimizer: Optimizer, rate: float) -> None:
    optimizer.step()
    group["lr"] = rate
    optimizer.step()
    group["lr"] = rate / 2


def _not_always(group: Any, optimizer: Optimizer, rate: float) -> None:
    if rate > 0.02:
        group["lr"] = rate
    optimizer.step()


@pytest.mark.parametrize("use", [_put_back, _twice, _not_always])
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_rates_that_are_put_back_or_set_twice(use: Callable[[Any, Optimizer, float], None], kind: Any) -> None:
    """The group holds numbers between two calls, whoever has set them; the host sets others now and then."""

    def make() -> Rig:
        model, state = nn.Linear(4, 3), SimpleNamespace(count=0)
        optimizer = kind(model.parameters(), lr=0.1, fused=True)

        def train_step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            use(optimizer.param_groups[0], optimizer, 0.1 / (1 + state.count))
            return loss

        def after(index: int) -> None:
            assert type(optimizer.param_groups[0]["lr"]) is float
            state.count = index
            if index in (20, 30):
                optimizer.param_groups[0]["lr"] = 0.05

        owners = {"model": model, "optimizer": optimizer, "state": state}
        return Rig(train_step, owners, [(torch.randn(5, 4),) for _ in range(40)], after=after)

    step = assert_same_as_eager(make, verify=1)
    assert step.stats.replayed >= 20, step.report()


def test_a_rate_that_the_capture_computes_otherwise() -> None:
    """By a value that no guard sees: the capture is undone, and the refusal names the place."""
    model, state, hidden = nn.Linear(4, 3), SimpleNamespace(count=0), Box(0)
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = (0.1 if hidden.item < WARMUP + 2 else 0.2) / (1 + state.count)
        return loss

    step = graph_step(train_step, owners={"model": model, "optimizer": optimizer, "state": state})
    text = (
        r"leaves a number that is computed in another way in its capture than in its traces "
        r"\(optimizer\.param_groups\[0\]\.lr\)"
    )

    def train() -> None:
        for count in range(12):
            state.count = hidden.item = count
            step(torch.ones(2, 4))

    with pytest.raises(HostEffectError, match=text):
        train()
    # As the call before has left it.
    assert (step.stats.captured, state.count, optimizer.param_groups[0]["lr"]) == (0, WARMUP + 2, 0.1 / (WARMUP + 2))


@pytest.mark.parametrize("when", range(3, 7))
def test_a_step_that_fails_leaves_a_number_in_the_group(when: int) -> None:
    """In an eager call, a trace, a capture and a replay."""
    model, state = nn.Linear(4, 3), SimpleNamespace(count=0)
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)

    def train_step(x: Tensor) -> Tensor:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + state.count)
        if state.count == when:
            raise KeyError("the user's own")
        return model(x).sum().detach()

    step = graph_step(train_step, owners={"model": model, "optimizer": optimizer, "state": state})
    for count in range(12):
        state.count = count
        with pytest.raises(KeyError, match="the user's own") if count == when else nullcontext():
            step(torch.ones(2, 4))
        assert type(optimizer.param_groups[0]["lr"]) is float
        assert optimizer.param_groups[0]["lr"] == 0.1 / (1 + count)


def test_a_step_that_sets_the_lr_to_what_it_reads() -> None:
    make = partial(setting_rig, "read")
    assert_refused(make, HostSyncError, r"loss\.item\(\)", done=WARMUP + 2)


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_step_that_sets_the_lr_to_an_owners_number(place: str) -> None:
    """That changes now and then: a replay is good for one value."""

    def make() -> Rig:
        model, rate = nn.Linear(4, 3), SimpleNamespace(value=0.1)
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)

        def train_step(x: Tensor) -> Tensor:
            if place == "before":
                optimizer.param_groups[0]["lr"] = rate.value * 2
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            if place == "after":
                optimizer.param_groups[0]["lr"] = rate.value * 2
            return loss

        def after(index: int) -> None:
            rate.value = 0.1 / (1 + index // 20)

        owners = {"model": model, "optimizer": optimizer, "rate": rate}
        return Rig(train_step, owners, [(torch.randn(5, 4),) for _ in range(80)], after=after)

    step = assert_same_as_eager(make, verify="off", on_failure="eager")
    assert step.stats.replayed > 30


def test_a_rate_that_is_an_argument() -> None:
    """Each call has its own."""

    def make() -> Rig:
        model = nn.Linear(4, 3)
        optimizer = SGD(model.parameters(), lr=0.1, fused=True)

        def train_step(x: Tensor, rate: float) -> Tensor:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        calls = [(torch.randn(5, 4), 0.1 / (number + 1)) for number in range(20)]
        return Rig(train_step, {"model": model, "optimizer": optimizer}, calls)

    step = assert_same_as_eager(make, verify=1)
    assert (step.stats.captured, step.stats.replayed) == (1, 12)
