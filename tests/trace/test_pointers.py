"""Queues with a pointer, as contrastive learning has them: each step writes its keys behind those of the step before.

The pointer is another number in each step. Where it is only the beginning of a slice that is written to, one program
serves all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import graph_step
from graphplan.trace.deferred_reads import DeferredReads
from tests.facts import assert_same
from tests.twins import BEFORE_REPLAY, Rig, assert_same_as_eager, build, drive, managed, same_as_eager

SIZE, KEYS, CALLS = 24, 4, 24
Enqueue = Callable[[Any, Tensor], None]

followed = pytest.mark.skipif(sys.version_info < (3, 11), reason="code does not say what it calls")


class Model(nn.Module):
    """An encoder and the keys of its latest batches."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 6)
        self.register_buffer("queue", F.normalize(torch.randn(6, SIZE), dim=0))
        self.register_buffer("rows", torch.zeros(SIZE, 6, dtype=torch.float64))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.place = 0


def of_item(model: Any, keys: Tensor) -> None:
    place = model.pointer.item()
    model.queue[:, place : place + len(keys)] = keys.T
    model.pointer[0] = (place + len(keys)) % SIZE


def of_int(model: Any, keys: Tensor) -> None:
    place = int(model.pointer)
    model.queue[:, place : place + len(keys)] = keys.T
    place = (place + len(keys)) % SIZE
    model.pointer[0] = place


def backwards(model: Any, keys: Tensor) -> None:
    """Counts from the end: the places are negative."""
    place = model.pointer.item() - SIZE
    model.rows[place : place + len(keys)] = keys
    model.pointer[0] = (place + len(keys) + 1) % (SIZE - len(keys))


def of_attribute(model: Any, keys: Tensor) -> None:
    model.rows[model.place : model.place + len(keys)] = keys
    model.place = (model.place + len(keys)) % SIZE


def begins_anew(model: Any, keys: Tensor) -> None:
    """The last keys may be too many."""
    place = int(model.pointer)
    if place + len(keys) >= SIZE:
        model.rows[place:] = keys[: SIZE - place].double()
        model.pointer.zero_()
    else:
        model.rows[place : place + len(keys)] = keys
        model.pointer[0] = place + len(keys)


def chooses_a_row(model: Any, keys: Tensor) -> None:
    """A single place is an index, of which each value needs a program."""
    place = int(model.pointer) % 2
    model.rows[place] = keys[0].double()
    model.pointer[0] = place + 1


def counts_up(model: Any, keys: Tensor) -> None:
    """Gives the number to code in C that takes no stand-in."""
    place = int(model.pointer)
    model.rows[: len(keys)] = keys + torch.arange(place % 2 + 2, device=keys.device).sum()
    model.pointer[0] = 1 - place


def lists(model: Any, keys: Tensor) -> None:
    """The same, in a list that is no place in a tensor."""
    place = int(model.pointer)
    model.rows[: len(keys)] = keys * [1.0, 2.0][place]
    model.pointer[0] = 1 - place


def rig_of(enqueue: Enqueue, *, size: int = KEYS) -> Rig:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)

    def contrast(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        keys = F.normalize(model.encoder(x), dim=1)
        loss = (keys @ model.queue.clone()).square().mean() + (keys.double() @ model.rows.clone().T).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            enqueue(model, keys)
        return loss.detach()

    calls = [(torch.randn(size, 8),) for _ in range(CALLS)]
    return Rig(contrast, {"model": model, "optimizer": optimizer}, calls)


@pytest.mark.parametrize(
    "enqueue", [of_item, pytest.param(of_int, marks=followed), backwards, of_attribute], ids=lambda it: it.__name__
)
def test_one_program_serves_all_places(enqueue: Enqueue, device: torch.device, backend: str) -> None:
    """Of a tensor that the step moves on, and of a Python number."""
    step = same_as_eager(partial(rig_of, enqueue), device, backend)
    # The first trace shows that the step changes what `int()` reads.
    first = BEFORE_REPLAY + (enqueue is of_int)
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - first)
    assert not step.stats.events and step.plan.single is False


@followed
def test_where_a_queue_is_full_the_step_is_eager(device: torch.device, backend: str) -> None:
    """Once in six steps: a replay compares, and ends there."""
    step = same_as_eager(partial(rig_of, begins_anew), device, backend)
    assert step.stats.captured == 1 and step.stats.replayed >= CALLS - BEFORE_REPLAY - 2 - CALLS * KEYS // SIZE
    assert any("begins_anew: `if place + len(keys) >= SIZE:`" in event for event in step.stats.events)


