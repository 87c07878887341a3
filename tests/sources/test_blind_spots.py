"""What a step can read in unusual ways: a change between two replays is seen before the next, or it is refused by name.

Checks are off in here, so that it is guards that make the numbers eager's.
"""

from __future__ import annotations

import builtins
import csv
import functools
import io
import json
import logging
import pickle
import re
import sys
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from pprint import pprint
from queue import Queue, SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.data import Subset, TensorDataset

from graphplan import HostScalarError, graph_step
from graphplan.owners import kinds

Case = tuple[Callable[[], float], Callable[[], object]]
"""What the step multiplies its loss with, and a change of that."""
_NAME = "graphplan_blind_spot"
SCALE = 1.0


class Holder:
    """Holds a value."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def __float__(self) -> float:
        return 1.0


_one = Holder.__float__


def _as_it_was() -> None:
    sys.modules[_NAME] = ModuleType(_NAME)
    sys.modules[_NAME].value = 1.0  # type: ignore[attr-defined]
    Holder.__float__ = _one  # type: ignore[method-assign]
    globals().update(SCALE=1.0)
    globals().pop("round", None)
    vars(builtins).pop(_NAME, None)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    _as_it_was()
    yield
    _as_it_was()
    del sys.modules[_NAME]


def _import_of_module() -> Case:
    def read() -> float:
        import graphplan_blind_spot as module  # type: ignore[import-not-found]

        return float(module.value)

    return read, lambda: setattr(sys.modules[_NAME], "value", 3.0)


def _import_from_module() -> Case:
    def read() -> float:
        from graphplan_blind_spot import value

        return float(value)

    return read, lambda: setattr(sys.modules[_NAME], "value", 3.0)


def _metaclass() -> Case:
    class Meta(type):
        scale = 1.0

    class Kind(metaclass=Meta):
        pass

    return lambda: Kind.scale, lambda: setattr(Meta, "scale", 3.0)


def _special_method() -> Case:
    thing = Holder()
    return lambda: float(thing), lambda: setattr(Holder, "__float__", lambda this: 3.0)


def _class_of_an_object() -> Case:
    class Other(Holder):
        def __float__(self) -> float:
            return 3.0

    thing = Holder()
    return lambda: float(thing), lambda: setattr(thing, "__class__", Other)


def _partial_method() -> Case:
    class Kind:
        def get(self, number: float) -> float:
            return number

        one = functools.partialmethod(get, 1.0)

    thing = Kind()
    return lambda: thing.one(), lambda: setattr(Kind, "one", functools.partialmethod(Kind.get, 3.0))


def _weakly() -> Case:
    things = [Holder()]
    reference = weakref.ref(things[0])
    return lambda: 3.0 if reference() is None else 1.0, things.clear


CASES: dict[str, Callable[[], Case]] = {
    "import": _import_of_module,
    "import from": _import_from_module,
    "an attribute of a metaclass": _metaclass,
    "a special method": _special_method,
    "the class of an object": _class_of_an_object,
    "a partial method": _partial_method,
    "a weak reference to what goes": _weakly,
}


def _run(case: Case, *, graphed: bool) -> tuple[list[float], Any]:
    """Losses of 20 steps with a change before the eleventh, and the step."""
    read, change = case
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean() * read()
        loss.backward()
        optimizer.step()
        return loss.detach()

    owners = {"model": model, "optimizer": optimizer}
    step: Any = graph_step(train_step, owners=owners, verify="off", backend="tape") if graphed else train_step
    losses = []
    for index in range(20):
        if index == 10:
            change()
        losses.append(step(torch.ones(2, 3)).item())
    return losses, step


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name: str) -> None:
    graphed, step = _run(CASES[name](), graphed=True)
    assert step.stats.captured == 2, "before and after"
    _as_it_was()
    eager, _ = _run(CASES[name](), graphed=False)
    assert graphed == eager
    assert eager[10] > 2 * eager[9]


class _Key:
    """Can be referred to weakly."""


_VARIABLE: ContextVar[float] = ContextVar("scale", default=1.0)


def _refused(name: str) -> Callable[[], float]:
    key = _Key()
    if name == "a list":
        items = [1.0] * 70_000
        return lambda: items[66_000]
    if name == "a dictionary":
        table = dict.fromkeys(range(70_000), 1.0)
        return lambda: table[66_000]
    if name == "objects in a list":
        things = [SimpleNamespace(factor=1.0) for _ in range(5000)]
        return lambda: things[4500].factor
    if name in ("an object far away", "a number that is too far away"):
        first = last = SimpleNamespace(after=None, factor=1.0)
        count, times = (40, 35) if name == "an object far away" else (24, 24)
        for _ in range(count):
            last.after = SimpleNamespace(after=None, factor=1.0)
            last = last.after
        return lambda: _follow(first, times).factor
    if name == "a view of a dictionary":
        values = {"scale": 1.0}.values()
        return lambda: sum(values)
    if name == "objects in an array":
        array = np.array([0.5, None])
        return lambda: float(array[0])
    if name == "a context variable":
        return lambda: _VARIABLE.get()
    if name == "WeakSet":
        members = weakref.WeakSet([key])
        return lambda: float(key in members)
    if name == "WeakKeyDictionary":
        weak = weakref.WeakKeyDictionary({key: 1.0})
        return lambda: weak[key]
    weak_values = weakref.WeakValueDictionary({"a": key})
    return lambda: float(weak_values["a"] is key)


def _follow(thing: Any, times: int) -> Any:
    for _ in range(times):
        thing = thing.after
    return thing


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "a list",
            r"reads items\[4096:\], of 70000 items; a container of more than 65536 items is not compared before each",
        ),
        ("a dictionary", r"reads table\[4096:\], of 70000 items; .*Keep them in a tensor or a tuple"),
        (
            "objects in a list",
            r"reads things\[4096:\], of which there are more than 4096; their content is not compared before each",
        ),
        (
            "an object far away",
            r"reads first(\.after)+, which is more than 24 attributes deep; a value at that depth is not.*owners=",
        ),
        ("a number that is too far away", r"reads first(\.after){24}\.\w+, which is more than 24 attributes deep"),
        ("a view of a dictionary", r"reads values, a dict_values, whose object is not.*Use the object itself"),
        ("a context variable", r"reads _VARIABLE, a ContextVar, whose object is not.*Use the object itself"),
        ("objects in an array", r"reads array, an array of Python objects, whose content is not.*Keep them in a list"),
        (
            "WeakSet",
            r"reads members, a WeakSet, from which items disappear by themselves and which is not.*in a dict",
        ),
        ("WeakKeyDictionary", r"reads weak, a WeakKeyDictionary, .*pass allow=\('weak',\)"),
        ("WeakValueDictionary", r"reads weak_values, a WeakValueDictionary, from which items disappear"),
    ],
)
def test_what_nobody_would_see_is_refused(name: str, message: str) -> None:
    with pytest.raises(HostScalarError, match=message):
        _run((_refused(name), lambda: None), graphed=True)


class _Buffered:
    """Holds objects of torch's that hold values."""

    def __init__(self) -> None:
        self.prior = Normal(torch.zeros(2), torch.ones(2), validate_args=False)
        self.memory = TensorDataset(torch.arange(4.0))
        self.part = Subset(self.memory, [1, 2])


