"""Rows about callbacks: Lightning's own, and what those of a user may do to a run."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader

from tests.lightning.parts import LitDigits, digits
from tests.lightning.rows import FULL, GradientsAndBatches, Row, Side, kept, scheduled
from tests.twins import keep


class Counting(Callback):
    """Host effects in each hook within the step."""

    def __init__(self) -> None:
        self.calls, self.losses = 0, []

    def on_before_zero_grad(self, *args: Any) -> None:
        self.calls += 1

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.losses.append(loss.detach())

    def on_after_backward(self, *args: Any) -> None:
        self.calls += 1

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.log("from_callback", module.net[0].weight.grad.norm(), on_step=True, on_epoch=True)


class At(Callback):
    """Does something to the run after the tenth step."""

    def __init__(self, act: Callable[[Any, Any], object]) -> None:
        self.act = act

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 10:
            self.act(trainer, module)


class Rude(Callback):
    """Overwrites what it is given."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["loss"].zero_()
        batch[0].zero_()
        for parameter in module.parameters():
            parameter.grad.zero_()
            parameter.data.clamp_(-0.2, 0.2)


class Tuned(LitDigits):
    """A backbone that is frozen at first, and an lr that a finder may set."""

    def __init__(self) -> None:
        super().__init__(schedule=None)
        self.lr = 1e-3
        self.backbone = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr, fused=True)


def load_halves(trainer: Any, module: Any) -> None:
    halves = {k: v * 0.5 if v.is_floating_point() else v for k, v in module.state_dict().items()}
    module.load_state_dict(halves)


def set_hyperparameters(trainer: Any, module: Any) -> None:
    trainer.optimizers[0].param_groups[0].update(lr=1e-4, weight_decay=0.1)


def reload_optimizer(trainer: Any, module: Any) -> None:
    optimizer = trainer.optimizers[0]
    optimizer.load_state_dict(keep(optimizer.state_dict()))


def at(act: Callable[[Any, Any], object], replayed: int = FULL) -> Row:
    """A row with something done after the tenth step."""
    return Row(scheduled(None), callbacks=lambda: [At(act)], replayed=replayed)


