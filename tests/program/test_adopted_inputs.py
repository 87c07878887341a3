"""Inputs that are static and not copied: replays read the memory that was fed, and nothing else is fed to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from graphplan import FeedError, Policy, Role, SkipReason, capture, compile_plan, graphed
from tests.facts import assert_same, flatten
from tests.models import float_batches
from tests.twins import (
    BEFORE_REPLAY,
    TRACED,
    WARMUP,
    Rig,
    assert_refused,
    assert_same_as_eager,
    assert_same_runs,
    build,
    drive,
    managed,
    state_of,
)

ADOPTED = Policy("train", static_roles=tuple(Role), copy_roles=())
ELSEWHERE = "the arguments have other addresses than in the captured call, and copy_roles lacks input"
CALLS = 12


def rig_with(feeds: list[tuple[Tensor, Tensor]], *, writes: bool = False) -> Rig:
    """A training step that is fed ``feeds`` in turn; host code puts another batch into them after each call."""
    model = nn.Linear(8, 4)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    batches = float_batches(CALLS)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if writes:
            x.mul_(0.5)
        return loss.detach()

    def fill(index: int) -> None:
        for at, value in zip(feeds[index % len(feeds)], batches[index], strict=True):
            at.copy_(value)

    fill(0)
    calls: list[tuple[Any, ...]] = [feeds[index % len(feeds)] for index in range(CALLS)]
    owners = {"model": model, "optimizer": optimizer}
    return Rig(train_step, owners, calls, after=lambda index: fill((index + 1) % CALLS), extra={"feeds": feeds})


def places(count: int) -> list[tuple[Tensor, Tensor]]:
    """So many places for a batch."""
    return [(x.clone(), y.clone()) for x, y in float_batches(count)]


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.twice
def test_the_same_memory_with_other_values(writes: bool) -> None:
    """What is fed is read, and written, where it lies."""
    make = lambda: rig_with(places(1), writes=writes)  # noqa: E731
    step = assert_same_as_eager(make, policy=ADOPTED)
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - BEFORE_REPLAY)
    assert step.stats.bytes_copied == 0


@pytest.mark.twice
def test_other_memory_is_run_eagerly() -> None:
    """Two places in turn: only the calls with the place that was captured are replayed."""
    make = lambda: rig_with(places(2))  # noqa: E731
    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig, policy=ADOPTED)
    with pytest.warns(UserWarning, match=f"runs calls eagerly: {ELSEWHERE}") as told:
        found = drive(rig, step)
    assert_same_runs(expected, found)
    assert len(told) == 1
    assert step.stats.skipped[SkipReason.FEED] == step.stats.replayed == (CALLS - BEFORE_REPLAY) // 2


def test_a_program_by_hand() -> None:
    """A bare program refuses other memory, and has changed nothing then; its own it reads anew each time."""
    rig, twin = build(lambda: rig_with(places(1))), build(lambda: rig_with(places(1)))
    for each in (rig, twin):
        each.step(*each.calls[0])
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    program = capture(plan, feed=rig.calls[0], backend="tape", policy=ADOPTED)
    before = state_of(rig)
    with pytest.raises(FeedError, match=ELSEWHERE):
        program.replay(tuple(tensor.clone() for tensor in rig.calls[0]))
    assert_same(before, state_of(rig))
    for index in range(3):
        expected, found = twin.step(*twin.calls[0]), program.replay(rig.calls[0])
        assert_same(flatten(loss=expected), flatten(loss=found))
        twin.after(index)
        rig.after(index)
    assert_same(flatten(**twin.owners), flatten(**rig.owners))


def test_a_batch_that_was_let_go() -> None:
    """The memory is kept: another batch cannot come to lie there unseen."""
    model = nn.Linear(8, 4)
    fast = graphed(model, backend="tape", static_roles=("input", "param"), copy_roles=(), verify="off")
    feeds = [x for x, _ in float_batches(CALLS)]

    @torch.no_grad()
    def run() -> None:
        while feeds:
            x = feeds.pop()
            assert torch.equal(fast(x), model(x))

    with pytest.warns(UserWarning, match=ELSEWHERE):
        run()
    assert fast.stats.captured == 1 and fast.stats.replayed == 0


@pytest.mark.twice
def test_gradients_of_what_is_not_copied() -> None:
    """They would be those of the tensor that was captured."""

    def make() -> Rig:
        rig = rig_with(places(1))
        rig.calls = [(x.clone().requires_grad_(), y) for x, y in rig.calls]
        return rig

    text = r"args\[0\] requires gradients, but copy_roles lacks input, .* Pass it detached"
    assert_refused(make, FeedError, text, done=WARMUP + TRACED, policy=ADOPTED)
