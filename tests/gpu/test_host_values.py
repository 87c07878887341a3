"""Values on the host beside tensors on a device: names, objects, and tensors that stayed in host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.devices import BACKEND, DEVICE, needs_cuda
from tests.facts import assert_same
from tests.models import CALLS, float_batches
from tests.twins import BEFORE_REPLAY, Rig, build, drive, managed


def _make() -> Rig:
    model = nn.Linear(8, 4).to(DEVICE)
    optimizer = SGD(model.parameters(), lr=0.05, fused=True)

    def train_step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch.x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    calls = [
        (SimpleNamespace(x=x.to(DEVICE), names=[f"{index}", "b"], slices=torch.arange(index + 1)),)
        for index, (x, _) in enumerate(float_batches(CALLS))
    ]
    return Rig(train_step, {"model": model, "optimizer": optimizer}, calls)


@needs_cuda
def test_objects_with_host_tensors_that_are_not_read() -> None:
    """As batches of graphs have where their parts begin."""
    expected, found = build(_make), build(_make)
    step = managed(found, backend=BACKEND)
    assert_same(drive(expected, expected.step).state, drive(found, step).state)
    assert step.stats.captured == 1
    assert step.stats.replayed == CALLS - BEFORE_REPLAY - 1


CONSTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda x: x * torch.tensor(2.0).to(x.device),
    "a number of another type": lambda x: x * torch.tensor(3).to(x.device, torch.float32),
    "a range": lambda x: x * torch.arange(8.0).to(x.device, non_blocking=True),
    "computed from ranges": lambda x: x * (torch.arange(4)[None] - torch.arange(2)[:, None]).reshape(8).to(x.device),
    "a slice of an identity": lambda x: x @ (-torch.eye(9)[:8, 1:]).to(x),
    "transposed": lambda x: x @ torch.arange(64.0).reshape(8, 8).T.to(x.device),
    "expanded": lambda x: x * torch.tensor([0.5]).expand(8).to(x.device),
    "pinned": lambda x: x * torch.ones(8).pin_memory().to(x.device, non_blocking=True),
    "copied into": lambda x: x * torch.empty(8, device=x.device).copy_(torch.arange(8.0)),
    "an index": lambda x: x[:, torch.arange(7, -1, -1)],
    "a list as an index": lambda x: x[:, [7, 6, 5, 4, 3, 2, 1, 0]],
    "several lists as an index": lambda x: x * x[[0, 1, 0, 1, 0, 1, 0, 1], (7, 6, 5, 4, 3, 2, 1, 0)],
    "put at a list": lambda x: _put(torch.zeros_like(x), [0, 2], x[range(2)]),
    "a number put at a list": lambda x: x + _put(torch.zeros_like(x), (slice(None), [1]), 2.0),
    "a number put at a tensor": lambda x: _put(x.clone(), torch.arange(2, device=x.device), 0.5),
    "a number put where a mask says so": lambda x: _put(x.clone(), x > 0, 0.5),
    "a number on the default device": lambda x: x * _made_there(x.device),
    "put at an index": lambda x: torch.zeros_like(x).index_put((torch.tensor([0, 2]),), x[:2]),
}


def _put(tensor: Tensor, index: Any, value: Any) -> Tensor:
    tensor[index] = value
    return tensor


def _made_there(device: torch.device) -> Tensor:
    with device:
        return torch.tensor([2.0])


def _makes_constant(make: Callable[[Tensor], Tensor]) -> Rig:
    model = nn.Linear(8, 4).to(DEVICE)
    optimizer = SGD(model.parameters(), lr=0.05, fused=True)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(make(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    calls = [(x.to(DEVICE),) for x, _ in float_batches(CALLS)]
    return Rig(train_step, {"model": model, "optimizer": optimizer}, calls)


@needs_cuda
@pytest.mark.parametrize("name", CONSTANTS)
def test_host_tensors_of_pythons_numbers_alone_are_constants(name: str) -> None:
    """A capture copies from copies of them on the device: attention masks and caches of libraries make such tensors."""
    make = partial(_makes_constant, CONSTANTS[name])
    expected, found = build(make), build(make)
    step = managed(found, backend=BACKEND)
    assert_same(drive(expected, expected.step).state, drive(found, step).state)
    assert step.stats.captured == 1
    assert step.stats.replayed == CALLS - BEFORE_REPLAY


@needs_cuda
def test_a_number_that_changes_is_no_constant() -> None:
    """It is a name that guards compare: each value has a program."""
    scale = {"by": 1.0}
    make = partial(_makes_constant, lambda x: x * torch.tensor(scale["by"]).to(x.device))

    def after(index: int) -> None:
        scale["by"] = 2.0 if index >= CALLS // 2 else 1.0

    expected, found = build(make), build(make)
    expected.after = found.after = after
    step = managed(found, backend=BACKEND)
    expected_run = drive(expected, expected.step)
    scale["by"] = 1.0
    assert_same(expected_run.state, drive(found, step).state)
    assert step.stats.captured == 2
