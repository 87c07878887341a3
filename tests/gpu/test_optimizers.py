"""Every optimizer of torch on CUDA under a per-step schedule: replayed like prepared eager, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

from graphplan import GraphPlanError, graph_step
from tests.devices import BACKEND, DEVICE, needs_cuda
from tests.facts import assert_same, flatten
from tests.optimizers.test_optimizers import MAKERS, build

HOST_ONLY = {"Adagrad", "Adafactor", "Muon"}
"""No ``capturable`` argument, and no fused CUDA kernel with one: their step needs the host."""


def train(name: str, *, graphed: bool) -> tuple[dict[str, Any], Any]:
    """State after 30 steps, and the graphed step."""
    model, optimizer = build(name, prepared=False, device=DEVICE)
    step: Any
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)

    def fn(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    # The oracle is the same managed step whose every call is eager: same preparation, same device learning rate.
    step = graph_step(fn, owners=[model, optimizer], backend=BACKEND, eager_if=None if graphed else 1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(30):
        losses.append(step(torch.randn(5, 6, generator=generator).to(DEVICE)).detach())
        scheduler.step()
    found = flatten(model=model, losses=losses)
    step.close()
    return found, step


@needs_cuda
@pytest.mark.parametrize("name", sorted(MAKERS.keys() - HOST_ONLY))
@pytest.mark.twice
def test_optimizers_are_replayed_under_a_schedule(name: str) -> None:
    """One capture; bitwise the managed eager run."""
    expected, _ = train(name, graphed=False)
    found, step = train(name, graphed=True)
    assert_same(expected, found)
    assert (step.stats.captured, step.stats.replayed) == (1, 24)


@needs_cuda
@pytest.mark.parametrize("name", sorted(HOST_ONLY))
def test_optimizers_that_need_the_host_are_refused(name: str) -> None:
    """The refusal says that it is the optimizer's doing."""
    with pytest.raises(GraphPlanError, match="optimizer") as caught:
        train(name, graphed=True)
    assert caught.value.component == "optimizer"  # type: ignore[attr-defined]
