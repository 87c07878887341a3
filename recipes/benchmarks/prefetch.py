"""Does prefetching pay? ``python -m recipes.benchmarks.prefetch [--cpu] [--json PATH]``.

Batches of 256 images of 3 x 224 x 224 in pinned host memory, and patch networks of several depths, so that the copy to
the device takes longer than the computation, about as long, and not as long. Measured per step: the copy alone, the
replays of a program whose batch is on the device already, graph_step with the copy in front of each replay, and with
``prefetch=True``; and a bare Trainer with the callback, likewise. At best a step takes as long as the longer of its two
parts alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from datetime import date
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from graphplan import graph_step
from recipes.benchmarks.devices import require_cuda
from recipes.benchmarks.measuring import Feed, Job
from recipes.benchmarks.tables import plain_table

Row = dict[str, Any]
Batch = tuple[Tensor, Tensor]
_WARMUP, _REPEATS = 20, 3
_COLUMNS = ("depth", "copy", "compute", "graph_step", "+ prefetch", "Trainer", "+ prefetch", "ratio")
_PAYS = 0.9
"""Prefetching is worth its memory if a step that copies about as long as it computes takes this much of its time."""


class Patches(nn.Module):
    """Patches of 16 x 16 pixels, each through some layers, and their mean to ten classes."""

    def __init__(self, depth: int, width: int = 256) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 16, 16)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of ``[batch, 3, height, width]``."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda, cache_enabled=False):
            x = self.cut(x).flatten(2).transpose(1, 2)
            for layer in self.layers:
                x = x + F.gelu(layer(x))
            logits: Tensor = self.out(x.mean(1))
        return logits.float()


def batches(cpu: bool) -> list[Batch]:
    """A few batches in pinned memory."""
    generator = torch.Generator().manual_seed(0)
    size, side = (4, 32) if cpu else (256, 224)
    made = []
    for _ in range(3):
        x = torch.randn(size, 3, side, side, generator=generator)
        y = torch.randint(10, (size,), generator=generator)
        made.append((x, y) if cpu else (x.pin_memory(), y.pin_memory()))
    return made


def _block_ms(call: Callable[[Batch], object], pool: Sequence[Batch], steps: int, cpu: bool) -> float:
    """Milliseconds per call: the median of blocks, each until the device has finished."""
    blocks = []
    for block in range(_REPEATS + 1):
        start = perf_counter()
        for batch in islice(cycle(pool), _WARMUP if block == 0 else steps):
            call(batch)
        if not cpu:
            torch.cuda.synchronize()
        blocks.append((perf_counter() - start) / steps * 1e3)
    return median(blocks[1:])


def _plain(depth: int, pool: Sequence[Batch], steps: int, *, cpu: bool, prefetch: bool) -> tuple[float, float]:
    """Milliseconds per step of graph_step, and the last loss."""
    device = torch.device("cpu" if cpu else "cuda:0")
    torch.manual_seed(0)
    model = Patches(depth).to(device)
    optimizer = SGD(model.parameters(), lr=0.01, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    owners = {"model": model, "optimizer": optimizer}
    step = graph_step(train_step, owners=owners, device=device, verify="off", min_speedup=0, prefetch=prefetch)
    losses: list[Tensor] = []
    taken = _block_ms(lambda batch: losses.append(step(*batch)), pool, steps, cpu)
    assert step.stats.replayed, step.report()
    last = losses[-1].item()
    step.close()
    return taken, last


def _trainer(depth: int, pool: list[Batch], steps: int, *, cpu: bool, prefetch: bool) -> float:
    """Milliseconds per step of a bare Trainer with the callback."""
    import lightning.pytorch as pl

    from graphplan import GraphPlanCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Patches(depth)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=0.01, fused=True)

    torch.manual_seed(0)
    callback = GraphPlanCallback(prefetch=prefetch, verify="off", min_speedup=0)
    feed = Feed(Job("images", "trainer_callback", cpu, steps, _REPEATS, _WARMUP), pool)
    trainer = pl.Trainer(
        accelerator="cpu" if cpu else "gpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Module(), feed)
    return median(feed.us()) / 1e3


def measure(depth: int, pool: list[Batch], steps: int, *, cpu: bool) -> Row:
    """All figures of one depth."""
    device = torch.device("cpu" if cpu else "cuda:0")
    copy = _block_ms(lambda batch: [t.to(device, non_blocking=True) for t in batch], pool, steps, cpu)
    compute, _ = _plain(depth, [(x.to(device), y.to(device)) for x, y in pool], steps, cpu=cpu, prefetch=False)
    without, loss = _plain(depth, pool, steps, cpu=cpu, prefetch=False)
    with_it, same = _plain(depth, pool, steps, cpu=cpu, prefetch=True)
    row = {"depth": depth, "copy_ms": copy, "compute_ms": compute, "graph_step_ms": without, "prefetch_ms": with_it}
    row |= {"trainer_ms": _trainer(depth, pool, steps, cpu=cpu, prefetch=False)}
    row |= {"trainer_prefetch_ms": _trainer(depth, pool, steps, cpu=cpu, prefetch=True)}
    # Not bit by bit: bfloat16 kernels need not be deterministic.
    return {**row, "loss_difference": abs(loss - same), "ratio": with_it / without}


def verdict(rows: Sequence[Row]) -> str:
    """Whether it pays where copy and computation take about as long."""
    near = [row for row in rows if 0.5 <= row["compute_ms"] / row["copy_ms"] <= 2]
    if not near:
        return "no depth computes about as long as it copies: choose others with --depths"
    best = min(near, key=lambda row: abs(row["compute_ms"] - row["copy_ms"]))
    outcome = "pays" if best["ratio"] <= _PAYS else "does not pay"
    return f"prefetching {outcome}: {best['ratio']:.2f} of the time at depth {best['depth']}, at most {_PAYS}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table and a verdict, and write the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="small images, the tape: prefetching does nothing there")
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 8, 24], help="layers of the networks")
    parser.add_argument("--steps", type=int, default=60, help="steps of a block")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures")
    args = parser.parse_args(argv)
    require_cuda(parser, cpu=args.cpu)
    pool = batches(args.cpu)
    rows = [measure(depth, pool, args.steps, cpu=args.cpu) for depth in args.depths]
    names = ("copy_ms", "compute_ms", "graph_step_ms", "prefetch_ms", "trainer_ms", "trainer_prefetch_ms", "ratio")
    print(
        "ms per step", plain_table(_COLUMNS, [[str(r["depth"]), *(f"{r[n]:.2f}" for n in names)] for r in rows], left=1)
    )
    print(verdict(rows))
    if args.json is not None:
        place = "cpu" if args.cpu else torch.cuda.get_device_name()
        facts = {"command": "python -m recipes.benchmarks.prefetch", "date": date.today().isoformat(), "device": place}
        facts |= {"torch": torch.__version__, "verdict": verdict(rows)}
        args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
