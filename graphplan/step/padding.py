"""Padding of calls to a capture size, in memory that a program can use as its input without a copy."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from graphplan.errors import FeedError, OptionError
from graphplan.feed.buffers import Buffers
from graphplan.feed.signature import Feed, flatten, no_keys
from graphplan.program.program import Program
from graphplan.program.shared_buffers import SharedBuffer, StaticOutput
from graphplan.specs.options import is_count
from graphplan.step.buckets import Dims, Ladders, PadValue
from graphplan.step.capture_sizes import CaptureSize, Place, ShapeStats
from graphplan.step.options import Options
from graphplan.tensors.storages import storage_id
from graphplan.tensors.trees import names_of, rebuilder

Value = TypeVar("Value")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_MOST_SHAPES = 65536
_MOST_SIZES = 1024
_MOST_KINDS = 4096  # Limits of the counts and caches: each literal among the arguments makes another kind of call.
_STEP = re.compile(r"\[(?:'(?P<key>[^']*)'|[^\]]*)\]|\.(?P<attribute>\w+)")
"""One step of a path into a container: ``['labels']``, ``[0]`` or ``.labels``."""


def outer_first(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions in memory order. A copy with the same order has the same memory format."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim)))


class Dynamic:
    """The dynamic dimensions of a function's arguments, by name. Default: all but the last one, or the only one."""

    def __init__(self, fn: Callable[..., Any], dims: Mapping[str, Dims] | None) -> None:
        if dims is not None and not isinstance(dims, Mapping):
            raise OptionError(
                f"dynamic is {dims!r}; expected dimensions by the name of an argument, such as {{'x': (0, 1)}}"
            )
        self._dims = {name: _parse(name, value) for name, value in (dims or {}).items()}
        forward = getattr(fn, "forward", None)
        try:
            parameters = list(inspect.signature(forward if callable(forward) else fn).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._positional = [parameter.name for parameter in parameters if parameter.kind in positional]
        self._rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), "")
        self._open = not parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self._all = [parameter.name for parameter in parameters]
        self.names = lru_cache(_MOST_KINDS)(self._names_in)
        self._checked: set[str] = set()

    def check(self, names: Iterable[str], option: str, others: Iterable[str] = ()) -> None:
        """Raise OptionError for a name that is neither a parameter nor among ``others``."""
        known = dict.fromkeys([*self._all, *others])
        unknown = [name for name in names if name not in known]
        if unknown and not self._open:
            raise OptionError(f"{option} names {unknown[0]!r}; expected one of: {', '.join(known)}")

    def _names_in(self, structure: Any) -> list[list[str]]:
        """The names of each leaf of a call, the most specific first: ``batch['labels']``, ``labels``, ``batch``."""
        (_, _, args), (_, keywords, values) = structure[2]
        roots = [*self._positional, *(self._rest for _ in args)][: len(args)]
        found = []
        for root, part in zip((*roots, *keywords), (*args, *values), strict=True):
            for path in names_of(part, root):
                names = [root]
                for step in _STEP.finditer(path, len(root)):
                    names += filter(None, (step["key"] or step["attribute"], path[: step.end()]))
                found.append(names[::-1])
        return found

    def values(self, feed: Feed, by_name: Mapping[str, Value], option: str) -> list[Value | None]:
        """The value for each leaf, by the most specific of its names, or None. A name is that of a parameter, of a key
        or attribute in it (``labels``), or a path (``batch['labels']``). Raises OptionError for a name without a leaf.
        """
        found = self.names(feed.structure)
        if option not in self._checked:
            self.check(by_name, option, (name for names in found for name in names[::-1]))
            self._checked.add(option)
        return [next((by_name[name] for name in names if name in by_name), None) for names in found]

    def of(self, feed: Feed) -> list[Place]:
        """The dynamic dimensions of a call's tensors."""
        given = self.values(feed, self._dims, "dynamic")
        places = []
        for index, leaf in feed.tensors():
            default = range(leaf.ndim - 1) if leaf.ndim > 1 else range(leaf.ndim)
            dims = given[index]
            places += [(index, dim) for dim in (default if dims is None else dims) if dim < leaf.ndim]
        return places


def _parse(name: str, value: Any) -> tuple[int, ...]:
    dims = (value,) if isinstance(value, int) else value
    if isinstance(dims, str) or not isinstance(dims, Sequence) or not all(is_count(dim, 0) for dim in dims):
        raise OptionError(f"dynamic[{name!r}] is {value!r}; expected a dimension or several, counted from 0")
    return tuple(dims)


