"""Slots that a step rebinds to other tensors: carries, whose values the next step reads, and others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from graphplan.effects.trace_pair import TracePair
from graphplan.errors import CarryError, HostEffectError
from graphplan.owners.slots import Walk, is_optimizer_state
from graphplan.specs.paths import Fact, names
from graphplan.tensors.storages import MemoryView, span
from graphplan.trace.changes import Rebinding
from graphplan.trace.records import Trace


@dataclass(frozen=True, slots=True)
class Rebindings:
    """The slots that every step rebinds to other tensors, by path. The step reads the old values of ``carries``, so
    replays copy the new value into the old storage; the other slots are ``fresh``. ``replaced`` are carries whose old
    tensors the step does not write to, so that other holders find these unchanged; ``moved`` are carries that keep
    their tensors and get other memory. ``partners`` maps a carry to another one that always holds the same tensor,
    ``followers`` maps a slot that gets a new tensor to the slot whose tensor is given that tensor's memory.
    """

    carries: tuple[str, ...]
    replaced: frozenset[str]
    moved: frozenset[str]
    fresh: tuple[str, ...]
    partners: Mapping[str, str]
    followers: Mapping[str, str]

    @classmethod
    def find(cls, pair: TracePair) -> Rebindings:
        """Find the slots that both traces rebind alike. Refuse rebindings that replays cannot repeat."""
        carries, fresh, followers = [], [], {}
        second = pair.second
        used = _used(second)
        for path, one, two in pair.changed("rebindings"):
            # A number in the place of a tensor, such as a device learning rate, is handled as a flag.
            if path in second.changes.flags:
                continue
            follows = [each.follows for each in (one, two) if each is not None]
            if two is None or (one is None and not names(path, Fact.GRADIENT)) or len(set(follows)) > 1:
                raise HostEffectError(
                    f"the step rebinds {path} on one call and not on the next, which a replay cannot repeat: rebind it "
                    "on every call, or update it in place"
                )
            if two.follows is not None:
                followers[path] = two.follows
                continue
            if not two.moved and path in pair.walk.slots and pair.walk.slots[path].is_parameter:
                raise HostEffectError(
                    f"the step creates a new parameter {path} in each call, but a replay keeps the existing one, as "
                    f"optimizers do. Write to it in place (with torch.no_grad(): {path}.copy_(...)), or keep the "
                    "computed values in a buffer"
                )
            if one is not None and one.before is None and two.before is None and two.after is not None:
                _check_made(path, pair.walk)
            dropped = names(path, Fact.GRADIENT) and two.after is None
            if two.joined is not None:
                raise HostEffectError(
                    f"the step gives {path} other memory ({path}.data = ...), and before or after that it shares "
                    f"memory with {two.joined}; a replay keeps each tensor in its memory, so whether a write to one "
                    "of them reaches the other would differ. Give each tensor its own memory, or update it in place: "
                    f"{path}.data.copy_(...)"
                )
            is_read = any(place[0] in used for place in two.before or ())
            if two.moved or (is_read and not dropped):
                _check_carry(two)
                carries.append(path)
            elif two.after is not None or two.before is not None:
                fresh.append(path)
        partners = _partners(second.changes.rebindings, carries, fresh)
        written = {storage for storage, external in second.externals.items() if external.mutated}
        return cls(
            tuple(carries),
            frozenset(path for path in carries if _is_replaced(second.changes.rebindings[path], written)),
            frozenset(path for path, rebinding in second.changes.rebindings.items() if rebinding.moved),
            tuple(fresh),
            partners,
            followers,
        )

    def parted(self, walk: Walk) -> str | None:
        """Describe two slots that held one tensor in the traces and do not now; None if there are none."""
        for path, partner in self.partners.items():
            one, other = (walk.slots.get(each) for each in (path, partner))
            if one is not None and other is not None and one.get() is not other.get():
                return f"{path} and {partner} were one tensor when the step was traced, and are not now"
        return None

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all rebound slots."""
        return (*self.carries, *self.fresh, *self.followers)


def _check_made(path: str, walk: Walk) -> None:
    """Refuse optimizer state that both steps make: each replay would begin again with the recording's constants."""
    name = next((name for name in walk.optimizers if path.startswith(f"{name}.state[")), None)
    if name is not None:
        raise HostEffectError(
            f"the step creates {path} in each call, because {name}.state is emptied before it (state.clear(), another "
            "dictionary, a state dict without state); each replay would start from a new state, even if nothing was "
            f"emptied. Reset the state in place (for s in {name}.state.values(): for t in s.values(): t.zero_()), or "
            "load a state dict that contains the state",
            component="optimizer",
        )


def _is_replaced(rebinding: Rebinding, written: set[int]) -> bool:
    """Return True if the step replaces plain tensors and never writes to them; ``written`` are all written storages."""
    kept = written.isdisjoint(place[0] for place in rebinding.before or ())
    return rebinding.plain and not rebinding.moved and kept


def _used(trace: Trace) -> set[int | None]:
    """Return the storages that an operator uses, that a slot is rebound to, or that the step returns."""
    bound = {place[0] for rebinding in trace.changes.rebindings.values() for place in rebinding.after or ()}
    return bound | trace.externals.keys() | trace.output_storages


def _check_carry(rebinding: Rebinding) -> None:
    before, after = rebinding.before or (), rebinding.after or ()
    old, new = [(p[2], p[4]) for p in before], [(p[2], p[4]) for p in after]
    if old != new:
        raise CarryError(
            f"the step rebinds {rebinding.path} from {_shapes(old)} to {_shapes(new)}; a replay copies the new value "
            "into the old storage, so shape and dtype must stay. Give it its final shape before the first step, and "
            "cast the new value"
        )


def _shapes(specs: list[tuple[Any, Any]]) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in specs) or "no tensor"


def _partners(
    rebindings: Mapping[str, Rebinding], carries: Collection[str], fresh: Collection[str]
) -> Mapping[str, str]:
    """Map carries to other carries that hold the same tensor before the step and the same one after it. Refuse any
    other overlap with a rebound slot after the step: replays give each slot its own memory, so the next step would not
    read values that are written to the other slot in place.
    """
    partners: dict[str, str] = {}
    places = [(path, place) for path in (*carries, *fresh) for place in rebindings[path].after or ()]
    for number, (path, place) in enumerate(places):
        is_carried = path in carries and not rebindings[path].moved
        for other, further in places[number + 1 :] if is_carried else ():
            if other == path or rebindings[other].moved or not _overlap(place, further):
                continue
            if other in carries and rebindings[path].objects == rebindings[other].objects:
                partners.setdefault(other, path)
                continue
            raise HostEffectError(
                f"the step assigns tensors that share memory to {path} and {other}, and reads {path} in the next "
                f"call; a replay leaves two separate tensors, so writes to {other} would not reach {path}. Assign a "
                f"copy: {other} = {path}.clone()",
                component="optimizer" if is_optimizer_state(path) else "step",
            )
    return partners


def _overlap(one: MemoryView, other: MemoryView) -> bool:
    same = one[0] is not None and one[0] == other[0] and one[4] == other[4]
    return same and one[1] < other[1] + span(*other[2:4]) and other[1] < one[1] + span(*one[2:4])
