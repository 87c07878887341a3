"""Giving a replay's results to the caller: clones, so that the next replay cannot overwrite them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphplan.containers import rebuilder
from graphplan.dtensors import is_sharded
from graphplan.owners import Walk
from graphplan.plan import Output, Plan
from graphplan.tracer import place_of


class Outputs:
    """Static results of a recording and how to hand them out.

    Zero-dimensional results of one dtype are stacked inside the recording, so that handing out several losses costs one
    clone. A tensor that was returned in several places is handed out in all of them.
    """

    def __init__(self, plan: Plan, result: Any, *, clone_from: Callable[[Tensor], bool]) -> None:
        leaves = pytree.tree_leaves(result)
        self._template = [output.value for output in plan.outputs]
        self._given = [(number, o) for number, o in enumerate(plan.outputs) if o.kind in ("input", "owned")]
        self._rebuild = rebuilder(plan.output_structure)
        self._static: dict[int, Tensor] = {}
        self._packs: list[tuple[Tensor, list[int]]] = []
        self._shared: list[tuple[int, int]] = []
        places: dict[Any, int] = {}
        scalars: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, (output, leaf) in enumerate(zip(plan.outputs, leaves, strict=True)):
            if output.kind != "tensor":
                continue
            first = places.setdefault(id(leaf) if is_sharded(leaf) else place_of(leaf), number)
            if first != number:
                self._shared.append((number, first))
                continue
            tensor = leaf.detach()
            # A carry may write into this memory at the end of the step: the caller wants what was returned.
            self._static[number] = tensor.clone() if clone_from(tensor) else tensor
            if tensor.ndim == 0 and not is_sharded(tensor):
                scalars.setdefault((tensor.dtype, tensor.device), []).append(number)
        for numbers in scalars.values():
            if len(numbers) > 1:
                self._packs.append((torch.stack([self._static.pop(n) for n in numbers]), numbers))
        self._lone = len(plan.outputs) == 1 and plan.output_structure.is_leaf() and 0 in self._static

    def build(self, leaves: Sequence[Any], walk: Walk) -> Any:
        """The step's result: clones of what it made, the caller's or owners' own tensors where it returned those."""
        if self._lone:
            return self._static[0].clone()
        built = self._template.copy()
        for number, static in self._static.items():
            built[number] = static.clone()
        for pack, numbers in self._packs:
            for number, part in zip(numbers, pack.clone().unbind(), strict=True):
                # A view among several would refuse to be written to with something that asks for gradients.
                built[number] = part.detach()
        for number, first in self._shared:
            built[number] = built[first]
        for number, output in self._given:
            built[number] = _given(output, leaves, walk)
        return self._rebuild(built)


def _given(output: Output, leaves: Sequence[Any], walk: Walk) -> Any:
    if output.kind == "input":
        assert output.index is not None
        return leaves[output.index]
    assert output.path is not None
    return walk.slots[output.path].get()
