"""What a step knows about its keys: how warm each is, its traces, its programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from graphplan.compare.comparing import Row
from graphplan.errors import RefusalError
from graphplan.feed.signature import without_shapes
from graphplan.plan.plan import Plan
from graphplan.program.program import Program
from graphplan.step.gate import Gate
from graphplan.trace.records import Trace

_KEYS_PER_GRAPH = 8
_IDLE = 16
"""Lookups for each key that there is, after which a program that none of them found is no longer in use."""
Key = tuple[Any, ...]
Variant = tuple[bool, ...]
"""Which parameters have a gradient on entry: a step that accumulates has one program per answer."""


@dataclass(slots=True)
class Line:
    """One variant on its way to a program: traces, then a plan, then the program.

    ``state`` are the paths of the optimizer state that the latest trace found. ``traced_anew``: whether a first pair of
    traces went to waste; ``reordered``: how many did because of autograd's engine, ``straddling``: in a row because of
    what happened between them. ``is_like_others``: whether the plan comes from one trace, which showed the step of
    another key's plan.
    """

    traces: list[Trace] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    traced_anew: bool = False
    reordered: int = 0
    straddling: int = 0
    plan: Plan | None = None
    is_like_others: bool = False
    program: Program | None = None


@dataclass(slots=True)
class Entry:
    """One key. ``any_program`` serves whatever gradients there are, since its step drops them unread.

    ``since`` is the number of the lookup that made it, ``used`` that of the latest one that found it, ``called`` that
    of the latest call on its way to a program, ``waited`` how many such calls were eager since another key was further.
    ``takes_two``: whether one trace is not enough, whatever others have shown. ``gate``: while it is open whether its
    replays pay, until ``is_decided``. ``settled``: the names in the code of its warm-up steps are known, and need not
    be watched. ``outside``: its calls are eager, since gradients are to flow through their results.
    """

    warm: int = 0
    since: int = 0
    used: int = 0
    eager_calls: int = 0
    called: int = 0
    waited: int = 0
    takes_two: bool = False
    settled: bool = False
    lines: dict[Variant, Line] = field(default_factory=dict)
    any_program: Program | None = None
    refusal: RefusalError | None = None
    captured: bool = False
    """Whether it has, or had, a program."""
    wants_grad: bool = False
    outside: bool = False
    gate: Gate | None = None
    is_decided: bool = False

    @property
    def is_new(self) -> bool:
        """Whether no call was traced yet."""
        return not (self.lines or self.captured)

    def is_like_others(self, program: Program) -> bool:
        """Whether the plan of one of its programs comes from one trace."""
        return any(line.program is program and line.is_like_others for line in self.lines.values())

    def row(self) -> Row:
        """A comparison that holds while the entry leads to the same program."""
        return ("same_attributes", [self, self], ["refusal", "any_program"], [self.refusal, self.any_program])

    def select(self, variant: Callable[[], Variant]) -> Program | None:
        """The program for the gradients that there are now, if it is ready."""
        if self.any_program is not None or not self.lines:
            return self.any_program
        line = self.lines.get(variant())
        if line is not None and line.program is not None:
            return line.program
        # Gradients that the step drops unread may differ from those of the traced calls (validation clears them).
        return next((program for program in self.programs() if program.guards.gradients_fit()), None)

    def programs(self) -> list[Program]:
        """Programs that are ready, each once."""
        ready = [line.program for line in self.lines.values() if line.program is not None]
        if self.any_program is not None and self.any_program not in ready:
            ready.append(self.any_program)
        return ready

    def drop(self) -> None:
        """Close the programs and start again from one warm step."""
        for program in self.programs():
            program.close()
        self.lines.clear()
        self.any_program = None
        self.settled = False


class Entries:
    """Entries by key: the feed's geometry, the environment, the fingerprint. Those used least recently go first.

    Args:
        max_graphs: how many programs they may have in all. Keys without one are remembered too, but not for ever.
    """

    def __init__(self, max_graphs: int) -> None:
        self._entries: dict[Key, Entry] = {}
        self._max_graphs = max_graphs
        self._lookups = self._until = 0

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def find(self, key: Key) -> Entry | None:
        """The entry of ``key``."""
        entry = self._entries.get(key)
        if entry is not None:
            self.touch(entry)
        return entry

    def touch(self, entry: Entry) -> None:
        """Count ``entry`` as the one used last."""
        self._lookups += 1
        entry.used = self._lookups

    def put(self, key: Key, entry: Entry) -> None:
        """Keep ``entry`` under ``key``, and under no other."""
        entry.since = entry.since or self._lookups + 1
        for old in [old for old, known in self._entries.items() if known is entry]:
            del self._entries[old]
        self._entries[key] = entry
        self.find(key)
        if len(self._entries) > _KEYS_PER_GRAPH * self._max_graphs:
            self._entries.pop(min(self._entries, key=lambda key: self._entries[key].used)).drop()

    def others(self, entry: Entry, *, of_shape: bool = False) -> list[Entry]:
        """Other entries under the same modes and fingerprint: the same step, fed otherwise. With ``of_shape``, those
        alone that differ by the shapes of tensors.
        """
        own = next((key for key, known in self._entries.items() if known is entry), None)
        found = [(key, known) for key, known in self._entries.items() if own is not None and key[1:] == own[1:]]
        if own is not None and of_shape:
            found = [(key, known) for key, known in found if without_shapes(key[0][0]) == without_shapes(own[0][0])]
        return [known for _, known in found if known is not entry]

    def key_before(self) -> Key | None:
        """The key of the entry that was found before the latest one."""
        return next(iter(sorted(self._entries, key=lambda key: self._entries[key].used)[-2:-1]), None)

    def has_captured(self, geometry: Any) -> bool:
        """Whether there was a program for feeds of this geometry, under whatever fingerprint."""
        return any(entry.captured for key, entry in self._entries.items() if key[0] == geometry)

    def programs(self) -> list[Program]:
        """All programs."""
        return [program for entry in self for program in entry.programs()]

    def has_room(self, entry: Entry) -> bool:
        """Whether ``entry`` may have one more program: there are few enough, or one of the others is no longer in use.
        Where ``entry`` had none so far, that is one that was not used since it came.
        """
        others = [other for other in self if other is not entry and other.programs()]
        if len(self.programs()) < self._max_graphs or not others:
            return True
        oldest = min(other.used for other in others)
        return (not entry.captured and oldest < entry.since) or self._lookups >= self._end_of_use(oldest)

    def _end_of_use(self, used: int) -> int:
        return used + _IDLE * len(self._entries)

    def leave_out(self) -> bool:
        """Count a lookup that is left out, as long as all programs are in use; False once one is not."""
        self._lookups += 1
        if self._lookups >= self._until:
            oldest = min((entry.used for entry in self if entry.programs()), default=0)
            self._until = self._end_of_use(oldest)
        return self._lookups < self._until

    def evict(self, kept: Entry) -> int:
        """Drop programs of other entries than ``kept`` while there are too many; how many entries lost theirs."""
        dropped = 0
        while len(self.programs()) > self._max_graphs:
            others = [entry for entry in self if entry.programs() and entry is not kept]
            if not others:
                break
            min(others, key=lambda entry: entry.used).drop()
            dropped += 1
        return dropped

    def evict_generation(self, kept: Entry) -> int:
        """Drop the programs of the generation that was used least recently, unless ``kept`` has programs of it; how
        many entries lost theirs. Memory comes back only where nothing of a generation is left.
        """
        held = {program.generation for program in kept.programs()}
        used: dict[object, int] = {}
        for entry in self:
            for program in entry.programs():
                used[program.generation] = max(used.get(program.generation, 0), entry.used)
        old = [generation for generation in used if generation not in held]
        if not old:
            return 0
        oldest = min(old, key=used.__getitem__)
        losers = [entry for entry in self if any(program.generation == oldest for program in entry.programs())]
        for entry in losers:
            entry.drop()
        return len(losers)

    def clear(self) -> None:
        """Drop every program and forget every key."""
        for entry in self:
            entry.drop()
        self._entries.clear()
