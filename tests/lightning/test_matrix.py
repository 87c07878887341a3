"""One row for each way in which a run may differ from the plain one: the fit with the callback is the fit without it.

A row says how the module, the batches, the callbacks or the Trainer differ, and how many of its batches at least are
replayed. What an observer sees after every batch, the rows, the weights and the checkpoints are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import ChainedScheduler, CyclicLR, ExponentialLR, LinearLR, StepLR

from tests.lightning.parts import (
    LitDigits,
    per_step,
)
from tests.lightning.rows import FULL, RECAPTURED, GradientsAndBatches, Row, check, kept, scheduled
from tests.lightning.rows_of_modules import BATCHES, HOOKS, STEPS
from tests.twins import keep

# Callbacks.


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
    return Row(partial(LitDigits, schedule=None), callbacks=lambda: [At(act)], replayed=replayed)


CALLBACKS = {
    "host effects in the step's hooks": Row(
        callbacks=lambda: [Counting()], seen=lambda cbs: [cbs[0].calls, cbs[0].losses]
    ),
    "gradients after each batch": Row(callbacks=lambda: [GradientsAndBatches()], seen=kept),
    "overwrites everything": Row(callbacks=lambda: [Rude()]),
    "lambda after each batch": Row(
        callbacks=lambda: [LambdaCallback(on_train_batch_end=lambda trainer, module, *_: module.log("x", 1.0))]
    ),
    "averaged weights": Row(
        callbacks=lambda: [EMAWeightAveraging(decay=0.9)], seen=lambda cbs: cbs[0]._average_model.state_dict()
    ),
    "stochastic weight averaging": Row(
        callbacks=lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=1)], trainer={"max_epochs": 4}, replayed=20
    ),
    "a backbone that thaws": Row(
        Tuned, callbacks=lambda: [BackboneFinetuning(1, lambda epoch: 1.5)], replayed=RECAPTURED
    ),
    "a finder of learning rates": Row(Tuned, callbacks=lambda: [LearningRateFinder(num_training_steps=8)]),
    "checkpoints within epochs": Row(
        callbacks=lambda: [ModelCheckpoint(monitor="train_loss_step", every_n_train_steps=4, save_top_k=2)],
        seen=lambda cbs: [cbs[0].best_model_score, sorted(cbs[0].best_k_models.values())],
    ),
    "stops the run": at(lambda trainer, module: setattr(trainer, "should_stop", True), replayed=6),
    "loads weights": at(load_halves),
    "reloads the optimizer": at(reload_optimizer),
    "sets lr and weight decay": at(set_hyperparameters, RECAPTURED),
    "replaces a layer": at(lambda trainer, module: module.net.__setitem__(2, nn.Tanh()), RECAPTURED),
    "freezes a layer": at(lambda trainer, module: module.net[0].requires_grad_(False), RECAPTURED),
    "stops dropping out": at(lambda trainer, module: setattr(module.net[3], "p", 0.0), RECAPTURED),
    "drops a gradient": at(lambda trainer, module: setattr(module.net[0].weight, "grad", None)),
    "reseeds": at(lambda trainer, module: torch.manual_seed(99)),
    "accumulates from then on": at(lambda trainer, module: setattr(trainer, "accumulate_grad_batches", 2), replayed=6),
}


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "every other epoch": lambda optimizer: {"scheduler": StepLR(optimizer, 1, 0.5), "frequency": 2},
    "cyclic": lambda optimizer: per_step(CyclicLR(optimizer, 1e-4, 1e-2, step_size_up=3, cycle_momentum=False)),
    "chained": lambda optimizer: per_step(
        ChainedScheduler([ExponentialLR(optimizer, 0.99), LinearLR(optimizer, 0.5, total_iters=6)])
    ),
}
TRAINERS: dict[str, Row] = {
    "validation after a third of an epoch": Row(trainer={"val_check_interval": 1 / 3}, replayed=12),
    "the whole sanity check": Row(trainer={"num_sanity_val_steps": -1}),
    "deterministic": Row(trainer={"deterministic": True}),
    "simple profiler": Row(trainer={"profiler": "simple"}),
    "new loaders for each epoch": Row(trainer={"reload_dataloaders_every_n_epochs": 1}),
    "accumulation and clipping": Row(
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_epochs": 4}, replayed=15
    ),
}
for _name, _schedule in SCHEDULES.items():
    TRAINERS[f"schedule: {_name}"] = Row(scheduled(_schedule))

ROWS = {**HOOKS, **BATCHES, **CALLBACKS, **STEPS, **TRAINERS}


@pytest.mark.parametrize("name", ROWS)
def test_row(name: str, tmp_path: Path) -> None:
    """The row's fit with the callback is its fit without it, and as many batches as expected were replayed."""
    check(ROWS[name], tmp_path)
