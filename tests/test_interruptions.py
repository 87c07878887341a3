"""Interrupts, errors of hooks, second threads, calls within calls, second models: a clear end, and runs that go on."""

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

from graphplan import BusyError, CaptureError, CopyError, SkipReason
from tests.facts import assert_same
from tests.health import FailAt, Planted, carrying_rig, process_facts, scaled_rig
from tests.twins import Record, Rig, assert_same_runs, build, drive, keep, managed, state_of
from tests.zoo import training_rig

PHASES = {"warm-up": 1, "first trace": 3, "second trace": 4, "capture": 5, "replay": 7}
LSTM = partial(training_rig, "lstm", "adamw", sizes=(4,) * 12)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Planted])
def test_an_interrupt_leaves_a_step_that_goes_on(error: type[BaseException], phase: str) -> None:
    """Wherever it comes; a twin that gets the state of that moment goes on in the same way."""
    at = PHASES[phase]
    for number in (0, 5, 40):
        rig, twin = build(LSTM), build(LSTM)
        step, facts = managed(rig), process_facts()
        drive(rig, step, at)
        with pytest.raises(error, match="now") as caught, FailAt(number, error("now")):
            step(*rig.calls[at])
        assert type(caught.value) is error
        assert process_facts() == facts
        assert all(type(group["lr"]) is float for group in rig.owners["optimizer"].param_groups)
        if phase == "warm-up":
            continue  # An eager step that makes the optimizer's state has no twin that could take over from it.
        drive(twin, managed(twin), at)
        for name in ("model", "optimizer"):
            twin.owners[name].load_state_dict(copy.deepcopy(rig.owners[name].state_dict()))
        rng = torch.get_rng_state()
        expected = drive(replace(twin, calls=twin.calls[at:]), twin.step)
        torch.set_rng_state(rng)
        found = drive(replace(rig, calls=rig.calls[at:]), step)
        assert_same_runs(expected, found)
        assert step.stats.replayed == len(rig.calls) - 6


def _in_forward(rig: Rig, hook: Callable[[], object]) -> Any:
    return rig.owners["model"].head.register_forward_hook(lambda module, args, out: hook())


def _in_backward(rig: Rig, hook: Callable[[], object]) -> Any:
    return rig.owners["model"].head.weight.register_hook(lambda grad: hook())


def _in_optimizer(rig: Rig, hook: Callable[[], object]) -> Any:
    return rig.owners["optimizer"].register_step_pre_hook(lambda optimizer, args, kwargs: hook())


@pytest.mark.parametrize("phase", ["first trace", "second trace", "capture"])
@pytest.mark.parametrize("register", [_in_forward, _in_backward, _in_optimizer])
def test_an_error_of_a_hook(register: Callable[[Rig, Any], Any], phase: str) -> None:
    """It comes out, the call has not happened, and the run equals eager's."""

    def hook() -> None:
        if armed:
            raise armed[0]

    armed: list[BaseException] = []
    rig = build(LSTM)
    expected = drive(rig, rig.step)
    rig = build(LSTM)
    register(rig, hook)
    step, at = managed(rig), PHASES[phase]
    begun = drive(rig, step, at)
    armed.append(Planted("from a hook"))
    with pytest.raises(Planted, match="from a hook"):
        step(*rig.calls[at])
    assert_same(begun.state, state_of(rig))
    armed.clear()
    rest = drive(replace(rig, calls=rig.calls[at:]), step)
    assert_same_runs(expected, Record(begun.outputs + rest.outputs, state_of(rig)))
    assert step.stats.captured == 1


def reading_rig(at: int) -> Rig:
    """A step that reads a value on the host in call number ``at`` only."""
    rig = carrying_rig()
    calls: list[int] = []

    def step(x: Tensor, y: Tensor) -> Any:
        result = train(x, y)
        if len(calls) == at:
            result[0].detach().item()  # culprit
        return result

    train, rig.step = rig.step, step
    rig.after = calls.append
    return rig


