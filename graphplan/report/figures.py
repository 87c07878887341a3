"""The content of a report on the calls of a step, or on the steps of a fit, as text and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

from graphplan.plan.plan import COLUMNS, Plan
from graphplan.program.program import Program
from graphplan.report.stats import COUNTS, KINDS, Stats
from graphplan.specs.roles import Role

_LONGEST = 100
"""Maximum number of characters in the headline for the detail of the most frequent reason for eager steps."""
CLOSED = "no step of this fit can be captured"
"""The beginning of the note on a fit that is refused as a whole, before its first step."""


@dataclass
class Figures:
    """Counts of calls, further ``notes``, the latest ``plan``, the replayed ``part`` of a step (empty for the whole
    step), and descriptions of ``programs`` for the data.
    """

    stats: Stats = field(default_factory=Stats)
    notes: list[str] = field(default_factory=list)
    plan: Plan | None = None
    part: str = ""
    programs: Sequence[dict[str, Any]] = ()

    @property
    def plans(self) -> int:
        """Number of plans that were captured."""
        return self.stats.captured - self.stats.recaptured

    def headline(self) -> str:
        """Return one line: plans, replayed steps, reasons for others, recaptures, time per step, gain, extra memory."""
        stats = self.stats
        reasons = [f"{count}: {reason.value}" for reason, count in stats.skipped.most_common(2)]
        for reason, _ in stats.skipped.most_common(1):
            detail = stats.detail_of(reason)
            reasons[0] += f": {shorten(detail, _LONGEST, placeholder=' ...')}" if detail else ""
        given_up = stats.phase_counts["trace"] - stats.traced
        traced = f"{stats.traced} traced" + (f" and {given_up} given up" if given_up > 0 else "")
        why = f" ({'; '.join(reasons)})" if reasons else ""
        parts = [
            f"{self.plans} plan{'' if self.plans == 1 else 's'}",
            f"{stats.replayed} of {stats.calls} steps replayed{self.part and f' ({self.part})'}",
            f"{stats.eager} eager{why}, {traced}, {stats.captured} captured",
        ]
        if stats.recaptured:
            parts.append(f"{stats.recaptured} recaptured")
        before, after = stats.step_us("eager"), stats.step_us("replayed")
        if before is not None and after is not None:
            parts.append(f"step {before:.0f} -> {after:.0f} µs")
        elif after is not None:
            where = "where replayed" if stats.follow else "on the host where replayed"
            parts.append(f"{'step' if stats.follow else 'call'} {after:.0f} µs {where}")
        gain = stats.gain()
        if gain is not None:
            parts.append(f"saved {gain.saved:.1f} s and spent {gain.spent:.1f} s on it: net {gain.net:+.1f} s")
        if stats.verified:
            parts.append(f"{stats.verified} replays checked against eager")
        parts.append(f"extra memory {stats.bytes_static / 2**20:.1f} MiB")
        return "graphplan: " + "; ".join(parts)

    def text(self) -> str:
        """Return the headline, reasons for eager steps, events, notes, memory, checks and phases, one fact per line."""
        stats = self.stats
        lines = [self.headline()]
        lines += [f"  eager {count}x: {text}" for text, count in stats.reasons.items()]
        lines += [f"  event {count}x: {text}" for text, count in stats.events.items()]
        lines += [f"  {note}" for note in self.notes]
        if stats.bytes_estimated:
            lines.append(
                f"  memory: the largest program was estimated at {stats.bytes_estimated / 2**20:.1f} MiB before its "
                f"capture; static inputs and programs take {stats.bytes_static / 2**20:.1f} MiB"
            )
        if stats.verified:
            size = stats.bytes_verified / 2**20
            lines.append(
                f"  verify: {stats.verified} replays equal the eager step; each check copies {size:.1f} MiB of state"
            )
        if any(stats.phase_counts.values()):
            phases = [f"{name} {stats.phases[name] * 1e3:.1f} ms / {n}" for name, n in stats.phase_counts.items() if n]
            lines.append("  phases: " + ", ".join(phases))
        return "\n".join(lines)

    def data(self) -> dict[str, Any]:
        """Return the same as data for JSON, with the timeline and the programs."""
        stats, gain = self.stats, self.stats.gain()
        phases = {
            name: {"seconds": stats.phases[name], "calls": calls} for name, calls in stats.phase_counts.items() if calls
        }
        return {
            "headline": self.headline(),
            "plans": self.plans,
            "stats": {name: getattr(stats, name) for name in ("calls", *COUNTS)},
            "skipped": {reason.name.lower(): count for reason, count in stats.skipped.items()},
            "reasons": dict(stats.reasons),
            "events": dict(stats.events),
            "notes": list(self.notes),
            "phases": phases,
            "step_us": {kind: stats.step_us(kind) for kind in KINDS},
            "seconds": None if gain is None else gain._asdict(),
            "timeline": stats.timeline(),
            "programs": list(self.programs),
        }


def describe_program(program: Program) -> dict[str, Any]:
    """Return a program and its plan as plain data."""
    plan = program.plan
    roles = {
        str(role): {"tensors": len(externals), "bytes": sum(external.spec.nbytes for external in externals)}
        for role, externals in ((role, plan.by_role(role)) for role in Role)
    }
    return {
        "name": plan.name,
        "key": str(plan.feed),
        "device": str(plan.device),
        "table": [COLUMNS, *plan.rows(program.policy)],
        "reads": list(plan.reads.values),
        "inputs": {external.name: str(external.spec) for external in plan.inputs},
        "roles": roles,
        "policy": {
            "static": sorted(map(str, program.policy.static_roles)),
            "copied": sorted(map(str, program.policy.copy_roles)),
        },
        "replays": program.replays,
        "launches": plan.launches,
        "bytes": {
            "pool": program.nbytes,
            "output": program.outputs.shared_bytes,
            "copied_per_replay": program.bytes_per_replay,
        },
        "operators": dict(plan.operators),
    }
