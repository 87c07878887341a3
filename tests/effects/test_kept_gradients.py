"""Gradients of tensors that a step makes and leaves behind: replays leave copies without them, so they are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from graphplan import HostEffectError, SkipReason, graph_step
from tests.models import CLASSES, float_batches
from tests.twins import (
    SECOND_TRACE,
    TRACED,
    Rig,
    assert_equals_eager,
    assert_falls_back,
    assert_refused,
    drive,
    managed,
)


class Net(nn.Module):
    """A model that has room for what a step wants to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, CLASSES)
        self.kept: Any = None
        self.gradient: Any = None
        self.history: list[Any] = []
        self.named: dict[str, Any] = {}


Keep = Callable[[Net, Tensor, Tensor], object]


def kept(net: Net, x: Tensor, features: Tensor) -> None:
    """An attribute."""
    net.kept = features


def in_a_tuple(net: Net, x: Tensor, features: Tensor) -> None:
    """Beside other things."""
    net.kept = (1, features)


def in_a_dictionary(net: Net, x: Tensor, features: Tensor) -> None:
    """By a name."""
    net.named["features"] = features


def appended(net: Net, x: Tensor, features: Tensor) -> None:
    """In a list that grows."""
    net.history.append({"features": features})


def returned(net: Net, x: Tensor, features: Tensor) -> Tensor:
    """For the caller."""
    return features


def the_input(net: Net, x: Tensor, features: Tensor) -> None:
    """A leaf that the step makes."""
    net.kept = x


def nothing(net: Net, x: Tensor, features: Tensor) -> None:
    """The gradient is used within the step."""


def detached(net: Net, x: Tensor, features: Tensor) -> None:
    """What the refusal advises."""
    net.kept, net.gradient = features.detach(), features.grad


def without(net: Net, x: Tensor, features: Tensor) -> None:
    """The gradient is taken off."""
    net.kept, features.grad = features, None


def keeping_rig(keep: Keep) -> Rig:
    """A training step that wants the gradient of its features, and of its input."""
    net = Net()
    optimizer = AdamW(net.parameters(), lr=1e-2, fused=True)

    def step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        features = net.first(x).relu()
        features.retain_grad()
        loss = F.cross_entropy(net.last(features), y)
        loss.backward()
        assert features.grad is not None
        norm = features.grad.norm()
        result = keep(net, x, features)
        optimizer.step()
        return (loss, norm) if result is None else (loss, norm, result)

    return Rig(step, {"net": net, "optimizer": optimizer}, list(float_batches(14)))


@pytest.mark.parametrize(
    ("keep", "path"),
    [
        (kept, r"net\.kept"),
        (in_a_tuple, r"net\.kept"),
        (in_a_dictionary, r"net\.named\.features"),
        (appended, r"net\.history\[-1\]"),
        (returned, r"result\[2\]"),
        (the_input, r"net\.kept"),
    ],
)
def test_a_gradient_that_is_left_at_what_the_step_made_is_refused(keep: Keep, path: str) -> None:
    make = partial(keeping_rig, keep)
    left = rf"the step leaves a gradient at {path}\.grad, of a tensor that the step creates in each call"
    advice = r"keep or return the gradient itself \(from torch\.autograd\.grad"
    # What one trace appends, the next one finds: that alone is reason enough for two more.
    done = SECOND_TRACE + (TRACED if keep is appended else 0)
    assert_refused(make, HostEffectError, left, advice, done=done)
    assert_falls_back(make, SkipReason.HOST_EFFECT, left)


@pytest.mark.parametrize("keep", [nothing, detached, without])
def test_a_gradient_that_is_not_left_is_nobody_elses(keep: Keep) -> None:
    assert_equals_eager(partial(keeping_rig, keep))


def test_a_tensor_that_replays_may_leave_alone() -> None:
    rig = keeping_rig(kept)
    step = managed(rig, allow=("net.kept",))
    drive(rig, step)
    assert step.stats.replayed > 0


def test_the_gradient_of_what_is_fed_is_no_gradient_of_the_steps() -> None:
    """Replays give it to the caller's tensor, also where the step returns that."""

    def make() -> Rig:
        net = Net()
        calls = [(torch.randn(4, 8, requires_grad=True),) for _ in range(14)]

        def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            net.zero_grad()
            loss = net.last(net.first(x).relu()).square().mean()
            loss.backward()
            return loss, x, net.first.weight

        return Rig(step, {"net": net}, list(calls))

    assert_equals_eager(make)


def test_a_fed_tensor_that_is_kept_is_no_tensor_of_the_steps() -> None:
    """It has its gradient where the caller has it."""

    def run(*, replays: bool) -> list[float]:
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        optimizer = AdamW(net.parameters(), fused=True)
        box: dict[str, Any] = {}

        def step(x: Tensor) -> Tensor:
            box["x"] = x.requires_grad_()
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        owners = {"net": net, "optimizer": optimizer, "box": box}
        call: Any = graph_step(step, owners=owners, backend="tape") if replays else step
        found = []
        for _ in range(20):
            x = torch.randn(3, 4)
            found += [float(call(x)), float(x.grad.sum())]  # type: ignore[union-attr]
        return found

    assert run(replays=True) == run(replays=False)
