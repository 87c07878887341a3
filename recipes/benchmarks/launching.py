"""What the launches of a CUDA graph cost: the first replay against later ones, a new graph against an updated one."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from recipes.benchmarks.contenders import make_step
from recipes.benchmarks.workloads import Workload

Row = dict[str, Any]
_GRAPHS, _REPLAYS = 5, 20
"""Graphs whose first replays are timed, and replays of each after that."""


class _Step:
    """A workload's step on static tensors, ready to be captured by hand."""

    def __init__(self, work: Workload, device: torch.device) -> None:
        torch.manual_seed(0)
        model = work.make_model(device)
        # As a hand-written graph needs it: the optimizer reads its learning rate from the device.
        dtype = torch.float32 if work.optimizer is SGD else torch.float64
        lr = torch.tensor(work.lr, dtype=dtype, device=device)
        step = make_step(work, model, work.make_optimizers(model, fused=False, lr=lr, capturable=True))
        static = [tensor.to(device) for tensor in work.pool(1, pin=False)[0]]
        self.side = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        # torch forgets a pool's handle when its last graph goes.
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._run: Callable[[], Tensor] = lambda: step(*static)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for _ in range(3):
                self._run()
        torch.cuda.synchronize()

    def capture(self) -> torch.cuda.CUDAGraph:
        """A graph that is not instantiated yet."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, pool=self.pool, stream=self.side, capture_error_mode="thread_local"):
            self._run()
        torch.cuda.synchronize()
        self._graphs.append(graph)
        return graph


def _timed(call: Callable[[], object]) -> float:
    """Microseconds on the host."""
    start = perf_counter()
    call()
    return (perf_counter() - start) * 1e6


def _replay(graph: torch.cuda.CUDAGraph) -> tuple[float, float]:
    """Microseconds of one replay on the host, and on the device from before it to its end."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    launch = _timed(graph.replay)
    end.record()
    torch.cuda.synchronize()
    return launch, start.elapsed_time(end) * 1e3


def _first_replays(step: _Step) -> tuple[Row, float]:
    """The first replay over later ones, on the device and as a launch, and what it takes to instantiate; medians."""
    firsts, launches, making = [], [], []
    for _ in range(_GRAPHS):
        graph = step.capture()
        making.append(_timed(graph.instantiate))
        launch, taken = _replay(graph)
        later = [_replay(graph) for _ in range(_REPLAYS)]
        firsts.append(taken / median(device for _, device in later))
        launches.append((launch, median(host for host, _ in later)))
    times = {
        "first_plain": median(firsts),
        "first_plain_launch_us": median(first for first, _ in launches),
        "later_plain_launch_us": median(later for _, later in launches),
    }
    return times, median(making)


def _update(step: _Step) -> Row:
    """What it takes to make an executable graph do what a graph that was captured anew does."""
    try:
        cudart = import_module("cuda.bindings.runtime")
    except ImportError:
        return {"update_result": "not measured: no cuda.bindings"}
    old = step.capture()
    old.instantiate()
    took: list[float] = []
    result = ""
    for _ in range(_GRAPHS):
        new = step.capture()
        handles = cudart.cudaGraphExec_t(old.raw_cuda_graph_exec()), cudart.cudaGraph_t(new.raw_cuda_graph())
        start = perf_counter()
        error, info = cudart.cudaGraphExecUpdate(*handles)
        took.append((perf_counter() - start) * 1e6)
        result = error.name if info is None else f"{error.name}, {info.result.name}"
    return {"update_us": median(took), "update_result": result}


def measure_launches(work: Workload, device: torch.device) -> Row:
    """First replays; to instantiate a new graph against updating the old one."""
    step = _Step(work, device)
    times, making = _first_replays(step)
    return {**times, "instantiate_us": making, **_update(step)}
