"""DDP and FSDP2 on two devices, measured: ``python -m recipes.benchmarks.two_devices [--cpu] [--json PATH]``.

The character GPT of the benchmark, BERT and Llama, trained by two processes, each contender in a process group of its
own: a plain loop, the same loop as a CUDA graph written by hand (the floor), a bare Trainer, and that Trainer with the
callback. Under FSDP2 each block is sharded, and then the rest. On the CPU (gloo, the tape) there is no floor.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from recipes.benchmarks.contenders import POOL, make_step
from recipes.benchmarks.devices import require_cuda
from recipes.benchmarks.measuring import Feed, Job
from recipes.benchmarks.texts import texts
from recipes.benchmarks.trainers import callback_of, make_module, make_trainer
from recipes.benchmarks.workloads import Workload, cosine, workloads

CASES = ("ddp gpt", "fsdp2 gpt", "ddp bert", "fsdp2 llama")
"""A strategy and a model each."""
CONTENDERS = ("eager", "floor", "trainer", "trainer_callback")
_WARMUP = 11
"""Steps before a capture: DDP times some of its first ten on the host."""
_STEPS, _WARMUP_STEPS = 1000, 550
"""Steps of a block of replays, and before the first: one check of a replay falls into each block, as in a long run."""
_SHARE = 5
"""Whoever launches each kernel from the host takes this many times fewer steps."""


@dataclass(frozen=True)
class Task(Job):
    """What one process measures of one case."""

    @property
    def work(self) -> Workload:
        """What is trained."""
        return {**workloads(self.cpu), **texts(self.cpu)}[self.workload]


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 for each block, and for the rest."""
    for blocks in [part for part in model.modules() if isinstance(part, nn.ModuleList)]:
        for block in blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Floor:
    """A hand-written CUDA graph of the whole step, collectives and optimizer included."""

    def __init__(self, workload: Workload, model: nn.Module, optimizer: Optimizer, side: Any) -> None:
        self._step = make_step(workload, model, [optimizer])
        device = next(model.parameters()).device
        self._static = [torch.empty_like(tensor, device=device) for tensor in workload.pool(1, pin=False)[0]]
        self._side = side
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Train on one batch in pinned host memory."""
        for static, tensor in zip(self._static, (x, y), strict=True):
            static.copy_(tensor, non_blocking=True)
        self._calls += 1
        if self._calls <= _WARMUP:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._step(*self._static)
            torch.cuda.current_stream().wait_stream(self._side)
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._side, capture_error_mode="thread_local"):
                self._step(*self._static)
        self._graph.replay()


def _distributed(job: Job, strategy: str, device: torch.device) -> nn.Module:
    model = job.work.make_model(device)
    if strategy == "ddp":
        return DistributedDataParallel(model, device_ids=None if job.cpu else [device.index])
    shard(model, init_device_mesh(device.type, (distributed.get_world_size(),)))
    return model


def _loop(job: Job, strategy: str, feed: Feed) -> dict[str, Any]:
    """A plain loop, or its graph."""
    workload = job.work
    rank = int(os.environ["RANK"])
    device = torch.device("cpu") if job.cpu else torch.device("cuda", rank)
    distributed.init_process_group("gloo" if job.cpu else "nccl", device_id=None if job.cpu else device)
    torch.manual_seed(0)
    side = None if job.cpu else torch.cuda.Stream()
    with torch.cuda.stream(side):
        model = _distributed(job, strategy, device)
    lr = None if job.contender == "eager" else torch.tensor(workload.lr, dtype=torch.float64, device=device)
    (optimizer,) = workload.make_optimizers(model, fused=False, lr=lr, capturable=lr is not None)
    call: Any = make_step(workload, model, [optimizer])
    if job.contender == "floor":
        call = Floor(workload, model, optimizer, side)
    for calls, (x, y) in enumerate(feed):
        if lr is not None:
            lr.fill_(workload.lr * cosine(calls))
        else:
            optimizer.param_groups[0]["lr"] = workload.lr * cosine(calls)
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        call(x, y)
    if not job.cpu:
        torch.cuda.synchronize()
    return {}


def _trainer(job: Job, strategy: str, feed: Feed) -> dict[str, Any]:
    """A bare Trainer, with or without the callback."""
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    torch.manual_seed(0)
    backend: Any = {"process_group_backend": "gloo" if job.cpu else "nccl"}
    made = DDPStrategy(**backend) if strategy == "ddp" else ModelParallelStrategy(2, 1, **backend)
    trainer = make_trainer(job, devices=2, strategy=made, use_distributed_sampler=False)
    trainer.fit(make_module(job, shard=None if strategy == "ddp" else shard), feed)
    callback = callback_of(trainer)
    return {} if callback is None else {"replayed": callback.stats.replayed, "report": callback.report()}


def work(job: Job, strategy: str, out: Path) -> None:
    """Measure one contender on this rank; rank 0 writes it down."""
    rank = int(os.environ["RANK"])
    if not job.cpu:
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    feed = Feed(job, job.work.pool(POOL, pin=not job.cpu))
    facts = (_trainer if job.contender.startswith("trainer") else _loop)(job, strategy, feed)
    if rank == 0:
        us = feed.us()
        out.write_text(
            json.dumps(
                {
                    "strategy": strategy,
                    "model": job.workload,
                    "contender": job.contender,
                    "us": median(us),
                    "us_of_repeats": us,
                    **facts,
                }
            )
        )
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _launch(case: str, contender: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    out = folder / f"{case} {contender}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "-m", "recipes.benchmarks.two_devices"]
    command += ["--cases", case, "--contender", contender]
    command += ["--out", str(out), "--steps", str(arguments.steps), "--repeats", str(arguments.repeats)]
    command += ["--cpu"] if arguments.cpu else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the contender {case} {contender} failed:\n{done.stderr[-4000:]}")
    row: dict[str, Any] = json.loads(out.read_text())
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all contenders, print a table, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cpu", action="store_true", help="two processes on the CPU, over gloo")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated; default: %(default)s")
    parser.add_argument("--steps", type=int, default=_STEPS, help="steps of a block; a fifth for those without graphs")
    parser.add_argument("--repeats", type=int, default=3, help="blocks, of which the median counts")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    require_cuda(parser, cpu=arguments.cpu, count=2)
    if arguments.contender is not None:
        share = 1 if arguments.contender in ("floor", "trainer_callback") else _SHARE
        steps, warmup = max(arguments.steps // share, 1), (50 if arguments.cpu else _WARMUP_STEPS) // share
        strategy, _, model = arguments.cases.partition(" ")
        work(Task(model, arguments.contender, arguments.cpu, steps, arguments.repeats, warmup), strategy, arguments.out)
        return
    base = "eager" if arguments.cpu else "floor"
    chosen = [name for name in CONTENDERS if name != "floor" or not arguments.cpu]
    rows: list[dict[str, Any]] = []
    for case in arguments.cases.split(","):
        with tempfile.TemporaryDirectory() as folder:
            of = {name: _launch(case, name, arguments, Path(folder)) for name in chosen}
        for name, row in of.items():
            row["ratio"] = row["us"] / of[base]["us"]
            print(f"{case:<12} {name:<18} {row['us']:>9.0f} µs/step  {row['ratio']:.2f}x of {base}", flush=True)
        rows += of.values()
    if arguments.json is not None:
        device = "cpu" if arguments.cpu else torch.cuda.get_device_name()
        facts = {"torch": torch.__version__, "device": f"2x {device}", "date": date.today().isoformat()}
        command = shlex.join(
            ["python", "-m", "recipes.benchmarks.two_devices", *(sys.argv[1:] if argv is None else argv)]
        )
        arguments.json.write_text(json.dumps({**facts, "command": command, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
