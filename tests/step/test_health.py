"""A capture that fails, at whatever operator, has not happened; a trace that does leaves what an eager step leaves.

Memory that runs out undoes both. The run goes on in any case.
"""

from __future__ import annotations

import gc
import itertools
import random
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphplan import CaptureMemoryError, SkipReason, UnownedTensorError, capture, compile_plan, graph_step
from graphplan.owners.snapshot import Snapshot
from graphplan.trace.mode import TraceMode
from graphplan.trace.rng import TracedGenerators
from tests.crossing import each
from tests.facts import assert_same
from tests.health import CALLS, RIGS, FailAt, Planted, carrying_rig, live_tensors, process_facts, scaled_rig
from tests.twins import Record, Rig, assert_same_runs, build, drive, keep, managed, state_of

PHASES = {"first trace": 3, "second trace": 4, "capture": 5}


COPYING = [TraceMode._mark_written.__code__, TraceMode._lift.__code__, TracedGenerators.check.__code__]


def within(code: CodeType) -> Callable[[Any], bool]:
    """Whether an operator is called below that code, and not by a trace for itself: it looks at generators, say."""

    def is_below(func: Any) -> bool:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code not in (code, *COPYING):
            frame = frame.f_back
        return frame is not None and frame.f_code is code

    return is_below


def broken_off(name: str, at: int, number: int, wrap: Callable[[Rig], Any]) -> tuple[Record, dict[str, Any], str, Any]:
    """A run whose call ``at`` fails at an operator of the step's, and which goes on as far as the step lets it: with
    the state after that call, the operator, and the step.
    """
    rig = build(RIGS[name])
    step, outputs, counts = wrap(rig), [], within(rig.step.__code__)
    left, failed_at = {}, ""
    for index, args in enumerate(rig.calls):
        with FailAt(number if index == at else -1, Planted("planted"), counts) as mode:
            try:
                outputs.append(keep(step(*args)))
            except RuntimeError as error:
                outputs.append(str(error))
        if index == at:
            left, failed_at = state_of(rig) | process_facts(), mode.failed_at
        rig.after(index)
    return Record(outputs, state_of(rig)), left, failed_at, step


@each(name=RIGS, phase=["first trace", "second trace"])
@pytest.mark.crossed(3, 2)
def test_a_trace_that_fails_at_any_operator_is_an_eager_step_that_does(name: str, phase: str) -> None:
    """The user's error comes out as it is, and leaves what eager would: running statistics, gradients, random numbers,
    a scaler that will not unscale again.
    """
    at, fired = PHASES[phase], 0
    for number in itertools.count(step=11):
        run, expected, failed_at, _ = broken_off(name, at, number, lambda rig: rig.step)
        found_run, found, found_at, step = broken_off(name, at, number, managed)
        assert failed_at == found_at
        if not failed_at:
            break
        fired += 1
        assert_same(expected, found)
        assert_same_runs(run, found_run)
        # Of a scaled step that failed between unscaling and the scaler's update no later one works, in eager neither.
        assert step.stats.traced == 2 + (phase == "second trace") or isinstance(run.outputs[-1], str)
    assert fired > 4


@pytest.mark.parametrize(("name", "first"), [*zip(RIGS, range(len(RIGS)), strict=True)])
@pytest.mark.crossed(3)
def test_a_capture_that_fails_at_any_operator_has_not_happened(name: str, first: int) -> None:
    """The user's error comes out as it is; state is as before; the batch, given again, leads to eager's run.

    At every third operator, of each rig at others.
    """
    rig = build(RIGS[name])
    expected = drive(rig, rig.step)
    rig = build(RIGS[name])
    step = managed(rig)
    outputs, failed = [], []
    for index, args in enumerate(rig.calls):
        for number in itertools.count(first, 3) if index == PHASES["capture"] else ():
            before, mode = state_of(rig) | process_facts(), FailAt(number, Planted(f"operator {number}"))
            with mode:
                try:
                    result = step(*args)
                except Planted as error:
                    # Its frames hold tensors of the step.
                    failed.append(error.with_traceback(None))
                else:
                    break
            assert failed[-1] is mode.error
            assert_same(before, state_of(rig) | process_facts())
        else:
            # The mode's code runs in each call: code that is new in a trace would make it begin anew.
            with FailAt(-1, Planted("never")):
                result = step(*args)
        outputs.append(keep(result))
        rig.after(index)
    assert len(failed) > 20
    assert_same_runs(expected, Record(outputs, state_of(rig)))
    stats = step.stats
    assert (stats.eager, stats.traced, stats.captured, stats.replayed) == (3, 2, 1, 3)


