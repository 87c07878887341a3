"""Checks of a step and of a fit: a few real steps on the CPU, under CUDA's rules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

from graphplan.check.cuda_rules import cuda_rules
from graphplan.check.result import Result, blockers_of, facts_of
from graphplan.errors import SkipReason
from graphplan.plan.plan import Plan
from graphplan.report.figures import CLOSED
from graphplan.report.stats import Stats
from graphplan.step.graphed_step import graph_step
from graphplan.trace.records import collecting

STEPS = 16
"""Steps of each run: enough for a warm-up, traces that are made again, a capture and a few replays."""
_NO_REFUSALS = {
    SkipReason.SHAPE, SkipReason.EAGER_IF, SkipReason.UNBORN, SkipReason.MAX_GRAPHS,
}  # fmt: skip
"""Reasons for eager calls that the way to a program has, too."""
Ran = tuple[Stats, Plan | None, list[str]]
"""Counts of a run's training steps, their latest plan, and notes on what is replayed."""


def check_step(
    fn: Callable[..., Any],
    calls: Iterable[tuple[Any, ...]],
    *,
    owners: Mapping[str, Any] | Sequence[Any] | None = None,
    name: str = "step",
) -> Result:
    """Run a step a few times on the CPU, and list everything that would keep it from being one replay.

    The steps are real: models are trained by them.

    Examples:
        >>> import torch
        >>> from graphplan import check_step
        >>> model = torch.nn.Linear(4, 1)
        >>> def step(x):
        ...     loss = model(x).square().mean()
        ...     if loss.item() > 1e9:
        ...         loss = loss / 2
        ...     return loss.tolist()
        >>> len(check_step(step, [(torch.randn(8, 4),)], owners={"model": model}).blockers)
        2

    Args:
        fn: the step.
        calls: the positional arguments of one call each; they repeat.
        owners: objects whose tensors the step uses, as for :func:`graph_step`.
        name: what the result is headed with.

    Returns:
        The result. ``print(result.text())`` lists the blockers.

    Raises:
        ValueError: if there are no calls.
    """
    every = list(calls)
    if not every:
        raise ValueError("calls is empty; expected the arguments of one call at least")

    def run() -> Ran:
        step = graph_step(fn, owners=owners, backend="tape", on_failure="eager")
        for args in islice(cycle(every), STEPS):
            step(*args)
        stats, plan = step.stats, step.plan
        step.close()
        return stats, plan, []

    return check(run, name)


def check(run: Callable[[], Ran], name: str) -> Result:
    """The result of two runs: one in which refusals are collected, and one as it would be.

    Args:
        run: trains for a few steps with ``backend="tape"`` and ``on_failure="eager"``.
        name: what the result is headed with.
    """
    # A step that is refused is let go on, for a plan of it.
    with warnings.catch_warnings(), collecting() as found, cuda_rules():
        warnings.simplefilter("ignore")
        _, collected_plan, _ = run()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stats, plan, notes = run()
    refused = {reason for reason in stats.skipped if reason not in _NO_REFUSALS}
    closed = tuple(note for note in notes if note.startswith(CLOSED))
    blockers = (*closed, *blockers_of(found.values(), stats if refused else Stats()))
    best = plan or collected_plan
    texts = [str(each.message) for each in caught if str(each.message).startswith("the step ")]
    return Result(
        name=name,
        blockers=blockers,
        warnings=tuple(dict.fromkeys(texts)),
        replayed=_replayed(stats, notes, is_blocked=bool(blockers)),
        plan=None if best is None else facts_of(best),
    )


def _replayed(stats: Stats, notes: Sequence[str], *, is_blocked: bool) -> str:
    parts = next((note for note in notes if "eagerly" in note), None)
    if not stats.replayed:
        return "nothing would be replayed" if is_blocked else "no step was replayed in so few of them"
    if parts is not None:
        return f"a part of each step would be replayed ({parts})"
    return "replayed on the CPU, and not on a CUDA device" if is_blocked else "each step would be one replay"
