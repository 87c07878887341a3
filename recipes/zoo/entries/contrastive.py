"""Self-supervised image models with a momentum encoder: a queue of keys, and schedules in arrays."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.zoo.batches import images, many
from recipes.zoo.registry import Case, Scale, entry


def _encoder(scale: Scale, out: int) -> nn.Sequential:
    width = scale.pick(8, 64)
    layers: list[nn.Module] = []
    for index in range(4):
        inner = 3 if index == 0 else width
        layers += [nn.Conv2d(inner, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, width), nn.ReLU(),
                         nn.Linear(width, out))  # fmt: skip


class _Pair(pl.LightningModule):
    """A student and the average of its weights."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, copy.deepcopy(student).requires_grad_(False)

    @torch.no_grad()
    def average(self, momentum: float) -> None:
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.mul_(momentum).add_(other, alpha=1 - momentum)


class _MoCo(_Pair):
    queue: Tensor
    pointer: Tensor

    def __init__(self, scale: Scale) -> None:
        super().__init__(_encoder(scale, 32))
        self.size = 64 * scale.pick(4, 32)
        self.register_buffer("queue", F.normalize(torch.randn(32, self.size), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (left, _), (right, _) = batch
        queries = F.normalize(self.student(left), dim=1)
        with torch.no_grad():
            self.average(0.999)
            keys = F.normalize(self.teacher(right), dim=1)
        alike = torch.einsum("nc,nc->n", queries, keys).unsqueeze(-1)
        unlike = torch.einsum("nc,ck->nk", queries, self.queue.clone().detach())
        logits = torch.cat([alike, unlike], 1) / 0.07
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))
        self.enqueue(keys)
        self.log("loss", loss)
        return loss

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        place = int(self.pointer)
        assert self.size % len(keys) == 0
        self.queue[:, place : place + len(keys)] = keys.T
        place = (place + len(keys)) % self.size
        self.pointer[0] = place

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)


@entry("vision/moco")
def moco(scale: Scale) -> Case:
    """Momentum contrast: each step writes its keys behind those of the step before, in a queue that goes round."""
    return Case(_MoCo(scale), many(lambda: (images(scale), images(scale)), 4))


class _DINO(_Pair):
    center: Tensor

    def __init__(self, scale: Scale, steps: int = 4000) -> None:
        super().__init__(_encoder(scale, 64))
        self.register_buffer("center", torch.zeros(1, 64))
        self.momenta = 1 - 0.002 * (1 + np.cos(np.pi * np.arange(steps) / steps))
        self.rates = np.concatenate([np.linspace(0, 5e-4, 20), 5e-4 * (1 - np.arange(steps) / steps)])
        self.temperatures = np.concatenate([np.linspace(0.04, 0.07, 3), np.full(steps, 0.07)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        step = self.trainer.global_step
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = self.rates[step]
        views = [view for view, _ in batch]
        with torch.no_grad():
            self.average(self.momenta[step])
            aims = self.teacher(torch.cat(views))
            temperature = self.temperatures[self.current_epoch]
            targets = F.softmax((aims - self.center) / temperature, -1).chunk(2)
            self.center.mul_(0.9).add_(aims.mean(0, keepdim=True), alpha=0.1)
        said = F.log_softmax(self.student(torch.cat(views)) / 0.1, -1).chunk(2)
        loss = -0.5 * sum((target * out).sum(-1).mean() for target, out in zip(targets, said[::-1], strict=True))
        assert isinstance(loss, Tensor)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.student.parameters(), lr=5e-4)


@entry("vision/dino")
def dino(scale: Scale) -> Case:
    """Self-distillation without labels: rates, momenta and temperatures from arrays, by the step and the epoch."""
    return Case(_DINO(scale), many(lambda: (images(scale), images(scale)), 4))