def out_of_memory() -> torch.OutOfMemoryError:
    """What torch raises on a device that is full."""
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it")


@each(phase=PHASES, name=RIGS)
@pytest.mark.crossed(3)
def test_memory_that_runs_out_leads_to_eager_steps(name: str, phase: str) -> None:
    """One warning, wherever it happens; every batch is trained on once."""
    at = PHASES[phase]
    rig = build(RIGS[name])
    expected = drive(rig, rig.step)
    fired = 0
    for number in itertools.count(step=19):
        rig, mode = build(RIGS[name]), FailAt(number, out_of_memory())
        step = managed(rig, on_failure="eager")
        begun = drive(rig, step, at)
        with warnings.catch_warnings(record=True) as caught, mode:
            warnings.simplefilter("always")
            result = step(*rig.calls[at])
        rig.after(at)
        rest = drive(replace(rig, calls=rig.calls[at + 1 :]), step)
        if not mode.failed_at:
            break
        fired += 1
        assert_same_runs(expected, Record([*begun.outputs, keep(result), *rest.outputs], state_of(rig)))
        (warning,) = caught
        text = r"eagerly: memory ran out .*\(CUDA out of memory.*2.00 GiB.\).*batch smaller"
        assert re.search(text, str(warning.message))
        assert step.stats.skipped == {SkipReason.CAPTURE: CALLS - at}
    assert fired > 3