@followed
@pytest.mark.parametrize("enqueue", [chooses_a_row, counts_up, lists], ids=lambda it: it.__name__)
def test_other_uses_take_the_value(enqueue: Enqueue) -> None:
    """Which is read before the step then: each of two has a program."""
    step = assert_same_as_eager(partial(rig_of, enqueue))
    assert step.stats.captured == 2 and step.stats.replayed >= CALLS // 3
    assert any(event.startswith("read before the step: model.pointer") for event in step.stats.events)


def test_a_slice_beyond_the_end_raises_as_in_an_eager_step() -> None:
    """The keys do not fit: nothing is written."""

    def beyond(model: Any, keys: Tensor) -> None:
        place = model.pointer.item()
        model.rows[place : place + len(keys)] = keys
        model.pointer[0] = place + len(keys)

    rig, twin = build(partial(rig_of, beyond, size=5)), build(partial(rig_of, beyond, size=5))
    step = graph_step(rig.step, owners=rig.owners, warmup_steps=1, verify="off")
    for (x,) in rig.calls[:4]:
        assert torch.equal(step(x), twin.step(x))
    assert step.stats.captured == 1
    with pytest.raises(RuntimeError):
        twin.step(rig.calls[4][0])
    with pytest.raises(RuntimeError, match="out of bounds"):
        step(rig.calls[4][0])
    assert torch.equal(rig.owners["model"].rows, twin.owners["model"].rows)


def catches(model: Any, keys: Tensor) -> None:
    """Begins anew where torch says that the keys do not fit."""
    place = model.pointer.item()
    try:
        model.rows[place : place + len(keys)] = keys
        model.pointer[0] = place + len(keys)
    except RuntimeError:
        model.rows[: len(keys)] = keys
        model.pointer[0] = len(keys)


def catches_all(model: Any, keys: Tensor) -> None:
    place = int(model.pointer)
    try:
        model.rows[place : place + len(keys)] = keys
        model.pointer[0] = place + len(keys)
    except Exception:  # noqa: BLE001 - as users' code has it
        model.place += 1
        model.pointer[0] = 0


@pytest.mark.parametrize("enqueue", [catches, catches_all])
@pytest.mark.parametrize("size", [4, 5, 7])
def test_an_error_that_the_step_catches_is_the_eager_steps(enqueue: Enqueue, size: int) -> None:
    """The slice is torch's own then, at whatever place the error comes."""
    for warmup in (1, 2, 3):
        assert_same_as_eager(partial(rig_of, enqueue, size=size), warmup_steps=warmup, verify="off", on_failure="eager")


