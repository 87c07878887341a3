"""Checks that there is no room for: put on the host, or left out with a word about it; never a step done twice.

A CPU has no second memory and never runs out of it in a way that torch reports, so what is free, and the errors, are
made here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from graphplan.backends.tape import TapeBackend
from graphplan.step import memory_budget as memory
from graphplan.step import replays
from graphplan.step.memory_budget import find_room, room_beside
from graphplan.verify import check
from tests.failure_modes.naive import changing_rig, loss_of, stay
from tests.models import CALLS, Box, attributes, float_batches, training_rig
from tests.twins import (
    BEFORE_REPLAY,
    BEFORE_TWO,
    Record,
    Rig,
    assert_same_runs,
    build,
    drive,
    managed,
)

HOST, DEVICE = torch.device("cpu"), torch.device("cuda", 0)
make_rig = partial(training_rig, "mlp", "adamw", sizes=(8,) * CALLS)


def free(monkeypatch: pytest.MonkeyPatch, **nbytes: int | None) -> None:
    """Let ``nbytes`` be free on each type of device."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: nbytes[device.type])


def test_where_copies_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device where there is room for three copies and some, else on the host, else nowhere."""
    free(monkeypatch, cuda=400, cpu=400)
    assert find_room(100, DEVICE) == (DEVICE, "")
    free(monkeypatch, cuda=300, cpu=400)
    assert find_room(100, DEVICE) == (HOST, "")
    free(monkeypatch, cuda=300, cpu=None)
    assert find_room(100, DEVICE) == (HOST, "")
    free(monkeypatch, cuda=1 << 20, cpu=1 << 20)
    assert find_room(1 << 20, DEVICE) == (
        None,
        "a check needs 4 MiB for copies of parameters and state, and neither cuda:0 nor the host has that much free",
    )


def test_copies_that_would_take_much_more_than_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to the host, whatever is free on the device."""
    free(monkeypatch, cuda=1 << 30, cpu=1 << 30)
    assert find_room(1000, DEVICE, lambda nbytes: nbytes > 3600) == (HOST, "")
    assert find_room(1000, DEVICE, lambda nbytes: nbytes == 3600) == (DEVICE, "")


def test_one_copy_needs_less_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Than the three of a whole check."""
    free(monkeypatch, cuda=1200, cpu=1200)
    assert find_room(1000, DEVICE)[0] is None
    assert find_room(1000, DEVICE, lambda nbytes: nbytes == 1200, copies=1)[0] == DEVICE


def test_a_part_of_a_copy_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as may be taken and leaves enough for the eager step, but for a margin."""
    backend = TapeBackend()
    free(monkeypatch, cuda=1500)
    assert room_beside(DEVICE, backend, 0, 300) == 1000
    assert room_beside(DEVICE, backend, 0, 1600) == 0
    monkeypatch.setattr(backend, "room", lambda: 600)
    assert room_beside(DEVICE, backend, 0, 300) == 500
    assert room_beside(DEVICE, backend, 120, 300) == 400
    free(monkeypatch, cuda=None)
    assert room_beside(DEVICE, backend, 0, 300) == 500
    monkeypatch.setattr(backend, "room", lambda: -600)
    assert room_beside(DEVICE, backend, 0, 300) == 0


@pytest.mark.twice
@pytest.mark.parametrize("beside", [0, 600])
def test_copies_of_one_check_lie_in_several_places(
    equals_eager: Callable[..., Any], device: torch.device, monkeypatch: pytest.MonkeyPatch, beside: int
) -> None:
    """Where the device has room for one copy alone, the next one goes to the host but for the first ``beside`` bytes,
    and the two are compared.
    """
    asked: list[int] = []
    answers = cycle((HOST, device, HOST))

    def few(nbytes: int, where: torch.device, may_take: Any, copies: int = 3) -> tuple[torch.device, str]:
        asked.append(copies)
        return next(answers), ""

    monkeypatch.setattr(replays, "find_room", few)
    monkeypatch.setattr(replays, "room_beside", lambda *_: beside)
    step = equals_eager(make_rig, verify=1)
    assert step.stats.verified == step.stats.replayed == CALLS - BEFORE_REPLAY
    assert asked == [3, 1, 1] * step.stats.verified


def test_what_is_free_on_the_host() -> None:
    """Some of this machine's memory; nothing is known where the system does not tell."""
    found = memory.free_bytes(HOST)
    assert found is None or 0 < found < 1 << 60


