"""Values of owners' tensors that decide which way a step takes: constants until the tensor is written to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from graphplan import HostSyncError, compile_plan
from tests.devices import BACKEND, DEVICE, on_device
from tests.models import CALLS, attributes, float_batches, updating_rig
from tests.twins import (
    BEFORE_REPLAY,
    SECOND_TRACE,
    Rig,
    assert_refused,
    assert_same_runs,
    build,
    drive,
    line_of,
    managed,
)


class Gated(nn.Module):
    """Looks at its buffers: whether it is begun, which columns it gives, and where it has weights."""

    flag: Tensor
    columns: Tensor
    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("columns", torch.tensor([True, False, True, True, False, True, True, True]))
        self.register_buffer("weights", torch.tensor([0.0, 1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.flag and (self.weights[self.weights.nonzero().flatten()] > 0).all():
            y = y * 2
        return y[:, self.columns]


def _rig(after: Callable[[Gated, int], object]) -> Rig:
    model = Gated().to(DEVICE)
    optimizer = SGD(model.parameters(), lr=0.05, fused=True)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    calls = [(x.to(DEVICE),) for x, _ in float_batches(CALLS)]
    return Rig(train_step, {"model": model, "optimizer": optimizer}, calls, after=partial(after, model))


def _never(model: Gated, index: int) -> None: ...


def _once(model: Gated, index: int) -> None:
    if index == 10:
        model.flag.fill_(False)


def _loads(model: Gated, index: int) -> None:
    if index == 9:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    if index == 14:
        model.columns = ~model.columns


@pytest.mark.parametrize(("after", "captured"), [(_never, 1), (_once, 2), (_loads, 3)])
def test_buffers_that_a_step_looks_at(after: Callable[[Gated, int], object], captured: int) -> None:
    """Written, or another one: the step goes another way from the next call on."""
    expected, found = build(partial(_rig, after)), build(partial(_rig, after))
    step = managed(found, backend=BACKEND, max_recaptures=8)
    assert_same_runs(drive(expected, expected.step), drive(found, step))
    assert step.stats.captured == captured
    if captured == 1:
        assert step.stats.replayed == CALLS - BEFORE_REPLAY
        assert {"model.flag._version", "model.columns._version"} <= step.plan.reads.values.keys()
    else:
        assert any("_version was" in event for event in step.stats.events)


def _looks(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return loss * 2 if model.flag > 0 else loss  # culprit


def _looks_and_writes(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    found = loss * 2 if model.flag > 0 else loss  # culprit
    model.flag += 1
    return found


def _looks_and_replaces(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    found = loss * 2 if model.flag > 0 else loss  # culprit
    model.flag = model.flag + 1
    return found


def _write(model: Any, index: int) -> None:
    model.flag += 1


def _replace(model: Any, index: int) -> None:
    model.flag = model.flag.clone()


WRITERS = {
    "by the step": (_looks_and_writes, None, None),
    "by the step, another one": (_looks_and_replaces, None, SECOND_TRACE),
    "between the steps": (_looks, _write, SECOND_TRACE),
    "a parameter": (_looks, None, None),
}


@pytest.mark.parametrize("name", WRITERS)
def test_values_that_do_not_stay_are_refused(name: str) -> None:
    look, after, done = WRITERS[name]
    flag = partial(nn.Parameter, torch.tensor(1.0)) if name == "a parameter" else partial(torch.tensor, 1.0)
    make = partial(updating_rig, look, attributes(flag=flag), *[after] if after else [])
    options = {} if done is None else {"done": done}
    assert_refused(
        on_device(make), HostSyncError, line_of(look), "replay would keep the first", backend=BACKEND, **options
    )


def test_what_a_plan_says_of_them() -> None:
    flag = torch.tensor(True)
    plan = compile_plan(lambda x: x * 2 if flag else x, torch.ones(2))
    assert [path for path in plan.reads.values if path.endswith("._version")] == ["flag._version"]
    assert "flag._version" in str(plan)
    with torch.inference_mode():
        flag = torch.tensor(True)
    with pytest.raises(HostSyncError, match=r"_local_scalar_dense"):
        compile_plan(lambda x: x * 2 if flag else x, torch.ones(2))
