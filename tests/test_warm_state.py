"""Optimizer state that goes while a step is on its way to a program."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.failure_modes.naive import changing_rig, stay
from tests.twins import assert_equals_eager


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
