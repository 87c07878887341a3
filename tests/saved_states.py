"""Steps that save the states of torch's generators and put them back, on any device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from tests.twins import Rig

WIDTH, CALLS = 8, 24


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.2))


def checkpointed(model: Any, x: Tensor, *, reentrant: bool, nested: bool = False) -> Tensor:
    """Each block is computed a second time in the backward pass, with the same numbers dropped."""
    h = F.dropout(x, 0.1)
    if reentrant:
        h = h.requires_grad_()
    for block in model:
        inner = partial(checkpoint, block, use_reentrant=False) if nested else block
        h = checkpoint(inner, h, use_reentrant=reentrant)
    return F.dropout(h, 0.1)


def forked(model: Any, x: Tensor) -> Tensor:
    """What is drawn within the fork is drawn again after it."""
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        noise = torch.rand_like(x)
    return model(x + noise) * torch.rand_like(x)


def repeated(model: Any, x: Tensor) -> Tensor:
    """The same numbers three times, then others."""
    module: Any = torch.cuda if x.device.type == "cuda" else torch
    state = module.get_rng_state()
    total = torch.zeros_like(x)
    for _ in range(3):
        module.set_rng_state(state)
        total = total + torch.rand_like(x)
    return model(F.dropout(total, 0.5))


def rewound(model: Any, x: Tensor) -> Tensor:
    """The step leaves the generator where it found it."""
    module: Any = torch.cuda if x.device.type == "cuda" else torch
    state = module.get_rng_state()
    y: Tensor = model(F.dropout(x, 0.5))
    module.set_rng_state(state)
    return y


STEPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "checkpoint": partial(checkpointed, reentrant=False),
    "reentrant checkpoint": partial(checkpointed, reentrant=True),
    "nested checkpoints": partial(checkpointed, reentrant=False, nested=True),
    "fork": forked,
    "the same numbers three times": repeated,
    "rewound": rewound,
}


def rig_of(forward: Callable[[Any, Tensor], Tensor], after: Callable[[int], object] = lambda index: None) -> Rig:
    """A training step around ``forward``, which other draws of the host's come between."""
    model = nn.Sequential(*(_block() for _ in range(2)))
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9, fused=True)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = forward(model, x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    calls = [(torch.randn(4, WIDTH),) for _ in range(CALLS)]
    return Rig(train_step, {"model": model, "optimizer": optimizer}, calls, after)
