"""Reading statistics aloud."""

from __future__ import annotations

from collections.abc import Sequence

from graphplan.stats import Stats


def _time(microseconds: float | None) -> str:
    return "not measured" if microseconds is None else f"{microseconds:.0f} µs"


def summary(stats: Stats, *, plans: int) -> str:
    """One line: plans, steps replayed of all, recaptures, host time per step before and after, memory."""
    parts = [
        f"{plans} plan{'' if plans == 1 else 's'}",
        f"{stats.replayed} of {stats.calls} steps replayed",
        f"{stats.eager} eager, {stats.traced} traced, {stats.captured} captured",
    ]
    if stats.recaptured:
        parts.append(f"{stats.recaptured} recaptured")
    before, after = stats.mean_us("warmup"), stats.mean_us("steady")
    if before is not None and after is not None:
        parts.append(f"step {_time(before)} -> {_time(after)} (host time)")
    parts.append(f"static memory {stats.bytes_static / 2**20:.1f} MiB")
    return "graphplan: " + "; ".join(parts)


def report(stats: Stats, *, plans: int, notes: Sequence[str] = ()) -> str:
    """The summary, why steps were eager, what was invalidated, launches and phases, one fact per line."""
    lines = [summary(stats, plans=plans)]
    lines += [f"  eager {count}x: {text}" for text, count in stats.reasons.items()]
    lines += [f"  event: {text}" for text in stats.events]
    lines += [f"  {note}" for note in notes]
    lines.append(
        f"  launches: {stats.launches_eager} by eager steps, {stats.launches_replayed} by replays; "
        f"{stats.bytes_copied / 2**20:.1f} MiB copied in"
    )
    phases = [f"{name} {stats.phases[name] * 1e3:.1f} ms / {n}" for name, n in stats.phase_counts.items() if n]
    lines.append("  phases: " + ", ".join(phases))
    return "\n".join(lines)