class Sized(LitDigits):
    """A module with a loader of its own, whose batch size a finder may set."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 6

    def train_dataloader(self) -> Any:
        shuffle = torch.Generator().manual_seed(5)
        return DataLoader(digits()[0], self.batch_size, shuffle=True, drop_last=True, generator=shuffle)

    def val_dataloader(self) -> Any:
        return DataLoader(digits()[1], 50)


def with_its_own_loaders(side: Side) -> Any:
    """A fit that is given the module alone."""
    side.data = lambda: ()  # type: ignore[method-assign, assignment, return-value]
    return side.fit()


def found_rate(side: Side) -> Any:
    """A fit with a learning rate that ``Tuner.lr_find`` sets, with the same Trainer."""
    return side.fit(first=lambda fit: Tuner(fit.trainer).lr_find(fit.module, *side.data(), num_training=30))


def found_size(side: Side) -> Any:
    """A fit with a batch size that ``Tuner.scale_batch_size`` sets, with the same Trainer."""
    side.data = lambda: ()  # type: ignore[method-assign, assignment, return-value]
    sizes = {"mode": "power", "steps_per_trial": 7, "init_val": 6, "max_trials": 2}
    return side.fit(first=lambda fit: Tuner(fit.trainer).scale_batch_size(fit.module, **sizes))


def log_norm(trainer: Any, module: Any, optimizer: Any) -> None:
    module.log("norm", module.net[0].weight.grad.norm(), on_step=True, on_epoch=True)


def added(callback: Callable[[], Callback], replayed: int = FULL, **row: Any) -> Row:
    """A row with one more callback."""
    return Row(callbacks=lambda: [callback()], replayed=replayed, **row)


def _averaged(callbacks: list[Any]) -> Any:
    return callbacks[0]._average_model.state_dict()


STOCK = {
    "LearningRateMonitor": added(
        partial(LearningRateMonitor, "step", log_momentum=True, log_weight_decay=True),
        shows=lambda fit: "lr-AdamW" in fit.rows,
    ),
    "EarlyStopping": added(
        partial(EarlyStopping, "val_loss", patience=0, min_delta=0.2), 8, trainer={"max_epochs": 20},
        shows=lambda fit: len(fit.observer.batches) < 120,
    ),
    "Timer": added(partial(Timer, timedelta(hours=1), interval="step"), leaves_out=("time_elapsed",)),
    "DeviceStatsMonitor": added(
        partial(DeviceStatsMonitor, cpu_stats=True), leaves_out=("DeviceStatsMonitor",), needs=("psutil",),
        shows=lambda fit: "DeviceStatsMonitor" in fit.rows,
    ),
    "ThroughputMonitor": added(
        partial(ThroughputMonitor, lambda batch: len(batch[0]), window_size=4),
        leaves_out=("_per_sec", "time", "device/"), shows=lambda fit: "train/samples" in fit.rows,
    ),
    "RichProgressBar": added(RichProgressBar, trainer={"enable_progress_bar": True}),
    "TQDMProgressBar": added(TQDMProgressBar, trainer={"enable_progress_bar": True}),
    "ModelSummary": added(partial(ModelSummary, max_depth=2), trainer={"enable_model_summary": True}),
    "RichModelSummary": added(RichModelSummary, trainer={"enable_model_summary": True}),
    "GradientAccumulationScheduler": added(
        partial(GradientAccumulationScheduler, {0: 1, 2: 2, 4: 3}), 18, trainer={"max_epochs": 6},
        shows=lambda fit: fit.trainer.global_step == 2 * (6 + 3 + 2),
    ),
    "SpikeDetection": added(partial(SpikeDetection, atol=100.0)),
    "LambdaCallback after each batch": added(
        partial(LambdaCallback, on_train_batch_end=lambda trainer, module, *_: module.log("x", 1.0))
    ),
    "LambdaCallback in the step": added(partial(LambdaCallback, on_before_optimizer_step=log_norm)),
    "OnExceptionCheckpoint": added(partial(OnExceptionCheckpoint, "unused")),
    "BatchSizeFinder": Row(
        Sized, trainer={"limit_train_batches": 6},
        callbacks=lambda: [BatchSizeFinder("power", steps_per_trial=1, init_val=6, max_trials=2)],
        run=with_its_own_loaders, shows=lambda fit: fit.module.batch_size == 12,
    ),
    "LearningRateFinder": added(
        partial(LearningRateFinder, num_training_steps=30), make=Tuned, shows=lambda fit: fit.module.lr != 1e-3
    ),
    "Tuner.lr_find": Row(Tuned, run=found_rate, shows=lambda fit: fit.module.lr != 1e-3),
    "Tuner.scale_batch_size": Row(
        Sized, trainer={"limit_train_batches": 6}, run=found_size, shows=lambda fit: fit.module.batch_size == 12
    ),
    "BackboneFinetuning": added(partial(BackboneFinetuning, 1, lambda epoch: 1.5), FULL - 4, make=Tuned),
    "EMAWeightAveraging": added(partial(EMAWeightAveraging, decay=0.9), seen=_averaged),
    "WeightAveraging": added(WeightAveraging, seen=_averaged),
    "StochasticWeightAveraging": added(
        partial(StochasticWeightAveraging, 1e-2, swa_epoch_start=1), 20, trainer={"max_epochs": 4}
    ),
    # It puts new hooks on every layer when an epoch ends.
    "ModelPruning": added(partial(ModelPruning, "l1_unstructured", amount=0.2, make_pruning_permanent=False), FULL - 8),
}  # fmt: skip
CALLBACKS: dict[str, Row] = {
    **STOCK,
    "host effects in the step's hooks": Row(
        callbacks=lambda: [Counting()], seen=lambda cbs: [cbs[0].calls, cbs[0].losses]
    ),
    "gradients after each batch": Row(callbacks=lambda: [GradientsAndBatches()], seen=kept),
    "overwrites everything": Row(callbacks=lambda: [Rude()]),
    "stops the run": at(lambda trainer, module: setattr(trainer, "should_stop", True), replayed=6),
    "loads weights": at(load_halves),
    "reloads the optimizer": at(reload_optimizer),
    "sets lr and weight decay": at(set_hyperparameters, FULL - 5),
    "replaces a layer": at(lambda trainer, module: module.net.__setitem__(2, nn.Tanh()), FULL - 2),
    "freezes a layer": at(lambda trainer, module: module.net[0].requires_grad_(False), FULL - 5),
    "stops dropping out": at(lambda trainer, module: setattr(module.net[3], "p", 0.0), FULL - 5),
    "drops a gradient": at(lambda trainer, module: setattr(module.net[0].weight, "grad", None)),
    "reseeds": at(lambda trainer, module: torch.manual_seed(99)),
    "accumulates from then on": at(lambda trainer, module: setattr(trainer, "accumulate_grad_batches", 2), replayed=6),
}