_OBJECTS: dict[str, tuple[Callable[[_Buffered], Tensor], Callable[[_Buffered], object]]] = {
    "a distribution": (
        lambda held: held.prior.log_prob(torch.ones(2)).sum(),
        lambda held: setattr(held.prior, "scale", torch.full((2,), 2.0)),
    ),
    "a dataset": (
        lambda held: held.memory[:2][0].sum(),
        lambda held: setattr(held.memory, "tensors", (torch.arange(4.0) + 5,)),
    ),
    "a part of a dataset": (lambda held: held.part[0][0], lambda held: held.part.indices.reverse()),
}


@pytest.mark.parametrize("name", _OBJECTS)
def test_what_torchs_own_objects_hold(name: str) -> None:
    """Distributions and datasets are compared like objects of the user's."""
    read, change = _OBJECTS[name]

    def run(*, graphed: bool) -> list[float]:
        held = _Buffered()

        def step(x: Tensor) -> Tensor:
            return x * read(held)

        call: Any = graph_step(step, verify="off", backend="tape") if graphed else step
        found = []
        for number in range(20):
            if number == 12:
                change(held)
            found.append(call(torch.ones(())).item())
        assert not graphed or call.stats.replayed >= 10
        return found

    assert run(graphed=True) == run(graphed=False)
    assert len(set(run(graphed=False))) == 2


def test_a_distribution_that_each_step_makes_anew() -> None:
    """Its tensors are bound again in each replay, like those of an object of the user's."""

    def run(*, graphed: bool) -> list[float]:
        held = _Buffered()

        def step(x: Tensor) -> Tensor:
            held.prior = Normal(x, x.exp(), validate_args=False)
            return held.prior.entropy().sum()

        call: Any = graph_step(step, owners={"held": held}, backend="tape") if graphed else step
        found = []
        for number in range(20):
            found += [call(torch.full((2,), float(number))).item(), held.prior.loc.sum().item()]
        assert not graphed or call.stats.replayed >= 10
        return found

    assert run(graphed=True) == run(graphed=False)


@pytest.mark.parametrize("allow", [(), ("logging",)])
def test_a_step_that_logs_is_told_once(allow: tuple[str, ...]) -> None:
    """Only eager calls do; what a logger leaves out is not told."""
    logger = logging.Logger("of its own", logging.INFO)
    logger.addHandler(logging.NullHandler())

    def step(x: Tensor) -> Tensor:
        logger.debug("never")
        logger.info("here")
        return x * 2

    call = graph_step(step, backend="tape", allow=allow)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            call(torch.ones(2))
    told = [str(warning.message) for warning in caught]
    assert len(told) == (0 if allow else 1)
    text = r"the step calls logging at test_blind_spots\.py:\d+ in step: .*info.*so only eager calls write"
    assert all(re.search(text, line) for line in told)


