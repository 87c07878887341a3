"""A training step under FSDP2, on as many ranks as there are in the process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from tests.twins import Rig

CALLS = 20


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def sharded_net() -> nn.Sequential:
    """Layers whose rows do not spread evenly over two ranks, one of which has a single row."""
    net = nn.Sequential(nn.Linear(20, 33), nn.BatchNorm1d(33), nn.GELU(), nn.Linear(33, 1), nn.Linear(1, 5))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(net)


def rest(net: nn.Module) -> None:
    """Give back what an evaluation has gathered."""
    for part in net.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def batches(count: int = CALLS) -> list[tuple[Tensor, Tensor]]:
    """Batches of this rank's own."""
    torch.manual_seed(distributed.get_rank())
    return [(torch.randn(8, 20), torch.randint(0, 5, (8,))) for _ in range(count)]


def sharded_rig(between: Callable[[int, Any, Any], object] = lambda index, net, optimizer: None) -> Rig:
    """Forward, backward, clipping and optimizer. ``between(index, net, optimizer)`` runs after each call."""
    calls: list[tuple[Any, ...]] = list(batches())
    torch.manual_seed(7)
    net = sharded_net()
    optimizer = AdamW(net.parameters(), lr=1e-2, fused=True)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        norm = clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        return loss, norm

    return Rig(step, {"net": net, "optimizer": optimizer}, calls, after=lambda index: between(index, net, optimizer))


def evaluate(index: int, net: Any, optimizer: Any) -> None:
    """An evaluation after every fifth call, which leaves the root's parameters gathered."""
    if index % 5 == 4:
        net.eval()
        with torch.no_grad():
            net(torch.ones(2, 20))
        net.train()
        if index == CALLS - 1:
            rest(net)
