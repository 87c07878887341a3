"""Gradient scalers on the device: a graph skips the steps that the host would have skipped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, RMSprop

from graphplan import HostSyncError
from tests.devices import BACKEND, DEVICE, on_device, oracle
from tests.facts import assert_same, flatten
from tests.optimizers.test_gradient_scaler import CALLS, scaled_rig
from tests.twins import BEFORE_REPLAY, Record, Rig, build, drive, managed

FUSABLE: dict[str, Callable[..., Any]] = {
    "adamw": partial(AdamW, lr=1e-2),
    "amsgrad": partial(Adam, lr=1e-2, amsgrad=True),
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
}


def scaled(make: Callable[..., Any], **options: Any) -> Rig:
    """Training with a scaler on the device; clipping, so that the scaler unscales before any kernel could."""
    return build(on_device(partial(scaled_rig, make, device=DEVICE.type, **options)))


def facts(rig: Rig, run: Record) -> dict[str, Any]:
    """What two runs with differently flagged optimizers have in common."""
    return flatten(outputs=run.outputs, model=rig.owners["model"], scales=rig.extra["scales"])


@pytest.mark.parametrize("name", FUSABLE)
@pytest.mark.twice
def test_row_08_a_stock_optimizer_with_a_scaler(name: str) -> None:
    """Made fused for the scaler's sake: growth, backoff and skipped steps of one that was fused from the start."""
    twin = scaled(partial(FUSABLE[name], fused=True))
    expected = facts(twin, drive(twin, oracle(twin)))
    rig = scaled(FUSABLE[name])
    flags = [dict(group, params=None) for group in rig.owners["optimizer"].param_groups]
    step = managed(rig, backend=BACKEND)
    assert_same(expected, facts(rig, drive(rig, step)))
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - BEFORE_REPLAY)
    assert any("'fused'" in change for change in step.facts)
    step.close()
    optimizer = rig.owners["optimizer"]
    assert [dict(group, params=None) for group in optimizer.param_groups] == flags
    counters = [state["step"] for state in optimizer.state.values() if "step" in state]
    assert all(counter.device.type == "cpu" for counter in counters)
    rig.step(*rig.calls[0])


@pytest.mark.parametrize("name", FUSABLE)
def test_row_08_checkpoints_keep_the_stock_layout(name: str) -> None:
    """While the optimizer is fused, what it saves is what an unprepared one saves."""
    rig, stock = scaled(FUSABLE[name]), scaled(FUSABLE[name])
    step = managed(rig, backend=BACKEND)
    drive(rig, step, BEFORE_REPLAY + 2)
    drive(stock, stock.step, BEFORE_REPLAY + 2)
    found, expected = (r.owners["optimizer"].state_dict() for r in (rig, stock))
    assert found["param_groups"] == expected["param_groups"]
    for number, values in expected["state"].items():
        assert {key: (value.device, value.dtype) for key, value in values.items()} == {
            key: (value.device, value.dtype) for key, value in found["state"][number].items()
        }


@pytest.mark.twice
def test_row_08_a_first_step_that_overflows() -> None:
    """The warm-up waits for a step that is not skipped."""
    runs, step = [], None
    for eager_if in (1, None):
        rig = scaled(FUSABLE["momentum"], overflows=(0, 1, 9))
        step = managed(rig, backend=BACKEND, eager_if=eager_if)
        runs.append(facts(rig, drive(rig, step)))
    assert step is not None
    assert_same(*runs)
    assert step.stats.replayed == CALLS - BEFORE_REPLAY - 2


def test_row_08_an_optimizer_without_such_a_kernel() -> None:
    """RMSprop is capturable on CUDA, and still cannot skip: refused as the optimizer's doing."""
    rig = scaled(partial(RMSprop, lr=1e-3))
    with pytest.raises(HostSyncError, match=r"whether to skip the step of RMSprop.*fused=True") as caught:
        drive(rig, managed(rig, backend=BACKEND))
    assert caught.value.component == "optimizer"
    assert torch.ones(8, device=DEVICE).sum().item() == 8
