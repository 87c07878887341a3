"""One memory in several slots: refused where the next step reads one, since replays give each a memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphplan import HostEffectError, compile_plan, graph_step


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


def read_by_both_names(state: Any, x: Tensor) -> None:
    state.a = state.b = state.a * 0.5 + state.b * 0.25 + x


def run(update: Callable[[Any, Tensor], None], *, replays: bool, **options: Any) -> tuple[list[list[float]], Any]:
    """The state after each step, which the host writes to now and then."""
    state = SimpleNamespace(a=torch.zeros(4), b=torch.zeros(4), kept={"a": torch.zeros(4)})

    def step(x: Tensor) -> Tensor:
        update(state, x)
        return x.sum()

    call: Any = graph_step(step, owners={"state": state}, backend="tape", **options) if replays else step
    found = []
    for index in range(20):
        call(torch.full((4,), float(index)))
        found.append([*state.a.tolist(), *state.b.tolist(), *state.kept["a"].tolist()])
        if index % 6 == 5:
            state.b.zero_()
            state.kept["a"].zero_()
    return found, call


@pytest.mark.parametrize("update", [two_names, detached, in_a_dictionary, part, read_by_both_names])
def test_a_state_that_shares_memory_with_another_is_refused(update: Callable[[Any, Tensor], None]) -> None:
    text = (
        r"the step binds state\.a and state\.(b|kept\.a) to one memory, and reads state\.a .* Bind a copy: state\.\S+ ="
    )
    with pytest.raises(HostEffectError, match=text):
        run(update, replays=True)
    with pytest.warns(UserWarning, match=text):
        found, call = run(update, replays=True, on_failure="eager")
    assert found == run(update, replays=False)[0]
    assert call.stats.captured == 0


def only_left(state: Any, x: Tensor) -> None:
    state.a = state.b = x * 2
    state.kept["a"] = state.a


def parts_that_do_not_overlap(state: Any, x: Tensor) -> None:
    state.a, state.b = (torch.cat([state.a, state.b]) * 0.5 + x.repeat(2)).chunk(2)


@pytest.mark.parametrize("update", [only_left, parts_that_do_not_overlap])
def test_what_is_not_read_by_another_name_is_left_as_it_is(update: Callable[[Any, Tensor], None]) -> None:
    found, call = run(update, replays=True)
    expected = run(update, replays=False)[0]
    assert found == expected
    assert call.stats.replayed > 0


def test_the_plan_of_a_step_with_a_copy() -> None:
    state = SimpleNamespace(a=torch.zeros(4), b=torch.zeros(4))

    def step(x: Tensor) -> Tensor:
        state.a = state.a * 0.5 + x
        state.b = state.a.clone()
        return x.sum()

    assert compile_plan(step, torch.ones(4), owners={"state": state}).rebindings.paths == ("state.a", "state.b")
