"""One entry's measurement, in a process of its own: what is compared with what, and written down after each stage."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch

from graphplan import GraphPlanCallback
from recipes.zoo.training import Prepared, Run, State, answering_captured, fit, floor, infer, loop, recording_warnings

Row = dict[str, Any]
Oracle = tuple[str, Callable[[], State]]
Stage = Callable[[Run, Row], None]
_FRAMES = 16
"""Calls of a traceback that are kept."""
_WARM_EAGER = 10
_TURNS = 4
_COUNTED = 15
"""Steps of which the calls are counted."""
_SPREAD = 3
"""How many times as far from eager as eager is from itself a run may be."""


def distance(left: State, right: State) -> tuple[float, str]:
    """Largest difference of a tensor, relative to its largest element, and that tensor's name; 0 if bitwise equal."""
    if left.keys() != right.keys():
        return float("inf"), f"only one run has {sorted(left.keys() ^ right.keys())[:3]}"
    farthest = 0.0, ""
    for name, one in left.items():
        other = right[name]
        if one.shape != other.shape or one.dtype != other.dtype:
            return float("inf"), f"{name}: {tuple(one.shape)} {one.dtype} against {tuple(other.shape)} {other.dtype}"
        if torch.equal(one, other) or not one.numel():
            continue
        gap = (one.double() - other.double()).abs()
        if not gap.isfinite().all():
            if torch.equal(one.nan_to_num(), other.nan_to_num()):
                continue
            return float("inf"), name
        farthest = max(farthest, (float(gap.max() / one.double().abs().max().clamp(min=1e-6)), name))
    return farthest


def compare(found: State, oracles: Sequence[Oracle]) -> Row:
    """Hold a run to the eager ones, made one after the other until one is equal bit by bit; else to their spread."""
    states: list[State] = []
    for name, make in oracles:
        states.append(make())
        if distance(states[-1], found)[0] == 0:
            return {"equal": "bitwise", "oracle": name}
    gaps = [distance(state, found) for state in states]
    spread = max(distance(one, other)[0] for one in states for other in states)
    gap, tensor = min(gaps)
    verdict = "within spread" if gap <= _SPREAD * spread else "different"
    return {"equal": verdict, "distance": gap, "spread": spread, "tensor": tensor}


def oracles_of(
    run: Run, eager: State, train: Callable[[Run, bool], State], *, with_optimizer: bool = True
) -> list[Oracle]:
    """Eager runs: with prepared optimizers and captured paths, with either alone, and once more for eager's spread.
    ``with_optimizer``: whether the optimizer's step is captured, too; what cannot be does not run where it hears so.
    """
    untimed = replace(run, warm=run.warm + run.steps, steps=0)

    def captured() -> State:
        with answering_captured():
            return train(untimed, True)

    def prepared() -> State:
        return train(untimed, True)

    whole, other = [("prepared", captured)], ("prepared, not captured", prepared)
    again = ("prepared, again", captured if with_optimizer else prepared)
    return [*whole[:with_optimizer], ("as it is", lambda: eager), other, *[again][: run.gpu]]


def brief(run: Run) -> Run:
    """How eager steps are timed that nothing is compared with: after a few that do not count."""
    return run if run.equality else replace(run, warm=min(run.warm, _WARM_EAGER))


def in_trainer(run: Run, row: Row) -> None:
    """A Trainer without and with the callback."""
    eager, state = fit(brief(run))
    row |= {"eager_us": eager["us"], "eager_us_mean": eager["us_mean"]}
    facts, found = fit(run, GraphPlanCallback(on_failure="eager"))
    row |= facts
    train = lambda untimed, prepared: fit(untimed, *[Prepared()][:prepared])[1]  # noqa: E731
    if run.equality:
        row |= compare(found, oracles_of(run, state, train, with_optimizer=row.get("form") == "whole"))


