"""Counters of one graphed step: eager calls and their reasons, replays, and the time of each phase."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from graphplan.errors import SkipReason

KINDS = ("eager", "replayed")
COUNTS = (
    "eager", "traced", "captured", "replayed", "recaptured", "verified", "bytes_verified", "bytes_copied",
    "bytes_static",
)  # fmt: skip
"""Counts of a step. The counts of several steps are added."""
TEXTS = 64
OTHERS = "others"
"""A table has at most ``TEXTS`` texts. Later ones, which may differ in a number only, are counted as ``OTHERS``."""
PHASES = ("warmup", "trace", "capture", "first_replay", "steady", "verify")
STARTING = ("warmup", "trace", "capture", "verify")
"""Phases that a fit without graphplan does not have. Each call in them is also a step."""
LAPS = 255
"""Number of kept times from one replay's end to the next. A validation between two steps does not move their median."""
STRETCHES = 1000  # Maximum stretches of a timeline. The last one includes all later calls.


class Gain(NamedTuple):
    """Seconds of the host's clock: ``saved`` by replays, ``spent`` on warm-up, traces, captures and checks beyond the
    time of their steps without graphplan, and ``net``, the difference. It is negative if a fit was too short.
    """

    saved: float
    spent: float
    net: float


@dataclass(slots=True)
class Stats:
    """Counts and times of a step. ``eager + traced + captured + replayed`` is the number of calls that returned.

    ``verified`` replayed calls were also run eagerly and compared; their eager outcome stands. ``bytes_verified`` is
    the size of one copy of the state that such a check copies. ``bytes_copied`` were copied into static inputs before
    replays. ``bytes_static`` is the size of static inputs and programs, ``bytes_estimated`` the estimated size of the
    largest program. ``phases`` holds seconds of host time, ``phase_counts`` the calls in them. ``"steady"`` is every
    replay of a program except its first. ``laps`` are seconds from one replay's end to the next: the full time of a
    training step, even if the device is busy and the host runs ahead of it. ``measured`` are seconds of a step,
    ``"eager"`` (without graphplan) and ``"replayed"``, if the speed gate measured them. ``shortest`` is the host time
    of the shortest eager step in warm-ups and checks, in seconds, ``lookups`` that of searches for the programs of
    replays outside the fast path.

    Examples:
        >>> import torch
        >>> from graphplan import graph_step
        >>> step = graph_step(lambda x: x * 2)
        >>> for _ in range(10):
        ...     y = step(torch.ones(3))
        >>> step.stats.traced, step.stats.captured, step.stats.replayed
        (1, 1, 5)
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
    details: dict[str, SkipReason] = field(default_factory=dict)
    """The skip reason of each text in ``reasons``."""
    events: dict[str, int] = field(default_factory=dict)
    bytes_copied: int = 0
    bytes_static: int = 0
    bytes_estimated: int = 0
    laps: deque[float] = field(default_factory=lambda: deque(maxlen=LAPS))
    measured: dict[str, float] = field(default_factory=dict)
    shortest: float = math.inf
    follow: bool = True
    """True for the steps of a loop, which follow each other. False for requests, with idle time between them."""
    last_end: float = 0.0
    last_kind: str = ""
    changes: list[tuple[str, int, float]] = field(default_factory=list)
    """For each call that follows one of another kind: its kind, its number, and the end time of the previous call."""
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    phase_counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    lookups: float = 0.0

    @property
    def calls(self) -> int:
        """The number of calls that returned, in any phase."""
        return self.eager + self.traced + self.captured + self.replayed

    def skip(self, reason: SkipReason, detail: str = "", count: int = 1) -> None:
        """Count eager calls under ``reason``, with ``detail`` as its text in reports."""
        self.skipped[reason] += count
        self.details[_tally(self.reasons, detail or reason.value, count)] = reason
        logging.getLogger("graphplan.eager").debug("%s", detail or reason.value)

    def detail_of(self, reason: SkipReason) -> str:
        """Return the most frequent text of ``reason``, or an empty string if it says no more than ``reason``."""
        texts = [text for text, kind in self.details.items() if kind is reason and text in self.reasons]
        most = max(texts, key=lambda text: self.reasons[text], default=OTHERS)
        return "" if most in (OTHERS, reason.value) else most

    def note(self, text: str, kind: str = "captures") -> None:
        """Count an event for a line in reports, and log it to ``graphplan.<kind>``."""
        _tally(self.events, text)
        logging.getLogger(f"graphplan.{kind}").info("%s", text)

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
        if phase == "warmup":
            self.shortest = min(self.shortest, seconds)

    def count_replay(self, start: float, now: float, nbytes: int, *, first: bool) -> None:
        """Count a replay that ran from ``start`` to ``now`` on the host, and copied ``nbytes`` into static inputs."""
        phase = "first_replay" if first else "steady"
        self.phases[phase] += now - start
        self.phase_counts[phase] += 1
        self.replayed += 1
        self.bytes_copied += nbytes
        if self.last_kind == "replayed":
            self.laps.append(now - self.last_end)
        else:
            self._change("replayed")
        self.last_end = now

    def end_call(self, kind: str) -> None:
        """Note that a call of ``kind`` ends now."""
        if kind != self.last_kind:
            self._change(kind)
        self.last_end = perf_counter()

    def count_stock(self, count: int, reason: SkipReason | None = None, detail: str = "") -> None:
        """Count eager calls that were made without graphplan, and are reported afterwards."""
        if not count:
            return
        self.eager += count
        if self.last_kind != "eager":
            self._change("eager", count)
        if reason is not None:
            self.skip(reason, detail, count)

    def _change(self, kind: str, count: int = 1) -> None:
        """Note that the last ``count`` calls are of another kind than the calls before."""
        if len(self.changes) < STRETCHES:
            self.changes.append((kind, self.calls - count, self.last_end))
        self.last_kind = kind

    def timeline(self) -> list[dict[str, Any]]:
        """Return the calls so far as stretches of consecutive calls of one kind: the ``kind``, the number of the
        ``first`` call, the ``count``, and the ``seconds`` from the previous stretch's end to its own (first: None).
        """
        if not self.changes:
            return []
        ends = [*((first, begun) for _, first, begun in self.changes[1:]), (self.calls, self.last_end)]
        return [
            {
                "kind": kind,
                "first": first,
                "count": end - first,
                "seconds": ended - begun if begun and ended > begun else None,
            }
            for (kind, first, begun), (end, ended) in zip(self.changes, ends, strict=True)
            if end > first
        ]

    def step_us(self, kind: str) -> float | None:
        """Return the microseconds of a step from end to end, ``"eager"`` (without graphplan) or ``"replayed"``, or None
        if unknown. Eager steps are those that the speed gate timed before any preparation, as those before a capture
        take longer. If calls do not ``follow`` each other, a replay's time is the host time of the call.
        """
        if kind in self.measured:
            return self.measured[kind] * 1e6
        if kind == "replayed" and not self.follow:
            return self.replay_us()
        return median(self.laps) * 1e6 if kind == "replayed" and self.laps else None

    def gain(self) -> Gain | None:
        """Return what replays have saved so far, or None while the time of an eager or a replayed step is unknown."""
        eager, replayed = self.step_us("eager"), self.step_us("replayed")
        if eager is None or replayed is None:
            return None
        saved, spent = (eager - replayed) / 1e6 * (self.replayed - self.verified), self.spent(eager)
        return Gain(saved, spent, saved - spent)

    def balance(self) -> Gain:
        """Return what replays have saved so far, in units of eager steps. If these are not timed from end to end, use
        the shortest one of warm-ups and checks, which is longer than others: caches are cold, and graphplan observes.
        """
        eager, gain = self.step_us("eager"), self.gain()
        if eager is not None:
            saved, spent = 0.0 if gain is None else gain.saved, self.spent(eager)
        else:
            eager = self.shortest * 1e6 if math.isfinite(self.shortest) else 0.0
            saved = self.phase_counts["steady"] * eager / 1e6 - self.phases["steady"] - self.lookups
            # Omit the warm-up: loading in the first steps takes as long without graphplan.
            spent = self.spent(eager, STARTING[1:])
        return Gain(*(seconds / eager * 1e6 if eager else 0.0 for seconds in (saved, spent, saved - spent)))

    def spent(self, eager: float, phases: Sequence[str] = STARTING) -> float:
        """Return the seconds of ``phases`` beyond the time of their steps, which take ``eager`` microseconds each."""
        return sum(max(0.0, self.phases[phase] - self.phase_counts[phase] * eager / 1e6) for phase in phases)

    def replay_us(self) -> float | None:
        """Return the mean host time of replays after a program's first in microseconds, or None if there were none."""
        count = self.phase_counts["steady"]
        return self.phases["steady"] / count * 1e6 if count else None

    def merge(self, other: Stats) -> None:
        """Add ``other``'s counts to these, and its calls to the end of the timeline."""
        more = [(kind, first + self.calls, begun) for kind, first, begun in other.changes]
        self.changes = (self.changes + more)[:STRETCHES]
        if other.changes:
            self.last_end, self.last_kind = other.last_end, other.last_kind
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.bytes_estimated = max(self.bytes_estimated, other.bytes_estimated)
        self.skipped.update(other.skipped)
        for own, table in ((self.events, other.events), (self.reasons, other.reasons)):
            for text, count in table.items():
                _tally(own, text, count)
        self.details |= other.details
        self.measured |= other.measured
        self.follow &= other.follow
        self.laps += other.laps
        self.shortest = min(self.shortest, other.shortest)
        self.lookups += other.lookups
        for phase in PHASES:
            self.phases[phase] += other.phases[phase]
            self.phase_counts[phase] += other.phase_counts[phase]


def _tally(table: dict[str, int], text: str, count: int = 1) -> str:
    known = text in table or len(table) < TEXTS
    key = text if known else OTHERS
    table[key] = table.get(key, 0) + count
    return key
