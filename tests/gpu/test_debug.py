"""``debug=True`` on a device: an error that shows long after its kernel ran is told where it belongs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.gpu.helpers import needs_cuda

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

step = graph_step(train_step, owners={"table": table, "optimizer": optimizer}, debug=True, verify="off")
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
    assert "by its first replay" in ended.stdout and "aten." in ended.stdout and "debug_eager=True" in ended.stdout
