"""What a call returns belongs to the caller, also where the step holds it and another call binds a new one there."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._pytree import tree_leaves

from graphplan import graph_step, graphed


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


def _parts(net: nn.Linear, x: Tensor) -> Any:
    """Halves, a column, an expanded row, overlapping windows, one row that is dense, a transposed one."""
    y = net(x)
    return [*y.chunk(2, -1), y[:, :1], y[0].expand(6, -1), y.unfold(1, 4, 2), y[1], y.t(), y[:, None, ::3].conj()]


@pytest.mark.parametrize("returns", [lambda parts: parts, lambda parts: parts[0], lambda parts: {"all": parts}])
def test_results_lie_in_memory_as_the_steps_own(returns: Callable[[Any], Any]) -> None:
    """Kernels add up in an order that they choose by strides: what the caller computes has eager's bits."""
    net, kept, expected = nn.Linear(16, 64), SimpleNamespace(last=None, all=[]), []

    def step(x: Tensor) -> Any:
        parts = _parts(net, x)
        kept.last = parts[0]
        kept.all.append(parts[1])
        return returns(parts)

    call = graph_step(step, owners={"net": net, "kept": kept}, mode="train", verify="off")
    with torch.no_grad():
        for _ in range(12):
            x = torch.randn(64, 16)
            parts = _parts(net, x)
            expected.append(parts[1])
            found, wanted = (tree_leaves([result, kept.last]) for result in (call(x), returns(parts)))
            for one, other in zip(found, [*wanted[:-1], parts[0]], strict=True):
                assert one.stride() == other.stride()
                assert torch.equal(one.mean(), other.mean())
    assert call.stats.replayed == 6
    assert [part.stride() for part in kept.all] == [part.stride() for part in expected]


def test_lent_results_lie_in_memory_as_the_functions_own() -> None:
    """A copy into them would be dense."""
    net = nn.Linear(16, 64)
    call = graphed(lambda x: net(x).chunk(2, -1)[1], outputs="static", verify="off")
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(64, 16)
            result, expected = call(x), net(x).chunk(2, -1)[1]
            assert result.stride() == expected.stride()
            assert float(result.mean()) == float(expected.mean())
    assert call.stats.replayed == 2


def test_a_column_of_much_is_dense() -> None:
    """Its gaps would take a thousand times its memory."""
    call = graphed(lambda x: x.exp()[:, 0], verify="off")
    with torch.no_grad():
        results = [call(torch.zeros(2**13, 2**10)) for _ in range(6)]
    assert call.stats.replayed == 2
    assert [result.stride() for result in results] == [(2**10,)] * 3 + [(1,)] * 3
