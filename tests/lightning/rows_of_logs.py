"""Rows about what a step logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanAbsoluteError, MeanMetric, MeanSquaredError, MetricCollection

from tests.lightning.parts import LitDigits, with_step
from tests.lightning.rows import Row, variant


def logs(log: Callable[[Any, Tensor], None], **options: Any) -> Row:
    """A row whose step logs its loss so."""

    def step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        log(self, loss)
        return loss

    return Row(with_step(step), **{"shows": lambda fit: len(fit.rows.splitlines()) > 3, **options})


def _several(self: Any, loss: Tensor) -> None:
    for number in range(5):
        self.log(f"v{number}", loss * number, on_step=True, on_epoch=True)


def _nested(self: Any, loss: Tensor) -> None:
    def inner() -> None:
        self.log("inner", loss.detach() * 2, on_step=True, on_epoch=True, reduce_fx="max")

    inner()
    self.log("weights", self.net[0].weight.norm())


class Metered(LitDigits):
    """Metric objects: logged through ``forward``, in a collection, and computed and reset by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()
        self.errors = MetricCollection([MeanSquaredError(), MeanAbsoluteError()], prefix="train_")
        self.mean = MeanMetric(nan_strategy="disable")
        self.by_epoch = MeanMetric(nan_strategy="disable")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.error(logits.detach().softmax(1).amax(1), torch.ones_like(y))
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.errors(logits.detach().amax(1), y.float())
        self.log_dict(self.errors, on_step=True, on_epoch=True)
        self.mean.update(loss.detach())
        self.by_epoch.update(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 2:
            self.log("mean", self.mean.compute())
            self.mean.reset()

    def on_train_epoch_end(self) -> None:
        self.log("by_epoch", self.by_epoch.compute())
        self.by_epoch.reset()


class Collecting(LitDigits):
    """Collects outputs on the module, as the Lightning documentation shows."""

    def __init__(self) -> None:
        super().__init__()
        self.training_step_outputs: list[Tensor] = []
        self.means: list[Tensor] = []
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.training_step_outputs.append(loss.detach())
        self.calls += 1
        return loss

    def on_train_epoch_end(self) -> None:
        self.means.append(torch.stack(self.training_step_outputs).mean())
        self.training_step_outputs.clear()


def _log_gradients(self: Any, *args: Any) -> None:
    for name, parameter in self.named_parameters():
        self.log(f"norm/{name}", parameter.grad.norm())


def _log_in_zero_grad(self: Any, optimizer: Any) -> None:
    self.log("zeroed", self.net[0].weight.norm(), on_step=True, on_epoch=True)


LOGS: dict[str, Row] = {
    "on_step": logs(lambda self, loss: self.log("a", loss, on_step=True, on_epoch=False)),
    "on_epoch": logs(lambda self, loss: self.log("a", loss, on_step=False, on_epoch=True)),
    "on_step and on_epoch": logs(lambda self, loss: self.log("a", loss, on_step=True, on_epoch=True)),
    "prog_bar": logs(lambda self, loss: self.log("a", loss, prog_bar=True, on_epoch=True)),
    "reduce_fx max": logs(lambda self, loss: self.log("a", loss, reduce_fx="max", on_epoch=True)),
    "reduce_fx min on both": logs(lambda self, loss: self.log("a", loss, reduce_fx="min", on_step=True, on_epoch=True)),
    "reduce_fx sum": logs(lambda self, loss: self.log("a", loss, reduce_fx="sum", on_step=False, on_epoch=True)),
    "batch_size": logs(lambda self, loss: self.log("a", loss, on_step=False, on_epoch=True, batch_size=7)),
    "log_dict": logs(lambda self, loss: self.log_dict({"a": loss, "b": loss.exp()}, on_step=True, on_epoch=True)),
    "without logger": logs(
        lambda self, loss: self.log("a", loss, logger=False, on_step=True, on_epoch=True), shows=lambda fit: True
    ),
    "several": logs(_several),
    "nested and others' norms": logs(_nested),
    "detached": logs(lambda self, loss: self.log("a", loss.detach() * 2, on_step=True, on_epoch=True)),
    "a Python number": logs(lambda self, loss: self.log("a", 1.5, on_step=True, on_epoch=True, prog_bar=True)),
    # After one warm-up step, it takes two traces to see that a metric counts its updates, and two more to follow that.
    "metrics and collections": Row(Metered, replayed=13),
    "collected outputs": Row(Collecting, shows=lambda fit: (fit.module.calls, len(fit.module.means)) == (18, 3)),
    "from on_before_optimizer_step": Row(variant(on_before_optimizer_step=_log_gradients)),
    "from on_after_backward": Row(variant(on_after_backward=_log_gradients)),
    "from on_before_zero_grad": Row(variant(on_before_zero_grad=_log_in_zero_grad)),
    "now and then": Row(trainer={"log_every_n_steps": 5}),
}
