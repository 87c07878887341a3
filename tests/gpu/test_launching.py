"""What CUDA's own runtime is asked for, beside torch: uploads, and the recipe that times launches."""

from __future__ import annotations

import torch

from graphplan.backends.cudaruntime import upload
from recipes.benchmarks.launching import measure_launches
from recipes.benchmarks.workloads import workloads
from tests.devices import DEVICE, needs_cuda


@needs_cuda
def test_a_graph_is_uploaded() -> None:
    """Right after it was instantiated, and it replays as ever."""
    x = torch.zeros(8, device=DEVICE)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        x += 1
    assert upload(graph, stream)
    torch.cuda.synchronize()
    graph.replay()
    assert x.tolist() == [1.0] * 8


@needs_cuda
def test_what_launches_cost() -> None:
    """All figures are there; a graph captured anew is one that the old one can be updated to."""
    row = measure_launches(workloads(cpu=False)["mlp"], DEVICE)
    assert row["first_plain"] > 0 and row["first_uploaded"] > 0 and row["instantiate_us"] > 0
    if "update_us" in row:
        assert row["update_result"].startswith("cudaSuccess"), row
