"""A step may put back states of generators that it has saved: replays draw the same numbers again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from graphplan import GeneratorSeekError
from tests.saved_states import CALLS, STEPS, rig_of
from tests.twins import BEFORE_REPLAY, assert_refused, build, managed

Check = Callable[..., Any]


@pytest.mark.parametrize("kind", STEPS)
def test_numbers_that_are_drawn_again(kind: str, equals_eager: Check) -> None:
    step = equals_eager(partial(rig_of, STEPS[kind]), exact=True)
    assert step.stats.verified >= 4


@pytest.mark.parametrize("kind", STEPS)
def test_the_host_draws_and_seeds_between_steps(kind: str, equals_eager: Check, device: torch.device) -> None:
    """Replays draw on from wherever the generator is, with its seed."""

    def after(index: int) -> None:
        torch.rand(3, device=device)
        if index % 5 == 4:
            torch.manual_seed(index)

    equals_eager(partial(rig_of, STEPS[kind], after), exact=True)


@pytest.mark.twice
def test_what_was_replaced_is_back() -> None:
    names = ("get_rng_state", "set_rng_state")
    before = [getattr(space, name) for space in (torch, torch.random, torch.cuda, torch.cuda.random) for name in names]
    rig = build(partial(rig_of, STEPS["checkpoint"]))
    step = managed(rig)
    for call in rig.calls:
        step(*call)
    assert step.stats.replayed == CALLS - BEFORE_REPLAY
    spaces = (torch, torch.random, torch.cuda, torch.cuda.random)
    assert before == [getattr(space, name) for space in spaces for name in names]


class Kept:
    """A state from before the step."""

    state = torch.get_rng_state()


def _from_before(model: Any, x: Tensor) -> Tensor:
    torch.set_rng_state(Kept.state)
    return model(torch.rand_like(x))


def _copied(model: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.rand_like(x)
    torch.set_rng_state(state.clone())
    return model(noise * torch.rand_like(x))


def _set_by_the_generator(model: Any, x: Tensor) -> Tensor:
    torch.default_generator.set_state(Kept.state)
    return model(torch.rand_like(x))


@pytest.mark.parametrize("forward", [_from_before, _copied, _set_by_the_generator])
def test_states_that_the_step_did_not_save(forward: Any) -> None:
    assert_refused(
        partial(rig_of, forward),
        GeneratorSeekError,
        "to a state that the step had not saved itself",
        "on_failure='eager'",
    )


@pytest.mark.twice
def test_states_that_are_put_back_now_and_then() -> None:
    """The two traces do not do the same."""
    calls = iter(range(100))

    def forward(model: Any, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        y: Tensor = model(torch.rand_like(x))
        if next(calls) % 2:
            torch.set_rng_state(state)
        return y

    rig = build(partial(rig_of, forward))
    step = managed(rig, allow=("calls",))
    with pytest.raises(GeneratorSeekError, match="restores 1 generator states on one step and 0 on the next"):
        for call in rig.calls:
            step(*call)
