"""What programs take and what the first replay costs: ``python -m recipes.benchmarks.memory [--cpu] [--json PATH]``.

The MLP, the GPT and the ResNet of the benchmark, each in a process of its own. Bytes are counted from the same start:

eager       the most that a plain loop has reserved
program     what graph_step has reserved in replays, beside nothing but its one program
at most     the most that it had reserved on the way there: warm-up, traces, copies for the capture
checked     reserved after replays that were checked against eager steps; checked_most: at most, from the first step on
budget      as checked, under a memory_budget: what a check took goes back to the device
timed       as checked, after eager steps that were timed, on the caller's stream: what happens without options
shared      what programs that train, accumulate and validate take in one pool, as a multiple of the largest alone

On a CUDA device also: the time of the first replay of a graph as a multiple of later ones;
and what it takes to instantiate a graph that is captured anew, or to update the old one.
On a CPU (the tape) nothing is reserved, and the bars are not asked for.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from graphplan import graph_step
from graphplan.step.graphed_step import GraphedStep
from recipes.benchmarks.contenders import make_step
from recipes.benchmarks.devices import require_cuda
from recipes.benchmarks.launching import measure_launches
from recipes.benchmarks.tables import plain_table
from recipes.benchmarks.workloads import Batch, Workload, workloads

Row = dict[str, Any]
WORKLOADS = ("mlp", "gpt", "resnet")
_STEPS, _CHECKED, _TIMED = 12, 16, 40
"""Steps of a run without checks (six come before the first replay), of one with them, and of one that is timed, too."""
_NEAR, _SHARED, _SETS, _MOST = 1.15, 1.3, 1.5, 1.3
_MANY = 2**23
"""Bytes of gradients from which a second set of them would show beside what else is alive."""


class Count:
    """Bytes since this object was made, when nothing was cached."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        gc.collect()
        if self._is_cuda:
            self.clear_workspaces()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()

    def clear_workspaces(self) -> None:
        """Let cuBLAS's workspaces go, which torch keeps for each stream. Replays must not come after this."""
        clear: Callable[[], object] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if self._is_cuda and clear is not None:
            torch.cuda.synchronize()
            clear()

    @property
    def reserved(self) -> int | None:
        """What torch has from the device now."""
        return torch.cuda.memory_reserved() - self._start[0] if self._is_cuda else None

    @property
    def allocated(self) -> int | None:
        """What tensors have now."""
        return torch.cuda.memory_allocated() - self._start[1] if self._is_cuda else None

    @property
    def most_reserved(self) -> int | None:
        """The most that torch had from the device."""
        return torch.cuda.max_memory_reserved() - self._start[0] if self._is_cuda else None


