"""The cache of one step: entries by key, their programs, how many are kept, and how often they are captured again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphplan.errors import HostScalarError, NotCapturedError, RecaptureError, RefusalError
from graphplan.feed.signature import Feed, first_difference, without_geometry
from graphplan.observe.host_draws import Draw, peek
from graphplan.owners.slots import Scalar, lasting
from graphplan.plan.plan import Plan
from graphplan.program.program import Program
from graphplan.report.stats import Stats
from graphplan.step.batch_variants import BatchVariants
from graphplan.step.options import Options
from graphplan.tensors.symbolic import Question, come_out
from graphplan.trace.changes import same_value
from graphplan.trace.records import Trace

if TYPE_CHECKING:
    from graphplan.step.gate import Gate

_KEYS_PER_GRAPH = 8
_IDLE = 16  # Lookups per known key after which a program that none of them found is no longer in use.
_ALLOWANCE = 50  # Eager steps that starting may take beyond what replays save: a twentieth of the first thousand.
_TRACED = 8  # More than a line has traces.
_TRACE, _CAPTURE, _CHECK, _SAVES = 12, 5, 3, 0.6
"""Eager steps that a trace, a capture and a check take on a CPU, and that a replay saves, for where none are timed: the
median of 21 models of recipes.zoo.
"""
_AGAIN = 8  # Times the allowance for what comes again, where none are timed.
_UNPAID = 2  # Captures in a row that did not pay, after which further ones wait.
_LONGEST = 128  # Waits in a row, of which a call has up to two, and how many times as many after each that was in vain.
_LONGER = 4
_PATIENCE = 4  # A capture is overdue after this many times the calls that it needs.
_GEOMETRIES = 256  # Geometries of feeds whose latest program is remembered.
_PAYS = 16  # Replays after which a capture has paid: those that come to fewer count against ``max_recaptures``.
_MOSTLY = 4  # Replays between two eager steps that take the place of a program which does not fit.
_WAYS = 16  # Ways through a step, by what owners' numbers come to, that are kept for one key.
_REFUSED = 3  # Refused ways without a program for another one, after which all calls of a key are eager.
_REASONS = 8  # Reasons of recaptures that an error lists.
Key = tuple[Any, ...]  # The feed's geometry, torch's switches, the number of the fingerprint.
Variant = tuple[bool, ...]
"""Which parameters have a gradient on entry: a step that accumulates has one program per answer."""


@dataclass(slots=True)
class Line:
    """One variant on its way to a program: traces, then a plan, then the program. ``state`` are the paths of optimizer
    state in the latest trace. The numbers count pairs of traces that were dropped, because autograd ``reordered`` them
    or the host changed something between them, and traces that branched otherwise than one before.
    """

    traces: list[Trace] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    reordered: int = 0
    straddling: int = 0
    outcomes: int = 0
    plan: Plan | None = None
    program: Program | None = None


@dataclass(slots=True)
class Way:
    """One way through a step's code: the branches ``asked`` of owners' numbers, with their answers, and the ``draws``
    on the host, whose numbers count as owners'; ``kinds`` are the classes of the numbers that code used, by path.

    ``used`` are those whose values code needs: each value is a way of its own; ``where`` describes the first. ``lines``
    has one for each variant. ``is_met``: a call has had these values before; ``is_known``: it was traced; ``recurs``:
    it was taken again after another one.
    """

    asked: dict[Question, bool] = field(default_factory=dict)
    draws: tuple[Draw, ...] = ()
    kinds: dict[str, type] = field(default_factory=dict)
    used: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    lines: dict[Variant, Line] = field(default_factory=dict)
    refusal: RefusalError | None = None
    is_met: bool = True
    is_known: bool = False
    recurs: bool = False

    def is_taken(self, numbers: Mapping[str, Any], *, values: bool = True) -> bool:
        """Return True if a step takes it with ``numbers`` by path; without ``values``, with other ``used`` ones."""
        if any(type(numbers.get(path)) is not kind for path, kind in self.kinds.items()):
            return False
        try:
            are_alike = not values or all(same_value(numbers[path], value) for path, value in self.used.items())
            return are_alike and come_out(self.asked, {**numbers, **peek(self.draws)})
        except Exception:  # noqa: BLE001 - the step raises it, too, or guards find that the number is gone
            return False

    @property
    def programs(self) -> list[Program]:
        """Programs that are ready."""
        return [line.program for line in self.lines.values() if line.program is not None]


@dataclass(slots=True)
class Entry:
    """What is known of the calls of one ``key``.

    ``since``, ``used`` and ``called`` number the lookup that made it, the latest one, and its latest call on the way to
    a program. ``captured``: it has or had one. ``gate`` times its replays until ``is_decided``. ``outside``: gradients
    flow through its results, so calls are eager. ``batch``: reads of the batch choose another entry, whose ``base`` is
    this one. The last of ``ways`` is that of the latest call; the numbers at ``places`` decide. ``untried`` ways were
    traced since the latest capture, until they are ``too_many``. ``recurs``: it was used again after another one.
    ``pause`` says why this call is eager, in place of a
    replay of ``paused``, which had made ``paused_at`` of them.
    """

    key: Key = ()
    warm: int = 0
    since: int = 0
    used: int = 0
    eager_calls: int = 0
    called: int = 0
    refusal: RefusalError | None = None
    captured: bool = False
    wants_grad: bool = False
    outside: bool = False
    batch: BatchVariants | None = None
    base: Entry | None = None
    ways: list[Way] = field(default_factory=lambda: [Way()])
    places: dict[str, Scalar] = field(default_factory=dict)
    untried: int = 0
    too_many: HostScalarError | None = None
    gate: Gate | None = None
    is_decided: bool = False
    recurs: bool = False
    pause: str | None = None
    paused: Program | None = None
    paused_at: int = 0

    @property
    def way(self) -> Way:
        """The way that calls take now."""
        return self.ways[-1]

    @property
    def lines(self) -> dict[Variant, Line]:
        """The lines of the way that calls take now."""
        return self.way.lines

    @property
    def is_new(self) -> bool:
        """Whether no call was traced yet that took the way of now."""
        return not (self.lines or (self.captured and len(self.ways) == 1))

    @property
    def progress(self) -> int:
        """How far the way of now is on its way to a program: its traces; a plan counts more than these."""
        return max((_TRACED if line.plan is not None else len(line.traces) for line in self.lines.values()), default=0)

    @property
    def plans(self) -> list[Plan]:
        """The plans of its variants."""
        return [line.plan for line in self.lines.values() if line.plan is not None]

    def select(self, variant: Callable[[], Variant]) -> Program | None:
        """The program for the gradients and the owners' numbers that there are now, if it is ready."""
        if self.places or any(way.draws for way in self.ways):
            self._turn()
        ready = self.way.programs
        # Of a step that drops gradients unread, one serves whatever there are.
        for_any = next((program for program in ready if not program.plan.tells_gradients), None)
        if for_any is not None or not ready:
            return for_any
        line = self.lines.get(variant())
        if line is not None and line.program is not None:
            return line.program
        # Gradients that the step drops unread may differ from those of the traced calls (validation clears them).
        return next((program for program in ready if program.adopted.guards.gradients_fit()), None)

    def learn(self, facts: Trace, places: Mapping[str, Scalar]) -> None:
        """Take in what a trace of the latest call has asked of owners' numbers, which lie at ``places``."""
        asked, way = facts.symbolic.asked, self.way
        paths = {path for question in asked for path in question.paths} | facts.symbolic.deciding
        self.places.update({path: lasting(places[path]) for path in facts.symbolic.kinds if path in places})
        way.asked.update(asked)
        way.draws = tuple(facts.symbolic.draws)
        way.kinds.update({path: type(facts.entry_scalars.get(path)) for path in self.places})
        way.kinds.update(facts.symbolic.kinds)
        self.untried += not way.is_known
        way.is_known = True
        if self.untried > _WAYS and self.too_many is None:
            self.too_many = HostScalarError(
                f"the step takes another way through its code in each call, by what {' and '.join(sorted(paths))} come "
                f"to: {_WAYS} in a row came once, and a replay is good for one way. Feed what decides, or decide "
                "outside the step"
            )
        # What each step raises does not come again.
        used = paths & facts.symbolic.used.keys() - facts.symbolic.counted
        way.used = {path: facts.entry_scalars[path] for path in used}
        way.where = next((f"{path} at {facts.symbolic.used[path]}" for path in way.used), "")

    def _turn(self) -> None:
        """Turn to the way that the numbers of now lead to."""
        numbers = {path: value for path, place in self.places.items() if (value := value_at(place)) is not None}
        known = next((way for way in self.ways if way.is_known and way.is_taken(numbers)), None)
        if known is None:
            if not self.way.is_known:
                # Nothing is known of it yet.
                return
            alike = next((way for way in self.ways if way.used and way.is_taken(numbers, values=False)), Way())
            used = {path: numbers[path] for path in alike.used}
            known = Way(dict(alike.asked), alike.draws, dict(alike.kinds), used, alike.where)
            known.is_met, known.is_known = not used, bool(used)
            known.refusal = self.too_many
        elif known is self.way:
            return
        else:
            known.recurs = True
        if not self.way.lines and (self.way.refusal in (None, self.too_many)):
            self.ways.pop()
        self.ways = [*(way for way in self.ways if way is not known), known]
        if len(self.ways) > _WAYS:
            self.forget_oldest()

    def may_pause(self, program: Program, reason: str) -> bool:
        """Return True if an eager step takes the place of a program that does not fit, for a ``reason`` that is perhaps
        gone after it (metrics were reset, a smaller batch ended an epoch): most calls since the last one were replayed.
        """
        before = self.paused_at if program is self.paused else 0
        if program.replays - before < _MOSTLY:
            return False
        self.pause, self.paused, self.paused_at = reason, program, program.replays
        return True

    def has_paused(self, program: Program) -> bool:
        """Return True if the latest call was eager in place of the program."""
        return program is self.paused and program.replays == self.paused_at

    def take_pause(self) -> str | None:
        """Why this call is eager, once."""
        reason, self.pause = self.pause, None
        return reason

    def may_refuse_way(self) -> bool:
        """Return True if a refusal is for the calls that take this way alone: others are served, or may be."""
        others = self.ways[:-1]
        if any(way.programs for way in others):
            return True
        return bool(self.way.asked) and sum(way.refusal is not None for way in others) + 1 < _REFUSED

    def forget_oldest(self) -> None:
        """Close the programs of the way that was taken longest ago."""
        for program in self.ways.pop(0).programs:
            program.close()

    def programs(self) -> list[Program]:
        """Programs that are ready, those of the way of now last."""
        return [program for way in self.ways for program in way.programs]

    def drop(self) -> None:
        """Close the programs and start again from one warm step."""
        for program in self.programs():
            program.close()
        self.ways, self.untried = [Way()], 0
        self.pause = self.paused = None

    def relocate(self, places: Mapping[str, Scalar]) -> bool:
        """Look for the numbers at ``places`` from now on. Return True if that leads to another way."""
        way, self.places = self.way, {path: lasting(places[path]) for path in self.places if path in places}
        self._turn()
        return self.way is not way


