"""Python values that a step's code reads: compared before each replay, or refused where they change with each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from io import IOBase
from typing import Any, NoReturn

from graphplan.effects.allowed import is_allowed
from graphplan.effects.appended_lists import Grown
from graphplan.effects.counters import Counter
from graphplan.errors import HostEffectError, HostScalarError
from graphplan.observe.comparisons import Comparison, come_out_alike
from graphplan.observe.source import find_load
from graphplan.owners.contents import is_proxy, unseen
from graphplan.owners.slots import Scalar, Walk
from graphplan.trace.changes import same_value, told_apart
from graphplan.trace.records import Trace


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
