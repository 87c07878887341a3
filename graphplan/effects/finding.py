"""Python effects of a step, from two traces: understood and repeated, allowed by name, or refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import translate
from functools import lru_cache
from io import IOBase
from reprlib import Repr
from typing import Any, NoReturn

from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from graphplan.effects.appended_lists import Grown
from graphplan.effects.counter_reads import is_item_of_optimizer, is_read
from graphplan.effects.kinds import Append, Assignment, Counter
from graphplan.errors import CarryError, HostEffectError, HostScalarError
from graphplan.observe.comparisons import Comparison, come_out_alike
from graphplan.observe.source import find_load
from graphplan.owners.contents import is_proxy, unseen
from graphplan.owners.group_counts import GroupCounts
from graphplan.owners.slots import Scalar, Walk
from graphplan.owners.views import Contents, Inherited, Numbers
from graphplan.specs.paths import Of, names
from graphplan.trace.changes import Rebinding, same_value, told_apart
from graphplan.trace.records import Trace

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def is_allowed(path: str, allow: Iterable[str]) -> bool:
    """Whether ``path`` was declared harmless, by its name or by a pattern such as ``model.stats.*``; what lies
    within an allowed path is allowed too.
    """
    patterns = tuple(allow)
    return bool(patterns) and _expression(patterns).match(path) is not None


@lru_cache(maxsize=64)
def _expression(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """What matches every allowed path: a check asks for hundreds."""
    ways = [way for pattern in patterns for way in (translate(pattern), re.escape(pattern) + r"(?:[.\[]|\Z)")]
    return re.compile("|".join(f"(?:{way})" for way in ways))


def find_counters(first: Trace, second: Trace, walk: Walk, allow: Iterable[str]) -> tuple[Counter, ...]:
    """Numbers that grew by the same amount in both traces.

    Raises:
        HostEffectError: for any other changed Python value that ``allow`` does not name.
        HostScalarError: for a counter that user code also reads.
    """
    counters = []
    for path in {**first.changes.scalars, **second.changes.scalars}:
        if is_allowed(path, allow):
            continue
        old, new = first.changes.scalars.get(path), second.changes.scalars.get(path)
        _check_stage(path, old, new)
        delta = _constant_delta(old, new)
        scalar = walk.scalars.get(path)
        component = "optimizer" if scalar and isinstance(scalar.owner, (Optimizer, GroupCounts)) else "step"
        is_item = scalar is not None and is_item_of_optimizer(scalar)
        if delta is not None and scalar is not None and is_read(scalar, second):
            raise HostScalarError(
                f"the step's code reads {path}, which it also counts up ({describe(old)}, then {describe(new)}); a "
                "replay would act on one value for ever. Count in a tensor, or count and decide outside the step, or, "
                f"if the step's results do not depend on it, pass allow=({path!r},)",
                component=component,
                path=path,
            )
        # Of an item, no name tells whether it is raised or set; two traces do.
        is_item_set = first is not second and old == new
        is_set = is_item_set if is_item else scalar is not None and scalar.key in second.reads.assigned
        if delta is None or is_set:
            raise HostEffectError(
                f"the step changes {path} in Python ({describe(old)}, then {describe(new)}), and a replay runs no "
                "Python. Expected a number that `+=` raises by the same amount each time, or a list that grows. Keep "
                "it in a tensor, update it outside the step, or, if replays may leave it alone, pass "
                f"allow=({path!r},)",
                component=component,
                path=path,
            )
        counters.append(Counter(path, delta))
    return tuple(counters)


def _check_stage(path: str, old: tuple[Any, Any] | None, new: tuple[Any, Any] | None) -> None:
    """Refuse a step that has one half of a gradient scaler's work.

    Raises:
        HostEffectError: naming the calls that belong together.
    """
    if any(isinstance(value, OptState) for value in (*(old or ()), *(new or ()))):
        raise HostEffectError(
            f"the step changes {path} ({describe(new)}): part of the gradient scaler's work lies outside the step, and "
            "a replay does not tell the scaler how far it came. Expected unscale_, step and update all in one step, "
            "or all outside: move them together"
        )


def _constant_delta(old: tuple[Any, Any] | None, new: tuple[Any, Any] | None) -> int | float | None:
    if old is None or new is None:
        return None
    values = (*old, *new)
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return None
    delta: int | float = old[1] - old[0]
    repeats = old[0] + delta == old[1] and new[0] + delta == new[1]
    return delta if repeats else None


def describe(pair: tuple[Any, Any] | None) -> str:
    """A change, from its first value to its second."""
    return "unchanged" if pair is None else f"{_SHORT.repr(pair[0])} to {_SHORT.repr(pair[1])}"


def find_appends(first: Trace, second: Trace, allow: Iterable[str]) -> tuple[Append, ...]:
    """Lists and deques that grew alike in both traces.

    Raises:
        HostEffectError: for one that shrank, or grew differently or elsewhere.
    """
    appends = []
    for path, (old, new) in {**first.changes.moved, **second.changes.moved}.items():
        if not is_allowed(path, allow):
            what = "shortens" if new < old else "adds to other places than the end of"
            raise HostEffectError(
                f"the step {what} {path}, from {old} to {new} items, which a replay cannot repeat: append, clear it "
                f"outside the step, or pass allow=({path!r},)",
                path=path,
            )
    for path in {**first.changes.appended, **second.changes.appended}:
        if is_allowed(path, allow):
            continue
        before, after = first.changes.appended.get(path), second.changes.appended.get(path)
        if before is None or after is None or len(before) != len(after) or not _alike(before, after):
            raise HostEffectError(
                f"the step appends {' and then '.join(told_apart(before, after, _items))} to {path}; expected tensors, "
                f"or the same values each time, since a replay repeats them. Append tensors, or pass allow=({path!r},)",
                path=path,
            )
        appends.append(Append(path, len(after)))
    return tuple(appends)


def _alike(before: list[Any], after: list[Any]) -> bool:
    (old, shape), (new, other) = pytree.tree_flatten(before), pytree.tree_flatten(after)
    return shape == other and all(map(same_value, old, new))


def _items(items: list[Any] | None) -> str:
    return "nothing" if items is None else _SHORT.repr(items)


def find_rebindings(first: Trace, second: Trace, allow: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``(carries, rebinds)``: rebound slots whose old value the step reads or whose tensors stay and get other memory,
    and the others.

    Raises:
        CarryError: if a carried slot changes shape or dtype.
        HostEffectError: if only one of the steps rebinds a slot, or shares memory that replays could not.
    """
    carries, rebinds = [], []
    used = _used(second)
    for path in {**first.changes.rebindings, **second.changes.rebindings}:
        # A number in the place of a tensor, as of a device learning rate, is a flag that the step leaves.
        if is_allowed(path, allow) or path in second.changes.flags:
            continue
        one, two = first.changes.rebindings.get(path), second.changes.rebindings.get(path)
        if two is None or (one is None and not names(path, Of.GRADIENT)):
            raise HostEffectError(
                f"the step rebinds {path} on one call and not on the next, which a replay cannot repeat: rebind it on "
                "every call, or update it in place"
            )
        dropped = names(path, Of.GRADIENT) and two.after is None
        if two.joined is not None:
            raise HostEffectError(
                f"the step gives {path} other memory ({path}.data = ...), and before or after that it shares memory "
                f"with {two.joined}; a replay leaves tensors in the memory that they have, so that what one of them "
                f"gets would show in the other, or not. Give each memory of its own, or update it in place: "
                f"{path}.data.copy_(...)"
            )
        is_read = any(place[0] in used for place in two.before or ())
        if two.moved or (is_read and not dropped):
            _check_carry(two)
            carries.append(path)
        elif two.after is not None or two.before is not None:
            rebinds.append(path)
    return tuple(carries), tuple(rebinds)


