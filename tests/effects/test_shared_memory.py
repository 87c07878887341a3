"""Memory that the step changes is fed, too: such a step is refused, and such a call of another one is eager."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from graphplan import FeedError, SkipReason, capture, compile_plan
from tests.models import CALLS, float_batches
from tests.twins import BEFORE_REPLAY, SECOND_TRACE, Rig, assert_equals_eager, assert_refused, build

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
    """A replay reads a copy, which stays what it was when the call began."""
    text = r"args\[2\] shares memory with model\.\w+, which the step changes; .* Pass a clone, or let the step use"
    assert_refused(partial(shared_rig, take), FeedError, text, done=SECOND_TRACE)


@pytest.mark.parametrize("odd", [BEFORE_REPLAY - 1, 15])
def test_memory_that_the_step_changes_is_fed_once(odd: int) -> None:
    """In the call that would be captured, and in one that would be replayed."""
    make = partial(shared_rig, SHARED["a buffer"], lambda index: index == odd)
    step = assert_equals_eager(make, replayed=CALLS - BEFORE_REPLAY - 1, verify="off")
    assert step.stats.skipped[SkipReason.FEED] == 1


def test_shared_memory_and_bare_plans() -> None:
    rig = build(partial(shared_rig, SHARED["a view of a buffer"], lambda index: index > 0))
    shared, apart = rig.calls[1], rig.calls[0]
    text = (
        r"args\[2\]: the step changes memory that an argument shares with an owner or with another "
        r"argument; .* pass clones"
    )
    plan = compile_plan(rig.step, *apart, owners=rig.owners)
    with pytest.raises(FeedError, match=text):
        capture(plan, feed=shared, backend="tape")
    program = capture(plan, feed=apart, backend="tape")
    program.replay(apart)
    with pytest.raises(
        FeedError,
        match=r"the step changes memory that an argument shares with an owner or with another argument; .* pass clones",
    ):
        program.replay(shared)
