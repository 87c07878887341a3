"""Rows 19 to 22: warm-up, randomness, and what decides a step's path."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphplan import FeedError, GeneratorSeekError, HostScalarError, HostSyncError
from tests.failure_modes.naive import (
    PLAIN,
    WHEN,
    assert_handled,
    assert_naive_is_wrong,
    changing_rig,
    loss_of,
    run_eagerly,
    seeded,
    stay,
)
from tests.models import attributes, float_batches
from tests.twins import (
    WARMUP,
    Rig,
    assert_equals_eager,
    assert_refused,
    assert_same_runs,
    build,
    drive,
    line_of,
    managed,
)


def test_row_19_statistics_advanced_by_warm_up() -> None:
    """Warm-up steps are real steps: batch norm counts each batch once. Rehearsals would count theirs too."""
    assert_naive_is_wrong(PLAIN, rehearsals=3)
    rig = build(PLAIN)
    drive(rig, managed(rig))
    assert rig.owners["model"][1].num_batches_tracked.item() == 24


def test_row_20_random_numbers_consumed_by_warm_up() -> None:
    """Dropout masks are those of the eager run, from the first step on."""
    still = partial(changing_rig, stay, make_model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5)))
    assert_naive_is_wrong(still, rehearsals=3)
    assert_equals_eager(still)


def _random(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(model, x * random.random(), y)  # culprit


def _numpy(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(model, x * np.random.rand(), y)  # culprit


def _numpy_array(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(model, x + torch.from_numpy(np.random.randn(*x.shape)).float(), y)  # culprit


def _step_counter(model: Any, x: Tensor, y: Tensor) -> Tensor:
    model.steps += 1
    return loss_of(model, x * (1.0 + model.steps), y)  # culprit


def test_row_21_arrays_of_host_numbers_are_refused() -> None:
    """Host generators give an operator other numbers in each trace."""
    make = partial(changing_rig, stay, _numpy_array, prepare=seeded)
    assert_naive_is_wrong(make)
    words = "gets other values than one step before"
    assert_refused(make, HostScalarError, line_of(_numpy_array), words, "freeze", r"torch\.randn", done=WARMUP + 1)


@pytest.mark.parametrize("loss", [_random, _numpy])
def test_row_21_host_numbers_are_drawn_again(loss: Any) -> None:
    make = partial(changing_rig, stay, loss, prepare=seeded)
    assert_naive_is_wrong(make)
    assert_equals_eager(make)


def test_row_21_a_counter_that_an_operator_gets() -> None:
    """Each replay computes with the number of its own step."""
    make = partial(changing_rig, stay, _step_counter, prepare=attributes(steps=0))
    assert_naive_is_wrong(make)
    assert_equals_eager(make)


def _seeks(model: Any, x: Tensor, y: Tensor) -> Tensor:
    torch.manual_seed(3)
    return loss_of(model, x, y)


def test_row_21_seeding_in_the_step_is_refused() -> None:
    """A replay only draws on."""
    make = partial(changing_rig, stay, _seeks)
    assert_naive_is_wrong(make)
    assert_refused(make, GeneratorSeekError, r"naive\.py:\d+", "Seed outside the step")


def _every_tenth(model: Any, x: Tensor, y: Tensor) -> Tensor:
    model.steps += 1
    return loss_of(model, x, y) * (2.0 if model.steps % 10 == 0 else 1.0)


def test_row_21_a_counter_that_a_branch_reads() -> None:
    """A number that the step counts up itself, and that decides at every tenth step: both traces look alike."""
    assert_handled_or_refused(partial(changing_rig, stay, _every_tenth, prepare=attributes(steps=0)))


def _now_and_then(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(model, x, y) * (2.0 if random.random() < 0.15 else 1.0)


def test_row_21_a_random_branch() -> None:
    """``random`` decides between two paths; both traces may take the same."""
    assert_handled_or_refused(partial(changing_rig, stay, _now_and_then, prepare=seeded))


def assert_handled_or_refused(make: Callable[[], Rig]) -> None:
    """Eager's numbers, or a refusal that says so; never other numbers."""
    assert_naive_is_wrong(make)
    rig = build(make)
    try:
        found = drive(rig, managed(rig))
    except (HostScalarError, HostSyncError, FeedError):
        return
    assert_same_runs(run_eagerly(make), found)


