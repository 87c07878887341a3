"""What is known of the calls of one key: their ways through the step's code, and how far each is from a program."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from graphplan.errors import HostScalarError, RefusalError
from graphplan.feed.signature import Feed
from graphplan.observe.host_draws import Draw, peek
from graphplan.owners.slots import Scalar, lasting
from graphplan.plan.plan import Plan
from graphplan.program.program import Program
from graphplan.step.batch_variants import BatchVariants
from graphplan.tensors.symbolic import Question, come_out
from graphplan.trace.records import Trace

if TYPE_CHECKING:
    from graphplan.step.gate import Gate

_TRACED = 8  # More than a line has traces.
_MOSTLY = 4  # Replays between two eager steps that take the place of a program which does not fit.
_WAYS = 16  # Ways through a step, by what owners' numbers come to, that are kept for one key.
PAYS = 16
"""Replays after which a capture has paid: those that come to fewer count against ``max_recaptures``."""
_UNKNOWN = 256  # Ways that no call was traced for whose calls are counted.
_REFUSED = 3  # Refused ways without a program for another one, after which all calls of a key are eager.
Key = tuple[Any, ...]  # The feed's geometry, torch's switches, the number of the fingerprint.
Variant = tuple[bool, ...]
"""Which parameters have a gradient on entry: a step that accumulates has one program per answer."""


@dataclass(slots=True)
class Line:
    """The path of one variant to a program: its traces, the plan that two of them give, the program. ``state`` are the
    paths of optimizer state in the latest trace.

    The counters are of traces that were thrown away, by cause: autograd ran the operators in another order
    (``reordered``), the host changed a value between two traces (``straddling``), a branch went another way
    (``outcomes``), the code used names that it had not used before (``renamed``, in a row), what they had read was
    something else before the capture (``outdated``). ``has_come_again``: a call took it after there was a plan.
    """

    traces: list[Trace] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    reordered: int = 0
    straddling: int = 0
    outcomes: int = 0
    renamed: int = 0
    outdated: int = 0
    has_come_again: bool = False
    plan: Plan | None = None
    program: Program | None = None


@dataclass(slots=True)
class Frequency:
    """How often something ``met`` a call, from the call ``since`` to the ``latest`` one."""

    since: int = 0
    met: int = 0
    latest: int = -1

    def count(self, call: int) -> None:
        """It meets ``call``, which is counted once."""
        self.since = self.since if self.met else call
        self.met += call != self.latest
        self.latest = call

    @property
    def rate(self) -> float:
        """In what part of the calls after the first one it came again."""
        return (self.met - 1) / max(1, self.latest - self.since)


@dataclass(slots=True)
class Way:
    """One way through a step's code: what it has ``asked`` of owners' numbers, with the answers, and the ``draws`` on
    the host, whose numbers count as owners'; ``kinds`` are the classes of the numbers that code used, by path.

    Each value that code needs is a way of its own; ``where`` describes the first. ``lines`` has one for each variant.
    ``is_known``: it was traced, or one with other values was. ``taken``: how often calls took it, replays on the fast
    path aside.
    """

    asked: dict[Question, Any] = field(default_factory=dict)
    draws: tuple[Draw, ...] = ()
    kinds: dict[str, type] = field(default_factory=dict)
    where: str = ""
    lines: dict[Variant, Line] = field(default_factory=dict)
    refusal: RefusalError | None = None
    is_known: bool = False
    taken: Frequency = field(default_factory=Frequency)

    @property
    def needs_values(self) -> bool:
        """Whether code needs values."""
        return any(question.needs_value for question in self.asked)

    @property
    def is_met(self) -> bool:
        """Whether a call before this one has had these values."""
        return bool(self.lines) or self.taken.met > 1 or not self.needs_values

    def answers(self, numbers: Mapping[str, Any]) -> dict[Question, Any] | None:
        """What it has asked, with the answers for ``numbers`` by path; None if there are none."""
        try:
            known = {**numbers, **peek(self.draws)}
            return {question: question.answer(known) for question in self.asked}
        except Exception:  # noqa: BLE001 - a number is gone, or the step raises it, too
            return None

    def is_taken(self, numbers: Mapping[str, Any], *, values: bool = True) -> bool:
        """Return True if a step takes it with ``numbers`` by path; without ``values``, with others that code needs."""
        if any(type(numbers.get(path)) is not kind for path, kind in self.kinds.items()):
            return False
        asked = self.asked if values else {q: answer for q, answer in self.asked.items() if not q.needs_value}
        try:
            return come_out(asked, {**numbers, **peek(self.draws)})
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
    a program; ``met`` is how many there were. ``doubt``: how a replay after a single trace was wrong, told once if two
    traces say nothing against the step. ``captured``: it has or had one; ``lasted``: replays until it was to be
    captured again. ``gate`` times its replays until ``is_decided``. ``outside``: results take part in a backward pass
    outside the step, so calls are eager. ``batch``: what the step reads of its batch chooses another entry, whose
    ``base`` is this one. ``ways``: the one used last comes last; the numbers at ``places`` decide between them.
    ``untried`` ways were traced since the last capture, up to a limit (``too_many``); ``unknown``: how often others
    came, by how the questions of those come out. ``wasted`` programs of ways were closed before they had paid;
    ``needing`` calls were eager for a value that code needs. ``flows_out``: what a backward pass outside the
    step has come to, by the number of the call that returned it.
    ``pause``: why this call is eager though there is a program; ``paused``: after how many of its replays one was last
    left out so.
    """

    key: Key = ()
    warm: int = 0
    since: int = 0
    used: int = 0
    met: int = 0
    eager_calls: int = 0
    called: int = 0
    refusal: RefusalError | None = None
    doubt: RefusalError | None = None
    captured: bool = False
    lasted: float = math.inf
    wants_grad: bool = False
    outside: bool = False
    batch: BatchVariants | None = None
    base: Entry | None = None
    ways: list[Way] = field(default_factory=lambda: [Way()])
    places: dict[str, Scalar] = field(default_factory=dict)
    untried: int = 0
    wasted: int = 0
    needing: int = 0
    unknown: dict[tuple[Any, ...], Frequency] = field(default_factory=dict)
    too_many: HostScalarError | None = None
    gate: Gate | None = None
    is_decided: bool = False
    flows_out: dict[int, str] = field(default_factory=dict)
    pause: str | None = None
    paused: WeakKeyDictionary[Program, int] = field(default_factory=WeakKeyDictionary)

    @classmethod
    def of(cls, feed: Feed, base: Entry | None) -> Entry:
        """An entry for ``feed``, and if it has a ``base``, as warm: that has warmed up for all ways of its batches."""
        entry = cls(wants_grad=any(leaf.requires_grad for _, leaf in feed.tensors()))
        if base is not None:
            entry.base, entry.warm, entry.gate, entry.is_decided = base, base.warm, base.gate, base.is_decided
        return entry

    @property
    def way(self) -> Way:
        """The way that calls take now."""
        return self.ways[-1]

    @property
    def lines(self) -> dict[Variant, Line]:
        """The lines of the way that calls take now."""
        return self.way.lines

    @property
    def has_many_values(self) -> bool:
        """Whether code needs a value that is one of more than there are programs for, and this one has none."""
        return self.way.needs_values and not self.way.lines and len(self.unknown) >= _WAYS

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

    def line(self, variant: Variant) -> Line:
        """The line of ``variant``. A step that drops gradients unread takes that of a plan for whatever there are."""
        of_any = (line for line in self.lines.values() if line.plan is not None and not line.plan.tells_gradients)
        return next(of_any, None) or self.lines.setdefault(variant, Line())

    def forget(self, line: Line) -> None:
        """Begin anew with the calls that ``line`` is for."""
        way = self.way
        way.lines = {variant: known for variant, known in way.lines.items() if known is not line}

    def select(self, variant: Callable[[], Variant], call: int) -> Program | None:
        """The program for the gradients and the owners' numbers that there are in this ``call``, if it is ready."""
        if self.places or any(way.draws for way in self.ways):
            self._turn()
            self.way.taken.count(call)
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
        # A list may be empty after the step.
        self.places.update(facts.symbolic.places)
        self.places.update({path: lasting(places[path]) for path in facts.symbolic.kinds if path in places})
        # What each step raises does not come again, and what lay behind a property has a stand-in in further traces.
        used = paths & facts.symbolic.used.keys() - facts.symbolic.counted - facts.symbolic.behind
        values = {Question.about(path, needs_value=True): facts.entry_scalars[path] for path in used}
        # A number without a stand-in is not asked about again.
        known = facts.symbolic.places.keys() | facts.symbolic.drawn.keys()
        kept = {q: answer for q, answer in way.asked.items() if not (q.needs_value and known >= set(q.paths))}
        way.asked = {**kept, **asked, **values}
        way.where = next(chain(map(facts.symbolic.told, used), facts.symbolic.needed.values()), "")
        way.draws = tuple(facts.symbolic.draws)
        way.kinds.update({path: type(facts.entry_scalars.get(path)) for path in self.places})
        way.kinds.update(facts.symbolic.kinds)
        self.untried += not way.is_known
        way.is_known = True
        if self.untried > _WAYS and self.too_many is None:
            self.too_many = HostScalarError(
                f"the step takes another path through its code in each call, depending on {self._decides(paths)}: "
                f"{_WAYS} paths in a row were taken only once, and a replay repeats one path. Pass the deciding value "
                "as an argument, or decide outside the step"
            )

    def need(self, paths: Collection[str], places: Mapping[str, Scalar]) -> None:
        """The numbers at ``paths`` have no stand-ins any more: what decides is their values."""
        decide = {path for question in self.way.asked for path in question.paths}
        for path in decide.intersection(paths, places):
            self.way.asked[Question.about(path, needs_value=True)] = value_at(places[path])

    def _decides(self, paths: Collection[str]) -> str:
        """In words: what numbers at ``paths`` come to decides between ways; without paths, which numbers there are."""
        if paths:
            return f"the values of {' and '.join(sorted(paths))}"
        kinds = [way.kinds for way in self.ways]
        paths = {path for known in kinds for path in known if len({each.get(path) for each in kinds}) > 1}
        path = min(paths, default="a number")
        return f"whether {path} exists, and on its class"

    def _turn(self) -> None:
        """Turn to the way that the numbers of now lead to."""
        numbers = {path: value for path, place in self.places.items() if (value := value_at(place)) is not None}
        known = next((way for way in self.ways if way.is_known and way.is_taken(numbers)), None)
        if known is None:
            alike = [way for way in self.ways if way.needs_values and way.is_taken(numbers, values=False)]
            like = alike[0] if alike else max(self.ways, key=lambda way: len(way.asked))
            answers = like.answers(numbers) or {}
            frequency = self._frequency(answers)
            if not self.way.is_known:
                # Nothing is known of it yet.
                self.way.taken = frequency
                return
            known = Way(taken=frequency)
            if alike and answers:
                known = Way(answers, like.draws, dict(like.kinds), like.where, is_known=True, taken=frequency)
            # What is refused for two values is hardly replayed for another one.
            refusals = [way.refusal for way in alike if way.refusal is not None]
            known.refusal = refusals[0] if len(refusals) > 1 else self.too_many
        elif known is self.way:
            return
        if not self.way.lines and self.way.refusal in (None, self.too_many, *(way.refusal for way in self.ways[:-1])):
            self.ways.pop()
        self.ways = [*(way for way in self.ways if way is not known), known]
        if len(self.ways) > _WAYS:
            self.forget_oldest()

    def _frequency(self, answers: Mapping[Question, Any]) -> Frequency:
        """How often the way that has these ``answers`` has come, of which nothing else is known."""
        if len(self.unknown) > _UNKNOWN:
            self.unknown.clear()
        return self.unknown.setdefault(tuple(answers.values()), Frequency())

    def may_pause(self, program: Program, reason: str) -> bool:
        """Return True if an eager step takes the place of a program that does not fit, for a ``reason`` that is perhaps
        gone after it (metrics were reset, a smaller batch ended an epoch): most calls since the last one were replayed.
        """
        if program.replays - self.paused.get(program, 0) < _MOSTLY:
            return False
        self.pause, self.paused[program] = reason, program.replays
        return True

    def has_paused(self, program: Program) -> bool:
        """Return True if the latest call that would have replayed the program was eager in its place."""
        return program.replays == self.paused.get(program)

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
            self.wasted += program.replays < PAYS
            program.close()

    def programs(self) -> list[Program]:
        """Programs that are ready, those of the way of now last."""
        return [program for way in self.ways for program in way.programs]

    def drop(self) -> None:
        """Close the programs and start again from one warm step."""
        for program in self.programs():
            program.close()
        self.ways, self.untried, self.unknown = [Way()], 0, {}
        self.pause = None
        self.paused.clear()

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
