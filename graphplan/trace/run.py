"""The trace of one real call of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphplan.errors import HostEffectError
from graphplan.feed.call_arguments import BATCH_READS, CallArguments, call_step
from graphplan.feed.placeholders import ReadSignal, index_of, is_placeholder
from graphplan.feed.signature import Feed, changed_object, is_dense, marks_of
from graphplan.observe.capture_state import presenting_capture
from graphplan.observe.profile import Profile
from graphplan.observe.source import find_source, runs_step, with_users_line
from graphplan.owners.generators import HostGenerators
from graphplan.owners.sharding import Sharding, reshard_and_walk
from graphplan.owners.slots import Scalar, Walk
from graphplan.owners.walk import walk_owners
from graphplan.specs.roles import TensorSpec
from graphplan.tensors.attributes import PLAIN_KINDS, has_memory, is_freed
from graphplan.tensors.deferred import form_of, is_deferred
from graphplan.tensors.dtensors import is_sharded
from graphplan.tensors.storages import place_of, storage_id
from graphplan.tensors.trees import flatten_result, names_of
from graphplan.trace.batch_reads import answers_in
from graphplan.trace.batch_recorder import BatchRecorder
from graphplan.trace.changes import Changes, Recorder
from graphplan.trace.mode import TraceMode
from graphplan.trace.operands import NOWHERE, Operands
from graphplan.trace.rate_reads import RateWatch
from graphplan.trace.records import OutputTensor, Trace
from graphplan.trace.rng import saving_states

_HELD = (
    "a module under fully_shard keeps gradients that it did not reduce (set_requires_gradient_sync(False), "
    "set_requires_all_reduce(False)) before or after the step; a replay can neither find nor leave them there. Let "
    "each step reduce its own gradients, or run those steps eagerly"
)
_IN_PLACE = (
    "(squeeze_, unsqueeze_, t_, resize_); a replay does not repeat that. Use the function that returns a view instead "
    "(squeeze, unsqueeze, t)"
)


@runs_step
def trace(
    fn: Callable[..., Any],
    feed: Feed,
    fed: CallArguments,
    *,
    owners: Mapping[str, Any],
    device: torch.device | None,
    record: Trace,
    rates: Callable[[], Collection[int]] = tuple,
    before: Trace | None = None,
) -> tuple[Any, Walk]:
    """Run ``fn`` on ``feed``, whose containers are ``fed``. Return its result, and a walk over the owners after it.
    The facts go to ``record``, so that a step that raises can be undone. ``rates`` returns the storages of learning
    rates that only optimizers may use; ``before`` is the step's previous trace.

    The step runs to its end even if a fact will lead to a refusal: it is a real step.
    """
    record.device = device
    sharding, walk = reshard_and_walk(owners)
    tensors = feed.tensors()
    names = feed.names() if tensors else []
    recorder = Recorder(owners, walk, {names[index]: leaf for index, leaf in tensors})
    _note_entry(record, feed, recorder, sharding, rates())
    watch = RateWatch(record, rates)
    mode = TraceMode(record, watch, before, answers_in(fed.kwargs))
    result = _run(fn, feed, fed, mode, record, sharding)
    if record.batch is not None:
        _check_reads(record, record.batch)
    leaves, record.output_structure = flatten_result(result)
    named = list(zip(names_of(record.output_structure, "result"), leaves, strict=True))
    record.output_storages = {storage_id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
    changes, after = recorder.changes(record.externals.keys() | record.output_storages)
    record.changes = changes
    record.read_before = {path for path in changes.renewed if _may_read(record, recorder.walk.scalars[path])}
    paths = _lasting_paths(after, changes)
    fed_ids = {id(leaf) for _, leaf in feed.tensors()}
    left = _left(after, changes) | {name: [leaf] for name, leaf in named if id(leaf) not in paths}
    _note_left(record, left, fed_ids)
    _note_unowned(record, after, recorder, paths, fed_ids, mode.operands)
    for path, items in changes.appended.items():
        changes.appended[path] = pytree.tree_map_only(Tensor, lambda tensor: OutputTensor(), items)
    watch.finish(after, leaves)
    record.output_leaves = [_describe_output(leaf, feed, paths, record.deferred.copies) for leaf in leaves]
    record.output_names = [name for name, _ in named]
    if record.deferred.has_stand_ins:
        result, has_put = record.deferred.settle(result, changes, after, record.reads.assigned)
        # This walk may have found containers with deferred numbers, which have been replaced by others.
        after = walk_owners(owners) if has_put else after
    return result, after


def _may_read(record: Trace, scalar: Scalar) -> bool:
    return record.reads.covers(scalar) or record.reads.may_cover(scalar) or record.reads.may_assign(scalar)


def _check_reads(record: Trace, batch: BatchRecorder) -> None:
    """Find reads that cannot be made before the step: have replays compare them from the next trace on, or refuse."""
    changed = {storage for storage, outer in record.externals.items() if outer.mutated}
    if record.deferred.integer_places:
        batch.note_waited(for_good=record.deferred.deferring_helps)
    batch.defer_integers(changed)
    record.needs_another_trace |= batch.needs_another_trace
    for read in batch.impossible(changed):
        if read.may_be_expected and (read.place, read.kind) not in batch.earlier.expected:
            batch.earlier.expected.add((read.place, read.kind))
            record.needs_another_trace = True
        else:
            assert read.error is not None
            record.refuse(read.error)
    record.needs_another_trace |= record.is_unlikely and record.violation is None


def _note_entry(record: Trace, feed: Feed, recorder: Recorder, sharding: Sharding, rates: Collection[int]) -> None:
    storages = ((index, storage_id(leaf)) for index, leaf in feed.tensors())
    record.leaf_storages.update((index, storage) for index, storage in storages if storage is not None)
    found, slots = recorder.walk.found, recorder.walk.slots.values()
    uncopied = (t for slot in slots for t in slot.tensors() if slot.param is not None or id(t) in found)
    record.uncopied = set(map(storage_id, uncopied))
    record.entry_paths = frozenset(recorder.places)
    record.entry_slots = recorder.walk.by_storage()
    record.entry_scalars = {**recorder.scalars, **recorder.objects}
    # Code must not see the tensor that replaces a learning rate during the step: before a replay it is a number.
    lent = {slot.path for storage in rates for slot in record.entry_slots.get(storage, ())}
    record.entry_metadata = {path: found for path, found in recorder.metadata.items() if path not in lent}
    record.gathered = {storage_id(tensor) for tensor in sharding.gathered()}


def _run(
    fn: Callable[..., Any], feed: Feed, fed: CallArguments, mode: TraceMode, record: Trace, sharding: Sharding
) -> Any:
    """Run the step under the dispatch mode and the profile function, and record what it ran, read and drew."""
    profile = Profile(
        mode.syncs.read,
        lambda: record.prints.append(str(with_users_line(find_source()))),
        lambda values: _refuse_to_write(record, values),
    )
    geometry = {index: place_of(leaf)[1:4] for index, leaf in feed.tensors()}
    generators, held = HostGenerators(), sharding.holds_gradients()
    with presenting_capture(), saving_states(mode.generators.save, mode.generators.put), mode, profile, record.deferred:
        result = call_step(fn, fed.args, fed.kwargs)
        sharding.settle()
    mode.faults.check()
    profile.faults.check()
    turned = next((index for index, leaf in feed.tensors() if place_of(leaf)[1:4] != geometry[index]), None)
    if turned is not None:
        name = feed.names()[turned]
        what = "a tensor that it reads of its batch" if BATCH_READS in name else f"its argument {name}"
        record.refuse(HostEffectError(f"the step gives {what} another shape or other strides in place {_IN_PLACE}"))
    change = fed.change()
    if change is None and (changed := changed_object(feed)) is not None:
        change = (
            f"the step changes {changed}, an object among its arguments, but a replay does not. Keep such state on an "
            "owner"
        )
    if change is not None:
        record.refuse(HostEffectError(change))
    if held or sharding.holds_gradients():
        record.violate(HostEffectError, _HELD)
    mode.finish()
    record.states = mode.generators.facts(record.device)
    record.draws = generators.moved(by=record.symbolic.draws)
    if record.symbolic.refusal is not None:
        record.refuse(record.symbolic.refusal)
    record.reads = profile.reads()
    record.executed = profile.executed
    record.executed.leave_out(fed.objects())
    for kind in {type(leaf) for _, leaf in feed.tensors()} - PLAIN_KINDS:
        record.executed.note_class(kind)
    return result


def _refuse_to_write(record: Trace, values: Iterable[Any]) -> None:
    """Raise ReadSignal before ``values`` are written to a logger or a file if they contain stand-ins, or tensors from
    which a logger would make some: undoing the call would not undo the write.
    """
    leaves = pytree.tree_leaves(list(values))
    numbers = [leaf for leaf in leaves if is_deferred(leaf)]
    may_make = record.deferred.defers and any(isinstance(leaf, Tensor) for leaf in leaves)
    if may_make or not all(each.is_symbolic for each in numbers):
        raise ReadSignal
    if numbers:
        raise ReadSignal(symbolic={path for number in numbers for path in form_of(number)[1]})


def _note_left(record: Trace, left: Mapping[str, list[Any]], fed: Collection[int]) -> None:
    """Note tensors that the step ``left`` or returned, by path, and that replays could not leave. ``fed`` are ids."""
    for path, parts in left.items():
        own = [part for part in parts if isinstance(part, Tensor) and id(part) not in fed]
        if any(tensor.requires_grad and _gradient_of(tensor) is not None for tensor in own):
            record.gradients.append(path)
        if any(has_memory(tensor) and is_freed(tensor) for tensor in own):
            text = (
                f"the step leaves or returns {path}, whose memory it has freed (untyped_storage().resize_(0)); a "
                "replay would copy memory that does not exist. Leave or return a tensor with memory, or nothing"
            )
            record.refuse(HostEffectError(text))


def _note_unowned(
    record: Trace, after: Walk, recorder: Recorder, paths: Mapping[int, str], fed: Collection[int], operands: Operands
) -> None:
    """Note tensors that get gradients and are no parameters. For those still in their place, note the paths: gradients
    that the step drops may be there when it begins.
    """
    with_slots = {id(slot.param) for slot in after.slots.values() if slot.param is not None}
    found = [
        each for each in record.externals.values() if each.tensor.requires_grad or _gradient_of(each.tensor) is not None
    ]
    found = [each for each in found if id(each.tensor) not in with_slots and id(each.tensor) not in fed]
    kept = {id(tensor): path for tensor, path in recorder.kept(after)} if found else {}
    names_gradients = "grad" in record.reads.by_users.attributes or "grad" in record.reads.by_packages
    for external in found:
        tensor = external.tensor
        number, gradient = id(tensor), _gradient_of(tensor)
        if tensor.is_leaf and number in kept and (names_gradients or gradient is not None):
            record.leaves.add(kept[number])
        elif gradient is not None and operands.internal(gradient) is not NOWHERE:
            record.unowned_gradients.append(paths.get(number, f"a tensor that is used at {external.source}"))


def _left(after: Walk, changes: Changes) -> dict[str, list[Any]]:
    """Return what the step left in slots, other than parameters and gradients, and appended to lists, by path."""
    rebound = (path for path, change in changes.rebindings.items() if path in after.slots and not change.moved)
    slots = (after.slots[path] for path in rebound)
    left = {slot.path: slot.tensors() for slot in slots if slot.param is None and not slot.is_parameter}
    return left | {f"{path}[-1]": pytree.tree_leaves(items) for path, items in changes.appended.items()}


def _gradient_of(tensor: Tensor) -> Tensor | None:
    # For any other tensor, torch warns when ``grad`` is read.
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def _lasting_paths(after: Walk, changes: Changes) -> dict[int, str]:
    """Return the paths of tensors by id. Items that this step appended have none: a later step appends elsewhere."""
    new = tuple(
        f"{path}[{len(after.lists[path]) - number}]"
        for path, items in changes.appended.items()
        for number in range(1, len(items) + 1)
    )
    slots = {path: slot for path, slot in after.slots.items() if not path.startswith(new)}
    return {id(tensor): path for path, slot in slots.items() for tensor in (*slot.tensors(), slot.get())}


def _describe_output(value: Any, feed: Feed, paths: Mapping[int, str], copies: Collection[int]) -> Any:
    """Return ``value``, or a description of a tensor: a trace must not keep results alive. ``copies`` are ids."""
    if is_deferred(value):
        return form_of(value)[0]
    if is_placeholder(value):
        return OutputTensor(leaf=index_of(value))
    if not isinstance(value, Tensor):
        return value
    leaf = next((index for index, fed in feed.tensors() if fed is value), None)
    spec = None if is_sharded(value) or not is_dense(value) else TensorSpec.of(value)
    if id(value) in copies:
        return OutputTensor(spec=spec, is_copied=True)
    if leaf is not None or id(value) in paths:
        return OutputTensor(leaf=leaf, path=None if leaf is not None else paths[id(value)], spec=spec)
    return OutputTensor(spec=spec, marks=marks_of(value))
