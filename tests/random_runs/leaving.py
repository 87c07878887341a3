"""What a step of a random run may leave set: modes, flags, values in parameter groups, switches of torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

Act = Callable[[Any, Sequence[Optimizer]], object]


def _set(optimizers: Sequence[Optimizer], key: str, value: Any) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group[key] = value


def _use_cudnns_benchmark(model: Any, optimizers: Sequence[Optimizer]) -> None:
    torch.backends.cudnn.benchmark = True


ACTS: dict[str, Act] = {
    "train": lambda model, optimizers: model.train(),
    "eval": lambda model, optimizers: model.eval(),
    "eval body": lambda model, optimizers: model.body.eval(),
    "flip body": lambda model, optimizers: model.body.train(not model.body.training),
    "freeze stem": lambda model, optimizers: model.stem.requires_grad_(False),
    "flip shared": lambda model, optimizers: model.shared.requires_grad_(not model.shared.bias.requires_grad),
    "thaw": lambda model, optimizers: model.requires_grad_(True),
    "weight decay": lambda model, optimizers: _set(optimizers, "weight_decay", 0.04),
    "lr": lambda model, optimizers: _set(optimizers, "lr", 0.01),
    "stage": lambda model, optimizers: _set(optimizers, "stage", "late"),
    "benchmark": _use_cudnns_benchmark,
    "precision": lambda model, optimizers: torch.set_float32_matmul_precision("high"),
}
PLACES = ("start", "middle", "end")
"""Before the forward pass, before the backward pass, and after the optimizer's step."""
