"""A module with every kind of state, and callbacks that let a batch of its fit fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import SGD

from graphplan import GraphPlanCallback
from tests.health import FailAt
from tests.lightning.parts import Fit, LitDigits, fit, with_step


def _keeping_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
    self.tp = self.tp + batch[0].mean(0)
    self.seen += 1
    loss = self.loss_of(batch)
    self.losses.append(loss.detach())
    self.log("train_loss", loss, on_step=True, on_epoch=True)
    self.log("tp", self.tp.sum())
    return loss


def keeping(**members: Any) -> LitDigits:
    """A module with a carry, a counter and a list, fused SGD, and further members."""
    module = with_step(_keeping_step, **members)(make_optimizer=partial(SGD, lr=0.1, momentum=0.9, fused=True))
    module.tp, module.seen, module.losses = torch.zeros(64), 0, []
    return module


class Failing(Callback):
    """Lets operator number ``number`` fail, counted from the start of batch ``at``; or calls something there."""

    def __init__(self, at: int, number: int, error: Any, counts: Callable[[Any], bool] = lambda func: True) -> None:
        self.at = at
        self.mode = FailAt(number, error, counts)
        self.entered = False

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.at:
            self.mode.__enter__()
            self.entered = True

    def on_train_batch_end(self, *args: Any) -> None:
        if self.entered:
            self.mode.__exit__(None, None, None)
            self.entered = False

    def on_exception(self, *args: Any) -> None:
        self.on_train_batch_end()


class Raising(Callback):
    """Does something at the start, or at the end, of batch ``at``."""

    def __init__(self, at: int, what: Any, *, at_end: bool = False) -> None:
        self.at, self.what, self.at_end = at, what, at_end

    def _act(self, trainer: Any) -> None:
        if isinstance(self.what, BaseException):
            raise self.what
        self.what(trainer)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if not self.at_end and trainer.global_step == self.at:
            self._act(trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self.at_end and trainer.global_step == self.at:
            self._act(trainer)


def fit_with(
    folder: Path, callbacks: list[Callback], *, base: Callable[[], LitDigits] = keeping, **options: Any
) -> Fit:
    """Fit a module for an epoch, with some more callbacks."""
    own = next((callback for callback in callbacks if isinstance(callback, GraphPlanCallback)), None)
    others = [callback for callback in callbacks if callback is not own]

    def make() -> LitDigits:
        module = base()
        module.configure_callbacks = lambda: others  # type: ignore[method-assign]
        return module

    return fit(make, folder, own, **{"max_epochs": 1, **options})
