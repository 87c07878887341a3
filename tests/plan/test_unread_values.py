"""Values on the host that a step is fed: left out of its keys where it does not read them, and right where it does."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from graphplan import FeedError, HostEffectError, SkipReason, graph_step
from graphplan.feed.placeholders import Placeholder, ReadSignal
from graphplan.feed.signature import flatten
from graphplan.feed.unread import UnreadValues
from tests.models import CALLS, float_batches
from tests.twins import BEFORE_REPLAY, Rig, assert_equals_eager, assert_same_runs, build, drive, managed

VARIES = BEFORE_REPLAY + 1
"""Calls before the first replay where a value turns out to vary: the first call has another key."""
READ_LATE = VARIES - 3
"""Calls until a trace has shown that such a value is read, but for the first, whose key comes again."""


def rig_of(read: Callable[[Any], Tensor], make: Callable[[int, Tensor], Any], count: int = CALLS) -> Rig:
    """A training step on ``read(batch)``, of batches that ``make`` makes."""
    model = nn.Linear(8, 4)
    optimizer = SGD(model.parameters(), lr=0.05, fused=True)

    def train_step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = model(read(batch)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    calls = [(make(index, x),) for index, (x, _) in enumerate(float_batches(count))]
    return Rig(train_step, {"model": model, "optimizer": optimizer}, calls)


def _names(index: int) -> list[str]:
    return [f"{index}_{row}.png" for row in range(6)]


def _unpacked(batch: Any) -> Tensor:
    x, names = batch
    kept = [names]
    del kept
    return x


def _ignoring(x: Tensor, **_: Any) -> Tensor:
    return x


class Ids(tuple[int, ...]):
    """No node of pytree's."""


class Meta:
    """An object that no key can hold."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.array = np.arange(index)


UNREAD: dict[str, tuple[Callable[[int, Tensor], Any], Callable[[Any], Tensor], int]] = {
    "a string": (lambda i, x: {"x": x, "path": f"{i}.png"}, lambda b: b["x"], VARIES),
    "strings": (lambda i, x: {"x": x, "path": _names(i)}, lambda b: b["x"], VARIES),
    "how many strings": (lambda i, x: {"x": x, "path": _names(i)}, lambda b: b["x"] * len(b["path"]), VARIES),
    "unpacked": (lambda i, x: (x, _names(i)), _unpacked, VARIES),
    "as keywords": (lambda i, x: {"x": x, "path": _names(i)}, lambda b: _ignoring(**b), VARIES),
    "names of items": (lambda i, x: {"x": x, "path": f"{i}"}, lambda b: b[min(b.keys(), key=len)], VARIES),
    "its class": (lambda i, x: (x, f"{i}"), lambda b: b[0] if isinstance(b[1], str) else -b[0], VARIES),
    "all that are tensors": (
        lambda i, x: {"x": x, "path": f"{i}"},
        lambda b: next(v for v in list(b.values()) if isinstance(v, Tensor)),
        VARIES,
    ),
    "a shallow copy": (lambda i, x: {"x": x, "path": f"{i}"}, lambda b: copy.copy(b)["x"], VARIES),
    "a path": (lambda i, x: {"x": x, "path": Path(f"{i}.png")}, lambda b: b["x"], BEFORE_REPLAY),
    "an array": (lambda i, x: {"x": x, "ids": np.arange(i)}, lambda b: b["x"], BEFORE_REPLAY),
    "an object": (lambda i, x: {"x": x, "meta": Meta(i)}, lambda b: b["x"], BEFORE_REPLAY),
    "a set": (lambda i, x: {"x": x, "ids": {i}}, lambda b: b["x"], BEFORE_REPLAY),
    "a tuple of its own": (lambda i, x: {"x": x, "ids": Ids((i,))}, lambda b: b["x"], BEFORE_REPLAY),
    "a list of numbers": (
        lambda i, x: {"x": x, "labels": [(i >> bit) % 2 for bit in range(6)]},
        lambda b: b["x"],
        VARIES + 7,
    ),
    "a number": (lambda i, x: {"x": x, "index": i}, lambda b: b["x"], BEFORE_REPLAY + 8),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_not_read_is_no_part_of_a_key(name: str) -> None:
    """One program serves batches that differ in nothing that the step reads."""
    make, read, before = UNREAD[name]
    assert_equals_eager(partial(rig_of, read, make, 30), captured=1, replayed=30 - before)


READ: dict[str, tuple[Callable[[int, Tensor], Any], Callable[[Any], Tensor]]] = {
    "compared": (lambda i, x: (x, "ab"[i % 2]), lambda b: b[0] * (2 if b[1] == "a" else 1)),
    "as a key": (lambda i, x: (x, "ab"[i % 2]), lambda b: b[0] * {"a": 1.0, "b": 2.0}[b[1]]),
    "printed into text": (lambda i, x: (x, "ab"[i % 2]), lambda b: b[0] * len({f"{b[1]}", "a"})),
    "its exact class": (lambda i, x: (x, "ab"[i % 2]), lambda b: b[0] * (2 if type(b[1]) is str else 1)),
    "by C code": (lambda i, x: (x, "ab"[i % 2]), lambda b: b[0] * (2 if "abc".startswith(b[1]) else 1)),
    "in a list": (lambda i, x: {"x": x, "t": ["c", "ab"[i % 2]]}, lambda b: b["x"] * ord(b["t"][1])),
    "of a package": (lambda i, x: (x, np.dtype([("a", f"f{4 << i % 2}")])), lambda b: b[0] * b[1].itemsize),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_read_is_part_of_the_key(name: str) -> None:
    """The trace that reads it is undone; from then on each value has its program."""
    make, read = READ[name]
    before = READ_LATE + 2 * BEFORE_REPLAY
    assert_equals_eager(partial(rig_of, read, make, 40), captured=2, replayed=40 - before)


def test_an_object_of_a_package_that_the_step_changes_is_refused() -> None:
    """What is keyed by its content may have none that each step changes."""
    step = graph_step(lambda x, source: x * source.random(), backend="tape")
    with pytest.raises(
        HostEffectError, match=r"the step changes args\[1\], an object among its arguments.*on an owner"
    ):
        for _ in range(8):
            step(torch.ones(2), np.random.default_rng(1))


def test_a_generator_that_is_fed_is_refused() -> None:
    """Code in C would take a placeholder for a generator of torch's."""
    step = graph_step(lambda x, source: x + torch.rand(2, generator=source), backend="tape")
    with pytest.raises(FeedError, match=r"args\[1\]: an argument has the type Generator"):
        for _ in range(8):
            step(torch.ones(2), torch.Generator())


