"""The loops that the benchmark compares. Each one trains the same model on the same batches in a process of its own.

All of them draw their batches from a :class:`recipes.benchmarks.measuring.Feed`, which is also the clock; all start
from the same seed and set the same learning rate before each step, so that they finish with the same weights (up to
the last bits where an optimizer or a compiler has other kernels, and up to eager's own spread where a kernel is not
deterministic). ``make_graphed_callables`` runs the model a few times before the first step, which draws random
numbers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from recipes.benchmarks.catalogue import WAYS
from recipes.benchmarks.measuring import Feed, Job, Row, now, row, stats_of, weights
from recipes.benchmarks.workloads import Workload, cosine

POOL = 16
"""Different batches that a run cycles through."""
Step = Callable[[Tensor, Tensor], Any]


def make_step(workload: Workload, model: nn.Module, optimizers: Sequence[Optimizer]) -> Step:
    """The training step as a user writes it."""

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        return workload.step(model, optimizers, x, y)

    return train_step


@dataclass(frozen=True)
class Parts:
    """What a tool is handed: the step of a plain loop and what it is made of."""

    job: Job
    model: nn.Module
    optimizers: list[Optimizer]
    step: Step


def compiled(model: nn.Module, job: Job) -> nn.Module:
    """What a user calls instead of ``model``: the compiled one, unless graphplan is to compile it.

    Not ``model.compile()``, which compiles nothing of an ``nn.Sequential``.
    """
    options = {"mode": "reduce-overhead"} if job.who.way == "reduce_overhead" else job.compiler
    by_hand = job.who.way == "reduce_overhead" or (job.who.compile and not job.has_graphplan)
    made: Any = torch.compile(model, **options) if by_hand else model  # type: ignore[call-overload]
    return cast(nn.Module, made)


def moved(step: Step, device: torch.device) -> Step:
    """``step`` on batches that are in host memory."""
    return lambda x, y: step(x.to(device, non_blocking=True), y.to(device, non_blocking=True))


def eager(parts: Parts) -> Step:
    """The step as it is."""
    return moved(parts.step, parts.job.device)


def reduce_overhead(parts: Parts) -> Step:
    """The model, compiled with CUDA graphs of the compiler's own, whose memory a new step may use again."""
    step = moved(parts.step, parts.job.device)

    def call(x: Tensor, y: Tensor) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        step(x, y)

    return call


def make_graphed(parts: Parts) -> Step:
    """Forward and backward pass of the model as two CUDA graphs; loss, clipping and optimizer are outside."""
    sample = parts.job.work.pool(1, pin=False)[0][0].to(parts.job.device)
    with parts.job.work.autocast(parts.job.device):
        torch.cuda.make_graphed_callables(parts.model, (sample,))
    return moved(parts.step, parts.job.device)


def tensordict(parts: Parts) -> Step:
    """The whole step in the CUDA graph of the tensordict library."""
    from tensordict.nn import CudaGraphModule  # type: ignore[import-not-found,unused-ignore]

    graphed: Step = CudaGraphModule(lambda x, y: parts.step(x, y).detach())
    return moved(graphed, parts.job.device)


def graphplan(parts: Parts) -> Step:
    """The step in the hands of ``graph_step``, which moves batches itself."""
    from graphplan import graph_step

    owners = {"model": parts.model, **{f"optimizer{index}": own for index, own in enumerate(parts.optimizers)}}
    job = parts.job
    return graph_step(parts.step, owners=owners, device=job.device, fuse_optimizer=job.who.fuse, compile=job.compile)


def peer(parts: Parts) -> Step:
    """The step in the hands of ``make_step`` from the contender's file."""
    path = parts.job.who.peer
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(
            f"{path} is not a Python file; expected one with make_step(train_step, model, optimizer, device)"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "make_step"):
        raise SystemExit(f"{path} has no make_step; expected make_step(train_step, model, optimizer, device)")
    optimizer = parts.optimizers[0] if len(parts.optimizers) == 1 else parts.optimizers
    made: Step = module.make_step(parts.step, parts.model, optimizer, parts.job.device)
    return made


