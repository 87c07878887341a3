"""What comes to stand before what a step's code found: attributes of instances, elements of arrays."""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphplan import HostScalarError, graph_step

_NAME = "graphplan_lookups"
X = torch.arange(8.0).reshape(2, 4) / 8


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    made = sys.modules[_NAME] = ModuleType(_NAME)
    exec(
        "def __getattr__(name):\n    if name == 'factor':\n        return 2.0\n    raise AttributeError(name)",
        vars(made),
    )
    yield
    del sys.modules[_NAME]


class Making:
    """Makes what it lacks."""

    def __getattr__(self, name: str) -> float:
        if name == "factor":
            return 2.0
        raise AttributeError(name)


class Layer(nn.Linear):
    """A layer that makes what it lacks."""

    def __getattr__(self, name: str) -> Any:
        return 2.0 if name == "factor" else super().__getattr__(name)


class _Two:
    def __get__(self, instance: object, owner: type | None = None) -> float:
        return 2.0


class Sharing:
    """What instances have in common."""

    table: ClassVar[dict[str, float]] = {"a": 2.0}
    box = SimpleNamespace(value=2.0)
    tensor = torch.tensor(2.0)
    two = _Two()


def _objects(*items: Any) -> Any:
    array = np.empty(len(items), dtype=object)
    array[:] = [None] * len(items)
    for number, item in enumerate(items):
        array[number] = item
    return array


def _read_only() -> Any:
    array = _objects([2.0])
    array.setflags(write=False)
    return array


def _itself() -> Any:
    array = _objects([2.0], None)
    array[1] = array
    return array


def _abstract() -> Any:
    """An abstract class, others that count as subclasses of it, and a class that does not yet."""

    here = {"__module__": __name__}
    base, beside, kind = ABCMeta("Base", (), here), ABCMeta("Beside", (), here), type("Kind", (), {})
    base.register(beside)
    below = ABCMeta("Below", (base,), here)
    return SimpleNamespace(base=base, below=below, beside=beside, kind=kind, item=kind())


Case = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]
CASES: dict[str, Case] = {
    "made by __getattr__": (Making, lambda thing: thing.factor, lambda thing: setattr(thing, "factor", 3.0)),
    "made by a layer": (
        lambda: Layer(4, 4), lambda thing: thing.factor, lambda thing: setattr(thing, "factor", 3.0),
    ),
    "made by a module": (
        lambda: None,
        lambda thing: sys.modules["graphplan_lookups"].factor,
        lambda thing: setattr(sys.modules[_NAME], "factor", 3.0),
    ),
    "a class's dictionary": (
        Sharing, lambda thing: thing.table["a"], lambda thing: setattr(thing, "table", {"a": 3.0}),
    ),
    "a class's object": (
        Sharing, lambda thing: thing.box.value, lambda thing: setattr(thing, "box", SimpleNamespace(value=3.0)),
    ),
    "a class's tensor": (
        Sharing, lambda thing: thing.tensor, lambda thing: setattr(thing, "tensor", torch.tensor(3.0)),
    ),
    "a class's descriptor": (Sharing, lambda thing: thing.two, lambda thing: setattr(thing, "two", 3.0)),
    "a list in an array": (lambda: _objects([2.0], 1), lambda a: a[0][0], lambda a: a[0].__setitem__(0, 3.0)),
    "an object in an array": (
        lambda: _objects(SimpleNamespace(value=2.0)), lambda a: a[0].value, lambda a: setattr(a[0], "value", 3.0),
    ),
    "a read-only array": (_read_only, lambda a: a[0][0], lambda a: a[0].__setitem__(0, 3.0)),
    "a field of an array": (
        lambda: np.array([([2.0], 1)], dtype=[("a", object), ("b", int)]),
        lambda a: a[0]["a"][0],
        lambda a: a[0]["a"].__setitem__(0, 3.0),
    ),
    "an array of no dimension": (
        lambda: np.array({"a": 2.0}, dtype=object), lambda a: a.item()["a"], lambda a: a.item().update(a=3.0),
    ),
    "an array of arrays": (
        lambda: _objects(np.ones(2)), lambda a: float(a[0][0]), lambda a: a[0].__setitem__(0, 3.0),
    ),
    "another __getattr__ of a module": (
        lambda: None,
        lambda thing: sys.modules["graphplan_lookups"].factor,
        lambda thing: setattr(sys.modules[_NAME], "__getattr__", lambda name: 3.0),
    ),
    "another __getattr__ of a class": (
        lambda: type("Other", (Making,), {"__getattr__": lambda self, name: 2.0})(),
        lambda thing: thing.factor,
        lambda thing: setattr(type(thing), "__getattr__", lambda self, name: 3.0),
    ),
    "a registered class": (
        _abstract, lambda a: 3.0 if isinstance(a.item, a.base) else 2.0, lambda a: a.base.register(type(a.item)),
    ),
    "a class that is asked for": (
        _abstract, lambda a: 3.0 if issubclass(a.kind, a.base) else 2.0, lambda a: a.base.register(a.kind),
    ),
    "a class registered with a subclass": (
        _abstract, lambda a: 3.0 if isinstance(a.item, a.base) else 2.0, lambda a: a.below.register(a.kind),
    ),
    "a class registered with a registered one": (
        _abstract, lambda a: 3.0 if isinstance(a.item, a.base) else 2.0, lambda a: a.beside.register(a.kind),
    ),
    "an array in itself": (_itself, lambda a: a[1][0][0], lambda a: a[0].__setitem__(0, 3.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_comes_to_stand_before_it(name: str) -> None:
    make, read, change = CASES[name]
    thing = make()

    def step(x: Tensor) -> Tensor:
        return x * read(thing)

    call = graph_step(step, owners={"box": {"thing": thing}}, backend="tape", warmup_steps=1, verify="off")
    for _ in range(8):
        before = call(X)
        assert torch.equal(before, step(X))
    assert call.stats.replayed > 2
    change(thing)
    for _ in range(8):
        assert torch.equal(call(X), step(X))
    assert not torch.equal(before, step(X))
    assert call.stats.captured == 2


def test_a_class_of_a_variable_is_registered() -> None:
    """As one of an owner's attribute; other abstract classes may get other ones without a capture."""
    kinds = _abstract()
    base, item, other = kinds.base, kinds.item, _abstract()

    def step(x: Tensor) -> Tensor:
        return x * (3.0 if isinstance(item, base) else 2.0)

    call = graph_step(step, backend="tape", warmup_steps=1, verify="off")
    for _ in range(6):
        call(X)
    other.base.register(other.kind)
    assert torch.equal(call(X), X * 2.0)
    assert call.stats.captured == 1
    base.register(kinds.kind)
    for _ in range(6):
        assert torch.equal(call(X), X * 3.0)
    assert call.stats.captured == 2
    assert "base.registry[:] was 1 registered classes and is 2 registered classes" in call.report()


def test_more_objects_in_an_array_than_are_compared() -> None:
    array = _objects(*([1.0] for _ in range(5000)))
    call = graph_step(lambda x: x * array[4500][0], backend="tape", warmup_steps=1, verify="off")
    with pytest.raises(HostScalarError, match=r"array\[:\]\.\.\., of which there are more than 4096; what they hold"):
        for _ in range(8):
            call(X)
