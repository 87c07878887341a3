"""Changes between two calls that are easily taken for none: each makes the next call what it is eagerly."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import HostScalarError, graph_step
from tests.sources.test_odd_values import OddNumber, OpaqueValue

X = torch.arange(8.0).reshape(2, 4)


def _layers_in_another_order() -> tuple[Any, Callable[[Tensor], Tensor], Callable[[], Any]]:
    torch.manual_seed(0)
    layers = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Sequential(nn.Linear(4, 4), nn.Tanh())})

    def step(x: Tensor) -> Tensor:
        for layer in layers.values():
            x = layer(x)
        return x.detach()

    def change() -> None:
        layer = layers.pop("a")
        layers["a"] = layer

    return {"layers": layers}, step, change


def _sign_of_an_imaginary_zero() -> tuple[Any, Callable[[Tensor], Tensor], Callable[[], Any]]:
    settings = {"factor": complex(-4.0, 0.0)}

    def step(x: Tensor) -> Tensor:
        return x * (settings["factor"] ** 0.5).imag

    return {"settings": settings}, step, lambda: settings.update(factor=complex(-4.0, -0.0))


def _key_that_a_dictionary_would_make() -> tuple[Any, Callable[[Tensor], Tensor], Callable[[], Any]]:
    settings: defaultdict[str, float] = defaultdict(lambda: 1.5)
    settings["a"] = 1.5

    def step(x: Tensor) -> Tensor:
        return x * settings["a"] if "a" in settings else x

    return {"settings": settings}, step, lambda: settings.pop("a")


def _number_that_cannot_be_compared() -> tuple[Any, Callable[[Tensor], Tensor], Callable[[], Any]]:
    settings = {"factor": OddNumber(2)}
    return {"settings": settings}, lambda x: x * int(settings["factor"]), lambda: settings.update(factor=OddNumber(3))


def _object_that_cannot_be_compared() -> tuple[Any, Callable[[Tensor], Tensor], Callable[[], Any]]:
    settings = {"factor": OpaqueValue(2.0)}
    return (
        {"settings": settings},
        lambda x: x * settings["factor"].value,
        lambda: settings.update(factor=OpaqueValue(3.0)),
    )


@pytest.mark.parametrize(
    "make",
    [
        _layers_in_another_order,
        _sign_of_an_imaginary_zero,
        _key_that_a_dictionary_would_make,
        _number_that_cannot_be_compared,
        _object_that_cannot_be_compared,
    ],
)
def test_a_change_is_seen(make: Callable[[], Any]) -> None:
    owners, step, change = make()
    call = graph_step(step, owners=owners, backend="tape", warmup_steps=1, verify="off")
    for _ in range(8):
        before = call(X)
    assert call.stats.replayed > 2
    assert torch.equal(before, step(X))
    change()
    after = call(X)
    assert torch.equal(after, step(X))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("hold", [lambda s: {}, lambda s: {"other": s}, lambda s: {"box": SimpleNamespace(s=s)}])
def test_a_dictionary_that_an_owner_has_and_code_names(hold: Callable[[Any], Any], nested: bool) -> None:
    """It is guarded, whoever holds it, and whatever leads to it there."""
    settings: dict[str, Any] = {"rates": {"a": 1.5}, "a": 1.5}

    def step(x: Tensor) -> Tensor:
        return x * (settings["rates"]["a"] if nested else settings["a"])

    call = graph_step(step, owners=hold(settings), backend="tape", warmup_steps=1, verify="off")
    for _ in range(8):
        call(X)
    assert call.stats.replayed > 2
    (settings["rates"] if nested else settings)["a"] = 2.5
    assert torch.equal(call(X), X * 2.5)


@pytest.mark.parametrize("owners", [True, False])
@pytest.mark.parametrize("reads", [True, False])
def test_a_count_in_a_dictionary_that_an_owner_has(reads: bool, owners: bool) -> None:
    """Counting is repeated, and what the count decides is compared."""
    counts = {"n": 0}

    def deciding(x: Tensor) -> Tensor:
        counts["n"] += 1
        return x * 2 if counts["n"] > 12 else x

    def counting(x: Tensor) -> Tensor:
        counts["n"] += 1
        return x * 2

    held = {"counted": counts} if owners else {}
    call = graph_step(deciding if reads else counting, owners=held, backend="tape", warmup_steps=1, verify="off")
    for number in range(1, 30):
        assert torch.equal(call(X), X if reads and number <= 12 else X * 2)
        assert counts == {"n": number}
    assert call.stats.replayed > 15


def test_a_count_in_a_dictionary_of_a_class_of_its_own() -> None:
    """Whose items are no plain places: what it decides cannot be compared."""
    counts = Counter[str]()

    def deciding(x: Tensor) -> Tensor:
        counts["n"] += 1
        return x * 2 if counts["n"] > 12 else x

    call = graph_step(deciding, owners={}, backend="tape", warmup_steps=1, verify="off")
    with pytest.raises(HostScalarError, match=r"the step's code reads counts\.n, which it also increases"):
        for _ in range(4):
            call(X)


def test_the_length_of_a_list_that_an_owner_has() -> None:
    seen: list[int] = []

    def step(x: Tensor) -> Tensor:
        seen.append(1)
        return x * 2 if len(seen) > 12 else x

    call = graph_step(step, owners={"held": seen}, backend="tape", warmup_steps=1, verify="off")
    with pytest.raises(
        HostScalarError,
        match=r"reads len\(held\), directly or indirectly, at .*, but the step itself appends to that list",
    ):
        for _ in range(4):
            call(X)


class Twice(Tensor):
    """A tensor whose products are twice as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Doubles what ``mul`` gives."""
        plain = [arg.as_subclass(Tensor) if isinstance(arg, Twice) else arg for arg in args]
        out = func(*plain, **(kwargs or {}))
        return out * 2 if func is Tensor.mul else out


def test_a_tensor_of_another_class() -> None:
    """It has a program of its own, or none."""

    def step(x: Tensor) -> Tensor:
        return x.mul(3)

    call = graph_step(step, backend="tape", warmup_steps=1, verify="off", on_failure="eager")
    for _ in range(8):
        call(X)
    assert call.stats.replayed > 2
    assert torch.equal(call(X.as_subclass(Twice)), X * 6)


@pytest.mark.parametrize("make", [lambda: (1.0, [1.0]), lambda: [1.0], lambda: frozenset({1.0})])
def test_items_of_a_long_list_that_hold_more(make: Callable[[], Any]) -> None:
    items = [make() for _ in range(5000)]

    def step(x: Tensor) -> Tensor:
        return x * len(items[4999])

    call = graph_step(step, backend="tape", warmup_steps=1, verify="off")
    with pytest.raises(HostScalarError, match=r"items\[4096:\], of which there are more than 4096; their content"):
        for _ in range(8):
            call(X)


class Scaled:
    """A class whose methods call their object otherwise than most do."""

    def of(this, x: Tensor) -> Tensor:
        return x * 2

    @classmethod
    def made(kind, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize("name", ["of", "made"])
def test_a_method_by_any_name_of_its_object(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another function in its class is another step."""
    scaled = Scaled()
    call = graph_step(lambda x: scaled.of(x) if name == "of" else scaled.made(x), backend="tape", verify="off")
    for _ in range(8):
        assert torch.equal(call(X), X * 2)
    assert call.stats.replayed >= 2
    monkeypatch.setattr(Scaled, name, (lambda this, x: x * 3) if name == "of" else classmethod(lambda kind, x: x * 3))
    for _ in range(3):
        assert torch.equal(call(X), X * 3)
