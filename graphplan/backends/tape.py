"""The tape backend: record a step's operators once, and run them again on the same storages.

It follows the rules of a CUDA graph without a GPU: fixed addresses, no Python, no host reads. A replay skips views,
allocations and constants. An operator with an ``out=`` overload writes directly into its recorded result. Random
operators draw from the same generators as in eager steps. Storages that the step frees (``storage.resize_(0)``) are
allocated while a replay runs.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from graphplan.backends.backend import NOTHING_TRACED, Backend, TracedValues
from graphplan.environment.collector import no_collections
from graphplan.environment.switches import SWITCHES, answers, switched
from graphplan.errors import CaptureError
from graphplan.observe.conversions import Conversions
from graphplan.observe.source import find_source
from graphplan.observe.watching import Unwatched
from graphplan.specs.roles import Footprint
from graphplan.tensors.attributes import is_freed
from graphplan.tensors.copying import same_bits
from graphplan.tensors.storages import place_of, storage_id
from graphplan.trace.batch_reads import BatchAnswers
from graphplan.trace.collectives import finish, wait_for
from graphplan.trace.composites import OperatorMode
from graphplan.trace.host_reads import HostRead, KnownReads, find_place
from graphplan.trace.mode import LIFTS
from graphplan.trace.operator_schemas import ATOMS, OperatorCall, schema_of, tensors_in
from graphplan.trace.rng import saving_states

_CONSTANT = (
    "aten.zeros.default", "aten.ones.default", "aten.full.default", "aten.arange.default", "aten.arange.start",
    "aten.arange.start_step", "aten.scalar_tensor.default", "aten.eye.default", "aten.linspace.default",
    "aten.tril_indices.default", "aten.triu_indices.default",
)  # fmt: skip
"""Operators whose results depend on no tensor: run once, unless the result is written to. The ``*_like`` forms
are left out because a backward pass may return their results to the user as gradients."""

_MODES = ("torch.is_grad", "torch.is_inference", "torch.is_autocast", "torch.get_autocast", "torch.get_default_device")
"""Prefixes of switches that a replay sets in another way, or that operators below autograd do not depend on."""
_SWITCHES = [s for s in SWITCHES if not s.name.startswith(_MODES) and "torch.backends.cud" not in s.name]
"""The remaining switches, which CPU kernels may depend on. They are read for each recorded kernel."""
_GETTERS = [switch.get for switch in _SWITCHES]

_COPIES = ("aten.clone.default", "aten._to_copy.default")
"""Operators that a copy into the recorded result reproduces bit by bit."""
_COPY = schema_of(torch.ops.aten.copy_.default)


def _modes() -> tuple[bool, bool]:
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled()


@dataclass(slots=True, eq=False)
class _RecordedOperator:
    """One recorded operator, which ``run`` runs again. ``constant``: the result depends on no tensor's values."""

    run: Callable[[], Any]
    writes: list[int | None] = field(default_factory=list)
    """The storages that it writes to."""
    tensors: list[Tensor] = field(default_factory=list)
    """The tensors that it reads and writes."""
    constant: bool = False
    # Some kernels depend on the grad mode (an LSTM keeps a workspace for its backward pass), and inference tensors can
    # be written to in inference mode only.
    modes: tuple[bool, bool] = field(default_factory=_modes)
    switches: dict[str, Any] = field(default_factory=dict)
    """torch's global switches that the step had changed, and their values."""


def _alias(value: Any, aliases: list[tuple[Tensor, Tensor]]) -> Any:
    """Return ``value`` with detached tensors, since an autograd history would keep the step's graph alive. ``aliases``
    has the operator's (tensor, alias) pairs: a tensor in several arguments stays one, as torch's attention requires.
    """
    kind = type(value)
    if kind in ATOMS:
        return value
    if isinstance(value, Tensor):
        for tensor, alias in aliases:
            if tensor is value:
                return alias
        aliases.append((value, value.detach()))
        return aliases[-1][1]
    return kind([_alias(item, aliases) for item in value]) if isinstance(value, list | tuple) else value


