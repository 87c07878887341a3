"""Host synchronizations of operators in a trace: each is recorded as a fact, or refuses the step.

A read of values that are computed from Python numbers alone, or from the batch alone, is a fact, and so is one that
code only asserts, or branches on. Others refuse the step, with the line of code and the fix.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from threading import get_ident
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from graphplan.environment.origin import is_ours
from graphplan.errors import HostSyncError, TemporaryCopyError
from graphplan.observe.conversions import validates
from graphplan.observe.source import Source, find_source, optimizer_fix, with_users_line
from graphplan.tensors.storages import storage_id
from graphplan.trace.host_reads import HostRead, find_place, is_asserted
from graphplan.trace.host_transfers import HostRecorder, Transfer
from graphplan.trace.operands import Operand, Operands
from graphplan.trace.operator_schemas import NONZERO, PACKING, POSITIONS, TO_COPY, TRANSFERS, OperatorCall, hidden_read
from graphplan.trace.records import Trace

_FIX = (
    "Keep the value on the device (torch.where, a mask of fixed shape; as an index, index_copy_ and gather take a "
    "tensor). Or return the tensor and read it after the step; graphplan does this itself if .item() or .cpu() only "
    "goes to self.log, a list or the result. If only some calls do this, select them with eager_if="
)
_SHAPE_FIX = (
    "If possible, use a tensor of fixed shape instead (a mask, torch.where, a fixed number of indices). If the "
    "operator itself reads lengths or sizes on the host, as some losses do, the step stays eager"
)
_DRAWN_FIX = (
    "The step draws this value at random: draw it in the data loader (collate_fn) and pass it in the batch, or keep "
    "it on the device (torch.where, a mask of fixed shape)"
)
_UNOWNED_FIX = (
    "The tensor belongs to no object that graphplan knows (it is in a closure in C, or in a cache that is cleared in "
    "each step). Make it a buffer or an attribute of the model: replays can then compare the values that the step "
    "reads"
)
_METRIC_FIX = (
    "Update the metric after the step with values that the step returns (in a Trainer: return them in a dictionary "
    "with the loss, and update the metric in on_train_batch_end)"
)
_VALUE = "aten._local_scalar_dense.default"
_LIKELY = 0.85
"""The least probability of the most likely branches. Otherwise it takes many traces to find two that are alike, and too
many replays are undone: some models leave out layers at random.
"""
_Given = Sequence[tuple[Tensor, Operand]]
"""The tensors that an operator gets, with their operands."""


class HostSyncs:
    """A record in ``trace`` of host synchronizations. The step runs in the thread that makes this object."""

    def __init__(self, trace: Trace, operands: Operands, host: HostRecorder | None) -> None:
        self._trace, self._operands, self._host = trace, operands, host
        self._thread = get_ident()
        self._is_answered = False
        self._chance = 1.0  # The probability of the most likely branches so far, as far as it is known.

    def read(self, name: str, tensor: Tensor | None) -> None:
        """Record a read of a tensor's memory that bypasses the dispatcher."""
        given = [(tensor, self._operands.internal(tensor))] if tensor is not None and name == "Tensor.tolist" else []
        if given and self._are_constants(given):
            # A capture may make this read as well.
            self._note(None, constant=True)
            return
        self._trace.violate(
            HostSyncError,
            f"{name} reads a tensor's values on the host at {with_users_line(find_source())}; a replay would keep the "
            "first values. Keep the values in a tensor, or return the tensor and read it after the step. If only some "
            "calls do this, select them with eager_if=",
        )

    def check(self, call: OperatorCall, out: Any, source: Source, given: _Given) -> bool:
        """Record the host synchronization of an operator that got the tensors ``given`` and returned ``out``. Return
        True for a read that is made before the step from now on: the step then does not run the operator.
        """
        name, self._is_answered = call.schema.name, False
        if call.reads_values():
            self._check_value(call, out, source, given)
        elif call.has_dynamic_shape():
            self._check_shape(call, out, source, given)
        if name in TRANSFERS:
            self._check_copy(call, out, source)
        for tensor in call.host_operands():
            is_constant = any(one is tensor and operand in self._operands.fixed for one, operand in given)
            transfer = Transfer.of(find_place(), tensor, out.device, is_constant=is_constant)
            if is_constant or self._can_repeat_transfer(transfer, tensor):
                self._trace.transfers.append(transfer)
            elif name in TRANSFERS:
                self._trace.violate(
                    TemporaryCopyError,
                    f"{name} copies host memory to {out.device} at {self._told(source)}; a graph would always copy "
                    "from that address. Pass the tensor as an argument of the step, or create it on the device",
                    component=source.component,
                )
        hidden = hidden_read(name, [tensor for tensor, _ in given])
        if hidden is not None:
            # The operator reads its other tensors, or its only one. A capture cannot read constants on a device either.
            read = [pair for pair in given if pair[0] is not call.args[0]] or given
            if not self._are_constants(read):
                of_batch = (call, out) if name == PACKING else None
                self._refuse(f"{name} {hidden.what}", source, of_batch, fix=self._fix_of(read) or hidden.fix)
            if name == PACKING:
                # The batch sizes of the time steps depend on the lengths alone.
                self._operands.add_constant(out[1])
        return self._is_answered

    def follow_host(
        self,
        call: OperatorCall,
        made: list[Tensor],
        given: list[Tensor],
        operands: Sequence[Operand],
        constant: Tensor | None,
        source: Source,
    ) -> None:
        """Record tensors in host memory that an operator ``made`` or uses. A ``constant`` is made of Python numbers."""
        host, name = self._host, call.schema.name
        if host is None:
            return
        if constant is not None:
            host.note_constant(made[0], constant)
        elif all(tensor.is_cpu for tensor in made):
            host.note(call, made, given)
        elif name not in TRANSFERS:
            for tensor, operand in zip(given, operands, strict=True):
                if tensor.dim() or not tensor.is_cpu or operand in self._operands.fixed:
                    continue
                # A scalar that the host recorder does not know is the operator's own, such as the seed of a dropout.
                is_sent = any(tensor is sent for sent in call.host_operands())
                if host.has(tensor) and not is_sent:
                    self._compute_with(call, tensor, made[0], source)

    def _compute_with(self, call: OperatorCall, number: Tensor, out: Tensor, source: Source) -> None:
        """Record a number in host memory with which an operator computes on the device."""
        transfer = Transfer.of(find_place(), number, out.device)
        if call.host_scalar() is number and self._can_repeat_transfer(transfer, number):
            self._trace.transfers.append(transfer)
            return
        self._trace.violate(
            TemporaryCopyError,
            f"{call.schema.name} computes on {out.device} with a tensor in host memory at {self._told(source)}; a "
            "graph would keep its first value. Move it to the device (.to(device)), or create it there",
            component=source.component,
        )

    def _can_repeat_transfer(self, transfer: Transfer, tensor: Tensor) -> bool:
        """Return True if replays can compute and copy a tensor that is no constant."""
        return self._host is not None and get_ident() == self._thread and self._host.record_transfer(transfer, tensor)

    def _check_value(self, call: OperatorCall, out: Any, source: Source, given: _Given) -> None:
        is_torchs, is_constant = validates(), self._are_fixed(given)
        is_only_asserted = not (is_torchs or is_constant) and is_asserted()
        if is_torchs or is_constant or is_only_asserted:
            waits = is_only_asserted or _waits(given)
            self._note(out, asserted=is_only_asserted, constant=is_constant and not is_torchs, waits=waits)
            return
        name = call.schema.name
        is_comparison = name.startswith(("aten.equal", "aten.allclose"))
        what = "compares tensors on the host" if is_comparison else "reads a tensor's value on the host"
        # Of values, replays compare truth values only.
        may_be_expected = type(out) is bool and name == _VALUE and self._may_expect(call) and self._is_likely(call, out)
        what = f"{name} {what} (.item(), float(), bool(), if, an index or a size)"
        fix = self._fix_of(given) or _FIX
        self._refuse(what, source, (call, out), fix=fix, may_be_expected=may_be_expected)

    def _is_likely(self, call: OperatorCall, out: bool) -> bool:
        """Return True if most steps take the same branches, as far as these depend on draws. Note if this trace does
        not.
        """
        chance = self._operands.chances.get(self._operands.internal(call.args[0]), float(out))
        self._trace.is_unlikely |= out != (chance > 0.5)
        self._chance *= max(chance, 1 - chance)
        return self._chance >= _LIKELY

    def _may_expect(self, call: OperatorCall) -> bool:
        """Return True if replays can compare what the operator reads of its first argument."""
        is_of_step = get_ident() == self._thread and call.args[0].device == self._trace.device
        return is_of_step and self._trace.expects

    def _check_shape(self, call: OperatorCall, out: Any, source: Source, given: _Given) -> None:
        name = call.schema.name
        # A capture gets the positions of a mask that is computed from Python numbers alone.
        is_known = name in NONZERO and self._are_fixed(given)
        if is_known or self._are_constants(given):
            self._note(out if is_known else None, constant=True, waits=_waits(given))
        elif is_asserted():
            self._note(out, asserted=True, waits=_waits(given))
        else:
            what, fix = ("a mask", _FIX) if name == POSITIONS else (name, _SHAPE_FIX)
            what = f"{what} makes a tensor whose shape depends on values"
            selects_all = call.selects_all(out)
            is_expected = selects_all and self._may_expect(call)
            self._refuse(what, source, (call, out), fix=self._fix_of(given) or fix, may_be_expected=is_expected)
            if selects_all:
                # From here on its elements are known, to backward as well, whose thread no capture can split.
                self._operands.fix(call.args[0])

    def _check_copy(self, call: OperatorCall, out: Tensor, source: Source) -> None:
        name = call.schema.name
        origin = call.args[1] if name == "aten.copy_.default" else call.args[0]
        if isinstance(origin, Tensor) and out.device.type == "cpu" and origin.device.type != "cpu":
            of_batch = (call, out) if name == TO_COPY else None
            self._refuse(f"{name} copies from {origin.device} to the host", source, of_batch)

    def _fix_of(self, given: _Given) -> str | None:
        """Return the fix for a read of these tensors, if their origin is known."""
        operands, trace = {operand for _, operand in given}, self._trace
        externals = trace.externals
        random, fed = self._operands.random, trace.leaf_storages.values()
        if not random.isdisjoint(operands) and operands <= random | self._operands.fixed:
            return _DRAWN_FIX
        for storage in externals.keys() & {storage_id(tensor) for tensor, _ in given}:
            slots = trace.entry_slots.get(storage, ())
            is_owned = storage in fed or bool(slots)
            if not is_owned and id(externals[storage].tensor) not in trace.symbolic.given:
                return _UNOWNED_FIX
        return None

    def _are_fixed(self, given: _Given) -> bool:
        """Return True if all values are computed from Python numbers alone."""
        return all(operand in self._operands.fixed for _, operand in given)

    def _are_constants(self, given: _Given) -> bool:
        """Return True if all values are computed on the host from Python numbers alone."""
        return self._are_fixed(given) and not _waits(given)

    def _note(self, out: Any, *, asserted: bool = False, constant: bool = False, waits: bool = False) -> None:
        """Record a read that does not refuse the step."""
        value = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), out)
        self._trace.host_reads.append(HostRead(find_place(), value, asserted, constant, waits))

    def _refuse(
        self,
        what: str,
        source: Source,
        read: tuple[OperatorCall, Any] | None,
        *,
        fix: str = _FIX,
        may_be_expected: bool = False,
    ) -> None:
        """Refuse the step, unless it is a ``read`` (operator, result) of the batch alone, or replays compare it."""
        trace = self._trace
        refusal = partial(self._error, what, source, fix)
        place = find_place() if may_be_expected else None
        # Reads are known by place: one place cannot have expected reads and reads of the batch.
        is_expected = any(known.expected and known.place == place for known in trace.host_reads)
        batch = None if is_expected else trace.batch
        if read is not None and batch is not None and batch.read(*read, error=refusal, may_be_expected=may_be_expected):
            self._is_answered = not batch.needs_another_trace and read[0].schema.name != PACKING
            if read[0].schema.name == TO_COPY:
                self._operands.add_constant(read[1])
            return
        error = refusal()
        if place is not None:
            assert read is not None
            call, found = read
            value = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), found)
            trace.host_reads.append(HostRead(place, value, waits=True, error=error, of_all=call.has_dynamic_shape()))
            trace.undone = frozenset(storage for storage, external in trace.externals.items() if external.mutated)
        elif trace.violation is None:
            trace.refuse(error)

    def _error(self, what: str, source: Source, fix: str) -> HostSyncError:
        source = with_users_line(self._told(source))
        fix = optimizer_fix(source) if source.component == "optimizer" else fix
        if source.by is not None and "torchmetrics" in source.by.filename:
            fix = _METRIC_FIX
        place = find_place()
        by = "" if source.by is not None or place.filename == source.filename else f" (by {place})"
        error = HostSyncError(
            f"{what} at {source}{by}; a replay would keep the first value. {fix}", component=source.component
        )
        error.where = f"{source}{by}"
        return error

    def _told(self, source: Source) -> Source:
        """Return the source for a message: the call of backward, if the autograd engine's thread runs the operator."""
        return find_source(sys._current_frames()[self._thread]) if is_ours(source.filename) else source


def _waits(given: _Given) -> bool:
    return any(tensor.device.type != "cpu" for tensor, _ in given)
