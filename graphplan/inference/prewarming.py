"""Capturing before the first request comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import torch

from graphplan.errors import OptionError, SkipReason
from graphplan.feed.signature import Feed
from graphplan.specs.options import is_count
from graphplan.step.buckets import Ladders
from graphplan.step.graphed_step import GraphedStep
from graphplan.step.padding import Dynamic, outer_first

Size = int | Mapping[int, int]
_CALLS = 64
"""A size is called at most this often; a capture that has not come by then does not come."""


def zeros(example: Feed, dynamic: Dynamic, dims: Mapping[int, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call of zeros, with other sizes in the dynamic dimensions that ``dims`` has."""
    places = dynamic.of(example)
    leaves = list(example.leaves)
    for index, leaf in example.tensors():
        own = {dim: dims[dim] for position, dim in places if position == index and dim in dims}
        shape = [own.get(dim, size) for dim, size in enumerate(leaf.shape)]
        leaves[index] = torch.empty_permuted(shape, outer_first(leaf), dtype=leaf.dtype, device=leaf.device).zero_()
    return example.rebuild(leaves)


def parse_sizes(sizes: Sequence[Size] | None, ladders: Ladders | None) -> list[dict[int, int]]:
    """Sizes by dimension, the largest first; by default all that there are ladders for. Raises OptionError."""
    if sizes is None:
        if ladders is None:
            raise OptionError("prewarm has no sizes; expected some, such as [1, 2, 4, 8], or shapes='bucket'")
        choices = product(*(ladders.sizes(dim) for dim in ladders.dims))
        parsed = [dict(zip(ladders.dims, choice, strict=True)) for choice in choices]
    else:
        parsed = [dict(size) if isinstance(size, Mapping) else {0: size} for size in sizes]
    for dims in parsed:
        for dim, size in dims.items():
            if not (is_count(size) and is_count(dim, 0)):
                raise OptionError(f"prewarm has the size {size!r} in dimension {dim!r}; expected integers from 1 on")
    if not parsed:
        raise OptionError("prewarm has no sizes; expected at least one, such as [1, 2, 4, 8]")
    return sorted(parsed, key=lambda dims: prod(dims.values()), reverse=True)


def capture(step: GraphedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Make a call again and again until it is captured or replayed. Returns why it is not, if so."""
    done = step.stats.captured + step.stats.replayed
    before = step.stats.skipped.copy()
    with step.machine.timing.asked_for():
        for _ in range(_CALLS):
            step(*args, **kwargs)
            if step.stats.captured + step.stats.replayed > done:
                return None
            why = next((reason for reason in step.stats.skipped - before if reason is not SkipReason.SHAPE), None)
            if why is not None:
                return why.value
    return "no capture came"
