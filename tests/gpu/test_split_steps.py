"""One side of a step captured on the device: the optimizer after an eager backward, or forward and backward alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphplan import graph_step
from tests.devices import BACKEND, DEVICE
from tests.split import Parts


class _Run(Parts):
    threshold = 0.05

    def __init__(self, sets_to_none: bool) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).to(DEVICE)
        capturable = {"capturable": True} if DEVICE.type == "cuda" else {}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, **capturable)
        super().__init__(model, optimizer, sets_to_none=sets_to_none)


@pytest.mark.parametrize("sets_to_none", [True, False])
@pytest.mark.parametrize("side", ["optimizer", "forward_backward", "both"])
def test_one_side_alone(side: str, sets_to_none: bool) -> None:
    own, eager = _Run(sets_to_none), _Run(sets_to_none)
    options: dict[str, Any] = {"backend": BACKEND, "min_speedup": 0.0}
    first = own.branching if side == "optimizer" else graph_step(own.forward_backward, owners=[own.model], **options)
    second = own.update if side == "forward_backward" else graph_step(own.update, owners=own.owners, **options)
    plain = eager.branching if side == "optimizer" else eager.forward_backward
    for _ in range(24):
        x = torch.randn(32, 64).to(DEVICE)
        torch.testing.assert_close(first(x), plain(x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(second(), eager.update(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close([*own.model.parameters()], [*eager.model.parameters()], rtol=1e-5, atol=1e-6)
    for step in (first, second):
        assert not hasattr(step, "stats") or step.stats.replayed >= 8, step.report()
