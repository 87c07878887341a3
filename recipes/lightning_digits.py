"""graphplan in a Lightning Trainer: the digits with and without the callback, compared bit by bit.

    python -m recipes.lightning_digits

The module and the data know nothing about graphs. The only change is one callback in the list.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from graphplan import GraphPlanCallback
from recipes.comparison import describe_launches, describe_times, now, require_equal, training_state
from recipes.data import DigitsData
from recipes.models import DigitsClassifier


class Watch(Callback):
    """Keeps what each step took and returned, as an ordinary callback sees it."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []
        self._start = 0.0

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._start = now(pl_module.device)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seconds.append(now(pl_module.device) - self._start)
        self.losses.append(outputs["loss"].detach().clone())


@dataclass(frozen=True)
class Result:
    """What one run left behind."""

    state: dict[str, Tensor]
    seconds: list[float]
    metrics: dict[str, Tensor]
    device: torch.device


def train(callbacks: Sequence[Callback], *, epochs: int, accelerator: str) -> Result:
    """Train the digits from the same start, with ``callbacks``."""
    pl.seed_everything(0, verbose=False)
    watch = Watch()
    model = DigitsClassifier()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator=accelerator,
            devices=1,
            max_epochs=epochs,
            callbacks=[*callbacks, watch],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(model, datamodule=DigitsData())
    state = training_state(model, trainer.optimizers[0], watch.losses)
    metrics = {name: value.detach().clone() for name, value in trainer.callback_metrics.items()}
    return Result(
        state | {f"metric[{name}]": value for name, value in metrics.items()}, watch.seconds, metrics, model.device
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--accelerator", default="auto", choices=["auto", "cpu", "gpu"])
    parser.add_argument("--backend", default="auto", choices=["auto", "cudagraph", "tape"])
    args = parser.parse_args(argv)
    # Operators this small lose more by waiting for each other's threads than they gain.
    torch.set_num_threads(1)

    eager = train([], epochs=args.epochs, accelerator=args.accelerator)
    callback = GraphPlanCallback(backend=args.backend)
    graphed = train([callback], epochs=args.epochs, accelerator=args.accelerator)

    plan = callback.plan
    if plan is None:
        raise SystemExit("too few steps to trace one: ask for more epochs")
    print(plan)
    print(callback.report())
    print(describe_launches(plan.launches, callback.stats.replayed))
    print(require_equal(eager.state, graphed.state))
    print(describe_times(eager.seconds, graphed.seconds))
    print(f"validation accuracy: {float(graphed.metrics['val/accuracy']):.4f}")


if __name__ == "__main__":
    main()
