"""Whatever Python value a step reads, wherever it lies: a change reaches the next step, or the step is refused."""

from __future__ import annotations

import argparse
import array
import collections
import functools
import inspect
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from graphplan import HostEffectError, HostScalarError
from tests.crossing import by_key, each
from tests.models import float_batches
from tests.twins import (
    Rig,
    assert_equals_eager,
    assert_refused,
    assert_same_as_eager,
    assert_same_runs,
    build,
    drive,
    managed,
)

CALLS, WHEN = 24, 12
Case = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], object]]
"""What holds a value, how the step reads it, and how the host changes it."""


@dataclass(slots=True)
class Slotted:
    """A record without a dictionary."""

    scale: float = 0.5


@dataclass
class Record:
    """A plain record."""

    scale: float = 0.5


def _nested() -> Any:
    class Nested:
        """Settings as classes within classes."""

        class Loss:
            """Settings of the loss."""

            scale = 0.5

    return Nested


def _settings() -> Any:
    return OmegaConf.create({"rate": 0.5, "other": 0.25, "loss": {"scale": "${rate}"}})


def _tables() -> Any:
    class Tables:
        """An object whose class holds what it reads."""

        scale = 0.5
        table = [0.5]  # noqa: RUF012

    return Tables()


class Methodical:
    """Has a method."""

    def scaled(self) -> float:
        """Half."""
        return 0.5


class Extended(dict[str, float]):
    """A dictionary with attributes."""

    scale: float


class Named(Record):
    """Takes attributes by names that the code does not spell."""

    which = "scale"


def _first(thing: Any, label: str) -> Any:
    return thing


class Asking(nn.Module):
    """Asks for an attribute of its own."""

    def scale(self) -> float:
        return 2.0 if hasattr(self, "late") else 0.5


class Lowered(Record):
    """Has attributes in capitals."""

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name.lower() if name.isupper() else name)


def _wrapper() -> Any:
    @functools.wraps(torch.sum)
    def scaled(x: Tensor) -> Tensor:
        return torch.sum(x) * scaled.scale

    scaled.scale = 0.5
    return scaled


def _scaled(by: float = 0.5) -> float:
    return by


def _from_record(record: Record) -> float:
    return record.scale


def _with_attribute() -> Any:
    def function() -> float:
        return function.scale  # type: ignore[attr-defined]

    function.scale = 0.5  # type: ignore[attr-defined]
    return function


class Table:
    """Keeps what one of its methods came to."""

    scale = 0.5

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def entry(self, number: int) -> float:
        """What it was when somebody asked first."""
        return self.scale

    def change(self) -> None:
        """Another entry is asked for, then the same one again."""
        self.scale = 0.25
        assert (self.entry(2), self.entry(1)) == (0.25, 0.25)


def _cached() -> Any:
    held = types.SimpleNamespace(scale=0.5)
    cached = functools.cache(lambda: held.scale)
    cached.held = held  # type: ignore[attr-defined]
    return cached


def _clear(cached: Any) -> None:
    cached.held.scale = 0.25
    cached.cache_clear()


def _package() -> Any:
    package, inner = types.ModuleType("package"), types.ModuleType("package.inner")
    inner.scale, package.inner = 0.5, inner  # type: ignore[attr-defined]
    return package


def _deep() -> Any:
    tree: Any = {"scale": 0.5}
    for _ in range(12):
        tree = {"more": tree}
    return tree


def _leaf(tree: Any) -> Any:
    while "more" in tree:
        tree = tree["more"]
    return tree


def _matched(record: Any) -> float:
    return record.scale if record is None else astuple(record)[0]


def _extended() -> Any:
    table = Extended()
    table.scale = 0.5
    return table


def _marked() -> Any:
    tensor = torch.ones(1)
    tensor.scale = 0.5  # type: ignore[attr-defined]
    return tensor


def _local() -> Any:
    here = threading.local()
    here.scale = 0.5
    return here


def _environment() -> Any:
    os.environ["GRAPHPLAN_TEST_SCALE"] = "0.5"
    return os.environ


def _called_otherwise() -> Any:
    module = nn.Identity()
    module._call_impl = types.MethodType(lambda self, x: 0.5 * x, module)  # type: ignore[method-assign]
    return module


def _set(name: str) -> Callable[[Any], object]:
    return lambda thing: setattr(thing, name, 0.25)


def _put(key: Any) -> Callable[[Any], object]:
    return lambda thing: thing.__setitem__(key, 0.25)


def _reorder(table: dict[str, float]) -> None:
    table["first"] = table.pop("first")


