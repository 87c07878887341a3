"""The features of a Lightning fit as data: one row each, run without the callback and with it, and compared.

``python -m tests.lightning.matrix [PART OF A NAME]`` prints a table; ``test_matrix.py`` runs each row as a test.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table

from tests.lightning.rows import Row, check
from tests.lightning.rows_of_callbacks import CALLBACKS
from tests.lightning.rows_of_logs import LOGS
from tests.lightning.rows_of_modules import BATCHES, HOOKS, STEPS
from tests.lightning.rows_of_optimizers import OPTIMIZERS
from tests.lightning.rows_of_parts import PARTS
from tests.lightning.rows_of_runs import RUNS
from tests.lightning.rows_of_trainers import TRAINERS

GROUPS: dict[str, dict[str, Row]] = {
    "step": STEPS,
    "logs": LOGS,
    "batch": BATCHES,
    "hook": HOOKS,
    "module": PARTS,
    "optimizer": OPTIMIZERS,
    "trainer": TRAINERS,
    "callback": CALLBACKS,
    "run": RUNS,
}
ROWS = {f"{group}: {name}": row for group, rows in GROUPS.items() for name, row in rows.items()}
RARE = {
    "batch": ["other strides", "nested", "strings and None"],
    "callback": [
        "BatchSizeFinder", "LearningRateFinder", "RichModelSummary", "TQDMProgressBar", "ThroughputMonitor", "Timer",
        "DeviceStatsMonitor", "LambdaCallback after each batch", "WeightAveraging", "gradients after each batch",
        "RichProgressBar", "LearningRateMonitor", "EarlyStopping", "Tuner.lr_find", "reloads the optimizer",
        "sets lr and weight decay", "LambdaCallback in the step", "overwrites everything", "drops a gradient",
        "BackboneFinetuning", "freezes a layer", "loads weights", "ModelSummary", "SpikeDetection",
    ],
    "hook": ["gradients halved after backward"],
    "logs": [
        "reduce_fx max", "reduce_fx sum", "log_dict", "detached", "batch_size", "on_epoch", "several", "on_step",
        "a Python number", "prog_bar", "now and then", "from on_before_optimizer_step", "without logger",
        "from on_before_zero_grad", "from on_after_backward",
    ],
    "module": [
        "compiled as a whole", "checkpointed activations that draw nothing", "variant, a method", "tied weights",
        "schedulers by hand", "a frozen layer", "part compiled in place", "optimized by hand", "a scaler by hand",
    ],
    "optimizer": [
        "SGD", "a stock SGD", "a stock Adagrad", "RMSprop", "RMSprop with clipping", "schedule every other epoch",
        "schedule cyclic", "schedule chained", "schedule per epoch", "schedule one cycle without momentum",
        "one cycle with momentum", "schedule every third step", "clipping by hand", "zero_grad", "lr_scheduler_step",
        "optimizer_step, and a loss that reads the lr", "no schedule", "a stock AdamW", "schedule plateau",
        "optimizer_step that calls the closure itself and logs", "backward twice", "NAdam",
        "lr warm-up in optimizer_step",
    ],
    "run": [
        "two fits of one module with one callback", "two fits by one Trainer with two callbacks",
        "resumed without the callback", "resumed after an epoch", "checkpoint every four steps",
    ],
    "step": ["takes the batch alone", "takes a batch by another name", "takes the loader's index", "no loss at all"],
    "trainer": [
        "pytorch profiler", "accumulation over 4, ragged end", "accumulation over 2", "accumulation and clipping",
        "32-true", "32-true, clipped by norm", "64-true, clipped by value", "bf16-true, clipped by value", "bf16-true",
        "bf16-mixed, clipped by norm", "16-mixed, SGD", "16-mixed, fused", "16-mixed, AdamW", "16-mixed, RMSprop",
        "16-mixed, SGD, clipped by value", "16-mixed, AdamW, clipped by norm", "validation twice an epoch",
        "the whole sanity check", "no sanity check", "progress bar", "model summary", "simple profiler",
        "validation after a third of an epoch", "validation across epochs", "inference_mode=False", "barebones",
        "16-mixed, accumulated", "16-mixed, fused, clipped by value", "new loaders for each epoch", "64-true",
        "advanced profiler", "overfit_batches", "limit_train_batches", "max_steps", "max_time",
        "a user's precision plugin",
    ],
}  # fmt: skip
"""Rows that other rows come close to: left to ``make soak``."""


def main(part: str = "") -> None:
    """Print a table of the rows whose names have ``part`` in them.

    Raises:
        SystemExit: always, with status 1 if a row failed, and with a sentence if no name has ``part`` in it.
    """
    if not any(part in name for name in ROWS):
        raise SystemExit(f"no row has {part!r} in its name; the names begin with: {', '.join(GROUPS)}")
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    table = Table("row", "steps", "replays", "eager/replayed", title="Lightning's features with the callback, tape")
    failed = 0
    for name, row in ROWS.items():
        if part not in name or any(find_spec(package) is None for package in row.needs):
            continue
        try:
            with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
                outcome = check(row, Path(folder))
        except Exception as error:  # noqa: BLE001
            failed += 1
            table.add_row(name, "", "", f"[red]{type(error).__name__}[/red]")
        else:
            table.add_row(name, str(outcome.steps), str(outcome.replayed), f"{outcome.ratio:.2f}")
    Console().print(table)
    sys.exit(failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m tests.lightning.matrix", description=__doc__)
    parser.add_argument("part", nargs="?", default="", help="only rows that have this in their names; default: all")
    main(parser.parse_args().part)