@dataclass(slots=True)
class Kind:
    """Calls of one signature: the size of each dynamic dimension before (``true``) and after padding (``sizes``), the
    memory of padded leaves (``staged``), the call's part of it (``own``), the parts that are filled with a value
    (``fills``), and the ``mask`` argument of padded calls. ``shared``: the storages of that memory.
    """

    size: CaptureSize
    true: Mapping[Place, int]
    sizes: Mapping[Place, int]
    staged: Mapping[int, Tensor]
    own: Mapping[int, Tensor]
    fills: Sequence[tuple[Tensor, PadValue]]
    mask: Mapping[str, Tensor]
    shared: frozenset[int | None]
    rebuild: Callable[[Sequence[Any]], Any]
    _sure_of: object = None
    _versions: list[int] = field(default_factory=list)
    _gone: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(f"{true} to {self.sizes[place]}" for place, true in self.true.items()))

    @property
    def is_padded(self) -> bool:
        """Return True if any dimension is padded."""
        return self.true != self.sizes

    @property
    def is_sure(self) -> bool:
        """Return True if the results of these calls can be cut."""
        size = self.size
        if size.known is None or self._sure_of is not size.known:
            self._sure_of = size.known if size.is_sure(self.true, self.sizes) else None
        return self._sure_of is not None

    def pad(self, feed: Feed) -> Arguments:
        """Return the arguments of a call at its capture size."""
        leaves = list(feed.leaves)
        with torch.no_grad():
            for part, value in self.fills:
                part.fill_(value)
            for index, memory in self.staged.items():
                self.own[index].copy_(leaves[index], non_blocking=True)
                leaves[index] = memory
        self._versions = [memory._version for memory in self.staged.values()]
        args, kwargs = self.rebuild(leaves)
        return args, {**kwargs, **self.mask}

    def hand_back(self, feed: Feed, program: Program | None) -> None:
        """Copy the call's writes to padded arguments back to the caller's, unless ``program`` put results there."""
        shared = set() if program is None else {storage_id(buffer.tensor) for buffer in program.outputs.shared}
        self._gone = {index for index, leaf in feed.tensors() if storage_id(leaf) in shared} if shared else set()
        with torch.no_grad():
            for (index, memory), version in zip(self.staged.items(), self._versions, strict=True):
                if memory._version != version and index not in self._gone:
                    feed.leaves[index].copy_(self.own[index])

    def cut(self, feed: Feed, leaves: Sequence[Any]) -> Any:
        """Return the results at their true sizes, with copies of those in memory that the next call overwrites."""
        lasting = []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not isinstance(leaf, StaticOutput) and storage_id(leaf) in self.shared:
                whole = (index for index, memory in self.staged.items() if memory is leaf and index not in self._gone)
                index = next(whole, None)
                leaf = leaf.clone() if index is None else feed.leaves[index]
            lasting.append(leaf)
        return self.size.cut(lasting, self.true)