def test_a_trace_that_reads_is_undone() -> None:
    """What the step did before it read is done once."""

    def make() -> Rig:
        rig = rig_of(lambda b: b[0] * len(b[1]), lambda i, x: (x, "a" * (1 + i % 2)))
        model, inner = rig.owners["model"], rig.step
        model.register_buffer("total", torch.zeros(()))
        model.seen = []

        def step(batch: Any) -> Tensor:
            model.total += 1
            return inner(batch)

        rig.step = step
        return rig

    step = assert_equals_eager(make, captured=2, replayed=CALLS - READ_LATE - 2 * BEFORE_REPLAY)
    assert step.stats.skipped[SkipReason.SHAPE] >= 1


def test_a_value_that_the_step_keeps_is_read() -> None:
    """It is no placeholder that lies on the model afterwards, nor one that is returned."""
    model = nn.Linear(8, 4)

    def step_of(batch: dict[str, Any]) -> Any:
        model.latest = batch["path"]
        return model(batch["x"]).sum(), batch["path"]

    step = graph_step(step_of, owners={"model": model}, backend="tape", on_failure="eager", mode="inference")
    for index, (x, _) in enumerate(float_batches(12)):
        _, path = step({"x": x, "path": f"{index}"})
        assert path == model.latest == f"{index}"


def test_reads_that_the_step_hides() -> None:
    """A step that goes on after what it reads is no better, and neither is one that leaves it in a cycle."""

    def hiding(batch: Any) -> Tensor:
        try:
            factor = len(batch[1])
        except BaseException:  # noqa: BLE001
            factor = 3
        return batch[0] * factor

    make = partial(rig_of, hiding, lambda i, x: (x, "a" * (1 + i % 2)))
    step = assert_equals_eager(make, captured=2, replayed=CALLS - READ_LATE - 2 * BEFORE_REPLAY)
    assert step.stats.skipped[SkipReason.SHAPE] >= 1

    def cycling(batch: Any) -> Tensor:
        cycle: list[Any] = [batch[1]]
        cycle.append(cycle)
        return batch[0]

    assert_equals_eager(partial(rig_of, cycling, lambda i, x: (x, f"{i}")), replayed=CALLS - VARIES)
    gc.collect()


