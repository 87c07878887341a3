"""Changes by host code between two traces. Two traces that differ for this reason cannot be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from graphplan.effects.changed_values import is_read_number
from graphplan.effects.reads import changed_metadata
from graphplan.effects.trace_pair import TracePair
from graphplan.owners.slots import Scalar
from graphplan.owners.tensor_metadata import ABSENT
from graphplan.trace.changes import same_value, told
from graphplan.trace.records import Trace

Holder = tuple[str, int]
"""The path of a slot, and 1 for the second occurrence of the same memory in a tuple in that slot, else 0."""


def host_changes(pair: TracePair) -> str | None:
    """Describe what host code changed between the traces if the step may depend on it; else return None."""
    return _changed_value(pair) or changed_metadata(pair) or _changed_sharing(*pair.both)


def _changed_value(pair: TracePair) -> str | None:
    first, grown = pair.first, tuple(f"{path}[" for path in (*pair.first.changes.appended, *pair.first.changes.moved))
    for path, scalar in pair.walk.scalars.items():
        then, now = (trace.entry_scalars.get(path, ABSENT) for trace in pair.both)
        if same_value(then, now) or pair.tracks(path) or pair.allows(path) or (grown and path.startswith(grown)):
            continue
        if then is not ABSENT and first.changes.scalars.get(path, (then,))[0] is ABSENT:
            # The first step set an attribute that hides the attribute of a class.
            return told(path, *pair.at_entry(path), " one step before")
        made = ABSENT if path in first.changes.rebindings else then
        # A trace does not have the value of a number that the step reads from the device.
        is_steps = all(is_read_number(trace.changes.scalars.get(path)) for trace in pair.both)
        is_hosts = not (is_steps or same_value(first.changes.scalars.get(path, (then, made))[1], now))
        reads = pair.reads(scalar) or pair.may_read(scalar) or pair.uses(path, scalar)
        if (is_hosts and reads) or _is_reset(path, scalar, pair):
            return told(path, *pair.at_entry(path), " one step before")
    return None


def _is_reset(path: str, scalar: Scalar, pair: TracePair) -> bool:
    """Return True if both steps assign one value where a tensor was before the first (``_computed = None``)."""
    held_tensor = path in pair.first.entry_paths and path not in pair.second.changes.scalars
    return held_tensor and all(trace.reads.may_store(scalar) for trace in pair.both)


def _changed_sharing(first: Trace, second: Trace) -> str | None:
    """Describe slots that the step uses and that shared memory when one trace began, but not for the other trace."""
    for one, other, text in ((first, second, "shared"), (second, first, "did not share")):
        held = joined_slots(other, other.entry_slots)
        for paths in joined_slots(one, one.externals):
            together = frozenset(holder for holder in paths if holder[0] in other.entry_paths)
            if len(together) > 1 and not any(together <= others for others in held):
                names = [path + " (again)" * again for path, again in sorted(together)[:2]]
                return f"{' and '.join(names)} {text} memory one step before"
    return None


def joined_slots(trace: Trace, storages: Iterable[int]) -> list[frozenset[Holder]]:
    """Return the groups of slots, except gradients, that shared one of ``storages`` when the trace began."""
    found = []
    for storage in storages:
        paths = [slot.path for slot in trace.entry_slots.get(storage, ()) if slot.param is None]
        # Most storages belong to a single slot.
        if len(paths) > 1:
            counts = Counter(paths).items()
            found.append(frozenset((path, again) for path, number in counts for again in range(min(number, 2))))
    return found
