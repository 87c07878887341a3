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
from typing import Any, NamedTuple

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor

from graphplan.callback.logging.log_calls import LogCall

_value_of = itemgetter("value")
_LAZY = ("cumulated_batch_size", "_update_count", "_forward_cache", "_computed", "has_reset")
"""What each step changes in a metric of Lightning's besides the sum of its values."""
Key = tuple[str, ...]
"""Metrics that a step logs together, by Lightning's keys for them."""


class SummedMetric(_ResultMetric):
    """The class of a metric whose sums are a group's. The group counts steps and keeps the values of the latest one;
    the metric makes good for them when somebody asks for what they change in it, or changes that.
    """

    group: Group
    number: int
    since: int

    def settle(self) -> dict[str, Any]:
        """Make good for the steps since the last time: what ``update`` does in each, besides the sum of values."""
        inner, group = vars(self), self.group
        missing = group.steps - self.since
        if missing:
            inner["since"] = group.steps
            inner["cumulated_batch_size"] = inner["cumulated_batch_size"] + missing * group.sizes[self.number]
            inner["_update_count"] += missing
            inner["_computed"], inner["has_reset"] = None, False
            if self.meta.on_step:
                inner["_forward_cache"] = group.values[self.number]
        return inner


def _lazy(name: str) -> Any:
    """A property for what a step changes: up to date when somebody asks for it."""

    def read(self: SummedMetric) -> Any:
        return self.settle()[name]

    def write(self: SummedMetric, value: Any) -> None:
        self.settle()[name] = value
        self.group.is_whole = False

    return property(read, write)


for _name in _LAZY:
    setattr(SummedMetric, _name, _lazy(_name))


class Group:
    """The sums of some metrics.

    Attributes:
        steps: how many steps were counted.
        sizes: the batch size of each metric in those steps that it has not added yet.
        values: what the latest step logged, by metric.
        is_whole: whether all metrics are as that step left them.
    """

    def __init__(self, metrics: Sequence[Any], totals: Tensor) -> None:
        self.steps = 0
        self.sizes = [0] * len(metrics)
        self.values: Sequence[Tensor] = ()
        self.is_whole = False
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

    def count(self, sizes: list[int], values: Sequence[Tensor]) -> None:
        """After a step: its sizes, and what it logged."""
        if self.sizes != sizes:
            self._settle()
            self.sizes = sizes
        self.steps += 1
        self.values, self.is_whole = values, True

    def _settle(self) -> None:
        for metric in self._metrics:
            metric.settle()

    def shown(self, results: Any, values: Sequence[Tensor]) -> list[tuple[Any, Tensor]]:
        """Its metrics in the order of ``results``, and what each shows of a step that logged ``values``."""
        own = [metric for metric in dict.values(results) if vars(metric).get("group") is self]
        return [(metric, values[metric.number]) for metric in own]

    def __len__(self) -> int:
        return len(self._metrics)

    def dissolve(self) -> None:
        """Give the metrics their class back."""
        self._settle()
        for metric, inner in zip(self._metrics, self._inner, strict=True):
            del inner["group"], inner["number"], inner["since"]
            metric.__class__ = _ResultMetric


class Usual(NamedTuple):
    """What is left to do after a step that makes certain log calls, all of them plain.

    Attributes:
        calls: the calls.
        group, means, sizes: of which metrics it adds, in which calls, and with which batch sizes.
        shown: of each other metric its attributes, whether it shows steps, and the number of the call.
    """

    calls: list[LogCall]
    group: Group | None
    means: list[int]
    sizes: list[Any]
    shown: list[tuple[dict[str, Any], bool, int]]


class Sums:
    """All groups of one fit.

    Attributes:
        tensors: their vectors by name: an owner of the step.
        latest: the group whose metrics were logged last.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._groups: dict[Key, Group] = {}
        self._grouped: set[str] = set()
        self.latest: Group | None = None

    def bind(self) -> None:
        """See :meth:`Group.bind`."""
        for group in self._groups.values():
            group.bind()

    def group_of(self, keys: Key) -> Group | None:
        """The group of just these metrics, if they have one."""
        return self._groups.get(keys)

    def whole(self, results: Any) -> tuple[Group, Sequence[Tensor]] | None:
        """The group of all metrics in ``results``, and the values that they show; None if there is no such group."""
        group = self.latest
        if group is None or not group.is_whole or dict.__len__(results) != len(group):
            return None
        return group, group.values

    def count(self, usual: Usual, values: list[Any]) -> None:
        """After a step that logged ``values``."""
        if usual.group is not None:
            means = values if len(usual.means) == len(values) else [values[number] for number in usual.means]
            usual.group.count(usual.sizes, means)
            self.latest = usual.group

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
