"""Calls that are like earlier ones: replayed without flattening and keys, and equal to eager like all others."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import graphplan.step.reasons as graphed
from graphplan import GraphedStep, Program, graph_step
from graphplan.feed import signature
from tests.facts import assert_same, flatten
from tests.twins import CAPTURED, FURTHER, TRACED, WARMUP

X, Y, Z = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 3)


class Named(NamedTuple):
    """A pair of tensors."""

    x: Tensor
    y: Tensor


@dataclass
class Pair:
    """A pair of tensors."""

    x: Tensor
    y: Tensor


class OtherPair(Pair):
    """The same attributes."""


class Encoding(UserDict[str, Tensor]):
    """What tokenizers return."""


class Graph:
    """Holds its tensors in a part that knows it, as batches of graphs do."""

    def __init__(self, x: Tensor, **others: Any) -> None:
        self.kind = Graph
        self.store = Store(self, x, others)


class Store:
    """Tensors, and whose they are."""

    def __init__(self, parent: Any, x: Tensor, others: dict[str, Any]) -> None:
        self.mapping = {"x": x, **others}
        self.parent = weakref.ref(parent)


def loop(x: Tensor, *, is_closed: bool) -> Graph:
    """An object with a second reference to itself, or with another object in that place."""
    graph = Graph(x)
    graph.store.mapping["other"] = graph if is_closed else Graph(x)
    return graph


def tensors_of(value: Any) -> Iterator[Any]:
    """Tensors and literals in ``value``, in their order, but not those of an object that holds it."""
    if isinstance(value, (Tensor, int, float)):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, Graph):
        mapping = value.store.mapping
        yield from tensors_of([2.0 if item is value else item for item in mapping.values()])
    elif value is not None:
        yield from tensors_of(vars(value))


CALLS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "tensors": ((X, Y), (Y, X)),
    "a list": (([X, Y],), ([Y, X],)),
    "a dictionary": (({"x": X, "y": Y},), ({"x": Y, "y": X},)),
    "a literal": ((X, 0.5), (Y, 0.5)),
    "nothing": ((), ()),
    "a named tuple": ((Named(X, Y),), (Named(Y, X),)),
    "an ordered dictionary": ((OrderedDict(x=X, y=Y),), (OrderedDict(x=Y, y=X),)),
    "a dataclass": ((Pair(X, Y),), (Pair(Y, X),)),
    "an encoding": ((Encoding(x=X, y=Y),), (Encoding(x=Y, y=X),)),
    "an object whose part knows it": ((Graph(X, y=Y, n=2),), (Graph(Y, y=X, n=2),)),
    "an object that holds itself": ((loop(X, is_closed=True),), (loop(Y, is_closed=True),)),
    "objects in a list": (([Pair(X, Y), Graph(Z)],), ([Pair(Y, Z), Graph(X)],)),
}
"""Two calls of one kind each."""
OTHERS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "another length": (([X, Y], [X]), ([X], [Y, X])),
    "another order of keys": (({"x": X, "y": Y},), ({"y": X, "x": Y},)),
    "another container": (([X],), ((X,),)),
    "another literal": ((X, 0.0), (X, -0.0)),
    "another type of literal": ((X, 1), (X, True)),
    "another shape": ((X,), (X[:2],)),
    "other strides": ((X[:3],), (X[:3].t(),)),
    "another dtype": ((X,), (X.double(),)),
    "another alignment": ((X,), (torch.randn(13)[1:].view(4, 3),)),
    "one more": ((X,), (X, Y)),
    "nested deeper": (([[X]],), ([X],)),
    "another class": ((Pair(X, Y),), (OtherPair(X, Y),)),
    "a named tuple and a tuple": ((Named(X, Y),), ((X, Y),)),
    "another order of attributes": ((Encoding(x=X, y=Y),), (Encoding(y=X, x=Y),)),
    "another attribute": ((Graph(X),), (Graph(X, y=Y),)),
    "another literal in an object": ((Graph(X, n=1),), (Graph(X, n=2),)),
    "another shape in an object": ((Graph(X),), (Graph(X[:2]),)),
    "another object in the place of itself": ((loop(X, is_closed=True),), (loop(X, is_closed=False),)),
}
"""Two calls of different kinds each."""


def make(seed: int = 0) -> tuple[nn.Linear, Callable[..., Tensor]]:
    """A model and a step that takes whatever there is, in any containers."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

    def step(*args: Any) -> Tensor:
        optimizer.zero_grad()
        loss = model.weight.square().sum()
        for number, leaf in enumerate(tensors_of(args)):
            if isinstance(leaf, Tensor):
                width = leaf.shape[-1]
                loss = loss + (number + 1) * (model.weight.double()[:width, :width] * leaf.double().sum()).sum()
            else:
                loss = loss + torch.tensor(leaf) * (2 if type(leaf) is bool else 1)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def graphed_twin() -> tuple[nn.Linear, GraphedStep]:
    """The same model, graphed."""
    model, step = make()
    return model, graph_step(step, owners={"model": model}, backend="tape", verify="off")