def test_an_error_that_the_loop_catches_leaves_what_an_eager_step_does() -> None:
    """In a trace, in a capture and in a replay. A capture is undone: here nothing has changed by then."""

    def make(size: int) -> Rig:
        rig = rig_of(of_item, size=size)
        model, optimizer = rig.owners["model"], rig.owners["optimizer"]

        def fills(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            keys, place = model.encoder(x), model.pointer.item()
            with torch.no_grad():
                model.rows[place : place + len(keys)] = keys
                model.pointer[0] = place + len(keys)
            loss = (keys.double() @ model.rows.clone().T).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return replace(rig, step=fills)

    def loop(rig: Rig, step: Callable[..., Any]) -> list[Any]:
        found = []
        for args in rig.calls:
            try:
                found.append(step(*args))
            except RuntimeError:
                rig.owners["model"].pointer.zero_()
                found.append(None)
        return found

    for size in (5, 7):
        rig, twin = build(partial(make, size)), build(partial(make, size))
        step = graph_step(rig.step, owners=rig.owners, on_failure="eager", verify="off")
        assert_same(dict(enumerate(loop(rig, step))), dict(enumerate(loop(twin, twin.step))))
        assert_same(*(each.owners["model"].state_dict() for each in (rig, twin)))
        assert step.stats.replayed


def alternates(model: Any, keys: Tensor) -> None:
    """Branches on the number, and writes to a slice that has nothing to do with it."""
    place = int(model.pointer)
    model.rows[0:4] = keys if place % 2 == 0 else -keys.double()
    model.pointer[0] = 1 - place


def chooses(model: Any, keys: Tensor) -> None:
    place = int(model.pointer)
    model.rows[0:4] = keys * (2.0 if place in (1, 2) else 1.0)
    model.pointer[0] = (place + 1) % 4


@pytest.mark.parametrize(("enqueue", "programs"), [(alternates, 2), (chooses, 4)])
def test_few_values_on_which_a_step_branches_have_a_program_each(enqueue: Enqueue, programs: int) -> None:
    """They do not wait: a replay would compare, and end where the other way is taken."""

    def make() -> Rig:
        rig = rig_of(enqueue)
        rig.calls *= 5
        return rig

    step = assert_same_as_eager(make)
    assert step.stats.captured in (programs, 4) and step.stats.replayed >= 3 * CALLS


def writes_text(model: Any, keys: Tensor) -> None:
    """Code in C asks whether it is an integer."""
    text = json.dumps({"place": int(model.pointer)}, default=str)
    model.rows[0:4] = keys * len(text)
    model.pointer[0] = 1 - int(model.pointer)


def steps_a_generator(model: Any, keys: Tensor) -> None:
    """Python's integers do not overflow."""
    seed = model.pointer.item()
    model.pointer.fill_((seed * 6364136223846793005 + 1442695040888963407) % (2**63 - 25))
    model.rows[0:4] = keys


@pytest.mark.filterwarnings("ignore:graphplan runs")
@pytest.mark.parametrize("enqueue", [writes_text, steps_a_generator])
def test_numbers_that_are_no_places(enqueue: Enqueue) -> None:
    """Texts and remainders of large numbers are those of an eager step."""
    assert_same_as_eager(partial(rig_of, enqueue), verify="off", on_failure="eager")


@pytest.mark.parametrize(
    "compute",
    [
        lambda n: (n + 2**62 + 2**62) % 1000, lambda n: ((n + 1) * 2**62 * 4) % 1000003,
        lambda n: (n * 48271 * 10**15 + 11) // 2147483647, lambda n: (n + 0.5) % 3,
    ],
)  # fmt: skip
def test_large_remainders_are_computed_by_python(compute: Callable[[Any], Any]) -> None:
    """What does not fit into 64 bits is not computed on the device."""
    with DeferredReads():
        made = torch.tensor(compute(torch.tensor(7).item()))
    assert made.item() == compute(7)


@pytest.mark.parametrize(
    ("index", "shape"),
    [
        (lambda n: slice(n, n + 3), (3, 5)),
        (lambda n: (slice(None), slice(n, n + 2)), (7, 2)),
        (lambda n: slice(n, 2 + n), (2, 5)),
        (lambda n: slice(n - 7, n - 7 + 2), (2, 5)),
        # What is no such slice takes the value.
        (lambda n: slice(n, n + 3, 2), (2, 5)),
        (lambda n: slice(n, n + 1), (1, 5)),
        (lambda n: slice(n, n + 3), (5,)),
        (lambda n: slice(n, None), (5, 5)),
        (lambda n: slice(0, n), (2, 5)),
        (lambda n: (slice(n, n + 3), slice(0, 2)), (3, 2)),
        (lambda n: (slice(n, n + 3), 1), (3,)),
        (lambda n: (..., slice(n, n + 2)), (7, 2)),
        (lambda n: n, (5,)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_slices_are_written_to_as_by_torch(
    index: Callable[[Any], Any], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Of other types, and where it begins from the end."""
    target, value = torch.arange(35.0).reshape(7, 5), torch.randn(shape).mul(9).to(dtype)
    expected = target.clone()
    expected[index(2)] = value
    with DeferredReads():
        target[index(torch.tensor(2).item())] = value
    assert torch.equal(target, expected)


def test_a_slice_may_get_what_lies_beside_it() -> None:
    """In the same memory."""
    target = torch.arange(12.0)
    with DeferredReads():
        place = torch.tensor(4).item()
        target[place : place + 3] = target[:3]
    assert target.tolist() == [0, 1, 2, 3, 0, 1, 2, 7, 8, 9, 10, 11]


def test_gradients_flow_through_slices() -> None:
    """Where they are asked for, the slice is torch's own."""
    value = torch.ones(2, requires_grad=True)
    with DeferredReads():
        place = torch.tensor(1).item()
        target = torch.zeros(4)
        target[place : place + 2] = value * 3
    target.sum().backward()
    assert value.grad is not None and value.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("divisor", [7, -7, 1, 3.5])
@pytest.mark.parametrize("number", [0, 5, 13, -13, -1])
def test_remainders_are_those_of_python(number: int, divisor: float) -> None:
    """Of integers, where the tensor is: they have the sign of the divisor."""
    with DeferredReads():
        waiting = torch.tensor(number).item()
        made = torch.stack([torch.tensor(waiting % divisor), torch.tensor(waiting // divisor)])
    assert made.tolist() == [number % divisor, number // divisor]


def test_the_pointer_that_was_logged_is_the_one_before() -> None:
    """A number that waits is returned with its value."""

    def logs(model: Any, keys: Tensor) -> None:
        of_item(model, keys)
        model.place = model.pointer.item()

    rig = build(partial(rig_of, logs))
    step = managed(rig)
    drive(rig, step)
    assert step.stats.replayed > CALLS // 2
    assert rig.owners["model"].place == int(rig.owners["model"].pointer) == CALLS * KEYS % SIZE
