"""Numbers in variables, dictionaries and classes that a step changes, or the host between steps: they are followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from tests.twins import Rig, managed, same_as_eager

CALLS = 48
count, total = 0, 0.0
settings: dict[str, Any] = {"count": 0, "total": 0.0}
numbers: list[Any] = [0, 0.0]


class Counts:
    """Numbers that a class holds."""

    count = 0
    total = 0.0


class Place:
    """How a step's code reads the two numbers, and sets them."""

    def __init__(self, read: Callable[[], tuple[Any, Any]], write: Callable[[Any, Any], None]) -> None:
        self.read, self.write = read, write


def global_place() -> Place:
    def write(first: Any, second: Any) -> None:
        global count, total
        count, total = first, second

    return Place(lambda: (count, total), write)


def closure_place() -> Place:
    first, second = 0, 0.0

    def write(one: Any, other: Any) -> None:
        nonlocal first, second
        first, second = one, other

    return Place(lambda: (first, second), write)


def dictionary_place() -> Place:
    return Place(
        lambda: (settings["count"], settings["total"]), lambda one, other: settings.update(count=one, total=other)
    )


def item_place() -> Place:
    def write(first: Any, second: Any) -> None:
        settings["count"], settings["total"] = first, second

    return Place(lambda: (settings["count"], settings["total"]), write)


def list_place() -> Place:
    def write(first: Any, second: Any) -> None:
        numbers[0], numbers[1] = first, second

    return Place(lambda: (numbers[0], numbers[1]), write)


def class_place() -> Place:
    def write(first: Any, second: Any) -> None:
        Counts.count, Counts.total = first, second

    return Place(lambda: (Counts.count, Counts.total), write)


PLACES = [global_place, closure_place, dictionary_place, item_place, list_place, class_place]


def annealed(loss: Tensor, count: Any, total: Any) -> Tensor:
    return loss * min(1.0, (count + 1) / 20) + 0.01 * total


def branching(loss: Tensor, count: Any, total: Any) -> Tensor:
    return loss * 2 if count >= 10 else loss


def rig_of(make: Callable[[], Place], use: Callable[[Tensor, Any, Any], Tensor], *, inside: bool) -> Rig:
    """A step that uses two numbers; itself, or the host after it, raises one and adds the loss to the other."""
    place = make()
    place.write(0, 0.0)
    model = nn.Linear(6, 4)
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        number, sum_so_far = place.read()
        result = use(loss, number, sum_so_far)
        optimizer.zero_grad()
        result.backward()
        optimizer.step()
        if inside:
            place.write(number + 1, sum_so_far + loss.item())
        return result

    seen: list[Any] = []

    def after(index: int) -> None:
        if not inside:
            place.write(index + 1, (index + 1) / 7)
        seen.append(place.read())

    calls = [(torch.randn(5, 6), torch.randint(4, (5,))) for _ in range(CALLS)]
    return Rig(train_step, {"model": model, "optimizer": optimizer}, calls, after, extra={"seen": seen})


@pytest.mark.parametrize("inside", [True, False], ids=["step", "host"])
@pytest.mark.parametrize("use", [annealed, branching])
@pytest.mark.parametrize("make", PLACES)
def test_numbers_that_change(
    make: Callable[[], Place], use: Callable[..., Tensor], inside: bool, device: torch.device, backend: str
) -> None:
    rigs: list[Rig] = []

    def make_rig() -> Rig:
        rigs.append(rig_of(make, use, inside=inside))
        return rigs[-1]

    step = same_as_eager(make_rig, device, backend)
    assert all(type(value) in (int, float) for pair in rigs[-1].extra["seen"] for value in pair)
    assert step.stats.replayed >= 25


@pytest.mark.parametrize("make", PLACES)
def test_an_error_leaves_numbers_in_their_places(make: Callable[[], Place]) -> None:
    """Whatever happens in a traced step."""
    place = make()
    place.write(0, 0.0)
    calls = [0]

    def step(x: Tensor) -> Tensor:
        calls[0] += 1
        number, total = place.read()
        if calls[0] % 3 == 0:
            raise KeyError(number)
        place.write(number + 1, total + 0.5)
        return x * number

    rig = Rig(step, {}, [(torch.ones(2),)])
    graphed = managed(rig, mode="inference")
    for _ in range(30):
        try:
            graphed(torch.ones(2))
        except KeyError as error:
            assert list(map(type, error.args)) == [int]  # noqa: PT017
        assert list(map(type, place.read())) == [int, float]