def _by_order(table: dict[str, float]) -> float:
    total = 0.0
    for value in table.values():
        total = 2 * total + value
    return total


CASES: dict[str, Case] = {
    "slots": (Slotted, lambda thing: thing.scale, _set("scale")),
    "a class in a class": (
        _nested,
        lambda thing: thing.Loss.scale,
        lambda thing: setattr(thing.Loss, "scale", 0.25),
    ),
    "a class's list": (_tables, lambda thing: thing.table[0], lambda thing: thing.table.__setitem__(0, 0.25)),
    "one's own in place of the class's": (_tables, lambda thing: thing.scale, _set("scale")),
    "attributes of a dictionary": (_extended, lambda thing: thing.scale, _set("scale")),
    "attributes of a tensor": (_marked, lambda thing: thing.scale, _set("scale")),
    "the environment": (
        _environment,
        lambda thing: float(thing["GRAPHPLAN_TEST_SCALE"]),
        lambda thing: thing.__setitem__("GRAPHPLAN_TEST_SCALE", "0.25"),
    ),
    "attributes of a function": (_with_attribute, lambda thing: thing(), _set("scale")),
    "a deep dictionary": (_deep, lambda thing: _leaf(thing)["scale"], lambda thing: _leaf(thing).update(scale=0.25)),
    "a long list": (lambda: [0.5] * 6000, lambda thing: thing[5500], _put(5500)),
    "a dictionary in a deque": (
        lambda: collections.deque([{"scale": 0.5}]),
        lambda thing: thing[0]["scale"],
        lambda thing: thing[0].update(scale=0.25),
    ),
    "the order of a dictionary": (lambda: {"first": 0.1, "second": 0.7}, _by_order, _reorder),
    "a dictionary with tuples for keys": (
        lambda: {("a", 1): 0.5, ("b", 2): 0.5},
        lambda thing: thing["a", 1],
        _put(("a", 1)),
    ),
    "a dictionary with fractions for keys": (lambda: {0.1: 0.5, 0.2: 0.5}, lambda thing: thing[0.1], _put(0.1)),
    "a dictionary with types for keys": (lambda: {int: 0.5, str: 0.5}, lambda thing: thing[int], _put(int)),
    "a NumPy array": (lambda: np.array([0.5]), lambda thing: float(thing[0]), _put(0)),
    "a larger NumPy array": (lambda: np.full(8000, 0.5), lambda thing: float(thing[7999]), _put(7999)),
    "a date": (
        lambda: np.array(["2020-01-01"], dtype="datetime64[D]"),
        lambda thing: 1.0 / thing[0].astype(int),
        lambda thing: thing.__setitem__(0, "2021-01-01"),
    ),
    "keywords of a partial that is called in its place": (
        lambda: types.SimpleNamespace(function=partial(_scaled, by=0.5)),
        lambda thing: thing.function(),
        lambda thing: thing.function.keywords.update(by=0.25),
    ),
    "an array": (lambda: array.array("d", [0.5]), lambda thing: thing[0], _put(0)),
    "bytes": (lambda: bytearray(b"\x02"), lambda thing: thing[0], lambda thing: thing.__setitem__(0, 3)),
    "a UserDict": (lambda: collections.UserDict(scale=0.5), lambda thing: thing["scale"], _put("scale")),
    "a ChainMap": (lambda: collections.ChainMap({}, {"scale": 0.5}), lambda thing: thing["scale"], _put("scale")),
    "a thread's own": (_local, lambda thing: thing.scale, _set("scale")),
    "keywords of a partial": (
        lambda: partial(_scaled, by=0.5),
        lambda thing: thing(),
        lambda thing: thing.keywords.update(by=0.25),
    ),
    "an object in a partial": (
        lambda: partial(_from_record, Record()),
        lambda thing: thing(),
        lambda thing: setattr(thing.args[0], "scale", 0.25),
    ),
    "a number beside a tensor": (
        lambda: [(torch.ones(1), 0.5)],
        lambda thing: thing[0][0].sum() * thing[0][1],
        lambda thing: thing.__setitem__(0, (thing[0][0], 0.25)),
    ),
    "an object beside a tensor": (
        lambda: (torch.ones(1), Record()),
        lambda thing: thing[0].sum() * thing[1].scale,
        lambda thing: setattr(thing[1], "scale", 0.25),
    ),
    "the type of a number": (
        lambda: [(2,)],
        lambda thing: 1 + (torch.arange(2) * thing[0][0]).is_floating_point(),
        lambda thing: thing.__setitem__(0, (2.0,)),
    ),
    "all fields at once": (Record, _matched, _set("scale")),
    "a computed name": (Named, lambda thing: getattr(thing, thing.which), _set("scale")),
    "a name that another function looks up": (
        Named,
        lambda thing: inspect.getattr_static(thing, thing.which),
        _set("scale"),
    ),
    "a computed name after a call": (Named, lambda thing: getattr(_first(thing, "which"), thing.which), _set("scale")),
    "a computed name in a namespace": (
        lambda: types.SimpleNamespace(which="scale", scale=0.5),
        lambda thing: getattr(thing, thing.which),
        _set("scale"),
    ),
    "a computed name in a class": (
        lambda: type("Settings", (), {"which": "scale", "scale": 0.5, "__module__": __name__}),
        lambda thing: getattr(thing, thing.which),
        _set("scale"),
    ),
    "all of a namespace": (
        lambda: argparse.Namespace(scale=0.5),
        lambda thing: sum(vars(thing).values()),
        _set("scale"),
    ),
    "an attribute that comes": (Record, lambda thing: getattr(thing, "late", 0.5), _set("late")),
    "an attribute that comes to a namespace": (
        argparse.Namespace,
        lambda thing: 2.0 if hasattr(thing, "late") else 0.5,
        _set("late"),
    ),
    "an attribute that comes to a module": (Asking, lambda thing: thing.scale(), _set("late")),
    "a name that the class computes": (Lowered, lambda thing: thing.SCALE, _set("scale")),
    "an attribute of what wraps torch's function": (
        _wrapper,
        lambda thing: thing(torch.ones(())),
        _set("scale"),
    ),
    "the attributes' dictionary": (Record, lambda thing: sum(vars(thing).values()), _set("scale")),
    "what an interpolation leads to": (_settings, lambda thing: thing.loss.scale, _set("rate")),
    "an interpolation": (
        _settings,
        lambda thing: thing.loss.scale,
        lambda thing: setattr(thing.loss, "scale", "${other}"),
    ),
    "an interpolation within another": (
        lambda: OmegaConf.create({"which": "a", "a": 0.5, "b": 0.25, "scale": "${${which}}"}),
        lambda thing: thing.scale,
        lambda thing: setattr(thing, "which", "b"),
    ),
    "what an interpolation of a part's leads to": (
        lambda: _settings().loss,
        lambda thing: thing["scale"],
        lambda thing: setattr(thing._get_parent(), "rate", 0.25),
    ),
}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """What the cases change for all."""
    yield
    os.environ.pop("GRAPHPLAN_TEST_SCALE", None)


