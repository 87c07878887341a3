"""Statistics and programs as plain data, ready to be written as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from graphplan.plan.plan import COLUMNS
from graphplan.program.program import Program
from graphplan.report.stats import KINDS, Stats
from graphplan.report.text import summary
from graphplan.specs.roles import Role

_COUNTS = (
    "calls", "eager", "traced", "captured", "replayed", "recaptured", "verified", "bytes_verified", "launches_eager",
    "launches_replayed", "bytes_copied", "bytes_static",
)  # fmt: skip


def describe_data(
    stats: Stats,
    *,
    plans: int,
    programs: Sequence[Any],
    notes: Sequence[str] = (),
    part: str = "",
    updates: int | None = None,
) -> dict[str, Any]:
    """What :func:`graphplan.report.text.describe` says, and of each program what :func:`describe_program` gave."""
    gain = stats.gain()
    phases = {
        name: {"seconds": stats.phases[name], "calls": calls} for name, calls in stats.phase_counts.items() if calls
    }
    return {
        "headline": summary(stats, plans=plans, part=part, updates=updates),
        "plans": plans,
        "optimizer_steps": updates,
        "stats": {name: getattr(stats, name) for name in _COUNTS},
        "skipped": {reason.name.lower(): count for reason, count in stats.skipped.items()},
        "reasons": dict(stats.reasons),
        "events": dict(stats.events),
        "notes": list(notes),
        "phases": phases,
        "step_us": {kind: stats.step_us(kind) for kind in KINDS},
        "seconds": None if gain is None else {"saved": gain.saved, "spent": gain.spent, "net": gain.net},
        "timeline": [asdict(stretch) for stretch in stats.timeline()],
        "programs": list(programs),
    }


def describe_program(program: Program) -> dict[str, Any]:
    """A program with its plan and its nodes, as plain data."""
    plan = program.plan
    roles = {
        str(role): {"tensors": len(externals), "bytes": sum(external.spec.nbytes for external in externals)}
        for role, externals in ((role, plan.by_role(role)) for role in Role)
    }
    nodes = program.nodes
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
        "launches": {"eager": plan.launches, "replay": 1},
        "bytes": {"pool": program.nbytes, "output": program.lent_bytes, "copied_per_replay": program.bytes_per_replay},
        "nodes": {
            "count": len(nodes.all),
            "types": dict(nodes.types()),
            "names": dict(nodes.names()),
            "missing": nodes.missing,
        },
    }
