"""The loops that the benchmark compares. Each one trains the same model on the same batches in a process of its own.

All of them draw their batches from a :class:`recipes.measuring.Feed`, which is also the clock; all start from the same
seed and set the same learning rate before each step, so that they finish with the same weights (up to the last bits
where an optimizer has other kernels, and up to eager's own spread where a kernel is not deterministic).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from recipes.measuring import Feed, Job, Row, now, row, stats_of, weights
from recipes.workloads import Workload, cosine, workloads

POOL = 16
"""Different batches that a run cycles through."""


def make_step(workload: Workload, model: nn.Module, optimizer: Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    """The training step as a user writes it."""

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = workload.loss(model, x, y)
        loss.backward()
        if workload.clip is not None:
            clip_grad_norm_(model.parameters(), workload.clip)
        optimizer.step()
        return loss

    return train_step


class Loop:
    """A plain training loop, eager or with its step under ``graph_step``."""

    def __init__(self, job: Job, *, graphed: bool) -> None:
        torch.manual_seed(0)
        self.workload = workloads(job.cpu)[job.workload]
        self.device, self.graphed = job.device, graphed
        self.model = self.workload.make_model(job.device)
        self.optimizer = self.workload.make_optimizer(self.model.parameters(), job.implementation)
        self.step = make_step(self.workload, self.model, self.optimizer)
        if graphed:
            from graphplan import graph_step

            owners = {"model": self.model, "optimizer": self.optimizer}
            self.step = graph_step(self.step, owners=owners, device=self.device)
        self.calls = 0

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Train on one batch in host memory."""
        lr = self.workload.lr * cosine(self.calls)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.calls += 1
        if not self.graphed:
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
        self.step(x, y)

    def facts(self) -> Row:
        """What is reported besides times."""
        return {"weights": weights(self.model), **(stats_of(self.step.stats) if self.graphed else {})}  # type: ignore[attr-defined]


class Floor:
    """What a user can write by hand at best: static tensors and one CUDA graph of the whole step, clip and optimizer.

    The optimizer has the implementation of the rows that it is compared with, and its learning rate is a device tensor
    of the dtype that graphplan uses for it.
    """

    def __init__(self, job: Job) -> None:
        if job.cpu:
            raise SystemExit(
                "the floor is a CUDA graph: it needs a CUDA device, so leave it out of --contenders with --cpu"
            )
        torch.manual_seed(0)
        workload = self.workload = workloads(job.cpu)[job.workload]
        self.model = workload.make_model(job.device)
        fused = job.implementation == "fused" or workload.optimizer is torch.optim.SGD
        dtype = torch.float32 if fused else torch.float64
        self.lr = torch.tensor(workload.lr, dtype=dtype, device=job.device)
        parameters = self.model.parameters()
        optimizer = workload.make_optimizer(parameters, job.implementation, lr=self.lr, capturable=True)
        self.step = make_step(workload, self.model, optimizer)
        self.static = [torch.empty_like(t, device=job.device) for t in workload.pool(1, pin=False)[0]]
        self.side = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls, self.capture_seconds = 0, 0.0

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Train on one batch in pinned host memory."""
        self.lr.fill_(self.workload.lr * cosine(self.calls))
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

    def facts(self) -> Row:
        """What is reported besides times."""
        return {"weights": weights(self.model), "phases": {"capture": self.capture_seconds}}


def hand_written(job: Job) -> list[Row]:
    """Measure a loop without a Trainer."""
    loop = Floor(job) if job.contender == "floor" else Loop(job, graphed=job.contender == "graph_step")
    feed = Feed(job, workloads(job.cpu)[job.workload].pool(POOL, pin=not job.cpu))
    torch.manual_seed(1)
    for x, y in feed:
        loop(x, y)
    return [row(job, feed.us(), loop.facts())]


def interleaved(job: Job) -> list[Row]:
    """Measure an eager loop and a graphed one in turns, so that noise on the machine hits both alike."""
    loops = {"eager": Loop(job, graphed=False), "graph_step": Loop(job, graphed=True)}
    pool = workloads(job.cpu)[job.workload].pool(POOL, pin=not job.cpu)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for repeat in range(-1, job.repeats):
        steps = job.warmup if repeat < 0 else job.steps
        for name in sorted(loops, reverse=repeat % 2 == 1):
            start = now(job)
            for index in range(steps):
                loops[name](*pool[index % POOL])
            if repeat >= 0:
                times[name].append((now(job) - start) / steps * 1e6)
    rows = [row(job, times[name], {**loops[name].facts(), "contender": name}) for name in loops]
    for name, line in zip(loops, rows, strict=True):
        line["speedup"] = median(eager / own for eager, own in zip(times["eager"], times[name], strict=True))
        del line["weights"]  # the two take turns at one random generator
    return rows


def make_module(workload: Workload, implementation: str) -> Any:
    """The workload as a ``LightningModule``, its learning rate scheduled at every step."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = workload.make_model(torch.device("cpu"))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return workload.loss(self.model, *batch)

        def configure_optimizers(self) -> Any:
            optimizer = workload.make_optimizer(self.parameters(), implementation)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Module()


def make_trainer(job: Job, workload: Workload, **options: Any) -> Any:
    """A bare ``Trainer`` for one epoch, with the callback where the contender names it.

    Its mixed-precision plugin refuses to clip the gradients of a fused optimizer, even for bfloat16, which needs no
    scaler. So precision stays ``32-true`` and autocast is inside ``training_step``, as it is in the other loops' steps:
    all contenders compute the same thing.
    """
    import lightning.pytorch as pl

    from graphplan import GraphPlanCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return pl.Trainer(
        accelerator="cpu" if job.cpu else "gpu",
        precision="32-true",
        max_epochs=1,
        gradient_clip_val=workload.clip,
        callbacks=[GraphPlanCallback()] if job.contender == "trainer_callback" else [],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **options,
    )


def callback_of(trainer: Any) -> Any:
    """The callback that :func:`make_trainer` gave the trainer, or None."""
    from graphplan import GraphPlanCallback

    return next((callback for callback in trainer.callbacks if isinstance(callback, GraphPlanCallback)), None)


def lightning(job: Job) -> list[Row]:
    """Measure a bare ``Trainer``, with or without the callback."""
    torch.manual_seed(0)
    workload = workloads(job.cpu)[job.workload]
    module, trainer = make_module(workload, job.implementation), make_trainer(job, workload, devices=1)
    feed = Feed(job, workload.pool(POOL, pin=not job.cpu))
    torch.manual_seed(1)
    trainer.fit(module, feed)
    callback = callback_of(trainer)
    facts = stats_of(callback.stats) if callback is not None else {}
    return [row(job, feed.us(), {"weights": weights(module), **facts})]


def measure(job: Job) -> list[Row]:
    """Measure what the job names."""
    if job.contender == "interleaved":
        return interleaved(job)
    return lightning(job) if job.contender.startswith("trainer") else hand_written(job)
