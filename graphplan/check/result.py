"""What a check found, and how it is told."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from graphplan.errors import RefusalError
from graphplan.plan.plan import Plan
from graphplan.report.stats import Stats
from graphplan.specs.roles import Role

_WIDTH = 100
Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What a check found.

    Attributes:
        name: what was checked.
        blockers: why the step cannot be replayed as a whole, one text each with file, line and what to do; empty if
            it can.
        warnings: what replays would leave out, and the like.
        replayed: what would be replayed as things are.
        plan: facts of the plan, :func:`facts_of`; None if none could be made.
    """

    name: str
    blockers: tuple[str, ...]
    warnings: tuple[str, ...]
    replayed: str
    plan: Facts | None

    def data(self) -> dict[str, Any]:
        """The result as plain data."""
        return asdict(self)

    def text(self) -> str:
        """The result as text for people."""
        lines = [f"{self.name}: {self.replayed}"]
        if self.plan is not None:
            mib = {name: nbytes / 2**20 for name, nbytes in self.plan["bytes"].items()}
            lines.append(
                f"  {self.plan['launches']} launches per step would be one; inputs {mib['input']:.1f} MiB, parameters "
                f"{mib['param']:.1f} MiB, state {mib['state']:.1f} MiB, intermediates about "
                f"{mib['intermediates']:.1f} MiB"
            )
        count = len(self.blockers)
        lines.append(f"  {count} blocker{'' if count == 1 else 's'}{':' if count else ''}")
        for number, blocker in enumerate(self.blockers, 1):
            lines.append(textwrap.fill(f"{number}. {blocker}", _WIDTH, initial_indent="  ", subsequent_indent="     "))
        lines += [
            textwrap.fill(f"warning: {text}", _WIDTH, subsequent_indent="    ", initial_indent="  ")
            for text in self.warnings
        ]
        return "\n".join(lines)


def blockers_of(collected: Iterable[RefusalError], stats: Stats) -> tuple[str, ...]:
    """The texts of refusals that were collected, and of those that a run without collecting counted, each once."""
    texts = [*map(str, collected), *stats.reasons]
    found: dict[str, str] = {}
    for text in texts:
        found.setdefault(_WITHOUT_NUMBERS.sub("#", text), text)
    return tuple(found.values())


_WITHOUT_NUMBERS = re.compile(r"(?<![\w:])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
"""Numbers that differ from run to run, and not those of lines."""


def facts_of(plan: Plan) -> Facts:
    """Roles, operators, launches, guards and memory of a plan, ready to be written as JSON."""
    return {
        "roles": {external.name: f"{external.role} {external.spec}" for external in plan.externals},
        "operators": dict(sorted(plan.operators.items())),
        "launches": plan.launches,
        "guards": sorted({*plan.reads.values, *plan.reads.metadata}),
        "bytes": {
            **{str(role): sum(e.spec.nbytes for e in plan.by_role(role)) for role in Role},
            "intermediates": plan.footprint.peak,
        },
    }
