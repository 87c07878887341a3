"""What a call returns belongs to the caller, also where the step holds it and another call binds a new one there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from graphplan import graph_step


class Net:
    """Learns, and keeps a number on the device that some calls replace, and all return."""

    def __init__(self, returns: Callable[[Any, Tensor], Any]) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = SGD(self.model.parameters(), lr=0.1, fused=True)
        self.alpha = torch.ones(2)
        self.returns = returns

    def step(self, x: Tensor, replaces: bool) -> Any:
        loss = (self.model(x) * self.alpha).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if replaces:
            self.alpha = self.alpha * 0.9 + loss.detach() * 0.1
        return self.returns(self, loss)


@pytest.mark.parametrize(
    "returns",
    [
        lambda net, loss: net.alpha,
        lambda net, loss: (loss, {"alpha": net.alpha}),
        lambda net, loss: [net.alpha[0], net.alpha],
    ],
    ids=["alone", "among others", "with a view"],
)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_results_stay_what_they_were(
    returns: Callable[[Any, Tensor], Any], every: int, device: torch.device, backend: str
) -> None:
    """From eager calls, traces, captures, checks and replays alike."""

    def drive(net: Net, call: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor]]:
        kept: list[Tensor] = []
        then: list[Tensor] = []
        for index in range(40):
            torch.manual_seed(index)
            leaves, _ = torch.utils._pytree.tree_flatten(call(torch.randn(4, 3, device=device), index % every == 0))
            kept += leaves
            then += [leaf.detach().clone() for leaf in leaves]
        return kept, then

    with device:
        eager, graphed = Net(returns), Net(returns)
    step = graph_step(graphed.step, backend=backend)
    expected, _ = drive(eager, eager.step)
    kept, then = drive(graphed, step)
    assert step.stats.replayed >= (20 if every < 3 else 10)
    for number, (one, before, wanted) in enumerate(zip(kept, then, expected, strict=True)):
        assert torch.equal(one, before), f"result {number} has changed after it was returned"
        assert torch.equal(one, wanted)