@pytest.mark.parametrize("phase", ["second trace", "capture"])
@pytest.mark.parametrize("number", [0, 30, 60])
@pytest.mark.crossed(2)
@pytest.mark.twice
def test_a_step_that_went_eager_keeps_nothing_of_its_capture(number: int, phase: str) -> None:
    """Neither the copy of the state nor what was recorded, but for the static inputs."""
    rig = build(scaled_rig)
    step = managed(rig, on_failure="eager")
    drive(rig, step, PHASES[phase])
    kept = live_tensors()
    with pytest.warns(UserWarning, match="memory ran out"), FailAt(number, out_of_memory()):
        step(*rig.calls[-1])
    statics = len(rig.calls[0]) if phase == "capture" else 0
    assert kept <= live_tensors() <= kept + statics


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.crossed(3, 2)
@pytest.mark.twice
def test_memory_that_runs_out_is_a_refusal(phase: str) -> None:
    """It can be caught as what torch raises too; the call has not happened and holds nothing; the next one works."""
    rig = build(scaled_rig)
    expected = drive(rig, rig.step)
    rig = build(scaled_rig)
    step = managed(rig)
    begun = drive(rig, step, PHASES[phase])
    kept = live_tensors()
    for error in (out_of_memory(), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        for number in (0, 60):
            text = r"memory ran out .*on_failure='eager'"
            with pytest.raises(torch.OutOfMemoryError, match=text) as caught, FailAt(number, error):
                step(*rig.calls[PHASES[phase]])
            assert caught.type is CaptureMemoryError
            assert caught.value.reason is SkipReason.CAPTURE
            del caught
            error.__traceback__ = None
            assert_same(begun.state, state_of(rig))
            statics = len(rig.calls[0]) if phase == "capture" else 0
            assert kept <= live_tensors() <= kept + statics
    rest = drive(replace(rig, calls=rig.calls[PHASES[phase] :]), step)
    assert_same_runs(expected, Record(begun.outputs + rest.outputs, state_of(rig)))
    assert step.stats.replayed == 3


def not_putting_back(func: Any) -> bool:
    """Whether an operator does not come from ``Snapshot.restore``, which nothing could undo."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not Snapshot.restore.__code__:
        frame = frame.f_back
    return frame is None


@each(name=RIGS, begun=[0, 1])
@pytest.mark.crossed(3, 1)
def test_a_bare_capture_that_fails_at_any_operator(name: str, begun: int) -> None:
    """``capture`` leaves the owners as it found them too, whether or not the optimizer had made its state."""
    rig = build(RIGS[name])
    drive(rig, rig.step, begun)
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    before, failed = state_of(rig) | process_facts(), 0
    for number in itertools.count(step=5):
        error = out_of_memory() if number % 2 else Planted("planted")
        expected = CaptureMemoryError if number % 2 else Planted
        with FailAt(number, error, not_putting_back):
            try:
                capture(plan, feed=rig.calls[0], backend="tape")
            except expected:
                failed += 1
            else:
                break
        assert_same(before, state_of(rig) | process_facts())
    assert failed > 15


def within_autocast(rig: Rig, call: Callable[..., Any], before: Callable[..., object]) -> Record:
    """Make the rig's calls in an autocast block each, in which ``before`` comes first for the capture."""
    outputs = []
    for index, args in enumerate(rig.calls):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if index == PHASES["capture"]:
                before(*args)
            outputs.append(keep(call(*args)))
    return Record(outputs, state_of(rig))


def test_casts_that_autocast_remembers_of_a_failed_capture() -> None:
    """In the same autocast block the batch is given again: the casts are made, and recorded, anew."""

    def fail(*args: Any) -> None:
        with pytest.raises(Planted, match="planted"), FailAt(60, Planted("planted")):
            step(*args)
        # The error's frames hold what the step carries, and that would be captured anew instead of written over.
        gc.collect()

    rig = build(carrying_rig)
    expected = within_autocast(rig, rig.step, lambda *args: None)
    rig = build(carrying_rig)
    step = managed(rig)
    assert_same_runs(expected, within_autocast(rig, step, fail))
    assert step.stats.replayed == 3


def test_casts_that_autocast_remembers_when_the_step_is_captured() -> None:
    """The model ran in the same autocast block: the casts are recorded all the same, as the traces saw them."""
    rig = build(carrying_rig)
    expected = within_autocast(rig, rig.step, lambda x, y: rig.owners["model"](x))
    rig = build(carrying_rig)
    step = managed(rig)
    assert_same_runs(expected, within_autocast(rig, step, lambda x, y: rig.owners["model"](x)))
    assert step.stats.replayed == 3


@pytest.mark.parametrize("cache", [False, True])
def test_casts_that_autocast_remembers_from_before_the_step(cache: bool) -> None:
    """One autocast block around many calls computes with the weights that it began with: refused."""
    rig = build(carrying_rig)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
        expected = drive(rig, rig.step)
    rig = build(carrying_rig)
    step = managed(rig)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
        if cache:
            text = r"computed outside the step \(by ToCopyBackward0\).*cache_enabled=False"
            with pytest.raises(UnownedTensorError, match=text):
                drive(rig, step)
        else:
            assert_same_runs(expected, drive(rig, step))
            assert step.stats.replayed == 3


def test_draws_of_host_generators_are_undone() -> None:
    """A call that fails in its capture has not drawn from Python's and NumPy's generators either."""
    weight = torch.nn.Parameter(torch.ones(3))

    def train_step(x: Tensor) -> Tensor:
        random.random(), np.random.rand()
        return (weight * x).sum()

    step = graph_step(train_step, backend="tape", allow=("Python's random generator", "NumPy's random generator"))
    for _ in range(PHASES["capture"]):
        step(torch.ones(3))
    before = process_facts()
    with FailAt(0, Planted("now")), pytest.raises(Planted, match="now"):
        step(torch.ones(3))
    assert_same(before, process_facts())
    assert step(torch.ones(3)).item() == 3.0
    assert (step.stats.captured, step.stats.replayed) == (1, 0)
