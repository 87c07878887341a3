"""Compare two consecutive traces: a replay would freeze any difference, so the step is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NoReturn

import torch

from graphplan.errors import ControlFlowError, FeedError, GeneratorSeekError, HostScalarError, HostSyncError
from graphplan.feed.signature import Feed, is_literal
from graphplan.observe.source import optimizer_fix
from graphplan.tensors.attributes import attributes_on
from graphplan.tensors.copying import same_bits
from graphplan.trace.changes import same_value, told_apart
from graphplan.trace.host_reads import ENGINE
from graphplan.trace.records import Operator, Trace

_LOGGING = "__to_tensor"
"""The method with which Lightning converts a logged number to a tensor."""


def check_difference(first: Trace, second: Trace) -> None:
    """Refuse traces unless both run the same operators on the same operands with the same numbers."""
    for trace in (first, second):
        if trace.violation is not None:
            raise trace.violation
    if first is second:
        return
    _check_reads(first, second)
    kept = _kept(first, second)
    for number, (a, b) in enumerate(check_operators(first.operators, second.operators)):
        if a.operands != b.operands or (a.offsets != b.offsets and _offsets(a, kept) != _offsets(b, kept)):
            raise ControlFlowError(
                f"operator {number}, {b.name} at {b.source}, uses other tensors than in the step before "
                f"({' then '.join(told_apart(a, b, _operand_text))}): the step chooses between tensors, and a replay "
                "repeats one choice. Use torch.where or index with a tensor",
                component=b.source.component,
            )
    _check_externals(first, second)
    _check_generators(first, second)
    if first.states != second.states:
        raise GeneratorSeekError(
            f"the step restores {len(first.states.restores)} generator states on one step and "
            f"{len(second.states.restores)} on the next, or restores other saved states; a replay always restores the "
            "same ones. Save and restore the same states in each step"
        )


def check_operators(first: Sequence[Operator], second: Sequence[Operator]) -> Iterator[tuple[Operator, Operator]]:
    """Yield the operators of two steps in pairs. Refuse a pair that differs in operator or in numbers."""
    for number, (a, b) in enumerate(zip_longest(first, second)):
        if a is None or b is None:
            extra = a or b
            raise ControlFlowError(
                f"one step runs {len(first)} operators and the next {len(second)}; the first extra one is operator "
                f"{number}, {extra.name} at {extra.source}. Make a graph_step for each path (in a Trainer, pass "
                "variant=), or select the calls of the rarer path with eager_if=",
                component=extra.source.component,
            )
        if a.name != b.name:
            raise ControlFlowError(
                f"operator {number} is {a.name} at {a.source} on one step and {b.name} at {b.source} on the next: the "
                "step's control flow changes, and a replay repeats one path. Use torch.where, make a graph_step for "
                "each path (in a Trainer, pass variant=), or select the calls of the rarer path with eager_if=",
                component=b.source.component,
            )
        if a is not b and (a.scalars or b.scalars or a.constant is not None):
            _check_numbers(a, b)
        yield a, b


_RATE_FIX = "The step itself sets the learning rate: set it before the step, because a replay reads the current rate"


def _check_reads(first: Trace, second: Trace) -> None:
    """Refuse reads of constants that differ, and reads by autograd's engine whose order may change."""
    for old, new in zip(first.host_reads, second.host_reads, strict=False):
        if old.place != new.place:
            # The control flow differs; comparing the operators gives the better error.
            return
        if old.constant and new.constant and not _is_same_read(old.value, new.value):
            raise HostSyncError(
                f"{new.place} reads other values than in the step before, and no operator on the batch makes them: "
                "Python, NumPy or an extension does, unseen; a replay would keep the first values. Draw random numbers "
                "with torch (torch.rand), pass the values as an argument of the step, or keep them on the device "
                "(torch.where, a mask of fixed shape)"
            )
        if old.expected and new.expected:
            old.compare(new.outcome)
        if new.waits and new.place == ENGINE and (first.graph_elsewhere or second.graph_elsewhere):
            raise HostSyncError(
                "a derivative of a derivative reads values of a device on the host, in an order that may change from "
                "step to step; a replay would keep one order. Keep the values on the device (torch.where, a mask of "
                "fixed shape)"
            )


def _is_same_read(old: Any, new: Any) -> bool:
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return same_bits(old, new)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_is_same_read, old, new))
    return same_value(old, new)


def is_reordered(first: Trace, second: Trace) -> bool:
    """Return True if two traces differ only in the order in which autograd's engine ran the same operators. The engine
    orders nodes by a counter of the thread that made them, and its own threads make the nodes of double backward.
    """
    names = [Counter(operator.name for operator in trace.operators) for trace in (first, second)]
    pairs = zip(first.operators, second.operators, strict=False)
    differing = next((pair for pair in pairs if _facts(pair[0]) != _facts(pair[1])), None)
    return names[0] == names[1] and differing is not None and all(operator.threaded for operator in differing)


def form_of(trace: Trace) -> int:
    """Return a hash of a trace's operators and operands that does not depend on shapes, offsets or numbers."""
    return hash(tuple([(op.name, op.operands, len(op.scalars)) for op in trace.operators]))


def _facts(operator: Operator) -> Any:
    return operator.name, operator.operands, repr(operator.scalars)


