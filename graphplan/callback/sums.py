"""Epoch means of logged values, summed inside the step.

For a value that is averaged over the epoch, Lightning adds value times batch size to one tensor and the batch size to
another: on a GPU four launches per value and step, beside the replay. Here the values that a step logs are added in one
go, inside the step, to a vector of graphplan's; what Lightning's metrics hold are elements of it. A metric that
Lightning resets gets new tensors, whose values go back into the vector before the next step. Batch sizes are Python
numbers, and are counted as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_not, itemgetter
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor

_value_of = itemgetter("value")
Key = tuple[str, ...]
"""Metrics that a step logs together, by Lightning's keys for them."""


class SummedMetric(_ResultMetric):
    """The class of a metric whose sums are a group's: sizes are the same in each step, and are added when somebody asks
    for the sum.
    """

    group: Group
    number: int
    since: int

    @property
    def cumulated_batch_size(self) -> Tensor:
        """The sum of the sizes so far."""
        inner, group = vars(self), self.group
        missing = group.steps - self.since
        if missing:
            inner["cumulated_batch_size"] = inner["cumulated_batch_size"] + missing * group.sizes[self.number]
            inner["since"] = group.steps
        found: Tensor = inner["cumulated_batch_size"]
        return found

    @cumulated_batch_size.setter
    def cumulated_batch_size(self, value: Tensor) -> None:
        vars(self).update(cumulated_batch_size=value, since=self.group.steps)


class Group:
    """The sums of some metrics.

    Attributes:
        steps: how many steps were counted.
        sizes: the batch size of each metric in those steps that it has not added yet.
    """

    def __init__(self, metrics: Sequence[Any], totals: Tensor) -> None:
        self.steps = 0
        self.sizes = [0] * len(metrics)
        self._totals = totals
        self._metrics = list(metrics)
        self._inner = [vars(metric) for metric in metrics]
        self._views = totals.unbind()
        for number, metric in enumerate(metrics):
            vars(metric).update(group=self, number=number, since=0)
            metric.__class__ = SummedMetric

    def bind(self) -> None:
        """Have the metrics hold the totals again, with the values of what they hold instead."""
        if any(map(is_not, map(_value_of, self._inner), self._views)):
            with torch.no_grad():
                for inner, view in zip(self._inner, self._views, strict=True):
                    if inner["value"] is not view:
                        view.copy_(inner["value"])
                        inner["value"] = view

    def add(self, values: Tensor, sizes: Sequence[int]) -> None:
        """In a step: what Lightning does for each of ``values``, bit by bit: ``value * size``, then the sum."""
        with torch.no_grad():
            size = sizes[0]
            if len(set(sizes)) > 1:
                parts = zip(values.unbind(), sizes, strict=True)
                self._totals.add_(torch.stack([value * size for value, size in parts]))
            elif size > 0 and size & (size - 1) == 0:
                # The product with a power of two is exact, so that it may be part of the same kernel, rounded once.
                self._totals.add_(values, alpha=size)
            else:
                self._totals.add_(values * size)

    def count(self, sizes: list[int]) -> None:
        """After a step: its sizes."""
        if self.sizes != sizes:
            self._add_sizes()
            self.sizes = sizes
        self.steps += 1

    def _add_sizes(self) -> list[Tensor]:
        return [metric.cumulated_batch_size for metric in self._metrics]

    def dissolve(self) -> None:
        """Give the metrics their class back."""
        for metric, inner in zip(self._metrics, self._inner, strict=True):
            inner["cumulated_batch_size"] = metric.cumulated_batch_size
            del inner["group"], inner["number"], inner["since"]
            metric.__class__ = _ResultMetric


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
        self.tensors[f"group {len(self._groups)}"] = totals
        self._groups[free] = Group(members, totals)
        self._grouped.update(free)

    def dissolve(self) -> None:
        """See :meth:`Group.dissolve`."""
        for group in self._groups.values():
            group.dissolve()
