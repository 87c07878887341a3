"""The dispatch mode that writes down a step's operators.

Longer than most rooms: each operator is looked at once, and everything that is asked of it then is in here.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from graphplan.environment.devices import default_generators
from graphplan.environment.origin import is_ours
from graphplan.errors import CaptureError, GeneratorSeekError, HostSyncError, RefusalError, TemporaryCopyError
from graphplan.observe.conversions import validates
from graphplan.observe.scripts import given_to_script
from graphplan.observe.source import Source, Sources, find_source, is_recomputed, optimizer_fix, with_users_line
from graphplan.observe.watching import Aside
from graphplan.tensors.dtensors import is_imagined
from graphplan.tensors.storages import storage_id
from graphplan.trace.batch_answers import Answer, BatchAnswers, is_read
from graphplan.trace.collectives import finish
from graphplan.trace.composites import OperatorMode
from graphplan.trace.host_reads import HostRead, find_place, is_asserted
from graphplan.trace.memory_watch import Allocations, MemoryWatch
from graphplan.trace.operator_schemas import (
    INDEXING,
    NESTED_FIX,
    NONZERO,
    OF_GEOMETRY,
    PACKING,
    TO_COPY,
    TRANSFERS,
    Schema,
    has_dynamic_shape,
    hidden_read,
    host_operands,
    is_mask,
    schema_of,
    tensors_and_others,
    tensors_in,
    without_masks,
    written_tensors,
)
from graphplan.trace.rate_reads import RateWatch
from graphplan.trace.records import HostConstant, Operator, Trace, TracedExternal
from graphplan.trace.uniform import UNIFORM, Operand, UniformDraws

_SYNC_FIX = (
    "Keep it on the device (torch.where, a mask of fixed shape), or read it after the step from what the step returns "
    "(a number of .item() or a copy of .cpu() that is only logged, appended or returned is read then); where only some "
    "calls do it, eager_if= names those"
)
_METRIC_FIX = (
    "Update the metric after the step, with what the step returns for it (in a Trainer: return a dictionary with the "
    "loss, and update in on_train_batch_end)"
)
_VALUE = "aten._local_scalar_dense.default"
_NOWHERE: Operand = ("internal", -1)
_Asked = tuple[Schema, tuple[Any, ...], dict[str, Any]]
"""An operator and what it is given."""
_Given = list[tuple[Tensor, Operand]]
"""The tensors that an operator is given."""
LIFTS = ("aten.lift_fresh.default", "aten.lift_fresh_copy.default", "aten.lift.default")


def _current() -> TraceMode | None:
    return next((m for m in reversed(_get_current_dispatch_mode_stack()) if isinstance(m, TraceMode)), None)


def refuse_trace(error: type[RefusalError], message: str) -> None:
    """Note a violation in the trace that is going on, if one is."""
    if (mode := _current()) is not None:
        mode.refuse(error, message)


def is_traced() -> bool:
    """Return True if a trace is going on."""
    return _current() is not None


def watch_memory(tensor: Tensor) -> MemoryWatch | None:
    """Watch a tensor's memory through the rest of the trace that is going on; None where none is."""
    mode = _current()
    return None if mode is None else MemoryWatch(tensor, mode.writes)


def _waits(given: _Given) -> bool:
    """Return True if the host has to wait for values of ``given``."""
    return any(tensor.device.type != "cpu" for tensor, _ in given)