def value_at(place: Scalar) -> Any:
    """The value at ``place``; None if it is gone."""
    try:
        return place.get()
    except (LookupError, AttributeError):
        return None


class Programs:
    """Entries by key, and the bounds on them and their programs. The least recently used go first."""

    def __init__(self, options: Options, stats: Stats, *, may_wait: bool = False) -> None:
        self._options = options
        self._stats = stats
        self._may_wait = may_wait
        self._entries: dict[Key, Entry] = {}
        self._lookups = 0
        # By geometry of the feed, the latest program, or how often it was replayed before it was closed.
        self._latest: dict[Hashable, Program | int] = {}
        self._reasons: list[str] = []
        self._unpaid = 0
        self.attempts = 0  # Calls on the way to a program that have returned.
        self._misses = self._paid = 0
        self._waits = self._waits_at = 0
        self._longest = _LONGEST
        self._said = False

    def get(self, key: Key) -> Entry | None:
        """The entry of ``key``."""
        entry = self._entries.get(key)
        if entry is not None:
            self.touch(entry)
        return entry

    def touch(self, entry: Entry) -> None:
        """Count ``entry`` as the one used last."""
        entry.recurs |= 0 < entry.used < self._lookups
        self._lookups += 1
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
        self.close(entry)

    def close(self, entry: Entry) -> None:
        """Close an entry's programs."""
        entry.drop()
        self._let_go()

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
        if before is not None:
            replays = before.replays if isinstance(before, Program) else before
            self._unpaid = self._unpaid + 1 if replays < _PAYS else 0
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
        if is_first and self._latest and self._misses >= limit and self._progress == self._paid:
            return f"{self._misses} new signatures came in a row, and none of them again"
        others = [other.used for other in self._entries.values() if other is not entry and other.programs()]
        if len(self.all()) < self._options.max_graphs or not others:
            return None
        oldest = min(others)
        is_unused = oldest < entry.since and not entry.captured
        if is_unused or self._lookups >= oldest + _IDLE * len(self._entries):
            return None
        return f"all {self._options.max_graphs} programs (max_graphs) are in use"

    def waits(self, entry: Entry) -> str | None:
        """Why a new signature, another way through the step, or a capture after some that did not pay, waits: for
        replays to save what starting took, less an allowance; None if it does not, or if nothing was replayed or
        captured for a while, so that nothing is saved.
        """
        has_ways = len(entry.ways) > 1
        is_further = (has_ways or not entry.captured) and (bool(self.all()) or self._is_behind(entry))
        # What has begun is brought to its end.
        if entry.progress or not (is_further or self._unpaid >= _UNPAID):
            return None
        if not self.has_spent(recurs=is_further and (entry.way.recurs if has_ways else entry.recurs)):
            self._longest = _LONGEST
            return None
        if self._waits_at != self._progress:
            # What was captured after the longest wait has not paid.
            self._longest *= _LONGER if self._waits > self._longest else 1
            self._waits, self._waits_at = 0, self._progress
        self._waits += 1
        if self._waits > self._longest:
            return None
        signature = "another signature" if is_further else "what was captured before"
        what = "another way through the step's code" if has_ways else signature
        return f"{what} is traced once replays have saved what earlier traces and captures took"

    def has_spent(self, *, recurs: bool = False) -> bool:
        """Return True if starting, with one more program like those so far, takes more than replays have saved. Where
        eager steps are not timed, counts decide, and what ``recurs`` may take more: it will come again.
        """
        if not self._may_wait:
            return False
        stats = self._stats
        eager, gain = stats.step_us("eager"), stats.gain()
        if eager is None:
            spent = float(_TRACE * stats.traced + _CAPTURE * stats.captured + _CHECK * stats.verified)
            saved, allowance = _SAVES * stats.replayed, float(_ALLOWANCE * (_AGAIN if recurs else 1))
        else:
            spent, saved = stats.spent(eager), 0.0 if gain is None else gain.saved
            allowance = _ALLOWANCE * eager / 1e6
        return spent + spent / max(1, stats.captured) - saved >= allowance

    def _is_behind(self, entry: Entry) -> bool:
        """Return True if another entry is nearer to its program."""
        return any(other.progress > entry.progress for other in self._entries.values())

    @property
    def _progress(self) -> int:
        return self._stats.replayed + self._stats.captured

    def count_new(self) -> None:
        """Count a call with a new signature."""
        self._misses = self._misses + 1 if self._progress == self._paid else 1
        self._paid = self._progress

    def churn(self) -> RecaptureError | None:
        """Return the error if captures follow each other without paying."""
        if self._unpaid < self._options.max_recaptures:
            return None
        why = "; ".join(dict.fromkeys(self._reasons)) or "its signature or its flags change each time"
        return RecaptureError(
            f"the step was captured again {self._unpaid} times in a row for fewer than {_PAYS} replays each: "
            f"{why}. Expected what a step depends on to stay for a while. Keep it still, hold it in a tensor, feed "
            f"it, or raise max_recaptures (now {self._options.max_recaptures})"
        )

    def check_due(self, feed: Feed) -> NotCapturedError | None:
        """Return the error, once, if no capture has come in time. The entry of ``feed`` was found last."""
        if self._latest or self._said:
            return None
        needed = self._options.warmup_steps + 3
        repeats = max(known.eager_calls for known in self._entries.values()) > 1
        if self.attempts < _PATIENCE * needed * (self._options.max_graphs if repeats else 1):
            return None
        self._said = True
        signatures = len(self._entries)
        before = sorted(self._entries.values(), key=lambda entry: entry.used)[-2:-1]
        found = first_difference(feed, before[0].key[0][0]) if before else None
        return NotCapturedError(
            f"no step was captured in {self._stats.calls} steps, though {needed} with one signature are enough: the "
            f"batches differ each time in shape, dtype, structure or Python values ({signatures} signatures so far"
            f"{'' if found is None else f'; {found}'}). Expected batches that repeat a signature: pad them, leave "
            "Python values that the step does not need out of what it is fed, and where it only decides by one "
            "(i % 2 == 0), feed what it decides"
        )
