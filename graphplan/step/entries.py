"""The cache entry of one key: the control-flow paths ("ways") of its calls, with their traces, plans and programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from graphplan.errors import HostScalarError, RefusalError
from graphplan.feed.signature import Feed
from graphplan.observe.host_draws import Draw, peek
from graphplan.owners.slots import Scalar, item_by_attribute
from graphplan.plan.plan import Plan
from graphplan.program.program import Program
from graphplan.step.batch_variants import BatchVariants
from graphplan.tensors.symbolic import Question, answers_hold
from graphplan.trace.records import Trace

if TYPE_CHECKING:
    from graphplan.step.gate import Gate

_TRACED = 8  # Progress of a line that has a plan; larger than any number of traces.
_MOSTLY = 4  # Minimum replays between two single eager steps that replace a program that does not fit.
_WAYS = 16  # Maximum ways that are kept for one key.
PAYS = 16
"""Replays after which a capture has paid off. A capture with fewer counts against ``max_recaptures``."""
_UNKNOWN = 256  # Maximum untraced ways whose calls are counted.
_REFUSED = 3  # After this many refused ways, all calls of a key are eager if no other way has a program.
Key = tuple[Any, ...]  # The feed's geometry, torch's switches, the number of the fingerprint.
Variant = tuple[bool, ...]
"""Which parameters have a gradient on entry. A step that accumulates gradients has one program per variant."""


@dataclass(slots=True)
class Line:
    """The progress of one variant toward a program: its traces, the plan made of one or two of them, the program.
    ``state``: the paths of optimizer state in the latest trace.

    The counters count discarded traces by cause: autograd ran the operators in another order (``reordered``), host code
    changed a value between two traces (``straddling``), a branch went the other way (``outcomes``), the code used names
    for the first time (``renamed``, consecutive traces), a value that the traces read had changed before the capture
    (``outdated``). ``has_come_again``: a call took this line after there was a plan.
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
    """How many calls took a way (``met``), between the call ``since`` and the ``latest`` one."""

    since: int = 0
    met: int = 0
    latest: int = -1

    def count(self, call: int) -> None:
        """Count ``call``, at most once."""
        self.since = self.since if self.met else call
        self.met += call != self.latest
        self.latest = call

    @property
    def rate(self) -> float:
        """The share of the calls after the first one that took the way again."""
        return (self.met - 1) / max(1, self.latest - self.since)


