"""Measure the cost of starting graphplan: traces, captures and the first checks, in units of eager steps.

    python -m recipes.zoo.start [--entry language/bert] [--steps 60] [--json PATH]

The device is synchronized between steps, so that each has its own time. Measure one entry per process: kernels that one
fit has loaded would be loaded for the next.
"""

from __future__ import annotations

import argparse
import json
import logging
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from graphplan import GraphPlanCallback
from graphplan.step.gate import SKIPPED, STEPS
from recipes.zoo.clock import Turns
from recipes.zoo.registry import load_entries
from recipes.zoo.training import Run, module_of, trainer_of

KINDS = ("traced", "captured", "verified")
_CLEAN = SKIPPED + STEPS


class Clock(pl.Callback):
    """Notes the duration of each step, and what graphplan did in it."""

    def __init__(self, ours: GraphPlanCallback, run: Run) -> None:
        self._ours, self._run = ours, run
        self._before: dict[str, int] | None = None
        self._begin = 0.0
        self.steps: list[tuple[str, float]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        """Note the step before, which has ended when the device is idle."""
        if self._run.gpu:
            torch.cuda.synchronize()
        now = perf_counter()
        stats = self._ours.stats
        counts = {kind: getattr(stats, kind) for kind in (*KINDS, "replayed")}
        if self._before is not None:
            kind = next((kind for kind, count in counts.items() if count > self._before[kind]), "eager")
            self.steps.append((kind, now - self._begin))
        self._before, self._begin = counts, perf_counter()


def main() -> None:
    """Train, and print the cost of the start."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--entry", default="language/bert", help="its name, as python -m recipes.zoo --list prints it")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, metavar="PATH", help="add a row to the figures there")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    run = Run(load_entries()[args.entry], gpu=gpu, warm=0, steps=args.steps, turns=Turns(None))
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    case, ours = run.make(), GraphPlanCallback(on_failure="eager")
    module, clock = module_of(case), Clock(ours, run)
    trainer = trainer_of(run, case, module, [ours, clock], logger=False)
    batches = [case.batches[index % len(case.batches)] for index in range(args.steps)]
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    # On CUDA the first steps are timed before graphplan is installed.
    clean, rest = clock.steps[1 : _CLEAN if gpu else None], clock.steps[_CLEAN if gpu else 1 :]
    eager = median(seconds for kind, seconds in clean if kind == "eager")
    spent = {kind: sum(seconds - eager for name, seconds in rest if name == kind) / eager for kind in (*KINDS, "eager")}
    row = {
        "entry": args.entry, "eager_ms": round(eager * 1e3, 1), "replayed": ours.stats.replayed,
        "programs": ours.stats.captured,
        "start": round(sum(spent[kind] for kind in KINDS), 1),
        **{kind: round(spent[kind], 1) for kind in KINDS}, "warm_up": round(spent["eager"], 1),
    }  # fmt: skip
    print(json.dumps(row))
    if args.json is not None:
        facts: dict[str, Any] = {
            "date": date.today().isoformat(), "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if gpu else "cpu",
            "command": "python -m recipes.zoo.start --entry ENTRY, a process each", "rows": [],
        }  # fmt: skip
        if args.json.exists():
            facts = json.loads(args.json.read_text())
        facts["rows"].append(row)
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
