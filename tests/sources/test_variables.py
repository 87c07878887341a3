"""Numbers in variables, dictionaries and classes that a step changes, or the host between steps: they are followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from graphplan import graph_step
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
            error = KeyError(number, {"number": [number]})
            error.number = number  # type: ignore[attr-defined]
            raise error from ValueError(number)
        place.write(number + 1, total + 0.5)
        return x * number

    rig = Rig(step, {}, [(torch.ones(2),)])
    graphed = managed(rig, mode="inference")
    for _ in range(30):
        try:
            graphed(torch.ones(2))
        except KeyError as error:
            found = [error.args[0], error.args[1]["number"][0], error.number, error.__cause__.args[0]]  # type: ignore
            assert list(map(type, found)) == [int] * 4
        assert list(map(type, place.read())) == [int, float]


class Sees(type):
    """A class of classes that hears what is set."""

    heard: list[Any] = []  # noqa: RUF012

    def __setattr__(cls, name: str, value: Any) -> None:
        Sees.heard.append(value)
        super().__setattr__(name, value)


class Heard(metaclass=Sees):
    """Hears of its count."""

    count = 0


@pytest.mark.filterwarnings("ignore:graphplan runs this step eagerly")
def test_a_class_that_hears_what_is_set() -> None:
    """It hears of numbers alone."""
    step = graph_step(lambda x: x * Heard.count, backend="tape", mode="inference", on_failure="eager")
    for index in range(12):
        Heard.count = index
        assert torch.equal(step(torch.ones(2)), torch.full((2,), float(index)))
    assert set(map(type, Sees.heard)) == {int}


class Counted:
    """Counts in its class."""

    n = 0


@pytest.mark.filterwarnings("ignore:graphplan runs this step eagerly")
@pytest.mark.parametrize("verify", ["geometric", "off"])
@pytest.mark.parametrize("where", ["function", "class"])
def test_counts_that_are_undone(where: str, verify: str) -> None:
    """In a function's attribute and in the class of an object: no call counts twice, whatever is undone."""
    held = Counted()
    Counted.n = 0

    def helper() -> float:
        if where == "class":
            type(held).n += 1
            return 1 + held.n / 10
        helper.n += 1  # type: ignore[attr-defined]
        return 1 + helper.n / 10  # type: ignore[attr-defined]

    helper.n = 0  # type: ignore[attr-defined]
    step = graph_step(lambda x: x * helper(), backend="tape", mode="inference", on_failure="eager", verify=verify)
    for index in range(1, 20):
        assert torch.equal(step(torch.ones(2)), torch.ones(2) * (1 + index / 10))
        assert (Counted.n if where == "class" else helper.n) == index  # type: ignore[attr-defined]


def test_an_error_keeps_what_it_holds() -> None:
    """Where no stand-in is in it."""
    held = [1, 2]

    def step(x: Tensor) -> Tensor:
        raise KeyError(held)

    graphed = graph_step(step, backend="tape", mode="inference")
    for _ in range(8):
        with pytest.raises(KeyError, match=r"\[1, 2\]") as caught:
            graphed(torch.ones(2))
        assert caught.value.args[0] is held
