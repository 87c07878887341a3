"""What a step's code tells of a tensor that no operator works with: that it is there, its class, its geometry."""

from __future__ import annotations

import re
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from graphplan import GuardError, HostScalarError, capture, compile_plan
from graphplan.compare import comparing
from graphplan.owners.tensor_metadata import metadata_of
from tests.crossing import by_key, each
from tests.models import CALLS, Memory, Mlp, float_batches
from tests.twins import (
    BEFORE_REPLAY,
    LAST_TRACE,
    SECOND_TRACE,
    WARMUP,
    Rig,
    assert_equals_eager,
    assert_refused,
    assert_same_as_eager,
    assert_same_runs,
    build,
    drive,
    managed,
)

WHEN = 11
"""A call between two checks, after which the host changes something."""


@pytest.fixture
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With graphplan's guards in C++, where they were built, and with torch's and Python's."""
    implementation = getattr(request, "param", "C++")
    if implementation == "C++" and comparing.Tensors is None:
        pytest.skip("not built: python -m graphplan.compare says why")
    if implementation == "Python":
        monkeypatch.setattr(comparing, "Tensors", None)


class Reader(nn.Module):
    """Has a tensor in many places."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(4, 8))
        self.weight = nn.Parameter(torch.zeros(3))
        self.seen = torch.zeros(4, 8)
        self.pair = (torch.zeros(2), 1)
        self.list = [torch.zeros(1), torch.zeros(2)]
        self.table = {"a": torch.zeros(1), "b": torch.zeros(2)}
        self.made = defaultdict(partial(torch.zeros, 3), a=torch.zeros(2))
        self.queue = deque([torch.zeros(1), torch.zeros(2)], maxlen=2)
        self.aux = nn.Linear(2, 2)
        self.record = Memory(bank=torch.zeros(2), list=[3])
        self.late: Any = None


def _set(name: str, value: Any) -> Callable[[Any], object]:
    return lambda reader: setattr(reader, name, value() if callable(value) else value)


def _wide(reader: Any) -> Any:
    return torch.zeros(8, 4).t() if reader.seen.is_contiguous() else torch.zeros(4, 8)


Case = tuple[Any, ...]
"""What the code tells, how the host changes it, and how the event says so: the last text if no owner is named."""
CASES: dict[str, Case] = {
    "length": (
        lambda r: len(r.bank),
        _set("bank", partial(torch.ones, 6, 8)),
        r"bank\.shape was \(4, 8\) and is \(6, 8",
    ),
    "shape": (lambda r: r.seen.shape[0], _set("seen", partial(torch.ones, 6, 8)), r"seen\.shape was \(4, 8\) and is"),
    "shape in place": (
        lambda r: r.seen.shape[0],
        lambda r: r.seen.resize_(2, 8),
        r"seen\.shape was \(4, 8\) and is \(2",
    ),
    "dimensions": (lambda r: r.seen.ndim, _set("seen", partial(torch.ones, 4)), r"seen\.shape was .* and is \(4,\)"),
    "dtype": (
        lambda r: 1 + r.seen.is_floating_point(),
        _set("seen", partial(torch.zeros, 4, 8, dtype=torch.int64)),
        r"seen\.dtype was torch\.float32 and is torch\.int64",
    ),
    "strides": (
        lambda r: 1 + r.seen.is_contiguous(),
        lambda r: setattr(r, "seen", _wide(r)),
        r"seen\.stride was \(8, 1\) and is \(1, 4\)",
    ),
    "requires_grad": (
        lambda r: 1 + r.seen.requires_grad,
        lambda r: r.seen.requires_grad_(),
        r"seen\.requires_grad was False and is True",
    ),
    "sparse": (
        lambda r: 1 + r.seen.is_sparse,
        lambda r: setattr(r, "seen", r.seen.to_sparse()),
        r"seen\.layout was torch\.strided and is torch\.sparse_coo",
    ),
    "class": (
        lambda r: 1 + isinstance(r.record.bank, nn.Parameter),
        lambda r: setattr(r.record, "bank", nn.Parameter(torch.zeros(2), requires_grad=False)),
        r"the type of .*bank was Tensor and is Parameter",
    ),
    "None": (lambda r: 1 + (r.seen is None), _set("seen", None), r"seen was a Tensor and is None"),
    "no buffer": (lambda r: 1 + (r.bank is None), _set("bank", None), r"bank was a Tensor and is None"),
    "no parameter": (lambda r: 1 + (r.weight is None), _set("weight", None), r"weight was a Parameter and is None"),
    "parameter": (
        lambda r: len(r.weight),
        _set("weight", lambda: nn.Parameter(torch.zeros(5))),
        r"weight\.shape was \(3,\) and is \(5,\)",
    ),
    "a layer's": (
        lambda r: 1 + (r.aux.bias is None),
        lambda r: setattr(r.aux, "bias", None),
        r"aux\.bias was a Parameter",
    ),
    "gone": (
        lambda r: 1 + hasattr(r.record, "bank"),
        lambda r: delattr(r.record, "bank"),
        r"record\.bank was a Tensor and is gone",
    ),
    "a number": (lambda r: 1 + isinstance(r.seen, Tensor), _set("seen", 3), r"seen was a Tensor and is 3"),
    "item of a tuple": (
        lambda r: len(r.pair[0]),
        lambda r: setattr(r, "pair", (torch.zeros(3), 1)),
        r"pair was \(a Tensor, 1\) and is",
    ),
    "number in a tuple": (
        lambda r: r.pair[1],
        lambda r: setattr(r, "pair", (r.pair[0], 2)),
        r"pair was \(a Tensor, 1\) and is \(a Tensor, 2\)",
    ),
    "in place in a tuple": (
        lambda r: len(r.pair[0]),
        lambda r: r.pair[0].resize_(1),
        r"pair was \(a Tensor, 1\) and is",
    ),
    "item of a list": (
        lambda r: 1 + (r.list[1] is None),
        lambda r: r.list.__setitem__(1, None),
        r"list\[1\] was a Tensor and is None",
    ),
    "item of a dictionary": (
        lambda r: len(r.table["b"]),
        lambda r: r.table.update(b=torch.zeros(5)),
        r"table\.b\.shape was \(2,\) and is \(5,\)",
    ),
    "item that is made": (
        lambda r: len(r.made["a"]),
        lambda r: r.made.pop("a"),
        r"len\(.*made\)|made\.a was a Tensor|made had the keys \('a',\)",
    ),
    "another container": (
        lambda r: len(r.table["b"]),
        _set("table", lambda: {"a": torch.zeros(1), "b": torch.zeros(4)}),
        r"table\.b\.shape was \(2,\) and is \(4,\)",
    ),
    "by a computed name": (
        lambda r: len(getattr(r, "".join(("ba", "nk")))),
        _set("bank", partial(torch.ones, 6, 8)),
        r"bank\.shape was \(4, 8\) and is \(6, 8\)",
    ),
    "as a size": (
        lambda r: torch.zeros(r.seen.shape).numel(),
        _set("seen", partial(torch.ones, 6, 8)),
        r"seen\.shape was \(4, 8\) and is \(6, 8\)",
    ),
    "a late tensor": (lambda r: 1 + (r.late is None), _set("late", torch.zeros(())), r"late was None and is a Tensor"),
    "a late list": (lambda r: 1 + (r.late is None), _set("late", [3]), r"late was None and is an object"),
    "keys": (
        lambda r: len(r.table),
        lambda r: r.table.update(c=torch.zeros(1)),
        r"table had the keys \('a', 'b'\) and has the keys \('a', 'b', 'c'\)",
    ),
    "no dictionary": (
        lambda r: len(r.table or ()),
        _set("table", None),
        r"table had the keys \('a', 'b'\) and is None",
    ),
    "no list": (
        lambda r: len(r.record.list or ()),
        lambda r: setattr(r.record, "list", None),
        r"list had the length 1 and is None, and the step's code reads it",
        r"list\[0\] was 3 and is gone, and the step's code reads it",
    ),
}


def reading_rig(read: Callable[[Any], Any], after: Callable[[Any, int], object], *, named: bool = True) -> Rig:
    """A training step whose loss depends on what ``read`` tells of a :class:`Reader`."""
    model, reader = Mlp(), Reader()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y) + out.square().mean() * read(reader)
        loss.backward()
        optimizer.step()
        return loss

    owners = {"model": model, "optimizer": optimizer} | ({"reader": reader} if named else {})
    return Rig(train_step, owners, list(float_batches(CALLS)), after=partial(after, reader))


def _once(change: Callable[[Any], object], reader: Any, index: int) -> None:
    if index == WHEN:
        change(reader)


@pytest.mark.usefixtures("guards")
@each(
    case=by_key(CASES), guards=["C++", "Python"], named=by_key({"an owner": True, "a name": False}), indirect=["guards"]
)
@pytest.mark.crossed(2)
def test_what_code_tells_of_a_tensor_is_guarded(case: Case, named: bool) -> None:
    """A change leads to another capture, and is named."""
    read, change, *texts = case
    make = partial(reading_rig, read, partial(_once, change), named=named)
    step = assert_same_as_eager(make, verify="off")
    assert step.stats.captured == 2
    assert step.stats.replayed >= CALLS - 2 * BEFORE_REPLAY
    text = texts[0 if named else -1]
    assert any(re.search(text, event) for event in step.stats.events), step.stats.events


@each(case=by_key(CASES), when=by_key({"before the capture": SECOND_TRACE, "between the traces": SECOND_TRACE - 1}))
@pytest.mark.crossed(2, 1)
def test_a_change_before_there_is_a_program(case: Case, when: int) -> None:
    """What is captured is the step that was traced: another one is traced first."""
    read, change, *_ = case

    def after(reader: Any, index: int) -> None:
        if index == when:
            change(reader)

    make = partial(reading_rig, read, after)
    step = assert_same_as_eager(make, verify="off")
    assert step.stats.replayed >= CALLS - 2 * BEFORE_REPLAY
    assert step.stats.captured == 1


def _grow(reader: Any, index: int) -> None:
    reader.seen = torch.zeros(4 + index, 8)


def _truth(reader: Any) -> int:
    return 1 if len(reader.seen) else 2


def test_what_is_another_size_in_each_step_is_not_refused() -> None:
    """No number of captures could follow that. If anything depended on it, traces would differ, or the first check."""
    assert_equals_eager(partial(reading_rig, _truth, _grow), replayed=CALLS - BEFORE_REPLAY - 2)


def _come_and_go(reader: Any, index: int) -> None:
    reader.seen = None if index % 2 else torch.zeros(4, 8)


def test_what_is_there_before_every_second_step_is_refused() -> None:
    """The error names it, and what to do."""
    both = "(None before one step and a Tensor|a Tensor before one step and None)"
    text = rf"reads reader\.seen( at .*)?, which is {both} before the"
    make = partial(reading_rig, lambda reader: 1 + 0 * (reader.seen is None), _come_and_go)
    assert_refused(make, HostScalarError, text, r"allow=\('reader\.seen',\)", done=LAST_TRACE)


def test_what_is_declared_harmless_may_be_of_any_size() -> None:
    """Code that names it, but whose results do not depend on it."""
    make = partial(reading_rig, _truth, _grow)
    assert_equals_eager(make, allow=("reader.seen",))


def test_what_is_only_perhaps_looked_at_may_be_of_any_size() -> None:
    """Code that takes attributes by computed names says nothing of this one."""
    make = partial(reading_rig, lambda r: len(getattr(r, "".join(("ba", "nk")))), _grow)
    assert_equals_eager(make)


@pytest.mark.usefixtures("guards")
@pytest.mark.parametrize("guards", ["C++", "Python"], indirect=True)
def test_another_tensor_that_is_alike_needs_no_capture() -> None:
    """The host may put another one there before each step."""

    def replace(reader: Any, index: int) -> None:
        reader.seen = torch.full((4, 8), float(index))
        reader.pair = (torch.full((2,), float(index)), 1)
        reader.weight = nn.Parameter(torch.full((3,), float(index)))
        reader.list[0] = torch.full((1,), float(index))

    def read(reader: Any) -> Any:
        return len(reader.seen) + len(reader.pair[0]) + len(reader.weight) + len(reader.list[0])

    step = assert_equals_eager(partial(reading_rig, read, replace))
    assert not step.stats.events


def test_nobody_holds_what_is_only_looked_at() -> None:
    """What the host replaces is gone."""
    rig = build(partial(reading_rig, lambda r: len(r.seen), lambda reader, index: None))
    step = managed(rig)
    drive(rig, step, 10)
    assert step.stats.replayed
    reader = rig.owners["reader"]
    held = weakref.ref(reader.seen)
    reader.seen = torch.zeros(4, 8)
    assert held() is None


def test_what_nobody_names_may_change() -> None:
    """Tensors of an owner that the code has nothing to do with."""

    def change(reader: Any, index: int) -> None:
        reader.record.bank = torch.zeros(index)
        reader.seen = None if index % 2 else torch.zeros(index)
        reader.list.append(torch.zeros(index))

    assert_equals_eager(partial(reading_rig, lambda r: len(r.aux.weight), change))


def test_what_lies_in_a_list_that_grows_may_go() -> None:
    """A list whose length is another one in each step is not compared, and so is nothing that lies in it."""

    def change(reader: Any, index: int) -> None:
        reader.list.append(torch.zeros(1))
        if index % 7 == 6:
            reader.list.clear()

    assert_equals_eager(partial(reading_rig, lambda r: 1 + isinstance(r.list, list), change))


def test_a_size_that_comes_back() -> None:
    """Each time it is captured again, and never wrong."""

    def change(reader: Any, index: int) -> None:
        if index in (8, 14):
            reader.seen = torch.zeros(6 if index == 8 else 4, 8)

    make = partial(reading_rig, lambda r: len(r.seen), change)
    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    assert_same_runs(expected, drive(rig, managed(rig, verify="off")))


class Gradual(nn.Module):
    """A model beside another one, whose gradients its step looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.aux = Mlp(), nn.Linear(2, 2)
        self.aux.weight.grad = torch.ones(2, 2)