def test_a_host_read_that_only_the_capture_sees() -> None:
    """The recording is refused with the line, after the step has run; the call is undone."""
    rig = build(partial(reading_rig, 5))
    step = managed(rig)
    begun = drive(rig, step, 5)
    with pytest.raises(CaptureError, match=r"cannot record.*_local_scalar_dense.*result\[0\].*traced steps did not"):
        step(*rig.calls[5])
    assert_same(begun.state, state_of(rig))
    rig = build(partial(reading_rig, 5))
    expected = drive(rig, rig.step)
    rig = build(partial(reading_rig, 5))
    step = managed(rig, on_failure="eager")
    with pytest.warns(UserWarning, match="cannot record"):
        found = drive(rig, step)
    assert_same_runs(expected, found)
    assert step.stats.skipped == {SkipReason.CAPTURE: 4}


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


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("where", [elsewhere, here])
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
    assert step.stats.replayed == 3
    assert type(errors[0]) is BusyError
    text = "within its own call" if where is here else "another thread"
    assert text in str(errors[0]) and "expected one call at a time" in str(errors[0])


def test_a_step_that_calls_itself() -> None:
    """The error comes out of the outer call, and the step is as good as before."""

    def train_step(x: Tensor, y: Tensor) -> Any:
        return step(x, y)

    step = managed(replace(carrying_rig(), step=train_step))
    for _ in range(2):
        with pytest.raises(BusyError, match=r"within its own call.*one call at a time"):
            step(torch.ones(1), torch.ones(1))


def test_a_turn_that_nobody_has() -> None:
    """An interrupt right after the lock was taken must not lock the step for good."""
    rig = build(carrying_rig)
    step = managed(rig)
    step._turn.acquire()
    drive(rig, step)
    assert step.stats.replayed == 3
    step._turn.acquire()
    step.close()


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

    step = managed(rig)
    drive(rig, step, PHASES[phase])
    with FailAt(35, partial(elsewhere, train_other)):
        step(*rig.calls[0])
    while step.stats.eager < 3:
        step(*rig.calls[0])
    weight = other.weight.detach().clone()
    with FailAt(35, partial(elsewhere, train_other)), pytest.raises(Planted), FailAt(45, Planted("after it")):
        step(*rig.calls[0])
    assert not torch.equal(weight, other.weight)
    assert not optimizer.param_groups[0].get("fused")


def test_a_second_model_in_the_process() -> None:
    """Two steps in turn, one of which cannot be captured: both runs are eager's."""

    def run(wrap: Callable[[Rig], Any], around: Any) -> list[Any]:
        first, second = build(scaled_rig), build(LSTM)
        steps, outputs = (wrap(first), wrap(second)), []
        for index, (one, two) in enumerate(zip(first.calls, second.calls, strict=False)):
            with FailAt(10**9 if index != 5 else 30, around):
                outputs.append(keep(steps[0](*one)))
            outputs.append(keep(steps[1](*two)))
            first.after(index)
            second.after(index)
        facts = [step.stats.replayed for step in steps if step not in (first.step, second.step)]
        return [Record(outputs, {**state_of(first), **state_of(second)}), facts]

    expected, _ = run(lambda rig: rig.step, lambda: None)
    with pytest.warns(UserWarning, match="memory ran out"):
        found, replayed = run(partial(managed, on_failure="eager"), torch.OutOfMemoryError("CUDA out of memory"))
    assert_same_runs(expected, found)
    assert replayed == [0, 3]


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


@pytest.mark.parametrize("calls", [2, 8])
def test_owners_can_be_copied_while_a_step_manages_them(calls: int) -> None:
    """The copy trains on as an eager model of its own, with the numbers of the original."""
    rig = build(LSTM)
    step = managed(rig)
    drive(rig, step, calls)
    model, optimizer = copy.deepcopy((rig.owners["model"], rig.owners["optimizer"]))
    rng = torch.get_rng_state()
    for args in rig.calls[:3]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(args[0]), args[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.set_rng_state(rng)
    for args in rig.calls[:3]:
        step(*args)
    assert_same(dict(model.state_dict()), dict(rig.owners["model"].state_dict()))