def _rig(case: Case, held: str, change: bool = True) -> Rig:
    """A step that scales its loss by what it reads from a closure, from an attribute, or from a default."""
    make, read, write = case
    thing = make()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    holder = types.SimpleNamespace(thing=thing)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        return scaled_step(x, y, thing)

    def attribute_step(x: Tensor, y: Tensor) -> Tensor:
        return scaled_step(x, y, holder.thing)

    def default_step(x: Tensor, y: Tensor, default: Any = thing) -> Tensor:
        return scaled_step(x, y, default)

    def scaled_step(x: Tensor, y: Tensor, thing: Any) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) * read(thing)
        loss.backward()
        optimizer.step()
        return loss

    def after(index: int) -> None:
        if index == WHEN and change:
            write(thing)

    step = {"closure": train_step, "attribute": attribute_step, "default": default_step}[held]
    return Rig(step, {"model": model, "optimizer": optimizer}, list(float_batches(CALLS)), after)


@each(held=["closure", "attribute", "default"], case=by_key(CASES))
@pytest.mark.crossed(2)
def test_a_change_reaches_the_next_step(case: Case, held: str) -> None:
    """Replays before and after it, and no check that could have found it."""
    rig = build(lambda: _rig(case, held))
    expected = drive(rig, rig.step)
    rig = build(lambda: _rig(case, held, change=False))
    unchanged = drive(rig, rig.step)
    rig = build(lambda: _rig(case, held))
    step = managed(rig, verify="off")
    assert_same_runs(expected, drive(rig, step))
    assert (step.stats.captured, step.stats.replayed) == (2, CALLS - 6 - 4)
    with pytest.raises(AssertionError, match="differences"):
        assert_same_runs(expected, unchanged)