def test_a_read_array_is_refused_by_its_path() -> None:
    rig = build(partial(rig_of, lambda b: b["x"] * int(b["meta"]["n"].sum()), _with_array))
    step = managed(rig)
    text = r"^args\[0\]\['meta'\]\['n'\]: an argument has the type ndarray, which is neither.*: pass torch\.as_tensor"
    with pytest.raises(FeedError, match=text):
        for args in rig.calls:
            step(*args)


def _with_array(index: int, x: Tensor) -> Any:
    return {"x": x, "meta": {"n": np.arange(index)}}


def test_an_error_of_the_step_with_a_value_beside() -> None:
    """It may be the placeholder's fault; run again with the value, it is the step's own."""
    rig = build(partial(rig_of, lambda b: b["x"] if b["x"].shape[0] == 6 else b["y"], _with_array))
    step = managed(rig)

    def failing(batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) in (4, 5):
            raise KeyError("the step's own")
        return rig.step(batch)

    calls: list[int] = []
    step = graph_step(failing, owners=rig.owners, backend="tape")
    for args in rig.calls[:3]:
        step(*args)
    with pytest.raises(KeyError, match="the step's own"):
        step(*rig.calls[3])


def test_every_use_of_a_placeholder_is_a_signal() -> None:
    used: list[int] = []

    def signal() -> Any:
        used.append(0)
        raise ReadSignal([0])

    held: Any = Placeholder(0, str, signal)
    uses: list[Callable[[], Any]] = [
        *(lambda f=f: f(held) for f in (len, str, repr, hash, bool, int, float, iter, list, abs, vars, dir, bytes)),
        lambda: held + 1, lambda: 1 + held, lambda: held == 1, lambda: held < 1, lambda: 1 in held, lambda: held[0],
        lambda: held.strip, lambda: held(), lambda: f"{held}", lambda: Path(held), lambda: torch.ones(2) * held,
        lambda: copy.copy(held), lambda: copy.deepcopy(held), lambda: setattr(held, "a", 1), lambda: {held},
        lambda: np.asarray(held), lambda: torch.relu(held), lambda: [1, 2][held],
    ]  # fmt: skip
    for number, use in enumerate(uses, 1):
        # C code may say something else of it.
        with pytest.raises((ReadSignal, TypeError)):
            use()
        assert len(used) >= number
    assert isinstance(held, str) and held is not None and held.__class__ is str


@dataclass
class Target:
    """A part of random batches."""

    boxes: Tensor
    name: Any


def _random_batch(rng: random.Random) -> tuple[Any, Callable[[Any], Tensor], int]:
    """A nested batch, a step's way to read it, and how many programs it comes to."""
    values: dict[str, Callable[[int], Any]] = {
        "string": lambda i: f"{i}",
        "strings": lambda i: [f"{i}", "b"],
        "array": lambda i: np.arange(i),
        "object": Meta,
        "path": lambda i: Path(f"{i}"),
        "few": lambda i: "ab"[i % 2],
        "flag": lambda i: i % 2 == 0,
    }
    names = rng.sample(sorted(values), 4)
    read = [name for name in names if name in ("few", "flag") and rng.random() < 0.5]
    kind = rng.choice(["dict", "tuple", "object", "dataclass"])

    def make(i: int, x: Tensor) -> Any:
        held = {name: values[name](i) for name in names}
        parts: dict[str, Any] = {
            "dict": {"x": x, **held},
            "tuple": (x, held),
            "object": SimpleNamespace(x=x, inner=SimpleNamespace(**held, twice=2 * x)),
            "dataclass": [Target(x, held), "end"],
        }
        return parts[kind]

    def take(batch: Any) -> Tensor:
        x, held = {
            "dict": lambda: (batch["x"], batch),
            "tuple": lambda: tuple(batch),
            "object": lambda: (batch.x, vars(batch.inner)),
            "dataclass": lambda: (batch[0].boxes, batch[0].name),
        }[kind]()
        for name in read:
            x = x * (2 if held[name] in ("a", True) else 0.5)
        return x

    return make, take, 2 if "few" in read or "flag" in names else 1


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.crossed(3)
def test_random_batches(seed: int) -> None:
    """Whatever is read, and however it lies: eager's bits, and no more programs than values that are read."""
    make, take, programs = _random_batch(random.Random(seed))
    expected, found = (build(partial(rig_of, take, make, 60)) for _ in range(2))
    step = managed(found)
    assert_same_runs(drive(expected, expected.step), drive(found, step))
    assert step.stats.captured == programs
    assert step.stats.replayed >= 60 - READ_LATE * programs - programs * BEFORE_REPLAY


