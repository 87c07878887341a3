"""Epoch means of logged values, summed inside the step.

For a value that is averaged over the epoch, Lightning adds value times batch size to one tensor and the batch size to
another: on a GPU four launches per value and step, beside the replay. Here the values that a step logs are added in one
go, inside the step, to a vector of graphplan's; what Lightning's metrics hold are elements of it. A metric that
Lightning resets gets new tensors, whose values go back into the vector before the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import getitem, is_not
from typing import Any

import torch
from torch import Tensor

Key = tuple[str, ...]
"""Metrics that a step logs together, by Lightning's keys for them."""


class Group:
    """The sums of some metrics: views of one vector of totals and of one of sizes."""

    def __init__(self, metrics: Sequence[Any], totals: Tensor, sizes: Tensor) -> None:
        self._totals, self._sizes = totals, sizes
        self._attributes = [vars(metric) for metric in metrics for _ in range(2)]
        self._names = ["value", "cumulated_batch_size"] * len(metrics)
        self._views = [view for pair in zip(totals.unbind(), sizes.unbind(), strict=True) for view in pair]

    def bind(self) -> None:
        """Have the metrics hold the sums again, with the values of what they hold instead."""
        if any(map(is_not, map(getitem, self._attributes, self._names), self._views)):
            with torch.no_grad():
                for attributes, name, view in zip(self._attributes, self._names, self._views, strict=True):
                    if attributes[name] is not view:
                        view.copy_(attributes[name])
                        attributes[name] = view

    def add(self, values: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """What Lightning does for each of ``values``, 0-dimensional, bit by bit: ``value * size``, then the sum."""
        with torch.no_grad():
            if len(set(sizes)) == 1:
                self._totals.add_(torch.stack(list(values)) * sizes[0])
                self._sizes.add_(sizes[0])
                return
            self._totals.add_(torch.stack([value * size for value, size in zip(values, sizes, strict=True)]))
            for view, size in zip(self._sizes.unbind(), sizes, strict=True):
                view.add_(size)


class Sums:
    """All groups of one fit.

    Attributes:
        tensors: their vectors by name: an owner of the step.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._groups: dict[Key, Group] = {}
        self._grouped: set[str] = set()

    def bind(self) -> None:
        """See :meth:`Group.bind`."""
        for group in self._groups.values():
            group.bind()

    def group_of(self, keys: Key) -> Group | None:
        """The group of just these metrics, if they have one."""
        return self._groups.get(keys)

    def form(self, keys: Iterable[str], metrics: dict[str, Any]) -> None:
        """Make a group of those metrics that have none."""
        free = tuple(key for key in keys if key not in self._grouped)
        if not free:
            return
        members = [metrics[key] for key in free]
        with torch.no_grad():
            totals = torch.stack([metric.value.detach() for metric in members])
            sizes = torch.stack([metric.cumulated_batch_size for metric in members])
        name = f"group {len(self._groups)}"
        self.tensors |= {f"{name} totals": totals, f"{name} sizes": sizes}
        self._groups[free] = Group(members, totals, sizes)
        self._grouped.update(free)
