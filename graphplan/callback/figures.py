"""What the steps of fits and evaluations were: figures, batches that Lightning trained on alone, and their reports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from graphplan.errors import OptionError, SkipReason
from graphplan.plan.plan import Plan
from graphplan.report.data import describe_data
from graphplan.report.page import page
from graphplan.report.stats import Stats
from graphplan.report.text import describe, summary

_FORMATS = ("text", "json", "html")
RUNS = 16
"""Earlier runs that a report tells of."""


@dataclass
class Figures:
    """What a seam did: counts, plans that were captured, notes for the report, the latest plan, and what it replays of
    a step, if not all of it. ``programs`` are described at its end. ``updates`` are the optimizers' steps that the
    Trainer counted, as its ``global_step``; None in evaluation.
    """

    stats: Stats = field(default_factory=Stats)
    plans: int = 0
    notes: list[str] = field(default_factory=list)
    plan: Plan | None = None
    part: str = ""
    updates: int | None = None
    programs: list[dict[str, Any]] = field(default_factory=list)

    def text(self) -> str:
        """The report as text."""
        return describe(self.stats, plans=self.plans, notes=self.notes, part=self.part, updates=self.updates)

    def headline(self) -> str:
        """The report's first line."""
        return summary(self.stats, plans=self.plans, part=self.part, updates=self.updates)

    def data(self) -> dict[str, Any]:
        """The report as plain data."""
        return describe_data(
            self.stats, plans=self.plans, notes=self.notes, part=self.part, programs=self.programs, updates=self.updates
        )


class StockBatches:
    """Batches of a fit that Lightning trains on alone, before the seam is installed and after it was taken out: counted
    by Lightning's own progress, without a look at each.

    Attributes:
        reason: why the current ones are not graphplan's; None for those that are timed.
    """

    def __init__(self, trainer: Any = None) -> None:
        # Not the Trainer, which a callback must not keep.
        loop = None if trainer is None else trainer.fit_loop.epoch_loop
        self._progress: Any = None if loop is None else loop.batch_progress.total
        optimizations = [] if loop is None else [loop.automatic_optimization.optim_progress.optimizer.step.total]
        optimizations += [] if loop is None else [loop.manual_optimization.optim_step_progress.total]
        self._optimizers: list[Any] = optimizations
        self._updates_before = self._updates()
        self._since: int | None = None
        self._past = Stats()
        self._detail = ""
        self.reason: SkipReason | None = None

    def _updates(self) -> int:
        return sum(progress.completed for progress in self._optimizers)

    @property
    def updates(self) -> int | None:
        """Steps of the Trainer's optimizers since the fit began; None without a Trainer."""
        return self._updates() - self._updates_before if self._optimizers else None

    def begin(self, reason: SkipReason | None, detail: str = "") -> None:
        """From the next batch on, Lightning is alone."""
        self._since, self.reason, self._detail = self._progress.ready, reason, detail

    def end(self) -> None:
        """The current batch was the last one."""
        self._past, self._since = self.added_to(Stats()), None

    @property
    def count(self) -> int:
        """Batches since :meth:`begin`; 0 after :meth:`end`."""
        count: int = 0 if self._since is None else self._progress.ready - self._since
        return count

    def added_to(self, stats: Stats) -> Stats:
        """``stats`` with these batches among the eager ones."""
        total = Stats()
        total.merge(self._past)
        total.merge(stats)
        if self.count:
            total.count_stock(self.count)
            if self.reason is not None:
                total.skip(self.reason, self._detail, self.count)
        return total


def check_format(format: str) -> None:
    """Refuse a form that reports of a callback do not have.

    Raises:
        OptionError: naming those that there are.
    """
    if format not in _FORMATS:
        raise OptionError(f"format is {format!r}; expected one of: {', '.join(_FORMATS)}")


def told(runs: Sequence[tuple[str, Figures]], format: str) -> str:
    """The figures of runs, each with what ran (training, evaluation), as one report."""
    if format == "text" and len(runs) == 1:
        return runs[0][1].text()
    of_each, numbers = Counter(part for part, _ in runs), Counter[str]()
    sections = []
    for part, figures in runs:
        numbers[part] += 1
        sections.append((f"{part} {numbers[part]}" if of_each[part] > 1 else part, figures))
    if format == "text":
        return "\n".join(f"{title}:\n{figures.text()}" for title, figures in sections)
    data = [(title, figures.data()) for title, figures in sections]
    return page(data) if format == "html" else json.dumps(dict(data), indent=2)