class _TapeMode(OperatorMode):
    def __init__(self, reads: KnownReads, given: BatchAnswers | None) -> None:
        super().__init__(given)
        self._reads = reads
        self.kernels: list[_RecordedOperator] = []
        self.failure: str | None = None
        self.changed: tuple[HostRead, Any] | None = None
        """The first read whose value differs from the traces, and that value."""
        self.storages: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self._saved: dict[int, tuple[torch.Generator, list[Tensor]]] = {}
        """The generator and the state for each time that the step saves one, by identity of the first saved state."""
        self._overloads: dict[Any, bool] = {}
        """Whether the ``out=`` overload of an operator works, by the operator's form."""
        self._found = answers(_GETTERS)

    def fail(self, why: str) -> None:
        """Note that the recording cannot be used. The step continues, since it is a real step."""
        if self.failure is None:
            self.failure = f"{why} at {find_source()}"

    def note_read(self, name: str, tensor: Tensor | None = None) -> None:
        """Note a host read; fail if the traced steps did not make it too."""
        with self.faults.noting():
            if find_place() not in self._reads:
                self.fail(f"{name} reads values on the host")

    def _take_read(self, name: str, tensor: Tensor, out: Any) -> tuple[Any, HostRead | None]:
        """Record an operator's read of ``tensor``; return the value for the step and the traces' read at this place. If
        replays compare the read, the step gets the traces' value; if the real value differs, the step is undone.
        """
        place = find_place()
        if place not in self._reads:
            self.fail(f"{name} reads values on the host")
            return out, None
        read = self._reads.take(place)
        if not read.expected:
            return out, read
        held = tensor.detach()
        outcome = read.outcome_of(held).item()
        if self.changed is None and outcome != read.outcome:
            self.changed = read, outcome
        self.kernels.append(_RecordedOperator(lambda: read.compare(read.outcome_of(held).item())))
        return tree_map_only(Tensor, Tensor.clone, read.value), read

    def check_outcome(self) -> None:
        """Raise OutcomeError if the step has read another value than in the traces."""
        if self.changed is not None:
            read, value = self.changed
            read.compare(value)

    def save_state(self, generator: torch.Generator) -> Tensor:
        """Save the generator's state, and record that replays save it here too."""
        saved = [generator.get_state()]
        self._saved[id(saved[0])] = generator, saved
        self.kernels.append(_RecordedOperator(lambda: saved.__setitem__(0, generator.get_state())))
        return saved[0]

    def put_state(self, generator: torch.Generator, state: Tensor) -> None:
        """Restore a saved state, and record that replays restore the state that they saved."""
        generator.set_state(state)
        owner, saved = self._saved.get(id(state), (None, [state]))
        if owner is not generator:
            self.fail("the state of a generator is set to one that the step did not save")
        else:
            self.kernels.append(_RecordedOperator(lambda: generator.set_state(saved[0])))

    def operate(self, unwatched: Unwatched, call: OperatorCall) -> Any:
        schema = call.schema
        if schema.name in LIFTS:
            self._record_constant(call.args[0])
            return unwatched.run(schema.call, call.args, call.kwargs)
        taken = {storage_id(tensor) for tensor in call.tensors()}
        out = unwatched.run(schema.call, call.args, call.kwargs, is_native=schema.is_native)
        if schema.communicates:
            out = finish(schema.name, out)
        is_shape = call.has_dynamic_shape()
        if call.reads_values() or is_shape:
            out, read = self._take_read(schema.name, call.args[0], out)
            if is_shape and read is not None and (read.asserted or read.expected):
                # Do not record it: in a replay the result may have another shape. Nothing else uses an asserted one.
                for made in tensors_in(out) if read.expected else ():
                    self._record_constant(made)
                return out
        self._record(call, out, taken)
        return out

    def _record(self, call: OperatorCall, out: Any, taken: set[int | None]) -> None:
        schema = call.schema
        outs: list[Tensor | None] = []
        writes = list(map(storage_id, call.written())) if schema.may_write else []
        is_pure = not writes and torch.Tag.nondeterministic_seeded not in schema.operator.tags
        for result in out if isinstance(out, list | tuple) else (out,):
            is_new = isinstance(result, Tensor) and storage_id(result) not in taken
            if is_new:
                memory = result.untyped_storage()
                self.storages[memory._cdata] = memory.nbytes()
                writes.append(memory._cdata)
            outs.append(result.detach() if is_new else None)
        # Operators that return None check values and may raise: repeat them. In-place views (`squeeze_`) persist: skip.
        if schema.allocates or schema.is_inplace_view or not (writes or out is None):
            return
        aliases: list[tuple[Tensor, Tensor]] = []
        given, named = _alias(call.args, aliases), {name: _alias(value, aliases) for name, value in call.kwargs.items()}
        tensors = [alias for _, alias in aliases] + [made for made in outs if made is not None]
        run = self._compile(OperatorCall(schema, given, named), outs, is_pure=is_pure)
        self._keep(_RecordedOperator(run, writes, tensors, schema.name in _CONSTANT, switches=self._switched()))

    def _compile(self, call: OperatorCall, outs: list[Tensor | None], *, is_pure: bool) -> Callable[[], Any]:
        """Return a function that runs an operator again. ``outs`` has for each result the tensor to fill, or None."""
        schema, args = call.schema, call.args
        run: Callable[[], Any] = partial(schema.call, *args, **call.kwargs)
        if schema.communicates:
            run = partial(_waiting, schema.name, run)
        if all(out is None for out in outs):
            return run
        if schema.name in _COPIES and isinstance(args[0], Tensor):
            return partial(_COPY.call, outs[0], args[0])
        overload, names = _out_overload(schema.operator) if is_pure else (None, ())
        if overload is not None and len(names) == len(outs) and all(out is not None for out in outs):
            fill = partial(overload, *args, **call.kwargs)
            form = _form(call, outs)
            if form not in self._overloads:
                self._overloads[form] = _works(fill, names, outs)
            if self._overloads[form]:
                return partial(fill, **dict(zip(names, outs, strict=True)))
        return _copying(run, outs)

    def _keep(self, kernel: _RecordedOperator) -> None:
        self.kernels.append(kernel)
        for memory in (t.untyped_storage() for t in kernel.tensors if t.layout is torch.strided):
            self.sizes[memory._cdata] = max(memory.nbytes(), self.sizes.get(memory._cdata, 0))

    def _switched(self) -> dict[str, Any]:
        """Return the switches that kernels may depend on and that have changed since the step began."""
        found = answers(_GETTERS)
        if found == self._found:
            return {}
        return {s.name: now for s, old, now in zip(_SWITCHES, self._found, found, strict=True) if now != old}

    def _record_constant(self, value: Tensor) -> None:
        args = (value.detach(), value.detach().clone())
        self._keep(_RecordedOperator(partial(_COPY.call, *args), [storage_id(value)], list(args), constant=True))


