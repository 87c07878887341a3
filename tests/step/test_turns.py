"""One call of a step at a time: second threads, calls within calls, and copies are refused; threads may take turns."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphplan import BusyError, CopyError
from tests.crossing import pairs
from tests.health import FailAt, Planted, carrying_rig, scaled_rig
from tests.models import training_rig
from tests.step.test_interruptions import PHASES
from tests.twins import Record, assert_same_runs, build, drive, keep, line_of, managed, state_of


def elsewhere(call: Callable[[], object]) -> BaseException | None:
    """What ``call`` raises in a thread of its own."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            call()
        except BusyError as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return errors[0] if errors else None


def here(call: Callable[[], object]) -> BaseException | None:
    """What ``call`` raises in this thread."""
    try:
        call()
    except BusyError as error:
        return error
    return None


USES: dict[str, Callable[[Any, Any], object]] = {
    "call": lambda step, args: step(*args),
    "close": lambda step, args: step.close(),
    "invalidate": lambda step, args: step.invalidate("because"),
}


@pairs(phase=PHASES, use=USES, where=[elsewhere, here])
def test_a_step_that_is_busy(where: Callable[..., Any], use: str, phase: str) -> None:
    """A second use of it is refused, from its own call or from another thread; the first goes on unharmed."""
    rig = build(scaled_rig)
    expected = drive(rig, rig.step)
    rig = build(scaled_rig)
    step, at, errors = managed(rig), PHASES[phase], []
    begun = drive(rig, step, at)
    with FailAt(7, lambda: errors.append(where(lambda: USES[use](step, rig.calls[0])))):
        result = step(*rig.calls[at])
    rig.after(at)
    rest = drive(replace(rig, calls=rig.calls[at + 1 :]), step)
    assert_same_runs(expected, Record([*begun.outputs, keep(result), *rest.outputs], state_of(rig)))
    # Code that is new in a trace makes it begin anew.
    assert step.stats.captured == 1 and step.stats.replayed >= 1
    assert type(errors[0]) is BusyError
    assert "expected one call at a time" in str(errors[0])


def test_a_step_that_calls_itself() -> None:
    """The error comes out of the outer call, and the step is as good as before."""

    def train_step(x: Tensor, y: Tensor) -> Any:
        return step(x, y)

    step = managed(replace(carrying_rig(), step=train_step))
    for _ in range(2):
        with pytest.raises(BusyError, match=r"within its own call; expected one call at a time"):
            step(torch.ones(1), torch.ones(1))


def test_a_step_within_another_one() -> None:
    """It was said to compute with a learning rate. The inner one is replayed in calls of the outer one."""
    make = partial(training_rig, "mlp", "adamw", sizes=(8,) * 40)
    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    inner = managed(rig)

    def outer(x: Tensor, y: Tensor) -> Any:
        return inner(x, y)  # culprit

    step = managed(replace(rig, step=outer), on_failure="eager")
    with pytest.warns(
        UserWarning, match=rf"calls another graphed step at {line_of(outer)} in outer.*Call the original fun"
    ):
        assert_same_runs(expected, drive(rig, step))
    assert inner.stats.replayed and not step.stats.replayed


@pytest.mark.twice
def test_two_threads_take_turns() -> None:
    """Calls from several threads, one after the other, are the run of one."""
    rig = build(scaled_rig)
    expected = drive(rig, rig.step)
    rig = build(scaled_rig)
    step, results = managed(rig), []
    for index, args in enumerate(rig.calls):
        call = partial(lambda args: results.append(keep(step(*args))), args)
        assert elsewhere(call) is None
        rig.after(index)
    assert_same_runs(expected, Record(results, state_of(rig)))
    assert step.stats.replayed == 3


@pytest.mark.parametrize("phase", ["warm-up", "first trace"])
def test_what_another_thread_runs_is_not_the_steps(phase: str) -> None:
    """A model that runs meanwhile is not taken for an owner: undoing a call must not undo the other thread's work."""
    rig, other = build(carrying_rig), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def train_other() -> None:
        other(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    step = managed(rig, allow=["Thread.start"])
    drive(rig, step, PHASES[phase])
    with FailAt(35, partial(elsewhere, train_other)):
        step(*rig.calls[0])
    while step.stats.eager < 3:
        step(*rig.calls[0])
    weight = other.weight.detach().clone()
    with (
        FailAt(35, partial(elsewhere, train_other)),
        pytest.raises(Planted, match="after it"),
        FailAt(45, Planted("after it")),
    ):
        step(*rig.calls[0])
    assert not torch.equal(weight, other.weight)
    assert not optimizer.param_groups[0].get("fused")


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("calls", [0, 8])
def test_a_step_cannot_be_copied(make: Callable[[Any], Any], calls: int) -> None:
    """Neither new nor with a program; as a part of something else neither."""
    rig = build(carrying_rig)
    step = managed(rig)
    drive(rig, step, calls)
    for thing in (step, [step]):
        if make is not copy.copy or thing is step:
            with pytest.raises(CopyError, match=r"cannot be copied or pickled.*graph_step"):
                make(thing)
    drive(rig, step)
    assert step.stats.replayed == calls + 9 - 6


def test_another_thread_that_trains() -> None:
    """It goes through torch's global hooks of optimizers while a step looks for its own: these stay as they are."""
    rig, stepping, go = build(partial(training_rig, "mlp", "adamw")), threading.Event(), threading.Event()
    errors: list[BaseException] = []
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    other = torch.optim.SGD([weight])

    def pause(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer is other:
            stepping.set()
            go.wait(60)

    def body() -> None:
        try:
            other.step()
        except RuntimeError as error:
            errors.append(error)

    # Two of them: what comes after the last one is asked for before it runs.
    handles, thread = [register_optimizer_step_pre_hook(pause) for _ in range(2)], threading.Thread(target=body)
    try:
        thread.start()
        assert stepping.wait(60)
        managed(rig)(*rig.calls[0])
    finally:
        go.set()
        thread.join()
        for handle in handles:
            handle.remove()
    assert not errors
