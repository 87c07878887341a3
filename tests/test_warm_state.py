"""Optimizer state that goes while a step is on its way to a program."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.failure_modes.naive import changing_rig, stay
from tests.twins import assert_equals_eager, assert_same_runs, build, drive, managed


def _clear(model: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def _load_empty(model: Any, optimizer: Any) -> None:
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


@pytest.mark.parametrize("after", [3, 4])
@pytest.mark.parametrize("forget", [_clear, _load_empty])
def test_state_that_is_dropped_before_the_capture(forget: Callable[[Any, Any], None], after: int) -> None:
    """A recording that makes the state would make it anew in each replay, with a step count of one for ever."""
    each = lambda model, optimizer, index: forget(model, optimizer) if index == after else None  # noqa: E731
    step = assert_equals_eager(partial(changing_rig, stay, each=each), captured=1, replayed=24 - (after + 1) - 4)
    assert any("is gone, which only an eager step can make" in event for event in step.stats.events)


def _one_vector(model: Any, optimizer: Any) -> None:
    parameters = list(model.parameters())
    vector_to_parameters(parameters_to_vector(parameters).detach(), parameters)


def _new_moments(model: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()


@pytest.mark.parametrize("move", [_one_vector, _new_moments])
def test_what_moves_between_two_traces(move: Callable[[Any, Any], None]) -> None:
    """Where the two steps differ because of it, and not because of what they do, two more are traced."""
    each = lambda model, optimizer, index: move(model, optimizer) if index == 3 else None  # noqa: E731
    wasted = 2 if move is _one_vector else 0
    step = assert_equals_eager(partial(changing_rig, stay, each=each), captured=1, replayed=18 - wasted)
    assert step.stats.traced == 2 + wasted


def _together_and_apart(model: Any, optimizer: Any, index: int) -> None:
    if index % 2:
        _one_vector(model, optimizer)
    else:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()


def test_what_moves_at_every_step_is_refused_after_six_traces() -> None:
    make = partial(changing_rig, stay, each=_together_and_apart)
    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig, on_failure="eager")
    with pytest.warns(UserWarning, match="works on other tensors than one step before"):
        assert_same_runs(expected, drive(rig, step))
    assert (step.stats.traced, step.stats.captured) == (6, 0)
