"""Count walks over the owners, and note memory, in a long fit of one entry with the callback.

    python -m recipes.zoo.steady [--entry language/bert] [--steps 2000] [--json PATH]

Walks are counted after the first replay, separately for checks: a check compares everything that the owners hold.
"""

from __future__ import annotations

import argparse
import json
import logging
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import psutil
import torch

from graphplan import GraphPlanCallback
from graphplan.owners import walk as walking
from recipes.zoo.clock import Turns
from recipes.zoo.registry import load_entries
from recipes.zoo.training import Run, Wrapped

MARKS = 10
"""Number of times to note memory."""


class Watch(pl.Callback):
    """Counts the walks of each step, and notes the process's memory from time to time."""

    def __init__(self, ours: GraphPlanCallback, steps: int) -> None:
        self._ours, self._every = ours, max(1, steps // MARKS)
        self._verified = 0
        self.walks = {"replays": 0, "checks": 0}
        self.count = 0
        self.mib: list[float] = []
        start = walking._Walker.__init__

        def counted(walker: Any, owners: Any) -> None:
            self.count += 1
            start(walker, owners)

        walking._Walker.__init__ = counted  # type: ignore[method-assign, assignment]

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Note the walks and memory of the step."""
        stats = self._ours.stats
        if stats.replayed > 1:
            self.walks["checks" if stats.verified > self._verified else "replays"] += self.count
        self.count, self._verified = 0, stats.verified
        if trainer.global_step % self._every == 0:
            self.mib.append(psutil.Process().memory_info().rss / 2**20)


def main() -> None:
    """Train, and print the counts."""
    parser = argparse.ArgumentParser(prog="python -m recipes.zoo.steady", description=__doc__)
    parser.add_argument("--entry", default="language/bert")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    run = Run(load_entries()[args.entry], gpu=False, warm=args.steps - 1, steps=0, turns=Turns(None))
    case = run.make()
    ours = GraphPlanCallback(on_failure="eager")
    watch = Watch(ours, args.steps)
    with TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=1, default_root_dir=folder, logger=False, callbacks=[ours, watch],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            gradient_clip_val=case.clip,
        )  # fmt: skip
        trainer.fit(Wrapped(case), run.feed(case))
    stats = ours.stats
    facts = {
        "date": date.today().isoformat(), "torch": torch.__version__, "entry": args.entry, "steps": stats.calls,
        "replayed": stats.replayed, "checked": stats.verified, "walks_in_replays": watch.walks["replays"],
        "walks_in_checks": watch.walks["checks"], "mib": [round(mib) for mib in watch.mib],
    }  # fmt: skip
    print(ours.report())
    print(json.dumps(facts))
    if args.json is not None:
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
