"""A trace or a capture that fails, at whatever operator, has not happened; the run goes on as if nothing had been."""

from __future__ import annotations

import itertools
import re
import warnings
from dataclasses import replace

import pytest
import torch

from graphplan import CaptureMemoryError, SkipReason
from tests.facts import assert_same
from tests.health import CALLS, RIGS, FailAt, Planted, live_tensors, process_facts, scaled_rig
from tests.twins import Record, assert_same_runs, build, drive, keep, managed, state_of

PHASES = {"first trace": 3, "second trace": 4, "capture": 5}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", RIGS)
def test_a_call_that_fails_at_any_operator_has_not_happened(name: str, phase: str) -> None:
    """The user's error comes out as it is; state is as before; the batch, given again, leads to eager's run."""
    rig = build(RIGS[name])
    expected = drive(rig, rig.step)
    rig = build(RIGS[name])
    step = managed(rig)
    outputs, failed = [], []
    for index, args in enumerate(rig.calls):
        for number in itertools.count() if index == PHASES[phase] else ():
            before, mode = state_of(rig) | process_facts(), FailAt(number, Planted(f"operator {number}"))
            with mode:
                try:
                    result = step(*args)
                except Planted as error:
                    failed.append(error)
                else:
                    break
            assert failed[-1] is mode.error
            assert_same(before, state_of(rig) | process_facts())
        else:
            result = step(*args)
        outputs.append(keep(result))
        rig.after(index)
    assert len(failed) > 60
    assert_same_runs(expected, Record(outputs, state_of(rig)))
    stats = step.stats
    assert (stats.eager, stats.traced, stats.captured, stats.replayed) == (3, 2, 1, 3)


def out_of_memory() -> torch.OutOfMemoryError:
    """What torch raises on a device that is full."""
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", RIGS)
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
