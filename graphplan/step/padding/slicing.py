"""Which dimensions of a padded call's results are the padded ones: learnt from calls that were also made unpadded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphplan.step.padding.shapes import Place
from graphplan.tensors.containers import flatten_plain, rebuilder
from graphplan.tensors.trees import close_records, flatten_result

Candidates = list[Place | None]
"""What a dimension may follow: dimensions of the feed, or None if its size is always the same."""


def result_leaves(result: Any) -> tuple[list[Any], Any]:
    """:func:`flatten_result` without names, and without pytree where the containers are plain."""
    try:
        _, leaves, structure = flatten_plain(result)
    except TypeError:
        named, structure = flatten_result(result)
        leaves = [leaf for _, leaf in named]
    return leaves, structure


class Slicer:
    """What is known of the results at one capture size.

    A dimension of a result that is as large as a padded dimension of the feed may follow it, or be so by chance.
    Where it would make a difference, the call is made unpadded too, which shows which of the two it is. ``known`` has
    what each dimension of each result may follow; another structure of results makes another list of it.
    """

    def __init__(self) -> None:
        self.known: list[list[Candidates]] | None = None
        self._structure: Any = None
        self._shapes: list[Any] = []

    def meet(self, leaves: Sequence[Any], structure: Any, sizes: Mapping[Place, int]) -> None:
        """Take in a padded result, the first time."""
        shapes = [leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves]
        if self.known is None or structure != self._structure or shapes != self._shapes:
            self._structure, self._shapes = structure, shapes
            self._rebuild = rebuilder(structure, close_records)
            self.known = [
                [[None, *(p for p, size in sizes.items() if size == found)] for found in leaf.shape]
                if isinstance(leaf, Tensor)
                else []
                for leaf in leaves
            ]

    def is_sure(self, true: Mapping[Place, int], sizes: Mapping[Place, int]) -> bool:
        """Whether what is known is enough to cut the results of a call of these sizes."""
        if self.known is None:
            return False
        for dims in self.known:
            for candidates in dims:
                wanted = {_size(candidate, true, sizes) for candidate in candidates}
                if len(wanted) > 1:
                    return False
        return True

    def learn(
        self, expected: Any, leaves: Sequence[Any], true: Mapping[Place, int]
    ) -> tuple[list[str], dict[str, Tensor]]:
        """What is not explained between an unpadded result and a padded one's ``leaves``, in words; and by name, what
        remains of the padded one's tensors without their padding.
        """
        assert self.known is not None
        wanted, structure = flatten_result(expected)
        if structure != self._structure:
            return [f"the results' structure is {structure} without padding, and {self._structure} with it"], {}
        problems: list[str] = []
        parts: dict[str, Tensor] = {}
        for (name, own), leaf, dims in zip(wanted, leaves, self.known, strict=True):
            if not isinstance(leaf, Tensor) or not isinstance(own, Tensor):
                if own != leaf:
                    problems.append(f"{name} is {own!r} without padding and {leaf!r} with it")
            elif own.ndim != leaf.ndim or own.dtype != leaf.dtype:
                problems.append(f"{name} is {_describe(own)} without padding and {_describe(leaf)} with it")
            else:
                part = self._narrow(name, own, leaf, dims, true)
                if isinstance(part, str):
                    problems.append(part)
                else:
                    parts[name] = part
        return problems, parts

    @staticmethod
    def _narrow(
        name: str, own: Tensor, leaf: Tensor, dims: list[Candidates], true: Mapping[Place, int]
    ) -> Tensor | str:
        """``leaf`` cut to the size of ``own``, and in ``dims`` what explains that; or why nothing does."""
        part = leaf
        for dim, candidates in enumerate(dims):
            found = own.shape[dim]
            fitting = [
                candidate
                for candidate in candidates
                if (leaf.shape[dim] if candidate is None else true[candidate]) == found
            ]
            if not fitting:
                return (
                    f"{name} is {_describe(own)} without padding and {_describe(leaf)} with it, and dimension {dim} "
                    "follows no padded dimension of the inputs"
                )
            candidates[:] = fitting
            part = part.narrow(dim, 0, found)
        return part

    def cut(self, leaves: Sequence[Any], true: Mapping[Place, int]) -> Any:
        """The results, whose ``leaves`` are padded, at their true sizes."""
        assert self.known is not None
        parts = []
        for leaf, dims in zip(leaves, self.known, strict=True):
            for dim, candidates in enumerate(dims):
                if candidates[0] is not None:
                    size = true[candidates[0]]
                    leaf = leaf if leaf.shape[dim] == size else leaf.narrow(dim, 0, size)
            parts.append(leaf)
        return self._rebuild(parts)


def _size(candidate: Place | None, true: Mapping[Place, int], sizes: Mapping[Place, int]) -> Any:
    """How much of a dimension is kept if it follows ``candidate``; None for all of it."""
    return None if candidate is None or true[candidate] == sizes[candidate] else true[candidate]


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype}{[*tensor.shape]}"


def tolerance(dtype: torch.dtype) -> float:
    """How far two results of other kernels may lie apart: kernels are chosen by size. Whole numbers are exact."""
    return 2 * torch.finfo(dtype).eps ** 0.5 if dtype.is_floating_point or dtype.is_complex else 0.0


def distance(own: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors, as a part of the largest value; infinite where only one has a number."""
    if own.numel() == 0:
        return 0.0
    one, two = own.detach(), other.detach()
    if not own.dtype.is_floating_point and not own.dtype.is_complex:
        return float((one != two).any())
    one, two = (side.to(torch.complex128 if own.dtype.is_complex else torch.float64) for side in (one, two))
    same = (one == two) | (one.isnan() & two.isnan())
    apart = torch.where(same, 0.0, (one - two).abs())
    finite = one.abs()[one.isfinite()]
    largest = float(finite.max()) if finite.numel() else 0.0
    found = float(apart.max())
    if found != found:
        return float("inf")
    return found / largest if largest else (float("inf") if found else 0.0)