class Padding:
    """The padding of one function's calls, in ``buffers``, by kind of call. Raises OptionError for unknown names."""

    def __init__(self, fn: Callable[..., Any], options: Options, buffers: Buffers, stats: ShapeStats) -> None:
        assert options.buckets is not None
        self.ladders = Ladders(options.buckets)
        self._dynamic = Dynamic(fn, options.dynamic)
        self._mask, self._device, self._stats = options.mask, options.feed_device, stats
        self._pads: Mapping[str, PadValue] = options.pad if isinstance(options.pad, Mapping) else {}
        self._default: PadValue = 0 if isinstance(options.pad, Mapping) else options.pad
        for value in (*self._pads.values(), self._default):
            if not isinstance(value, bool | int | float):
                raise OptionError(f"pad is {value!r}; expected a number, or numbers by name")
        if self._mask is not None:
            self._dynamic.check([self._mask], "mask")
        self._buffers = buffers
        self._shared: dict[Any, SharedBuffer] = {}
        self._sizes: Callable[[Hashable], CaptureSize] = lru_cache(_MOST_SIZES)(lambda key: CaptureSize())
        self._kinds: dict[Hashable, Kind] = {}

    def kind(self, feed: Feed, *, are_expected: bool) -> Kind | str:
        """Return how calls like this one are padded, or why not. Raises OptionError for a ladder that is never used."""
        kind = self._kinds.get(feed.key)
        if kind is not None:
            return kind
        places = self._places(feed, are_expected=are_expected)
        misfit = self._misfit(feed, places)
        if misfit is not None:
            return misfit
        if len(self._kinds) >= _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        kind = self._kinds[feed.key] = self._learn(feed, places)
        return kind

    def _places(self, feed: Feed, *, are_expected: bool = False) -> list[Place]:
        """The dynamic dimensions that have a ladder of capture sizes."""
        places = [(index, dim) for index, dim in self._dynamic.of(feed) if dim in self.ladders.dims]
        padded = {dim for _, dim in places}
        missing = [dim for dim in self.ladders.dims if dim not in padded and (places or are_expected)]
        if missing:
            raise OptionError(
                f"buckets has sizes for dimension {missing[0]}, but no argument ({', '.join(feed.names())}) has it as "
                "a dynamic dimension; expected one that may vary: by default, the last of several dimensions may not. "
                f"Name it: dynamic={{'argument': ({missing[0]},)}}"
            )
        return places

    def _misfit(self, feed: Feed, places: Sequence[Place]) -> str | None:
        """Return why a call fits no capture size; None if it fits one."""
        if not places:
            return "no argument has a dimension with capture sizes"
        for index, dim in places:
            size = feed.leaves[index].shape[dim]
            if self.ladders.round_up(dim, size) is None:
                name, largest = feed.names()[index], self.ladders.sizes(dim)[-1]
                which = "is empty" if size == 0 else f"is beyond the largest capture size {largest}"
                return f"dimension {dim} of {name} has {size} elements, which {which}"
        return None

    @torch.inference_mode(False)
    def _learn(self, feed: Feed, places: Sequence[Place]) -> Kind:
        """Allocate the memory for a new kind of calls."""
        pads, leaves = self._dynamic.values(feed, self._pads, "pad"), feed.leaves
        staged: dict[int, Tensor] = {}
        mask: dict[str, Tensor] = {}
        fills: list[tuple[Tensor, PadValue]] = []
        for index in dict.fromkeys(index for index, _ in places):
            dims, pad = {dim: dim for position, dim in places if position == index}, pads[index]
            staged[index] = self._memory(index, leaves[index], dims)
            pad = self._default if pad is None else pad
            fills += [(gap, pad) for gap in _gaps(staged[index], leaves[index])]
        wanted = self._wanted_mask(feed, places)
        if self._mask is not None and wanted is not None:
            whole = mask[self._mask] = self._memory("mask", *wanted)
            fills += [*((gap, False) for gap in _gaps(whole, wanted[0])), (_begin(whole, wanted[0]), True)]
        own = {index: _begin(memory, leaves[index]) for index, memory in staged.items()}
        true, sizes = ({(index, dim): of[index].shape[dim] for index, dim in places} for of in (leaves, staged))
        shared = frozenset(map(storage_id, (*staged.values(), *mask.values())))
        size = self._size(feed, staged)
        return Kind(size, true, sizes, staged, own, fills, mask, shared, rebuilder(feed.structure))

    def _size(self, feed: Feed, staged: Mapping[int, Tensor]) -> CaptureSize:
        """The capture size of calls that are padded to the ``staged`` tensors."""
        others = [key for index, key in enumerate(feed.key[1:]) if index not in staged]
        key = (feed.key[0], *others, *((memory.shape, memory.dtype) for memory in staged.values()))
        if len(self._stats.shapes) < _MOST_SHAPES:
            self._stats.shapes.add((feed.key[0], *others, *(feed.leaves[index].shape for index in staged)))
            self._stats.capture_sizes.add(key)
        return self._sizes(key)

    def _memory(self, position: Hashable, leaf: Tensor, dims: Mapping[int, int]) -> Tensor:
        """The memory of a leaf at its capture size, in one shared allocation. ``dims`` maps dimensions to ladders."""
        order, device = outer_first(leaf), self._device or leaf.device
        largest, shape = list(leaf.shape), list(leaf.shape)
        for dim, ladder in dims.items():
            largest[dim], shape[dim] = self.ladders.sizes(ladder)[-1], self.ladders.round_up(ladder, shape[dim]) or 0
        key = (position, tuple(shape), order, leaf.dtype, device)
        if key not in self._shared:
            for size in (largest, shape):
                like = torch.empty_permuted(size, order, dtype=leaf.dtype, device=device)
                memory = self._buffers.view(position, like, device)
            self._shared[key] = SharedBuffer(memory, f"input {position}", writable=True)
        return self._shared[key].tensor

    def _wanted_mask(self, feed: Feed, places: Sequence[Place]) -> tuple[Tensor, dict[int, int]] | None:
        """A mask of ones for the tensor with most padded dimensions, and their ladders; None if no mask is needed."""
        given = {names[-1] for names in self._dynamic.names(feed.structure)}
        if self._mask is None or not places or self._mask in given:
            return None
        index = Counter(index for index, _ in places).most_common(1)[0][0]
        dims, leaf = sorted(dim for position, dim in places if position == index), feed.leaves[index]
        shape = [leaf.shape[dim] for dim in dims]
        return torch.ones(shape, dtype=torch.bool, device=self._device or leaf.device), dict(enumerate(dims))

    def leave(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """The arguments of an unpadded call, with a mask of ones if the function takes a mask."""
        wanted = None
        if self._mask is not None:
            with suppress(FeedError):
                feed = flatten(args, kwargs, no_keys)
                wanted = self._wanted_mask(feed, self._places(feed))
        return args, dict(kwargs) if wanted is None else {**kwargs, str(self._mask): wanted[0]}


def _begin(whole: Tensor, leaf: Tensor) -> Tensor:
    """The part of ``whole`` that ``leaf`` occupies."""
    return whole[tuple(map(slice, leaf.shape))]


def _gaps(whole: Tensor, leaf: Tensor) -> Iterator[Tensor]:
    """The parts of ``whole`` that ``leaf`` does not occupy."""
    for dim, size in enumerate(leaf.shape):
        if size < whole.shape[dim]:
            yield whole.narrow(dim, size, whole.shape[dim] - size)
        whole = whole.narrow(dim, 0, size)
