"""Statistics as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from graphplan.report.stats import Stats

CLOSED = "no step of this fit can be captured"
"""How the note on a fit begins that is refused as a whole, before its first step."""


def without_programs(stats: Stats, backend: str, warmup_steps: int) -> str:
    """One line on a fit in which nothing was captured; empty where something was."""
    if backend == "eager":
        return f"graphplan: {stats.eager} steps, all eager: backend='eager'"
    if stats.captured == 0 and stats.skipped and max(stats.skipped.values()) > stats.calls // 2:
        (reason, count), *_ = stats.skipped.most_common(1)
        return f"graphplan: no step was captured in {stats.calls} steps; {count} of them were eager: {reason.value}"
    if stats.captured == 0:
        return (
            f"graphplan: no step was captured in {stats.calls} steps; the first capture comes with step "
            f"{warmup_steps + 3} of one batch signature, or seven later where eager ones are timed (see min_speedup)"
        )
    return ""


def summary(stats: Stats, *, plans: int, part: str = "", updates: int | None = None) -> str:
    """One line: plans, steps replayed of all, why others were not, recaptures, time per step, extra memory. ``part`` is
    what is replayed of a step, if that is not all of it. ``updates`` are the optimizers' steps, if they were counted:
    where these are not as many, both numbers are told.
    """
    is_same = updates in (None, stats.calls)
    unit = "steps" if is_same else f"calls of training_step ({updates} optimizer steps)"
    parts = [
        f"{plans} plan{'' if plans == 1 else 's'}",
        f"{stats.replayed} of {stats.calls} {unit} replayed{part and f' ({part})'}",
        f"{stats.eager} eager{_why(stats)}, {stats.traced} traced, {stats.captured} captured",
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


def _why(stats: Stats) -> str:
    """The commonest reasons for eager steps, in brackets."""
    reasons = [f"{count}: {reason.value}" for reason, count in stats.skipped.most_common(2)]
    return f" ({'; '.join(reasons)})" if reasons else ""


def describe(stats: Stats, *, plans: int, notes: Sequence[str] = (), part: str = "", updates: int | None = None) -> str:
    """The summary, why steps were eager, what was invalidated, launches and phases, one fact per line."""
    lines = [summary(stats, plans=plans, part=part, updates=updates)]
    lines += [f"  eager {count}x: {text}" for text, count in stats.reasons.items()]
    lines += [f"  event {count}x: {text}" for text, count in stats.events.items()]
    lines += [f"  {note}" for note in notes]
    lines.append(
        f"  launches: {stats.launches_eager} by eager steps, {stats.launches_replayed} by replays; "
        f"{stats.bytes_copied / 2**20:.1f} MiB copied in"
    )
    if stats.bytes_estimated:
        estimated, taken = stats.bytes_estimated / 2**20, stats.bytes_static / 2**20
        lines.append(
            f"  memory: the largest program was estimated at {estimated:.1f} MiB before its capture; static inputs and "
            f"programs take {taken:.1f} MiB"
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
