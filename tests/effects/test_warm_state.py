"""Optimizer state that goes while a step is on its way to a program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD

from graphplan import HostEffectError, SkipReason
from tests.crossing import pairs
from tests.failure_modes.naive import CALLS, changing_rig, stay
from tests.twins import (
    BEFORE_REPLAY,
    SECOND_TRACE,
    TRACED,
    WARMUP,
    assert_equals_eager,
    assert_falls_back,
    assert_refused,
    assert_same_runs,
    build,
    drive,
    managed,
)

Forget = Callable[[Any, Any], None]
MOMENTUM = partial(SGD, lr=0.05, momentum=0.9, fused=True)


def _clear(model: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def _load_empty(model: Any, optimizer: Any) -> None:
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


def _other_dictionary(model: Any, optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def _empty_each(model: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state.clear()


def _empty_one(model: Any, optimizer: Any) -> None:
    optimizer.state.pop(next(model.parameters()), None)


FORGETTING = [_clear, _load_empty, _other_dictionary, _empty_each, _empty_one]


def _after(calls: range | list[int], forget: Forget, **options: Any) -> Callable[[], Any]:
    """A rig whose optimizer forgets after some of the calls."""
    each = lambda model, optimizer, index: forget(model, optimizer) if index in calls else None  # noqa: E731
    return partial(changing_rig, stay, each=each, **options)


@pytest.mark.parametrize("after", [3, 4])
@pytest.mark.parametrize("forget", [_clear, _load_empty])
@pytest.mark.twice
def test_state_that_is_dropped_before_the_capture(forget: Forget, after: int) -> None:
    """A recording that makes the state would make it anew in each replay, with a step count of one for ever."""
    each = lambda model, optimizer, index: forget(model, optimizer) if index == after else None  # noqa: E731
    step = assert_equals_eager(partial(changing_rig, stay, each=each), captured=1, replayed=24 - (after + 1) - 4)
    assert any("no longer exists, and only an eager step can create it" in event for event in step.stats.events)


@pairs(verify=["geometric", "off"], last=[3, 4, CALLS], forget=FORGETTING)
@pytest.mark.crossed(2)
def test_state_that_is_emptied_before_each_trace_is_refused(forget: Forget, last: int, verify: str) -> None:
    """A replay would begin anew for ever: also after the last reset, and without leaving any state."""
    made = r"the step creates optimizer\.state\[model\.\d\.weight\]\.step in each call"
    emptied = r"because optimizer\.state is emptied before it \(state\.clear\(\)"
    advice = r"Reset the state in place \(for s in optimizer\.state\.values\(\): .*t\.zero_\(\)\), or load a state dict"
    rig = _after(range(2, last + 1), forget)
    error = assert_refused(rig, HostEffectError, made, emptied, advice, done=SECOND_TRACE, verify=verify)
    assert isinstance(error, HostEffectError) and error.component == "optimizer"
    assert_falls_back(rig, SkipReason.HOST_EFFECT, made, verify=verify)


def _no_momentum(model: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"] = None


@pytest.mark.parametrize("forget", [_clear, _no_momentum])
def test_momentum_that_is_emptied_before_each_trace_is_refused(forget: Forget) -> None:
    made = r"the step creates optimizer\.state\[model\.\d\.weight\]\.momentum_buffer"
    rig = _after(range(CALLS), forget, make_optimizer=MOMENTUM)
    assert_refused(rig, HostEffectError, made, done=SECOND_TRACE)


@pytest.mark.parametrize("forget", FORGETTING)
def test_state_that_only_the_first_trace_makes(forget: Forget) -> None:
    """The next step finds what it has made, and its trace is the first of the next pair."""
    step = assert_equals_eager(_after([2], forget), replayed=CALLS - BEFORE_REPLAY - 1, verify="off")
    assert step.stats.traced == TRACED + 1


def test_state_that_the_first_trace_makes_and_the_last_one_would() -> None:
    """The second trace found it; the call after it is a warm-up step again."""
    rig = _after([2, 4], _clear)
    assert_equals_eager(rig, replayed=CALLS - (WARMUP + TRACED + 1) - TRACED - 1, verify="off")


@pytest.mark.parametrize("forget", FORGETTING)
def test_state_that_is_emptied_in_mid_run(forget: Forget) -> None:
    """The program has no place for state that begins anew: an eager step makes it, and the program goes on."""
    step = assert_equals_eager(_after([12], forget), captured=1, replayed=CALLS - BEFORE_REPLAY - 1, verify="off")
    gone = "held a tensor at capture, and does not now"
    assert any(".state[" in event and gone in event for event in step.stats.events)


def test_state_that_is_emptied_for_good_in_mid_run() -> None:
    """Once there was a good replay, a refusal is a warning, and the step goes on eagerly."""
    rig = build(make := _after(range(12, CALLS), _clear))
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig, verify="off")
    with pytest.warns(UserWarning, match=r"the step creates optimizer\.state\[.* in each call"):
        assert_same_runs(expected, drive(rig, step))
    assert step.stats.replayed == 13 - BEFORE_REPLAY


def test_state_that_replays_may_leave_alone() -> None:
    """Who allows a path has said that replays need not make what is there."""
    rig = build(_after(range(5), _clear))
    step = managed(rig, allow=("optimizer.state*",), verify="off")
    drive(rig, step)
    assert step.stats.replayed > 0


def test_state_that_is_reset_in_place_is_replayed() -> None:
    """What the refusal advises."""

    def zero(model: Any, optimizer: Any) -> None:
        for state in optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    assert_equals_eager(_after(range(CALLS), zero))


def _one_vector(model: Any, optimizer: Any) -> None:
    parameters = list(model.parameters())
    vector_to_parameters(parameters_to_vector(parameters).detach(), parameters)


def _new_moments(model: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()


@pytest.mark.parametrize("move", [_one_vector, _new_moments])
@pytest.mark.twice
def test_what_moves_between_two_traces(move: Callable[[Any, Any], None]) -> None:
    """Where the two steps differ because of it, and not because of what they do, one more is traced."""
    each = lambda model, optimizer, index: move(model, optimizer) if index == 3 else None  # noqa: E731
    wasted = 1 if move is _one_vector else 0
    step = assert_equals_eager(partial(changing_rig, stay, each=each), captured=1, replayed=18 - wasted)
    assert step.stats.traced == 2 + wasted


def _together_and_apart(model: Any, optimizer: Any, index: int) -> None:
    if index % 2:
        _one_vector(model, optimizer)
    else:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()


def test_what_moves_at_every_step_is_refused_after_four_traces() -> None:
    make = partial(changing_rig, stay, each=_together_and_apart)
    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig, on_failure="eager")
    with pytest.warns(UserWarning, match="uses other tensors than in the step before"):
        assert_same_runs(expected, drive(rig, step))
    assert (step.stats.traced, step.stats.captured) == (4, 0)
