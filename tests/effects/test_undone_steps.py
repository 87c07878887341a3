"""Steps that are undone and run again: what they draw from on the host, and write there, is put back, or they are
refused before.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphplan import HostEffectError, SkipReason
from tests.models import attributes, updating_rig
from tests.twins import WARMUP, assert_equals_eager, assert_falls_back, assert_refused


def drawing(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    drawn = model.source.random()
    json.dumps({"loss": loss.item()})
    return loss * float(drawn)


def drawing_in_pairs(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    """An older generator makes two numbers at once, and keeps one."""
    drawn = model.source.randn()
    json.dumps({"loss": loss.item()})
    return loss * float(drawn)


def writing(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    model.source[0] += 1
    json.dumps({"loss": loss.item()})
    return loss * float(model.source[0])


SOURCES: dict[str, tuple[Callable[..., Tensor], Callable[[], Any]]] = {
    "a generator of NumPy's": (drawing, partial(np.random.default_rng, 0)),
    "an older one": (drawing, partial(np.random.RandomState, 0)),
    "an older one, in pairs": (drawing_in_pairs, partial(np.random.RandomState, 0)),
    "one of Python's": (drawing, partial(random.Random, 0)),
    "an array": (writing, partial(np.zeros, 2)),
    "a buffer": (writing, partial(bytearray, 2)),
}


@pytest.mark.parametrize("source", SOURCES)
def test_what_a_step_draws_and_writes_is_put_back(source: str) -> None:
    """The number that code needs has the step undone; what it drew before must not be drawn twice."""
    body, make_source = SOURCES[source]
    assert_falls_back(partial(updating_rig, body, attributes(source=make_source)), SkipReason.HOST_SYNC, "json")


def taking(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    taken = next(model.source)
    json.dumps({"loss": loss.item()})
    return loss * (taken % 3)


def items() -> Iterator[int]:
    """A generator of the user's."""
    yield from count()


@pytest.mark.parametrize("make_source", [count, partial(cycle, (1, 2, 3)), items])
def test_a_step_that_takes_the_next_item_is_refused_at_once(make_source: Callable[[], Any]) -> None:
    """No trace is made: one that is undone would have taken an item."""
    make = partial(updating_rig, taking, attributes(source=make_source))
    text = (
        r"takes the next item of model\.source \(a \w+\), but a replay runs no Python and would "
        r"take none.*CombinedLoader.*pass it as an argument"
    )
    assert_refused(make, HostEffectError, text, done=WARMUP)
    assert_falls_back(make, SkipReason.HOST_EFFECT, text)


def taking_a_parameter(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return loss * next(model.parameters()).numel() + next(iter((1.0,)))


def test_iterators_that_a_step_makes_are_its_own() -> None:
    """The first parameter is asked for its device everywhere."""
    assert_equals_eager(partial(updating_rig, taking_a_parameter, attributes(source=count)))


def taking_the_same(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return loss * next(model.source)


def test_an_iterator_that_replays_may_leave_alone() -> None:
    """The user says so, and what comes is always the same."""
    make = partial(updating_rig, taking_the_same, attributes(source=partial(cycle, (2.0,))))
    assert_equals_eager(make, allow=("model.source",))


def test_a_step_that_runs_compiled_code_takes_each_item_once() -> None:
    """Such a step is not looked at before its trace, which stands then."""
    double = torch.compile(lambda x: x * 2, backend="eager")

    def taking_beside_compiled(model: Any, x: Tensor, loss: Tensor) -> Tensor:
        return double(loss.detach()) * next(model.source)

    make = partial(updating_rig, taking_beside_compiled, attributes(source=count))
    assert_falls_back(make, SkipReason.HOST_EFFECT, r"next item of model\.source \(a count\)")
