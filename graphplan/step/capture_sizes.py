"""Records of capture sizes: the calls, the padded dimensions of their results, and the next check of each size."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from graphplan.program.program import Program
from graphplan.tensors.trees import flatten_result, names_of, rebuilder, text_of
from graphplan.verify.schedule import Timetable

Place = tuple[int, int]  # The index of a leaf, and one of its dimensions.
Candidates = list[Place | None]
"""The dimensions of the feed whose size a dimension of a result may have; None stands for a constant size."""


@dataclass(slots=True)
class ShapeStats:
    """Counts of shapes, capture sizes, padded calls and elements of inputs."""

    checked: int = 0
    shapes: set[Hashable] = field(default_factory=set)
    capture_sizes: set[Hashable] = field(default_factory=set)
    padded_calls: int = 0
    unpadded_elements: int = 0
    padded_elements: int = 0

    def count(self, own: Iterable[Tensor], staged: Iterable[Tensor]) -> None:
        """Count one call whose ``own`` tensors were padded to the ``staged`` ones."""
        fed, padded = (sum(tensor.numel() for tensor in tensors) for tensors in (own, staged))
        self.padded_calls += padded > fed
        self.unpadded_elements += fed
        self.padded_elements += padded

    @property
    def padding(self) -> float:
        """The ratio of elements after padding to elements that were fed."""
        return self.padded_elements / self.unpadded_elements if self.unpadded_elements else 1.0

    def __str__(self) -> str:
        return (
            f"padding: {len(self.shapes)} shapes on {len(self.capture_sizes)} capture sizes; {self.padded_calls} "
            f"calls padded; {self.padding:.2f} elements for each that was fed; {self.checked} calls compared with "
            "unpadded ones"
        )

    def data(self) -> dict[str, Any]:
        """The counts as plain data."""
        counts = {name: getattr(self, name) for name in self.__slots__}
        sets = {"shapes": len(self.shapes), "capture_sizes": len(self.capture_sizes)}
        return {**counts, **sets, "padding": self.padding}


class CaptureSize:
    """One capture size: its calls, its next check, and the programs that were ``checked`` against unpadded calls.

    A result's dimension that has a padded input dimension's size may follow it, or match by chance. ``known`` has the
    candidates for each dimension of each result. If they disagree for a call, it also runs unpadded to exclude some.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.next_check = 1
        self.timetable: Timetable | None = None
        self.checked: WeakSet[Program] = WeakSet()
        self.known: list[list[Candidates]] | None = None
        self._structure: Any = None
        self._shapes: list[Any] = []

    def meet(self, result: Any, sizes: Mapping[Place, int]) -> list[Any]:
        """Return the leaves of a padded result. If its structure or shapes are new, restart with all candidates."""
        leaves, structure = flatten_result(result)
        shapes = [leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves]
        if self.known is None or structure != self._structure or shapes != self._shapes:
            self._structure, self._shapes = structure, shapes
            self._rebuild = rebuilder(structure)
            self.known = [
                [[None, *(place for place, size in sizes.items() if size == found)] for found in shape or ()]
                for shape in shapes
            ]
        return leaves

    def is_sure(self, true: Mapping[Place, int], sizes: Mapping[Place, int]) -> bool:
        """Return True if all candidates agree on how to cut the results of a call with these sizes."""

        def kept(candidate: Place | None) -> int | None:
            return None if candidate is None or true[candidate] == sizes[candidate] else true[candidate]

        if self.known is None:
            return False
        return all(len(set(map(kept, candidates))) <= 1 for dims in self.known for candidates in dims)

    def learn(
        self, expected: Any, leaves: Sequence[Any], true: Mapping[Place, int]
    ) -> tuple[list[str], dict[str, tuple[Tensor, Tensor]]]:
        """Compare an unpadded result with padded ``leaves``. Return differences, and pairs of tensors of equal size."""
        assert self.known is not None
        wanted, structure = flatten_result(expected)
        if structure != self._structure:
            structures = f"{text_of(structure)} without padding, and {text_of(self._structure)} with it"
            return [f"the results' structure is {structures}"], {}
        problems: list[str] = []
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name, own, leaf, dims in zip(names_of(structure, "result"), wanted, leaves, self.known, strict=True):
            if isinstance(leaf, Tensor) and isinstance(own, Tensor):
                part = _narrow(own, leaf, dims, true)
                if isinstance(part, Tensor):
                    pairs[name] = own, part
                else:
                    problems.append(f"{name} is {_describe(own)} without padding and {_describe(leaf)} with it{part}")
            elif own != leaf:
                problems.append(f"{name} is {own!r} without padding and {leaf!r} with it")
        return problems, pairs

    def cut(self, leaves: Sequence[Any], true: Mapping[Place, int]) -> Any:
        """Return the results with their padded ``leaves`` cut to their true sizes."""
        assert self.known is not None
        parts = []
        for leaf, dims in zip(leaves, self.known, strict=True):
            for dim, candidates in enumerate(dims):
                if candidates[0] is not None:
                    size = true[candidates[0]]
                    leaf = leaf if leaf.shape[dim] == size else leaf.narrow(dim, 0, size)
            parts.append(leaf)
        return self._rebuild(parts)


def _narrow(own: Tensor, leaf: Tensor, dims: list[Candidates], true: Mapping[Place, int]) -> Tensor | str:
    """Return ``leaf`` cut to the size of ``own``, or why not. Remove candidates that do not explain that size."""
    if own.ndim != leaf.ndim or own.dtype != leaf.dtype:
        return ""
    part = leaf
    for dim, candidates in enumerate(dims):
        found, whole = own.shape[dim], leaf.shape[dim]
        fitting = [candidate for candidate in candidates if (true[candidate] if candidate else whole) == found]
        if not fitting:
            return f", and dimension {dim} follows no padded dimension of the inputs"
        candidates[:] = fitting
        part = part.narrow(dim, 0, found)
    return part


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype}{[*tensor.shape]}"


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative difference between two kernels that torch chooses for two sizes. Integers are exact."""
    return 2 * torch.finfo(dtype).eps ** 0.5 if dtype.is_floating_point or dtype.is_complex else 0.0