def _branches_on_a_flag(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(model, x, y)
    return 2 * loss if model.sharp else loss


def test_row_22_branch_on_a_flag() -> None:
    """A Python flag that the step reads is guarded."""

    def each(model: Any, optimizer: Any, index: int) -> None:
        model.sharp = WHEN <= index < WHEN + 6

    assert_handled(
        partial(changing_rig, stay, _branches_on_a_flag, prepare=attributes(sharp=False), each=each), replayed=10
    )


CONTAINERS: dict[str, tuple[Any, Callable[[Any], object], Callable[[Any], float]]] = {
    "an item added to a list": ([1.0], lambda values: values.append(3.0), sum),
    "an item taken from a list": ([1.0, 2.0], lambda values: values.pop(), sum),
    "a key added to a dictionary": ({"a": 1.0}, lambda values: values.update(b=3.0), lambda v: sum(v.values())),
    "an item taken from a set": ({"a", "b"}, lambda values: values.remove("b"), lambda values: float(len(values))),
}


@pytest.mark.parametrize("what", CONTAINERS)
def test_row_22_containers_that_a_branch_reads(what: str) -> None:
    """What a step loops over or looks up may have more or fewer items later."""
    initial, change, read = CONTAINERS[what]

    def prepare(model: Any) -> None:
        model.values = type(initial)(initial)

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(model, x, y) * read(model.values)

    make = partial(changing_rig, lambda m, o: change(m.values), loss, prepare=prepare)
    assert_handled(make, control=partial(changing_rig, stay, loss, prepare=prepare))


class Kind:
    """Two kinds, as objects."""


FIRST, SECOND = Kind(), Kind()
OBJECTS: dict[str, tuple[Any, Any, Callable[[Any, Tensor], Tensor]]] = {
    "a function": (torch.tanh, torch.sigmoid, lambda value, loss: value(loss)),
    "a dtype": (torch.float32, torch.bfloat16, lambda value, loss: loss.to(value).float()),
    "a NumPy number": (np.float32(0.5), np.float32(2.0), lambda value, loss: loss * float(value)),
    "an object by identity": (FIRST, SECOND, lambda value, loss: loss * (2 if value is FIRST else 3)),
    "a number of another type": (1, True, lambda value, loss: loss * (2 if value is True else 3)),
}


@pytest.mark.parametrize("what", OBJECTS)
def test_row_22_objects_that_a_branch_reads(what: str) -> None:
    """Attributes that are neither tensors nor plain numbers."""
    old, new, use = OBJECTS[what]

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return use(model.choice, loss_of(model, x, y))

    prepare = lambda model: setattr(model, "choice", old)  # noqa: E731
    change = lambda model, optimizer: setattr(model, "choice", new)  # noqa: E731
    assert_handled(
        partial(changing_rig, change, loss, prepare=prepare), control=partial(changing_rig, stay, loss, prepare=prepare)
    )


def test_row_22_inputs_that_share_memory() -> None:
    """A step that writes into one of two overlapping inputs changes the other, which two static copies do not."""

    def loss(model: Any, one: Tensor, two: Tensor, y: Tensor) -> Tensor:
        one.add_(1.0)
        return loss_of(model, two, y)

    flat = [(x.reshape(-1), y[:5]) for x, y in float_batches(24)]
    make = partial(changing_rig, stay, loss, calls=[(x[:40].view(5, 8), x[8:].view(5, 8), y) for x, y in flat])

    def fresh() -> Rig:
        rig = make()
        rig.calls = [_overlap(one, two, y) for one, two, y in rig.calls]
        return rig

    assert_handled_or_refused(fresh)


@pytest.mark.twice
def test_row_22_inputs_that_share_memory_later() -> None:
    """Once captured, a call whose inputs overlap runs eagerly."""

    def loss(model: Any, one: Tensor, two: Tensor, y: Tensor) -> Tensor:
        one.add_(1.0)
        return loss_of(model, two, y)

    def make() -> Rig:
        flat = [(x.reshape(-1), y[:5]) for x, y in float_batches(24)]
        apart = [(x[:40].view(5, 8).clone(), x[8:].view(5, 8).clone(), y) for x, y in flat]
        return changing_rig(stay, loss, calls=apart[:WHEN] + [_overlap(*call) for call in apart[WHEN:]])

    expected = run_eagerly(make)
    rig = build(make)
    step = managed(rig)
    # Overlapping ones may lie at other offsets, and then are a signature of their own, which is refused.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"graphplan runs this step eagerly.*shares memory")
        assert_same_runs(expected, drive(rig, step))
    assert step.stats.replayed == WHEN - 6


def _overlap(one: Tensor, two: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    flat = torch.cat([one.reshape(-1), two.reshape(-1)[-8:]])
    return flat[:40].view(5, 8), flat[8:].view(5, 8), y
