"""Python values that a step's code reads: compared before each replay, or refused where they change with each step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import IOBase
from types import MappingProxyType
from typing import Any, NoReturn

from graphplan.effects.allowed import allowing, is_allowed
from graphplan.effects.appended_lists import AppendedLists
from graphplan.effects.compared_numbers import find_comparisons
from graphplan.effects.inspected_tensors import find_inspected
from graphplan.errors import HostEffectError, HostScalarError
from graphplan.observe.comparisons import Comparison, come_out_alike
from graphplan.observe.source import find_load
from graphplan.owners.contents import is_proxy, unseen
from graphplan.owners.slots import Scalar, Walk
from graphplan.owners.tensor_metadata import difference
from graphplan.trace.changes import is_alike, same_value, told_apart
from graphplan.trace.records import Trace


@dataclass(frozen=True, slots=True)
class Reads:
    """What the step's code may have read of its owners and does not itself change: a replay is good for that only.

    Attributes:
        values: Python values by path, as they were before each traced step.
        comparisons: by path, those of ``values`` that are numbers which the code only compares, each with its
            comparisons: a replay is good while these come out as they did.
        metadata: what tensors are like with which no operator works, but of which the code may tell that, by path.
    """

    values: Mapping[str, Any]
    comparisons: Mapping[str, tuple[Comparison, ...]]
    metadata: Mapping[str, Any]

    @classmethod
    def find(
        cls, first: Trace, second: Trace, walk: Walk, changed: Collection[str], allow: Iterable[str], *, loose: bool
    ) -> Reads:
        """What both traces read and the step has not ``changed``, by path. ``loose``: see :func:`find_inspected`.

        Raises:
            HostScalarError: for what changes between two steps: each replay would have a stale value; and
                for what is not compared before each replay (a long buffer, list or cache, weak dictionaries).
        """
        found = cls({}, find_comparisons(first, second, walk, allow), {})
        values: dict[str, Any] = {}
        stale: dict[str, Scalar] = {}
        for trace in (first, second):
            trace.reads.unfold(trace.entry_scalars.values())
        appended = AppendedLists(first, second, walk)
        for path, scalar in {**walk.scalars, **walk.objects}.items():
            if path in changed or is_allowed(path, allow):
                continue
            if path in appended.lengths:
                _check_length(path, appended, allow)
                continue
            if appended.hides(path, scalar):
                continue
            reads = first.reads, second.reads
            sure = any(read.covers(scalar) for read in reads)
            # What is assigned to what it was is as good as read: after other calls, it may be something else.
            if not sure and not any(read.may_cover(scalar) or read.may_assign(scalar) for read in reads):
                continue
            if path not in first.entry_scalars or path not in second.entry_scalars:
                continue
            old, new = first.entry_scalars[path], second.entry_scalars[path]
            if sure:
                _check_comparable(path, new)
            if (path in walk.objects or not sure) and not same_value(old, new):
                # An object that is another one each time, or a container that grows, says nothing by itself; nor does a
                # value that perhaps was neither read nor assigned.
                continue
            if found.allow(path, old, new):
                values[path] = new
            else:
                stale[path] = scalar
        if stale:
            _refuse_stale(stale, first, second)
        comparisons = {path: made for path, made in found.comparisons.items() if path in values}
        metadata = find_inspected(first, second, walk, values, allow, appended, loose=loose)
        return cls(*map(MappingProxyType, (values, comparisons, metadata)))

    def allow(self, path: str, old: Any, new: Any) -> bool:
        """Whether the step is the same with either of two values."""
        return same_value(old, new) or come_out_alike(self.comparisons.get(path), old, new)

    def changed(self, walk: Walk, values: Mapping[str, Any], when: str = "") -> str | None:
        """Describe the first of ``values`` with which the step is not the same now, or tensor that changed."""
        for path, old in values.items():
            value = walk.value(path)
            if value is None:
                return f"{path} was {old!r}{when} and is gone"
            if not self.allow(path, old, new := value.get()):
                return f"{path} was {old!r}{when} and is {new!r}"
        for path, old in self.metadata.items():
            new = walk.metadata(path)
            if not is_alike(old, new):
                what, was, now = difference(path, old, new)
                return f"{what} was {was}{when} and is {now}"
        return None


def _check_length(path: str, appended: AppendedLists, allow: Iterable[str]) -> None:
    """Refuse the length of a list that the step makes longer, where the step's code asks for it."""
    look = appended.look(appended.lengths[path])
    if look is not None and not is_allowed(appended.lengths[path], allow):
        raise HostScalarError(
            f"the step's code asks for {path}, which the step itself makes longer, or can tell it otherwise, "
            f"at {look}; a replay would keep one length. Count in a tensor, append after the step, or, "
            f"{allowing(path)}",
            path=path,
        )


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
        "before the next; a replay would keep one value. Hold it in a tensor and update that in place, feed it, or, "
        f"{allowing(*stale)}"
    )


def _place(scalar: Scalar, trace: Trace) -> str:
    """Where the step's code loads ``scalar``, if the user's does."""
    name = (scalar.via or scalar.attribute).removeprefix(".").removesuffix("[:]")
    found = find_load((code for code, _ in trace.reads.codes), name)
    return f" at {found}" if found is not None else ""
