"""Captures that fail on the device: the process can train on, with the numbers and the memory of before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from graphplan import CaptureError
from tests.devices import BACKEND, DEVICE, drawing_nothing, is_healthy, needs_cuda, on_device, oracle
from tests.gpu.failing import (
    AT,
    RIGS,
    assert_goes_on,
    called,
    forbidden,
    operators_of_capture,
    recorded,
    run_through,
    too_much,
)
from tests.health import CALLS, FailAt, Planted, process_facts, scaled_rig
from tests.models import Mlp, float_batches
from tests.twins import (
    BEFORE_REPLAY,
    BEFORE_TWO,
    Record,
    Rig,
    assert_same_runs,
    build,
    drive,
    keep,
    managed,
    state_of,
)

PLACES = {
    "a matrix product": r"aten\.(addmm|mm|linear)\.",
    "dropout": r"aten\.(native_dropout|bernoulli_|_fused_dropout)\.",
    "the loss": r"aten\.nll_loss_forward",
    "the loss's backward": r"aten\.nll_loss_backward",
    "batch norm's backward": r"aten\..*batch_norm_backward",
    "unscale_": r"aten\._amp_foreach_non_finite_check_and_unscale_",
    "the norm, after unscale_": r"aten\._foreach_norm",
    "the clipping": r"aten\._foreach_mul_",
    "the optimizer": r"aten\._fused_adamw_",
    "the scaler's update": r"aten\._amp_update_scale_",
}


@pytest.mark.parametrize("name", RIGS)
@pytest.mark.parametrize("error", [Planted, KeyboardInterrupt])
@pytest.mark.twice
def test_an_error_of_the_users_at_ten_operators(error: type[BaseException], name: str) -> None:
    """It comes out as it is, ten times over the step's length; the eleventh call is captured; the run is eager's."""
    count = operators_of_capture(RIGS[name])
    assert count > 30
    modes = [FailAt(count * part // 10, error("planted"), recorded) for part in range(10)]
    run_through(RIGS[name], modes, error, "planted")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.twice
def test_an_error_of_the_users_at_a_named_operator(place: str) -> None:
    """The same at the operators that leave the most behind: random ones, after ``unscale_``, in the optimizer."""
    mode = FailAt(0, Planted("planted"), called(PLACES[place]))
    run_through(RIGS["scaled"], [mode], Planted, "planted")
    assert mode.failed_at


@needs_cuda
@pytest.mark.parametrize("name", RIGS)
@pytest.mark.twice
def test_a_capture_that_cuda_gives_up_at_ten_operators(name: str) -> None:
    """CaptureError each time; allocator, pools, generators and streams are as good as before."""
    count = operators_of_capture(RIGS[name])
    modes = [FailAt(count * part // 10, forbidden, recorded) for part in range(10)]
    run_through(RIGS[name], modes, CaptureError, "captur")


@needs_cuda
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.twice
def test_a_capture_that_cuda_gives_up_at_a_named_operator(place: str) -> None:
    """The same at the operators that leave the most behind."""
    run_through(RIGS["scaled"], [FailAt(0, forbidden, called(PLACES[place]))], CaptureError, "captur")


@pytest.mark.parametrize("what", [Planted("planted"), too_much, pytest.param(forbidden, marks=needs_cuda)])
@pytest.mark.twice
def test_a_failed_capture_beside_a_living_program(what: Any) -> None:
    """A second signature's capture fails and is made later; the first program, whose pool it shared, replays on."""

    def make() -> Rig:
        rig = scaled_rig(DEVICE.type, calls=24)
        rig.calls = [(x[:4], y[:4]) if index % 2 else (x, y) for index, (x, y) in enumerate(rig.calls)]
        return rig

    rig = build(on_device(make))
    expected = drive(rig, oracle(rig))
    rig = build(on_device(make))
    step, outputs = managed(rig, backend=BACKEND), []
    has_failed = False
    for index, args in enumerate(rig.calls):
        if step.stats.captured == 1 and not has_failed:
            # The signatures come in turn.
            has_failed = True
            before = state_of(rig) | process_facts()
            with pytest.raises((Planted, CaptureError), match=r"planted|captured"), FailAt(20, what, recorded):
                step(*args)
            assert_goes_on(rig, before)
        outputs.append(keep(step(*args)))
        rig.after(index)
    assert_same_runs(expected, Record(outputs, state_of(rig)))
    assert (step.stats.captured, step.stats.replayed) == (2, 24 - BEFORE_TWO)
    step.close()
    with drawing_nothing():
        is_healthy()


@pytest.mark.parametrize("what", [Planted("planted"), pytest.param(forbidden, marks=needs_cuda)])
@pytest.mark.twice
def test_a_failed_capture_within_the_callers_autocast(what: Any) -> None:
    """Casts of the weights that the capture made, and autocast remembers, are not what the next call computes with."""

    def make() -> Rig:
        model = Mlp()
        optimizer = SGD(model.parameters(), lr=0.05, fused=True)

        def train_step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(CALLS)))

    def run(rig: Rig, call: Callable[..., Any], failing: Callable[[Any], None] = lambda args: None) -> Record:
        outputs = []
        for index, args in enumerate(rig.calls):
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                if index == AT:
                    failing(args)
                outputs.append(keep(call(*args)))
        return Record(outputs, state_of(rig))

    def fail(args: Any) -> None:
        with (
            pytest.raises((Planted, CaptureError), match=r"planted|captured"),
            FailAt(0, what, called(r"aten\.nll_loss_backward")),
        ):
            step(*args)

    rig = build(on_device(make))
    expected = run(rig, oracle(rig))
    rig = build(on_device(make))
    step = managed(rig, backend=BACKEND)
    assert_same_runs(expected, run(rig, step, fail))
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - BEFORE_REPLAY)
