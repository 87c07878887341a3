"""The tape backend: record a step's operators once, and run them again on the same storages.

It obeys the rules of a CUDA graph on a machine without one: fixed addresses, no Python, no host reads. Views and
allocations are not run again, constants are not computed again, and an operator that has an ``out=`` form writes
straight into its recorded result. Random operators draw from the same generators as in eager. Memory that the step
gives back (``storage.resize_(0)``) is there while a replay runs.

Longer than most rooms: recording writes down what replaying relies on, operator by operator.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from graphplan.backends.backend import NOTHING_TRACED, Backend, TracedValues
from graphplan.environment.collector import no_collections
from graphplan.environment.switches import SWITCHES, answers, switched
from graphplan.errors import CaptureError
from graphplan.observe.conversions import Conversions
from graphplan.observe.source import find_source
from graphplan.observe.watching import Aside
from graphplan.specs.roles import Footprint
from graphplan.tensors.attributes import is_freed
from graphplan.tensors.copying import same_bits
from graphplan.tensors.storages import storage_id
from graphplan.trace.batch_reads import BatchAnswers
from graphplan.trace.collectives import finish, is_collective, wait_for
from graphplan.trace.composites import OperatorMode
from graphplan.trace.host_reads import HostRead, KnownReads, find_place
from graphplan.trace.mode import LIFTS
from graphplan.trace.operator_schemas import ATOMS, OperatorCall
from graphplan.trace.rng import saving_states

_CONSTANT = (
    "aten.zeros.default", "aten.ones.default", "aten.full.default", "aten.arange.default", "aten.arange.start",
    "aten.arange.start_step", "aten.scalar_tensor.default", "aten.eye.default", "aten.linspace.default",
    "aten.tril_indices.default", "aten.triu_indices.default",
)  # fmt: skip
"""Operators whose results depend on no tensor: run once, unless the result is written to. The ``*_like`` forms
are left out because a backward pass may hand their results to the user as gradients."""

_MODES = ("torch.is_grad", "torch.is_inference", "torch.is_autocast", "torch.get_autocast", "torch.get_default_device")
"""How the names of switches begin that are set otherwise, or that operators below autograd do not depend on."""
_SWITCHES = [s for s in SWITCHES if not s.name.startswith(_MODES) and "torch.backends.cud" not in s.name]
"""The others that kernels on the host may depend on. They are read for each of them."""
_GETTERS = [switch.get for switch in _SWITCHES]

_COPIES = ("aten.clone.default", "aten._to_copy.default")
"""Operators that a copy into the recorded result repeats bitwise."""


@dataclass(slots=True, eq=False)
class _Kernel:
    """One recorded operator before it is compiled to a closure. ``outs`` has for each result the tensor that a replay
    fills, or None; ``constant`` marks a result that depends on no tensor's values.
    """

    func: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outs: list[Tensor | None] = field(default_factory=list)
    writes: list[int | None] = field(default_factory=list)
    """The storages that it writes to."""
    tensors: list[Tensor] = field(default_factory=list)
    """What it reads and writes."""
    constant: bool = False
    overload: tuple[Any, tuple[str, ...]] | None = None
    # Some kernels look at the grad mode (an LSTM keeps a workspace for its backward pass), and only in inference mode
    # may what was made in it be written to.
    modes: tuple[bool, bool] = field(
        default_factory=lambda: (torch.is_inference_mode_enabled(), torch.is_grad_enabled())
    )
    switches: dict[str, Any] = field(default_factory=dict)
    """torch's switches that the step had set otherwise than it found them."""