def gradients_rig(change: Callable[[Any, int], object]) -> Rig:
    """A step that does something else while another layer has gradients."""
    both = Gradual()
    optimizer = SGD(both.model.parameters(), lr=0.05, momentum=0.9, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        out = both.model(x)
        loss = F.cross_entropy(out, y)
        if both.aux.weight.grad is not None:
            loss = loss + out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    owners = {"both": both, "optimizer": optimizer}
    return Rig(train_step, owners, [*float_batches(CALLS), *float_batches(CALLS)], after=partial(change, both))


def test_gradients_that_others_drop() -> None:
    """There is a program for when they are there, and one for when they are not: each is captured once."""

    def change(both: Any, index: int) -> None:
        if index % 8 == 7:
            both.aux.weight.grad = None if both.aux.weight.grad is not None else torch.ones(2, 2)

    make = partial(gradients_rig, change)
    step = assert_equals_eager(make, captured=2, replayed=2 * CALLS - 2 * BEFORE_REPLAY + WARMUP, verify="off")
    assert not any("recapture" in text for text in step.stats.events)


def _looks(reader: Any, x: Tensor) -> Tensor:
    return x.sum() * len(reader.seen)


def test_a_program_by_hand() -> None:
    """It is refused by the name of what changed, before the capture and after it."""
    reader: Any = Reader()
    step, x = partial(_looks, reader), torch.ones(2)
    plan = compile_plan(step, x, owners={"reader": reader})
    assert "tensors of which the step reads no values (reader.seen" in str(plan)
    program = capture(plan, feed=(x,))
    assert program.replay((x,)) == 8
    reader.seen = torch.zeros(5, 8)
    with pytest.raises(
        GuardError,
        match=r"fits: reader\.seen\.shape was \(4, 8\) and is \(5, 8\), and the step.s code reads it; capture",
    ):
        program.replay((x,))
    with pytest.raises(GuardError, match=r"reader\.seen\.shape was \(4, 8\) when the step was traced and is \(5, 8\)"):
        capture(plan, feed=(x,))


def test_a_tensor_of_no_shape_has_traits() -> None:
    """Nested and sparse ones are told apart by what they do have."""
    jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    other = torch.nested.nested_tensor([torch.zeros(4)], layout=torch.jagged, dtype=torch.float64)
    assert metadata_of(jagged) != metadata_of(other)
    assert metadata_of(jagged) == metadata_of(jagged)
    assert metadata_of(torch.zeros(2).to_sparse()) != metadata_of(torch.zeros(2))