def find_replaced(carries: Iterable[str], trace: Trace) -> frozenset[str]:
    """Those of ``carries`` whose old tensors the step leaves as they are."""
    written = {storage for storage, external in trace.externals.items() if external.mutated}
    rebindings = {path: trace.changes.rebindings[path] for path in carries}
    return frozenset(
        path
        for path, rebinding in rebindings.items()
        if rebinding.plain and not rebinding.moved and written.isdisjoint(place[0] for place in rebinding.before or ())
    )


def _used(trace: Trace) -> set[int | None]:
    """Storages of what is used: by an operator, as what a slot is bound to, or as a result."""
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


def find_reads(
    first: Trace,
    second: Trace,
    walk: Walk,
    counters: Iterable[Counter],
    allow: Iterable[str],
    comparisons: Mapping[str, tuple[Comparison, ...]],
) -> tuple[str, ...]:
    """Paths of Python values that the step's code may have read and does not itself change; of those with
    ``comparisons`` it only reads how these come out.

    Raises:
        HostScalarError: for one that changes between two steps: each replay would have a stale value; and
            for what is not compared before each replay (a long buffer, list or cache, weak dictionaries).
    """
    own = {counter.path for counter in counters}
    paths: list[str] = []
    stale: dict[str, Scalar] = {}
    for trace in (first, second):
        trace.reads.unfold(trace.entry_scalars.values())
    grown = Grown(first, second, walk)
    for path, scalar in {**walk.scalars, **walk.objects}.items():
        if path in own or is_allowed(path, allow):
            continue
        if path in grown.lengths:
            look = grown.look(grown.lengths[path])
            if look is not None and not is_allowed(grown.lengths[path], allow):
                raise HostScalarError(
                    f"the step's code asks for {path}, which the step itself makes longer, or can tell it otherwise, "
                    f"at {look}; a replay would keep one length. Count in a tensor, append after the step, or, if "
                    f"the step's results do not depend on it, pass allow=({path!r},)",
                    path=path,
                )
            continue
        if grown.hides(path, scalar):
            continue
        sure = any(trace.reads.covers(scalar) for trace in (first, second))
        if not sure and not any(trace.reads.may_cover(scalar) for trace in (first, second)):
            continue
        if path not in first.entry_scalars or path not in second.entry_scalars:
            continue
        old, new = first.entry_scalars[path], second.entry_scalars[path]
        if sure:
            _check_comparable(path, new)
        if (path in walk.objects or not sure) and not same_value(old, new):
            # An object that is another one each time, or a container that grows, says nothing by itself; nor does a
            # value that perhaps was not read.
            continue
        is_steady = same_value(old, new) or come_out_alike(comparisons.get(path), old, new)
        if is_steady:
            paths.append(path)
        else:
            stale[path] = scalar
    if stale:
        _refuse_stale(stale, first, second)
    return tuple(paths)