def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Notes every call that is flattened from now on."""
    seen: list[Any] = []
    original = graphed.flatten

    def noting(args: Any, *others: Any) -> Any:
        seen.append(args)
        return original(args, *others)

    monkeypatch.setattr(graphed, "flatten", noting)
    return seen


@pytest.mark.parametrize("name", CALLS)
def test_only_the_first_replay_goes_the_long_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second replay on, and with the caller's newest tensors."""
    (model, step), (own, graph) = make(), graphed_twin()
    calls = [CALLS[name][number % 2] for number in range(12)]
    expected = [step(*call) for call in calls]
    found = [graph(*call) for call in calls[:7]]
    long = long_ways(monkeypatch)
    found += [graph(*call) for call in calls[7:]]
    assert not long
    assert graph.stats.replayed == 6
    assert_same(flatten(losses=expected, model=model), flatten(losses=found, model=own))


GEOMETRIES = {"another shape", "other strides", "another alignment", "another shape in an object"}


@pytest.mark.parametrize("name", OTHERS)
def test_calls_of_another_kind(name: str) -> None:
    """In turns, they get programs of their own, and each its own. Those of other geometry alone warm up together."""
    (model, step), (own, graph) = make(), graphed_twin()
    calls = [OTHERS[name][number // 2 % 2] for number in range(32)]
    expected, found = [step(*call) for call in calls], [graph(*call) for call in calls]
    assert graph.stats.captured == 2
    warm_up = WARMUP if name in GEOMETRIES else 2 * WARMUP
    assert graph.stats.replayed == 32 - warm_up - 2 * (TRACED + CAPTURED)
    assert_same(flatten(losses=expected, model=model), flatten(losses=found, model=own))


def test_attributes_that_containers_have_suddenly() -> None:
    """They are seen, and the call is eager."""
    _, graph = graphed_twin()
    for _ in range(10):
        graph(OrderedDict(x=X))
    marked: Any = OrderedDict(x=X)
    marked.note = 1
    with pytest.warns(UserWarning, match=r"additional attributes \(note\)"):
        graph(marked)
    assert graph.stats.replayed == 4


def test_many_kinds_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one shape, eight of them are known at a time: tensors at other addresses, say."""
    monkeypatch.setattr(signature, "_are_alike", lambda: False)
    _, graph = graphed_twin()
    kinds = [torch.randn(18 + first)[first:].view(6, 3) for first in range(9)]
    for x in kinds * 8:
        graph(x)
    long = long_ways(monkeypatch)
    for x in kinds[:8] * 3:
        graph(x)
    assert len(long) == 8, "the ninth kind took the place of the one that came next, and so on"
    assert graph.stats.replayed == 72 - 9 * FURTHER + 24


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"x": x}, lambda x: [Encoding(x=x)], Graph])
def test_many_shapes_in_turns(wrap: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them take the short way, in whatever they are fed: a server has a shape for each capture size, and padded
    batches have one for each length.
    """
    _, graph = graphed_twin()
    kinds = [wrap(torch.randn(rows, 3)) for rows in (6, 5, 4, 3, 2)]
    for x in kinds * 8:
        graph(x)
    long = long_ways(monkeypatch)
    for x in kinds * 3:
        graph(x)
    assert not long
    assert graph.stats.replayed == 40 - 5 * FURTHER + 15


def test_calls_in_more_layouts_than_are_known() -> None:
    """Each finds its own program, on the short way or not."""
    (model, step), (own, graph) = make(), graphed_twin()
    layouts = [(X,), ([X],), ([[X]],), ({"x": X},), ({"y": X},), (Encoding(x=X),)]
    expected = [step(*call) for call in layouts * 9]
    found = [graph(*call) for call in layouts * 9]
    assert graph.stats.captured == len(layouts)
    assert graph.stats.replayed == len(layouts) * (9 - 6)
    assert_same(flatten(losses=expected, model=model), flatten(losses=found, model=own))


def test_values_that_only_the_long_way_saw() -> None:
    """A call by keyword goes the long way, and what is held of the step is older than what that has found."""
    runs = []
    for name in ("tape", "eager"):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, fused=True)

        def step(x: Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        graph = graph_step(step, owners={"model": model, "optimizer": optimizer}, backend=name, verify="off")
        x, y, group = torch.ones(4, 3), torch.ones(3, 3), optimizer.param_groups[0]
        losses = [graph(x) for _ in range(8)] + [graph(x=x) for _ in range(8)]
        group["momentum"] = 0.9
        losses += [graph(y) for _ in range(8)]
        group["momentum"] = 0.5
        losses.append(graph(x=x))
        group["momentum"] = 0.9
        losses += [graph(x) for _ in range(2)]
        runs.append(flatten(losses=losses, model=model))
    assert_same(*runs)


@pytest.mark.parametrize(("max_graphs", "rows"), [(2, (6, 5, 4)), (16, (4, 5))], ids=["evicted", "outgrown"])
def test_a_closed_program_is_let_go(max_graphs: int, rows: tuple[int, ...]) -> None:
    """Also where a capture closed it."""
    _, step = make()
    graph = graph_step(step, backend="tape", verify="off", max_graphs=max_graphs)
    for count in rows:
        for _ in range(8):
            graph(torch.ones(count, 3))
    gc.collect()
    assert graph.stats.captured == len(rows)
    assert all(program.is_open for program in gc.get_objects() if type(program) is Program)
