"""cuDNN's dropout between the layers of an RNN: refused by name, and each way out is replayed like eager steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import graph_step
from graphplan.errors import GeneratorSeekError
from tests.devices import BACKEND, DEVICE, needs_cuda


class Apart(nn.Module):
    """Two layers with a dropout of torch's own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(8, 8), nn.LSTM(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """The second layer's outputs."""
        return self.second(self.dropout(self.first(x)[0]))[0], None


def _stacked() -> nn.Module:
    return nn.LSTM(8, 8, num_layers=2, dropout=0.5)


def _run(make: Callable[[], nn.Module], *, graphed: bool) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    model = make().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=DEVICE.type == "cuda", fused=DEVICE.type == "cpu")

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x)[0].square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach().clone()

    owners = {"model": model, "optimizer": optimizer}
    run: Any = graph_step(step, owners=owners, backend=BACKEND, min_speedup=0) if graphed else step
    generator = torch.Generator().manual_seed(1)
    losses = [run(torch.randn(4, 2, 8, generator=generator).to(DEVICE)) for _ in range(16)]
    return [loss.cpu() for loss in losses], run.stats.replayed if graphed else 0


@needs_cuda
def test_dropout_from_a_state_of_cudnns_own_is_refused() -> None:
    with pytest.raises(GeneratorSeekError, match=r"_cudnn_rnn.* nn\.Dropout between layers"):
        _run(_stacked, graphed=True)


@pytest.mark.parametrize("way", ["apart", "without cuDNN"])
def test_both_ways_out_are_replayed_like_eager_steps(way: str) -> None:
    make: Callable[[], nn.Module] = Apart if way == "apart" else _stacked
    with torch.backends.cudnn.flags(enabled=way == "apart"):
        expected, _ = _run(make, graphed=False)
        losses, replayed = _run(make, graphed=True)
    assert replayed > 5
    assert all(map(torch.equal, losses, expected))
