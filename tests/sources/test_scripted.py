"""Scripted modules: what they are made of lies in C++, and their code reads it there."""

# Without annotations as strings, which the compiler of scripts cannot read.

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import graph_step

X = torch.arange(8.0).reshape(2, 4) / 8


class Scripted(nn.Module):
    """Is scripted: what it is made of lies in C++."""

    factor: float
    factors: list[float]

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.factors = 2.0, [1.0, 2.0]
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        """Scaled twice."""
        return self.norm(x) * self.factor * self.factors[1]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "factor", 3.0),
        lambda layer: setattr(layer, "factors", [1.0, 3.0]),
        lambda layer: layer.eval(),
    ],
)
@pytest.mark.parametrize("is_owner", [False, True])
def test_values_of_a_scripted_module(change: Callable[[Any], Any], is_owner: bool) -> None:
    def run(*, replays: bool) -> tuple[list[float], Any]:
        layer = torch.jit.script(Scripted())
        owners = {"layer": layer} if is_owner else None
        step = lambda x: layer(x).detach()  # noqa: E731
        call: Any = graph_step(step, owners=owners, backend="tape", warmup_steps=1, verify="off") if replays else step
        results = []
        for number in range(20):
            if number == 10:
                change(layer)
            results.append(call(X * (number + 1)).sum(1).tolist())
        return results, call

    (replayed, call), (eager, _) = run(replays=True), run(replays=False)
    assert replayed == eager
    assert call.stats.captured == 2
    assert call.stats.replayed > 8
