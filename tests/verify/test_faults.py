"""Faults that no guard sees, because what the step depends on lies where graphplan cannot look: checks find them."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphplan import SkipReason, VerifyError
from tests.crossing import each
from tests.facts import assert_same, flatten
from tests.failure_modes.naive import CALLS, changing_rig, loss_of, run_eagerly, stay
from tests.models import Box
from tests.step.test_messages import WAY_OUT
from tests.twins import BEFORE_REPLAY, Rig, assert_same_runs, build, drive, keep, managed, state_of

pytestmark = pytest.mark.usefixtures("room")
EARLY, LATE = BEFORE_REPLAY, BEFORE_REPLAY + 2
"""The call that a fault begins in: replay 1, which is checked, or replay 3, which is not."""
FOUND = BEFORE_REPLAY + 3
"""The call with replay 4, where a check finds what began late."""


def decaying_float(begin: int) -> Rig:
    """A loss weight on a Python schedule, on an object without a dictionary."""
    weight = Box(1.0)

    def each(model: Any, optimizer: Any, index: int) -> None:
        weight.item = 0.5 ** max(0, index + 2 - begin)

    return changing_rig(stay, lambda model, x, y: loss_of(model, x, y) * weight.item, each=each)


def branching_on_a_count(begin: int) -> Rig:
    """A branch on the number of the step, which an iterator keeps."""
    count = Box(itertools.count())

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        value = loss_of(model, x, y)
        return value * 3 if next(count.item) >= begin else value

    return changing_rig(stay, loss)


def drawing_from_numpy(begin: int) -> Rig:
    """NumPy noise in memory that a tensor shares: the operators are the same ones on the same tensor each time."""
    memory, noise, count = Box(np.zeros((6, 8), np.float32)), Box(np.random.default_rng(1)), Box(itertools.count())
    shared = torch.from_numpy(memory.item)

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        if next(count.item) >= begin:
            noise.item.standard_normal(dtype=np.float32, out=memory.item)
        return loss_of(model, x + shared, y)

    return changing_rig(stay, loss)


def writing_behind_the_dispatcher(begin: int) -> Rig:
    """A buffer that other code than torch's raises through a view of its memory."""
    total, count = torch.ones(4), Box(itertools.count())
    memory = Box(total.numpy())

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        if next(count.item) >= begin:
            np.add(memory.item, 1.0, out=memory.item)
        return loss_of(model, x, y) * model.total.mean()

    return changing_rig(stay, loss, prepare=lambda model: model.register_buffer("total", total))


class Derived(Optimizer):
    """Somebody's optimizer, with a rate that a count of its steps decides."""

    def __init__(self, params: Iterable[nn.Parameter], begin: int) -> None:
        super().__init__(params, {})
        self._count, self.begin = Box(0), begin

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rate = 0.05 if self._count.item < self.begin else 0.2
        self._count.item += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-rate)


class Plain:
    """The same without torch's base class."""

    def __init__(self, params: Iterable[nn.Parameter], begin: int) -> None:
        self.params = list(params)
        self._count, self.begin = Box(0), begin

    def zero_grad(self) -> None:
        for parameter in self.params:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        rate = 0.05 if self._count.item < self.begin else 0.2
        self._count.item += 1
        for parameter in self.params:
            parameter.sub_(parameter.grad * rate)


def stepping_with(kind: Callable[..., Any], begin: int) -> Rig:
    """Training with an optimizer that counts its steps on the host."""
    return changing_rig(stay, make_optimizer=lambda params: kind(params, begin))


IN_THE_LOSS = r"result: [\d.]+ by the replay, [\d.]+ by the eager step; two replays differ by 0 \(and \d+ more: "
IN_THE_UPDATE = (
    r"model\.0\.weight: \d+ of 128 elements differ, by [\d.e-]+ \(Euclidean\); the replay's update is "
    r"[\d.e-]+ long, the eager step's [\d.e-]+; two replays differ by 0 \(and \d+ more: "
)
FAULTS: dict[str, tuple[Callable[[int], Rig], str]] = {
    "a float that decays": (decaying_float, IN_THE_LOSS),
    "a branch on a count": (branching_on_a_count, IN_THE_LOSS),
    "NumPy noise": (drawing_from_numpy, IN_THE_LOSS),
    "a write that nobody sees": (writing_behind_the_dispatcher, IN_THE_LOSS),
    "an optimizer that counts": (partial(stepping_with, Derived), IN_THE_UPDATE),
    "an optimizer of no known kind": (partial(stepping_with, Plain), IN_THE_UPDATE),
}