class Store:
    """As graph libraries hold their batches: a mapping behind attributes, which knows the object that it is part of."""

    def __init__(self, parent: Any, mapping: dict[str, Any]) -> None:
        self.__dict__["_mapping"] = mapping
        self.__dict__["_parent"] = weakref.ref(parent)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._mapping[name]


class Graph:
    """A batch that can be called and not be hashed, and gives a tensor when it is compared."""

    def __init__(self, **items: Any) -> None:
        self.__dict__["_store"] = Store(self, items)

    def __getattr__(self, name: str) -> Any:
        if "_store" not in self.__dict__ or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._store, name)

    def __call__(self, *names: str) -> list[Any]:
        return [getattr(self, name) for name in names]

    def __eq__(self, other: object) -> Any:
        return self.x == other

    __hash__ = None  # type: ignore[assignment]


class Slotted:
    """Without a dictionary."""

    __slots__ = ("name", "x")
    __module__ = "elsewhere"

    def __init__(self, x: Tensor, name: str) -> None:
        self.x, self.name = x, name


class Items(dict[str, Any]):
    """A dictionary of a class of its own, with an attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.origin = "a loader"

    @property
    def first(self) -> Tensor:
        return self["x"]


class Rows(list[Tensor]):
    """A list of a class of its own."""


OBJECTS: dict[str, tuple[Callable[[int, Tensor], Any], Callable[[Any], Tensor]]] = {
    "a graph": (lambda i, x: Graph(x=x, name=f"{i}"), lambda b: b.x),
    "a graph's store knows the graph": (
        lambda i, x: Graph(x=x, name=f"{i}"),
        lambda b: b("x")[0] if b._store._parent() is b else b.nothing,
    ),
    "a namespace": (lambda i, x: SimpleNamespace(x=x, name=f"{i}"), lambda b: b.x),
    "slots": (lambda i, x: Slotted(x, f"{i}"), lambda b: b.x),
    "a dictionary of a class": (lambda i, x: Items(x=x, name=f"{i}"), lambda b: b.first),
    "a list of a class": (lambda i, x: (Rows([x, x]), f"{i}"), lambda b: b[0][0] + b[0][1]),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_with_tensors(name: str) -> None:
    """The step gets an object of the same class with the program's tensors in it."""
    make, read = OBJECTS[name]
    step = assert_equals_eager(partial(rig_of, read, make), replayed=CALLS - VARIES)
    assert any(external.name.startswith("args[0]") for external in step.plan.inputs)


def test_a_change_of_an_object_is_refused() -> None:
    def changing(batch: Any) -> Tensor:
        batch.y = 2 * batch.x
        return batch.y

    rig = build(partial(rig_of, changing, lambda i, x: SimpleNamespace(x=x)))
    step = managed(rig, on_failure="eager")
    with pytest.warns(UserWarning, match=r"changes a container among its arguments: args\[0\]\.y was added"):
        drive(rig, step)
    assert all(torch.equal(batch.y, 2 * batch.x) for (batch,) in rig.calls)


class Hostile:
    """Its own code fails."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not compared")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_objects_whose_code_fails() -> None:
    assert_equals_eager(
        partial(rig_of, lambda b: b[0], lambda i, x: (x, Hostile())), replayed=CALLS - BEFORE_REPLAY, captured=1
    )


def test_what_cannot_be_taken_apart() -> None:
    """A list in itself; the call is run on it all the same."""
    endless: list[Any] = []
    endless.append(endless)
    step = graph_step(lambda x, other: x * len(other), backend="tape", on_failure="eager")
    with pytest.warns(UserWarning, match=r"the arguments cannot be flattened \(RecursionError"):
        assert torch.equal(step(torch.ones(2), endless), torch.ones(2))


def test_tensors_on_the_host_beside_others() -> None:
    """They are values; where the step reads them, the call is eager, with their path."""
    unread = UnreadValues()
    batch = {"x": torch.empty(2, 3, device="meta"), "lengths": torch.ones(2)}
    feed = flatten((batch,), {}, unread.keys)
    other = flatten(({**batch, "lengths": torch.ones(5)},), {}, unread.keys)
    assert feed.key == other.key and feed.unread == {1} and [index for index, _ in feed.tensors()] == [0]
    unread.mark(feed, [1])
    with pytest.raises(
        FeedError, match=(r"args\[0\]\['lengths'\] is on cpu and the step reads it beside tensors on " r"meta")
    ):
        flatten((batch,), {}, unread.keys)
