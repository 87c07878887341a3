"""Memory that the step changes is fed, too: what is read of it is what it holds then."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from graphplan import FeedError, Policy, Role, SkipReason, capture, compile_plan
from tests.models import CALLS, float_batches
from tests.twins import BEFORE_REPLAY, TRACED, WARMUP, Rig, assert_equals_eager, assert_refused, build

SHARED: dict[str, Callable[[Any], Tensor]] = {
    "a buffer": lambda model: model.total,
    "a view of a buffer": lambda model: model.total[2:],
    "a parameter": lambda model: model.weight,
    "a parameter's values": lambda model: model.weight.detach(),
    "a view of a parameter": lambda model: model.weight.data[0],
}


def shared_rig(take: Callable[[Any], Tensor], which: Callable[[int], bool] = lambda index: True) -> Rig:
    """A step that changes a buffer before, and parameters after it reads what it is fed, which is ``take`` of its model
    in the calls that ``which`` names; and reads that again at its end.
    """
    model: Any = nn.Linear(8, 4)
    model.register_buffer("total", torch.zeros(4, 8))
    optimizer = SGD(model.parameters(), lr=0.05, fused=True)

    def train_step(x: Tensor, y: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        model.total.add_(0.25)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) * other.square().mean()
        loss.backward()
        optimizer.step()
        return loss, other.detach() * 2.0, other

    calls = [
        (x, y, take(model) if which(index) else take(model).detach().clone())
        for index, (x, y) in enumerate(float_batches(CALLS))
    ]
    return Rig(train_step, {"model": model, "optimizer": optimizer}, calls)


@pytest.mark.parametrize("take", SHARED.values(), ids=list(SHARED))
def test_memory_that_the_step_changes_is_fed_each_time(take: Callable[[Any], Tensor]) -> None:
    """What is fed changes while the step runs, and is read where it is."""
    step = assert_equals_eager(partial(shared_rig, take), verify="off")
    assert "in place: args[2]" in str(step.plan)


@pytest.mark.parametrize("odd", [BEFORE_REPLAY - 1, 15])
def test_memory_that_the_step_changes_is_fed_once(odd: int) -> None:
    """In the call that would be captured, and in one that would be replayed."""
    make = partial(shared_rig, SHARED["a buffer"], lambda index: index == odd)
    step = assert_equals_eager(make, replayed=CALLS - BEFORE_REPLAY - 1, verify="off")
    assert step.stats.skipped[SkipReason.FEED] == 1


def test_another_part_of_memory_that_the_step_changes() -> None:
    """A view of the same buffer that begins elsewhere."""

    def make() -> Rig:
        rig = shared_rig(SHARED["a view of a buffer"])
        rig.calls[15] = (*rig.calls[15][:2], rig.owners["model"].total[:2])
        return rig

    step = assert_equals_eager(make, replayed=CALLS - BEFORE_REPLAY - 1, verify="off")
    assert step.stats.skipped[SkipReason.FEED] == 1


def test_a_leaf_of_its_own_on_memory_that_the_step_changes() -> None:
    """Its gradient would be the captured call's."""
    take = lambda model: model.weight.data[0].requires_grad_()  # noqa: E731
    text = r"args\[2\] shares memory with model\.weight, which the step changes, and asks for gradients of its own"
    assert_refused(partial(shared_rig, take), FeedError, text, done=WARMUP + TRACED)


def test_shared_memory_and_bare_plans() -> None:
    """A plan and a program are for feeds that share memory as the one that they were made with did."""
    rig = build(partial(shared_rig, SHARED["a view of a buffer"]))
    apart = (*rig.calls[0][:2], rig.calls[0][2].clone())
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    with pytest.raises(FeedError, match=r"^nothing of the feed shares memory .*; expected args\[2\], as when"):
        capture(plan, feed=apart, backend="tape")
    copied = Policy("train", static_roles=tuple(Role), copy_roles=("input", "state"))
    with pytest.raises(FeedError, match=r"args\[2\] shares memory with model\.total, which .* the policy copies in"):
        capture(plan, feed=rig.calls[0], backend="tape", policy=copied)
    program = capture(plan, feed=rig.calls[0], backend="tape")
    program.replay(rig.calls[0])
    with pytest.raises(FeedError, match="memory that the step changes is fed, or fed twice, in other places than"):
        program.replay(apart)
