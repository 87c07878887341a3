"""Padding calls to a capture size, in memory that a program can use as its input as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphplan.buffers import Buffers
from graphplan.errors import OptionError, PaddingError
from graphplan.inference.buckets import Ladders
from graphplan.inference.shapes import Dynamic, Names, Place, outer_first
from graphplan.program import Lease
from graphplan.signature import Feed

PadValue = float | int | bool | Callable[[Tensor, tuple[int, ...]], Tensor]


@dataclass(frozen=True, slots=True)
class Padded:
    """One call, padded: its arguments, what each dynamic dimension was and is, and the memory of the padded leaves."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    true: dict[Place, int]
    sizes: dict[Place, int]
    staged: dict[int, Tensor]

    @property
    def is_padded(self) -> bool:
        """Whether anything was added."""
        return self.true != self.sizes

    def own_part(self, index: int) -> Tensor:
        """The part of a staged leaf that is the call's own."""
        part = self.staged[index]
        for (leaf, dim), size in self.true.items():
            if leaf == index:
                part = part.narrow(dim, 0, size)
        return part


class Padding:
    """Pads the calls of one function.

    Raises:
        OptionError: for an argument that there is not.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        ladders: Ladders,
        dynamic: Dynamic,
        pad: PadValue | Mapping[str, PadValue],
        mask: str | None,
    ) -> None:
        self._ladders = ladders
        self._dynamic = dynamic
        self._names = Names(fn)
        self._pad: Mapping[str, PadValue] = pad if isinstance(pad, Mapping) else {}
        self._default: PadValue = 0 if isinstance(pad, Mapping) else pad
        for value in (*self._pad.values(), self._default):
            if not callable(value) and not isinstance(value, bool | int | float):
                raise OptionError(f"pad is {value!r}; expected a number, or a function of a tensor and a shape")
        self._names.check(self._pad, "pad")
        if mask is not None:
            self._names.check({mask: None}, "mask")
        self._mask = mask
        self._buffers = Buffers()
        self._leases: dict[Any, Lease] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that padded inputs lie in."""
        return self._buffers.nbytes

    def places(self, feed: Feed) -> list[Place]:
        """The dynamic dimensions that have a ladder."""
        return [(index, dim) for index, dim in self._dynamic.of(feed) if dim in self._ladders.dims]

    def misfit(self, feed: Feed, places: Sequence[Place]) -> str | None:
        """Why a call fits no capture size; None if it fits one."""
        for index, dim in places:
            size = feed.leaves[index].shape[dim]
            if self._ladders.round_up(dim, size) is None:
                name, largest = feed.names()[index], self._ladders.sizes(dim)[-1]
                which = "is empty" if size == 0 else f"is beyond the largest capture size {largest}"
                return f"dimension {dim} of {name} has {size} elements, which {which}"
        return None

    def pad(self, feed: Feed, places: Sequence[Place], device: torch.device | None) -> Padded:
        """A call at its capture size. ``device`` is where its tensors are to lie, if not where they are.

        Raises:
            PaddingError: if a padding function does not give what it was asked for.
        """
        roots = self._names.roots(feed)
        true = {place: feed.leaves[place[0]].shape[place[1]] for place in places}
        sizes = {place: self._ladders.round_up(place[1], size) or 0 for place, size in true.items()}
        leaves, staged = list(feed.leaves), {}
        for index in dict.fromkeys(index for index, _ in places):
            leaf = feed.leaves[index]
            dims = {dim: size for (position, dim), size in sizes.items() if position == index}
            memory = self._memory(index, leaf, dims, device or leaf.device)
            with torch.no_grad():
                self._fill(memory, leaf, dims, self._pad.get(roots[index], self._default), roots[index])
            leaves[index] = staged[index] = memory
        args, kwargs = feed.rebuild(leaves)
        if self._mask is not None and self._mask not in roots:
            kwargs = {**kwargs, self._mask: self._make_mask(feed, true, sizes, device)}
        return Padded(args, kwargs, true, sizes, staged)

    def leave(
        self, feed: Feed, places: Sequence[Place], device: torch.device | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call as it came, with a mask that hides nothing where the function wants one."""
        args, kwargs = feed.rebuild(feed.leaves)
        if self._mask is not None and places and self._mask not in self._names.roots(feed):
            index, dims = _masked(places)
            shape = [feed.leaves[index].shape[dim] for dim in dims]
            where = device or feed.leaves[index].device
            kwargs = {**kwargs, self._mask: torch.ones(shape, dtype=torch.bool, device=where)}
        return args, kwargs

    def _memory(self, position: Any, leaf: Tensor, dims: Mapping[int, int], device: torch.device) -> Tensor:
        """The memory of a leaf at its capture size; that of all sizes is one allocation."""
        shape = _resized(leaf.shape, dims)
        order = outer_first(leaf)
        key = (position, shape, order, leaf.dtype, device)
        if key not in self._leases:
            largest = _resized(leaf.shape, {dim: self._ladders.sizes(dim)[-1] for dim in dims})
            # First at its largest: smaller ones are parts of it.
            for wanted in (largest, shape):
                like = torch.empty_permuted(wanted, order, dtype=leaf.dtype, device=device)
                memory = self._buffers.view(position, like, device)
            self._leases[key] = Lease(memory, f"input {position}", writable=True)
        return self._leases[key].tensor

    def _fill(self, memory: Tensor, leaf: Tensor, dims: Mapping[int, int], pad: PadValue, name: str) -> None:
        if callable(pad):
            made = pad(leaf, tuple(memory.shape))
            if not isinstance(made, Tensor) or made.shape != memory.shape or made.dtype != memory.dtype:
                found = f"{made.dtype}{[*made.shape]}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
                raise PaddingError(
                    f"the function that pads {name} made {found} of {leaf.dtype}{[*leaf.shape]}; expected "
                    f"{memory.dtype}{[*memory.shape]}: return the tensor with elements added behind its own"
                )
            memory.copy_(made, non_blocking=True)
            return
        part = memory
        for dim, size in dims.items():
            own = leaf.shape[dim]
            if own < size:
                part.narrow(dim, own, size - own).fill_(pad)
                part = part.narrow(dim, 0, own)
        part.copy_(leaf, non_blocking=True)

    def _make_mask(
        self, feed: Feed, true: Mapping[Place, int], sizes: Mapping[Place, int], device: torch.device | None
    ) -> Tensor:
        """True for what is the call's own, over the padded dimensions of the tensor that has most of them."""
        index, dims = _masked(list(true))
        where = device or feed.leaves[index].device
        shape = tuple(sizes[index, dim] for dim in dims)
        key = ("mask", shape, where)
        if key not in self._leases:
            with torch.inference_mode(False):
                self._leases[key] = Lease(torch.zeros(shape, dtype=torch.bool, device=where), "the mask", writable=True)
        mask = self._leases[key].tensor
        with torch.no_grad():
            mask.fill_(False)
            mask[tuple(slice(true[index, dim]) for dim in dims)] = True
        return mask


def _masked(places: Sequence[Place]) -> tuple[int, list[int]]:
    """The tensor that a mask is for, and the dimensions that it has."""
    counts = Counter(index for index, _ in places)
    index = max(counts, key=counts.__getitem__)
    return index, sorted(dim for leaf, dim in places if leaf == index)


def _resized(shape: Sequence[int], dims: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(dims.get(dim, size) for dim, size in enumerate(shape))