class Floor:
    """What a user can write by hand at best: static tensors and one CUDA graph of the whole step, optimizer and all."""

    def __init__(self, parts: Parts) -> None:
        self.step = parts.step
        self.static = [torch.empty_like(t, device=parts.job.device) for t in parts.job.work.pool(1, pin=False)[0]]
        self.side = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls, self.capture_seconds = 0, 0.0

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Train on one batch in pinned host memory."""
        self.static[0].copy_(x, non_blocking=True)
        self.static[1].copy_(y, non_blocking=True)
        self.calls += 1
        if self.calls <= 3:
            self._warm_up()
            return
        if self.graph is None:
            self._capture()
        assert self.graph is not None
        self.graph.replay()

    def _warm_up(self) -> None:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.step(*self.static)
        torch.cuda.current_stream().wait_stream(self.side)

    def _capture(self) -> None:
        start = perf_counter()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.side):
            self.step(*self.static)
        self.capture_seconds = perf_counter() - start


TOOLS: dict[str, Callable[[Parts], Step]] = {
    "eager": eager,
    "reduce_overhead": reduce_overhead,
    "make_graphed": make_graphed,
    "tensordict": tensordict,
    "floor": Floor,
    "graph_step": graphplan,
    "peer": peer,
}
_BY_HAND = ("floor", "tensordict")
"""They capture whatever optimizer they are given, so that it has to be one that can be captured."""


class Loop:
    """A plain training loop, its step in the hands of one of the tools.

    Where a graph is made by hand, the learning rate is a device tensor of the dtype that graphplan uses for it;
    anywhere else a number in the optimizers' groups, unless a tool has put a tensor there.
    """

    def __init__(self, job: Job) -> None:
        torch.manual_seed(0)
        self.workload, self.who = job.work, job.who
        self.model = self.workload.make_model(job.device)
        self.lr: Tensor | None = None
        fused = self.who.fuse and not job.has_graphplan
        if self.who.way in _BY_HAND:
            dtype = torch.float32 if fused or self.workload.optimizer is SGD else torch.float64
            self.lr = torch.tensor(self.workload.lr, dtype=dtype, device=job.device)
        by_hand = self.lr is not None
        self.optimizers = self.workload.make_optimizers(self.model, fused=fused, lr=self.lr, capturable=by_hand)
        model = compiled(self.model, job)
        step = make_step(self.workload, model, self.optimizers)
        self.call = TOOLS[self.who.way](Parts(job, model, self.optimizers, step))
        self.calls = 0

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Train on one batch in host memory."""
        lr = self.workload.lr * cosine(self.calls)
        self.calls += 1
        if self.lr is not None:
            self.lr.fill_(lr)
        else:
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    if isinstance(group["lr"], Tensor):
                        group["lr"].fill_(lr)
                    else:
                        group["lr"] = lr
        self.call(x, y)

    def facts(self) -> Row:
        """What is reported besides times."""
        facts: Row = {"weights": weights(self.model)}
        if isinstance(self.call, Floor):
            facts["phases"] = {"capture": self.call.capture_seconds}
        return {**facts, **(stats_of(self.call) if self.who.way == "graph_step" else {})}


def hand_written(job: Job) -> list[Row]:
    """Measure a loop without a Trainer."""
    loop = Loop(job)
    feed = Feed(job, job.work.pool(POOL, pin=not job.cpu))
    torch.manual_seed(1)
    for x, y in feed:
        loop(x, y)
    return [row(job, feed.us(), {**feed.facts(), **loop.facts()})]


def interleaved(job: Job) -> list[Row]:
    """Measure an eager loop and a graphed one in turns, so that noise on the machine hits both alike."""
    jobs = {
        name: Job(job.workload, name, job.cpu, job.steps, job.repeats, job.warmup) for name in ("eager", "graph_step")
    }
    loops = {name: Loop(own) for name, own in jobs.items()}
    pool = job.work.pool(POOL, pin=not job.cpu)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for repeat in range(-1, job.repeats):
        steps = job.warmup if repeat < 0 else job.steps
        for name in sorted(loops, reverse=repeat % 2 == 1):
            start = now(job)
            for index in range(steps):
                loops[name](*pool[index % POOL])
            if repeat >= 0:
                times[name].append((now(job) - start) / steps * 1e6)
    rows = [row(jobs[name], times[name], loops[name].facts()) for name in loops]
    for name, line in zip(loops, rows, strict=True):
        line["paired_speedup"] = median(eager / own for eager, own in zip(times["eager"], times[name], strict=True))
        del line["weights"]  # the two take turns at one random generator
    return rows


def measure(job: Job) -> list[Row]:
    """Measure what the job names. A tool that is not installed becomes a row that says so."""
    if job.contender == "interleaved":
        return interleaved(job)
    way = job.who.way
    if way == "tensordict" and importlib.util.find_spec("tensordict") is None:
        return [{"workload": job.workload, "contender": job.contender, "missing": "tensordict is not installed"}]
    if job.cpu and way in WAYS and WAYS[way].cuda:
        raise SystemExit(f"{job.who.label} needs a CUDA device: leave it out of --contenders with --cpu")
    if way in TOOLS:
        return hand_written(job)
    from recipes.benchmarks.trainers import lightning

    return lightning(job)
