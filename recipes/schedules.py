"""How the recipes build an optimizer and move its learning rate; the defaults of ``conf/optimizer`` as functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

Update = Callable[[Iterable[nn.Parameter]], Optimizer]
Schedule = Callable[[Optimizer, int], LRScheduler]


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Fused AdamW with PyTorch's defaults: the kernel that can be captured, so nothing has to be prepared."""
    return AdamW(parameters, lr=1e-3, fused=True)


def cosine_schedule(
    optimizer: Optimizer, total_steps: int, *, warmup_steps: int = 0, final_fraction: float = 0.0
) -> LRScheduler:
    """A linear rise over ``warmup_steps`` steps, then half a cosine down to ``final_fraction`` of the learning rate.

    Call ``step()`` on it after each optimizer step.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return final_fraction + (1.0 - final_fraction) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)
