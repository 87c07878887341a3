"""Gradients of plain tensors that ask for them: points of a differential equation, weights that are no parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from graphplan import HostEffectError, UnownedTensorError, graph_step
from tests.crossing import by_key, pairs


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


class DroppedGradients(Weights):
    """The same without a gradient between steps, unless somebody else sets one, to which the step adds."""

    def step(self) -> Tensor:
        loss = (self.x - 1).tanh().square().mean()
        loss.backward()
        assert self.x.grad is not None
        self.x.data += -0.1 * self.x.grad
        self.x.grad = None
        return loss.detach()


def stay(net: Any, index: int) -> None:
    """Nothing happens between calls."""


def drop(net: Any, index: int) -> None:
    """The gradient is dropped now and then."""
    if index % 5 == 4:
        net.x.grad = None


def add(net: Any, index: int) -> None:
    """Or is not zero when the step begins."""
    if index % 5 == 4 and net.x.grad is None:
        net.x.grad = torch.full_like(net.x, 0.5)
    elif index % 5 == 4:
        net.x.grad += 0.5


def move(net: Any, index: int) -> None:
    """Other values in the same tensor."""
    if index % 5 == 4:
        net.x.data.uniform_()


def drive(
    make: Callable[[], Any],
    act: Callable[[Any, int], None],
    wrap: Callable[[Any], Any],
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> list[Any]:
    with device:
        net = make()
    step, losses = wrap(net), []
    for index in range(30):
        losses.append(step())
        act(net, index)
    return [*losses, *net.leaves, *(leaf.grad for leaf in net.leaves)]


class Items(Weights):
    """The same with the tensor in a container that the step finds it in."""

    def __init__(self, hold: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.held = hold(self.x)

    def step(self) -> Tensor:
        (x,) = self.held.values() if isinstance(self.held, dict) else self.held
        loss = (x - 1).tanh().square().mean()
        loss.backward()
        with torch.no_grad():
            x -= 0.1 * x.grad
        x.grad.zero_()
        return loss.detach()


def by_name(net: Any) -> Any:
    return {"net": net, "x": net.x}


def by_holder(net: Any) -> Any:
    return {"net": net}


def by_nothing(net: Any) -> Any:
    """The step's own code leads to it."""
    return None


MAKES: dict[str, Callable[[], Any]] = {
    "points": Points,
    "weights": Weights,
    "fresh": FreshGradients,
    "dropped": DroppedGradients,
    "list": partial(Items, lambda x: [x]),
    "tuple": partial(Items, lambda x: (x,)),
    "dict": partial(Items, lambda x: {"x": x}),
}


@pairs(owners=[by_name, by_holder, by_nothing], act=[stay, drop, add, move], make=by_key(MAKES))
def test_a_plain_tensor_is_owned_with_its_gradient(
    make: Callable[[], Any],
    act: Callable[[Any, int], None],
    owners: Callable[[Any], Any],
    device: torch.device,
    backend: str,
) -> None:
    steps: list[Any] = []

    def wrap(net: Any) -> Any:
        steps.append(graph_step(net.step, owners=owners(net), backend=backend))
        return steps[0]

    expected = drive(make, act, lambda net: net.step, device)
    got = drive(make, act, wrap, device)
    assert steps[0].stats.replayed >= 15
    for one, other in zip(got, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


class Hidden(Weights):
    """The tensor lies in a tuple within a tuple, which is followed as one value."""

    def __init__(self) -> None:
        super().__init__()
        self.held = ((self.x,),)
        self.leaves = []
        del self.x

    def step(self) -> Tensor:
        ((x,),) = self.held
        loss = (x - 1).tanh().square().mean()
        loss.backward()
        x.data += -0.1 * x.grad
        x.grad.zero_()
        return loss.detach()


class HiddenAndFresh(Hidden):
    """The same with new gradients."""

    def step(self) -> Tensor:
        ((x,),) = self.held
        x.grad = None
        loss = (x - 1).tanh().square().mean()
        loss.backward()
        return loss.detach()


def test_one_that_nothing_leads_to_is_refused_with_what_to_do() -> None:
    wrap = lambda net: graph_step(net.step, owners={"net": net}, backend="tape")  # noqa: E731
    text = r"changes a .* tensor that belongs to no owner; .* in owners= \(for a gradient, its tensor\)"
    with pytest.raises(UnownedTensorError, match=text):
        drive(Hidden, stay, wrap)
    with pytest.raises(HostEffectError, match=r"leaves a gradient at net\.held.*Name the tensor \(owners="):
        drive(HiddenAndFresh, stay, wrap)


class Rebound(Weights):
    """A new tensor in each step is no weight."""

    def step(self) -> Tensor:
        loss = (self.x - 1).tanh().square().mean()
        loss.backward()
        self.x = (self.x - 0.1 * self.x.grad).detach().requires_grad_()
        return loss.detach()


def test_one_that_the_step_binds_anew_is_refused() -> None:
    wrap = lambda net: graph_step(net.step, owners={"net": net}, backend="tape")  # noqa: E731
    with pytest.raises(HostEffectError, match=r"leaves a gradient at "):
        drive(Rebound, stay, wrap)


@pytest.mark.parametrize("where", ["buffer", "list"])
def test_a_tensor_that_asks_for_gradients_within_the_step_alone(where: str) -> None:
    """Its gradient stays: after a check, replays wrote to the one that nobody had any more."""
    inputs = [torch.randn(3, 4) for _ in range(24)]

    def gradients(graphs: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model, shift, items = nn.Linear(4, 2), torch.zeros(4), list[Tensor]()
        if where == "buffer":
            model.register_buffer("shift", shift)
        else:
            items.append(shift)

        def step(x: Tensor) -> Tensor:
            offset = model.shift if where == "buffer" else items[0]
            offset.requires_grad_(True)
            offset.grad = None
            model.zero_grad()
            loss = model(x + offset).square().mean()
            loss.backward()
            offset.requires_grad_(False)
            return loss.detach()

        run: Any = graph_step(step, owners={"model": model, "items": items}, backend="tape") if graphs else step
        found = []
        for x in inputs:
            run(x)
            assert shift.grad is not None
            found.append(shift.grad.clone())
        return found, run

    expected, (found, fast) = gradients(False)[0], gradients(True)
    assert all(map(torch.equal, expected, found))
    assert fast.stats.replayed >= 12 and fast.stats.verified >= 2
