"""Slots that a step binds to one memory: what somebody writes to one of them between steps is in the others."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import GuardError, Policy, capture, compile_plan, graph_step
from graphplan.program.program import Program
from tests.crossing import pairs
from tests.twins import Rig, assert_same_runs, build, drive, managed

CALLS = 40
Case = tuple[Callable[[Any, Tensor], None], Callable[[Any], object]]


def two_names(state: Any, x: Tensor) -> None:
    state.a = state.a * 0.5 + x
    state.b = state.a


def detached(state: Any, x: Tensor) -> None:
    state.a = state.a * 0.5 + x
    state.b = state.a.detach()


def in_a_dictionary(state: Any, x: Tensor) -> None:
    state.a = state.a * 0.5 + x
    state.kept["a"] = state.a


def part(state: Any, x: Tensor) -> None:
    state.a = state.a * 0.5 + x
    state.b = state.a[1:3]


def parts_of_another(state: Any, x: Tensor) -> None:
    both = torch.stack([state.a * 0.5 + x, state.a])
    state.a, state.b = both
    state.kept["a"] = both.view(2, 2, 2).transpose(1, 2)


def expanded(state: Any, x: Tensor) -> None:
    state.a = state.a * 0.5 + x
    state.b = state.a.expand(3, 4)
    state.kept["a"] = state.a.as_strided((2, 2), (1, 1))


def read_by_both_names(state: Any, x: Tensor) -> None:
    state.a = state.b = state.a * 0.5 + state.b * 0.25 + x


def take_away_and_write(state: Any) -> None:
    old, state.a = state.a, torch.ones_like(state.a)
    old.zero_()


CASES: dict[str, Case] = {
    "two names, the other one": (two_names, lambda s: s.b.zero_()),
    "two names, the read one": (two_names, lambda s: s.a.zero_()),
    "two names, both alike": (two_names, lambda s: (s.a.zero_(), s.b.zero_())),
    "two names, one taken away": (two_names, lambda s: (setattr(s, "a", torch.ones_like(s.a)), s.b.zero_())),
    "two names, one taken away and written": (two_names, take_away_and_write),
    "detached": (detached, lambda s: s.b.mul_(2)),
    "in a dictionary": (in_a_dictionary, lambda s: s.kept["a"].zero_()),
    "a part, the part": (part, lambda s: s.b.zero_()),
    "a part, through a view of it": (part, lambda s: s.b[0].fill_(3.0)),
    "a part, the whole": (part, lambda s: s.a.fill_(2.0)),
    "parts of another, the whole": (parts_of_another, lambda s: s.kept["a"].zero_()),
    "parts of another, one of them": (parts_of_another, lambda s: s.a[1:].zero_()),
    "parts of another, both": (parts_of_another, lambda s: (s.a.zero_(), s.b.fill_(3.0))),
    "read by both names": (read_by_both_names, lambda s: s.b.zero_()),
}  # fmt: skip


def rig_of(case: Case, every: int, device: str = "cpu") -> Rig:
    update, write = case
    state = SimpleNamespace(a=torch.zeros(4, device=device), b=torch.zeros(4, device=device), kept={})

    def step(x: Tensor) -> Tensor:
        update(state, x)
        return x.sum()

    rig = Rig(step, {"state": state}, [(torch.rand(4).to(device),) for _ in range(CALLS)])
    rig.after = lambda index: write(state) if index % every == every - 1 else None
    return rig


@pairs(verify=["off", "geometric"], every=[5, 6, 7], name=CASES)
def test_what_is_written_to_one_is_in_the_others(
    name: str, every: int, verify: Any, device: torch.device, backend: str
) -> None:
    """Also after the captured call, and after one that was checked."""
    make = partial(rig_of, CASES[name], every, str(device))
    twin, rig = build(make), build(make)
    expected = drive(twin, twin.step)
    call = managed(rig, verify=verify, backend=backend)
    assert_same_runs(expected, drive(rig, call))
    assert call.stats.captured >= 1
    assert call.stats.replayed >= CALLS // 2


def test_a_step_of_another_shape_finds_what_was_written() -> None:
    """It runs eagerly, and reads by the other name."""

    def run(*, replays: bool) -> list[float]:
        state = SimpleNamespace(a=torch.zeros(4), b=torch.zeros(4))

        def step(x: Tensor) -> Tensor:
            state.a = state.a * 0.5 + x.sum(0)
            state.b = state.a
            return state.a.sum()

        call: Any = graph_step(step, owners={"state": state}, backend="tape") if replays else step
        found = []
        for index in range(20):
            found.append(float(call(torch.ones(3 if index == 12 else 2, 4))))
            if index in (11, 12, 15):
                state.b.zero_()
        return found

    assert run(replays=True) == run(replays=False)


def test_a_program_by_hand() -> None:
    state = SimpleNamespace(a=torch.zeros(4), b=torch.zeros(4))

    def step(x: Tensor) -> Tensor:
        two_names(state, x)
        return state.a.sum()

    x = torch.ones(4)
    plan = compile_plan(step, x, owners={"state": state})
    assert [path for path, _ in plan.rebindings.together[0]] == ["state.a", "state.b"]
    program = capture(plan, feed=(x,), policy=Policy.train(), backend="tape")
    program.replay((x,))
    state.b.zero_()
    assert program.replay((x,)).item() == 4.0


def test_two_that_were_written_to_differently() -> None:
    """Nobody knows which came last; nothing has run then."""
    state = SimpleNamespace(a=torch.zeros(4), b=torch.zeros(4))

    def step(x: Tensor) -> Tensor:
        two_names(state, x)
        return x.sum()

    call = graph_step(step, owners={"state": state}, backend="tape")
    for _ in range(11):
        call(torch.ones(4))
    state.a.fill_(1.0)
    state.b.fill_(2.0)
    with pytest.raises(
        GuardError, match=r"state\.a and state\.b were each written to .* Write to one of them, or bind"
    ):
        call(torch.ones(4))
    assert state.a.tolist() == [1.0] * 4


def test_what_is_expanded_is_no_companion() -> None:
    """Several of its elements are one: nobody can write to it."""
    state = SimpleNamespace(a=torch.zeros(4), b=torch.zeros(4), kept={})

    def step(x: Tensor) -> Tensor:
        expanded(state, x)
        return x.sum()

    assert compile_plan(step, torch.ones(4), owners={"state": state}).rebindings.together == ()


def test_parts_that_do_not_overlap_are_no_companions() -> None:
    state = SimpleNamespace(a=torch.zeros(2), b=torch.zeros(2), cell=nn.LSTMCell(2, 2))

    def step(x: Tensor) -> Tensor:
        state.a, state.b = (torch.cat([state.a, state.b]) * 0.5 + x).chunk(2)
        return x.sum()

    assert compile_plan(step, torch.ones(4), owners={"state": state}).rebindings.together == ()


def test_two_steps_on_one_module() -> None:
    """What a step's capture and its checks write is no write of the host's, whichever step it is."""

    def run(*, replays: bool) -> list[float]:
        torch.manual_seed(0)
        state = SimpleNamespace(h=torch.zeros(4), prev=torch.zeros(4))

        def train(x: Tensor) -> Tensor:
            state.h = state.h * 0.5 + x
            state.prev = state.h
            return state.h.sum()

        def other(x: Tensor) -> Tensor:
            state.h = state.h * 0.25 + x
            return state.h.sum() + state.prev.sum()

        steps: list[Any] = [train, other]
        if replays:
            steps = [graph_step(step, owners={"state": state}, backend="tape") for step in steps]
        return [float(steps[call % 2](torch.rand(4))) + float(state.prev.sum()) for call in range(60)]

    assert run(replays=True) == run(replays=False)


def test_what_is_written_may_be_no_number() -> None:
    """NaN is not equal to itself."""
    make = partial(rig_of, (two_names, lambda state: state.b.fill_(float("nan"))), 9)
    twin, rig = build(make), build(make)
    assert_same_runs(drive(twin, twin.step), drive(rig, managed(rig)))


def test_a_closed_step_keeps_no_program() -> None:
    """Nor do others that still run."""
    rig = build(partial(rig_of, CASES["two names, the other one"], 5))
    call = managed(rig, verify="off")
    drive(rig, call)
    gc.collect()
    before = sum(isinstance(thing, Program) for thing in gc.get_objects())
    call.close()
    gc.collect()
    assert sum(isinstance(thing, Program) for thing in gc.get_objects()) == before - 1
