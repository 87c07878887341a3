"""A plan as plain data that can be kept in a file, and the difference of two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from graphplan.plan.plan import Plan
from graphplan.specs.roles import Role

Facts = dict[str, Any]


def facts_of(plan: Plan) -> Facts:
    """Roles, operators, launches, guards and memory of a plan, ready to be written as JSON."""
    return {
        "roles": {external.name: f"{external.role} {external.spec}" for external in plan.externals},
        "operators": dict(sorted(plan.operators.items())),
        "launches": plan.launches,
        "guards": sorted({*plan.reads.values, *plan.reads.traits}),
        "bytes": {
            **{str(role): sum(e.spec.nbytes for e in plan.by_role(role)) for role in Role},
            "intermediates": plan.footprint.peak,
        },
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What is not the same in two plans' facts, one line each; empty if nothing is."""
    lines = list(_of_mappings(old["roles"], new["roles"], "{name}: {old} -> {new}"))
    lines += _of_mappings(old["operators"], new["operators"], "operator {name}: {old} -> {new} times")
    lines += _of_mappings({"launches": old["launches"]}, {"launches": new["launches"]}, "launches: {old} -> {new}")
    before, after = set(old["guards"]), set(new["guards"])
    lines += [f"guard gone: {path}" for path in sorted(before - after)]
    return lines + [f"guard new: {path}" for path in sorted(after - before)]


def _of_mappings(old: Mapping[str, Any], new: Mapping[str, Any], line: str) -> Iterator[str]:
    for name in {**old, **new}:
        before, now = old.get(name, "none"), new.get(name, "none")
        if before != now:
            yield line.format(name=name, old=before, new=now)
