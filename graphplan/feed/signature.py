"""Feed signatures: flatten the arguments of a step, and build the key by which its program is found.

A key holds the structure, the geometry of each tensor, and the type and value of any other leaf. Nothing is broadcast.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from types import BuiltinMethodType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from graphplan.environment.origin import is_librarys, is_users
from graphplan.errors import DeviceError, FeedError, RefusalError
from graphplan.feed.placeholders import is_placeholder
from graphplan.tensors.attributes import (
    PLAIN_KINDS,
    attributes_on,
    has_own_functions,
    has_own_operators,
    is_freed,
)
from graphplan.tensors.dtensors import is_sharded
from graphplan.tensors.records import has_attributes
from graphplan.tensors.trees import Literals, flatten_arguments, names_of, path_of_module, rebuild, text_of

Key = tuple[Hashable, ...]
WIDEST_LOAD = 64
"""Bytes of the widest vector load of any kernel."""
_STRIDE = 16
"""Bytes of the vector loads of CUDA kernels, and the alignment that most libraries use (NumPy's arrays)."""
_PRODUCT = 100  # Rows and columns of the matrices whose products show if CPU kernels depend on the address.

_SMALL = 4096  # Maximum bytes of a pickled object that becomes part of a key.
_METHODS = (MethodType, BuiltinMethodType)  # Bound methods: each attribute access makes a new, equal object.
_LONGEST = 120  # Maximum characters of a value, a geometry or a structure in a message.

_LITERALS = (
    bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.memory_format, Literals,
)  # fmt: skip


class Unread:
    """Marker in a key for a value of which the key holds only the class."""


def alignment_unit(tensor: Tensor) -> int:
    """Return the bytes by a multiple of which an address may move without changing the bits of a result."""
    return _STRIDE if tensor.is_cuda or _are_alike() else WIDEST_LOAD


@lru_cache
def _are_alike() -> bool:
    """Return True if CPU matrix products give the same bits at all addresses that are multiples of ``_STRIDE``.
    Of the kernels that were tried, only these depend on addresses.
    """
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        for dtype in (torch.float32, torch.float64):
            memory = torch.empty(_PRODUCT**2 + WIDEST_LOAD, dtype=dtype, device="cpu")
            step, start = _STRIDE // memory.element_size(), -memory.data_ptr() % WIDEST_LOAD // memory.element_size()
            values = torch.arange(_PRODUCT**2, dtype=dtype, device="cpu").sin()
            found = []
            for at in range(start, start + WIDEST_LOAD // memory.element_size(), step):
                rows = memory[at : at + _PRODUCT**2].copy_(values).view(_PRODUCT, _PRODUCT)
                found.append((rows @ rows.T, rows[:, 1:] @ rows[0, 1:], rows[:7] @ rows.T, rows.ravel() @ rows.ravel()))
            if not all(torch.equal(*pair) for others in found[1:] for pair in zip(found[0], others, strict=True)):
                return False
    return True


def alignment(tensor: Tensor) -> int:
    """Return the address of ``tensor`` modulo the widest vector load of its device's kernels; 0 if not dense."""
    return tensor.data_ptr() % alignment_unit(tensor) if is_dense(tensor) else 0


def is_dense(tensor: Tensor) -> bool:
    """Return True if ``tensor`` has strides: it is neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


@dataclass(slots=True, eq=False)
class Feed:
    """The flattened arguments of one call: ``leaves``, and the ``key``, which begins with the structure. ``given`` are
    the arguments; ``is_moved``: the leaves do not come from ``given``. ``unread``: indices that the key leaves out.
    """

    leaves: list[Any]
    key: Key
    given: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
    is_moved: bool = field(default=False, kw_only=True)
    unread: frozenset[int] = field(default=frozenset(), kw_only=True)

    @property
    def structure(self) -> Any:
        """The structure from which the arguments are rebuilt."""
        return self.key[0]

    def replaced(self, leaves: list[Any]) -> Feed:
        """Return a feed with the same key and other ``leaves``."""
        return Feed(leaves, self.key, self.given, is_moved=True, unread=self.unread)

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``(args, kwargs)`` with ``leaves`` in place of the original ones."""
        args, kwargs = rebuild(self.structure, leaves)
        return args, kwargs

    def names(self) -> list[str]:
        """A path for every leaf, such as ``args[0]`` or ``kwargs['mask']``."""
        return names_in(self.structure)

    def __str__(self) -> str:
        return ", ".join(f"{name} {_describe(key)}" for name, key in zip(self.names(), self.key[1:], strict=True))

    def tensors(self) -> list[tuple[int, Tensor]]:
        """The tensor leaves that the step may read, with their indices."""
        return [(i, leaf) for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and i not in self.unread]

    def alignments(self) -> tuple[int, ...]:
        """The alignment of each tensor leaf, which decides the order of summation of kernels; not part of ``key``."""
        return tuple([alignment(leaf) for _, leaf in self.tensors()])


def names_in(structure: Any) -> list[str]:
    """A path for every leaf of a call's arguments."""
    args, kwargs = structure[2]
    return [*names_of(args, "args"), *names_of(kwargs, "kwargs")]


def leaf_key(leaf: Any) -> Hashable:
    """Return the part of a feed's key for one leaf. Raises FeedError if it is neither a tensor nor a literal."""
    if isinstance(leaf, Tensor):
        if not is_dense(leaf):
            # Some nested tensors have no `shape`.
            shape = (leaf.ndim,) if leaf.is_nested else leaf.shape
            return (shape, leaf.layout, leaf.dtype, leaf.device, leaf.requires_grad)
        plain = (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
        # A subclass may change what operators do, and code may read attributes: both are part of the key.
        kind, marks = type(leaf), attributes_on(leaf)
        bits = (leaf.is_conj(), leaf.is_neg())
        if kind is Tensor and not marks and not any(bits):
            return plain
        return (*plain, kind, bits, tuple([(name, _mark_key(marks[name])) for name in sorted(marks)]))
    kind = type(leaf)
    if is_keyed_by_identity(leaf):
        return (kind, leaf)
    if not isinstance(leaf, _LITERALS):
        raise _without_key(leaf)
    if not isinstance(leaf, Enum) and getattr(leaf, "__dict__", None):
        raise _with_attributes(leaf)
    # Compare bits: 0.0 equals -0.0 and NaN equals nothing, but a step may tell them apart.
    if isinstance(leaf, complex):
        return (kind, (leaf.real.hex(), leaf.imag.hex()))
    if isinstance(leaf, str):
        return (kind, leaf if kind is str or isinstance(leaf, Enum) else str.__str__(leaf))
    return (kind, leaf.hex() if isinstance(leaf, float) else leaf)


def is_keyed_by_identity(leaf: Any) -> bool:
    """Return True if a key compares ``leaf`` by identity: functions, modules and optimizers (which become owners when
    the step uses them). Comparing keys never calls the ``__eq__`` of a foreign class.
    """
    kind: Any = type(leaf)
    is_used = callable(leaf) or isinstance(leaf, Optimizer)
    return is_used and not isinstance(leaf, Enum) and (kind.__eq__ is object.__eq__ or kind in _METHODS)


class Pickled(bytes):
    """The pickled content of an object, as its key."""


def changed_object(feed: Feed) -> str | None:
    """Return the path of a fed object that is keyed by its pickled content and has changed since; None if none has."""
    keys = enumerate(feed.key[1:])
    held = ((index, key[1]) for index, key in keys if isinstance(key, tuple) and isinstance(key[-1], Pickled))
    return next((feed.names()[index] for index, content in held if _pickled(feed.leaves[index]) != content), None)


def _pickled(leaf: Any) -> Pickled | None:
    """Pickle a small object of an installed package's class, such as an index of columns. Return None for arrays (their
    values belong in tensors), for classes of the user, torch or Python, and for objects that cannot be pickled.
    """
    kind: Any = type(leaf)
    if not _is_told_by_content(kind):
        return None
    with suppress(Exception):
        content = Pickled(pickle.dumps(leaf))
        return content if len(content) <= _SMALL else None
    return None


@lru_cache(256)
def _is_told_by_content(kind: Any) -> bool:
    return not (is_users(kind) or is_librarys(kind) or hasattr(kind, "__array_interface__"))


def _without_key(leaf: Any) -> FeedError:
    path = path_of_module(leaf)
    if path:
        return FeedError(
            f"an argument of type {type(leaf).__name__} holds a module at {path}, and a replay's copy of the argument "
            "could not hold it. Remove the module from the argument and keep it on the model, or pass it beside the "
            "batch, as an item of a tuple or a dict"
        )
    is_array = hasattr(type(leaf), "__array__")
    advice = "make its class a dataclass, whose fields are part of the key, or " * is_users(type(leaf))
    advice += "pass torch.as_tensor(array), float(number) of a single number, or " * is_array + (
        ("pass tensors in dicts, tuples, lists, dataclasses or objects, or register the type with torch.utils._pytree")
        if isinstance(leaf, Iterable) or not hasattr(leaf, "__dict__")
        else "use it from the enclosing scope, and name it in owners="
    )
    return FeedError(
        f"an argument has the type {type(leaf).__name__}, which is neither a tensor nor a literal, so graphplan "
        f"cannot detect its changes: {advice}"
    )


def without_geometry(key: Sequence[Any]) -> tuple[Any, ...]:
    """Return a feed's key without the shapes, strides and devices of its tensors."""
    return (key[0], *((leaf[2], *leaf[4:]) if len(leaf) > 3 else leaf for leaf in key[1:]))


def _with_attributes(leaf: Any) -> FeedError:
    names = ", ".join(sorted(vars(leaf)))
    return FeedError(
        f"an argument of type {type(leaf).__name__} has additional attributes ({names}), and graphplan cannot detect "
        "their changes; expected a plain one: pass their values as separate arguments"
    )


def is_literal(value: Any) -> bool:
    """Return True if a key can hold ``value``."""
    if type(value) is tuple:
        return all(map(is_literal, value))
    if is_placeholder(value) or isinstance(value, Tensor):
        return False
    return isinstance(value, _LITERALS) or is_keyed_by_identity(value)


def marks_of(tensor: Tensor) -> tuple[tuple[str, Any], ...]:
    """Return the attributes of a result. A non-literal is given by its type, so that it is not kept alive. If the
    tensor's class has functions of its own, these give copies their non-literals.
    """
    held = {} if has_own_operators(tensor) else attributes_on(tensor)
    literals = {name for name, item in held.items() if is_literal(item)}
    names = literals if has_own_functions(tensor) else held
    return tuple((name, item if name in literals else type(item)) for name, item in held.items() if name in names)


def _mark_key(value: Any) -> Hashable:
    """The key of a tensor's attribute: its value if it is a literal, else its type."""
    if type(value) is tuple and is_literal(value):
        return tuple(map(_mark_key, value))
    return leaf_key(value) if is_literal(value) else (type(value),)


KeysOf = Callable[[Any, Sequence[Any]], tuple[list[Hashable], frozenset[int]]]
"""A function of a call's structure and leaves that returns the leaves' keys and the indices of those left out."""


def named_key(structure: Any, index: int, leaf: Any) -> Hashable:
    """Return the key of a leaf that is read. Raises FeedError with the leaf's path."""
    # Try to pickle first: each replayed call would otherwise build an error and discard it.
    content = None if isinstance(leaf, (Tensor, *_LITERALS)) else _pickled(leaf)
    try:
        return leaf_key(leaf) if content is None else (type(leaf), content)
    except FeedError as error:
        raise FeedError(f"{names_in(structure)[index]}: {error}") from None


def all_keys(structure: Any, leaves: Sequence[Any]) -> tuple[list[Hashable], frozenset[int]]:
    """Return the keys of all leaves; none is left out."""
    return [named_key(structure, index, leaf) for index, leaf in enumerate(leaves)], frozenset()


def no_keys(structure: Any, leaves: Sequence[Any]) -> tuple[list[Hashable], frozenset[int]]:
    """Return no keys, for a call of which only the structure and the leaves are needed."""
    return [], frozenset()


def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any], keys_of: KeysOf = all_keys) -> Feed:
    """Flatten a call. Raises FeedError for arguments that cannot be flattened or that have no key."""
    try:
        if not kwargs and all(isinstance(arg, Tensor) for arg in args):
            return Feed(list(args), (_of_tensors(len(args)), *map(leaf_key, args)), (args, kwargs))
        leaves, structure = _take_apart(args, kwargs)
        keys, unread = keys_of(structure, leaves)
    except RefusalError:
        raise
    except Exception as error:
        raise FeedError(
            f"the arguments cannot be flattened ({type(error).__name__}: {error}); expected tensors and values in "
            "containers whose code raises no errors: pass their contents as separate arguments"
        ) from error
    return Feed(leaves, (structure, *keys), (args, kwargs), unread=unread)


@lru_cache
def _of_tensors(number: int) -> Any:
    """Return the structure of a call with ``number`` positional tensors."""
    return flatten_arguments(((None,) * number, {}))[1]


def _take_apart(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Return a call's leaves, and the structure to rebuild it with."""
    leaves, structure = flatten_arguments((args, dict(kwargs)))
    for leaf in leaves:
        if has_attributes(leaf):
            raise _with_attributes(leaf)
    return leaves, structure


def with_new_containers(batch: Any) -> Any:
    """Return ``batch`` in new containers; ``batch`` itself if it cannot be flattened."""
    try:
        leaves, structure = _take_apart((batch,), {})
        (own,), _ = rebuild(structure, leaves)
    except Exception:  # noqa: BLE001 - of any container's own code
        return batch
    return own


def check_feed(feed: Feed, device: torch.device | None) -> None:
    """Raise FeedError for a leaf that a program on ``device`` could not copy in."""
    for index, leaf in feed.tensors():
        name = feed.names()[index]
        if is_sharded(leaf):
            raise FeedError(
                f"{name} is a DTensor, but a replay copies only plain tensors: pass its shard, {name}.to_local(), and "
                "create the DTensor in the step"
            )
        if leaf.is_nested:
            raise FeedError(
                f"{name} is a nested tensor, whose parts have different lengths; expected a dense (strided) tensor: "
                f"pass torch.nested.to_padded_tensor({name}, 0.0), and the lengths or a mask beside it"
            )
        if has_own_operators(leaf):
            raise FeedError(
                f"{name} is a {type(leaf).__name__}, whose __torch_dispatch__ changes the operators, but a replay "
                f"runs the recorded ones; expected a plain tensor: pass the tensor that {name} wraps, and create the "
                f"{type(leaf).__name__} in the step"
            )
        if type(leaf) not in PLAIN_KINDS and leaf.requires_grad:
            raise FeedError(
                f"{name} is a {type(leaf).__name__} that requires gradients, which a replay's copy cannot pass back; "
                f"expected a plain tensor: pass {name}.as_subclass(torch.Tensor)"
            )
        if leaf.grad_fn is not None:
            raise FeedError(
                f"{name} has a grad_fn ({type(leaf.grad_fn).__name__}): gradients would have to flow out of the step "
                f"through a copy. Expected a leaf; pass {name}.detach(), or move its computation into the step"
            )
        if leaf.layout is not torch.strided:
            raise FeedError(
                f"{name} has layout {leaf.layout}; expected a dense (strided) tensor: pass {name}.to_dense()"
            )
        if leaf.is_meta or is_freed(leaf):
            raise FeedError(
                f"{name} has no values ({'it is on the meta device' if leaf.is_meta else 'its memory was freed'}), "
                "but a replay copies values: remove it from the arguments, or pass the facts that the step needs of it"
            )
        if device is not None and leaf.device != device:
            raise DeviceError(
                f"{name} is on {leaf.device}, but the step computes on {device}; move it first, or pass "
                f"device='{device}'"
            )


def asks_for_gradients(leaf: Any) -> bool:
    """Return True if gradients may flow to ``leaf``."""
    if not isinstance(leaf, Tensor):
        return False
    return leaf.grad_fn is not None or (leaf.requires_grad and torch.is_grad_enabled())


def check_match(feed: Feed, planned: Feed) -> None:
    """Raise FeedError if the key of ``feed`` is not that of ``planned``."""
    found = first_difference(feed, planned.key)
    if found is not None:
        raise FeedError(
            f"{found[0]} in the plan: nothing is broadcast or cast. Compile a plan or capture a program for this "
            "signature"
        )


def first_difference(feed: Feed, before: Key) -> tuple[str, str] | None:
    """Describe how ``feed`` first differs from the key ``before``, with advice if only in strides; None if equal."""
    if feed.key == before:
        return None
    if len(feed.key) != len(before):
        return f"there are {len(feed.key) - 1} tensors and values, and there were {len(before) - 1}", ""
    if feed.structure != before[0]:
        one, other = (_shortened(text_of(structure)) for structure in (feed.structure, before[0]))
        return f"the structure is {one}, and was {other}", ""
    keys = zip(feed.names(), feed.key[1:], before[1:], strict=True)
    name, found, known = next(each for each in keys if each[1] != each[2])
    text = f"{name} is {_shortened(_describe(found))}, and was {_shortened(_describe(known))}"
    return text, _advice_on_strides(name, found, known)


def _advice_on_strides(name: str, found: Any, known: Any) -> str:
    """Return what to feed if two keys of a dense tensor differ in strides alone; else an empty string."""
    if min(len(found), len(known)) < 5 or (found[0], *found[2:]) != (known[0], *known[2:]):
        return ""
    # `contiguous()` ignores the stride of a dimension of size 1, and would return the same tensor.
    single = any(size == 1 and one != other for size, one, other in zip(*found[:2], known[1], strict=True))
    tensor = f"{name}.clone(memory_format=torch.contiguous_format)" if single else f"{name}.contiguous()"
    return f": only the strides differ, so pass {tensor}"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _describe(key: Hashable) -> str:
    assert isinstance(key, tuple)
    if key[0] is Unread:
        return f"a {key[1].__name__} that is not read"
    if len(key) == 2:
        value = float.fromhex(key[1]) if issubclass(key[0], float) else key[1]
        return f"the {key[0].__name__} {value!r}"
    shape, stride, dtype, device, grad, *more = key
    text = f"{dtype} {list(shape)} strides {stride} on {device}" + (" requiring grad" if grad else "")
    return text + (_describe_more(*more) if more else "")


def _describe_more(kind: type, bits: tuple[bool, bool], marks: tuple[tuple[str, tuple[Any, ...]], ...]) -> str:
    text = "" if kind is Tensor else f", a {kind.__name__}"
    text += "".join(f", {what}" for what, is_set in zip(("conjugated", "negated"), bits, strict=True) if is_set)
    return text + "".join(f", with {name} = {' '.join(map(str, key[1:] or key))}" for name, key in marks)


def shared_leaf(feed: Feed, written: Sequence[int]) -> tuple[int, int] | None:
    """Return the first index in ``written`` whose leaf shares its storage with another leaf, and that leaf's index."""
    tensors = feed.tensors()
    for index in written:
        storage = feed.leaves[index].untyped_storage()._cdata
        for other, leaf in tensors:
            if other != index and leaf.untyped_storage()._cdata == storage:
                return index, other
    return None
