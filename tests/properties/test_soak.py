"""Thousands of steps with random events: nothing accumulates, and the end is eager's bit by bit."""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from graphplan.report.stats import LAPS, STRETCHES, TEXTS
from tests.facts import assert_same
from tests.random_runs import model_events, training_events
from tests.random_runs.bench import EVENTS, Bench
from tests.random_runs.comparison import graphed, make_twin
from tests.random_runs.run import Run
from tests.twins import state_of

assert {model_events, training_events}, "importing them fills EVENTS"

STEPS, SETTLED = 20_000 if "RANDOM_RUNS" in os.environ else 2_500, 1_000
"""``make soak`` takes more."""
RUN = Run(
    "dense",
    layers=("linear", "batchnorm", "relu", "dropout"),
    groups=2,
    clip="norm",
    effects=frozenset({"counter", "average", "history"}),
    sizes=(4, 4, 3),
    calls=51,
    max_graphs=4,
)
"""The 51 batches repeat; ``history`` is cleared every 100 steps."""

FINAL = {"assigned_weights", "new_group", "parameter_leaves", "replaced_layer", "forward_hook"}
"""Events that cannot go on for ever: the optimizer loses its parameters, the model its layers."""
IDLE = {"scheduler", "scale", "memory_format", "scaled_rates", "mutated_batch"}
"""Events that change nothing in this run, or drive values to zero or infinity."""
CHANGES = sorted(EVENTS.keys() - FINAL - IDLE)

KEYS = 8 * RUN.max_graphs
LIMITS = {"Programs._entries": KEYS, "Managed._seen": 256, "Stats.events": TEXTS + 1, "Stats.reasons": TEXTS + 1}
LIMITS |= {f"Library.{name}": 256 for name in ("entries", "_known", "settled", "codes")}
LIMITS |= {"Stats.laps": LAPS, "Stats.changes": STRETCHES}
LIMITS |= {
    "Namespace.attributes": 128,
    "Namespace.beyond_libraries": 256,
    "Namespace.mentioned": 2048,
    "Hooks._places": 256,
    "Hooks._empty": 256,
    "Reads.values": 256,
}
"""Tables that may go on filling up to here."""
NAMES = 8
"""Code objects that nobody had asked about by then."""
PARTS_OF_A_KEY = 80
"""Other objects that a remembered key consists of, roughly."""
PARTS_OF_WAYS = {"CodePath": 16, "Scalar": 128, "Item": 16, "Question": 8, "NumberForm": 8, "_Made": 8, "_Place": 8}
PARTS_OF_WAYS |= {"NumberTensor": 8}
"""Of ways through the step that owners' numbers decide, 16 are kept for each key, with what they ask of which place."""
PARTS_OF_A_QUESTION = 12
"""Other objects that a question consists of, roughly."""


def draw_events() -> dict[int, tuple[str, int]]:
    """Events by the step that they follow: dense at first, so that most have happened once, and then rarer."""
    chooser = random.Random(3)
    places = [*range(10, SETTLED, 15), *range(SETTLED, STEPS, 250)]
    return {place: (chooser.choice(CHANGES), chooser.randrange(12)) for place in places}


def drive(bench: Bench, call: Any, first: int, end: int, events: dict[int, tuple[str, int]]) -> Tensor:
    """Steps ``first`` to ``end``; returns the sum of their losses."""
    total = torch.zeros((), dtype=torch.float64)
    for index in range(first, end):
        total += call(*bench.calls[index % len(bench.calls)]).detach()
        if index % 100 == 99:
            bench.model.history.clear()
        if index in events:
            name, number = events[index]
            EVENTS[name](bench, number)
    return total


def is_own(thing: Any) -> bool:
    """Whether ``thing`` is an instance of one of graphplan's classes."""
    return str(type(thing).__module__).startswith("graphplan")


def alive() -> Counter[str]:
    """How many tensors, objects of each of graphplan's classes, and other objects there are."""
    gc.collect()
    found: Counter[str] = Counter()
    for thing in gc.get_objects():
        if type(thing) is Counter:
            # This one, and those of before.
            continue
        kind = "Tensor" if issubclass(type(thing), Tensor) else type(thing).__qualname__ if is_own(thing) else "others"
        found[kind] += 1
    return found


def alive_beside(call: Any) -> Counter[str]:
    """:func:`alive`, but for the externals of the plan that ``call`` keeps."""
    plan, found = getattr(call, "plan", None), alive()
    externals = 0 if plan is None else len(plan.externals)
    found.subtract({"External": externals, "TensorSpec": externals})
    return found


def tables(thing: Any) -> dict[str, int]:
    """Lengths of all containers that graphplan's objects, reached from ``thing``, hold as attributes."""
    lengths: dict[str, int] = {}
    seen: set[int] = set()
    left = [thing]
    while left:
        owner = left.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        for name, value in attributes(owner):
            inner: list[Any] = [value]
            if isinstance(value, list | set | deque | Mapping):
                label = f"{type(owner).__qualname__}.{name}"
                lengths[label] = max(len(value), lengths.get(label, 0))
                inner = list(value.values() if isinstance(value, Mapping) else value)
            left += [item for item in inner if is_own(item)]
    return lengths


def attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of an object, with or without a dictionary."""
    yield from getattr(thing, "__dict__", {}).items()
    for kind in type(thing).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(thing, name):
                yield name, getattr(thing, name)


def drive_and_count(bench: Bench, call: Any) -> tuple[Tensor, Counter[str]]:
    """All steps; the sum of their losses, and how many more objects there are at the end than once it had settled.

    What the programs of the moment consist of does not count, nor do the externals of the plan that is kept.
    """

    events = draw_events()
    total = drive(bench, call, 0, SETTLED, events)
    EVENTS["invalidate"](bench, 0)
    before = alive_beside(call)
    total += drive(bench, call, SETTLED, STEPS, events)
    EVENTS["invalidate"](bench, 0)
    after = alive_beside(call)
    after.subtract(before)
    return total, after


def test_a_long_run_with_random_events() -> None:
    """As much of everything after all steps as after 1,000, though programs came and went."""
    eager, rig = make_twin(RUN, prepare=True)
    losses, expected_growth = drive_and_count(eager, eager.step)
    expected = state_of(rig)
    del eager, rig
    bench, rig = make_twin(RUN, prepare=False)
    step = graphed(RUN, bench)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found, growth = drive_and_count(bench, step)
    assert_same({"losses": losses, **expected}, {"losses": found, **state_of(rig)})
    assert step.stats.replayed > 0.9 * STEPS
    assert step.stats.recaptured > 20
    # The names of a code object are remembered once somebody has asked for them, of however late a capture.
    assert growth.pop("Names") <= NAMES
    growth["others"] -= PARTS_OF_A_QUESTION * min(max(growth["Question"], 0), PARTS_OF_WAYS["Question"])
    for kind, most in PARTS_OF_WAYS.items():
        growth["others"] -= min(growth[kind], most)
        assert growth.pop(kind) <= most, kind
    keys = growth.pop("Entry")
    assert 0 <= keys <= KEYS
    # Eager may end with less than it had settled on (what its first steps left was collected later): that is no bound.
    assert growth.pop("Tensor") <= max(expected_growth["Tensor"], 0)
    assert growth.pop("others") <= max(expected_growth["others"], 0) + PARTS_OF_A_KEY * keys
    assert max(growth.values()) <= 0, f"more objects than after {SETTLED} steps: {growth}"
    long = {name: length for name, length in tables(step).items() if length > LIMITS.get(name, 64)}
    assert not long, f"tables that have grown: {long}"
