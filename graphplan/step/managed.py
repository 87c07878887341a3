"""What every managed call of a step shares: its owners, prepared optimizers, device learning rates, fingerprint.

Longer than most rooms: all of it is about the one set of owners, and what was found in them last.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.amp.grad_scaler import GradScaler

from graphplan.compare.comparing import Row
from graphplan.compare.fast_compare import Modes
from graphplan.errors import FaultError, HostEffectError, OptimizerError, RefusalError
from graphplan.guards.fingerprint import Fingerprint
from graphplan.observe.executed_code import ExecutedCode
from graphplan.observe.profile import Profile
from graphplan.observe.source import find_source
from graphplan.optimizers.preparation import Preparation, check_optimizer, may_be_captured
from graphplan.optimizers.rates import LearningRates
from graphplan.optimizers.scaling import ScaledSteps
from graphplan.owners.discovery import Discovery
from graphplan.owners.group_counts import GroupCounts
from graphplan.owners.naming import free_name, name_owners
from graphplan.owners.sharding import Sharding
from graphplan.owners.slots import Namespace, Reached, Walk
from graphplan.owners.views import attributes_of
from graphplan.owners.walk import walk_owners
from graphplan.program.faults import refusing
from graphplan.step.churn import churn_error
from graphplan.step.compiled import runs_compiled
from graphplan.step.notices import Notices
from graphplan.trace.mode import refuse_trace

Result = TypeVar("Result")
_NAMES = "names"
"""The owner that stands for the names in the step's code."""
_STATE = ["_fingerprint", "_last_id", "refusal"]
_FINGERPRINTS = 256
"""Fingerprints that keep their numbers; of more, the latest ones."""
_CHURN = 3
"""New values of a hyper-parameter without one capture between them: it changes faster than steps can be captured."""


def _check_made(optimizer: torch.optim.Optimizer) -> None:
    """Have the trace refuse an optimizer that the step has made, and torch does not step in a capture."""
    if not may_be_captured(optimizer):
        refuse_trace(
            OptimizerError,
            f"the step makes an optimizer ({type(optimizer).__name__}) that steps at {find_source()}, and torch steps "
            "none such in a capture. Only optimizers from outside the step are made capturable: make this one with "
            "capturable=True",
        )


