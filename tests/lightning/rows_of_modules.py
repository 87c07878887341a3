"""Rows about the module: its hooks, its batches, what its step carries on, logs and returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.lightning.parts import (
    LitDigits,
    with_step,
)
from tests.lightning.rows import BATCH, FULL, PER_EPOCH, GradientsAndBatches, Row, kept, variant

# Hooks that Lightning lets a module override.


def halve_gradients(self: Any) -> None:
    for parameter in self.parameters():
        parameter.grad.mul_(0.5)


def count_and_append(self: Any) -> None:
    self.calls += 1
    self.latest = self.net[0].weight.grad.abs().mean().detach()


def skip_rest(self: Any, batch: Any, batch_idx: int) -> int | None:
    return -1 if (self.current_epoch, batch_idx) == (1, 4) else None


HOOKS = {
    "gradients halved after backward": Row(variant(on_after_backward=halve_gradients)),
    "a counter and a tensor after backward": Row(variant(on_after_backward=count_and_append, calls=0)),
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


def odd_results(self: Any, batch: Any, batch_idx: int) -> dict[str, Any]:
    loss = self.loss_of(batch)

    return {"loss": loss, "weight": self.net[0].weight, "row": loss.detach().expand(3)[1:], "name": "x", "none": None}


def returns_nothing(self: Any, batch: Any, batch_idx: int) -> None:
    self.log("train_loss", self.loss_of(batch).detach())


def only_batch(self: Any, batch: Any) -> Tensor:
    return self.loss_of(batch)


def with_loader_index(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
    return self.loss_of(batch)


def with_varargs(self: Any, *args: Any) -> Tensor:
    return self.loss_of(args[0])


def with_other_name(self: Any, data: Any, batch_idx: int) -> Tensor:
    return self.loss_of(data)


def returns_dict(self: Any, batch: Any, batch_idx: int) -> dict[str, Any]:
    x, y = batch
    logits = self(x)
    return {"loss": F.cross_entropy(logits, y), "logits": logits.detach(), "nested": [y, {"scale": 2.0}]}


STEPS = {
    "takes the batch alone": Row(with_step(only_batch)),
    "takes the loader's index": Row(with_step(with_loader_index)),
    "takes anything": Row(with_step(with_varargs)),
    "takes a batch by another name": Row(with_step(with_other_name)),
    "returns a dict": Row(with_step(returns_dict)),
    "eval=True": Row(trainer={"max_epochs": 4}, options={"eval": True}, replayed=FULL + PER_EPOCH, evaluated=4),
    # Each epoch starts from no hidden state, and so with a recapture.
    "a hidden state": Row(Recurrent, replayed=6),
    "a loss weight that a hook raises": Row(Weighted, replayed=FULL - 4),
    "odd results": Row(with_step(odd_results)),
    "no loss at all": Row(with_step(returns_nothing)),
    "every third batch eagerly": Row(options={"eager_if": 3}, replayed=8),
}
