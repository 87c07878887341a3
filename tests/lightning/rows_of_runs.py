"""Rows about runs of several parts: checkpoints and resuming, fits that follow each other, the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint

from tests.lightning.parts import Fit, LitDigits
from tests.lightning.rows import FULL, PER_EPOCH, Row, Side, Watcher

MIDDLE = 9
"""A step in the middle of the second epoch."""


class SaveAt(Callback):
    """Saves a checkpoint after step ``MIDDLE``."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == MIDDLE:
            trainer.save_checkpoint(Path(trainer.checkpoint_callback.dirpath) / "middle.ckpt")


def resumed(first: bool, second: bool, checkpoint: str = "middle.ckpt") -> Any:
    """A run that is resumed; which of its two fits have the callback, on the side with it."""

    def run(side: Side) -> Fit:
        begun = side.fit("first", callback=first or None, max_epochs=2)
        return side.fit("second", callback=second or None, resume=begun.folder / checkpoint)

    return run


def twice(side: Side) -> Fit:
    """A fit, and another of a new module by a new Trainer with the same callback."""
    callback = side.callback()
    side.fit("first", callback=callback)
    return side.fit("second", callback=callback)


def again(renewed: bool) -> Any:
    """A fit, and another of the same module by a new Trainer, with the same callback or with a new one."""

    def run(side: Side) -> Fit:
        first = side.fit("first")
        return side.fit("second", callback=True if renewed else first.callback, module=first.module)

    return run


def same_trainer(renewed: bool) -> Any:
    """The same Trainer fits another module from the start, with the same callback or with a new one."""

    def run(side: Side) -> Fit:
        fit = side.fit()
        if renewed and side.graphed:
            old, fit.callback = fit.callback, side.callback()
            fit.trainer.callbacks[fit.trainer.callbacks.index(old)] = fit.callback
        fit.module = side.module()
        fit.trainer.fit_loop.epoch_progress.reset()
        side.go_on(fit, *side.data())
        return fit

    return run


def going_on(side: Side) -> Fit:
    """The same Trainer goes on for another epoch."""
    fit = side.fit()
    fit.trainer.fit_loop.max_epochs = 4
    side.go_on(fit, *side.data())
    return fit


class Failed(Exception):
    """Ends a fit."""


class Failing(Callback):
    """Fails after step ``MIDDLE``."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == MIDDLE:
            raise Failed


def broken_off(side: Side) -> Fit:
    """A fit that fails, leaves a checkpoint, and is resumed."""
    try:
        side.fit("first", more=[Failing(), OnExceptionCheckpoint(side.folder, "failed")])
    except Failed:
        return side.fit("second", resume=side.folder / "failed.ckpt")
    raise AssertionError("the fit did not fail")


class Data(L.LightningDataModule):
    """The data of a side, for the command line."""

    side: Side

    def train_dataloader(self) -> Any:
        return self.side.data()[0]

    def val_dataloader(self) -> Any:
        return self.side.data()[1]


class FromTheCommandLine(LitDigits):
    """A module with an argument that YAML can write."""

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__(schedule=None)
        self.lr = lr

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.param_groups[0]["lr"] = self.lr
        return optimizer


def through_the_cli(side: Side) -> Fit:
    """``LightningCLI`` with a YAML file, which gives the callback by its class path."""
    from lightning.pytorch.cli import LightningCLI

    name = "graphplan.GraphPlanCallback"
    callback = {"class_path": name, "init_args": {"backend": "tape", "warmup_steps": 1, "policies": None}}
    saved = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": str(side.folder)}}
    saved["init_args"] |= {"save_last": True, "monitor": "val_loss"}  # type: ignore[index, operator]
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger"}
    logger |= {"init_args": {"save_dir": str(side.folder), "name": "logs", "version": 0}}
    trainer = {
        "accelerator": "cpu", "max_epochs": 3, "log_every_n_steps": 1, "enable_progress_bar": False,
        "enable_model_summary": False, "logger": logger, "callbacks": [saved, *([callback] if side.graphed else [])],
    }  # fmt: skip
    side.folder.mkdir(parents=True, exist_ok=True)
    path = side.folder / "config.yaml"
    path.write_text(yaml.safe_dump({"seed_everything": 1, "trainer": trainer, "model": {"lr": 0.01}}))
    Data.side, watcher = side, Watcher()
    with side.listening():
        cli = LightningCLI(
            FromTheCommandLine, Data, args=["fit", "--config", str(path)], save_config_callback=None,
            trainer_defaults={"callbacks": [watcher]},
        )  # fmt: skip
    own = [found for found in cli.trainer.callbacks if type(found).__name__ == "GraphPlanCallback"]
    fit = Fit(cli.model, cli.trainer, watcher, own[0] if own else None, side.folder)
    side.count(fit)
    return fit


_MIDDLE: dict[str, Any] = {"callbacks": lambda: [SaveAt()]}
RUNS: dict[str, Row] = {
    "checkpoint every four steps": Row(
        callbacks=lambda: [ModelCheckpoint(monitor="train_loss_step", every_n_train_steps=4, save_top_k=2)],
        seen=lambda callbacks: [callbacks[0].best_model_score, sorted(callbacks[0].best_k_models.values())],
    ),
    "resumed within an epoch": Row(run=resumed(True, True), replayed=9 + 6, **_MIDDLE),
    "resumed without the callback": Row(run=resumed(True, False), replayed=8, **_MIDDLE),
    "resumed with the callback": Row(run=resumed(False, True), replayed=6, **_MIDDLE),
    "resumed after an epoch": Row(run=resumed(True, True, "last.ckpt"), replayed=8 + 2),
    "two fits with one callback": Row(run=twice, replayed=2 * FULL),
    "two fits of one module with one callback": Row(run=again(False), replayed=2 * FULL),
    "two fits of one module with two callbacks": Row(run=again(True), replayed=2 * FULL),
    "two fits by one Trainer": Row(run=same_trainer(False), replayed=2 * FULL),
    "two fits by one Trainer with two callbacks": Row(run=same_trainer(True), replayed=2 * FULL),
    "a fit that goes on": Row(run=going_on, replayed=FULL + PER_EPOCH - 4),
    "a fit that fails and is resumed": Row(run=broken_off, replayed=6 + 6),
    "LightningCLI": Row(run=through_the_cli, needs=("jsonargparse",)),
}
