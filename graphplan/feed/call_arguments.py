"""The containers that a step is fed. Python code gets the caller's own containers, and changes to them are detected.

A replay works on tensors only: it cannot insert items into a container or remove them, as an eager call does.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from graphplan.environment.origin import Codes
from graphplan.feed.placeholders import is_placeholder
from graphplan.feed.signature import Feed, is_literal, leaf_key, names_in
from graphplan.tensors.records import base_of, fill_record, is_record, record_values
from graphplan.tensors.trees import PLAIN_LEAVES, GivenNumber, flatten_arguments, text_of

Result = TypeVar("Result")
BATCH_READS = "read before the step"
"""Keyword argument for values that were read from the batch before the step; the step's function does not get it."""
_HANDS_OVER = Codes()
hands_over = _HANDS_OVER.mark
"""Decorator for a function that calls the user's code: an error that passes through it is the user's own."""
Contents = dict[Any, Any]
Changes = tuple[dict[int, Contents], dict[int, list[Any]]]
_CHANGES = "the step changes a container among its arguments: "
_ADVICE = (
    ". A replay uses only the tensors of its arguments and would not change the container. Return the value instead, "
    "change a copy (batch = dict(batch)), or keep the container on an object that is an owner"
)


def is_callers(error: BaseException) -> bool:
    """Return True if ``error`` was raised by the user's code (see :data:`hands_over`)."""
    trace = error.__traceback__
    while trace is not None and id(trace.tb_frame.f_code) not in _HANDS_OVER:
        trace = trace.tb_next
    return trace is not None


@hands_over
def call_step(fn: Callable[..., Result], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Result:
    """Call a step's function. All calls are made here, except those of a step that has stood down."""
    args, kwargs = own_arguments(args, kwargs)
    return fn(*args, **kwargs)


def own_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for the step's function: each ``GivenNumber`` is replaced by its number."""
    own = {name: _own(value) for name, value in kwargs.items() if name != BATCH_READS}
    return tuple(map(_own, args)), own


def _own(argument: Any) -> Any:
    return argument.value if type(argument) is GivenNumber else argument


class CallArguments:
    """The arguments of one call of a step."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self._containers: list[tuple[Any, Contents]] = []  # Each with its contents at `watch`.

    @classmethod
    def of(cls, feed: Feed) -> CallArguments:
        """Return the caller's own containers, or rebuilt ones if the leaves differ: moved tensors, placeholders."""
        return cls(*(feed.rebuild(feed.leaves) if feed.given is None or feed.is_moved else feed.given))

    def watch(self) -> CallArguments:
        """Record the contents of all containers."""
        self._containers = [found for arg in (*self.args, *self.kwargs.values()) for found in _containers_in(arg)]
        self._before = flatten_arguments((self.args, dict(self.kwargs)))
        return self

    def change(self) -> str | None:
        """Describe the first change of a container since :meth:`watch`; None if there is none."""
        (leaves, structure), (old, before) = flatten_arguments((self.args, dict(self.kwargs))), self._before
        if structure == before and all(map(_is_same, old, leaves)):
            return None
        was, now = dict(zip(names_in(before), old, strict=True)), dict(zip(names_in(structure), leaves, strict=True))
        for path in (*was, *now):
            if path not in now:
                return f"{_CHANGES}{_describe_gone(path, was[path], list(now))}{_ADVICE}"
            if path not in was:
                return f"{_CHANGES}{path} was added{_ADVICE}"
            if not _is_same(was[path], now[path]):
                return f"{_CHANGES}{_describe(path, was[path], now[path])}{_ADVICE}"
        if _unordered(structure) == _unordered(before):
            return None
        return f"{_CHANGES}{text_of(before)} became {text_of(structure)}{_ADVICE}"

    def changes(self) -> Changes:
        """Return new items since :meth:`watch` and the keys of changed containers, both by container number."""
        found: Changes = {}, {}
        for number, (node, before) in enumerate(self._containers):
            now = _contents(node) or {}
            put = {key: value for key, value in now.items() if key not in before or not _is_same(before[key], value)}
            if put or list(now) != list(before):
                found[0][number], found[1][number] = put, list(now)
        return found

    def take(self, changes: Changes) -> None:
        """Apply ``changes`` that were found in other containers with the same contents."""
        puts, keys = changes
        for number, put in puts.items():
            node, before = self._containers[number]
            _fill(node, {key: put[key] if key in put else before[key] for key in keys[number]})

    def objects(self) -> list[Any]:
        """The containers."""
        return [node for node, _ in self._containers]

    def restore(self) -> None:
        """Restore the contents that all containers had at :meth:`watch`."""
        for node, before in self._containers:
            now = _contents(node) or {}
            if list(before) != list(now) or any(now[key] is not old for key, old in before.items()):
                _fill(node, before)


def _containers_in(node: Any, around: frozenset[int] = frozenset()) -> Iterator[tuple[Any, Contents]]:
    """Yield ``node`` and the mutable containers in it with their contents; skip the containers ``around`` it."""
    contents = _contents(node)
    if contents is None or id(node) in around:
        return
    around |= {id(node)}
    if not isinstance(node, tuple):
        yield node, contents
    for value in contents.values():
        yield from _containers_in(value, around)
    if not isinstance(node, (dict, list, tuple, deque)) and type(node) in pytree.SUPPORTED_NODES:
        # pytree does not flatten these attributes: they are restored, but not compared.
        held = getattr(node, "__dict__", {})
        for value in (held, *held.values()):
            if isinstance(value, (list, dict)):
                yield value, _contents(value) or {}


def _contents(node: Any) -> Contents | None:
    """Return the contents of a container by key, index or name; None if ``node`` is no container."""
    if type(node) in PLAIN_LEAVES or is_placeholder(node) or isinstance(node, Tensor):
        return None
    # Use the base class's methods: a subclass may iterate otherwise.
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


def _fill(node: Any, contents: Contents) -> None:
    """Replace the contents of ``node`` with ``contents``."""
    if isinstance(node, dict):
        # Use the base class's methods: a subclass may forbid changes.
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


def _unordered(structure: Any) -> Any:
    """Return the structure without the order of dict keys."""
    if structure is None:
        return None
    kind, label, parts = structure[0], structure[1], list(map(_unordered, structure[2]))
    return (kind, dict(zip(label, parts, strict=True))) if kind is dict else (kind, label, parts)


def _is_same(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other) or isinstance(one, Tensor):
        return one is other
    return is_literal(one) and leaf_key(one) == leaf_key(other)


def _describe_gone(path: str, old: Any, now: Sequence[str]) -> str:
    """Describe the leaf ``old`` whose ``path`` is not in ``now``: it is gone, or an object that now holds tensors."""
    new = [name.removeprefix(path) for name in now if name.startswith((f"{path}.", f"{path}["))]
    if not new:
        return f"{path} was removed"
    more = f" and {len(new) - 2} more" if len(new) > 2 else ""
    what = "" if is_literal(old) else " without tensors"
    return f"{path} was {_text(old)}{what}, and has {', '.join(new[:2])}{more} now"


def _describe(path: str, old: Any, new: Any) -> str:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return f"{path} was replaced by another tensor"
    return f"{path} was {_text(old)} and is now {_text(new)}"


def _text(leaf: Any) -> str:
    return repr(leaf) if is_literal(leaf) and not callable(leaf) else f"a {type(leaf).__name__}"
