"""``debug=True`` on a device: an error that shows long after its kernel ran is told where it belongs, and a replay that
would read freed memory is told before it does.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import DeviceFault, graph_step
from graphplan.backends.backend import TracedValues
from graphplan.backends.cudagraph import CUDAGraphBackend
from graphplan.backends.cudaruntime import capture_options
from tests.devices import DEVICE, is_healthy, needs_cuda
from tests.models import Box

needs_watch = pytest.mark.skipif(
    "check_input_liveness" not in capture_options(torch.cuda.CUDAGraph.capture_begin, watched=True),
    reason="this torch does not watch what a graph reads",
)

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


@needs_cuda
@needs_watch
def test_a_recording_that_reads_freed_memory_is_told() -> None:
    """While what it reads lives it replays; then it says so, and nothing is launched."""
    backend = CUDAGraphBackend(DEVICE)
    read, written = Box(torch.ones(1 << 16, device=DEVICE)), torch.zeros(1 << 16, device=DEVICE)
    recording, _ = backend.record(lambda: written.copy_(read.item * 2), TracedValues(watched="the doubling"))
    recording.replay()
    assert written.sum().item() == 2 << 16
    written.zero_()
    read.item = None
    with pytest.raises(DeviceFault, match=r"a replay of the doubling would read memory that was freed: .*dead tensor"):
        recording.replay()
    assert written.sum().item() == 0
    recording.reset()
    is_healthy()


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
@needs_watch
def test_a_step_whose_hidden_tensor_is_freed_is_told() -> None:
    """A tensor that takes the traced one's place before the capture, and goes after it; no weight changes."""
    scale = Box(torch.ones(16, device=DEVICE))
    step, model = _scaled_step(scale)
    x = torch.randn(8, 16, device=DEVICE)
    for _ in range(5):
        step(x)
    scale.item = torch.full((16,), 2.0, device=DEVICE)
    step(x)
    step(x)
    assert (step.stats.captured, step.stats.replayed) == (1, 1)
    before = [param.detach().clone() for param in model.parameters()]
    scale.item = None
    with pytest.raises(DeviceFault, match=r"a replay of the program of .*train_step \(fed .*would read memory"):
        step(x)
    assert all(map(torch.equal, before, model.parameters()))
    step.close()
    is_healthy()


@needs_cuda
def test_a_watched_step_goes_on() -> None:
    """What lives is no reason for an error, whether this torch watches or not."""
    step, _ = _scaled_step(Box(torch.ones(16, device=DEVICE)))
    x = torch.randn(8, 16, device=DEVICE)
    losses = [step(x).item() for _ in range(12)]
    assert losses[-1] < losses[0]
    assert step.stats.replayed == 6
    step.close()
