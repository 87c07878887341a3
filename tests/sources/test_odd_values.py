"""Values that cannot be compared or hashed, and tensors that differ in a bit: each call is what it is eagerly."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphplan import OutputError, graph_step, graphed
from tests.crossing import pairs
from tests.models import assert_losses_as_eager

X = torch.arange(8.0).reshape(2, 4)


class OpaqueValue:
    """Cannot be compared."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        raise LookupError("no")

    __hash__ = object.__hash__


class Pair(namedtuple("Pair", "x")):
    """Has room for attributes beside its field."""


class OddNumber(int):
    """A number that cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise LookupError("no")

    __hash__ = int.__hash__


class OddTuple(tuple[Any, ...]):
    """Tells nobody how long it is, nor whether it is empty, as e3nn's irreps do not."""

    __slots__ = ()

    @property
    def first(self) -> Any:
        return tuple.__getitem__(self, 0)

    def __len__(self) -> int:
        raise NotImplementedError

    def __bool__(self) -> bool:
        raise NotImplementedError


@pytest.mark.parametrize("held", [lambda: 2.0, lambda: OpaqueValue(2.0), lambda: torch.tensor(2.0), lambda: [2.0]])
def test_a_tuple_with_a_length_of_its_own(held: Callable[[], Any]) -> None:
    """It is read as a plain tuple is, without a call of its class's methods."""

    def train(*, replays: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = nn.Linear(4, 2)
        model.pair = OddTuple((held(), "name"))

        def step(x: Tensor) -> Tensor:
            first = model.pair.first
            value = getattr(first, "value", first)
            out: Tensor = model(x) * (value[0] if isinstance(value, list) else value)
            return out

        call: Any = graph_step(step, owners=[model], backend="tape", mode="inference") if replays else step
        with torch.no_grad():
            found = [call(X) for _ in range(8)]
            model.pair = OddTuple((3.0, "other"))
            found += [call(X) for _ in range(12)]
        assert not replays or call.stats.replayed > 5, call.report()
        return found

    assert all(map(torch.equal, train(replays=False), train(replays=True)))


@pytest.mark.parametrize("value", [lambda: OpaqueValue(1.0), lambda: np.ones(3), lambda: {1, 2}])
def test_hyper_parameters_of_any_kind(value: Callable[[], Any]) -> None:
    """What nobody can compare or hash is told apart by what it holds, or by identity; nothing comes of the attempt."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, fused=True)
        optimizer.param_groups[0]["tag"] = value()
        return optimizer

    changes = {10: {"tag": value()}, 11: {"momentum": 0.9}}
    call = assert_losses_as_eager(
        make, {number: lambda optimizer, to=to: optimizer.param_groups[0].update(to) for number, to in changes.items()}
    )
    assert call.stats.replayed > 8


COMPLEX = torch.tensor([[1 + 2j, 3 - 1j], [0.5 - 1j, -2 + 0.25j]])
VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "conjugate": lambda y: (y, y.conj()),
    "negative": lambda y: (y, torch._neg_view(y)),
    "imaginary": lambda y: (y.imag, y.conj().imag),
    "scalars": lambda y: (y.sum(), y.sum().conj(), y[0, 0], y[0, 0].conj()),
    "alone": lambda y: y.conj(),
}


@pairs(name=VIEWS, outputs=["clone", "static"], verify=["off", 1])
@pytest.mark.twice
def test_results_that_differ_in_a_bit_of_theirs(name: str, outputs: str, verify: Any) -> None:
    """Conjugate and negative views of one memory are other values."""

    def function(x: Tensor) -> Any:
        return VIEWS[name](x * 2)

    call = graphed(function, backend="tape", verify=verify, outputs=outputs)
    for _ in range(8):
        for found, expected in zip(_as_tuple(call(COMPLEX)), _as_tuple(function(COMPLEX)), strict=True):
            assert torch.equal(found, expected)
    assert call.stats.replayed == 4


@pytest.mark.parametrize("fed", [COMPLEX.conj(), torch._neg_view(COMPLEX)])
def test_fed_views_that_differ_in_a_bit(fed: Tensor) -> None:
    def function(x: Tensor) -> Any:
        return (x * 2, x.is_conj(), x.is_neg()) if x.is_conj() or x.is_neg() else (x * 3, False, False)

    call = graphed(function, backend="tape", verify="off")
    for x in [COMPLEX] * 8 + [fed] * 8 + [COMPLEX] * 2:
        found, expected = call(x), function(x)
        assert torch.equal(found[0], expected[0])
        assert found[1:] == expected[1:]
    assert call.stats.captured == 2


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_what_hangs_on_results() -> None:
    """Plain values are there after replays; others are refused."""

    def step(x: Tensor, *values: Any) -> Any:
        first, second = x * 2, x * 3
        first.kind, second.kind = "first", 2.0  # type: ignore[attr-defined]
        if values:
            second.kind = values[0]  # type: ignore[attr-defined]
        return first, second

    call = graph_step(step, backend="tape", warmup_steps=1, verify="off")
    for _ in range(8):
        first, second = call(X)
        assert (first.kind, second.kind) == ("first", 2.0)
        assert torch.equal(second, X * 3)
    assert call.stats.replayed == 4
    refused = graph_step(lambda x: step(x, {}), backend="tape", warmup_steps=1)
    with pytest.raises(
        OutputError, match=r"kind is an attribute of result\[1\], which the step returns, but is not a plain value"
    ):
        for _ in range(8):
            refused(X)


@dataclass
class Record:
    """Holds a result."""

    result: Any


@pytest.mark.parametrize("wrap", [lambda result: result, lambda result: [result], Record])
@pytest.mark.parametrize("kind", ["OrderedDict", "Pair"])
def test_attributes_of_containers_that_are_returned(kind: str, wrap: Callable[[Any], Any]) -> None:
    """A replay puts containers together anew."""

    def step(x: Tensor) -> Any:
        result: Any = OrderedDict(x=x * 2) if kind == "OrderedDict" else Pair(x * 2)
        result.factor = 2.0
        return wrap(result)

    call = graph_step(step, backend="tape", warmup_steps=1, verify="off")
    with pytest.raises(
        OutputError, match=(rf"which the step returns, is of type {kind} and has additional attributes " r"\(factor\)")
    ):
        for _ in range(8):
            call(X)


def test_what_the_caller_hangs_on_a_static_result() -> None:
    first = graphed(lambda x: x * 2, backend="tape", outputs="static", verify="off")
    second = graphed(lambda y: y * getattr(y, "factor", 1.0), backend="tape", verify="off")
    for number in range(16):
        y = first(X)
        if number > 7:
            y.factor = 3.0
        assert torch.equal(second(y), X * (6.0 if number > 7 else 2.0))
