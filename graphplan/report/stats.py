"""Counters of one graphed step: what ran eagerly and why, what was replayed, and where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from graphplan.errors import SkipReason

KINDS = ("eager", "replayed")
TEXTS = 64
OTHERS = "others"
"""A table has so many texts; what comes after them, each perhaps with another number in it, is counted as others."""
PHASES = ("warmup", "trace", "capture", "first_replay", "steady", "verify")


@dataclass(slots=True)
class Stats:
    """What a step did. ``eager + traced + captured + replayed`` is the number of calls that returned.

    ``verified`` of the replayed calls were also run eagerly, and compared; there eager's outcome stands.
    ``bytes_verified`` is the size of one copy of what such a check copies.
    ``launches_eager`` and ``launches_replayed`` count what the host issued: one per operator in an eager, traced or
    captured step, one per replay. ``bytes_static`` is what inputs and programs take, ``bytes_estimated`` what the
    largest program was estimated to. ``phases`` holds seconds of host time, ``phase_counts`` the calls they cover;
    ``"steady"`` is every replay of a program but its first. ``step_seconds`` and ``step_counts`` are the time from one
    call's end to the next one's, where both were ``"eager"`` or both ``"replayed"``: what a training step takes all
    in all, on a busy device too, where the host runs ahead of it. ``measured`` are seconds of a step, ``"eager"``
    without graphplan and ``"replayed"``, where it was measured whether replays pay.
    """

    eager: int = 0
    traced: int = 0
    captured: int = 0
    replayed: int = 0
    recaptured: int = 0
    verified: int = 0
    bytes_verified: int = 0
    skipped: Counter[SkipReason] = field(default_factory=Counter)
    reasons: dict[str, int] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    launches_eager: int = 0
    launches_replayed: int = 0
    bytes_copied: int = 0
    bytes_static: int = 0
    bytes_estimated: int = 0
    step_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    step_counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    measured: dict[str, float] = field(default_factory=dict)
    last_end: float = 0.0
    last_kind: str = ""
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    phase_counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))

    @property
    def calls(self) -> int:
        """Calls that returned, whatever phase they fell in."""
        return self.eager + self.traced + self.captured + self.replayed

    def skip(self, reason: SkipReason, detail: str = "", count: int = 1) -> None:
        """Count eager calls under ``reason``, and ``detail`` as its wording in reports."""
        self.skipped[reason] += count
        _tally(self.reasons, detail or reason.value, count)

    def note(self, text: str) -> None:
        """Count an event that is worth a line in reports."""
        _tally(self.events, text)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the host time of the block to ``phase``."""
        start = perf_counter()
        try:
            yield
        finally:
            self.add_time(phase, perf_counter() - start)

    def add_time(self, phase: str, seconds: float) -> None:
        """Add one call of ``seconds`` to ``phase``."""
        self.phases[phase] += seconds
        self.phase_counts[phase] += 1

    def count_replay(self, start: float, now: float, nbytes: int, *, first: bool) -> None:
        """Count a replay that took from ``start`` to ``now`` on the host, and copied ``nbytes`` in."""
        phase = "first_replay" if first else "steady"
        self.phases[phase] += now - start
        self.phase_counts[phase] += 1
        self.replayed += 1
        self.launches_replayed += 1
        self.bytes_copied += nbytes
        if self.last_kind == "replayed":
            self.step_seconds["replayed"] += now - self.last_end
            self.step_counts["replayed"] += 1
        self.last_end, self.last_kind = now, "replayed"

    def end_call(self, kind: str) -> None:
        """Note that a call of ``kind`` has ended now."""
        now = perf_counter()
        if kind == self.last_kind and kind in self.step_seconds:
            self.step_seconds[kind] += now - self.last_end
            self.step_counts[kind] += 1
        self.last_end, self.last_kind = now, kind

    def step_us(self, kind: str) -> float | None:
        """Time of a step in microseconds as it was measured, or else the mean time from call to call; None if no two
        calls of ``kind`` followed each other.
        """
        if kind in self.measured:
            return self.measured[kind] * 1e6
        count = self.step_counts[kind]
        return self.step_seconds[kind] / count * 1e6 if count else None

    def mean_us(self, phase: str) -> float | None:
        """Mean host time of one call of ``phase`` in microseconds, or None if there was none."""
        count = self.phase_counts[phase]
        return self.phases[phase] / count * 1e6 if count else None

    def merge(self, other: Stats) -> None:
        """Add ``other``'s counts to these."""
        for name in (
            "eager",
            "traced",
            "captured",
            "replayed",
            "recaptured",
            "verified",
            "bytes_verified",
            "launches_eager",
            "launches_replayed",
            "bytes_copied",
            "bytes_static",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.bytes_estimated = max(self.bytes_estimated, other.bytes_estimated)
        self.skipped.update(other.skipped)
        for text, count in other.events.items():
            _tally(self.events, text, count)
        for text, count in other.reasons.items():
            _tally(self.reasons, text, count)
        self.measured |= other.measured
        for kind in KINDS:
            self.step_seconds[kind] += other.step_seconds[kind]
            self.step_counts[kind] += other.step_counts[kind]
        for phase in PHASES:
            self.phases[phase] += other.phases[phase]
            self.phase_counts[phase] += other.phase_counts[phase]


def _tally(table: dict[str, int], text: str, count: int = 1) -> None:
    known = text in table or len(table) < TEXTS
    key = text if known else OTHERS
    table[key] = table.get(key, 0) + count
