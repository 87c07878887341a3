"""The Trainers of the benchmark: a bare one, and one as people have it, each with and without the callback."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from recipes.benchmarks.contenders import POOL, compiled
from recipes.benchmarks.measuring import Feed, Job, Row, row, stats_of, weights
from recipes.benchmarks.workloads import cosine

LOGGED = 5
"""Values that the typical module logs in each step."""


def _is_typical(job: Job) -> bool:
    return job.who.way.startswith("typical")


def make_module(job: Job, shard: Callable[[nn.Module, Any], None] | None = None) -> Any:
    """The workload as a ``LightningModule``, its learning rate scheduled at every step.

    Under a typical Trainer mixed precision is the Trainer's, and a few values are logged; under a bare one autocast is
    inside ``training_step``, as it is in the plain loops' steps. Several optimizers make a module with manual
    optimization. ``shard`` takes the model and a device mesh and makes it an FSDP2 module.
    """
    import lightning.pytorch as pl

    workload, typical = job.work, _is_typical(job)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = workload.update is None
            self.model = workload.make_model(torch.device("cpu"))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            if workload.update is None:
                loss = (workload.criterion if typical else workload.loss)(self.model, x, y)
            else:
                optimizers: Any = self.optimizers()
                schedules: Any = self.lr_schedulers()
                loss = workload.update(self.model, optimizers, x, y, self.manual_backward)
                for schedule in schedules:
                    schedule.step()
            if typical:
                shown = loss.detach()
                self.log("loss", shown, on_step=True, on_epoch=True, prog_bar=True)
                for index in range(1, LOGGED):
                    self.log(f"value_{index}", shown * index, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizers = workload.make_optimizers(self.model, fused=job.who.fuse and not job.has_graphplan)
            schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, cosine) for optimizer in optimizers]
            return optimizers, [{"scheduler": schedule, "interval": "step"} for schedule in schedules]

    class Sharded(Module):
        def configure_model(self) -> None:
            assert shard is not None
            assert self.device_mesh is not None
            shard(self.model, self.device_mesh["data_parallel"])

    module = Module() if shard is None else Sharded()
    module.model = compiled(module.model, job)
    return module


def _callbacks(job: Job) -> list[Any]:
    from graphplan import GraphPlanCallback

    if not job.has_graphplan:
        return []
    return [GraphPlanCallback(fuse_optimizer=job.who.fuse, compile=job.compile)]


def make_trainer(job: Job, **options: Any) -> Any:
    """A bare ``Trainer`` for one epoch, with the callback where the contender names it.

    Lightning's mixed precision refuses to clip the gradients of a fused optimizer, even for bfloat16, which needs no
    scaler. So precision stays ``32-true`` and autocast is inside ``training_step``, as it is in the other loops' steps:
    all contenders compute the same thing.
    """
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    bare: dict[str, Any] = {
        "precision": "32-true",
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "callbacks": _callbacks(job),
    }
    return pl.Trainer(
        accelerator="cpu" if job.cpu else "gpu",
        max_epochs=1,
        gradient_clip_val=job.work.clip,
        enable_model_summary=False,
        **{**bare, **options},
    )


@contextmanager
def typical_trainer(job: Job) -> Iterator[Any]:
    """A ``Trainer`` as people have it: a CSV logger, a progress bar that nobody looks at, checkpoints, a precision."""
    from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
    from lightning.pytorch.loggers import CSVLogger

    with TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield make_trainer(
            job,
            devices=1,
            precision="bf16-mixed" if job.work.bf16 else "32-true",
            logger=CSVLogger(folder),
            log_every_n_steps=50,
            enable_progress_bar=True,
            enable_checkpointing=True,
            callbacks=[TQDMProgressBar(), ModelCheckpoint(folder), *_callbacks(job)],
        )


def callback_of(trainer: Any) -> Any:
    """The callback that :func:`make_trainer` gave the trainer, or None."""
    from graphplan import GraphPlanCallback

    return next((callback for callback in trainer.callbacks if isinstance(callback, GraphPlanCallback)), None)


def lightning(job: Job) -> list[Row]:
    """Measure a ``Trainer``, bare or typical, with or without the callback."""
    torch.manual_seed(0)
    module = make_module(job)
    feed = Feed(job, job.work.pool(POOL, pin=not job.cpu))
    torch.manual_seed(1)
    if _is_typical(job):
        with typical_trainer(job) as trainer:
            trainer.fit(module, feed)
    else:
        trainer = make_trainer(job, devices=1)
        trainer.fit(module, feed)
    callback = callback_of(trainer)
    facts = {**feed.facts(), **(stats_of(callback) if callback is not None else {})}
    return [row(job, feed.us(), {"weights": weights(module), **facts})]
