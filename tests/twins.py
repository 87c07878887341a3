"""Build the same step twice from one seed, run one copy eagerly and one through graphplan, and compare them bit by bit.

Eager is the oracle: every check in here says that whatever a user could read after a call (returned values, parameters,
gradients, buffers, optimizer state, hyper-parameters, Python attributes, the random generator) is what eager leaves.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from graphplan import SkipReason, graph_step
from graphplan.environment.switches import NAMES, read_all
from graphplan.optimizers.preparation import Preparation
from tests.facts import assert_same, flatten, walk

SEED = 1234
WARMUP, TRACED, CAPTURED = 3, 2, 1
BEFORE_REPLAY = WARMUP + TRACED + CAPTURED
FURTHER = 4
"""Calls before the first replay of a further shape: one eager, two traced, one captured."""
SECOND_TRACE = WARMUP + TRACED - 1
LAST_TRACE = SECOND_TRACE + 2
"""The third trace that differs from the one before, where the host changes what the step reads after every call."""


def before_replays(captured: int, further: int) -> int:
    """How many calls are no replays, if so many programs are captured, ``further`` of them for further shapes."""
    return (captured - further) * BEFORE_REPLAY + further * FURTHER


BEFORE_TWO = WARMUP + 2 * (TRACED + CAPTURED)
"""Calls that are no replays where those of two shapes take turns: they warm up together."""


def saved_traces(stats: Any) -> int:
    """How many calls a second trace would have taken, where one was enough."""
    return max(0, TRACED * stats.captured - stats.traced)


def _nothing(index: int) -> None:
    """What a rig does between calls unless it is told otherwise."""


@dataclass
class Rig:
    """A step, the arguments of every call, and all that the calls may touch."""

    step: Callable[..., Any]
    owners: dict[str, Any]
    calls: list[tuple[Any, ...]]
    after: Callable[[int], object] = _nothing
    """Host code that runs after call number ``index``."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What is compared too, but is not named to graphplan."""


@dataclass
class Record:
    """What a run returned and what it left behind."""

    outputs: list[Any]
    state: dict[str, Any]


def prepare_steps(optimizer: Optimizer) -> Callable[[], None]:
    """Prepare an eager twin's optimizer as a graphed step does: from its first step on, and only while a step runs.

    Returns:
        What makes it stock again, as a graphed step does that stands down.
    """
    preparations: list[Preparation] = []

    def enter(*_: Any) -> None:
        if preparations:
            preparations[0].enter()
        else:
            preparations.append(Preparation(optimizer))
        # Its own hook is entered too late for the step that is about to begin.
        preparations[0]._check_gradients()

    handles = [
        optimizer.register_step_pre_hook(enter),
        optimizer.register_step_post_hook(lambda *_: preparations[0].leave()),
    ]

    def release() -> None:
        for handle in handles:
            handle.remove()
        for preparation in preparations:
            preparation.undo()

    return release


def build(make: Callable[[], Rig]) -> Rig:
    """Make a rig from the seed that all twins share."""
    torch.manual_seed(SEED)
    rig = make()
    torch.manual_seed(SEED + 1)
    return rig


def keep(value: Any) -> Any:
    """Copy the tensors of a pytree, so that later steps cannot change them."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def drive(rig: Rig, call: Callable[..., Any], count: int | None = None) -> Record:
    """Make the rig's calls through ``call`` and record them."""
    outputs = []
    for index, args in enumerate(rig.calls[:count]):
        outputs.append(keep(call(*args)))
        rig.after(index)
    return Record(outputs, state_of(rig))


def state_of(rig: Rig) -> dict[str, Any]:
    """Flatten all that a rig may touch, the default generator included, into path → copied value."""
    facts: dict[str, Any] = {"generator": torch.get_rng_state(), **dict(zip(NAMES, read_all(), strict=True))}
    seen: set[int] = set()
    for name, value in {**rig.owners, **rig.extra, "calls": rig.calls}.items():
        walk(name, value, facts, seen)
    return facts


def assert_same_runs(expected: Record, found: Record) -> None:
    """Fail unless two runs returned the same values, call by call, and left the same state."""
    assert_same(flatten(outputs=expected.outputs), flatten(outputs=found.outputs))
    assert_same(expected.state, found.state)


def managed(rig: Rig, **options: Any) -> Any:
    """Put the rig's step under graphplan on the tape."""
    return graph_step(rig.step, **{"owners": rig.owners, "backend": "tape", **options})


