"""Rows about the module: its hooks, its batches, what its step carries on, logs and returns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR
from torchmetrics import MeanAbsoluteError, MeanMetric, MeanSquaredError, MetricCollection

from tests.lightning.parts import (
    FUSED_ADAMW,
    LitDigits,
    per_step,
    with_step,
)
from tests.lightning.rows import BATCH, RECAPTURED, GradientsAndBatches, Row, kept, variant

# Hooks that Lightning lets a module override.


def warm_up(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 3e-3 * min(1.0, (self.trainer.global_step + 1) / 10)
    optimizer.step(closure=optimizer_closure)


def every_second(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
    if batch_idx % 2:
        optimizer_closure()
    else:
        optimizer.step(closure=optimizer_closure)


def closure_first(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
    optimizer_closure()
    self.log("norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm())
    optimizer.step()


def clip_by_epoch(self: Any, optimizer: Any, **kwargs: Any) -> None:
    bound = 0.5 if self.current_epoch < 1 else 0.05
    self.clip_gradients(optimizer, gradient_clip_val=bound, gradient_clip_algorithm="norm")


def scaled_backward(self: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()


def log_gradients(self: Any, *args: Any) -> None:
    for name, parameter in self.named_parameters():
        self.log(f"norm/{name}", parameter.grad.norm())


def count_and_append(self: Any) -> None:
    self.calls += 1
    self.latest = self.net[0].weight.grad.abs().mean().detach()


def skip_rest(self: Any, batch: Any, batch_idx: int) -> int | None:
    return -1 if (self.current_epoch, batch_idx) == (1, 4) else None


HOOKS = {
    "lr warm-up in optimizer_step": Row(partial(variant(optimizer_step=warm_up), schedule=None)),
    "optimizer_step that only accumulates every other batch": Row(variant(optimizer_step=every_second)),
    "optimizer_step that calls the closure itself and logs": Row(variant(optimizer_step=closure_first)),
    # Its code reads the epoch: a recapture for each.
    "clipping that follows the epoch": Row(variant(configure_gradient_clipping=clip_by_epoch), replayed=6),
    "backward twice": Row(variant(backward=scaled_backward)),
    "gradient norms before the step": Row(variant(on_before_optimizer_step=log_gradients)),
    "gradient norms after backward": Row(variant(on_after_backward=log_gradients)),
    "a counter and a tensor after backward": Row(variant(on_after_backward=count_and_append, calls=0)),
    "zero_grad": Row(variant(optimizer_zero_grad=lambda self, epoch, batch_idx, optimizer: optimizer.zero_grad())),
    "skipping the rest of an epoch": Row(variant(on_train_batch_start=skip_rest), replayed=12),
    "noise after the transfer": Row(
        variant(on_after_batch_transfer=lambda self, batch, index: [batch[0] + torch.rand_like(batch[0]), batch[1]])
    ),
}


# Batches.


class Pair(NamedTuple):
    """A batch with names."""

    x: Tensor
    y: Tensor


def stacked(build: Callable[[Tensor, Tensor], Any]) -> Callable[[Any], Any]:
    """A collate function that builds the batch from its two tensors."""
    return lambda items: build(torch.stack([x for x, _ in items]), torch.stack([y for _, y in items]))


def reading(read: Callable[[Any], tuple[Tensor, Tensor]]) -> type[LitDigits]:
    """A module that reads its batches so, in training; validation has plain ones."""

    def step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(read(batch))
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=BATCH)
        return loss

    return with_step(step)


def modified_in_place(self: Any, batch: Any, batch_idx: int) -> Tensor:
    batch[0].mul_(2)
    return self.loss_of(batch)


BATCHES = {
    "named tuple": Row(reading(lambda b: (b.x, b.y)), collate=stacked(Pair)),
    "dict": Row(reading(lambda b: (b["x"], b["y"])), collate=stacked(lambda x, y: {"x": x, "y": y})),
    "nested": Row(reading(lambda b: (b[0]["a"][0], b[1][2])), collate=stacked(lambda x, y: [{"a": [x]}, {2: y}])),
    "strings and None": Row(reading(lambda b: b[:2]), collate=stacked(lambda x, y: (x, y, "train", None))),
    "the same tensor twice": Row(reading(lambda b: (b[0] + b[2], b[1])), collate=stacked(lambda x, y: (x, y, x))),
    "other strides": Row(reading(lambda b: b), collate=stacked(lambda x, y: (x.t().contiguous().t(), y))),
    "an empty tensor": Row(reading(lambda b: b[:2]), collate=stacked(lambda x, y: (x, y, torch.empty(0)))),
    "inputs with gradients": Row(reading(lambda b: b), collate=stacked(lambda x, y: (x.requires_grad_(), y))),
    "modified in place": Row(
        with_step(modified_in_place), callbacks=lambda: [GradientsAndBatches()], seen=kept, trainer={"max_epochs": 2},
        replayed=8,
    ),
}  # fmt: skip


# What a step carries on, logs and returns.


class Metered(LitDigits):
    """A collection of metrics, and one that a hook computes and resets within the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.errors = MetricCollection([MeanSquaredError(), MeanAbsoluteError()], prefix="train_")
        self.mean = MeanMetric(nan_strategy="disable")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.errors(logits.detach().amax(1), y.float())
        self.log_dict(self.errors, on_step=True, on_epoch=True)
        self.mean.update(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 2:
            self.log("mean", self.mean.compute())
            self.mean.reset()


class Recurrent(LitDigits):
    """Hands its hidden state on from batch to batch, and forgets it between epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"lstm": nn.LSTM(8, 16, batch_first=True), "head": nn.Linear(16, 10)})
        self.hidden: Any = None

    def on_train_epoch_start(self) -> None:
        self.hidden = None

    def loss_of(self, batch: Any) -> Tensor:
        x, y = batch
        steps, hidden = self.net["lstm"](x.view(-1, 8, 8), self.hidden)
        self.hidden = tuple(t.detach() for t in hidden)
        return F.cross_entropy(self.net["head"](steps[:, -1]), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", batch[0].mean())


class Grouped(LitDigits):
    """Two groups of parameters, each with its lr and schedule; batch normalisation is not trained."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net[0].parameters(), "lr": 1e-2}, {"params": self.net[4].parameters()}]
        optimizer = FUSED_ADAMW(groups)
        schedules = [lambda step: 0.9**step, lambda step: 0.5 ** (step // 4)]
        return [optimizer], [per_step(LambdaLR(optimizer, schedules)), {"scheduler": ExponentialLR(optimizer, 0.9)}]


class Tied(LitDigits):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 10))
        self.net[2].weight = self.net[0].weight


def weighted(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch) * self.hparams.weight


class Weighted(LitDigits):
    """A loss weight in the hyper-parameters, which a hook raises once."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"weight": 1.0})

    training_step = weighted

    def on_train_epoch_start(self) -> None:
        self.hparams.weight = 1.0 if self.current_epoch < 1 else 2.0


def nested_logs(self: Any, batch: Any, batch_idx: int) -> dict[str, Any]:
    loss = self.loss_of(batch)

    def inner() -> None:
        self.log("inner", loss.detach() * 2, on_step=True, on_epoch=True, reduce_fx="max")

    inner()
    self.log("constant", 1.5, on_step=True, on_epoch=True)
    self.log("weights", self.net[0].weight.norm())
    return {"loss": loss, "weight": self.net[0].weight, "row": loss.detach().expand(3)[1:], "name": "x", "none": None}


def returns_nothing(self: Any, batch: Any, batch_idx: int) -> None:
    self.log("train_loss", self.loss_of(batch).detach())


STEPS = {
    "metrics that hooks reset": Row(Metered),
    # Each epoch starts from no hidden state, and so with a recapture.
    "a hidden state": Row(Recurrent, replayed=6),
    "a loss weight that a hook raises": Row(Weighted, replayed=RECAPTURED),
    "nested logs and odd results": Row(with_step(nested_logs)),
    "no loss at all": Row(with_step(returns_nothing)),
    "another optimizer": Row(partial(LitDigits, partial(SGD, lr=0.1, momentum=0.9, fused=True))),
    "every third batch eagerly": Row(options={"eager_if": 3}, replayed=8),
    "two groups with their own schedules": Row(Grouped, replayed=12),
    "tied weights": Row(Tied),
}
