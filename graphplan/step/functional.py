"""Plans and programs without a state machine: compile a plan, capture it, replay the program."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from graphplan.backends.backend import Backend, refusing_memory, resolve_backend
from graphplan.environment.surroundings import check_surroundings
from graphplan.errors import BackendError, CaptureError, ClosedError
from graphplan.feed.buffers import Buffers
from graphplan.feed.call_arguments import CallArguments, call_step
from graphplan.feed.placeholders import ReadSignal
from graphplan.feed.signature import Feed, check_feed, check_match, flatten
from graphplan.observe.capture_state import presenting_capture
from graphplan.optimizers.scaling import LENT
from graphplan.owners.flags import Flags
from graphplan.owners.kinds import check_names
from graphplan.owners.sharding import reshard_and_walk
from graphplan.owners.slots import Namespace, Walk
from graphplan.owners.snapshot import Snapshot
from graphplan.plan.build import build_plan, find_device
from graphplan.plan.plan import Handles, Plan
from graphplan.program.capture import capture_program
from graphplan.program.faults import refusing
from graphplan.program.fingerprint import Conditions
from graphplan.program.program import Program
from graphplan.specs.policy import Policy
from graphplan.step.compiled import refuse_graphs_within
from graphplan.step.graphed_step import check_form
from graphplan.step.managed import Managed
from graphplan.step.runner import Backends
from graphplan.trace.deferred_reads import DeferredReads
from graphplan.trace.records import Trace

Owners = Mapping[str, Any] | Sequence[Any] | None


@refusing()
def compile_plan(
    fn: Callable[..., Any],
    *args: Any,
    owners: Owners = None,
    restore: bool = True,
    allow: Sequence[str] = (),
    prepare_optimizers: bool = True,
) -> Plan:
    """Compile the plan of ``fn`` called with ``args``.

    Runs ``fn`` three times: once so that lazy state exists, and twice under a trace; once more if it uses objects that
    were not known by name. With ``restore``, the tensors, optimizer state (new state is removed), gradients, Python
    attributes of owners and random generators are restored afterwards. Other Python effects of ``fn`` (files, prints,
    globals) cannot be undone.

    Examples:
        >>> import torch
        >>> from graphplan import compile_plan
        >>> model = torch.nn.Linear(4, 2)
        >>> with torch.no_grad():
        ...     plan = compile_plan(model, torch.randn(8, 4), owners={"model": model})
        >>> for external in plan.externals:
        ...     print(external)
        args[0]: input f32[8, 4]
        model.weight: param f32[2, 4]
        model.bias: param f32[2]

    Args:
        fn: the step.
        *args: the positional arguments of one call: pytrees of tensors and literals.
        owners: objects whose tensors the step uses, as for :func:`graph_step`.
        restore: whether to undo these steps.
        allow: paths of Python effects that replays may leave out.
        prepare_optimizers: whether optimizers may be made capturable.

    Returns:
        The plan. ``print(plan)`` lists every tensor with its role.

    Raises:
        OptionError: if a call of the function does not run its body, as that of a generator function.
        RefusalError: if the step cannot be replayed correctly.
    """
    traces = _Traces(fn, args, owners, prepare=prepare_optimizers)
    return traces.plan(restore=restore, allow=allow)


class _Traces:
    """Traces of a function, each of a real step, and the snapshots that undo these steps."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], owners: Owners, *, prepare: bool) -> None:
        check_surroundings("a plan is compiled")
        check_form(fn)
        check_names(owners)
        self.managed = Managed(fn, owners, prepare=prepare)
        self.feed = flatten(args, {})
        check_feed(self.feed, None)
        _, walk = reshard_and_walk(self.managed.owners)
        fed = {self.feed.names()[index]: tensor for index, tensor in self.feed.tensors()}
        self._snapshots = [Snapshot(walk, extra=list(fed.values()))]
        self._flags = Flags(walk, fed)
        self._found = self._flags.read()

    def plan(
        self, *, restore: bool, allow: Sequence[str], function: Callable[[], Callable[..., Any]] | None = None
    ) -> Plan:
        """Make the plan. With a ``function`` that returns the step, the plan keeps neither step nor owners alive."""
        managed = self.managed
        try:
            first, second = self.two()
            handles = managed.handles
            if function is not None:
                handles = Handles(function, _weak_owners(managed.owners), managed.rates)
            with managed.rates:
                plan = build_plan(first, second, self.feed, handles, allow=allow)
        finally:
            if restore:
                self.undo()
        return replace(plan, conditions=Conditions(handles).read())

    def two(self) -> tuple[Trace, Trace]:
        """Trace two consecutive steps. Reads of numbers are deferred until values are needed, if that works."""
        try:
            return self._two(defers=True)
        except ReadSignal:
            self.undo()
            return self._two(defers=False)

    def _two(self, *, defers: bool) -> tuple[Trace, Trace]:
        """Trace until all names in the step's code are known, and return the last two traces."""
        managed, self._defers = self.managed, defers
        self._records: list[Trace] = []
        walk = self._run(None, self._copy)
        managed.add_names(self._records[0].executed, walk)
        managed.add_states(self._records[0].own_states)
        device = find_device(managed.walk(), self.feed)
        check_feed(self.feed, device)
        walk = self._run(device)
        if managed.add_names(self._records[1].executed, walk):
            # This snapshot restores newly named objects to this point; undoing the traces' writes restores the rest.
            self._snapshots.append(Snapshot(managed.walk()))
            self._run(device)
        self._run(device)
        managed.check_kept()
        first, second = self._records[-2:]
        return first, second

    def undo(self) -> None:
        # The snapshot of an optimizer that was not named contains its device learning rate.
        with self.managed.rates:
            for snapshot in reversed(self._snapshots):
                snapshot.restore()
        for record in reversed(self._records):
            record.undo_uncopied_writes()

    def _run(self, device: torch.device | None, on_first_sight: Callable[[Any], None] = lambda thing: None) -> Walk:
        managed, record = self.managed, Trace()
        record.deferred = DeferredReads(defers=self._defers)
        # Each trace starts with the initial flags, as a program does. Counters of optimizers continue.
        counted = managed.walk().counted
        self._flags.assign({path: value for path, value in self._found.items() if path not in counted})
        before = self._records[-1] if self._records else None
        self._records.append(record)
        # Rebuild the containers, so that the step's changes of them do not affect later runs.
        fed = CallArguments(*self.feed.rebuild(self.feed.leaves)).watch()
        with managed.rates:
            _, walk = managed.trace(self.feed, fed, record, device, before, on_first_sight)
        return walk

    def _copy(self, thing: Any) -> None:
        """Copy an object that was not named before its first run. Its flags are prepared already, and stay so."""
        _, walk = reshard_and_walk({"": thing})
        self._snapshots.append(Snapshot(walk, without=LENT, within=True))