def assert_same_as_eager(make: Callable[[], Rig], **options: Any) -> Any:
    """Check a rig against its eager twin; return the graphed step, whose counters are the caller's affair.

    Args:
        make: Builds the rig; called once for each twin.
        options: Passed to ``graph_step``.
    """
    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig, **options)
    assert_same_runs(expected, drive(rig, step))
    return step


def same_as_eager(make: Callable[[], Rig], device: torch.device, backend: str) -> Any:
    """Check a rig that is built on the device against its eager twin; return the graphed step."""
    with device:
        rig = build(make)
    expected = drive(rig, rig.step)
    with device:
        rig = build(make)
    step = managed(rig, backend=backend)
    assert_same_runs(expected, drive(rig, step))
    return step


def assert_equals_eager(
    make: Callable[[], Rig], *, captured: int = 1, further: int = 0, replayed: int | None = None, **options: Any
) -> Any:
    """Check a rig against its eager twin and its own counters; return the graphed step.

    Args:
        make: Builds the rig; called once for each twin.
        captured: How many captures are expected in all.
        further: How many of them are of further shapes.
        replayed: How many replays are expected, if each capture has two traces; by default all calls but those before
            the first replay.
        options: Passed to ``graph_step``.
    """
    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = drive(rig, step)
    assert_same_runs(expected, found)
    stats = step.stats
    calls = len(rig.calls)
    assert stats.eager + stats.traced + stats.captured + stats.replayed == calls
    assert stats.captured == captured
    expected_replays = calls - before_replays(captured, further) if replayed is None else replayed
    assert stats.replayed == expected_replays + saved_traces(stats)
    return step


def by_chance(tensor: Tensor) -> Tensor:
    """The same values, which operators make with random numbers: no read that is made before a step can have them."""
    # What is drawn on the host can be drawn ahead, but for what names its generator.
    generator = torch.default_generator if tensor.device.type == "cpu" else None
    return torch.where(torch.rand(tensor.shape, device=tensor.device, generator=generator) < 0.5, tensor, tensor)


def line_of(function: Callable[..., Any], marker: str = "culprit") -> str:
    """Return a pattern for the file and line of the function's line that carries ``# marker``."""
    code = getattr(function, "__func__", function).__code__
    lines = Path(code.co_filename).read_text().splitlines()
    for number in range(code.co_firstlineno, len(lines) + 1):
        if f"# {marker}" in lines[number - 1]:
            return rf"{re.escape(Path(code.co_filename).name)}\D{{1,10}}{number}\b"
    raise AssertionError(f"{function} has no line marked # {marker}")


def assert_refused(
    make: Callable[[], Rig], error: type[Exception], *patterns: str, done: int = WARMUP, **options: Any
) -> Exception:
    """Check that call number ``done`` (from 0) is refused with a telling message, and did not happen.

    Args:
        make: Builds the rig; called once for each twin.
        error: The exact class of the refusal.
        patterns: Regular expressions that the message has to match, each of them.
        done: How many calls succeed before the refusal.
        options: Passed to ``graph_step``.
    """
    assert patterns, "a refusal is told by what it says"
    rig = build(make)
    step = managed(rig, **options)
    finished = 0
    before: dict[str, Any] = {}
    with pytest.raises(error) as caught:
        for index, args in enumerate(rig.calls):
            before = state_of(rig)
            step(*args)
            rig.after(index)
            finished += 1
    message = str(caught.value)
    assert type(caught.value) is error, f"a subclass: {caught.value!r}"
    for pattern in patterns:
        assert re.search(pattern, message), f"{pattern!r} is not in:\n{message}"
    assert_same(before, state_of(rig))
    assert finished == done, f"refused after {finished} calls: {message}"
    twin = build(make)
    assert_same(drive(twin, twin.step, finished).state, before)
    return caught.value


def assert_falls_back(make: Callable[[], Rig], reason: SkipReason, *patterns: str, **options: Any) -> None:
    """Check that ``on_failure="eager"`` warns exactly once, gives eager's numbers and counts the reason."""
    assert patterns, "a warning is told by what it says"
    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig, on_failure="eager", **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = drive(rig, step)
    messages = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    assert len(messages) == 1, messages
    for pattern in patterns:
        assert re.search(pattern, messages[0]), f"{pattern!r} is not in:\n{messages[0]}"
    assert_same_runs(expected, found)
    assert step.stats.replayed == 0
    assert step.stats.skipped[reason] > 0, step.stats.skipped
