"""Padding calls to a capture size, in memory that a program can use as its input as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphplan.errors import OptionError, PaddingError
from graphplan.feed.buffers import Buffers
from graphplan.feed.call_arguments import hands_over
from graphplan.feed.signature import Feed
from graphplan.program.leases import Lease
from graphplan.step.padding.buckets import Ladders
from graphplan.step.padding.shapes import Dynamic, Named, Names, Place, outer_first

PadValue = float | int | bool | Callable[[Tensor, tuple[int, ...]], Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """How calls of one signature are padded: what each dynamic dimension is and becomes, and where the leaves go.

    ``staged`` is the memory of the padded leaves, ``own`` the part of it that is the call's own, ``rests`` what is
    filled with which value. ``makers`` pad leaves their own way. ``mask`` is the mask and the part of it that is true.
    """

    places: Sequence[Place]
    true: Mapping[Place, int]
    sizes: Mapping[Place, int]
    staged: Mapping[int, Tensor]
    own: Mapping[int, Tensor]
    rests: Sequence[tuple[Tensor, float | int | bool]]
    makers: Mapping[int, tuple[Callable[[Tensor, tuple[int, ...]], Tensor], str]]
    mask: tuple[Tensor, Tensor] | None

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(f"{true} to {self.sizes[place]}" for place, true in self.true.items()))

    @property
    def is_padded(self) -> bool:
        """Whether anything is added."""
        return self.true != self.sizes


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
        by_name: Mapping[str, PadValue] = pad if isinstance(pad, Mapping) else {}
        self._default: PadValue = 0 if isinstance(pad, Mapping) else pad
        for value in (*by_name.values(), self._default):
            if not callable(value) and not isinstance(value, bool | int | float):
                raise OptionError(f"pad is {value!r}; expected a number, or a function of a tensor and a shape")
        self._pad = Named(self._names, by_name, "pad")
        if mask is not None:
            self._names.check([mask], "mask")
        self._mask = mask
        self._buffers = Buffers()
        self._leases: dict[Any, Lease] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that padded inputs lie in."""
        return self._buffers.nbytes

    def places(self, feed: Feed, *, are_expected: bool = False) -> list[Place]:
        """The dynamic dimensions that have a ladder: what may be padded, of which there have to be some if they
        ``are_expected``.

        Raises:
            OptionError: for a ladder that nothing is ever padded by, naming its dimension.
        """
        places = [(index, dim) for index, dim in self._dynamic.of(feed) if dim in self._ladders.dims]
        missing = [
            dim for dim in self._ladders.dims if (places or are_expected) and all(dim != padded for _, padded in places)
        ]
        if missing:
            raise OptionError(
                f"buckets has sizes for dimension {missing[0]}, which is a dynamic one of none of the arguments "
                f"({', '.join(feed.names())}); expected one that may vary: by default, the last of several may not. "
                f"Name it: dynamic={{'argument': ({missing[0]},)}}"
            )
        return places

    def misfit(self, feed: Feed, places: Sequence[Place]) -> str | None:
        """Why a call fits no capture size; None if it fits one."""
        if not places:
            return "none of the arguments has a dimension with a ladder"
        for index, dim in places:
            size = feed.leaves[index].shape[dim]
            if self._ladders.round_up(dim, size) is None:
                name, largest = feed.names()[index], self._ladders.sizes(dim)[-1]
                which = "is empty" if size == 0 else f"is beyond the largest capture size {largest}"
                return f"dimension {dim} of {name} has {size} elements, which {which}"
        return None

    @torch.inference_mode(False)
    def layout(self, feed: Feed, places: Sequence[Place], device: torch.device | None) -> Layout:
        """How calls like this one are padded. ``device`` is where their tensors are to lie, if not where they are."""
        roots, pads = self._names.roots(feed), self._pad.of(feed)
        true = {place: feed.leaves[place[0]].shape[place[1]] for place in places}
        sizes = {place: self._ladders.round_up(place[1], size) or 0 for place, size in true.items()}
        staged, own, rests, makers = {}, {}, [], {}
        for index in dict.fromkeys(index for index, _ in places):
            leaf, name = feed.leaves[index], roots[index]
            dims = {dim: size for (position, dim), size in sizes.items() if position == index}
            part = staged[index] = self._memory(index, leaf, dims, device or leaf.device)
            given = pads[index]
            pad = self._default if given is None else given
            for dim, size in dims.items():
                filled = leaf.shape[dim]
                if filled < size and not callable(pad):
                    rests.append((part.narrow(dim, filled, size - filled), pad))
                part = part.narrow(dim, 0, filled)
            own[index] = part
            if callable(pad):
                makers[index] = (pad, name)
        mask = None
        if self._mask is not None and self._mask not in roots:
            mask = self._make_mask(feed, true, sizes, device)
        return Layout(places, true, sizes, staged, own, rests, makers, mask)

    def pad(self, feed: Feed, layout: Layout) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call at its capture size.

        Raises:
            PaddingError: if a padding function does not give what it was asked for.
        """
        leaves = list(feed.leaves)
        with torch.no_grad():
            for rest, value in layout.rests:
                rest.fill_(value)
            for index, memory in layout.staged.items():
                if index in layout.makers:
                    memory.copy_(_made(*layout.makers[index], leaves[index], memory), non_blocking=True)
                else:
                    layout.own[index].copy_(leaves[index], non_blocking=True)
                leaves[index] = memory
            if layout.mask is not None:
                mask, part = layout.mask
                mask.fill_(False)
                part.fill_(True)
        args, kwargs = feed.rebuild(leaves)
        if layout.mask is not None and self._mask is not None:
            kwargs = {**kwargs, self._mask: layout.mask[0]}
        return args, kwargs

    def leave(
        self, feed: Feed, places: Sequence[Place], device: torch.device | None
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments of a call as it came, with a mask that hides nothing where the function wants one."""
        args, kwargs = feed.given or feed.rebuild(feed.leaves)
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

    def _make_mask(
        self, feed: Feed, true: Mapping[Place, int], sizes: Mapping[Place, int], device: torch.device | None
    ) -> tuple[Tensor, Tensor]:
        """A mask over the padded dimensions of the tensor that has most of them, and its part for what is real."""
        index, dims = _masked(list(true))
        where = device or feed.leaves[index].device
        shape = tuple(sizes[index, dim] for dim in dims)
        key = ("mask", shape, where)
        if key not in self._leases:
            self._leases[key] = Lease(torch.zeros(shape, dtype=torch.bool, device=where), "the mask", writable=True)
        mask = self._leases[key].tensor
        return mask, mask[tuple(slice(true[index, dim]) for dim in dims)]


@hands_over
def _made(pad: Callable[[Tensor, tuple[int, ...]], Tensor], name: str, leaf: Tensor, memory: Tensor) -> Tensor:
    """What the function ``pad`` makes of a leaf.

    Raises:
        PaddingError: if that is not what it was asked for.
    """
    made = pad(leaf, tuple(memory.shape))
    if not isinstance(made, Tensor) or made.shape != memory.shape or made.dtype != memory.dtype:
        found = f"{made.dtype}{[*made.shape]}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
        raise PaddingError(
            f"the function that pads {name} made {found} of {leaf.dtype}{[*leaf.shape]}; expected "
            f"{memory.dtype}{[*memory.shape]}: return the tensor with elements added behind its own"
        )
    return made


def _masked(places: Sequence[Place]) -> tuple[int, list[int]]:
    """The tensor that a mask is for, and the dimensions that it has."""
    counts = Counter(index for index, _ in places)
    index = max(counts, key=counts.__getitem__)
    return index, sorted(dim for leaf, dim in places if leaf == index)


def _resized(shape: Sequence[int], dims: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(dims.get(dim, size) for dim, size in enumerate(shape))
