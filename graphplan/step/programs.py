"""The cache of one step: entries by key, their programs, how many are kept, and how often they are recaptured."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

from graphplan.errors import HostSyncError, NotCapturedError, RecaptureError
from graphplan.feed.signature import Feed, first_difference, without_geometry
from graphplan.program.program import Program
from graphplan.report.stats import Stats
from graphplan.step.entries import PAYS, Entry, Key
from graphplan.step.options import Options

_KEYS_PER_GRAPH = 8
_IDLE = 16  # A program is no longer in use after this many lookups per known key that did not find it.
_ALLOWANCE = 40  # In eager steps: how far starting costs may exceed savings before a further program has to wait.
_HORIZON = 500
"""Calls within which replays have to save the cost of starting, since many fits are no longer."""
_OFTEN = 16  # A signature or a way is expected to come at most this many times as often as it has come so far.
_UNPAID = 2  # Consecutive captures that did not pay off, after which further ones wait.
_LONGEST = 32
"""Maximum number of consecutive waits without a replay between them. One call may count as two waits."""
_LONGER = 4  # Factor on the longest wait for ways through the code, and if the capture after it did not pay off.
_PATIENCE = 4  # A capture is overdue after this many times the calls that it needs.
_GEOMETRIES = 256  # Maximum geometries of feeds whose latest program is remembered.
_REASONS = 8  # Maximum reasons of recaptures that an error lists.
EXPECTED = (
    "Expected a value that stays the same for many steps. Keep it constant, keep it in a tensor that is updated in "
    "place, or pass it as an argument"
)


class Programs:
    """The entries by key, and the limits on entries and programs. The least recently used ones are evicted first."""

    def __init__(self, options: Options, stats: Stats, *, may_wait: bool = False) -> None:
        self._options = options
        self._stats = stats
        self._may_wait = may_wait
        self._entries: dict[Key, Entry] = {}
        self._lookups = self._keyed_since = 0
        # By geometry of the feed: the latest program, or its number of replays once it is closed.
        self._latest: dict[Hashable, Program | int] = {}
        self._reasons: list[str] = []
        self._unpaid = 0
        self._captured_at = 0  # The number of calls up to the first capture.
        self.attempts = 0  # Returned calls that were on the way to a program.
        self._misses = self._paid = 0
        self._waits = self._waits_at = 0
        self._longest = _LONGEST
        self._said = self._is_told = False
        self._is_tried = False  # The longest wait is over, so a trace or a capture may start.

    def get(self, key: Key) -> Entry | None:
        """The entry of ``key``."""
        entry = self._entries.get(key)
        if entry is not None:
            self.touch(entry)
        return entry

    def touch(self, entry: Entry) -> None:
        """Mark ``entry`` as the most recently used one."""
        self._lookups += 1
        entry.met += 1
        entry.used = self._lookups

    def add(self, key: Key, entry: Entry) -> Entry:
        """Store ``entry`` under ``key``, and under no other key."""
        entry.since = entry.since or self._lookups + 1
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        self._entries[key] = entry
        entry.key = key
        self.touch(entry)
        if len(self._entries) > _KEYS_PER_GRAPH * self._options.max_graphs:
            oldest = min(self._entries.values(), key=lambda entry: entry.used)
            self._entries.pop(oldest.key).drop()
        self._let_go()
        return entry

    def other_shapes(self, entry: Entry) -> list[Entry]:
        """Entries that differ only in tensors' shapes and devices (Lightning moves a fit's first batch itself)."""
        form = without_geometry(entry.key[0][0])
        others = [other for other in self._entries.values() if other.key[1:] == entry.key[1:] and other is not entry]
        return [other for other in others if without_geometry(other.key[0][0]) == form]

    def is_further(self, entry: Entry) -> bool:
        """Return True if the same step has a plan for another shape."""
        return any(other.plans for other in self.other_shapes(entry))

    def all(self) -> list[Program]:
        """Every program that is ready."""
        return [program for entry in self._entries.values() for program in entry.programs()]

    @property
    def guesses(self) -> int:
        """The number of batch variants, over all keys none of whose variants has recurred."""
        return sum(entry.batch.guesses for entry in self._entries.values() if entry.batch is not None)

    def never_again(self, error: HostSyncError) -> HostSyncError:
        """The error that refuses a further trace for reads of the batch; ``error`` is the one for the first read."""
        guessed = [entry.batch for entry in self._entries.values() if entry.batch is not None and entry.batch.guesses]
        if any(variants.looks for variants in guessed):
            return error
        return HostSyncError(
            f"the step reads values of its batches on the host, first at {error.where}: {len(guessed)} batch "
            "signatures were traced for these reads, and none was repeated. Pad the batches to a few shapes "
            "(shapes='bucket', or in collate_fn), or do not read their values on the host",
            component=error.component,
        )

    def knows(self, geometry: Hashable) -> bool:
        """Return True if a program was captured for feeds of this ``geometry``."""
        return geometry in self._latest

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the programs use."""
        return sum(program.nbytes for program in self.all())

    def drop(self, entry: Entry, reason: str) -> None:
        """Close the programs of ``entry`` for a recapture because of ``reason``."""
        self._stats.note(f"recapture: {reason}", "recaptures")
        self._reasons = [*self._reasons, reason][-_REASONS:]
        entry.lasted = sum(program.replays for program in entry.programs())
        self.close(entry)

    def close(self, entry: Entry) -> None:
        """Close an entry's programs."""
        entry.drop()
        self._let_go()

    def take_back(self, entry: Entry, program: Program) -> None:
        """Close one program of an entry without counting it as a capture that did not pay off."""
        for code_path in entry.code_paths:
            code_path.lines = {
                variant: line for variant, line in code_path.lines.items() if line.program is not program
            }
        program.close()
        if self._latest.get(entry.key[0]) is program:
            del self._latest[entry.key[0]]

    def variants_of(self, base: Entry) -> list[Entry]:
        """The entries of the batch variants of ``base``."""
        return [entry for entry in self._entries.values() if entry.base is base]

    def _let_go(self) -> None:
        """Replace references to closed programs by their numbers of replays."""
        for key, program in self._latest.items():
            if isinstance(program, Program) and not program.is_open:
                self._latest[key] = program.replays

    def forget(self) -> None:
        """Close every program and clear refusals."""
        for entry in self._entries.values():
            self.close(entry)
            entry.refusal = None
        self._misses = 0

    def evict_for_memory(self, kept: Entry) -> bool:
        """Close the least recently used generation of programs that has none of ``kept``. Return True if one exists."""
        used: dict[object, int] = {}
        for entry in self._entries.values():
            for program in entry.programs():
                used[program.generation] = max(used.get(program.generation, 0), entry.used)
        for program in kept.programs():
            used.pop(program.generation, None)
        if not used:
            return False
        oldest = min(used, key=used.__getitem__)
        for entry in self._entries.values():
            if any(program.generation == oldest for program in entry.programs()):
                self.close(entry)
                self._stats.note("evicted: more bytes than memory_budget")
        return True

    def count_capture(self, entry: Entry, program: Program) -> None:
        """Count a capture, and whether the previous one for this geometry has paid off. Evict surplus programs."""
        geometry = entry.key[0]
        before = self._latest.pop(geometry, None)
        is_further = len(entry.programs()) > 1
        self._stats.recaptured += before is not None and not is_further
        entry.captured, entry.traced_since_capture = True, 0
        self._captured_at = self._captured_at or self._stats.calls
        if is_further and isinstance(before, Program) and before.is_open:
            # The other way's program may still pay off. Count only programs that were closed to make room.
            self._unpaid += entry.unpaid_programs
            entry.unpaid_programs = 0
        elif before is not None:
            replays = before.replays if isinstance(before, Program) else before
            self._unpaid = self._unpaid + 1 if replays < PAYS else 0
        self._latest[geometry] = program
        if len(self._latest) > _GEOMETRIES:
            del self._latest[next(iter(self._latest))]
        while len(self.all()) > self._options.max_graphs:
            others = [other for other in self._entries.values() if other.programs() and other is not entry]
            if others:
                min(others, key=lambda other: other.used).drop()
            elif len(entry.code_paths) > 1:
                entry.forget_oldest()
            else:
                break
            self._stats.note("evicted: more programs than max_graphs")
        self._let_go()

    def limit_reason(self, entry: Entry) -> str | None:
        """Return why ``entry`` may not get another program; None if it may."""
        is_first, limit = entry.used == entry.since, _PATIENCE * (self._options.warmup_steps + 3)
        if is_first and self._latest and self._misses >= limit and self.progress == self._paid:
            return f"{self._misses} calls in a row had new signatures, and none of these was repeated"
        begun = [other for other in self._entries.values() if other.programs() or other.progress]
        others = [other.used for other in begun if other is not entry]
        if max(len(self.all()), len(begun)) < self._options.max_graphs or entry in begun or not others:
            return None
        oldest = min(others)
        is_unused = oldest < entry.since and not entry.captured
        if is_unused or self._lookups >= oldest + _IDLE * len(self._entries):
            return None
        return f"all {self._options.max_graphs} programs that max_graphs= allows are in use or in preparation"

    def waits(self, entry: Entry) -> str | None:
        """Return why a new signature, another way through the step, or a capture after some that did not pay off, has
        to wait until replays have saved the cost of starting, less an allowance. None if it may start now, or has
        waited long enough without a replay: only replays save time.
        """
        has_paths = len(entry.code_paths) > 1
        is_behind = any(other.progress > entry.progress for other in self._entries.values())
        is_further = (has_paths or not entry.captured) and (bool(self.all()) or is_behind)
        # Each call may take a way of its own. If refusals raise, do not wait: the error should come early.
        is_further |= has_paths and self._options.on_failure == "eager"
        # One recapture may be due to a number, which has a stand-in from then on. After two, a third is likely.
        is_again = math.isfinite(entry.lasted) and len(self._reasons) > 1 and not entry.programs()
        is_again &= self._options.on_failure == "eager"
        # An entry that has traces may always complete its program.
        if entry.progress or not (is_further or is_again or self._unpaid >= _UNPAID):
            return None
        if not self.has_spent(entry):
            self._longest = _LONGEST
            return None
        # If a step takes one of many ways at random, most calls may be on unknown ways: wait longer.
        longest = self._longest * (_LONGER if has_paths or is_again else 1)
        # Before the first capture, count traces instead: the traced ways may never recur.
        progress = self.progress or self._stats.traced
        if self._waits_at != progress:
            # The trace or capture after the longest wait has not paid off, so the next wait is longer.
            self._longest *= _LONGER if self._is_tried else 1
            self._waits, self._waits_at, self._is_tried = 0, progress, False
        self._waits += 1
        if self._waits > longest:
            self._is_tried = True
            return None
        signature = "a new signature" if is_further else "a step that was captured before"
        what = "a new path through the step's code" if has_paths else signature
        return f"{what} is traced once replays have saved the time of earlier traces and captures"

    def count_skipped(self, *, limit_reached: bool) -> None:
        """Count a call that skips the lookup: it has to wait, or (``limit_reached``) ``max_graphs`` is reached."""
        self._lookups += limit_reached
        self._waits += 2 * (not limit_reached)

    def why_unpaid(self) -> str | None:
        """Return, only once, why consecutive captures have not paid off, so that further ones wait; else None."""
        if self._is_told or min(self._unpaid, len(self._reasons)) < _UNPAID:
            return None
        self._is_told = True
        return self._churn(self._reasons[-1:])

    def _churn(self, reasons: Iterable[str]) -> str:
        why = "; ".join(reasons) or "its signature or its flags change each time"
        return (
            f"the step was captured again {self._unpaid} times in a row, each time for fewer than {PAYS} replays: {why}"
        )

    def has_spent(self, entry: Entry | None = None) -> bool:
        """Return True if starting costs more than replays save. The cost includes programs on the way and one more,
        that of ``entry`` if given. Replays are assumed to save as much as so far for the rest of the first ``_HORIZON``
        calls. By then, the replays of ``entry`` have to save the cost of one program.
        """
        if not self._may_wait:
            return False
        balance, calls = self._stats.balance(), self._stats.calls
        begun = sum(entry.progress > 0 and not entry.programs() for entry in self._entries.values())
        # The first program costs as much as two others, since its traces search for more.
        cost = balance.spent / (1 + self._stats.captured)
        debt = balance.spent + (1 + begun) * cost - balance.saved
        rest = max(0, _HORIZON - calls)
        if entry is not None and self._expected(entry, rest) * balance.saved < cost * self._stats.replayed:
            return debt >= _ALLOWANCE
        return debt - balance.saved * rest / max(1, calls - self._captured_at) >= _ALLOWANCE

    def _expected(self, entry: Entry, calls: int) -> float:
        """Estimate how many of the next ``calls`` will be the entry's on its current way, from its share of the calls
        since its first one. At most as many as were replayed before its latest recapture.
        """
        # A call with reads of its batch takes two lookups.
        lookups = (self._lookups - entry.since) / (1 if entry.base is None else 2)
        rate, met = (entry.met - 1) / max(1.0, lookups), entry.met
        if len(entry.code_paths) > 1:
            rate, met = entry.code_path.taken.rate, entry.code_path.taken.met
        return min(calls * rate, _OFTEN * met, entry.lasted)

    @property
    def progress(self) -> int:
        """The number of captures and replays."""
        return self._stats.replayed + self._stats.captured

    def begin_anew(self) -> None:
        """Restart the count of attempts: keys contain another value from now on, so earlier keys cannot recur."""
        self._keyed_since, self.attempts = self._lookups, 0

    def count_new(self) -> None:
        """Count a call with a new signature."""
        self._misses = self._misses + 1 if self.progress == self._paid else 1
        self._paid = self.progress

    def churn(self) -> RecaptureError | None:
        """Return the error if ``max_recaptures`` consecutive captures have not paid off."""
        if self._unpaid < self._options.max_recaptures:
            return None
        return RecaptureError(
            f"{self._churn(dict.fromkeys(self._reasons))}. {EXPECTED}; or raise max_recaptures (now "
            f"{self._options.max_recaptures})"
        )

    def check_due(self, feed: Feed, values: Sequence[str]) -> NotCapturedError | None:
        """Return, once, the error if no capture came in time. ``feed`` was looked up last; code needs ``values``."""
        if self._latest or self._said:
            return None
        needed = self._options.warmup_steps + 3
        repeats = any(known.eager_calls > 1 and known.used > self._keyed_since for known in self._entries.values())
        # The needed values may recur in cycles, as a sampler's time steps do, and max_graphs of them have room.
        patience = max(_PATIENCE * needed, self._options.max_graphs * bool(values))
        if self.attempts < patience * (self._options.max_graphs if repeats else 1):
            return None
        self._said = True
        signatures = len(self._entries)
        before = sorted(self._entries.values(), key=lambda entry: entry.used)[-2:-1]
        found = "".join(first_difference(feed, before[0].key[0][0]) or ()) if before else ""
        return NotCapturedError(
            f"no step was captured in {self._stats.calls} steps, although {needed} with one signature are enough: the "
            f"batches differ each time in shape, dtype, structure or Python values ({signatures} signatures so "
            f"far{'; ' if found else ''}{found}{''.join(f'; the code needs the value of {v}' for v in values)}). "
            "Expected batches that repeat a signature. Pad the batches. Do not pass Python values that the step does "
            "not need. If the step only stores a value, return it and store it after the step (on_train_batch_end). "
            "In the data loader's collate_fn, make tensors of numbers and tokenize strings. If the step only branches "
            "on a value (i % 2 == 0), pass the result of the condition"
        )