def _form(call: OperatorCall, outs: list[Tensor | None]) -> Any:
    """Return a key of an operator and its results without the values and addresses of its tensors."""
    numbers: dict[int | None, int] = {}

    def form(value: Any) -> Any:
        if isinstance(value, Tensor):
            storage, _, *geometry = place_of(value)
            return numbers.setdefault(storage, len(numbers)), value.layout, value.device, *geometry
        return tuple(map(form, value)) if isinstance(value, list | tuple) else (type(value), value)

    given = (call.args, tuple(call.kwargs), tuple(call.kwargs.values()), outs)
    return id(call.schema), _modes(), form(given)


@cache
def _out_overload(func: Any) -> tuple[Callable[..., Any] | None, tuple[str, ...]]:
    """Return the ``out=`` overload of ``func`` with the same arguments, or None, and the names of its results."""
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        candidate = getattr(func.overloadpacket, overload)
        plain = [(a.name, str(a.type)) for a in candidate._schema.arguments if not a.is_out]
        given = [a for a in candidate._schema.arguments if a.is_out]
        generated = torch.Tag.generated in candidate.tags
        # A generated out= overload calls the functional one and copies, with too few checks: we copy ourselves.
        if given and not generated and plain == wanted and all(str(a.type) == "Tensor" for a in given):
            return schema_of(candidate).call, tuple(a.name for a in given)
    return None, ()


def _waiting(name: str, run: Callable[[], Any]) -> Any:
    out = run()
    wait_for(name, out)
    return out


def _works(fill: Callable[..., Any], names: Sequence[str], outs: Sequence[Any]) -> bool:
    """Return True if ``fill``, an ``out=`` overload, fills given results in place with the bits of ``outs``.

    Some do not: torch's ``binary_cross_entropy.out`` does not write a scalar result, ``mse_loss.out`` reallocates it.
    """
    probes = [torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device) for o in outs]
    places = [probe.data_ptr() for probe in probes]
    # torch warns when it resizes a result on the way. For a single element the address does not show it.
    if _warns(partial(fill, **dict(zip(names, probes, strict=True)))):
        return False
    stayed = [probe.data_ptr() for probe in probes] == places
    return stayed and all(same_bits(p, o) and p.stride() == o.stride() for p, o in zip(probes, outs, strict=True))


