"""The cache of one step: entries by key, their programs, how many are kept, and how often they are captured again."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

from graphplan.errors import HostSyncError, NotCapturedError, RecaptureError
from graphplan.feed.signature import Feed, first_difference, without_geometry
from graphplan.program.program import Program
from graphplan.report.stats import Stats
from graphplan.step.batch_variants import unlike_in_shape
from graphplan.step.entries import PAYS, Entry, Key
from graphplan.step.options import Options

_KEYS_PER_GRAPH = 8
_IDLE = 16  # Lookups per known key after which a program that none of them found is no longer in use.
_ALLOWANCE = 40  # Eager steps that starting may take beyond what replays save, before a further program waits.
_HORIZON = 500
"""Calls within which replays have to save what starting takes: many fits are no longer."""
_OFTEN = 16  # Times as often as it has come so far that a signature or a way is expected to come at most.
_UNPAID = 2  # Captures in a row that did not pay, after which further ones wait.
_LONGEST = 32
"""Maximum number of waits in a row without a replay between them, of which a call may count two."""
_LONGER = 4  # It is multiplied by this for ways through the code, and where the capture after it has not paid.
_PATIENCE = 4  # A capture is overdue after this many times the calls that it needs.
_GEOMETRIES = 256  # Geometries of feeds whose latest program is remembered.
_REASONS = 8  # Reasons of recaptures that an error lists.
EXPECTED = (
    "Expected a value that stays the same for many steps. Keep it constant, keep it in a tensor that is updated in "
    "place, or pass it as an argument"
)


class Programs:
    """Entries by key, and the bounds on them and their programs. The least recently used go first."""

    def __init__(self, options: Options, stats: Stats, *, may_wait: bool = False) -> None:
        self._options = options
        self._stats = stats
        self._may_wait = may_wait
        self._entries: dict[Key, Entry] = {}
        self._lookups = self._keyed_since = 0
        # By geometry of the feed, the latest program, or how often it was replayed before it was closed.
        self._latest: dict[Hashable, Program | int] = {}
        self._reasons: list[str] = []
        self._unpaid = 0
        self._captured_at = 0  # How many calls there had been as the first program was captured.
        self.attempts = 0  # Calls on the way to a program that have returned.
        self._misses = self._paid = 0
        self._waits = self._waits_at = 0
        self._longest = _LONGEST
        self._said = self._is_told = False
        self._is_tried = False  # Something was begun after the longest wait.

    def get(self, key: Key) -> Entry | None:
        """The entry of ``key``."""
        entry = self._entries.get(key)
        if entry is not None:
            self.touch(entry)
        return entry

    def touch(self, entry: Entry) -> None:
        """Count ``entry`` as the one used last."""
        self._lookups += 1
        entry.met += 1
        entry.used = self._lookups

    def add(self, key: Key, entry: Entry) -> Entry:
        """Keep ``entry`` under ``key``, and under no other."""
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
        """Entries that differ by tensors' shapes and devices alone: Lightning moves a fit's first batch itself."""
        form = without_geometry(entry.key[0][0])
        others = [other for other in self._entries.values() if other.key[1:] == entry.key[1:] and other is not entry]
        return [other for other in others if without_geometry(other.key[0][0]) == form]

    def is_further(self, entry: Entry) -> bool:
        """Whether there is a plan of the same step for another shape."""
        return any(other.plans for other in self.other_shapes(entry))

    def all(self) -> list[Program]:
        """Every program that is ready."""
        return [program for entry in self._entries.values() for program in entry.programs()]

    @property
    def guesses(self) -> int:
        """Ways through the step, by what it reads of its batch, that no batch has taken again."""
        return sum(entry.batch.guesses for entry in self._entries.values() if entry.batch is not None)

    def never_again(self, error: HostSyncError) -> HostSyncError:
        """What refuses a further trace for what the step reads of its batches; ``error`` does so for its first read."""
        ways = [entry.batch for entry in self._entries.values() if entry.batch is not None and entry.batch.guesses]
        return error if any(way.has_looked for way in ways) else unlike_in_shape(error, len(ways))

    def knows(self, geometry: Hashable) -> bool:
        """Whether a program was captured for such a feed."""
        return geometry in self._latest

    @property
    def nbytes(self) -> int:
        """Bytes that the programs compute in."""
        return sum(program.nbytes for program in self.all())

    def drop(self, entry: Entry, reason: str) -> None:
        """Close one entry's programs because of ``reason``."""
        self._stats.note(f"recapture: {reason}", "recaptures")
        self._reasons = [*self._reasons, reason][-_REASONS:]
        entry.lasted = sum(program.replays for program in entry.programs())
        self.close(entry)

    def close(self, entry: Entry) -> None:
        """Close an entry's programs."""
        entry.drop()
        self._let_go()

    def take_back(self, entry: Entry, program: Program) -> None:
        """Close one program of an entry, which has not paid and does not count as a capture that did not."""
        for way in entry.ways:
            way.lines = {variant: line for variant, line in way.lines.items() if line.program is not program}
        program.close()
        if self._latest.get(entry.key[0]) is program:
            del self._latest[entry.key[0]]

    def replays_of(self, base: Entry) -> int:
        """Replays by the programs that there are for what is read of the batches of an entry."""
        ways = (entry for entry in self._entries.values() if entry.base is base)
        return sum(program.replays for entry in ways for program in entry.programs())

    def close_ways(self, base: Entry) -> None:
        """Close the programs for what is read of the batches of an entry."""
        for entry in self._entries.values():
            if entry.base is base:
                self.close(entry)

    def _let_go(self) -> None:
        """Replace closed programs by the number of their replays."""
        for key, program in self._latest.items():
            if isinstance(program, Program) and not program.is_open:
                self._latest[key] = program.replays

    def forget(self) -> None:
        """Close every program, and start again."""
        for entry in self._entries.values():
            self.close(entry)
            entry.refusal = None
        self._misses = 0

    def evict_for_memory(self, kept: Entry) -> bool:
        """Drop the oldest generation of programs, unless it is ``kept``'s. Return True if there was one."""
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
        """Count a capture, and whether the one before it for such a feed has paid. Evict programs that are too many."""
        geometry = entry.key[0]
        before = self._latest.pop(geometry, None)
        is_further = len(entry.programs()) > 1
        self._stats.recaptured += before is not None and not is_further
        entry.captured, entry.untried = True, 0
        self._captured_at = self._captured_at or self._stats.calls
        if is_further and isinstance(before, Program) and before.is_open:
            # That of another way may still pay, unless it made room for this one.
            self._unpaid += entry.wasted
            entry.wasted = 0
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
            elif len(entry.ways) > 1:
                entry.forget_oldest()
            else:
                break
            self._stats.note("evicted: more programs than max_graphs")
        self._let_go()

    def turns_away(self, entry: Entry) -> str | None:
        """Why ``entry`` may not have another program; None if it may."""
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
        """Return why a new signature, another way through the step, or a capture after some that did not pay, has to
        wait until replays save what starting took so far, less an allowance. None if it may start now, or has waited
        long enough without a replay, which saves nothing.
        """
        has_ways = len(entry.ways) > 1
        is_behind = any(other.progress > entry.progress for other in self._entries.values())
        is_further = (has_ways or not entry.captured) and (bool(self.all()) or is_behind)
        # Each call may take a way of its own. Where that is an error, it is told of early.
        is_further |= has_ways and self._options.on_failure == "eager"
        # What has changed twice may change again; a number has a stand-in once it was seen to change.
        is_again = math.isfinite(entry.lasted) and len(self._reasons) > 1 and not entry.programs()
        is_again &= self._options.on_failure == "eager"
        # What has begun is brought to its end.
        if entry.progress or not (is_further or is_again or self._unpaid >= _UNPAID):
            return None
        if not self.has_spent(entry):
            self._longest = _LONGEST
            return None
        # Where a step goes one of many ways by chance, most calls may be none that is known yet.
        longest = self._longest * (_LONGER if has_ways or is_again else 1)
        # Before there is a program, ways that are traced may be such as do not come again.
        progress = self.progress or self._stats.traced
        if self._waits_at != progress:
            # What was captured or traced after the longest wait has not paid.
            self._longest *= _LONGER if self._is_tried else 1
            self._waits, self._waits_at, self._is_tried = 0, progress, False
        self._waits += 1
        if self._waits > longest:
            self._is_tried = True
            return None
        signature = "a new signature" if is_further else "a step that was captured before"
        what = "a new path through the step's code" if has_ways else signature
        return f"{what} is traced once replays have saved the time of earlier traces and captures"

    def pass_by(self, *, is_for_good: bool) -> None:
        """Count a call without a look at what it is fed: it waits as those before it, or for want of room."""
        self._lookups += is_for_good
        self._waits += 2 * (not is_for_good)

    def why_unpaid(self) -> str | None:
        """Why captures in a row have not paid, so that further ones wait; None if it is not so. Told once."""
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
        """Whether starting takes more than replays save, with what has begun and one more, ``entry`` if it is known.
        Replays are expected to go on to save as they have for the rest of the first ``_HORIZON`` calls, and those of
        ``entry`` have to save by then what one more costs.
        """
        if not self._may_wait:
            return False
        balance, calls = self._stats.balance(), self._stats.calls
        begun = sum(entry.progress > 0 and not entry.programs() for entry in self._entries.values())
        # The first one takes as long as two others: its traces look for more.
        cost = balance.spent / (1 + self._stats.captured)
        debt = balance.spent + (1 + begun) * cost - balance.saved
        rest = max(0, _HORIZON - calls)
        if entry is not None and self._expected(entry, rest) * balance.saved < cost * self._stats.replayed:
            return debt >= _ALLOWANCE
        return debt - balance.saved * rest / max(1, calls - self._captured_at) >= _ALLOWANCE

    def _expected(self, entry: Entry, calls: int) -> float:
        """How many of the next ``calls`` will be an entry's, on the way that it takes now, by how many have been and of
        how many since the first; no more than were replayed before it was captured again.
        """
        # What is read of a batch takes a lookup of its own.
        lookups = (self._lookups - entry.since) / (1 if entry.base is None else 2)
        rate, met = (entry.met - 1) / max(1.0, lookups), entry.met
        if len(entry.ways) > 1:
            rate, met = entry.way.taken.rate, entry.way.taken.met
        return min(calls * rate, _OFTEN * met, entry.lasted)

    @property
    def progress(self) -> int:
        """How many captures and replays there were."""
        return self._stats.replayed + self._stats.captured

    def begin_anew(self) -> None:
        """From now on, keys have a value in them that code needs: those of earlier calls do not come again."""
        self._keyed_since, self.attempts = self._lookups, 0

    def count_new(self) -> None:
        """Count a call with a new signature."""
        self._misses = self._misses + 1 if self.progress == self._paid else 1
        self._paid = self.progress

    def churn(self) -> RecaptureError | None:
        """Return the error if captures follow each other without paying."""
        if self._unpaid < self._options.max_recaptures:
            return None
        return RecaptureError(
            f"{self._churn(dict.fromkeys(self._reasons))}. {EXPECTED}; or raise max_recaptures (now "
            f"{self._options.max_recaptures})"
        )

    def check_due(self, feed: Feed, values: Sequence[str]) -> NotCapturedError | None:
        """The error, once, if no capture came in time. ``feed`` was looked up last; code needs the ``values``."""
        if self._latest or self._said:
            return None
        needed = self._options.warmup_steps + 3
        repeats = any(known.eager_calls > 1 and known.used > self._keyed_since for known in self._entries.values())
        # What code needs values of may go round, as the time of a sampler does: there is room for so many.
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
