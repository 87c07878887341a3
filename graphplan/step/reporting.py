"""What a graphed step tells of itself."""

from __future__ import annotations

from typing import Any

from graphplan.compare import building as native
from graphplan.compare.comparing import Tensors
from graphplan.errors import SkipReason
from graphplan.plan.plan import Plan
from graphplan.program.program import Program
from graphplan.report.data import describe_data
from graphplan.report.rendering import Reports
from graphplan.report.stats import Stats
from graphplan.report.text import describe
from graphplan.step.compiling import CompiledModules
from graphplan.step.gate import Stock
from graphplan.step.managed import Managed
from graphplan.step.programs import Programs
from graphplan.step.runner import Runner


class Reporting(Reports):
    """Plan, statistics and report of a step that has these parts."""

    _runner: Runner
    _managed: Managed
    _programs: Programs
    _compiled: CompiledModules
    stock: Stock | None = None
    """What makes calls of the step's function alone, before a step begins and once it stands down."""
    _stock_reason: SkipReason | None = None
    _stock_detail = ""

    @property
    def plan(self) -> Plan | None:
        """The latest plan; None before the second trace."""
        return self._runner.plan

    @property
    def stats(self) -> Stats:
        """What the calls so far were."""
        self._take_counts()
        return self._runner.stats

    def _take_counts(self) -> None:
        """Count calls of the step's own function."""
        count = 0 if self.stock is None else self.stock.take_count()
        if count:
            stats = self._runner.stats
            stats.count_stock(count)
            if self._stock_reason is not None:
                stats.skip(self._stock_reason, self._stock_detail, count)

    def text(self) -> str:
        """The report as text."""
        return describe(**self._facts())

    def data(self) -> dict[str, Any]:
        """The report as data."""
        return describe_data(**self._facts(), programs=self.drawn())

    def drawn(self) -> list[Program]:
        """Every program that is ready."""
        return self._programs.all()

    def _facts(self) -> dict[str, Any]:
        notes = [*self.facts, *self._compiled.notes]
        if Tensors is None:
            notes.append(f"guards: {native.state()}")
        return {"stats": self.stats, "plans": self.stats.captured - self.stats.recaptured, "notes": notes}

    @property
    def prepared(self) -> list[str]:
        """What was changed on the optimizers to make them capturable."""
        return self._managed.changes

    @property
    def facts(self) -> list[str]:
        """What the report says of the step beside its counts: what was prepared."""
        return [f"prepared: {change}" for change in self.prepared]
