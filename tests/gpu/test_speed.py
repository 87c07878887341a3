"""Compiled modules and fused optimizers on CUDA, asked for by an argument: replayed like the same step run eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from graphplan import graph_step
from tests.devices import BACKEND, DEVICE, needs_cuda
from tests.facts import assert_same, flatten

STEPS = 20


def train(*, graphed: bool, **options: Any) -> tuple[dict[str, Any], Any, Any]:
    """State after some steps, the step, and the flags that its optimizer had in it."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    layers = [nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 8)]
    model = nn.Sequential(*layers).to(DEVICE)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    flags: set[tuple[bool, bool]] = set()

    def fn(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        flags.update((bool(group["fused"]), bool(group["capturable"])) for group in optimizer.param_groups)
        optimizer.step()
        return loss.detach()

    owners = {"model": model, "optimizer": optimizer}
    step = graph_step(fn, owners=owners, backend=BACKEND, eager_if=None if graphed else 1, **options)
    generator = torch.Generator().manual_seed(1)
    losses = [step(torch.randn(32, 64, generator=generator).to(DEVICE)) for _ in range(STEPS)]
    found = flatten(model=model, losses=losses)
    report = step.report()
    step.close()
    return found, step, (flags, report)


OPTIONS: dict[str, dict[str, Any]] = {
    "fused": {"fuse_optimizer": True},
    "compiled": {"compile": True},
    "both": {"fuse_optimizer": True, "compile": True},
}


@needs_cuda
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("name", OPTIONS)
def test_faster_kernels_are_replayed_like_they_run(name: str) -> None:
    expected, *_ = train(graphed=False, **OPTIONS[name])
    found, step, (flags, report) = train(graphed=True, **OPTIONS[name])
    assert_same(expected, found)
    assert step.stats.captured == 1
    assert step.stats.replayed >= STEPS - 8, report
    assert ("compiled: Sequential" in report) is (name != "fused")
    assert (True, True) in flags or name == "compiled"
