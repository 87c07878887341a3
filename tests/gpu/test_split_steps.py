"""One side of a step captured on the device: the optimizer after an eager backward, or forward and backward alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import graph_step
from tests.gpu.helpers import BACKEND, DEVICE


class _Run:
    def __init__(self, sets_to_none: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).to(DEVICE)
        capturable = {"capturable": True} if DEVICE.type == "cuda" else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True, **capturable)
        self.sets_to_none = sets_to_none

    def forward_backward(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss.detach()

    def branching(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss = loss * 2 if loss.item() > 0.05 else loss.sqrt()
        loss.backward()
        return loss.detach()

    def update(self) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.sets_to_none)
        return norm.detach()


@pytest.mark.parametrize("sets_to_none", [True, False])
@pytest.mark.parametrize("side", ["optimizer", "forward_backward", "both"])
def test_one_side_alone(side: str, sets_to_none: bool) -> None:
    own, eager = _Run(sets_to_none), _Run(sets_to_none)
    options: dict[str, Any] = {"backend": BACKEND, "min_speedup": 0.0}
    owners = {"model": own.model, "optimizer": own.optimizer}
    first = own.branching if side == "optimizer" else graph_step(own.forward_backward, owners=[own.model], **options)
    second = own.update if side == "forward_backward" else graph_step(own.update, owners=owners, **options)
    plain = eager.branching if side == "optimizer" else eager.forward_backward
    for _ in range(24):
        x = torch.randn(32, 64).to(DEVICE)
        torch.testing.assert_close(first(x), plain(x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(second(), eager.update(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close([*own.model.parameters()], [*eager.model.parameters()], rtol=1e-5, atol=1e-6)
    for step in (first, second):
        assert not hasattr(step, "stats") or step.stats.replayed >= 8, step.report()
