"""What answers the reads of a batch that were made before a step, while that is traced again or captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from graphplan.feed.signature import leaf_key
from graphplan.tensors.copying import same_bits
from graphplan.trace.batch_reads import BatchReads, Kind, Read, reads_in
from graphplan.trace.host_reads import Place, find_place
from graphplan.trace.operator_schemas import PACKING, POSITIONS, TO_COPY, OperatorCall, tensors_in


def is_read(call: OperatorCall) -> bool:
    """Return True if an operator's results follow from a read alone."""
    if not call.schema.may_synchronize:
        return False
    return call.schema.reads_values or call.has_dynamic_shape()


def contents_of(call: OperatorCall) -> list[Tensor]:
    """The tensor of which the host needs all numbers: lengths of packed sequences, and what is copied to the host."""
    name, args = call.schema.name, call.args
    if name == PACKING:
        return [args[1]]
    target = call.kwargs.get("device") if name == TO_COPY else None
    return [args[0]] if target is not None and target.type == "cpu" and args[0].device.type != "cpu" else []


class Answer(NamedTuple):
    """A read's ``value``, or a ``call`` in its place. ``found``: tensors read, always the same if ``is_content``."""

    value: Any = None
    call: OperatorCall | None = None
    found: Sequence[Tensor] = ()
    is_content: bool = False


class BatchAnswers:
    """Answers reads of a traced or captured step as they were found in ``reads``, and by ``tensors`` that are fed."""

    def __init__(self, reads: BatchReads, tensors: Sequence[Tensor]) -> None:
        self._answers: dict[Place, list[tuple[Read, Sequence[Tensor]]]] = {}
        for read, found in zip(reads.reads, reads.tensors_of(tensors), strict=True):
            self._answers.setdefault(read.place, []).append((read, found))

    def take(self, call: OperatorCall) -> Answer | None:
        """The answer to a read; None for other operators, and for reads that were none when the batch was looked at."""
        if not (contents_of(call) or is_read(call)):
            return None
        answers = self._answers.get(find_place())
        if not answers:
            return None
        read, found = answers.pop(0)
        if read.kind is Kind.VALUE:
            return Answer(read.found)
        if read.kind is Kind.CONTENT:
            known, (first, *others) = read.found.clone(), call.args
            if call.schema.name == TO_COPY:
                return Answer(known, found=(known,), is_content=True)
            packed = OperatorCall(call.schema, (first, known, *others[1:]), call.kwargs, call)
            return Answer(None, packed, (known,), is_content=True)
        if call.schema.name == POSITIONS:
            # Of another mask than the one that was read there are none.
            return Answer(found, found=found) if max(call.args[0].dim(), 1) == len(found) else None
        is_single = len(call.schema.operator._schema.returns) == 1
        return Answer(found[0] if is_single else tuple(found), found=found)


def answers_in(kwargs: Mapping[str, Any]) -> BatchAnswers | None:
    """The answers among the arguments of a call."""
    found = reads_in(kwargs)
    return None if found is None else BatchAnswers(*found)


def is_right(answer: Answer, call: OperatorCall) -> bool:
    """Return True if a read gives what it is answered with."""
    if answer.is_content:
        real = [tensor.cpu() for tensor in contents_of(call)]
    else:
        out = call.schema.call(*call.args, **call.kwargs)
        if not answer.found:
            return leaf_key(out) == leaf_key(answer.value)
        real = tensors_in(out)
    return len(answer.found) == len(real) and all(map(same_bits, answer.found, real))