class TraceMode(OperatorMode):
    """Fills a :class:`Trace`, and notes the first violation. ``before`` is the step's previous trace; ``answers`` has
    what was read of the batch before the step.
    """

    def __init__(
        self, trace: Trace, watch: RateWatch, before: Trace | None = None, answers: BatchAnswers | None = None
    ) -> None:
        super().__init__()
        before = before or Trace()
        self._trace = trace
        self._answers, self._batch = answers, trace.batch
        self._before = before.operators
        self._source: Source | None = None
        """Where the operator at hand comes from, if that was looked for."""
        self._sources = Sources()
        self._watch = watch
        self._operands: dict[int | None, Operand] = {}
        """By storage; those that the step made and the others are numbered separately."""
        self._internals = 0
        self._fixed: set[Operand] = set()
        """What is made of Python's numbers alone, or is certain whatever is drawn. It is the same in each step."""
        self._draws = UniformDraws()
        self._allocations = Allocations()
        self._thread = get_ident()
        self._states = [(gen, gen.get_state()) for gen in default_generators()]
        self.writes: defaultdict[int | None, int] = defaultdict(int)
        """How often each storage was written to."""
        for generator in before.generators:
            self._watch_generator(generator)

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._sources.forget()

    def refuse(self, error: type[RefusalError], message: str, *, component: str | None = None) -> None:
        """Note a violation; the first one counts."""
        if self._trace.violation is None:
            self._trace.refuse(error(message, component=component or find_source().component))

    def operate(self, aside: Aside, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and write it down."""
        schema, trace = schema_of(func), self._trace
        if schema.is_ignored or is_imagined():
            return aside.run(func, args, kwargs)
        asked = schema, args, kwargs
        answer = None if self._answers is None else self._answers.take(schema, args, kwargs)
        if answer is not None and self._takes(answer, *asked):
            if answer.value is not None:
                return answer.value[0]
            schema, args = schema_of(answer.operator), answer.args
        name = schema.name
        self._source = None
        constant = self._lift(args[0]) if name in LIFTS else None
        tensors, scalars = tensors_and_others(schema, args, kwargs)
        storages = [storage_id(tensor) for tensor in tensors]
        operands, offsets = self._take_operands(tensors, storages, name)
        source = self._source_of(name, operands)
        # A constant that others are added to is one, too: the step counter of an optimizer that the step makes.
        stay_fixed = schema.is_certain and self._fixed.issuperset(operands)
        written = written_tensors(schema, args, kwargs) if schema.may_write else ()
        for tensor in written:
            self._mark_written(tensor, schema, source)
        if schema.is_random or schema.own_state is not None:
            self._note_draw(schema, args, kwargs, source)
        out = aside.run(schema.call, args, kwargs, is_native=schema.is_native)
        if schema.communicates:
            out = finish(name, out)
        if schema.is_random:
            self.take_states()
        made = tensors_in(out)
        self._watch.check(name, tensors, made, source)
        if schema.may_synchronize:
            self._check_sync(schema, args, kwargs, out, source, list(zip(tensors, operands, strict=True)))
        self._follow_batch(asked, tensors if asked[1] is args else None, out, made, constant)
        is_fresh = False
        for tensor in made:
            trace.dtypes.add(tensor.dtype)
            is_fresh |= self._birth(tensor)
            if tensor.is_nested:
                self._refuse_nested("gets" if any(tensor is given for given in tensors) else "makes", name, source)
        if stay_fixed:
            self._fixed.update(operands)
        computes = not (written or schema.is_random or schema.allocates)
        is_certain = False
        if self._draws.drawn:
            is_certain = self._draws.take(name, args, operands, views=bool(made) and not is_fresh)
        if constant is not None or is_certain or (computes and (stay_fixed or name in OF_GEOMETRY)):
            self._fixed.update(map(self._internal_operand, made))
        if name in UNIFORM:
            self._draws.add(self._internal_operand(out), func, args, kwargs, out)
        launches = (bool(written) or is_fresh) and not schema.allocates and constant is None
        threaded = get_ident() != self._thread
        if schema.derives_otherwise and torch.is_grad_enabled():
            trace.derives_otherwise |= any(tensor.requires_grad for tensor in tensors)
        if threaded and not trace.graph_elsewhere:
            trace.graph_elsewhere = torch.is_grad_enabled() and not is_recomputed()
        trace.operators.append(
            Operator(name, operands, offsets, tuple(scalars), source, launches, constant, schema.is_random, threaded)
        )
        return out

    def _follow_batch(
        self, asked: _Asked, given: list[Tensor] | None, out: Any, made: list[Tensor], constant: Tensor | None
    ) -> None:
        """Take in an operator that may follow from the batch alone. What it was ``given`` is looked up if not known."""
        if self._batch is None:
            return
        if constant is not None:
            self._batch.note_constant(out, constant)
        elif not is_read(*asked):
            _, args, kwargs = asked
            self._batch.note(*asked, made, tensors_in([*args, *kwargs.values()]) if given is None else given)

    def finish(self) -> None:
        """Check what only shows once the step is over."""
        self._check_seek(None)
        trace = self._trace
        for storage, external in trace.externals.items():
            if storage not in trace.entry_slots:
                external.let_go()
        trace.footprint = self._allocations.footprint
        if trace.device is not None and trace.device.type != "cpu":
            trace.host_draws = self._draws.repeats()

    def _source_of(self, name: str, operands: tuple[Operand, ...]) -> Source:
        """Where an operator comes from: as in the previous trace if the operator in its place is the same, since to
        look for it takes a fifth of a trace.
        """
        position = len(self._trace.operators)
        before = self._before[position] if position < len(self._before) else None
        if before is not None and before.name == name and before.operands == operands:
            return before.source
        return self._source or self._find()

    def _find(self) -> Source:
        return self._sources.find() if get_ident() == self._thread else find_source()

    def _take_operands(
        self, tensors: list[Tensor], storages: list[int | None], name: str
    ) -> tuple[tuple[Operand, ...], tuple[int, ...]]:
        """What an operator gets, and where in what came from outside: the rest follows from the operators before."""
        operands, offsets = [], []
        known = self._operands
        for tensor, storage in zip(tensors, storages, strict=True):
            operand = known.get(storage) or self._meet(tensor, storage, name)
            operands.append(operand)
            if operand[0] == "external":
                offsets.append(int(tensor.storage_offset()) if tensor.layout is torch.strided else 0)
        return tuple(operands), tuple(offsets)

    def _meet(self, tensor: Tensor, storage: int | None, name: str) -> Operand:
        """The operand of a storage that turns up for the first time."""
        source = self._source = self._source or self._find()
        if storage is None:
            self.refuse(
                CaptureError,
                f"{name} gets a {tensor.layout} tensor at {source}; only dense tensors can be captured: convert it "
                "with .to_dense(), or for embeddings pass sparse=False",
                component=source.component,
            )
            return ("sparse", 0)
        if tensor.is_nested:
            self._refuse_nested("gets", name, source)
        if storage in self._trace.gathered:
            self._birth(tensor)
        else:
            self._operands[storage] = ("external", len(self._trace.externals))
            if self._batch is not None:
                self._batch.meet(tensor, self._trace.entry_slots.get(storage, ()))
            self._watch.meet(storage)
            given = given_to_script()
            is_scripted = given is not None and storage not in given
            self._trace.externals[storage] = TracedExternal(tensor, name, source, is_scripted=is_scripted)
        return self._operands[storage]

    def _internal_operand(self, tensor: Tensor) -> Operand:
        operand = self._operands.get(storage_id(tensor), _NOWHERE)
        return operand if operand[0] == "internal" else _NOWHERE

    def made(self, tensor: Tensor | None) -> bool:
        """Return True if the step has made a tensor's memory."""
        return tensor is not None and self._internal_operand(tensor) is not _NOWHERE

    def _birth(self, tensor: Tensor) -> bool:
        """Number a storage that the step made; False if it was known (a view, or a result written in place)."""
        storage = storage_id(tensor)
        if storage is None or storage in self._operands:
            return False
        self._operands[storage] = ("internal", self._internals)
        self._internals += 1
        self._allocations.add(tensor.untyped_storage(), counts=tensor.device == self._trace.device)
        return True

    def _mark_written(self, tensor: Tensor, schema: Schema, source: Source) -> None:
        storage = storage_id(tensor)
        self.writes[storage] += 1
        external = self._trace.externals.get(storage or 0)
        operand = self._operands.get(storage, _NOWHERE) if external is None else _NOWHERE
        self._fixed.discard(operand)
        self._draws.drawn.pop(operand, None)
        if external is None:
            return
        external.communicated |= schema.communicates
        if not external.mutated:
            is_copied = storage in self._trace.entry_slots and storage not in self._trace.found
            if not is_copied:
                self._trace.unowned_writes.append((external.tensor, external.tensor.detach().clone()))
            external.mutated, external.mutated_by, external.mutated_at = True, schema.name, source

    def _lift(self, value: Tensor) -> Tensor:
        """A constant made from Python values: not an external, but its value must stay the same."""
        self._birth(value)
        constant = value.detach().clone()
        if value.device.type != "cpu":
            self._trace.device_constants.append(constant)
        return constant

    def _note_draw(self, schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any], source: Source) -> None:
        """Take in what a random operator is about to draw from."""
        state = schema.drawn_from(args, kwargs)
        if state is not None:
            if storage_id(state) in self._trace.externals:
                self._trace.own_states.append(state)
            self._mark_written(state, schema, source)
        if schema.is_random:
            self._check_seek(source)
            generator = kwargs.get("generator")
            if generator is not None:
                if all(generator is not known for known, _ in self._states):
                    self._watch_generator(generator)
                self._trace.drawings.append((generator, source))

    def _check_seek(self, source: Source | None) -> None:
        for position, (generator, state) in enumerate(self._states):
            now = generator.get_state()
            if not torch.equal(now, state):
                self._states[position] = (generator, now)
                place = f"before the random operator at {source}" if source else "within the step"
                self.refuse(
                    GeneratorSeekError,
                    f"the {generator.device} generator's state was set {place}, to another one than the step had saved "
                    "itself (manual_seed, Generator.set_state, a state from before the step, or another thread that "
                    "draws); a replay only draws on. Seed outside the step, or save the state in it with "
                    "torch.get_rng_state",
                )

    def check_states(self) -> None:
        """Note a violation if a generator's state was set since the latest random operator."""
        with _disable_current_modes():
            self._check_seek(find_source())

    def take_states(self) -> None:
        """Take the generators' states for those that random operators left."""
        self._states = [(gen, gen.get_state()) for gen, _ in self._states]

    def _watch_generator(self, generator: torch.Generator) -> None:
        """From here on, nothing but random operators may change the state of a generator of the step's own."""
        state = generator.get_state()
        self._states.append((generator, state))
        self._trace.unowned_draws.append((generator, state))

    def _takes(self, answer: Answer, schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Take in a read that was made before the step; False if it gives something else now."""
        assert self._batch is not None
        # What it reads may be an owner's.
        tensors = tensors_in([*args, *kwargs.values()])
        self._take_operands(tensors, list(map(storage_id, tensors)), schema.name)
        if not self._batch.takes(answer, schema, args, kwargs):
            return False
        if answer.is_content:
            self._take_constant(answer.found[0])
        return True

    def _take_constant(self, tensor: Tensor) -> None:
        """Take in a tensor whose contents are always the same."""
        self._birth(tensor)
        self._fixed.add(self._internal_operand(tensor))

    def read(self, name: str, tensor: Tensor | None) -> None:
        """Note a read of a tensor's memory that is no operator."""
        given = [(tensor, self._internal_operand(tensor))] if tensor is not None and name == "Tensor.tolist" else []
        if given and self._are_constants(given):
            self._trace.host_reads.append(HostRead(find_place(), None))
            return
        self.refuse(
            HostSyncError,
            f"{name} reads a tensor's values on the host at {find_source()}; a replay would keep the value it saw. "
            "Keep the value in a tensor, or read it after the step from what the step returns; where only some calls "
            "do it, eager_if= names those",
        )

    def _are_fixed(self, given: _Given) -> bool:
        """Return True if all values are computed from Python's numbers alone."""
        return all(operand in self._fixed for _, operand in given)

    def _are_constants(self, given: _Given) -> bool:
        """Return True if all values are computed on the host from Python's numbers alone."""
        return self._are_fixed(given) and not _waits(given)

    def _is_constant(self, tensor: Tensor, given: _Given) -> bool:
        """Return True if ``tensor``, one of the ``given`` on the host, is computed from Python's numbers alone."""
        return any(one is tensor and operand in self._fixed for one, operand in given)

    def _has_constant_shape(self, name: str, args: tuple[Any, ...], out: Any, given: _Given) -> bool:
        """Return True if the shape of ``out`` follows from Python's numbers. A capture gets the positions."""
        if name in INDEXING:
            deciding = [pair for pair in given if any(pair[0] is index for index in args[1] if is_mask(index))]
        elif name == NONZERO:
            deciding = given
        else:
            return self._are_constants(given)
        if not self._are_fixed(deciding):
            return False
        positions = without_masks(args[1]) if name in INDEXING else out.detach().clone()
        self._trace.host_reads.append(HostRead(find_place(), positions, constant=True, waits=_waits(given)))
        return True

    def _check_sync(
        self, schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, source: Source, given: _Given
    ) -> None:
        name = schema.name
        if schema.reads_values:
            self._check_value(schema, args, kwargs, out, source, given)
        elif has_dynamic_shape(schema, args, kwargs) and not self._has_constant_shape(name, args, out, given):
            what = f"{name} makes a tensor whose shape depends on values"
            self._refuse_sync(what, source, read=(schema, args, kwargs, out))
        if name in TRANSFERS:
            origin = args[1] if name == "aten.copy_.default" else args[0]
            if isinstance(origin, Tensor) and out.device.type == "cpu" and origin.device.type != "cpu":
                what = f"{name} copies from {origin.device} to the host"
                self._refuse_sync(what, source, read=(schema, args, kwargs, out) if name == TO_COPY else None)
        for tensor in host_operands(name, args, kwargs):
            if self._is_constant(tensor, given):
                value = tensor.detach().clone()
                self._trace.host_constants.append(HostConstant(value, value.to(out.device)))
            elif name in TRANSFERS:
                self.refuse(
                    TemporaryCopyError,
                    f"{name} copies host memory to {out.device} at {self._told(source)}; a graph would copy from that "
                    "address for ever. Feed the tensor to the step, or make it on the device",
                    component=source.component,
                )
        hidden = hidden_read(name, [tensor for tensor, _ in given])
        if hidden is not None:
            # The first argument is what is worked on, if there is another tensor. A graph cannot look at a device's.
            read = [pair for pair in given if pair[0] is not args[0]] or given
            if not self._are_constants(read):
                of_batch = (schema, args, kwargs, out) if name == PACKING else None
                self._refuse_sync(f"{name} {hidden.what}", source, hidden.fix, read=of_batch)
            if name == PACKING:
                # How many rows there are at each step follows from the lengths alone.
                self._take_constant(out[1])

    def _check_value(
        self, schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, source: Source, given: _Given
    ) -> None:
        name = schema.name
        is_torchs, is_constant = validates(), self._are_fixed(given)
        is_only_asserted = not (is_torchs or is_constant) and is_asserted()
        if is_torchs or is_constant or is_only_asserted:
            waits = is_only_asserted or _waits(given)
            read = HostRead(find_place(), out, is_only_asserted, is_constant and not is_torchs, waits)
            self._trace.host_reads.append(read)
            return
        is_comparison = name.startswith(("aten.equal", "aten.allclose"))
        what = "compares tensors on the host" if is_comparison else "reads a tensor's value on the host"
        what = f"{name} {what} (.item(), float(), bool(), if, an index or a size)"
        self._refuse_sync(
            what, source, read=(schema, args, kwargs, out), may_be_expected=self._may_be_expected(schema, args[0], out)
        )

    def _may_be_expected(self, schema: Schema, tensor: Tensor, out: Any) -> bool:
        """Return True if a replay can compare what is read of ``tensor``, which is ``out``."""
        is_of_step = get_ident() == self._thread and tensor.device == self._trace.device
        return type(out) is bool and is_of_step and self._trace.expects and schema.name == _VALUE

    def _refuse_nested(self, verb: str, name: str, source: Source) -> None:
        self.refuse(
            CaptureError,
            f"{name} {verb} a nested tensor at {source}; only dense tensors can be captured. {NESTED_FIX}",
            component=source.component,
        )

    def _told(self, source: Source) -> Source:
        """What a message names: the backward that is waited for, if autograd's own thread runs the operator."""
        return find_source(sys._current_frames()[self._thread]) if is_ours(source.filename) else source

    def _refuse_sync(
        self,
        what: str,
        source: Source,
        fix: str = _SYNC_FIX,
        *,
        read: tuple[Schema, tuple[Any, ...], dict[str, Any], Any] | None = None,
        may_be_expected: bool = False,
    ) -> None:
        """Note a violation, unless it is a ``read`` of the batch alone, given as operator, arguments and result, or one
        that replays may compare.
        """
        refusal = partial(self._sync_error, what, source, fix)
        place = find_place() if may_be_expected else None
        # Reads of both kinds at one place could not be told apart.
        is_expected = any(known.expected and known.place == place for known in self._trace.host_reads)
        if not is_expected and read is not None and self._batch is not None and self._batch.read(*read, error=refusal):
            if read[0].name == TO_COPY:
                self._take_constant(read[-1])
            return
        error, trace = refusal(), self._trace
        if place is not None:
            assert read is not None
            trace.host_reads.append(HostRead(place, read[-1], waits=True, error=error))
            trace.undone = frozenset(storage for storage, external in trace.externals.items() if external.mutated)
        elif trace.violation is None:
            trace.refuse(error)

    def _sync_error(self, what: str, source: Source, fix: str) -> HostSyncError:
        source = with_users_line(self._told(source))
        fix = optimizer_fix(source) if source.component == "optimizer" else fix
        if source.by is not None and "torchmetrics" in source.by.filename:
            fix = _METRIC_FIX
        place = find_place()
        by = "" if source.by is not None or place.filename == source.filename else f" (by {place})"
        text = f"{what} at {source}{by}; a replay would keep the first value. {fix}"
        return HostSyncError(text, component=source.component)