@dataclass(slots=True)
class CodePath:
    """One control-flow path through a step's code. ``asked``: questions about owners' numbers, with the answers that
    lead here. ``draws``: random draws on the host, whose numbers count as owners'. ``kinds``: classes of the numbers.

    If code needs a number's value, each value is a way of its own; ``where`` describes the first such number. ``lines``
    has one line for each variant. ``is_known``: it was traced, or a way that differs only in such values was.
    ``taken``: how often calls took it, without replays on the fast path.
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
        """Whether code needs the value of a number, not only the outcome of a comparison."""
        return any(question.needs_value for question in self.asked)

    def answers(self, numbers: Mapping[str, Any]) -> dict[Question, Any] | None:
        """The questions of this way with the answers for ``numbers`` by path; None if one has no answer."""
        try:
            known = {**numbers, **peek(self.draws)}
            return {question: question.answer(known) for question in self.asked}
        except Exception:  # noqa: BLE001 - a number is gone, or the step raises it, too
            return None

    def is_taken(self, numbers: Mapping[str, Any], *, values: bool = True) -> bool:
        """Return True if ``numbers`` by path lead to this way. Without ``values``, ignore values that code needs."""
        if any(type(numbers.get(path)) is not kind for path, kind in self.kinds.items()):
            return False
        asked = self.asked if values else {q: answer for q, answer in self.asked.items() if not q.needs_value}
        try:
            return answers_hold(asked, {**numbers, **peek(self.draws)})
        except Exception:  # noqa: BLE001 - the step raises it, too, or guards find that the number is gone
            return False

    @property
    def programs(self) -> list[Program]:
        """Programs that are ready."""
        return [line.program for line in self.lines.values() if line.program is not None]


@dataclass(slots=True)
class Entry:
    """The cache entry of one ``key``.

    ``since`` and ``used``: the numbers of its first and latest lookup; ``met``: how many lookups there were.
    ``called``: the number of its latest call without a program. ``single_trace_error``: the error of a wrong replay
    after a single trace, raised once two traces give a plan. ``captured``: it has or had a program; ``lasted``: replays
    until its programs were last dropped for a recapture. ``gate`` times its replays until ``is_decided``. ``outside``:
    results take part in a backward pass outside the step, so calls are eager. ``batch``: reads of the batch choose
    another entry, whose ``base`` is this one. ``code_paths``: the current one is last; the numbers at ``places`` decide
    between them. ``traced_since_capture``: the number of code paths traced since the last capture; ``too_many``: the
    error if it exceeds a limit. ``unknown``: frequencies of untraced paths, by the answers to questions.
    ``unpaid_programs``: programs closed before they had paid off. ``value_calls``: calls eager for a needed value.
    ``outer_backward``: names of results that an outer backward pass reached, by the number of the call.
    ``pause``: why this call is eager despite a program; ``pauses_help``: programs were replayed after their pauses.
    """

    key: Key = ()
    warm: int = 0
    since: int = 0
    used: int = 0
    met: int = 0
    eager_calls: int = 0
    called: int = 0
    refusal: RefusalError | None = None
    single_trace_error: RefusalError | None = None
    captured: bool = False
    lasted: float = math.inf
    wants_grad: bool = False
    outside: bool = False
    batch: BatchVariants | None = None
    base: Entry | None = None
    code_paths: list[CodePath] = field(default_factory=lambda: [CodePath()])
    places: dict[str, Scalar] = field(default_factory=dict)
    traced_since_capture: int = 0
    unpaid_programs: int = 0
    value_calls: int = 0
    unknown: dict[tuple[Any, ...], Frequency] = field(default_factory=dict)
    too_many: HostScalarError | None = None
    gate: Gate | None = None
    is_decided: bool = False
    outer_backward: dict[int, str] = field(default_factory=dict)
    pause: str | None = None
    pauses_help: bool = True

    @classmethod
    def of(cls, feed: Feed, base: Entry | None) -> Entry:
        """An entry for ``feed``. With a ``base``, it starts as warm as that, which warmed up for all its batches."""
        entry = cls(wants_grad=any(leaf.requires_grad for _, leaf in feed.tensors()))
        if base is not None:
            entry.base, entry.warm, entry.gate, entry.is_decided = base, base.warm, base.gate, base.is_decided
        return entry

    @property
    def code_path(self) -> CodePath:
        """The current way."""
        return self.code_paths[-1]

    @property
    def lines(self) -> dict[Variant, Line]:
        """The lines of the current way."""
        return self.code_path.lines

    @property
    def lacks_value(self) -> bool:
        """Whether code needs a value that has no program and will not get one: it is new, or one of more than there are
        ways to keep.
        """
        is_new, is_one_of_many = self.code_path.taken.met <= 1, len(self.unknown) >= _WAYS
        return self.code_path.needs_values and not self.lines and (is_new or is_one_of_many)

    @property
    def is_new(self) -> bool:
        """Whether no call was traced on the current way yet."""
        return not (self.lines or (self.captured and len(self.code_paths) == 1))

    @property
    def progress(self) -> int:
        """The progress of the current way toward a program: its number of traces, or ``_TRACED`` with a plan."""
        return max((_TRACED if line.plan is not None else len(line.traces) for line in self.lines.values()), default=0)

    @property
    def plans(self) -> list[Plan]:
        """The plans of the current way's variants."""
        return [line.plan for line in self.lines.values() if line.plan is not None]

    def line(self, variant: Variant) -> Line:
        """The line of ``variant``. If a plan discards gradients unread, its line serves every variant."""
        of_any = (line for line in self.lines.values() if line.plan is not None and not line.plan.tells_gradients)
        return next(of_any, None) or self.lines.setdefault(variant, Line())

    def forget(self, line: Line) -> None:
        """Remove ``line``, so that its calls are traced from the beginning."""
        code_path = self.code_path
        code_path.lines = {variant: known for variant, known in code_path.lines.items() if known is not line}

    def select(self, variant: Callable[[], Variant], call: int) -> Program | None:
        """The ready program for the gradients and owners' numbers of this ``call``, if there is one."""
        if self.places or any(each.draws for each in self.code_paths):
            self._select_code_path()
            self.code_path.taken.count(call)
        ready = self.code_path.programs
        # If the step discards gradients unread, one program serves every variant.
        for_any = next((program for program in ready if not program.plan.tells_gradients), None)
        if for_any is not None or not ready:
            return for_any
        line = self.lines.get(variant())
        if line is not None and line.program is not None:
            return line.program
        # Gradients that the step discards unread may be missing now (validation clears them), which is no obstacle.
        return next((program for program in ready if program.adopted.guards.gradients_fit()), None)

    def learn(self, facts: Trace, places: Mapping[str, Scalar]) -> None:
        """Record what a trace of the latest call asked about owners' numbers, which lie at ``places``."""
        asked, code_path = facts.symbolic.asked, self.code_path
        paths = {path for question in asked for path in question.paths} | facts.symbolic.deciding
        # The step may have emptied a list, so use the places that the trace knew at its start.
        self.places.update(facts.symbolic.places)
        self.places.update({path: item_by_attribute(places[path]) for path in facts.symbolic.kinds if path in places})
        # Values of counters do not repeat, and a number behind a property gets a stand-in in later traces.
        used = paths & facts.symbolic.used.keys() - facts.symbolic.counted - facts.symbolic.behind
        values = {Question.about(path, needs_value=True): facts.entry_scalars[path] for path in used}
        # Keep questions about numbers that have no stand-in, since this trace could not ask them again.
        known = facts.symbolic.places.keys() | facts.symbolic.drawn.keys()
        kept = {q: answer for q, answer in code_path.asked.items() if not (q.needs_value and known >= set(q.paths))}
        code_path.asked = {**kept, **asked, **values}
        code_path.where = next(chain(map(facts.symbolic.told, used), facts.symbolic.needed.values()), "")
        code_path.draws = tuple(facts.symbolic.draws)
        code_path.kinds.update({path: type(facts.entry_scalars.get(path)) for path in self.places})
        code_path.kinds.update(facts.symbolic.kinds)
        self.traced_since_capture += not code_path.is_known
        code_path.is_known = True
        if self.traced_since_capture > _WAYS and self.too_many is None:
            self.too_many = HostScalarError(
                f"the step takes another path through its code in each call, depending on {self._decides(paths)}: "
                f"{_WAYS} paths in a row were taken only once, and a replay repeats one path. Pass the deciding value "
                "as an argument, or decide outside the step"
            )

    def need(self, paths: Collection[str], places: Mapping[str, Scalar]) -> None:
        """Let the values of the numbers at ``paths`` decide, since these numbers have no stand-ins any more."""
        decide = {path for question in self.code_path.asked for path in question.paths}
        for path in decide.intersection(paths, places):
            self.code_path.asked[Question.about(path, needs_value=True)] = value_at(places[path])

    def _decides(self, paths: Collection[str]) -> str:
        """Describe what decides between ways: the numbers at ``paths``, or without paths, a number's presence."""
        if paths:
            return f"the values of {' and '.join(sorted(paths))}"
        kinds = [each.kinds for each in self.code_paths]
        paths = {path for known in kinds for path in known if len({each.get(path) for each in kinds}) > 1}
        path = min(paths, default="a number")
        return f"whether {path} exists, and on its class"

    def _select_code_path(self) -> None:
        """Make the way to which the current numbers lead the current one."""
        numbers = {path: value for path, place in self.places.items() if (value := value_at(place)) is not None}
        known = next((each for each in self.code_paths if each.is_known and each.is_taken(numbers)), None)
        if known is None:
            alike = [each for each in self.code_paths if each.needs_values and each.is_taken(numbers, values=False)]
            like = alike[0] if alike else max(self.code_paths, key=lambda each: len(each.asked))
            answers = like.answers(numbers) or {}
            if len(self.unknown) > _UNKNOWN:
                self.unknown.clear()
            frequency = self.unknown.setdefault(tuple(answers.values()), Frequency())
            if not self.code_path.is_known:
                # The current way was not traced yet, so it can stand for these numbers.
                self.code_path.taken = frequency
                return
            known = CodePath(taken=frequency)
            if alike and answers:
                known = CodePath(answers, like.draws, dict(like.kinds), like.where, is_known=True, taken=frequency)
            # A step that is refused for two values is most likely refused for another value, too.
            refusals = [each.refusal for each in alike if each.refusal is not None]
            known.refusal = refusals[0] if len(refusals) > 1 else self.too_many
        elif known is self.code_path:
            return
        of_others = [each.refusal for each in self.code_paths[:-1]]
        if not self.code_path.lines and self.code_path.refusal in (None, self.too_many, *of_others):
            self.code_paths.pop()
        self.code_paths = [*(each for each in self.code_paths if each is not known), known]
        if len(self.code_paths) > _WAYS:
            self.forget_oldest()

    def may_pause(self, program: Program, reason: str, *, tries: bool) -> bool:
        """Return True if one eager step may replace a program that does not fit: the ``reason`` may be gone after it
        (metrics were reset, a smaller batch ended an epoch). Enough calls since the last pause were replayed, or the
        entry ``tries`` it with fewer, as a short evaluation has, as long as programs are replayed after pauses.
        """
        since = program.replays - (program.paused_at or 0)
        if program.has_paused or since < (0 if tries and self.pauses_help else _MOSTLY):
            self.pauses_help &= not program.has_paused
            return False
        self.pause, program.paused_at = reason, program.replays
        return True

    def take_pause(self) -> str | None:
        """Return why this call is eager despite a program, and clear the reason."""
        reason, self.pause = self.pause, None
        return reason

    def may_refuse_path(self) -> bool:
        """Return True if a refusal concerns the current way alone: other ways are replayed, or may be."""
        others = self.code_paths[:-1]
        if any(each.programs for each in others):
            return True
        return bool(self.code_path.asked) and sum(each.refusal is not None for each in others) + 1 < _REFUSED

    def forget_oldest(self) -> None:
        """Remove the least recently used way and close its programs."""
        for program in self.code_paths.pop(0).programs:
            self.unpaid_programs += program.replays < PAYS
            program.close()

    def programs(self) -> list[Program]:
        """Programs that are ready, those of the current way last."""
        return [program for each in self.code_paths for program in each.programs]

    def drop(self) -> None:
        """Close the programs and forget all ways. The number of warm-up steps stays."""
        for program in self.programs():
            program.close()
        self.code_paths, self.traced_since_capture, self.unknown = [CodePath()], 0, {}
        self.pause = None

    def relocate(self, places: Mapping[str, Scalar]) -> bool:
        """Read the numbers at ``places`` from now on. Return True if that leads to another way."""
        before = self.code_path
        self.places = {path: item_by_attribute(places[path]) for path in self.places if path in places}
        self._select_code_path()
        return self.code_path is not before


def value_at(place: Scalar) -> Any:
    """The value at ``place``; None if the place no longer exists."""
    try:
        return place.get()
    except (LookupError, AttributeError):
        return None