def _warnings_of(write: Callable[[], object], **options: Any) -> list[str]:
    """What a step that calls ``write`` is told in eight calls."""

    def step(x: Tensor) -> Tensor:
        write()
        return x * 2

    call = graph_step(step, backend="tape", **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            call(torch.ones(2))
    assert call.stats.replayed > 0
    return [str(warning.message) for warning in caught]


TARGETS: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: path.open("w"),
    "bytes": lambda path: path.open("wb"),
    "raw": lambda path: path.open("wb", buffering=0),
    "string": lambda path: io.StringIO(),
    "queue": lambda path: SimpleQueue(),
    "path": lambda path: path,
}
WRITES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "TextIOWrapper.write": ("text", lambda file: file.write("a line")),
    "TextIOWrapper.writelines": ("text", lambda file: file.writelines(["a line"])),
    "BufferedWriter.write": ("bytes", lambda file: file.write(b"a line")),
    "FileIO.write": ("raw", lambda file: file.write(b"a line")),
    "StringIO.write": ("string", lambda file: file.write("a line")),
    "sys.stdout.write": ("path", lambda path: sys.stdout.write("a line")),
    "sys.stderr.write": ("path", lambda path: sys.stderr.write("a line")),
    "json.dump": ("text", lambda file: json.dump({"a": 1}, file)),
    "pickle.dump": ("bytes", lambda file: pickle.dump(1, file)),
    "writer.writerow": ("text", lambda file: csv.writer(file).writerow([1])),
    "csv.writerow": ("text", lambda file: csv.DictWriter(file, ["a"]).writerow({"a": 1})),
    "torch.save": ("path", lambda path: torch.save(1, path)),
    "pathlib.write_text": ("path", lambda path: path.write_text("a line")),
    "SimpleQueue.put": ("queue", lambda queue: queue.put(1)),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_step_that_writes_is_told_once(name: str, tmp_path: Path) -> None:
    """Files, streams and queues get what eager calls write: the call and its line are named."""
    kind, write = WRITES[name]
    target = TARGETS[kind](tmp_path / "written")
    told = _warnings_of(lambda: write(target))
    text = (
        rf"the step calls {re.escape(name)} at test_blind_spots\.py:\d+ in .*so only eager calls "
        r"write\. Return the values and write them after"
    )
    assert len(told) == 1
    assert re.search(text, told[0])
    assert re.search(rf"or pass allow=\('{re.escape(name)}',\)", told[0])
    assert _warnings_of(lambda: write(target), allow=(name,)) == []
    if isinstance(target, io.IOBase):
        target.close()


def test_what_libraries_write_is_not_told(tmp_path: Path) -> None:
    """How they write is their affair, and what makes a string writes nothing."""
    queue: Queue[int] = Queue()

    def write() -> None:
        warnings.warn("something odd", RuntimeWarning, stacklevel=1)
        json.dumps({"a": 1})
        pprint({"a": 1}, stream=file)
        queue.put(1)

    with (tmp_path / "written").open("w") as file:
        told = _warnings_of(write)
    assert [line for line in told if "the step calls" in line] == []
    # What a queue of Python's own gets is repeated, as all that a step appends.
    assert queue.qsize() == 8


def test_what_is_weakly_referenced_and_reached_otherwise() -> None:
    """It is guarded where it is reached."""
    holder = Holder()
    vars(holder)["table"] = {"scale": 1.0}
    reference = weakref.ref(holder)

    def read() -> float:
        return reference().table["scale"] * holder.value  # type: ignore[union-attr]

    case = read, lambda: vars(holder)["table"].update(scale=3.0)
    eager, _ = _run(case, graphed=False)
    vars(holder)["table"]["scale"] = 1.0
    graphed, call = _run(case, graphed=True)
    assert graphed == eager
    assert call.stats.captured == 2


@pytest.mark.parametrize("allow", [(), ("zlib.crc32",)])
def test_a_function_of_an_extension_module_is_named_once(
    allow: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any that is neither Python's own nor torch's: one of Python's own stands in for it."""
    monkeypatch.setattr(kinds, "FOREIGN", kinds.FOREIGN - {"zlib"})

    def step(x: Tensor) -> Tensor:
        return x * (zlib.crc32(b"x") % 3)

    call = graph_step(step, verify="off", backend="tape", allow=allow)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (2, 3):
            for _ in range(8):
                call(torch.ones(rows))
    told = [str(warning.message) for warning in caught if "extension module" in str(warning.message)]
    assert len(told) == (0 if allow else 1)
    assert all(
        "the step calls zlib.crc32, a function of an extension module, at test_blind_spots.py" in t for t in told
    )
