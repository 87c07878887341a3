"""The dispatch mode that records a step's operators."""

from __future__ import annotations

import sys
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphplan.errors import CaptureError, RefusalError
from graphplan.observe.conversions import given_to_script
from graphplan.observe.source import CHECKPOINT, Source, Sources, find_source, is_run_by
from graphplan.observe.watching import Unwatched
from graphplan.tensors.deferred import REPLACED_READ
from graphplan.tensors.storages import storage_id
from graphplan.trace.batch_reads import Answer, BatchAnswers, is_read
from graphplan.trace.collectives import finish
from graphplan.trace.composites import OperatorMode
from graphplan.trace.derivatives import IS_DERIVED_HERE
from graphplan.trace.host_syncs import HostSyncs
from graphplan.trace.host_transfers import HostRecorder
from graphplan.trace.operands import NOWHERE, Operand, Operands
from graphplan.trace.operator_schemas import LIKE_OPERATORS, NESTED_FIX, OperatorCall, tensors_in
from graphplan.trace.rate_reads import RateWatch
from graphplan.trace.records import Operator, Trace, TracedExternal
from graphplan.trace.rng import TracedGenerators

_DISPATCH = OperatorMode.__torch_dispatch__.__code__
LIFTS = ("aten.lift_fresh.default", "aten.lift_fresh_copy.default", "aten.lift.default")


def _current() -> TraceMode | None:
    return next((m for m in reversed(_get_current_dispatch_mode_stack()) if isinstance(m, TraceMode)), None)


def refuse_trace(error: type[RefusalError], message: str) -> None:
    """Note a violation in the active trace, if there is one."""
    if (mode := _current()) is not None:
        mode.record.violate(error, message)


def is_traced() -> bool:
    """Return True if a trace is active."""
    return _current() is not None