class Managed:
    """Owners of one step, named and discovered, and the optimizers among them. One that does not train (``trains``)
    owns optimizers that others step.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        owners: Mapping[str, Any] | Sequence[Any] | None,
        *,
        prepare: bool,
        fuse: bool = False,
        trains: bool = True,
    ) -> None:
        self._fn = fn
        self._prepare = prepare
        self._fuse = fuse
        self._trains = trains
        self.owners = name_owners(owners)
        scalers = [owner for owner in self.owners.values() if isinstance(owner, GradScaler) and owner.is_enabled()]
        self._is_scaled = bool(scalers)
        self._scaled_steps = ScaledSteps(scalers)
        self.rates = LearningRates(self._scaled_steps)
        self.modes = Modes()
        self.changes: list[str] = []
        self.refusal: RefusalError | None = None
        self.is_settled = False
        """Whether the code that was looked at last used no new name, and nothing that was met for the first time."""
        self.kept: dict[str, str] = {}
        """What the code that was looked at last made, and is there after it: by path, in words."""
        self.compiled: dict[int, tuple[Any, str]] = {}
        """What compiled code that ran was compiled with, wherever it is held, and its name; by identity."""
        self._managed: set[int] = set()
        self._fingerprint: Fingerprint | None = None
        self._walked: Walk | None = None
        self._sharding: Sharding | None = None
        self._last: tuple[Any, ...] | None = None
        self._last_id = 0
        self._seen: dict[tuple[Any, ...], int] = {}
        self._taken = 0
        self._churn = 0
        self._names = Namespace()
        self._root = {"step": fn}
        self._notices = Notices()
        self._layout: Any = None
        self._before: tuple[Any, tuple[Any, ...]] | None = None
        self._met: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        for owner in self.owners.values():
            if isinstance(owner, torch.optim.Optimizer):
                try:
                    self.manage(owner)
                except FaultError as error:
                    self.refusal = error

    def walk(self) -> Walk:
        """Walk the owners.

        Raises:
            CaptureError: if one of them cannot be read.
        """
        with refusing():
            return walk_owners(self.owners)

    def runs_compiled(self, walk: Walk) -> bool:
        """Whether the step runs code that ``torch.compile`` compiled: it has, or ``walk`` has just found some."""
        return bool(self.compiled) or runs_compiled(walk, self._fn)

    def manage(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare an optimizer and shadow its learning rate, once. One that cannot be captured is noted instead."""
        if id(optimizer) in self._managed or self._refuses(optimizer):
            return
        with refusing():
            if self._prepare:
                preparation = Preparation(optimizer, fused=self._is_scaled or self._fuse, steps=self._trains)
                self.changes += [change for change in preparation.changes if change not in self.changes]
                self._managed.add(id(optimizer))
                self.rates.keep(preparation)
            self.rates.attach([optimizer])

    def _refuses(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it cannot be captured, which the next call is told."""
        try:
            check_optimizer(optimizer)
        except OptimizerError as error:
            self.refusal = error
            return True
        return False

    def discover(
        self, call: Callable[[], tuple[Result, Walk]], on_first_sight: Callable[[Any], None] = lambda thing: None
    ) -> tuple[Result, Walk]:
        """Run ``call`` and take in the modules and optimizers that it turns out to use. Its result, and what a walk
        over the owners finds afterwards; ``call`` gives both too, for the owners known before.
        """
        with Discovery(self.manage, on_first_sight, _check_made) as discovery:
            result, walk = call()
        discovery.faults.check()
        self.kept = discovery.kept(walk, result)
        return result, self._take_owners(discovery, walk)

    def _take_owners(self, discovery: Discovery, walk: Walk, before: Walk | None = None) -> Walk:
        found = discovery.unknown(walk, self._fn, before)
        for name, owner in found.items():
            self.owners[free_name(name, self.owners)] = owner
        return self.walk() if found else walk

    def discover_all(
        self, call: Callable[[], Result], *, fed: Iterable[Any], is_settled: bool
    ) -> tuple[Result, Walk | None]:
        """:meth:`discover`, and take in the names and objects that the code of ``call`` uses, unless ``is_settled``;
        not those that it is ``fed``. The walk is None where there are more owners now than it would have found.

        Compiled code is looked at when it is traced: its names are those that the compiler gave. Where it is known that
        there is some, the call is not watched: each call that the compiler makes would take longer.
        """
        before = self.walk_of_call()
        if self.runs_compiled(before):
            return call(), None
        profile = Profile()
        with nullcontext() if is_settled else profile, Discovery(self.manage, is_watched=not is_settled) as discovery:
            result = call()
        discovery.faults.check()
        profile.faults.check()
        known = len(self.owners)
        walk = self._take_owners(discovery, self.walk(), before)
        if is_settled:
            self.is_settled &= len(self.owners) == known
            return result, walk
        self.compiled |= profile.ran.compiled
        if self.compiled:
            return result, None
        profile.ran.leave_out(fed)
        are_named = _NAMES in self.owners
        has_grown = self.take_names(profile.ran, walk)
        self.kept = discovery.kept(self.walk() if has_grown else walk, result)
        self.is_settled &= not (self.kept or discovery.steps_own)
        return result, walk if are_named and not has_grown else None

    def check_kept(self) -> None:
        """Refuse a step that has just made a module or an optimizer which is still there.

        Raises:
            HostEffectError: naming it.
        """
        for path, what in self.kept.items():
            raise HostEffectError(
                f"the step makes {path} ({what}), which is still there after it; a replay runs no Python, and would "
                "leave the one of an earlier call there. Make it once, outside the step, and have the step write to "
                "its tensors in place (load_state_dict, copy_), keep copies of its tensors instead, or make it after "
                "the step"
            )

    def take_names(self, ran: ExecutedCode, walk: Walk) -> bool:
        """Take in the names that code used, and the objects that it ran on; whether there are any new ones. ``walk`` is
        over the owners as they are now.

        An object is taken in when it turns up a second time: others are made by the step itself.
        """
        asked: dict[int, bool] = {}
        self.is_settled = False
        self.compiled |= ran.compiled
        kinds = set(map(id, map(type, walk.modules)))

        def has_met(thing: Any) -> bool:
            number = id(thing)
            if number not in asked:
                # No step makes the class of a layer that is there afterwards.
                asked[number] = number in kinds or self._met.get(number) is thing
                self._met[number] = thing
            return asked[number]

        reached = self._count_reached()
        grown = self.modes.watch(ran.switches)
        grown |= ran.name_all(self._fn, self._names, has_met)
        grown |= self._count_reached() > reached
        # Its defaults, and what a partial function holds for it.
        is_new = self._names.add("the step", self._root, "step")
        self.owners.setdefault(_NAMES, self._names)
        known = {id(container) for container in (self.walk() if grown or is_new else walk).containers}
        for thing in ran.objects():
            inner = attributes_of(thing)
            if inner is not None and id(inner) not in known and has_met(thing):
                self.owners[free_name(type(thing).__name__.lower(), self.owners)] = thing
                grown = True
        self.is_settled = not grown and all(asked.values())
        return grown

    def _count_reached(self) -> int:
        """How many owners the step's code has come to through libraries' objects."""
        reached = [owner for owner in self.owners.values() if isinstance(owner, Reached)]
        return sum(not owner.names.isdisjoint(self._names.attributes) for owner in reached)

    @property
    def unborn(self) -> bool:
        """Whether an optimizer has no state yet, because its scaler skipped the step that would have made it."""
        return self._scaled_steps.unborn

    def refresh(self, walk: Walk | None = None) -> None:
        """Look at the owners anew: after a warm-up step, or when containers were replaced. ``walk`` has just been over
        them, if given.
        """
        if self.refusal is not None:
            return
        walk = self.walk() if walk is None else walk
        if any(map(self._refuses, walk.optimizers.values())):
            # One that torch did not call may only turn up here, and take no hooks.
            return
        self.rates.attach(walk.optimizers.values())
        self._sharding = Sharding(walk.modules)
        # To steps that do not train, another step's preparations of the optimizers are nothing.
        known, count = walk if self._trains else replace(walk, optimizers={}), len(self.owners)
        self._fingerprint = Fingerprint(known, self.rates.shadowed | self._counts(walk))
        self._walked = walk if len(self.owners) == count else None
        for name, owner in [*self.owners.items(), *walk.optimizers.items()]:
            self._notices.register(name, owner)
        self._parameters = [param for _, param in walk.parameters.values()]

    def _counts(self, walk: Walk) -> set[tuple[int, str]]:
        """The entries of parameter groups that their optimizers count with, which become owners of their own."""
        paths = {id(optimizer): path for path, optimizer in walk.optimizers.items()}
        for optimizer, index, key in self.rates.counted:
            if id(optimizer) in paths:
                name = f"{paths[id(optimizer)]}.param_groups[{index}]"
                self.owners.setdefault(name, GroupCounts(optimizer, index)).keys_counted.add(key)
        counts = [owner for owner in self.owners.values() if isinstance(owner, GroupCounts)]
        return {(id(owner.group), key) for owner in counts for key in owner.keys_counted}

    def look_again(self) -> None:
        """:meth:`refresh`, once the first step has made the owners known."""
        if self._fingerprint is not None:
            self.refresh()

    def walk_of_call(self) -> Walk:
        """The walk of the last :meth:`refresh` in this call, once, since code runs then; or :meth:`walk`."""
        walk, self._walked = self._walked, None
        return self.walk() if walk is None else walk

    def end_call(self) -> None:
        """Forget the walk: it holds whatever the owners held."""
        self._walked = None

    @property
    def sharding(self) -> Sharding:
        """What FSDP2 does with the modules that it shards."""
        if self._sharding is None:
            try:
                self._sharding = Sharding(self.walk().modules)
            except FaultError as error:
                # A step that is refused asks, too.
                self.refusal = error
                self._sharding = Sharding([])
        return self._sharding

    def fingerprint(self) -> int:
        """A number for the Python values that a program bakes in; equal values have equal numbers."""
        if self._fingerprint is None:
            return -1
        values = self._fingerprint.values()
        if values != self._last:
            self._last, self._last_id = values, self._number(values)
            self._layout = self._fingerprint.layout
        return self._last_id

    def rows(self, compared: Collection[int]) -> list[Row] | None:
        """After :meth:`fingerprint`: comparisons that hold while it has this number; None where they do not say enough.
        ``compared`` are the ids of tensors that others compare.
        """
        return None if self._fingerprint is None else self._fingerprint.rows(compared)

    def row(self) -> Row:
        """A comparison that holds while nothing was refused, and nobody took another fingerprint."""
        return ("same_values", [vars(self)] * len(_STATE), _STATE, list(map(vars(self).get, _STATE)))

    def _number(self, values: tuple[Any, ...]) -> int:
        number = self._seen.pop(values, self._taken)
        self._seen[values] = number
        self._taken = max(self._taken, number + 1)
        if len(self._seen) > _FINGERPRINTS:
            del self._seen[next(iter(self._seen))]
        return number

    def next_fingerprint(self) -> int:
        """:meth:`fingerprint` at the start of a call.

        Raises:
            OptimizerError: if a hyper-parameter keeps taking new values, which no number of programs could follow.
        """
        if self._fingerprint is not None and not self._fingerprint.is_of_today():
            self.refresh()
        before, layout, taken = self._last, self._layout, self._taken
        number = self.fingerprint()
        if before is None:
            return number
        if before is not self._last:
            self._before = (layout, before)
        if self._taken > taken:
            self._check_churn(layout, before)
        return number

    def why_changed(self) -> str:
        """What the last change of the fingerprint was, described, and what happened before."""
        changed: list[str] = []
        if self._fingerprint is not None and self._before is not None and self._last is not None:
            changed = self._fingerprint.changed(*self._before, self._last)
        what = "; ".join(changed[:3]) or "other modes, flags, or objects"
        return what + self._notices.take()

    def take_events(self) -> str:
        """What torch told of since the last time, as the end of a sentence."""
        return self._notices.take()

    def captured(self) -> None:
        """A program was captured: hyper-parameters stay long enough."""
        self._churn = 0

    def _check_churn(self, layout: Any, before: tuple[Any, ...]) -> None:
        assert self._fingerprint is not None
        assert self._last is not None
        changed = self._fingerprint.changed_hypers(layout, before, self._last)
        self._churn += bool(changed)
        if self._churn >= _CHURN:
            self._churn = 0
            settings = {name for optimizer in self.walk().optimizers.values() for name in optimizer.defaults}
            raise churn_error(changed, _CHURN, settings)

    def grad_presence(self) -> tuple[bool, ...]:
        """Which parameters have a gradient now."""
        return tuple(param.grad is not None for param in self._parameters)

    def stand_down(self, *, is_by_time: bool) -> None:
        """Make the optimizers stock. Where runs are to be repeatable, and time decides (``is_by_time``), those that the
        step steps keep the kernels of replays instead, whose roundings may be others.
        """
        if not (is_by_time and self._trains and torch.are_deterministic_algorithms_enabled()):
            self.release()
            return
        self._notices.remove()
        self.prepare()
        self.rates.stay()

    def prepare(self) -> None:
        """Prepare all optimizers that are known."""
        for optimizer in self.walk().optimizers.values():
            self.manage(optimizer)

    def release(self) -> None:
        """Put the optimizers' flags back."""
        self._notices.remove()
        self.rates.release()
        self._managed = set()
