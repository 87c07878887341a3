"""Owners whose own code raises, or does something, when it is asked: read past it, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import graph_step
from graphplan.errors import CaptureError
from tests.facts import assert_same


class Environment:
    """What keeps its parts behind properties, some of which are not there yet."""

    def __init__(self) -> None:
        self.steps = 0

    @property
    def action_space(self) -> int:
        """What the policy is made for."""
        return 3

    @property
    def generator(self) -> Any:
        """There is none before the first reset."""
        raise ValueError("call reset() first")


class Wrapper:
    """A wrapper as environments have: it passes on public names, and raises for others."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"accessing private attribute {name!r} is prohibited")
        return getattr(self.inner, name)

    @property
    def _np_random(self) -> Any:
        raise AttributeError("Can't access `_np_random` of a wrapper")


class Asking:
    """Counts whoever asks for what is not there."""

    asked = 0

    def __getattr__(self, name: str) -> Any:
        type(self).asked += 1
        raise AttributeError(name)


class Unequal:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")


class Unhashable:
    def __hash__(self) -> int:
        raise ValueError("no hash")


class WithoutItems(dict[str, int]):
    def items(self) -> Any:
        raise KeyError("no items")


class Opaque:
    def __getattribute__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


class Cold(type):
    def __getattr__(cls, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class ColdInstance(metaclass=Cold):
    pass


class Endless(list[int]):
    def __iter__(self) -> Any:
        raise ZeroDivisionError("no end")


READABLE: dict[str, Callable[[], Any]] = {
    "an environment": Environment,
    "a wrapper": lambda: Wrapper(Wrapper(Environment())),
    "attributes that count": Asking,
    "no comparison": Unequal,
    "no hash": Unhashable,
    "no items": lambda: WithoutItems(a=1),
    "a class without attributes": ColdInstance,
    "no attributes, in a list": lambda: [Opaque()],
    "no attributes, in a tuple": lambda: (Opaque(), 1),
    "no attributes, in a dictionary": lambda: {"a": Opaque()},
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no items to go through": (
        lambda: Endless([1]),
        r"ZeroDivisionError in graphplan/owners/values\.py at .* in __iter__: no end",
    ),
}


def _run(thing: Any, *, graphed: bool, **options: Any) -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model.thing = thing
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        try:
            scale: Any = model.scale
        except AttributeError:
            scale = 1
        loss = model(x).square().mean() * scale
        loss.backward()
        optimizer.step()
        return loss

    owners = {"model": model, "optimizer": optimizer}
    run: Any = graph_step(step, owners=owners, min_speedup=0, **options) if graphed else step
    for _ in range(12):
        run(torch.randn(2, 4))
    return model.state_dict(), run.stats if graphed else None


@pytest.mark.parametrize("name", READABLE)
def test_what_raises_when_asked_is_not_asked(name: str) -> None:
    Asking.asked = 0
    expected, _ = _run(None, graphed=False)
    found, stats = _run(READABLE[name](), graphed=True)
    assert stats.replayed > 5
    assert_same(found, expected)
    assert Asking.asked == 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message):
        _run(make(), graphed=True)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:graphplan runs this step eagerly")
def test_what_cannot_be_read_leaves_eager_steps(name: str) -> None:
    expected, _ = _run(None, graphed=False)
    found, stats = _run(REFUSED[name][0](), graphed=True, on_failure="eager")
    assert stats.replayed == 0
    assert_same(found, expected)


def test_what_cannot_be_read_leaves_eager_steps_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="graphplan runs this step eagerly: ZeroDivisionError in graphplan/owners/"):
        _run(Endless([1]), graphed=True, on_failure="eager")