class TraceMode(OperatorMode):
    """A mode that fills a :class:`Trace`. ``before`` is the last trace, ``answers`` has the reads before the step."""

    def __init__(
        self, record: Trace, rates: RateWatch, before: Trace | None = None, answers: BatchAnswers | None = None
    ) -> None:
        super().__init__(answers)
        self.record = record
        self.operands = Operands(record.device)
        self._host = HostRecorder() if record.device is not None and record.device.type != "cpu" else None
        self.recorders = [recorder for recorder in (record.batch, self._host) if recorder is not None]
        self.syncs = HostSyncs(record, self.operands, self._host)
        self.generators = TracedGenerators(record.violate, self.recorders)
        self._rates = rates
        self._source: Source | None = None
        """Source of the current operator, if it was looked up."""
        self._sources = Sources()
        self._thread = get_ident()
        for generator in before.generators if before is not None else ():
            self._watch_generator(generator)

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._sources.forget()

    def operate(self, unwatched: Unwatched, call: OperatorCall) -> Any:
        """Run an operator and record it."""
        schema, record, fixed = call.schema, self.record, self.operands.fixed
        name, self._source = schema.name, None
        constant = self._lift(call.args[0]) if name in LIFTS else None
        tensors, scalars = call.tensors_and_others()
        operands, offsets = self._take_operands(tensors, name)
        source = self._source or self._find()
        # A constant to which constants are added stays one: the step counter of an optimizer that the step makes.
        stay_fixed = schema.is_certain and fixed.issuperset(operands)
        written = call.written() if schema.may_write else ()
        for tensor in written:
            self._mark_written(tensor, call, source)
        if self.casts_within(call):
            record.violate(
                CaptureError,
                f"{name} at {source} runs other operators, for which autocast casts; replays run it without autocast. "
                "Disable the fast path of torch's modules: torch.backends.mha.set_fastpath_enabled(False)",
                component=source.component,
            )
        if schema.is_random or schema.own_state is not None:
            self._note_draw(call, source)
        out = unwatched.run(schema.call, call.args, call.kwargs, is_native=schema.is_native)
        if schema.communicates:
            out = finish(name, out)
        if schema.is_random:
            self.generators.take()
        made = tensors_in(out)
        self._rates.check(name, tensors, made, source)
        if schema.may_synchronize and self.syncs.check(call, out, source, list(zip(tensors, operands, strict=True))):
            # From now on the result is fed: operators that use it meet it as an external.
            self._follow_batch(call, tensors, out, made, constant)
            return out
        if self._host is not None:
            self.syncs.follow_host(call, made, tensors, operands, constant, source)
        self._follow_batch(call, tensors, out, made, constant)
        is_fresh = False
        for tensor in made:
            record.dtypes.add(tensor.dtype)
            is_fresh |= self.operands.add(tensor)
            if tensor.is_nested:
                self._refuse_nested("gets" if any(tensor is given for given in tensors) else "makes", name, source)
        if stay_fixed:
            fixed.update(operands)
        is_certain = bool(self.operands.drawn) and self.operands.is_certain(call, operands, made)
        computes = not (written or schema.is_random or schema.allocates)
        if constant is not None or is_certain or (computes and (stay_fixed or name in LIKE_OPERATORS)):
            fixed.update(map(self.operands.internal, made))
        if schema.is_random:
            self.operands.note_draw(name, out)
        if schema.is_random or self.operands.random:
            self.operands.follow_draws(call, operands, made)
        launches = (bool(written) or is_fresh) and not schema.allocates and constant is None
        is_threaded = get_ident() != self._thread
        self._note_gradients(call, tensors, is_threaded=is_threaded)
        facts = name, operands, offsets, tuple(scalars), source, launches, constant, schema.is_random, is_threaded
        record.operators.append(
            Operator(*facts, REPLACED_READ.get() == ("operators" if constant is None else "constant"))
        )
        return out

    def _note_gradients(self, call: OperatorCall, tensors: list[Tensor], *, is_threaded: bool) -> None:
        """Note derivatives that differ from an eager step's, and operators that other threads run with gradients."""
        record = self.record
        if call.schema.derives_otherwise:
            asks = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            record.derives_otherwise |= asks
            record.derives_here |= IS_DERIVED_HERE.get()
        if is_threaded and not record.graph_elsewhere:
            record.graph_elsewhere = torch.is_grad_enabled() and not is_run_by(CHECKPOINT)

    def _follow_batch(
        self, call: OperatorCall, given: list[Tensor], out: Any, made: list[Tensor], constant: Tensor | None
    ) -> None:
        """Record an operator that may depend on the batch alone."""
        batch, asked = self.record.batch, call.asked or call
        if batch is None:
            return
        if constant is not None:
            batch.note_constant(out, constant)
        elif not is_read(asked):
            batch.note(asked, made, given if call is asked else asked.tensors())

    def finish(self) -> None:
        """Check the generators, and complete the record once the step is over."""
        self.generators.check()
        record = self.record
        for storage, external in record.externals.items():
            if storage not in record.entry_slots:
                external.detect_temporary()
        record.footprint = self.operands.footprint
        if self._host is not None:
            record.host_program = self._host.program()

    def _find(self) -> Source:
        frame: FrameType | None = sys._getframe(3)
        # Skip this mode's own frames.
        while frame is not None and frame.f_code is not _DISPATCH:
            frame = frame.f_back
        caller = None if frame is None else frame.f_back
        return find_source() if caller is None or get_ident() != self._thread else self._sources.find(caller)

    def _take_operands(self, tensors: list[Tensor], name: str) -> tuple[tuple[Operand, ...], tuple[int, ...]]:
        """Return the operands, and the offsets of external ones: earlier operators determine the internal offsets."""
        operands, offsets = [], []
        known = self.operands.by_storage
        for tensor in tensors:
            storage = storage_id(tensor)
            operand = known.get(storage) or self._meet(tensor, storage, name)
            operands.append(operand)
            if operand[0] == "external":
                offsets.append(int(tensor.storage_offset()) if tensor.layout is torch.strided else 0)
        return tuple(operands), tuple(offsets)

    def _meet(self, tensor: Tensor, storage: int | None, name: str) -> Operand:
        """Return the operand of a storage that the trace meets for the first time."""
        source = self._source = self._source or self._find()
        record, known = self.record, self.operands.by_storage
        if storage is None:
            record.violate(
                CaptureError,
                f"{name} gets a {tensor.layout} tensor at {source}; only dense tensors can be captured: convert it "
                "with .to_dense(), or for embeddings pass sparse=False",
                component=source.component,
            )
            return ("sparse", 0)
        if tensor.is_nested:
            self._refuse_nested("gets", name, source)
        twin = None if record.batch is None else record.batch.twins.get(storage)
        if storage in record.gathered:
            self.operands.add(tensor)
        elif twin is not None:
            known[storage] = known.get(storage_id(twin)) or self._meet(twin, storage_id(twin), name)
        else:
            known[storage] = ("external", len(record.externals))
            for recorder in self.recorders:
                recorder.meet(tensor, record.entry_slots.get(storage, ()))
            self._rates.meet(storage)
            given = given_to_script()
            is_scripted = given is not None and storage not in given
            record.externals[storage] = TracedExternal(tensor, name, source, is_scripted=is_scripted)
        return known[storage]

    def _mark_written(self, tensor: Tensor, call: OperatorCall, source: Source) -> None:
        storage, record = storage_id(tensor), self.record
        external = record.externals.get(storage or 0)
        if external is None:
            operand = self.operands.by_storage.get(storage, NOWHERE)
            self.operands.fixed.discard(operand)
            self.operands.drawn.pop(operand, None)
            self.operands.random.discard(operand)
            return
        external.communicated |= call.schema.communicates
        if not external.mutated:
            is_copied = storage in record.entry_slots and storage not in record.uncopied
            if not is_copied:
                record.note_write(external.tensor)
            external.mutated, external.mutated_by, external.mutated_at = True, call.schema.name, source

    def _lift(self, value: Tensor) -> Tensor:
        """Record a constant made from Python values: it is no external, but its value must stay the same."""
        self.operands.add(value)
        constant = value.detach().clone()
        if value.device.type != "cpu":
            self.record.device_constants.append(constant)
        return constant

    def _note_draw(self, call: OperatorCall, source: Source) -> None:
        """Record the state and the generator that an operator is about to draw from."""
        state = call.drawn_from()
        if state is not None:
            if storage_id(state) in self.record.externals:
                self.record.own_states.append(state)
            self._mark_written(state, call, source)
        if call.schema.is_random:
            self.generators.check(source)
            generator = call.kwargs.get("generator")
            if generator is not None:
                self._watch_generator(generator)
                self.record.operator_draws.append((generator, source))

    def _watch_generator(self, generator: torch.Generator) -> None:
        """Watch a generator that is not torch's default: from now on, only random operators may change its state."""
        state = self.generators.add(generator)
        if state is not None:
            self.record.unowned_generator_states.append((generator, state))

    def takes(self, answer: Answer, call: OperatorCall) -> bool:
        """Record a read that was made before the step. Return False if it gives something else now."""
        assert self.record.batch is not None
        # The read may be the first use of an owner's tensor.
        self._take_operands(call.tensors(), call.schema.name)
        if not self.record.batch.takes(answer, call):
            return False
        if answer.is_content:
            self.operands.add_constant(answer.found[0])
        elif call.selects_all(answer.found):
            self.operands.fix(call.args[0])
        return True

    def _refuse_nested(self, verb: str, name: str, source: Source) -> None:
        self.record.violate(
            CaptureError,
            f"{name} {verb} a nested tensor at {source}; only dense tensors can be captured. {NESTED_FIX}",
            component=source.component,
        )