def _alias(value: Any, aliases: list[tuple[Tensor, Tensor]]) -> Any:
    """The same memory without its autograd history, which would keep a whole step's graph alive. One tensor in several
    places stays one, since torch's attention asks for that: ``aliases`` has those that were made for the operator.
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
        self.kernels: list[_Kernel] = []
        self.failure: str | None = None
        self.changed: tuple[HostRead, Any] | None = None
        """The first read of another value than in the traces, and that value."""
        self.storages: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self._saved: dict[int, tuple[torch.Generator, list[Tensor]]] = {}
        """The generator and the state of each time that the step saves one, by the first state's identity."""
        self._overloads: dict[Any, tuple[Any, tuple[str, ...]] | None] = {}
        self._found = answers(_GETTERS)

    def fail(self, why: str) -> None:
        """Note that the recording cannot be used; the step goes on, since it is a real one."""
        if self.failure is None:
            self.failure = f"{why} at {find_source()}"

    def note_read(self, name: str, tensor: Tensor | None = None) -> None:
        """Take notice of a read, which the traced steps must have done too."""
        with self.faults.noting():
            if find_place() not in self._reads:
                self.fail(f"{name} reads values on the host")

    def _take_read(self, name: str, tensor: Tensor, out: Any) -> tuple[Any, HostRead | None]:
        """Take in a read that an operator makes of ``tensor``, and return what the step is given, and the traces' read
        there. Where replays are to compare it, the step goes the traces' way; it is undone if that is another one.
        """
        place = find_place()
        if place not in self._reads:
            self.fail(f"{name} reads values on the host")
            return out, None
        read = self._reads.take(place)
        if not read.expected:
            return out, read
        if self.changed is None and out != read.value:
            self.changed = read, out
        held = tensor.detach()
        self.kernels.append(_Kernel(lambda: read.compare(held.item())))
        return read.value, read

    def check_outcome(self) -> None:
        """Raise OutcomeError if the step has read another value than in the traces."""
        if self.changed is not None:
            read, value = self.changed
            read.compare(value)

    def save_state(self, generator: torch.Generator) -> Tensor:
        """Have replays save the generator's state where the step does now."""
        saved = [generator.get_state()]
        self._saved[id(saved[0])] = generator, saved
        self.kernels.append(_Kernel(lambda: saved.__setitem__(0, generator.get_state())))
        return saved[0]

    def put_state(self, generator: torch.Generator, state: Tensor) -> None:
        """Have replays put back what they saved."""
        generator.set_state(state)
        owner, saved = self._saved.get(id(state), (None, [state]))
        if owner is not generator:
            self.fail("the state of a generator is set to one that the step did not save")
        else:
            self.kernels.append(_Kernel(lambda: generator.set_state(saved[0])))

    def operate(self, aside: Aside, call: OperatorCall) -> Any:
        schema = call.schema
        if schema.name in LIFTS:
            self._record_constant(call.args[0])
            return aside.run(schema.call, call.args, call.kwargs)
        taken = {storage_id(tensor) for tensor in call.tensors()}
        out = aside.run(schema.call, call.args, call.kwargs, is_native=schema.is_native)
        if schema.communicates:
            out = finish(schema.name, out)
        is_shape = call.has_dynamic_shape()
        if call.reads_values() or is_shape:
            out, read = self._take_read(schema.name, call.args[0], out)
            if is_shape and read is not None and read.asserted:
                # In a replay it may have another shape, which nothing would ask for.
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
        # None is what an operator gives that only looks at values, and raises. A tensor that was turned stays so.
        if schema.allocates or schema.turns or not (writes or out is None):
            return
        aliases: list[tuple[Tensor, Tensor]] = []
        given, named = _alias(call.args, aliases), {name: _alias(value, aliases) for name, value in call.kwargs.items()}
        tensors = [alias for _, alias in aliases] + [made for made in outs if made is not None]
        kernel = _Kernel(schema.operator, given, named, outs, writes, tensors, constant=schema.name in _CONSTANT)
        kernel.switches = self._switched()
        kernel.overload = self._overload(kernel) if is_pure else None
        self._keep(kernel)

    def _overload(self, kernel: _Kernel) -> tuple[Any, tuple[str, ...]] | None:
        """What :func:`_working_overload` says of the first kernel of this form, which holds for the others."""
        if _out_overload(kernel.func) is None:
            return None
        form = _form(kernel)
        if form not in self._overloads:
            self._overloads[form] = _working_overload(kernel)
        return self._overloads[form]

    def _keep(self, kernel: _Kernel) -> None:
        self.kernels.append(kernel)
        for memory in (t.untyped_storage() for t in kernel.tensors if t.layout is torch.strided):
            self.sizes[memory._cdata] = max(memory.nbytes(), self.sizes.get(memory._cdata, 0))

    def _switched(self) -> dict[str, Any]:
        """Switches that kernels may depend on, and that are not what they were when the step began."""
        found = answers(_GETTERS)
        if found == self._found:
            return {}
        return {s.name: now for s, old, now in zip(_SWITCHES, self._found, found, strict=True) if now != old}

    def _record_constant(self, value: Tensor) -> None:
        args = (value.detach(), value.detach().clone())
        copy = torch.ops.aten.copy_.default
        self._keep(_Kernel(copy, args, writes=[storage_id(value)], tensors=list(args), constant=True))


def _form(kernel: _Kernel) -> Any:
    """What a kernel is apart from the values in its tensors and from where these lie."""
    numbers: dict[int | None, int] = {}

    def form(value: Any) -> Any:
        if isinstance(value, Tensor):
            number = numbers.setdefault(storage_id(value), len(numbers))
            stride = value.stride() if value.layout is torch.strided else value.layout
            return number, value.shape, stride, value.dtype, value.device, value.is_conj(), value.is_neg()
        return tuple(map(form, value)) if isinstance(value, list | tuple) else (type(value), value)

    given = (kernel.args, tuple(kernel.kwargs), tuple(kernel.kwargs.values()), kernel.outs)
    return id(kernel.func), kernel.modes, form(given)