class Calls(pl.Callback):
    """Counts the functions, in Python and C, that the last steps of a fit call, as a profiler hears of them."""

    def __init__(self, last: int) -> None:
        self._last = last
        self.count = 0

    def _note(self, frame: Any, event: str, arg: Any) -> None:
        self.count += event in ("call", "c_call")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count from the first of them to the beginning of the last."""
        if batch_idx == self._last - _COUNTED:
            sys.setprofile(self._note)
        elif batch_idx == self._last:
            sys.setprofile(None)


def calls_in(run: Run, callback: pl.Callback) -> float:
    """Calls per step of a late part of a fit."""
    counts = Calls(run.warm + run.steps)
    fit(run, callback, counts)
    return counts.count / _COUNTED


def in_turns(run: Run, row: Row) -> None:
    """A Trainer without and with the callback, several times each, in turns: a host's speed drifts within minutes, by
    more than what a step that is not replayed may lose, so that the order is turned round each time. The calls of a
    step do not depend on it: they are counted with the callback, and with one that does nothing in its place.
    """
    eager, managed = list[float](), list[float]()

    def without() -> None:
        eager.append(fit(replace(run, warm=_WARM_EAGER))[0]["us"])

    def with_ours() -> None:
        facts, _ = fit(run, GraphPlanCallback(on_failure="eager"))
        managed.append(facts["us"])
        row.update(facts)

    for number in range(_TURNS):
        for train in (without, with_ours) if number % 2 == 0 else (with_ours, without):
            train()
    row |= {"eager_us": median(eager), "us": median(managed), "eager_runs_us": eager, "runs_us": managed}
    short = replace(run, steps=_COUNTED)
    row["eager_calls"], row["calls"] = (
        calls_in(short, pl.Callback()),
        calls_in(short, GraphPlanCallback(on_failure="eager")),
    )


def in_loop(run: Run, row: Row) -> None:
    """A plain loop without and with ``graph_step``."""
    eager, state = loop(brief(run), manage=False)
    row["eager_us"] = eager["us"]
    facts, found = loop(run, manage=True)
    row |= facts
    train = lambda untimed, prepared: loop(untimed, manage=False, prepared=prepared)[1]  # noqa: E731
    if run.equality:
        row |= compare(found, oracles_of(run, state, train, with_optimizer=row.get("form") == "whole"))


def in_service(run: Run, row: Row) -> None:
    """Predictions without and with ``graphed``."""
    eager, state = infer(run, manage=False)
    row["eager_us"] = eager["us"]
    facts, found = infer(run, manage=True)
    row |= facts
    row |= compare(found, [("eager", lambda: state)])


def by_hand(run: Run, row: Row) -> None:
    """The floor."""
    row |= floor(run)


def stages_of(run: Run) -> Iterator[tuple[str, Stage]]:
    """What is measured of an entry: a library's own LightningModule has no plain loop."""
    case = run.make()
    yield "fit", in_trainer
    yield "turns", in_turns
    if not isinstance(case.model, pl.LightningModule):
        yield "loop", in_loop
        if case.predict is not None:
            yield "service", in_service
        if run.gpu and run.entry.core:
            yield "floor", by_hand


def measure(run: Run, path: Path) -> None:
    """Write the row to ``path``, and write it anew after each stage: a crash loses what comes after it, no more."""
    row: Row = {"device": torch.cuda.get_device_name() if run.gpu else "cpu", "torch": torch.__version__}

    def keep() -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(row))
        part.rename(path)

    start = perf_counter()
    try:
        for name, stage in [pair for pair in stages_of(run) if pair[0] in run.stages]:
            row["at"] = name
            keep()
            with recording_warnings() as texts:
                row[name] = _caught(stage, run)
            row[name]["warnings"] = [text for text in texts if "graphplan" in text][:4]
            row["seconds"] = perf_counter() - start
            keep()
        row.pop("at")
    except Exception as error:  # noqa: BLE001
        row |= _described(error)
    keep()


def _caught(stage: Stage, run: Run) -> Row:
    row: Row = {}
    try:
        stage(run, row)
    except Exception as error:  # noqa: BLE001
        row |= _described(error)
    run.turns.drop()
    return row


def _described(error: BaseException) -> Row:
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    # A table goes into the repository: no folders of this machine.
    lines = [f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames]
    return {"error": f"{type(error).__name__}: {error}"[:1500], "traceback": lines}
