"""The keys of one step and their programs: how many are kept, and how often they may be captured again."""

from __future__ import annotations

from collections.abc import Hashable

from graphplan.errors import NotCapturedError, RecaptureError, RefusalError, SkipReason
from graphplan.feed.signature import Feed, first_difference
from graphplan.plan.plan import Plan
from graphplan.program.program import Program
from graphplan.report.stats import Stats
from graphplan.step.entry import Entries, Entry, Key
from graphplan.step.options import Options

_PATIENCE = 4
"""A capture is overdue after this many times the calls that it needs."""
_GEOMETRIES = 256
"""Geometries of feeds whose latest program is remembered."""
_PAYS = 16
"""Replays after which a capture was worth it: one that comes to fewer counts against ``max_recaptures``."""
_REASONS = 8
"""Reasons of recaptures that an error lists."""


class Programs:
    """Entries by key, and the bounds on them."""

    def __init__(self, options: Options, stats: Stats) -> None:
        self._options = options
        self._stats = stats
        self._entries = Entries(options.max_graphs)
        self.touch = self._entries.touch
        """Counts an entry among those used of late."""
        self._latest: dict[Hashable, Program | int] = {}
        self._reasons: list[str] = []
        self._unpaid = 0
        self.warmed: dict[Key, int] = {}
        """How warm the latest first step of a key made it, by that key without the devices that it was fed from."""
        self.attempts = 0
        self._served: set[Hashable] | None = None
        self._refused: dict[Hashable, tuple[SkipReason, str]] = {}
        self._misses = self._paid = 0
        self._said = False

    def get(self, key: Key) -> Entry | None:
        """The entry of ``key``."""
        return self._entries.find(key)

    def other_shapes(self, entry: Entry) -> list[Entry]:
        """Entries of the same step that was fed tensors of other shapes, and nothing else that differs."""
        return self._entries.others(entry, of_shape=True)

    def is_further(self, entry: Entry) -> bool:
        """Whether there is a plan of the same step for another shape."""
        return any(line.plan is not None for other in self.other_shapes(entry) for line in other.lines.values())

    def plans_of_others(self, entry: Entry) -> list[Plan]:
        """The plans that the same step has for other feeds, whatever differs."""
        lines = [line for other in self._entries.others(entry) for line in other.lines.values()]
        return [line.plan for line in lines if line.plan is not None]

    def add(self, key: Key, entry: Entry) -> Entry:
        """Keep ``entry`` under ``key``, and under no other."""
        self._entries.put(key, entry)
        self._let_go()
        return entry

    def all(self) -> list[Program]:
        """Every program that is ready."""
        return self._entries.programs()

    def knows(self, geometry: Hashable) -> bool:
        """Whether a program was captured for such a feed."""
        return geometry in self._latest

    def drop(self, entry: Entry, reason: str) -> None:
        """Close one entry's programs because of ``reason``."""
        self._stats.note(f"recapture: {reason}")
        self._reasons = [*self._reasons, reason][-_REASONS:]
        self.close(entry)

    def close(self, entry: Entry) -> None:
        """Close an entry's programs."""
        entry.drop()
        self._let_go()

    def _let_go(self) -> None:
        """Keep of each program that was closed only how often it was replayed."""
        for key, program in self._latest.items():
            if isinstance(program, Program) and not program.is_open:
                self._latest[key] = program.replays

    def forget(self) -> None:
        """Close every program, and start again."""
        for entry in self._entries:
            self.close(entry)
            entry.refusal = None
        self._served = None
        self._refused.clear()

    @property
    def nbytes(self) -> int:
        """Bytes that the programs compute in."""
        return sum(program.nbytes for program in self.all())

    @property
    def staged_bytes(self) -> int:
        """Bytes of the buffers that inputs of programs are staged in."""
        return sum(program.staged_bytes for program in self.all())

    def evict_for_memory(self, kept: Entry) -> int:
        """Drop some programs of other entries than ``kept``; how many entries lost theirs."""
        dropped = self._entries.evict_generation(kept)
        for _ in range(dropped):
            self._stats.note("evicted: more bytes than memory_budget")
        self._let_go()
        return dropped

    def count_capture(self, entry: Entry, geometry: Hashable) -> None:
        """Note a capture, and whether the one before it for such a feed was worth it; evict what is too many."""
        program = next(program for program in reversed(entry.programs()) if program.replays == 0)
        before = self._latest.pop(geometry, None)
        self._stats.recaptured += self._entries.has_captured(geometry)
        entry.captured = True
        if before is not None:
            replays = before.replays if isinstance(before, Program) else before
            self._unpaid = self._unpaid + 1 if replays < _PAYS else 0
        self._latest[geometry] = program
        if len(self._latest) > _GEOMETRIES:
            del self._latest[next(iter(self._latest))]
        for _ in range(self._entries.evict(entry)):
            self._stats.note("evicted: more programs than max_graphs")
        self._let_go()

    def has_room(self, entry: Entry) -> bool:
        """Whether ``entry`` may have a program, if need be for one that is no longer in use. If not, the programs that
        there are stay, and calls of other signatures are eager as long as all of them are used.
        """
        has_room = self._entries.has_room(entry)
        if not has_room:
            self._turn_others_away(f"all {self._options.max_graphs} programs (max_graphs) are in use")
        return has_room

    def count_new(self) -> None:
        """A call has a signature that was not there before."""
        progress = self._stats.replayed + self._stats.captured
        self._misses = self._misses + 1 if progress == self._paid else 1
        self._paid = progress
        if self._misses >= _PATIENCE * (self._options.warmup_steps + 3):
            self._turn_others_away(f"{self._misses} new ones came in a row, and none of them again")

    def _turn_others_away(self, why: str) -> None:
        """Serve the signatures that have programs, and no others until one of these is no longer in use."""
        served = self._captured()
        if served and self._served is None:
            self._served = served
            self._stats.note(f"calls of further signatures are eager: {why}")

    def _captured(self) -> set[Hashable]:
        return {key for key, program in self._latest.items() if isinstance(program, Program) and program.is_open}

    def turn_away(self, geometry: Hashable, error: RefusalError) -> bool:
        """Have calls with such a feed be eager because of ``error``; whether others have programs."""
        captured = self._captured()
        if captured and geometry not in captured:
            self._refused[geometry] = error.reason, str(error)
        return bool(captured)

    def turns_away(self, geometry: Hashable) -> tuple[SkipReason, str] | None:
        """Why calls with such a feed are eager, without a look at anything else; None if they need not be."""
        if self._served is not None and geometry not in self._served:
            if self._entries.leave_out():
                return SkipReason.MAX_GRAPHS, ""
            self._served, self._misses = None, 0
        return self._refused.get(geometry)

    def check_churn(self) -> None:
        """Whether one more capture is in order.

        Raises:
            RecaptureError: if captures follow each other without paying.
        """
        if self._unpaid >= self._options.max_recaptures:
            why = "; ".join(dict.fromkeys(self._reasons)) or "its signature or its flags change each time"
            raise RecaptureError(
                f"the step was captured again {self._unpaid} times in a row for fewer than {_PAYS} replays each: "
                f"{why}. Expected what a step depends on to stay for a while. Keep it still, hold it in a tensor, feed "
                f"it, or raise max_recaptures (now {self._options.max_recaptures})"
            )

    def count_attempt(self) -> None:
        """A call on the way to a program has returned; one that was broken off has not happened."""
        self.attempts += 1

    def check_due(self, feed: Feed) -> NotCapturedError | None:
        """What to say, once, if a capture should have come by now: eager for ever is no help to anybody. ``feed`` is
        the call's, whose entry was found last.
        """
        if self._latest or self._said:
            return None
        needed = self._options.warmup_steps + 3
        repeats = max(known.eager_calls for known in self._entries) > 1
        if self.attempts < _PATIENCE * needed * (self._options.max_graphs if repeats else 1):
            return None
        self._said = True
        signatures = sum(1 for _ in self._entries)
        before = self._entries.key_before()
        found = None if before is None else first_difference(feed, before[0][0])
        return NotCapturedError(
            f"no step was captured in {self._stats.calls} steps, though {needed} with one signature are enough: the "
            f"batches differ each time in shape, dtype, structure or Python values ({signatures} signatures so far"
            f"{'' if found is None else f'; {found}'}). Expected batches that repeat a signature: pad them, leave "
            "Python values that the step does not need out of what it is fed, or pass on_failure='eager'"
        )