def _check_numbers(a: Operator, b: Operator) -> None:
    for (name, old), (other, new) in zip_longest(a.scalars, b.scalars, fillvalue=("", None)):
        if name != other or not (old is new or same_value(old, new)):
            _refuse_scalar(b, name or other, old, new)
    if a.constant is not None and b.constant is not None and not same_bits(a.constant, b.constant):
        if a.constant.numel() == b.constant.numel() == 1:
            _refuse_scalar(b, "value", a.constant.item(), b.constant.item())
        _refuse(b, "other values than one step before")


def _refuse_scalar(operator: Operator, name: str, old: Any, new: Any) -> NoReturn:
    before, after = told_apart(old, new)
    _refuse(operator, f"{name}={before} on one step and {name}={after} on the next")


def _refuse(operator: Operator, values: str) -> NoReturn:
    if operator.source.component == "optimizer":
        # An optimizer kernel gets the device learning rate as `lr`, unless the step itself sets a number.
        fix = _RATE_FIX if values.startswith("lr=") else optimizer_fix(operator.source)
    elif operator.source.by is not None and operator.source.by.function == _LOGGING:
        fix = (
            "Log the number in on_train_batch_end, which also runs after replays, or log a tensor that is updated in "
            "place"
        )
    else:
        fix = (
            "Keep the value in a tensor that an owner holds and update that in place, or pass it as an argument of "
            "the step; draw random numbers with torch (torch.rand, torch.randn)"
        )
    made = "a tensor made from a Python value" if operator.constant is not None else f"{operator.name}"
    raise HostScalarError(
        f"{made} at {operator.source} gets {values}; a replay would freeze the first. {fix}",
        component=operator.source.component,
    )


def _kept(first: Trace, second: Trace) -> set[int]:
    """Return the numbers of externals with the same storage in both traces: views of these must be equal, too. Fed
    tensors and those of rebound slots are left out, since they are copied.
    """
    rebound = second.changes.rebindings
    brought = {*first.leaf_storages.values(), *second.leaf_storages.values()}
    brought |= {storage for storage, slots in second.entry_slots.items() for slot in slots if slot.path in rebound}
    pairs = enumerate(zip(first.externals, second.externals, strict=False))
    return {number for number, (old, new) in pairs if old == new and new not in brought}


def _offsets(operator: Operator, kept: set[int]) -> list[int]:
    numbers = [number for kind, number in operator.operands if kind == "external"]
    return [offset for number, offset in zip(numbers, operator.offsets, strict=True) if number in kept]


def _check_externals(first: Trace, second: Trace) -> None:
    """Refuse an external that is another slot or input in the second trace; its address may differ."""
    for old, (new, traced) in zip(first.externals, second.externals.items(), strict=True):
        if traced.is_temporary and not same_bits(first.externals[old].tensor, traced.tensor):
            was, now = _short(first.externals[old].tensor), _short(traced.tensor)
            raise HostScalarError(
                f"{traced.operator} at {traced.source} gets {was} on one step and {now} on the next, a value that "
                "compiled code computes from a number; a replay would freeze the first. Keep the number in a tensor, "
                "or pass it as an argument",
                component=traced.source.component,
            )
        if old == new:
            continue
        before, after = _names(first, old), _names(second, new)
        if (before or after) and before.isdisjoint(after):
            was, now = told_apart(before, after, partial(min, default="a tensor that has no owner"))
            raise ControlFlowError(
                f"{traced.operator} at {traced.source} uses another tensor than in the step before ({was} then "
                f"{now}): the step chooses between tensors, and a replay repeats one choice. Use torch.where or index "
                "with a tensor",
                component=traced.source.component,
            )


def _check_generators(first: Trace, second: Trace) -> None:
    """Refuse a random operator that draws from two generators: a recording continues one generator."""
    for (old, _), (new, source) in zip(first.operator_draws, second.operator_draws, strict=True):
        if old is not new:
            raise GeneratorSeekError(
                f"the random operator at {source} draws from another {new.device} torch.Generator than in the step "
                "before; a replay would continue with one generator, while the step starts with a new one. Create the "
                "generator once, outside the step, and seed it there; or draw outside the step and pass the result as "
                "an argument",
                component=source.component,
            )


def _names(trace: Trace, storage: int) -> set[str]:
    """Return the slots that held a storage when the step began, and the inputs that brought it."""
    slots = {slot.path for slot in trace.entry_slots.get(storage, ())}
    return slots | {f"input {index}" for index, fed in trace.leaf_storages.items() if fed == storage}


def _operand_text(operator: Operator) -> str:
    offsets = iter(operator.offsets)
    return ", ".join(
        f"{kind} {number}" + (f" at {next(offsets)}" if kind == "external" else "")
        for kind, number in operator.operands
    )


def _short(tensor: torch.Tensor) -> Any:
    return tensor.item() if tensor.numel() == 1 else tensor.flatten()[:8].tolist()


def check_marks(feed: Feed, first: Trace, second: Trace) -> None:
    """Refuse a step that reads an attribute of a fed tensor if it is no literal or the tensor requires gradients."""
    for index, leaf in feed.tensors():
        for name, value in attributes_on(leaf).items():
            if not any(trace.reads.reads_mark(name) for trace in (first, second)):
                continue
            path = f"{feed.names()[index]}.{name}"
            if not is_literal(value):
                raise FeedError(
                    f"the step's code reads {path}, a {type(value).__name__} that is an attribute of an argument, and "
                    "no guard can detect its changes; expected a number, a string or another plain value. Pass it as "
                    "a separate argument"
                )
            if leaf.requires_grad:
                raise FeedError(
                    f"the step's code reads {path}, an attribute of a tensor that requires gradients: the copy that a "
                    "replay uses does not have it. Pass it as a separate argument"
                )