class Training:
    """One workload's model, optimizers and batches."""

    def __init__(self, work: Workload, device: torch.device) -> None:
        torch.manual_seed(0)
        self.work, self.device = work, device
        self.model = work.make_model(device)
        self.optimizers = work.make_optimizers(self.model, fused=False)
        self.batches: list[Batch] = work.pool(4, pin=device.type == "cuda")

    def moved(self, batch: Batch) -> Batch:
        """The batch on the device."""
        x, y = batch
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, buffers and optimizer state."""
        held: list[Tensor] = [*self.model.parameters(), *self.model.buffers()]
        for optimizer in self.optimizers:
            held += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        return sum(tensor.nbytes for tensor in held if tensor.device == self.device)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(parameter.nbytes for parameter in self.model.parameters() if parameter.grad is not None)

    def graphed(self, step: Callable[..., Any], **options: Any) -> GraphedStep:
        """``step`` in the hands of graph_step."""
        owners = {"model": self.model, **{f"optimizer{i}": optimizer for i, optimizer in enumerate(self.optimizers)}}
        return graph_step(step, owners=owners, device=self.device, **{"min_speedup": 0, **options})


def eager(work: Workload, device: torch.device) -> Row:
    """A plain loop."""
    count, training = Count(device), Training(work, device)
    step = make_step(work, training.model, training.optimizers)
    for index in range(_STEPS):
        step(*training.moved(training.batches[index % 4]))
    return {"eager": count.most_reserved}


def alone(work: Workload, device: torch.device) -> Row:
    """One program, in replays that are not checked."""
    count, training = Count(device), Training(work, device)
    step = training.graphed(make_step(work, training.model, training.optimizers), verify="off")
    for index in range(_STEPS):
        step(*training.batches[index % 4])
    gc.collect()
    row: Row = {"program": count.reserved, "at_most": count.most_reserved, "static": step.machine.buffers.nbytes}
    row |= {
        "estimate": step.stats.bytes_estimated,
        "took": step.machine.programs.nbytes,
        "replayed": step.stats.replayed,
    }
    count.clear_workspaces()
    state, gradients = training.state_bytes, training.gradient_bytes
    if count.allocated is not None and gradients >= _MANY:
        row["gradient_sets"] = (count.allocated - state - row["static"]) / gradients
    step.close()
    return row


def checked(work: Workload, device: torch.device, name: str, steps: int = _CHECKED, **options: Any) -> Row:
    """One program, after replays that were checked."""
    count, training = Count(device), Training(work, device)
    step = training.graphed(make_step(work, training.model, training.optimizers), verify=1, **options)
    seconds = []
    for index in range(steps):
        start = perf_counter()
        step(*training.batches[index % 4])
        seconds.append(perf_counter() - start)
    assert step.stats.verified > 0, step.report()
    gc.collect()
    row = {name: count.reserved, f"{name}_most": count.most_reserved, f"{name}_check_us": median(seconds[-6:]) * 1e6}
    step.close()
    return row


def shared(work: Workload, device: torch.device) -> Row:
    """Programs that train, accumulate and validate, and the one that trains alone."""
    takes = []
    for kinds in (("train",), ("accumulate", "train", "validate")):
        Count(device)
        training = Training(work, device)
        step = training.graphed(_three_ways(training), verify="off")
        for index in range(_STEPS):
            for kind in kinds:
                step(*training.batches[index % 4], kind)
        assert step.stats.captured >= len(kinds), step.report()
        takes.append(step.machine.programs.nbytes)
        step.close()
        del step, training
    return {"one": takes[0], "three": takes[1], "shared": takes[1] / takes[0]}


def _three_ways(training: Training) -> Callable[[Tensor, Tensor, str], Tensor]:
    work, model, (optimizer,) = training.work, training.model, training.optimizers

    def step(x: Tensor, y: Tensor, kind: str) -> Tensor:
        if kind == "validate":
            with torch.no_grad():
                return work.loss(model, x, y)
        loss = work.loss(model, x, y)
        loss.backward()
        if kind == "train":
            _finish(model, optimizer, work.clip)
        return loss

    return step


def _finish(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None) -> None:
    if clip is not None:
        clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


def measure(name: str, *, cpu: bool) -> Row:
    """All figures of one workload."""
    device = torch.device("cpu" if cpu else "cuda:0")
    work = workloads(cpu)[name]
    row: Row = {"workload": name, "torch": torch.__version__, "device": "cpu" if cpu else torch.cuda.get_device_name()}
    row |= eager(work, device) | alone(work, device)
    row |= checked(work, device, "checked") | checked(work, device, "budget", memory_budget=2**50)
    row |= checked(work, device, "timed", _TIMED, min_speedup=1e-6)
    row |= shared(work, device)
    if not cpu:
        gc.collect()
        torch.cuda.empty_cache()
        row |= measure_launches(work, device)
    return row


def bars(row: Row) -> list[Row]:
    """What the figures are held to."""
    held: list[tuple[str, float | None, float]] = []
    if row["eager"]:
        plain = row["eager"] + row["static"]
        held.append(("program / (eager + static)", row["program"] / plain, _NEAR))
        held.append(("most with checks / (eager + static)", row["checked_most"] / plain, _MOST))
        held.append(("most after timed steps / (eager + static)", row["timed_most"] / plain, _MOST))
        held.append(("three programs / the largest alone", row["shared"], _SHARED))
        held.append(("gradients that are held", row.get("gradient_sets"), _SETS))
    return [
        {"workload": row["workload"], "bar": bar, "value": value, "at_most": bound, "met": value <= bound}
        for bar, value, bound in held
        if value is not None
    ]


_BYTES = (
    "eager", "program", "at_most", "static", "estimate", "took", "checked", "checked_most", "budget", "timed_most",
)  # fmt: skip


def show(rows: Sequence[Row]) -> None:
    """Print the tables and the bars."""
    cells = [[r["workload"], *(_mib(r[name]) for name in _BYTES), f"{r['shared']:.2f}"] for r in rows]
    print("MiB", plain_table(("workload", *_BYTES, "shared"), cells, left=1), sep="\n")
    timed = sorted({name for row in rows for name, value in row.items() if isinstance(value, float)} - {"shared"})
    for row in rows:
        print(
            row["workload"],
            *(f"{name} {row[name]:.2f}" for name in timed if isinstance(row.get(name), float)),
            sep="  ",
        )
        if "update_result" in row:
            print(f"  update_result: {row['update_result']}")
    for row in rows:
        for bar in bars(row):
            verdict = "met" if bar["met"] else "missed"
            print(f"{bar['workload']}: {bar['bar']}: {bar['value']:.2f}, at most {bar['at_most']}: {verdict}")


def _mib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**20:.1f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each workload in a process of its own; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="small workloads, the tape")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    require_cuda(parser, cpu=args.cpu)
    if args.child:
        print(json.dumps(measure(args.workloads[0], cpu=args.cpu)))
        return 0
    rows, failed = [], False
    for name in args.workloads:
        command = [
            sys.executable,
            "-m",
            "recipes.benchmarks.memory",
            "--child",
            "--workloads",
            name,
            *["--cpu"][: args.cpu],
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
        if done.returncode:
            failed = True
            print(f"{name}: {done.stderr.strip()}", file=sys.stderr)
            continue
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
    if rows:
        show(rows)
    if args.json is not None:
        facts = {"command": "python -m recipes.benchmarks.memory", "date": date.today().isoformat()}
        held = [bar for row in rows for bar in bars(row)]
        args.json.write_text(json.dumps({**facts, "bars": held, "rows": rows}, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
