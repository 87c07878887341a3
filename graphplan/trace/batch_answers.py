"""What answers the reads of a batch that were made before a step, while that is traced again or captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphplan.feed.signature import leaf_key
from graphplan.tensors.copying import same_bits
from graphplan.trace.batch_reads import BatchReads, Kind, Read, reads_in
from graphplan.trace.host_reads import Place, find_place
from graphplan.trace.operator_schemas import (
    INDEXING,
    PACKING,
    TO_COPY,
    OperatorCall,
    is_mask,
    schema_of,
    tensors_in,
    without_masks,
)

_SELECT = "aten.masked_select.default"
_index: Any = torch.ops.aten.index.Tensor


def is_read(call: OperatorCall) -> bool:
    """Return True if an operator's results follow from a read alone."""
    if not call.schema.may_synchronize:
        return False
    return call.schema.reads_values or (call.has_dynamic_shape() and not masks_of(call))


def masks_of(call: OperatorCall) -> list[Tensor]:
    """The masks that decide on the shape of what an operator gives."""
    return [mask for mask in masks_among(call) if mask is not None]


def masks_among(call: OperatorCall) -> list[Tensor | None]:
    """The masks of an operator in their places, with None in the places of other indices."""
    name, args = call.schema.name, call.args
    if name in INDEXING:
        return [index if is_mask(index) else None for index in args[1]]
    return [args[1]] if name == _SELECT and args[0].shape == args[1].shape else []


def contents_of(call: OperatorCall) -> list[Tensor]:
    """The tensor of which the host needs all numbers: lengths of packed sequences, and what is copied to the host."""
    name, args = call.schema.name, call.args
    if name == PACKING:
        return [args[1]]
    target = call.kwargs.get("device") if name == TO_COPY else None
    return [args[0]] if target is not None and target.type == "cpu" and args[0].device.type != "cpu" else []


def positions_among(masks: Sequence[Tensor | None]) -> list[Tensor]:
    """The positions that masks select: a tensor for each dimension of each mask."""
    return [position for position in without_masks(masks) if position is not None]


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
        masks = masks_of(call)
        if masks and not call.has_dynamic_shape():
            return None
        if not (masks or contents_of(call) or is_read(call)):
            return None
        answers = self._answers.get(find_place())
        if not answers:
            return None
        read, found = answers.pop(0)
        if read.kind is Kind.VALUE:
            return Answer(read.found)
        operator, name, args = call.schema.operator, call.schema.name, call.args
        if read.kind is Kind.CONTENT:
            known = read.found.clone()
            if name == TO_COPY:
                return Answer(known, found=(known,), is_content=True)
            return Answer(None, _with_args(call, args[0], known, *args[2:]), (known,), is_content=True)
        if masks and sum(mask.dim() for mask in masks) != len(found):
            # Another mask than the one that was read.
            return None
        if not masks:
            is_single = len(operator._schema.returns) == 1
            return Answer(found[0] if is_single else tuple(found), found=found)
        if name == _SELECT:
            return Answer(None, OperatorCall(schema_of(_index), (args[0], list(found)), call.kwargs, call), found)
        return Answer(None, _with_args(call, args[0], _with_positions(args[1], found), *args[2:]), found)


def _with_args(call: OperatorCall, *args: Any) -> OperatorCall:
    return OperatorCall(call.schema, args, call.kwargs, call)


def _with_positions(indices: Sequence[Tensor | None], found: Sequence[Tensor]) -> list[Tensor | None]:
    """``indices`` with positions in the place of masks, as many for each as it has dimensions."""
    following = iter(found)
    made: list[Tensor | None] = []
    for index in indices:
        made += [next(following) for _ in range(index.dim())] if index is not None and is_mask(index) else [index]
    return made


def answers_in(kwargs: Mapping[str, Any]) -> BatchAnswers | None:
    """The answers among the arguments of a call."""
    found = reads_in(kwargs)
    return None if found is None else BatchAnswers(*found)


def is_right(answer: Answer, call: OperatorCall) -> bool:
    """Return True if a read gives what it is answered with."""
    masks = masks_among(call)
    if answer.is_content:
        real = [tensor.cpu() for tensor in contents_of(call)]
    elif any(mask is not None for mask in masks):
        real = positions_among(masks)
    else:
        out = call.schema.call(*call.args, **call.kwargs)
        real = tensors_in(out)
        if answer.call is None and not answer.found:
            return leaf_key(out) == leaf_key(answer.value)
    return len(answer.found) == len(real) and all(map(same_bits, answer.found, real))
