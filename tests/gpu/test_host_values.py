"""Values on the host beside tensors on a device: names, objects, and tensors that stayed in host memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