def _check_comparable(path: str, value: Any) -> None:
    """Refuse what the step reads and no comparison before a replay would show changes of.

    Raises:
        HostEffectError: for an iterator.
        HostScalarError: for what is too long to be compared, or cannot be.
    """
    if isinstance(value, Iterator) and not isinstance(value, IOBase) and not is_proxy(value):
        raise HostEffectError(
            f"the step's code reads {path}, a {type(value).__name__}: each eager step may take its next item, and a "
            f"replay takes none. Take it before the step and feed it, or, if the step takes none, pass "
            f"allow=({path!r},)",
            path=path,
        )
    hidden = unseen(value)
    if hidden is not None:
        raise HostScalarError(
            f"the step's code reads {path}, {hidden.what} is not compared before each replay, so that a "
            f"change would go unseen. {hidden.instead}, or, if nothing changes it, pass allow=({path!r},)",
            path=path,
        )


def _refuse_stale(stale: Mapping[str, Scalar], first: Trace, second: Trace) -> NoReturn:
    """Refuse values that change between two steps, of which one may lead to another: ``allow`` takes all at once."""
    path, scalar = next(iter(stale.items()))
    before, after = told_apart(first.entry_scalars[path], second.entry_scalars[path])
    raise HostScalarError(
        f"the step's code reads {path}{_place(scalar, second)}, which is {before} before one step and {after} "
        "before the next; a replay would keep one value. Hold it in a tensor and update that in place, feed it, or, if "
        f"the step's results do not depend on it, pass allow={tuple(stale)!r}"
    )


def _place(scalar: Scalar, trace: Trace) -> str:
    """Where the step's code loads ``scalar``, if the user's does."""
    name = (scalar.via or scalar.attribute).removeprefix(".").removesuffix("[:]")
    found = find_load((code for code, _ in trace.reads.codes), name)
    return f" at {found}" if found is not None else ""


def find_assignments(
    first: Trace, second: Trace, walk: Walk, counters: Iterable[Counter], allow: Iterable[str]
) -> tuple[Assignment, ...]:
    """Values that methods of their object may have assigned without changing them (a metric's ``_computed = None``).

    The next eager step resets such a value if it was changed between two steps, so a replay resets it too.
    """
    own = {counter.path for counter in counters}
    found = []
    for path, scalar in walk.scalars.items():
        is_read_only = isinstance(scalar.container, (Numbers, Inherited, Contents, tuple))
        if path in own or is_allowed(path, allow) or is_read_only:
            continue
        if first.reads.may_store(scalar) and second.reads.may_store(scalar):
            found.append(Assignment(path, scalar.get()))
    return tuple(found)
