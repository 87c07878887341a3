"""A random run twice: once eagerly, once through graphplan, compared bit by bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from graphplan import GraphedStep, GraphPlanError, VerifyError, graph_step
from graphplan.environment.switches import read_all, set_all
from tests.facts import assert_same, flatten
from tests.models import Memory
from tests.random_runs import step as steps
from tests.random_runs.bench import EVENTS, Bench
from tests.random_runs.models import Net
from tests.random_runs.run import Run
from tests.twins import SEED, Rig, keep, prepare_steps, state_of

BASE = read_all()
OBSERVED = 4
"""All state is compared after every so many calls: by the end, later steps may have hidden a difference."""
DISAGREEMENT = "is not what the eager step does"
TORCH_RAISES = (RuntimeError, TypeError, KeyError, ValueError, IndexError, AttributeError, AssertionError)


@dataclass
class Story:
    """What one twin went through."""

    outputs: list[Any] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    """The outputs themselves, which later calls must leave alone; ``outputs`` are copies."""
    states: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    refusal: GraphPlanError | None = None
    failure: str = ""
    """Some events make torch itself raise: a fused SGD after half of its momentum is gone."""


def make_twin(run: Run, *, prepare: bool) -> tuple[Bench, Rig]:
    """Build one twin, and the same as a rig, whose state can be flattened. The eager one is prepared as graphplan
    prepares the other one.
    """
    steps.GAIN = 1.0
    set_all(BASE)
    torch.manual_seed(SEED)
    model = Net(run.family, run.layers, run.extras)
    if "channels last" in run.extras and run.family == "conv":
        model = model.to(memory_format=torch.channels_last)
    optimizers = steps.make_optimizers(run, model)
    releases = [prepare_steps(optimizer) for optimizer in optimizers] if prepare else []
    make = (steps.SCHEDULES | steps.OF_MOMENTUM).get(run.schedule)
    schedulers = [make(optimizer) for optimizer in optimizers] if make else []
    generator = torch.Generator().manual_seed(5)
    calls = [steps.make_batch(run, index, generator) for index in range(run.calls)]
    if "constant batch" in run.extras:
        calls = [calls[0]] * run.calls
    settings, scaler = Memory(penalty=0.0), steps.make_scaler(run)
    step = steps.make_step(run, model, optimizers, scaler, settings)
    bench = Bench(model, optimizers, schedulers, scaler, calls, step, settings, releases=releases)
    bench.save()
    torch.manual_seed(SEED + 1)
    # A scaler keeps its tensors under names that are not looked at; its ``state_dict`` reads them.
    extra = {"optimizers": list(optimizers), "settings": settings}
    return bench, Rig(step, {"model": model}, calls, extra=extra)


def owners_of(run: Run, bench: Bench) -> Any:
    """What graphplan is told; the rest it has to find. It does not look for scalers."""
    optimizers = {f"optimizer{number}": optimizer for number, optimizer in enumerate(bench.optimizers)}
    scaler = {} if bench.scaler is None else {"scaler": bench.scaler}
    if run.tells_all:
        return {"model": bench.model, **optimizers, **scaler}
    return scaler or None if run.owners == "none" else {"model": bench.model, **scaler}


def graphed(run: Run, bench: Bench) -> GraphedStep:
    """The step of ``bench`` through graphplan, with the run's options."""
    bench.graphed = graph_step(
        bench.step,
        owners=owners_of(run, bench),
        mode="inference" if run.infers else "train",
        backend="tape",
        on_failure=run.on_failure,
        verify=run.verify,
        warmup_steps=run.warmup_steps,
        prepare_optimizers=run.prepare_optimizers,
        eager_if=run.eager_if,
        max_graphs=run.max_graphs,
    )
    managed = bench.graphed.machine.managed
    stand_down = managed.stand_down

    def noted(*args: Any, **options: Any) -> None:
        # Calls that have returned: the one that is going on may have had its step already, or not.
        bench.stock_from = bench.graphed.stats.calls
        stand_down(*args, **options)

    managed.stand_down = noted  # type: ignore[method-assign]
    return bench.graphed


def _happen(run: Run, bench: Bench, index: int) -> None:
    """The scheduler and the events that follow call ``index``."""
    if index % run.every == run.every - 1:
        for scheduler in bench.schedulers:
            scheduler.step()
    for place, name, number in run.events:
        if place == index:
            EVENTS[name](bench, number)


def _state(bench: Bench, rig: Rig) -> dict[str, Any]:
    scaler = {} if bench.scaler is None else flatten(scaler=bench.scaler.state_dict())
    return {**state_of(rig), **scaler}


def tell(run: Run, bench: Bench, rig: Rig, call: Callable[..., Any], count: int) -> Story:
    """Make ``count`` calls, or as many as are not refused."""
    story = Story()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(count):
            if index == bench.stock_from:
                for release in bench.releases:
                    release()
            autocast = "autocast calls" in run.extras and index % 5 == 3
            try:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    result = call(*bench.calls[index])
            except GraphPlanError as error:
                story.refusal = error
                break
            except TORCH_RAISES as error:
                story.failure = f"call {index}: {error!r}"
                return story
            story.held.append(result)
            story.outputs.append(keep(result))
            if index % OBSERVED == OBSERVED - 1:
                story.states.append(_state(bench, rig))
            _happen(run, bench, index)
    story.states.append({**_state(bench, rig), **flatten(saved=[bench.weights, bench.moments])})
    story.warnings = [str(warning.message) for warning in caught]
    return story


def compare(run: Run) -> int:
    """Check one run against its eager twin; return how many calls were replayed."""
    bench, rig = make_twin(run, prepare=False)
    step = graphed(run, bench)
    found = tell(run, bench, rig, step, run.calls)
    done = len(found.outputs)
    twin, twin_rig = make_twin(run, prepare=run.prepare_optimizers)
    twin.stock_from = bench.stock_from
    expected = tell(run, twin, twin_rig, twin.step, done + bool(found.failure))
    assert found.failure == expected.failure, f"{found.failure or expected.failure!r} in one of the twins only"
    if not found.failure:
        _check_words(run, found, expected, step.stats.replayed)
        _check_values(found, expected)
    return step.stats.replayed


def _check_words(run: Run, found: Story, expected: Story, replayed: int) -> None:
    """Check what graphplan said: a refusal, a warning, or nothing."""
    own = [text for text in found.warnings if text.startswith("graphplan")]
    assert not isinstance(found.refusal, VerifyError), f"a replay was wrong: {found.refusal}"
    assert not any(DISAGREEMENT in text for text in own), f"a replay was wrong: {own}"
    if found.refusal is not None:
        assert run.on_failure == "raise", f"refused although failures are to run eagerly: {found.refusal}"
        assert replayed == 0, f"refused after a replay: {found.refusal}"
    elif run.on_failure == "raise" and replayed == 0:
        assert not own, f"warned, where a refusal should have been raised: {own}"
    assert set(found.warnings) - set(own) <= set(expected.warnings), "warnings that eager does not give"


def _check_values(found: Story, expected: Story) -> None:
    for number, (right, left) in enumerate(zip(expected.outputs, found.outputs, strict=True)):
        assert_same(flatten(**{f"output of call {number}": right}), flatten(**{f"output of call {number}": left}))
    assert_same(flatten(held=found.outputs), flatten(held=[keep(result) for result in found.held]))
    for number, (before, after) in enumerate(zip(expected.states, found.states, strict=True), 1):
        # They are flat, and copies.
        assert_same(before, after, f" after call {min(number * OBSERVED, len(found.outputs))}")