@pytest.mark.parametrize("held", ["closure", "attribute", "default"])
def test_a_change_of_any_member_reaches_the_next_step(held: str) -> None:
    """``inspect.getmembers`` reads all of them, under names that the code does not spell."""
    case = (
        Named,
        lambda thing: sum(value for _, value in inspect.getmembers(thing) if type(value) is float),
        _set("scale"),
    )
    step = assert_same_as_eager(lambda: _rig(case, held), verify="off")
    assert step.stats.captured == 2
    assert step.stats.replayed == CALLS - 6 - 6


def test_how_a_module_is_called() -> None:
    """What a tool has put in the place of the method that calls the hooks and the forward pass."""

    def call_otherwise(module: Any) -> None:
        module._call_impl = types.MethodType(lambda self, x: 0.25 * x, module)

    case = _called_otherwise, lambda thing: thing(1.0), call_otherwise
    step = assert_same_as_eager(lambda: _rig(case, "closure"), verify="off")
    assert step.stats.captured == 2


def test_a_module_in_a_module() -> None:
    """The step names both."""
    package = _package()

    def make() -> Rig:
        package.inner.scale = 0.5
        return _rig(
            (lambda: package, lambda thing: package.inner.scale, lambda thing: setattr(package.inner, "scale", 2)),
            "closure",
        )

    step = assert_same_as_eager(make, verify="off")
    assert step.stats.captured == 2


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[Any], object], str]] = {
    "the next item": (count, next, r"reads thing.*, a count: each eager step may take its next item"),
    "a number in an array": (lambda: np.zeros(1), lambda thing: thing.__iadd__(1), r"changes thing\[:\] in Python"),
    "a draw of its own": (
        lambda: np.random.default_rng(0),
        lambda thing: thing.random(),
        r"changes thing.*\[:\] in Python",
    ),
}


@pytest.mark.parametrize(("make", "use", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_a_replay_would_leave_out(make: Callable[[], Any], use: Callable[[Any], object], message: str) -> None:
    """Named and refused, though no operator gets it."""

    def read(thing: Any) -> float:
        use(thing)
        return 0.5

    assert_refused(lambda: _rig((make, read, print), "closure", False), HostEffectError, message, done=4)


def test_a_weak_proxy() -> None:
    """It was taken for an iterator: its class has every method that there is."""
    record = Record()

    def make() -> Rig:
        return _rig((lambda: weakref.proxy(record), lambda thing: thing.scale, print), "attribute", False)

    text = r"reads holder\.thing, a weak proxy, whose object is not compared.* Use the object itself"
    assert_refused(make, HostScalarError, text, done=4)
    assert_equals_eager(make, allow=("holder.thing",))


LONG = np.full(10_000, 0.5)


def test_an_array_that_is_too_long_to_compare() -> None:
    """Refused by name, unless nobody can write to it, or the caller says that nobody does."""

    def make(array: Any = LONG) -> Rig:
        return _rig((lambda: array, lambda thing: float(thing[0]), print), "attribute", False)

    text = r"reads holder\.thing, a ndarray of 80000 bytes; a buffer of more than 65536 bytes is not compared.*setflags"
    assert_refused(make, HostScalarError, text, done=4)
    assert_equals_eager(make, allow=("holder.thing",))
    fixed = LONG.copy()
    fixed.setflags(write=False)
    assert_equals_eager(lambda: make(fixed))


class Counting(torch.optim.Optimizer):
    """Counts its steps in its state, beside what belongs to parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.state["steps"] = 0  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """A step of gradient descent."""
        self.state["steps"] += 1  # type: ignore[index]
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad, alpha=-0.05)


@pytest.mark.twice
def test_a_count_in_an_optimizers_state() -> None:
    """It goes on in replays."""
    model = nn.Linear(8, 4)
    optimizer = Counting(model.parameters())

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    rig = Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(CALLS)))
    step = managed(rig)
    drive(rig, step)
    assert step.stats.replayed == CALLS - 6
    assert optimizer.state["steps"] == CALLS  # type: ignore[index]


def test_numbers_of_an_optimizer_that_nobody_named() -> None:
    """The step only reads them; who steps the optimizer is another affair."""

    def make() -> Rig:
        model = nn.Linear(8, 4)
        optimizer = SGD(model.parameters(), lr=0.05)

        def train_step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y) * optimizer.param_groups[0]["lr"]
            loss.backward()
            return loss

        def after(index: int) -> None:
            if index == WHEN:
                optimizer.param_groups[0]["lr"] = 0.5

        return Rig(train_step, {"model": model}, list(float_batches(CALLS)), after)

    step = assert_same_as_eager(make, verify="off")
    assert step.stats.captured == 2
