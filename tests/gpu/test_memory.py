"""Captures for which memory runs out: eager steps that fit go on, and get back what the capture took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from graphplan import CaptureMemoryError, SkipReason
from tests.gpu.failing import AT, RIGS, forbidden, operators_of_capture, recorded, run_through, too_much
from tests.gpu.helpers import (
    BACKEND,
    DEVICE,
    MIB,
    assert_frees_cached_memory,
    assert_memory_returned,
    drawing_nothing,
    is_healthy,
    memory,
    needs_cuda,
    on_device,
    oracle,
)
from tests.health import CALLS, FailAt
from tests.twins import Record, Rig, assert_same_runs, build, drive, managed, state_of


@pytest.mark.parametrize("name", RIGS)
def test_memory_that_runs_out_in_a_capture(name: str) -> None:
    """A refusal that is also what torch raises; the memory is back, and the next call is captured."""
    count = operators_of_capture(RIGS[name])
    modes = [FailAt(count * part // 5, too_much, recorded) for part in range(5)]
    run_through(RIGS[name], modes, CaptureMemoryError, "memory ran out .*on_failure='eager'")


@pytest.mark.parametrize("what", [too_much, pytest.param(forbidden, marks=needs_cuda)])
@pytest.mark.parametrize("name", RIGS)
def test_a_failed_capture_goes_on_eagerly(name: str, what: Callable[[], object]) -> None:
    """One warning, eager's numbers, and no more memory than before."""
    rig = build(RIGS[name])
    expected = drive(rig, oracle(rig))
    del expected.outputs[AT]
    count = operators_of_capture(RIGS[name])
    for part in range(3):
        rig = build(RIGS[name])
        step = managed(rig, backend=BACKEND, on_failure="eager")
        begun = drive(rig, step, AT)
        start = memory()
        with pytest.warns(UserWarning, match="runs this step eagerly"), FailAt(count * part // 3, what, recorded):
            step(*rig.calls[AT])
        assert_memory_returned(start)
        rig.after(AT)
        rest = drive(replace(rig, calls=rig.calls[AT + 1 :]), step)
        assert_same_runs(expected, Record(begun.outputs + rest.outputs, state_of(rig)))
        assert step.stats.skipped == {SkipReason.CAPTURE: CALLS - AT}
        with drawing_nothing():
            is_healthy()


def wide_rig() -> Rig:
    """A step whose activations are much larger than its state."""
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 8))
    optimizer = SGD(model.parameters(), lr=1e-3, fused=True)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    calls = [(torch.randn(8192, 64),) for _ in range(CALLS)]
    return Rig(train_step, {"model": model, "optimizer": optimizer}, calls)


@needs_cuda
def test_a_device_on_which_only_eager_steps_fit() -> None:
    """The pool of a capture does not fit beside what eager steps reserve: they go on, within the same limit."""
    make = on_device(wide_rig)
    rig = build(make)
    expected = drive(rig, oracle(rig))
    rig = build(make)
    step = managed(rig, backend=BACKEND, on_failure="eager")
    begun = drive(rig, step, AT)
    _, total = torch.cuda.mem_get_info(DEVICE)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(DEVICE) + 64 * MIB) / total, DEVICE)
    try:
        with pytest.warns(UserWarning, match=r"memory ran out .*CUDA out of memory"):
            rest = drive(replace(rig, calls=rig.calls[AT:]), step)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    assert_same_runs(expected, Record(begun.outputs + rest.outputs, state_of(rig)))
    assert step.stats.skipped == {SkipReason.CAPTURE: CALLS - AT}
    assert_frees_cached_memory()
