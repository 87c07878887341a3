"""The containers that a step is fed. Python code gets the caller's own, and changes of them are found.

A replay knows tensors only: it could not put something into a container, or take it out, as an eager call does.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from graphplan.feed.placeholders import is_placeholder
from graphplan.feed.signature import Feed, is_literal, leaf_key, named_arguments
from graphplan.tensors.records import base_of, fill_record, is_record, record_values
from graphplan.tensors.trees import PLAIN_LEAVES

Result = TypeVar("Result")
_Called = TypeVar("_Called", bound=Callable[..., Any])
BATCH_READS = "read before the step"
"""The name of an argument that a step's function does not get: what was read of the batch on its behalf."""
_HANDS_OVER: dict[int, CodeType] = {}
"""By identity: to hash a code object takes as long as it has instructions."""
Contents = dict[Any, Any]
_ADVICE = (
    ". A replay computes with the tensors that are fed, and would leave the container as it is. Return the value "
    "instead, change a copy (batch = dict(batch)), or hold the container on an object that is an owner"
)


def hands_over(run: _Called) -> _Called:
    """Mark ``run`` as a function that calls the user's code: an error that passes it is the user's own."""
    _HANDS_OVER[id(run.__code__)] = run.__code__
    return run


def is_callers(error: BaseException) -> bool:
    """Return True if ``error`` was raised by the user's code (see :func:`hands_over`)."""
    trace = error.__traceback__
    while trace is not None and id(trace.tb_frame.f_code) not in _HANDS_OVER:
        trace = trace.tb_next
    return trace is not None


@hands_over
def call_step(fn: Callable[..., Result], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Result:
    """Call a step's function. All calls of it are made here, but for those of a step that stands down."""
    if BATCH_READS in kwargs:
        kwargs = {name: value for name, value in kwargs.items() if name != BATCH_READS}
    return fn(*args, **kwargs)


@dataclass(slots=True)
class _Container:
    """A container and what it held. What pytree does not find in a node ``is_hidden``: put back, and not compared."""

    path: str
    node: Any
    before: Contents
    is_hidden: bool = False

    def change(self) -> str | None:
        """Describe the first difference from what it held; None if there is none."""
        now = _contents(self.node) or {}
        if self.is_hidden or _are_same(self.before, now):
            return None
        if len(now) != len(self.before) and not is_record(self.node):
            number = len(self.before)
            return f"{self.path} had {number} item{'' if number == 1 else 's'}, and has {len(now)}"
        for key in (*self.before, *now):
            place = _place(self.path, self.node, key)
            if key not in now:
                return f"{place} was there, and is gone"
            if key not in self.before:
                return f"{place} was not there, and is"
            if not _is_same(self.before[key], now[key]):
                return _describe(place, self.before[key], now[key])
        return None


class CallArguments:
    """What a step is called with."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self._containers: list[_Container] = []

    @classmethod
    def of(cls, feed: Feed) -> CallArguments:
        """The caller's own containers, or new ones where the feed's tensors lie on another device than the caller's."""
        return cls(*(feed.rebuild(feed.leaves) if feed.given is None or feed.is_moved else feed.given))

    def watch(self) -> CallArguments:
        """Note what the containers hold."""
        seen: set[int] = set()
        named = named_arguments(self.args, self.kwargs)
        self._containers = [found for path, arg in named for found in _containers_in(path, arg, seen)]
        return self

    def change(self) -> str | None:
        """Describe the first container that was changed since :meth:`watch`; None if none was."""
        found = next((text for container in self._containers if (text := container.change())), None)
        return None if found is None else f"the step changes a container that it is fed: {found}{_ADVICE}"

    def objects(self) -> list[Any]:
        """The containers."""
        return [container.node for container in self._containers]

    def restore(self) -> None:
        """Restore what all containers held when :meth:`watch` was called."""
        for container in self._containers:
            now = _contents(container.node) or {}
            if list(container.before) != list(now) or any(now[key] is not old for key, old in container.before.items()):
                _fill(container.node, container.before)


def _containers_in(path: str, node: Any, seen: set[int]) -> Iterator[_Container]:
    """The containers at ``path`` and below."""
    contents = _contents(node)
    if contents is None or id(node) in seen:
        return
    seen.add(id(node))
    if not isinstance(node, tuple):
        yield _Container(path, node, contents)
    for key, value in contents.items():
        yield from _containers_in(_place(path, node, key), value, seen)
    if _is_registered(node) and hasattr(node, "__dict__"):
        attributes = vars(node)
        for name, value in {"__dict__": attributes, **attributes}.items():
            if isinstance(value, (list, dict)) and id(value) not in seen:
                seen.add(id(value))
                yield _Container(f"{path}.{name}", value, _contents(value) or {}, is_hidden=True)


def _is_registered(node: Any) -> bool:
    """Whether only pytree knows what ``node`` holds."""
    return not isinstance(node, (dict, list, tuple, deque)) and type(node) in pytree.SUPPORTED_NODES


def _contents(node: Any) -> Contents | None:
    """What a container holds, by key, number or name; None for what is none."""
    if type(node) in PLAIN_LEAVES or is_placeholder(node) or isinstance(node, Tensor):
        return None
    # What its class makes of being gone through is not asked.
    if isinstance(node, dict):
        return dict(dict.items(node))
    kind: Any
    for kind in (list, tuple, deque):
        if isinstance(node, kind):
            return dict(enumerate(kind.__iter__(node)))
    if is_record(node):
        return record_values(node)
    leaves = pytree.tree_leaves(node, is_leaf=lambda part: part is not node)
    return None if len(leaves) == 1 and leaves[0] is node else dict(enumerate(leaves))


def _place(path: str, node: Any, key: Any) -> str:
    items = isinstance(node, (dict, list, tuple, deque)) or type(node) in pytree.SUPPORTED_NODES
    return f"{path}[{key!r}]" if items else f"{path}.{key}"


def _fill(node: Any, contents: Contents) -> None:
    """Let ``node`` hold ``contents``, and nothing else."""
    if isinstance(node, dict):
        # Subclasses may forbid it.
        kind: Any = OrderedDict if isinstance(node, OrderedDict) else dict
        kind.clear(node)
        for key, value in contents.items():
            kind.__setitem__(node, key, value)
    elif isinstance(node, (list, deque)):
        node.clear()
        node.extend(contents.values())
    elif is_record(node) or base_of(type(node)) is not None:
        now = record_values(node)
        for name in now.keys() - contents.keys():
            object.__delattr__(node, name)
        fill_record(node, {name: value for name, value in contents.items() if now.get(name, contents) is not value})


def _are_same(one: Contents, other: Contents) -> bool:
    return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())


def _is_same(one: Any, other: Any) -> bool:
    """Return True if two values are the same object, or equal containers or literals."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, Tensor):
        return False
    inner, others = _contents(one), _contents(other)
    if inner is not None and others is not None:
        return _are_same(inner, others)
    return is_literal(one) and leaf_key(one) == leaf_key(other)


def _describe(place: str, old: Any, new: Any) -> str:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return f"{place} is another tensor than it was"
    one, other = (repr(v) if is_literal(v) and not callable(v) else f"a {type(v).__name__}" for v in (old, new))
    return f"{place} was {one}, and is {other}"
