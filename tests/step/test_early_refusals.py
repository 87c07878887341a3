"""At which call a step that cannot be captured is refused: as early as it can be known, with several shapes too."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from graphplan import HostEffectError, RefusalError, graph_step
from tests.twins import by_chance

WARMUP = 3


class Box:
    """What a step reads and changes in Python."""

    def __init__(self) -> None:
        self.number = 0
        self.kept: Any = 1


ACTS: dict[str, Callable[[Box, Tensor], Tensor]] = {
    "a number": lambda box, loss: loss * complex(box.number).real,
    "a branch": lambda box, loss: loss * 2 if box.number % 2 else loss + 1,
}
CALLS: dict[int, int] = {1: 7, 2: 8, 5: 16, 20: 61}
"""By the number of shapes that come in turn: a shape is traced when it comes again, and refused by its second trace."""


def _refused_at(act: Callable[[Box, Tensor], Any], shapes: int, calls: int) -> int:
    net, box = nn.Linear(4, 4), Box()

    def step(x: Tensor) -> Tensor:
        net.zero_grad()
        loss = act(box, net(x).sum())
        loss.backward()
        return loss.detach()

    graphed = graph_step(step, owners={"net": net, "box": box}, backend="tape")
    for call in range(calls):
        try:
            graphed(torch.randn(3 + call % shapes, 4))
        except RefusalError:
            return call + 1
        box.number += 1
    return 0


@pytest.mark.parametrize("shapes", CALLS)
def test_a_number_that_changes_with_each_call(shapes: int) -> None:
    """Traces of different shapes tell of each other's changes."""
    assert 0 < _refused_at(ACTS["a number"], shapes, 80) <= CALLS[shapes]


@pytest.mark.parametrize("shapes", [1, 5])
def test_a_branch_that_changes_with_each_call(shapes: int) -> None:
    """Each side has a program."""
    assert _refused_at(ACTS["a branch"], shapes, 80) == 0


def _draw(box: Box, loss: Tensor) -> Tensor:
    box.kept = random.choice(range(2)) < 2
    return loss


def _double(box: Box, loss: Tensor) -> Tensor:
    box.kept *= 2
    return loss


def _read(box: Box, loss: Tensor) -> Tensor:
    box.kept = complex(by_chance(loss.detach())).real
    return loss


AT_ONCE: dict[str, tuple[Callable[[Box, Tensor], Tensor], int]] = {
    "a read": (_read, 1),
    "random": (_draw, 2),
    "an effect": (_double, 2),
}
"""With the traces that it takes."""


@pytest.mark.parametrize("name", AT_ONCE)
@pytest.mark.twice
def test_what_traces_show_is_refused_by_them(name: str) -> None:
    act, traces = AT_ONCE[name]
    assert _refused_at(act, 1, 20) == WARMUP + traces


@pytest.mark.parametrize("on_failure", ["raise", "eager"])
def test_a_backward_pass_outside_the_step(on_failure: str) -> None:
    """The loss alone is wrapped: found before anything is captured, and a replay returns one without a graph."""

    def train(wrap: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = SGD(model.parameters(), lr=0.1)
        loss_of = wrap(lambda x: {"loss": model(x).square().mean()})
        for _ in range(12):
            loss = loss_of(torch.randn(4, 6))["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [loss.detach(), *model.parameters()]

    text = r"a backward pass outside the step reaches result\['loss'\].* the whole training step"
    steps: list[Any] = []

    def wrap(function: Any) -> Any:
        steps.append(graph_step(function, backend="tape", on_failure=on_failure))
        return steps[0]

    if on_failure == "raise":
        with pytest.raises(HostEffectError, match=text):
            train(wrap)
        return
    expected = train(lambda function: function)
    with pytest.warns(UserWarning, match=text):
        found = train(wrap)
    assert all(map(torch.equal, expected, found))
    assert steps[0].stats.eager == 12


def test_a_look_at_a_gradient_now_and_then() -> None:
    """What is asked of the results of a single call refuses nothing."""
    model = nn.Linear(6, 3)
    step = graph_step(lambda x: model(x).square().mean(), backend="tape", mode="inference", verify="off")
    for index in range(16):
        loss = step(torch.randn(4, 6))
        if index == 0:
            torch.autograd.grad(loss, list(model.parameters()))
    assert step.stats.replayed >= 5