class _Caught(torch.autograd.Function):
    """Calls a function so that torch's warnings become Python's: operators called by overload print them instead."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Any]) -> None:
        run()


def _warns(run: Callable[[], Any]) -> bool:
    """Run an operator below autograd, and return True if torch warned."""
    with warnings.catch_warnings(record=True) as caught, torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        warnings.simplefilter("always")
        _Caught.apply(run)
    return bool(caught)


def _copying(run: Callable[[], Any], outs: list[Tensor | None]) -> Callable[[], Any]:
    """Return a closure that runs the functional overload, then copies its results into the recorded ones."""

    def again() -> None:
        result = run()
        for out, new in zip(outs, result if isinstance(result, list | tuple) else (result,), strict=True):
            if out is not None:
                out.copy_(new)

    return again


_Run = tuple[tuple[bool, bool, dict[str, Any]], list[Callable[[], Any]]]
"""Inference mode, grad mode and torch's other switches, and the consecutive kernels that ran under them."""


class TapeRecording:
    """Operators recorded by :class:`TapeBackend`."""

    is_spoiled = False

    def __init__(self, mode: _TapeMode) -> None:
        writers = Counter(storage for kernel in mode.kernels for storage in kernel.writes)
        lent = {storage_id(t): t.untyped_storage() for k in mode.kernels for t in k.tensors if is_freed(t)}
        self._lent = [(memory, mode.sizes[memory._cdata]) for memory in lent.values()]
        # A constant need not run again, unless another kernel writes to its storage.
        live = [
            kernel
            for kernel in mode.kernels
            if not (kernel.constant and all(writers[s] == 1 and s not in lent for s in kernel.writes))
        ]
        self._runs: list[_Run] | None = [
            (state, [kernel.run for kernel in kernels])
            for state, kernels in groupby(live, lambda kernel: (*kernel.modes, kernel.switches))
        ]
        self.launches = len(live)
        self.nbytes = sum(mode.storages.values())
        self.generation: object = object()

    def replay(self) -> None:
        """Run every operator again."""
        assert self._runs is not None, "a closed program is refused before its recording is asked"
        for storage, nbytes in self._lent:
            storage.resize_(nbytes)
        try:
            casts = torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()
            with casts, torch._C._AutoDispatchBelowAutograd():
                for (inference, grad, switches), kernels in self._runs:
                    around = switched(switches) if switches else nullcontext()
                    with around, torch.inference_mode() if inference else nullcontext(), torch.set_grad_enabled(grad):
                        for kernel in kernels:
                            kernel()
        finally:
            for storage, _ in self._lent:
                storage.resize_(0)

    def reset(self) -> None:
        """Release the operators and their memory."""
        self._runs = None


class TapeBackend(Backend):
    """Records on the CPU. Recording executes: the recorded pass is a real step."""

    executes = True

    def record(self, body: Callable[[], Any], traced: TracedValues = NOTHING_TRACED) -> tuple[TapeRecording, Any]:
        """See :meth:`graphplan.backends.backend.Backend.record`."""
        mode = _TapeMode(KnownReads(traced.reads), traced.answers)
        with mode, saving_states(mode.save_state, mode.put_state), Conversions(mode.note_read), no_collections():
            try:
                result = body()
            except Exception:
                # The error may only come from following the traces with another value.
                mode.check_outcome()
                raise
        mode.faults.check()
        mode.check_outcome()
        if mode.failure is not None:
            raise CaptureError(
                f"the tape cannot record the step: {mode.failure}, which the traced steps did not do. Move that "
                "operation out of the step"
            )
        return TapeRecording(mode), result

    def run(self, body: Callable[[], Any]) -> Any:
        """See :meth:`graphplan.backends.backend.Backend.run`."""
        return body()

    def needs(self, footprint: Footprint, *, alone: bool) -> int:
        """Return the total bytes: each recorded result keeps its memory, and recordings share none."""
        return footprint.total