def _weak_owners(owners: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
    """Weak references to owners, if their types allow that: a cached plan must not keep a model alive."""
    references = {name: _weak(owner) for name, owner in owners.items()}
    return lambda: {name: owner for name, get in references.items() if (owner := get()) is not None}


def _weak(owner: Any) -> Callable[[], Any]:
    if not isinstance(owner, Namespace):
        with suppress(TypeError):
            return weakref.ref(owner)
    kept = owner.plain() if isinstance(owner, Namespace) else owner
    return lambda: kept


_PLANS = WeakIdKeyDictionary()  # Plans by function (or a bound method's ``self``), then by method, feed key and owners.
_PLANS_OF_KEY = 8  # Plans that are kept of one key, for different modes and flags.


@refusing()
def compile_cached(
    fn: Callable[..., Any],
    *args: Any,
    owners: Owners = None,
    restore: bool = True,
    allow: Sequence[str] = (),
    prepare_optimizers: bool = True,
) -> Plan:
    """Compile a plan once per function and feed signature; see :func:`compile_plan`, also for its errors.

    The cache key is the identity of the function object, or of a bound method's ``self`` and function, and of the
    owners. References are weak: two instances of a class never share a plan, a reused ``id`` finds nothing, and a
    cached plan keeps neither function nor model alive. Calls under the same modes, flags, hooks and hyper-parameters
    return the same plan object.

    Examples:
        >>> import torch
        >>> from graphplan import compile_cached
        >>> model = torch.nn.Linear(4, 2)
        >>> with torch.no_grad():
        ...     plan = compile_cached(model, torch.randn(8, 4))
        ...     compile_cached(model, torch.randn(8, 4)) is plan
        True

    Args:
        fn: the step.
        *args: the positional arguments of one call: pytrees of tensors and literals.
        owners: objects whose tensors the step uses, as for :func:`graph_step`.
        restore: whether to undo these steps.
        allow: paths of Python effects that replays may leave out.
        prepare_optimizers: whether optimizers may be made capturable.
    """
    function: Callable[[], Any]
    if isinstance(fn, MethodType):
        owner, label, function = fn.__self__, fn.__func__, weakref.WeakMethod(fn)
    else:
        owner, label, function = fn, None, weakref.ref(fn)
    named = owners.items() if isinstance(owners, Mapping) else enumerate(owners or ())
    key = (label, flatten(args, {}).key, tuple((name, id(each)) for name, each in named))
    plans: list[Plan] = _PLANS.setdefault(owner, {}).setdefault(key, [])
    for plan in plans:
        if Conditions(plan.handles).change(plan.conditions) is None:
            return plan
    name = getattr(fn, "__qualname__", repr(fn))

    def alive() -> Callable[..., Any]:
        found: Callable[..., Any] | None = function()
        if found is None:
            raise ClosedError(f"the function {name} of this plan no longer exists; keep it, or compile the plan again")
        return found

    traces = _Traces(fn, args, owners, prepare=prepare_optimizers)
    plans[:] = [*plans[1 - _PLANS_OF_KEY :], traces.plan(restore=restore, allow=allow, function=alive)]
    return plans[-1]


@refusing()
@refusing_memory()
def capture(plan: Plan, *, feed: tuple[Any, ...], policy: Policy | None = None, backend: str = "auto") -> Program:
    """Record a plan's step as a program.

    Training state is unchanged afterwards, on every backend. It has to exist: run a step with an optimizer eagerly
    once.

    Examples:
        >>> import torch
        >>> from graphplan import Policy, capture, compile_plan
        >>> model, x = torch.nn.Linear(4, 2), torch.randn(8, 4)
        >>> with torch.no_grad():
        ...     plan = compile_plan(model, x, owners={"model": model})
        ...     program = capture(plan, feed=(x,), policy=Policy.inference())
        ...     y = program.replay((torch.ones(8, 4),))
        ...     torch.equal(y, model(torch.ones(8, 4)))
        True

    Args:
        plan: from :func:`compile_plan` or :func:`compile_cached`.
        feed: the positional arguments of one call, with the shapes, dtypes and devices of the plan.
        policy: which roles are static and which are copied in; :meth:`Policy.train` by default.
        backend: ``"auto"``, ``"cudagraph"`` or ``"tape"``.

    Returns:
        The program; ``replay(args)`` runs it, ``close()`` frees it.

    Raises:
        BackendError: if the backend does not exist, or cannot record on the plan's device.
        FeedError: if the feed does not match the plan.
        CaptureError: if the step creates state that does not exist yet, as an optimizer does in its first step, or if
            modes, flags, hooks or hyper-parameters have changed since the plan was made.
        UncoveredRoleError: if the policy leaves an external without storage.
        RefusalError: if the backend cannot record the step, or memory runs out.
    """
    check_surroundings("a step is captured")
    flat = flatten(feed, {})
    check_match(flat, plan.feed)
    check_feed(flat, plan.device)
    conditions = Conditions(plan.handles)
    change = conditions.change(plan.conditions)
    if change is not None:
        raise CaptureError(f"the plan of {plan.name} does not describe this step any more: {change}; compile it again")
    walk = plan.handles.walk()
    refuse_graphs_within(walk, plan.handles.function(), plan.device)
    name = resolve_backend(backend, plan.device)
    if name == "eager":
        raise BackendError("backend='eager' records nothing; choose from: auto, cudagraph, tape")
    recorder = Backends().get(name, plan.device)
    extra = [*plan.changed_tensors(walk), *(tensor for _, tensor in flat.tensors())]
    snapshot = Snapshot(walk, extra=extra, generators=plan.traced.generators)
    try:
        _warm_up(plan, flat, recorder, walk)
        snapshot.restore()
        with plan.handles.rates:
            program = capture_program(plan, flat, policy=policy or Policy.train(), backend=recorder, buffers=Buffers())
        program.conditions = conditions
        return program
    finally:
        snapshot.restore()


def _warm_up(plan: Plan, feed: Feed, backend: Backend, walk: Walk) -> None:
    """Run the plan's step once. Raises CaptureError if it creates state that ``walk`` does not have."""
    args, kwargs = feed.rebuild(feed.leaves)
    with plan.handles.rates, presenting_capture():
        backend.run(lambda: call_step(plan.handles.function(), args, kwargs))
    slots = plan.handles.walk().slots
    for external in plan.externals:
        slot = slots.get(external.path or "")
        if slot is not None and slot.param is None and slot.path not in walk.slots:
            raise CaptureError(
                f"{slot.path} does not exist yet, and a replay cannot create it: run the step eagerly once before "
                "capture"
            )
