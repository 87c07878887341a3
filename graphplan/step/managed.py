"""The state that all managed calls of a step share: owners, prepared optimizers, device learning rates, fingerprint."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from graphplan.backends.backend import is_out_of_memory
from graphplan.compare.comparing import Row
from graphplan.compare.fast_compare import Modes
from graphplan.environment.origin import is_users
from graphplan.errors import FaultError, GraphPlanError, HostEffectError, OptimizerError, RefusalError
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.placeholders import ReadSignal
from graphplan.feed.signature import Feed
from graphplan.observe.executed_code import ExecutedCode
from graphplan.observe.profile import Profile
from graphplan.observe.source import find_source
from graphplan.optimizers.preparation import Preparation, check_optimizer, may_be_captured
from graphplan.optimizers.rates import LearningRates
from graphplan.optimizers.scaling import ScaledSteps
from graphplan.owners.discovery import Discovery, names_in
from graphplan.owners.kinds import has_groups, name_owners, unwrapped
from graphplan.owners.sharding import Sharding
from graphplan.owners.slots import ConditionalOwner, Namespace, Walk
from graphplan.owners.values import STEP
from graphplan.owners.views import GroupCounts, attributes_of
from graphplan.owners.walk import walk_owners
from graphplan.plan.plan import Handles
from graphplan.program.faults import is_raised_by_user, refusing
from graphplan.program.fingerprint import Fingerprint, Hooks
from graphplan.specs.paths import free_name
from graphplan.step.compiled import runs_compiled
from graphplan.tensors.deferred import replaced_classes
from graphplan.trace.mode import refuse_trace
from graphplan.trace.records import Trace
from graphplan.trace.run import trace

Result = TypeVar("Result")
_NAMES = "names"  # The owner that holds the names in the step's code.
_STATES = "dropout_states"  # The owner of random states that torch keeps for operators outside of generators.
_STATE = ["_fingerprint", "_last_id", "refusal"]
_FINGERPRINTS = 256  # Maximum fingerprints that keep their numbers; the least recently used ones are forgotten.
_CHURN = 3
"""After this many new values of hyper-parameters without a capture between them, the step is refused."""


def _check_made(optimizer: torch.optim.Optimizer) -> None:
    """Refuse the traced step if it makes an optimizer that torch cannot step in a capture."""
    if not may_be_captured(optimizer):
        refuse_trace(
            OptimizerError,
            f"the step creates an optimizer ({type(optimizer).__name__}) and steps it at {find_source()}, which torch "
            "does not allow in a capture. graphplan makes only optimizers from outside the step capturable: create "
            "this one with capturable=True",
        )


class Managed:
    """The owners of one step, named and discovered, and the ``changes`` that made their optimizers capturable. If a
    step does not train (``trains``), other steps step its optimizers.

    ``handles`` give plans access to the ``owners``. ``names``: the names in the step's code. ``refusal``: raised at the
    next call. ``kept``: objects that the last call made and left on an owner or returned, by path. ``has_learnt``: the
    last call may have found new owners or names. ``knows_all``: the last call used no object for the first time; an
    object becomes an owner or a name when it is used a second time. ``compiled``: the settings and the name of
    compiled code that ran, by identity.
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
        self._prepare, self._fuse, self._trains = prepare, fuse, trains
        self.owners = name_owners(owners)
        self._take_scalers()
        scalers = [owner for owner in self.owners.values() if isinstance(owner, GradScaler) and owner.is_enabled()]
        self._is_scaled = bool(scalers)
        self.scaled_steps = ScaledSteps(scalers)
        self.rates = LearningRates(self.scaled_steps)
        self.handles = Handles(lambda: fn, lambda: self.owners, self.rates)
        self.modes = Modes()
        self.changes: list[str] = []
        self.refusal: RefusalError | None = None
        self.kept: dict[str, str] = {}
        self.has_learnt = self.knows_all = False
        self.compiled: dict[int, tuple[Any, str]] = {}
        self._managed: set[int] = set()
        self._fingerprint: Fingerprint | None = None
        self._walked: Walk | None = None
        self._sharding: Sharding | None = None
        self._counted: list[tuple[torch.optim.Optimizer, int, str]] = []
        # Layout and values of the latest fingerprint, and of the one before its last change.
        self._last: tuple[Any, tuple[Any, ...]] | None = None
        self._before: tuple[Any, tuple[Any, ...]] | None = None
        self._last_id = 0
        numbers = count()
        self._number_of = lru_cache(_FINGERPRINTS)(lambda values: next(numbers))
        self._highest = -1
        self.churn = 0  # New values of hyper-parameters since the latest capture.
        self.names = Namespace()
        self._root = {"step": fn}
        self._fed: dict[int, dict[str, Any]] = {}  # Fed optimizers, by identity.
        self._states: dict[str, Tensor] = {}
        self._met: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        for owner in self.owners.values():
            if has_groups(owner):
                try:
                    self.manage(owner)
                except FaultError as error:
                    self.refusal = error

    def _take_scalers(self) -> None:
        """Add gradient scalers that the step's code names to the owners: optimizers' kernels depend on them."""
        known = set(map(id, self.owners.values()))
        for name, scaler in names_in(self._fn):
            # A scaler of a user's class is an ordinary object, whose own code is traced.
            is_scaler = issubclass(type(scaler), GradScaler) and not is_users(type(scaler))
            if is_scaler and id(scaler) not in known and scaler.is_enabled():
                known.add(id(scaler))
                self.owners[free_name(name, self.owners)] = scaler

    def walk(self) -> Walk:
        """Walk the owners. Raises CaptureError if one of them cannot be read."""
        with refusing():
            return walk_owners(self.owners)

    def runs_compiled(self, walk: Walk) -> bool:
        """Return True if the step has run compiled code, or if ``walk`` or its function contains some."""
        return bool(self.compiled) or runs_compiled(walk, self._fn)

    def manage(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare an optimizer, once, with device learning rates. Set ``refusal`` if it cannot be captured."""
        if id(optimizer) in self._managed or self._refuses(optimizer):
            return
        with refusing():
            if self._prepare:
                fused = self._is_scaled or self._fuse
                preparation = Preparation(optimizer, fused=fused, steps=self._trains, changes=self.changes)
                self._managed.add(id(optimizer))
                self.rates.keep(preparation)
            self.rates.attach([optimizer])

    def _refuses(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True, and refuse the next call, if the optimizer cannot be captured."""
        try:
            check_optimizer(optimizer)
        except OptimizerError as error:
            self.refusal = error
            return True
        return False

    def trace(
        self,
        feed: Feed,
        fed: CallArguments,
        record: Trace,
        device: torch.device | None,
        before: Trace | None,
        on_first_sight: Callable[[Any], None] = lambda thing: None,
    ) -> tuple[Any, Walk]:
        """Trace the step and own the modules and optimizers that it uses. Return its result, and a walk afterwards.

        Raises:
            ReadSignal: if the step uses a stand-in in a way that needs a real number.
            RefusalError: if it does so, and cannot be replayed for another reason.
        """
        with Discovery(self.manage, on_first_sight, _check_made) as discovery:
            try:
                result, after = trace(
                    self._fn, feed, fed, owners=self.owners, device=device, record=record,
                    rates=lambda: self.rates.storages, before=before,
                )  # fmt: skip
            except BaseException as error:
                if record.symbolic.are_there:
                    record.symbolic.put_numbers(self.walk())
                if not isinstance(error, Exception):
                    raise
                stands_in = record.deferred is not None and record.deferred.has_stand_ins
                is_own = isinstance(error, GraphPlanError) or is_out_of_memory(error) or is_raised_by_user(error)
                if not stands_in or is_own:
                    raise
                # The error may come from C code that does not accept a stand-in.
                raise ReadSignal(symbolic=record.symbolic.touched if record.symbolic.are_there else None) from None
        discovery.faults.check()
        if record.deferred is not None and record.deferred.has_stand_ins:
            is_lost, is_compiled = not record.symbolic.are_over(), bool(record.deferred and record.executed.compiled)
            if is_lost or is_compiled or _are_misused(record):
                # A violation refuses the step in any case, so do not trace again to find it.
                raise record.violation or ReadSignal(
                    symbolic=record.symbolic.touched if is_lost or not record.deferred else None
                )
        self.kept = discovery.kept(after, result)
        return result, self.walk() if self._take_owners(discovery, after) else after

    def _take_owners(self, discovery: Discovery, *walks: Walk) -> bool:
        """Own modules and optimizers that ran and are in none of the ``walks``. Return True if there are any."""
        found = discovery.unknown(self._fn, *walks)
        for name, owner in found.items():
            self.owners[free_name(name, self.owners)] = owner
        return bool(found)

    def discover(self, call: Callable[[], Result], *, fed: Iterable[Any]) -> Result:
        """Run ``call``; own what its code uses and names, except ``fed`` objects. A trace does so for compiled code."""
        before, self.has_learnt = self.walk_of_call(), True
        if self.runs_compiled(before):
            # Every step has to run the optimizer kernel that replays run, including the first one.
            for optimizer in [thing for _, thing in names_in(self._fn) if isinstance(thing, torch.optim.Optimizer)]:
                self.manage(unwrapped(optimizer))
            return call()
        profile = Profile()
        with profile, Discovery(self.manage) as discovery:
            result = call()
        discovery.faults.check()
        profile.faults.check()
        is_new = bool(discovery.unknown(self._fn, before)) and self._take_owners(discovery, before, self.walk())
        self.compiled |= profile.executed.compiled
        if not self.compiled:
            profile.executed.leave_out(fed)
            is_new |= self.add_names(profile.executed, before, seen=discovery.seen())
            self.kept = discovery.kept(self.walk(), result) if discovery.has_made else {}
            self.has_learnt = is_new or discovery.has_made
        return result

    def check_kept(self) -> None:
        """Raise HostEffectError if the last call made a module or an optimizer that still exists after it."""
        for path, what in self.kept.items():
            raise HostEffectError(
                f"the step creates {path} ({what}), which still exists after the step; a replay runs no Python and "
                "would leave the object of an earlier call there. Create it once, outside the step, and let the step "
                "write to its tensors in place (load_state_dict, copy_), keep copies of its tensors instead, or "
                "create it after the step"
            )

    def add_names(
        self,
        executed: ExecutedCode,
        walk: Walk,
        *,
        seen: Iterable[nn.Module] | None = None,
    ) -> bool:
        """Own the names that code used, and objects that it used for the second time. Return True if any is new. The
        ``walk`` was made before the call if the ``seen`` modules are given, else after it.
        """
        asked: dict[int, bool] = {}
        self.compiled |= executed.compiled
        kinds = {id(type(module)) for module in (*walk.modules, *(seen or ()))}

        def has_met(thing: Any) -> bool:
            number = id(thing)
            if number not in asked:
                # The class of an existing layer counts as met, since the step cannot have made it.
                asked[number] = number in kinds or self._met.get(number) is thing
                self._met[number] = thing
            return asked[number]

        reached = self._count_reached()
        grown = self.modes.watch(executed.switches)
        grown |= not walk.passed.isdisjoint(executed.mentioned)
        grown |= executed.name_all(self._fn, self.names, has_met, lambda: Hooks(walk).functions())
        grown |= self._count_reached() > reached
        # The step function itself leads to its defaults and to arguments that a partial holds.
        is_new = self.names.add(STEP, self._root, "step")
        self._own(_NAMES, self.names)
        grown |= self._take_wrappers(walk)
        things = list(executed.objects())
        walk = self.walk() if things and (grown or is_new or seen is not None) else walk
        known = {id(container) for container in walk.containers} if things else ()
        for thing in things:
            inner = attributes_of(thing)
            if inner is not None and id(inner) not in known and has_met(thing):
                self.owners[free_name(type(thing).__name__.lower(), self.owners)] = thing
                grown = True
        self.knows_all = all(asked.values())
        return grown

    def add_fed(self, leaves: Iterable[Any]) -> None:
        """Own the modules and name the optimizers that a step is fed: it may read them without running them."""
        things = [leaf for leaf in leaves if isinstance(leaf, nn.Module | torch.optim.Optimizer)]
        # Most steps are fed none, so avoid the walk over the owners then.
        walk = self.walk_before() if things else Walk()
        known = {*map(id, walk.modules), *map(id, walk.optimizers.values())}
        for leaf in (thing for thing in things if id(thing) not in known):
            name = type(leaf).__name__.lower()
            if isinstance(leaf, nn.Module):
                self.owners[free_name(name, self.owners)] = leaf
            else:
                self.names.add(name, self._fed.setdefault(id(leaf), {name: leaf}), name)
                self._own(_NAMES, self.names)
            self._walked = None

    def add_leaves(self, paths: Collection[str]) -> bool:
        """Own the gradients of leaf tensors at ``paths`` that are no parameters. Return True if any is new."""
        if self.names.leaves.issuperset(paths):
            return False
        self.names.leaves.update(paths)
        self._own(_NAMES, self.names)
        return True

    def _take_wrappers(self, walk: Walk) -> bool:
        """Own optimizers that code names and that share groups with owned ones: a step may use their state without
        calling their ``step``. Return True if any is new.
        """
        owned = {id(optimizer) for optimizer in walk.optimizers.values()}
        groups = {id(group) for optimizer in walk.optimizers.values() for group in optimizer.param_groups}
        fresh = {id(part): part for part in walk.parts.values() if id(part) not in owned and has_groups(part)}
        found = [part for part in fresh.values() if not groups.isdisjoint(map(id, part.param_groups))]
        for optimizer in found:
            self.owners[free_name(type(optimizer).__name__.lower(), self.owners)] = optimizer
        return bool(found)

    def add_states(self, own_states: Iterable[Tensor]) -> bool:
        """Own the random states that torch keeps for operators, by device. Return True if any is new."""
        new = {str(state.device): state for state in own_states}
        if all(self._states.get(device) is state for device, state in new.items()):
            return False
        self._states.update(new)
        self._own(_STATES, self._states)
        return True

    def _own(self, name: str, thing: Any) -> None:
        """Make ``thing`` an owner, unless it is one. The user's own owner may have the ``name``."""
        if not any(owner is thing for owner in self.owners.values()):
            self.owners[free_name(name, self.owners)] = thing

    def _count_reached(self) -> int:
        """The number of owners that are reached through libraries' objects by names that the step's code uses."""
        reached = [owner for owner in self.owners.values() if isinstance(owner, ConditionalOwner)]
        return sum(not self.names.attributes.isdisjoint(owner.names) for owner in reached)

    def refresh(self, walk: Walk | None = None) -> None:
        """Update everything that is derived from the owners. ``walk``, if given, has to be current."""
        if self.refusal is not None:
            return
        walk = self.walk() if walk is None else walk
        if any(map(self._refuses, walk.optimizers.values())):
            # An optimizer that did not call torch's `__init__` may first appear here. It has no attributes for hooks.
            return
        self.rates.attach(walk.optimizers.values())
        self._sharding = Sharding(walk.modules)
        # A step that does not train ignores other steps' preparations of the optimizers.
        known, number = walk if self._trains else replace(walk, optimizers={}), len(self.owners)
        self._fingerprint = Fingerprint(known, self.rates.on_device | self._counts(walk))
        self._walked = walk if len(self.owners) == number else None
        self._parameters = [param for _, param in walk.parameters.values()]

    def _counts(self, walk: Walk) -> set[tuple[int, str]]:
        """Entries of parameter groups in which optimizers count their steps. The groups become owners."""
        paths = {id(optimizer): path for path, optimizer in walk.optimizers.items()}
        self._counted = list(self.rates.counted)
        for optimizer, index, key in self._counted:
            if id(optimizer) in paths:
                name = f"{paths[id(optimizer)]}.param_groups[{index}]"
                self.owners.setdefault(name, GroupCounts(optimizer, index)).keys.add(key)
        counts = [owner for owner in self.owners.values() if isinstance(owner, GroupCounts)]
        return {(id(owner.group), key) for owner in counts for key in owner.keys}

    @property
    def is_outdated(self) -> bool:
        """Whether :meth:`refresh` is due: it was never called, or another optimizer counts its steps in a group."""
        return self._fingerprint is None or list(self.rates.counted) != self._counted

    def walk_before(self) -> Walk:
        """The walk over the owners before this call's step, made once per call."""
        if self._walked is None:
            self._walked = self.walk()
        return self._walked

    def walk_of_call(self) -> Walk:
        """Return :meth:`walk_before` and forget it, since the step runs next and may change the owners."""
        walk, self._walked = self.walk_before(), None
        return walk

    def end_call(self) -> None:
        """Drop the walk, which keeps objects alive that the owners held."""
        self._walked = None

    @property
    def sharding(self) -> Sharding:
        """The modules that FSDP2 shards, and the method that reshards them."""
        if self._sharding is None:
            try:
                self._sharding = Sharding(self.walk_before().modules)
            except FaultError as error:
                # Do not raise here: calls of a refused step need this property, too.
                self.refusal = error
                self._sharding = Sharding([])
        return self._sharding

    def fingerprint(self) -> int:
        """The number of the Python values that a program bakes in; equal values have equal numbers."""
        if self._fingerprint is None:
            return -1
        values = self._fingerprint.values()
        if self._last is None or values != self._last[1]:
            self._last, self._last_id = (self._fingerprint.layout, values), self._number_of(values)
        return self._last_id

    def rows(self, compared: Collection[int]) -> list[Row] | None:
        """Guard rows that hold while no refusal is set and the fingerprint is unchanged; None if there are none."""
        rows = None if self._fingerprint is None else self._fingerprint.rows(compared)
        own: Row = ("same_values", [vars(self)] * len(_STATE), _STATE, list(map(vars(self).get, _STATE)))
        return None if rows is None else [own, *rows]

    def next_fingerprint(self) -> int:
        """Return the fingerprint of a call. Raises OptimizerError for a hyper-parameter that keeps changing."""
        if self._fingerprint is not None and not self._fingerprint.matches_groups():
            self.refresh()
        before, number = self._last, self.fingerprint()
        is_new, self._highest = number > self._highest, max(number, self._highest)
        if before is None or before is self._last:
            return number
        self._before = before
        if is_new:
            assert self._fingerprint is not None
            assert self._last is not None
            changed = self._fingerprint.changed_hypers(*before, self._last[1])
            self.churn += bool(changed)
            if self.churn >= _CHURN:
                self.churn = 0
                raise OptimizerError(
                    f"{'; '.join(changed[:3])}: the {_CHURN}rd new value before a step could be captured, and each "
                    "value needs its own capture, because the kernel takes a Python number. Expected a constant, or an "
                    "lr that the optimizer reads on the device (AdamW, Adam, SGD, Adagrad with fused=True; on CUDA any "
                    "with capturable=True). OneCycleLR and CyclicLR also cycle betas or momentum: cycle_momentum=False "
                    "prevents that. Use one of those, change the value once per epoch, or move optimizer.step() out of "
                    "the step (in a Trainer, graphplan does this). Keep your own counts in a tensor or outside the "
                    "groups",
                    component="optimizer",
                )
        return number

    def why_changed(self) -> str:
        """Describe the last change of the fingerprint."""
        changed: list[str] = []
        if self._fingerprint is not None and self._before is not None and self._last is not None:
            changed = self._fingerprint.changed(*self._before, self._last[1])
        return "; ".join(changed[:3]) or "other modes, flags, or objects"

    def grad_presence(self) -> tuple[bool, ...]:
        """For each parameter, True if it has a gradient now."""
        return tuple(param.grad is not None for param in self._parameters)

    def prepare(self) -> None:
        """Prepare all owned optimizers."""
        for optimizer in self.walk().optimizers.values():
            self.manage(optimizer)

    def stand_down(self, *, is_by_time: bool) -> None:
        """Undo the preparation of optimizers, unless the speed gate would change deterministic results by that."""
        if not (is_by_time and self._trains and torch.are_deterministic_algorithms_enabled()):
            self.release()
            return
        self.prepare()
        self.rates.stay()

    def release(self) -> None:
        """Restore the optimizers' flags."""
        self.rates.release()
        self._managed = set()


def _are_misused(record: Trace) -> bool:
    """Return True if stand-ins outlive the step, or if code may have distinguished them from real values."""
    assert record.deferred is not None
    if record.reads.misused({name for _, _, name in record.symbolic.tables}):
        return True
    return not record.deferred.are_over() or record.reads.detects(replaced_classes(copies=bool(record.deferred.copies)))