@cache
def _out_overload(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """The overload of ``func`` that takes the same arguments and writes into given results, with their names."""
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        candidate = getattr(func.overloadpacket, overload)
        plain = [(a.name, str(a.type)) for a in candidate._schema.arguments if not a.is_out]
        given = [a for a in candidate._schema.arguments if a.is_out]
        generated = torch.Tag.generated in candidate.tags
        # A generated out= form calls the functional one and copies, and checks less than it should: we copy ourselves.
        if given and not generated and plain == wanted and all(str(a.type) == "Tensor" for a in given):
            return candidate, tuple(a.name for a in given)
    return None


def _callable(func: Any) -> Callable[..., Any]:
    """The C++ entry of an operator overload, where torch exposes it: it saves one Python frame per operator."""
    return getattr(func, "_op", func)


def _compile(kernel: _Kernel) -> Callable[[], Any]:
    """A closure that runs the kernel again into its recorded results."""
    outs = kernel.outs
    run = partial(_callable(kernel.func), *kernel.args, **kernel.kwargs)
    if is_collective(str(kernel.func)):
        run = partial(_waiting, str(kernel.func), run)
    if all(out is None for out in outs):
        return run
    if str(kernel.func) in _COPIES and isinstance(kernel.args[0], Tensor):
        return partial(_callable(torch.ops.aten.copy_.default), outs[0], kernel.args[0])
    if kernel.overload is not None:
        given = dict(zip(kernel.overload[1], outs, strict=True))
        return partial(_callable(kernel.overload[0]), *kernel.args, **kernel.kwargs, **given)
    return _copying(run, outs)


def _waiting(name: str, run: Callable[[], Any]) -> Any:
    out = run()
    wait_for(name, out)
    return out


def _working_overload(kernel: _Kernel) -> tuple[Any, tuple[str, ...]] | None:
    """The kernel's ``out=`` overload, if it fills given results with the same bits where they lie.

    Some do not: torch's ``binary_cross_entropy.out`` leaves a scalar result alone, ``mse_loss.out`` reallocates it.
    """
    found = _out_overload(kernel.func)
    outs = [out for out in kernel.outs if out is not None]
    if found is None or len(found[1]) != len(kernel.outs) or len(outs) != len(kernel.outs):
        return None
    probes = [torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device) for o in outs]
    places = [probe.data_ptr() for probe in probes]
    given = dict(zip(found[1], probes, strict=True))
    # torch warns where it gives a result another size on the way, which leaves one element where it is.
    if _warns(partial(found[0], *kernel.args, **kernel.kwargs, **given)):
        return None
    stayed = [probe.data_ptr() for probe in probes] == places
    same = all(same_bits(p, o) and p.stride() == o.stride() for p, o in zip(probes, outs, strict=True))
    return found if stayed and same else None


class _Caught(torch.autograd.Function):
    """Calls a function in which torch's warnings are Python's: operators called by overloads print them otherwise."""

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
    """Run the functional form, then copy its results to where they were recorded."""

    def again() -> None:
        result = run()
        for out, new in zip(outs, result if isinstance(result, list | tuple) else (result,), strict=True):
            if out is not None:
                out.copy_(new)

    return again


_Run = tuple[tuple[bool, bool, dict[str, Any]], list[Callable[[], Any]]]
"""Inference mode, grad mode and other switches of torch's, and what ran one after the other under them."""


class TapeRecording:
    """Operators recorded by :class:`TapeBackend`."""

    is_spoiled = False

    def __init__(self, mode: _TapeMode) -> None:
        writers = Counter(storage for kernel in mode.kernels for storage in kernel.writes)
        lent = {storage_id(t): t.untyped_storage() for k in mode.kernels for t in k.tensors if is_freed(t)}
        self._lent = [(memory, mode.sizes[memory._cdata]) for memory in lent.values()]
        # What depends on no values need not run again, unless something else writes where it does.
        live = [
            kernel
            for kernel in mode.kernels
            if not (kernel.constant and all(writers[s] == 1 and s not in lent for s in kernel.writes))
        ]
        self._runs: list[_Run] | None = [
            (state, [_compile(kernel) for kernel in run])
            for state, run in groupby(live, lambda kernel: (*kernel.modes, kernel.switches))
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
        """Let the operators and their memory go."""
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
                # The traces' way need not be one for other values.
                mode.check_outcome()
                raise
        mode.faults.check()
        mode.check_outcome()
        if mode.failure is not None:
            raise CaptureError(
                f"the tape cannot record the step: {mode.failure}, which the traced steps did not do. Keep that out of "
                "the step"
            )
        return TapeRecording(mode), result

    def run(self, body: Callable[[], Any]) -> Any:
        """See :meth:`graphplan.backends.backend.Backend.run`."""
        return body()

    def needs(self, footprint: Footprint, *, alone: bool) -> int:
        """Everything that the step makes: each recorded result has a place, and each recording memory of its own."""
        return footprint.total
