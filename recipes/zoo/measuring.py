"""Measure one entry in its own process: run its stages, compare them with eager runs, and write the results."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch

from graphplan import GraphPlanCallback
from recipes.zoo.training import Prepared, Run, State, fit, floor, infer, loop, recording_warnings

Row = dict[str, Any]
Oracle = tuple[str, Callable[[], State]]
Stage = Callable[[Run, Row], None]
_FRAMES = 16
"""Maximum number of frames of a traceback to keep."""
_WARM_EAGER = 10
_TURNS = 4
_COUNTED = 15
"""Number of steps whose function calls are counted."""
_SPREAD = 3
"""Maximum distance of a run from eager runs, as a multiple of the distance among eager runs."""


def distance(left: State, right: State) -> tuple[float, str]:
    """Return the largest difference of a tensor, relative to its largest element, and its name; 0 if bitwise equal."""
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
    """Compare a run with eager runs, made one by one until one is bitwise equal; if none is, with their spread."""
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
    run: Run,
    eager: State,
    train: Callable[[Run, Prepared], State],
    *,
    steps: Sequence[int] = range(sys.maxsize),
    with_optimizer: bool = True,
) -> list[Oracle]:
    """Return eager runs: as graphplan's own eager steps in ``steps`` (see :class:`Prepared`), as it is, there with
    prepared optimizers alone, and on CUDA the first again, for the spread. Without ``with_optimizer``, skip the first:
    its optimizer may refuse to run in a capture.
    """
    untimed = replace(run, warm=run.warm + run.steps, steps=0)

    def prepared(*, captured: bool) -> State:
        return train(untimed, Prepared(steps, captured=captured))

    whole = [("prepared", partial(prepared, captured=True))]
    other = ("prepared, not captured", partial(prepared, captured=False))
    again = ("prepared, again", partial(prepared, captured=with_optimizer))
    return [*whole[:with_optimizer], ("as it is", lambda: eager), other, *[again][: run.gpu]]


def _as_managed(row: Row) -> dict[str, Any]:
    return {"steps": range(*row["managed_steps"]), "with_optimizer": row["form"] == "whole"}


def brief(run: Run) -> Run:
    """Return the run for eager steps: with a shorter warm-up if nothing is compared with them."""
    return run if run.equality else replace(run, warm=min(run.warm, _WARM_EAGER))


def in_trainer(run: Run, row: Row) -> None:
    """Measure a Trainer without and with the callback."""
    eager, state = fit(brief(run))
    row |= {"eager_us": eager["us"], "eager_us_mean": eager["us_mean"]}
    facts, found = fit(run, GraphPlanCallback(on_failure="eager"))
    row |= facts
    train = lambda untimed, prepared: fit(untimed, prepared)[1]  # noqa: E731
    if run.equality:
        row |= compare(found, oracles_of(run, state, train, **_as_managed(row)))


class Calls(pl.Callback):
    """Counts the calls of Python and C functions in the last steps of a fit, with a profile function."""

    def __init__(self, last: int) -> None:
        self._last = last
        self.count = 0

    def _note(self, frame: Any, event: str, arg: Any) -> None:
        self.count += event in ("call", "c_call")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start counting ``_COUNTED`` steps before the last one, and stop at its beginning."""
        if batch_idx == self._last - _COUNTED:
            sys.setprofile(self._note)
        elif batch_idx == self._last:
            sys.setprofile(None)


def calls_in(run: Run, callback: pl.Callback) -> float:
    """Return the function calls per step in the last part of a fit."""
    counts = Calls(run.warm + run.steps)
    fit(run, callback, counts)
    return counts.count / _COUNTED


def in_turns(run: Run, row: Row) -> None:
    """Measure a Trainer without and with the callback several times in turns. A host's speed drifts within minutes, by
    more than a step that is not replayed may lose, so the order alternates. Function calls do not depend on the speed:
    they are counted with the callback, and with a callback that does nothing.
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
    """Measure a plain loop without and with ``graph_step``."""
    eager, state = loop(brief(run), manage=False)
    row["eager_us"] = eager["us"]
    facts, found = loop(run, manage=True)
    row |= facts
    train = lambda untimed, prepared: loop(untimed, manage=False, prepared=prepared)[1]  # noqa: E731
    if run.equality:
        row |= compare(found, oracles_of(run, state, train, **_as_managed(row)))


def in_service(run: Run, row: Row) -> None:
    """Measure predictions without and with ``graphed``."""
    eager, state = infer(run, manage=False)
    row["eager_us"] = eager["us"]
    facts, found = infer(run, manage=True)
    row |= facts
    row |= compare(found, [("eager", lambda: state)])


def by_hand(run: Run, row: Row) -> None:
    """Measure the floor."""
    row |= floor(run)


def stages_of(run: Run) -> Iterator[tuple[str, Stage]]:
    """Yield the stages of an entry. A library's own LightningModule has no plain loop."""
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
    """Measure the stages, and write the row to ``path`` after each one, so that a crash keeps the earlier stages."""
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
    # Tables go into the repository: leave out folders of this machine.
    lines = [f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames]
    return {"error": f"{type(error).__name__}: {error}"[:1500], "traceback": lines}
