"""Gradients of plain tensors that ask for them: points of a differential equation, weights that are no parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from graphplan import HostEffectError, UnownedTensorError, graph_step


class Points:
    """A network whose derivative by ``x`` is trained, as in a physics-informed network. Each backward pass adds to
    ``x.grad``, which nobody looks at.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = Adam(self.model.parameters(), lr=0.01, fused=True)
        self.x = torch.rand(16, 1).requires_grad_()
        self.leaves = [*self.model.parameters(), self.x]

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        u = self.model(self.x)
        (slope,) = torch.autograd.grad(u, self.x, torch.ones_like(u), create_graph=True)
        loss = (slope - u).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class Weights:
    """A network of plain tensors that its step moves by hand, and whose gradients it sets to zero."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(1, 8).requires_grad_()
        self.leaves = [self.x]

    def step(self) -> Tensor:
        loss = (self.x - 1).tanh().square().mean()
        loss.backward()
        assert self.x.grad is not None
        self.x.data += -0.1 * self.x.grad
        self.x.grad.zero_()
        return loss.detach()


class FreshGradients(Weights):
    """The same with a new gradient in each step, which anybody may look at afterwards."""

    def step(self) -> Tensor:
        self.x.grad = None
        loss = (self.x - 1).tanh().square().mean()
        loss.backward()
        assert self.x.grad is not None
        self.x.data += -0.1 * self.x.grad
        return loss.detach()


def stay(net: Any, index: int) -> None:
    """Nothing happens between calls."""


def drop(net: Any, index: int) -> None:
    """The gradient is dropped now and then."""
    if index % 5 == 4:
        net.x.grad = None


def add(net: Any, index: int) -> None:
    """Or is not zero when the step begins."""
    if index % 5 == 4:
        net.x.grad += 0.5


def move(net: Any, index: int) -> None:
    """Other values in the same tensor."""
    if index % 5 == 4:
        net.x.data.uniform_()


def drive(make: Callable[[], Any], act: Callable[[Any, int], None], wrap: Callable[[Any], Any]) -> list[Any]:
    net = make()
    step, losses = wrap(net), []
    for index in range(30):
        losses.append(step())
        act(net, index)
    return [*losses, *net.leaves, *(leaf.grad for leaf in net.leaves)]


@pytest.mark.parametrize("act", [stay, drop, add, move])
@pytest.mark.parametrize("make", [Points, Weights, FreshGradients])
def test_a_plain_tensor_that_is_named_is_owned_with_its_gradient(
    make: Callable[[], Any], act: Callable[[Any, int], None]
) -> None:
    steps: list[Any] = []

    def wrap(net: Any) -> Any:
        steps.append(graph_step(net.step, owners={"net": net, "x": net.x}, backend="tape"))
        return steps[0]

    expected = drive(make, act, lambda net: net.step)
    got = drive(make, act, wrap)
    assert steps[0].stats.replayed >= 15
    for one, other in zip(got, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("make", [Points, Weights])
def test_one_that_is_not_named_is_refused_with_what_to_do(make: Callable[[], Any]) -> None:
    """To name what holds it would not do: what a step binds to an attribute anew each time is no weight."""
    wrap = lambda net: graph_step(net.step, owners={"net": net}, backend="tape")  # noqa: E731
    text = r"tensor without an owner is changed by .* in owners= \(of a gradient, the tensor that it belongs to\)"
    with pytest.raises(UnownedTensorError, match=text):
        drive(make, stay, wrap)


def test_a_new_gradient_at_a_tensor_that_is_not_named_is_refused() -> None:
    wrap = lambda net: graph_step(net.step, owners={"net": net}, backend="tape")  # noqa: E731
    with pytest.raises(HostEffectError, match=r"leaves a gradient at net\.leaves\[0\].*name the tensor \(owners="):
        drive(FreshGradients, stay, wrap)
