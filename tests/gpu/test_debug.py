"""``debug=True`` on a device: an error that shows long after its kernel ran is told where it belongs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import graph_step
from tests.devices import DEVICE, needs_cuda
from tests.models import Box

_SCRIPT = """
import torch
from torch import nn
from graphplan import DeviceFault, graph_step

table = nn.Embedding(4, 8, device="cuda")
optimizer = torch.optim.SGD(table.parameters(), lr=0.1, fused=True)

def train_step(rows):
    optimizer.zero_grad()
    loss = table(rows).square().mean()
    loss.backward()
    optimizer.step()
    return loss

owners = {"table": table, "optimizer": optimizer}
step = graph_step(train_step, owners=owners, debug=True, verify="off", min_speedup=0)
good = torch.zeros(3, dtype=torch.long, device="cuda")
for _ in range(6):
    step(good)
assert step.stats.captured == 1
bad = torch.full((3,), 1000, device="cuda")
try:
    step(bad)
except DeviceFault as error:
    print("TOLD", error)
"""


@needs_cuda
def test_a_device_fault_names_its_program() -> None:
    """An index out of range in a replay: the program, the moment and the last operators (in a process of its own,
    which CUDA leaves unusable).
    """
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120, cwd=root)
    assert "TOLD the device failed in the program of train_step" in ended.stdout, ended.stderr[-2000:]
    assert "by its first replay" in ended.stdout and "aten." in ended.stdout and "backend='eager'" in ended.stdout


def _scaled_step(scale: Box) -> tuple[Any, nn.Module]:
    """A step that reads a tensor where nobody can look, and its model."""
    model = nn.Linear(16, 16).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x) * scale.item, x)
        loss.backward()
        optimizer.step()
        return loss

    owners = {"model": model, "optimizer": optimizer}
    return graph_step(train_step, owners=owners, debug=True, verify="off"), model


@needs_cuda
def test_a_step_that_is_waited_for_goes_on() -> None:
    """It is the same step."""
    step, _ = _scaled_step(Box(torch.ones(16, device=DEVICE)))
    x = torch.randn(8, 16, device=DEVICE)
    losses = [step(x).item() for _ in range(12)]
    assert losses[-1] < losses[0]
    assert step.stats.replayed == 6
    step.close()
