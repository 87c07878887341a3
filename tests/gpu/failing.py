"""Captures that fail on the device: running them, and what has to be as before."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.devices import (
    BACKEND,
    CUDA,
    DEVICE,
    assert_frees_cached_memory,
    assert_memory_returned,
    drawing_nothing,
    is_healthy,
    memory,
    on_device,
    oracle,
)
from tests.facts import assert_same
from tests.health import CALLS, FailAt, carrying_rig, process_facts, scaled_rig
from tests.twins import BEFORE_REPLAY, Record, Rig, assert_same_runs, build, drive, managed, state_of

AT = BEFORE_REPLAY - 1
"""The call that captures."""
RIGS: dict[str, Callable[[], Rig]] = {
    "scaled": on_device(partial(scaled_rig, DEVICE.type)),
    "carrying": on_device(partial(carrying_rig, DEVICE.type)),
}


def recorded(func: Any) -> bool:
    """Whether the operator is called while a capture is going on (on the CPU: at all)."""
    return not CUDA or torch.cuda.is_current_stream_capturing()


def called(pattern: str) -> Callable[[Any], bool]:
    """Whether a recorded operator's name matches."""
    return lambda func: re.match(pattern, str(func)) is not None and recorded(func)


def assert_goes_on(rig: Rig, before: dict[str, Any]) -> None:
    """Fail unless state and process are as before, and the device computes, draws and frees memory."""
    assert_same(before, state_of(rig) | process_facts())
    with drawing_nothing():
        is_healthy()
    if CUDA:
        assert not torch.cuda.is_current_stream_capturing()
        assert_frees_cached_memory()


def run_through(make: Callable[[], Rig], modes: list[FailAt], error: type[BaseException], match: str) -> None:
    """Let the capturing call fail once under each mode, then go on; the run must be eager's."""
    rig = build(make)
    expected = drive(rig, oracle(rig))
    rig = build(make)
    step = managed(rig, backend=BACKEND)
    begun = drive(rig, step, AT)
    start = memory()
    for mode in modes:
        before = state_of(rig) | process_facts()
        with pytest.raises(error, match=match) as caught, mode:
            step(*rig.calls[AT])
        assert type(caught.value) is error, f"{caught.value!r} at {mode.failed_at}"
        del caught
        mode.error = lambda: None
        assert_goes_on(rig, before)
        del before
        assert_memory_returned(start)
    rest = drive(replace(rig, calls=rig.calls[AT:]), step)
    assert_same_runs(expected, Record(begun.outputs + rest.outputs, state_of(rig)))
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - BEFORE_REPLAY)


def operators_of_capture(make: Callable[[], Rig]) -> int:
    """How many operators the capturing call records."""
    rig = build(make)
    step = managed(rig, backend=BACKEND)
    drive(rig, step, AT)
    mode = FailAt(10**9, lambda: None, recorded)
    with mode:
        step(*rig.calls[AT])
    return 10**9 - mode.left


def forbidden() -> None:
    """What CUDA refuses in a capture, and gives the capture up for."""
    torch.cuda.current_stream().synchronize()


def too_much() -> Tensor:
    """A tensor that no machine has room for."""
    return torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)
