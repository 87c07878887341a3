"""What one process of the benchmark measures, the clock that it is timed with, and how its result is written down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from recipes.benchmarks.catalogue import Contender
from recipes.benchmarks.workloads import Batch, Workload, workloads

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What one process measures: ``repeats`` blocks of ``steps`` steps, after ``warmup`` steps that do not count."""

    workload: str
    contender: str
    cpu: bool
    steps: int
    repeats: int
    warmup: int

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return torch.device("cpu" if self.cpu else "cuda:0")

    @property
    def work(self) -> Workload:
        """What is trained."""
        return workloads(self.cpu)[self.workload]

    @property
    def who(self) -> Contender:
        """How it is trained."""
        return Contender(self.contender)

    @property
    def has_graphplan(self) -> bool:
        """Whether graphplan is at work, which then compiles and fuses what the contender's name says."""
        return self.who.way == "graph_step" or self.who.way.endswith("_callback")

    @property
    def compiler(self) -> dict[str, str]:
        """Arguments of ``torch.compile``: its defaults, except on the CPU, where the tape needs the eager kernels."""
        return {"backend": "aot_eager"} if self.cpu else {}

    @property
    def compile(self) -> bool | dict[str, str]:
        """The option of ``graph_step`` and of the callback."""
        return (self.compiler or True) if self.who.compile else False


class Feed:
    """Batches from pinned host memory, with a look at the clock between blocks: after the device has finished.

    The last mark needs one step more than is measured, since a consumer may not ask for what comes after the end.
    """

    def __init__(self, job: Job, pool: list[Batch]) -> None:
        self.job, self.pool = job, pool
        self.marks: list[float] = []
        self.start = 0.0

    def __len__(self) -> int:
        return self.job.warmup + self.job.steps * self.job.repeats + 1

    def __iter__(self) -> Iterator[Batch]:
        self.start = now(self.job)
        for index in range(len(self)):
            since = index - self.job.warmup
            if since >= 0 and since % self.job.steps == 0:
                self.marks.append(now(self.job))
            yield self.pool[index % len(self.pool)]

    def us(self) -> list[float]:
        """Microseconds per step of each block."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [(end - start) / self.job.steps * 1e6 for start, end in pairs]

    def facts(self) -> Row:
        """What the steps before the first block took: compiling, tracing, capturing and the first checks."""
        return {"warmup_seconds": self.marks[0] - self.start}


def now(job: Job) -> float:
    """Seconds, read when the device has nothing left to do."""
    if not job.cpu:
        torch.cuda.synchronize()
    return perf_counter()


def weights(model: nn.Module) -> float:
    """One number that two runs share if they trained the same weights."""
    with torch.no_grad():
        return float(sum(p.double().abs().sum() for p in model.parameters()))


def stats_of(graphed: Any) -> Row:
    """The counters of a graphed step or of the callback, and its report."""
    stats = graphed.stats
    names = ("eager", "traced", "captured", "replayed", "recaptured", "verified")
    counts = {name: getattr(stats, name) for name in names}
    return {**counts, "phases": dict(stats.phases), "report": graphed.report()}


def row(job: Job, us: list[float], facts: Row) -> Row:
    """One line of the benchmark's result."""
    memory: Row = {"max_memory_allocated": None, "max_memory_reserved": None}
    if not job.cpu:
        memory = {name: getattr(torch.cuda, name)() for name in memory}
    device = "cpu" if job.cpu else torch.cuda.get_device_name()
    place = {"torch": torch.__version__, "device": device}
    kernels = {"implementation": "fused" if job.who.fuse else "stock", "compiled": job.who.compile}
    base = {"workload": job.workload, "contender": job.contender, **kernels}
    times = {"us": median(us), "us_of_repeats": us, "steps": job.steps, "warmup": job.warmup}
    return {**base, **times, **memory, **place, **facts}