def run_eagerly(make: Callable[[], Rig]) -> Record:
    """A rig's calls as they are."""
    rig = build(make)
    return drive(rig, rig.step)


@pytest.mark.twice
def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs, each replayed without checks and with one event; the numbers are eager's."""
    free(monkeypatch, cpu=1 << 40)
    monkeypatch.setattr(memory, "_MARGIN", 1e9)
    make = partial(training_rig, "mlp", "adamw", sizes=[5 if index % 2 else 8 for index in range(40)])
    expected = run_eagerly(make)
    rig = build(make)
    step = managed(rig, verify=1)
    assert_same_runs(expected, drive(rig, step))
    assert (step.stats.replayed, step.stats.verified) == (len(rig.calls) - BEFORE_TWO, 0)
    assert sum(step.stats.events.values()) == 2
    for event in step.stats.events:
        assert event.startswith("not checked against eager: a check needs ")
        assert event in step.report()


def exhausted_rig(runs_out: bool) -> Rig:
    """A step that may run out of memory in the first check, when all of it is done."""
    full = Box(False)

    def each(model: Any, optimizer: Any, index: int) -> None:
        full.item = runs_out and index == BEFORE_REPLAY - 1

    rig = changing_rig(stay, loss, prepare=attributes(calls=0, seen=list), each=each, calls=float_batches(CALLS))
    inner = rig.step

    def step(*batch: Tensor) -> Tensor:
        result = inner(*batch)
        if full.item:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")
        return result

    rig.step = step
    return rig


def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy, with some Python effects that replays repeat."""
    model.calls += 1
    value = loss_of(model, x, y)
    model.seen.append(value.detach())
    return value


@pytest.mark.twice
def test_no_memory_for_the_eager_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the eager half has done is undone, and the call is the replay that it would have been without a check."""
    expected = run_eagerly(partial(exhausted_rig, runs_out=False))
    rig = build(partial(exhausted_rig, runs_out=True))
    step = managed(rig, verify=1)
    made, alive = [], []

    def make(*args: Any, **kwargs: Any) -> check.Check:
        made.append(weakref.ref(it := check.Check(*args, **kwargs)))
        return it

    def replay(runner: replays.Replays, *args: Any) -> Any:
        alive.extend(it() for it in made)
        return original(runner, *args)

    original = replays.Replays.replay
    monkeypatch.setattr(replays, "Check", make)
    monkeypatch.setattr(replays.Replays, "replay", replay)
    assert_same_runs(expected, drive(rig, step))
    assert alive
    assert set(alive) == {None}, "the replay would lie beside the copies of the check"
    assert (step.stats.replayed, step.stats.verified) == (CALLS - BEFORE_REPLAY, 0)
    assert list(step.stats.events) == ["not checked against eager: CUDA out of memory. Tried to allocate 2.00 GiB."]


