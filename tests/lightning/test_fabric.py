"""Steps of a plain loop under Lightning Fabric, whose optimizers are wrappers that call themselves optimizers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning")

from lightning.fabric import Fabric

from graphplan import graph_step
from tests.crossing import by_key, each

STEPS = 20
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


def train(*, replays: bool, named: bool, precision: Any = "32-true", norm: float | None = None) -> tuple[Any, ...]:
    """Train a layer under Fabric; losses, the module's and the optimizer's state, and the graphed step."""
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", precision=precision)
    plain = nn.Linear(4, 2)
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), 1e-2, fused=True))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        fabric.backward(loss)
        if norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=norm, error_if_nonfinite=False)
        optimizer.step()
        return loss.detach()

    owners = {"model": model, "optimizer": optimizer} if named else None
    call: Any = graph_step(step, owners=owners, backend="tape") if replays else step
    losses = []
    for _ in range(STEPS):
        losses.append(call(torch.randn(3, 4)).item())
        schedule.step()
    return losses, model.state_dict(), optimizer.state_dict(), call


@each(
    named=by_key({"named": True, "found": False}),
    options=by_key({"plain": {}, "bf16": {"precision": "bf16-mixed"}, "clipped": {"norm": 0.1}}),
)
@pytest.mark.twice
def test_a_loop_under_fabric(options: dict[str, Any], named: bool) -> None:
    eager, weights, states, _ = train(replays=False, named=named, **options)
    replayed, new_weights, new_states, call = train(replays=True, named=named, **options)
    assert replayed == eager
    assert all(torch.equal(weights[name], new_weights[name]) for name in weights)
    assert new_states["param_groups"] == states["param_groups"]
    for number, state in states["state"].items():
        assert all(torch.equal(state[name], new_states["state"][number][name]) for name in state)
    assert (call.stats.captured, call.stats.replayed) == (1, STEPS - 6)