@pytest.mark.parametrize("begin", [EARLY, LATE])
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.crossed(2)
def test_nothing_but_a_check_sees_the_faults(name: str, begin: int) -> None:
    """Without checks every step is replayed, nothing is refused or captured anew, and the numbers are wrong."""
    make = partial(FAULTS[name][0], begin)
    rig = build(make)
    step = managed(rig, verify="off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = drive(rig, step)
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - BEFORE_REPLAY)
    with pytest.raises(AssertionError, match="differences"):
        assert_same_runs(run_eagerly(make), found)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.crossed(2, 1)
@pytest.mark.twice
def test_the_first_replay_is_found_wrong(name: str) -> None:
    """The error names path and figures and has eager's result; the state is eager's, then and ever after."""
    make, pattern = FAULTS[name]
    rig, twin = build(partial(make, EARLY)), build(partial(make, EARLY))
    # The two share torch's generator, so each call starts from the same state.
    step = managed(rig)
    for index in range(CALLS):
        torch.manual_seed(index)
        expected = keep(twin.step(*twin.calls[index]))
        left = state_of(twin)
        torch.manual_seed(index)
        if index == EARLY:
            told = rf"^replay 1 of .*train_step is not what the eager step does: {pattern}(?s:.*)nothing is lost"
            match = rf"{told}\. {re.escape(WAY_OUT)}$"
            with pytest.raises(VerifyError, match=match) as caught:
                step(*rig.calls[index])
            found = caught.value.result
            assert not found.requires_grad
        else:
            found = step(*rig.calls[index])
        assert_same(flatten(out=expected), flatten(out=keep(found)))
        assert_same(left, state_of(rig))
        for side in (rig, twin):
            side.after(index)
    stats = step.stats
    assert (stats.replayed, stats.verified, stats.skipped[SkipReason.VERIFY]) == (0, 0, CALLS - EARLY - 1)
    assert list(stats.events) == [f"invalidated: {str(caught.value).removesuffix(f'. {WAY_OUT}')}"]


@each(name=FAULTS, on_failure=["raise", "eager"])
@pytest.mark.crossed(2)
@pytest.mark.twice
def test_a_later_replay_is_found_wrong(name: str, on_failure: str) -> None:
    """One warning, an event, and from that call on each step is the eager one, from the state that there was."""
    make, pattern = partial(FAULTS[name][0], LATE), FAULTS[name][1]
    rig = build(make)
    step = managed(rig, on_failure=on_failure)
    with pytest.warns(UserWarning, match=rf"runs this step eagerly: replay 4 of .*: {pattern}") as caught:
        found = drive(rig, step)
    assert len(caught) == 1
    stats = step.stats
    assert (stats.replayed, stats.verified) == (3, 2)
    assert stats.eager == 3 + CALLS - FOUND == 3 + stats.skipped[SkipReason.VERIFY]
    (event,) = stats.events
    assert event.startswith("invalidated: replay 4 of") and event in step.report()
    rig = build(make)
    step = managed(rig, on_failure=on_failure)
    calls = itertools.count()
    expected = drive(rig, lambda *args: (step if next(calls) < FOUND else rig.step)(*args))
    assert_same_runs(expected, found)
    with pytest.raises(AssertionError, match="differences"):
        assert_same_runs(run_eagerly(make), found)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.twice
def test_a_step_whose_every_replay_is_checked_is_never_wrong(name: str) -> None:
    """``verify=1`` costs an eager step each time, and then the whole run is eager's."""
    make = partial(FAULTS[name][0], LATE)
    rig = build(make)
    with pytest.warns(UserWarning, match="replay 3 of"):
        found = drive(rig, managed(rig, verify=1))
    assert_same_runs(run_eagerly(make), found)