@pytest.mark.parametrize("where", ["differing", "differing_values"])
@pytest.mark.twice
def test_no_memory_to_compare(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager half is done by then: its outcome stands, nothing is replayed on top of it."""
    expected = run_eagerly(make_rig)

    def fail(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(check, where, fail)
    rig = build(make_rig)
    step = managed(rig, verify=1)
    assert_same_runs(expected, drive(rig, step))
    assert (step.stats.replayed, step.stats.verified) == (CALLS - BEFORE_REPLAY, 0)
    assert list(step.stats.events) == ["not checked against eager: CUDA out of memory"]


@pytest.mark.twice
def test_no_memory_for_the_second_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replays tell noise from faults; without room for the second one the fault stays open, the numbers eager's."""
    hidden = Box(1.0)

    def each(model: Any, optimizer: Any, index: int) -> None:
        hidden.item = 2.0 if index >= BEFORE_REPLAY - 1 else 1.0

    make = partial(changing_rig, stay, lambda model, x, y: loss_of(model, x, y) * hidden.item, each=each)
    rig = build(make)
    step = managed(rig, verify=1)
    original, calls = check.Snapshot, []

    def snapshot(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*args, **kwargs)

    monkeypatch.setattr(check, "Snapshot", snapshot)
    done = BEFORE_REPLAY + 1
    found = drive(rig, step, done)
    hidden.item = 1.0
    rig = build(make)
    assert_same_runs(drive(rig, rig.step, done), found)
    assert list(step.stats.events) == ["not checked against eager: CUDA out of memory"]


def test_checks_that_may_take_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies go to the host, and the eager step between two replays leaves gradients where replays leave them."""
    left: list[list[Tensor]] = []

    def run_between(backend: Any, body: Any, recording: Any, nbytes: int, tensors: Any) -> Any:
        assert nbytes > 0
        result = backend.run(body)
        left.append(list(tensors(result)))
        assert any(tensor is result for tensor in left[-1])
        return result

    monkeypatch.setattr(TapeBackend, "may_take", lambda backend, nbytes: False)
    monkeypatch.setattr(TapeBackend, "run_between", run_between)
    expected = run_eagerly(make_rig)
    rig = build(make_rig)
    step = managed(rig, verify=2)
    assert_same_runs(expected, drive(rig, step))
    assert (step.stats.replayed, step.stats.verified) == (CALLS - BEFORE_REPLAY, (CALLS - BEFORE_REPLAY) // 2)
    (program,) = step.machine.programs.all()
    recorded = {id(grad) for _, grad in program.bindings._grads}
    grads = [parameter.grad for parameter in rig.owners["model"].parameters()]
    assert recorded == set(map(id, grads)) <= {id(tensor) for tensor in left[-1]}


@pytest.mark.parametrize("verify", [1, 3, "off"])
@pytest.mark.parametrize("is_taken_off", [False, True])
@pytest.mark.twice
def test_gradients_that_somebody_keeps(verify: Any, is_taken_off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay what they were, whatever replays and eager steps of checks leave where recorded ones lie."""

    def make() -> Rig:
        rig = make_rig()
        parameters = list(rig.owners["model"].parameters())
        kept: list[list[Tensor | None]] = []
        rig.extra["kept"] = kept

        def after(index: int) -> None:
            kept.append([parameter.grad for parameter in parameters[: index % 3]])
            for parameter in parameters[: index % 2] if is_taken_off else ():
                parameter.grad = None

        rig.after = after
        return rig

    def run_between(backend: Any, body: Any, recording: Any, nbytes: int, tensors: Any) -> Any:
        result = backend.run(body)
        assert list(tensors(result))
        return result

    monkeypatch.setattr(TapeBackend, "run_between", run_between)
    expected = run_eagerly(make)
    rig = build(make)
    step = managed(rig, verify=verify)
    assert_same_runs(expected, drive(rig, step))
    # Gradients that are there in one trace and not in the other take one trace more.
    assert step.stats.replayed == CALLS - BEFORE_REPLAY - is_taken_off


@pytest.mark.parametrize("keeps", ["the gradient", "a view of it"])
def test_gradients_of_a_check_that_something_else_refers_to(keeps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay where they are, as after any eager step."""
    rig = build(make_rig)
    step = managed(rig, verify="off")
    drive(rig, step)
    (program,) = step.machine.programs.all()
    first, *others = rig.owners["model"].parameters()
    recorded = [parameter.grad for parameter in (first, *others)]
    for parameter in (first, *others):
        parameter.grad = torch.full_like(parameter, 2.0)
    new = first.grad
    kept = new if keeps == "the gradient" else new.detach()
    del new
    program.bindings.take_grads()
    assert first.grad is not recorded[0] and first.grad.data_ptr() == kept.data_ptr()
    assert all(parameter.grad is grad for parameter, grad in zip(others, recorded[1:], strict=True))
    assert all((grad == 2).all() for grad in recorded[1:])


@pytest.mark.parametrize("verify", ["off", 1])
@pytest.mark.twice
def test_a_program_whose_memory_eager_code_keeps_is_captured_anew(verify: Any) -> None:
    """No replay overwrites it."""
    expected = run_eagerly(make_rig)
    rig = build(make_rig)
    step = managed(rig, verify=verify)
    after, spoiled = rig.after, []

    def spoil(index: int) -> None:
        after(index)
        if index == BEFORE_REPLAY + 1:
            (program,) = step.machine.programs.all()
            program._recording.is_spoiled = True
            spoiled.append(program)

    rig.after = spoil
    assert_same_runs(expected, drive(rig, step))
    assert step.stats.captured == 2 and not spoiled[0].is_open
    assert spoiled[0].replays == 2
    assert any("something that an eager step keeps is in memory" in event for event in step.stats.events)
