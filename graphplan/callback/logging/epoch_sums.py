"""Sums of logged values over an epoch, added inside the step.

For a mean over the epoch Lightning takes four launches per value and step. Here the metrics that a step logs form a
*group*: the step adds all its means to one vector, whose elements the metrics hold. After a step the group keeps the
logged values, and a metric catches up with the steps that it has missed when it is read. A metric that Lightning resets
gets new tensors, whose values are copied into the vector before the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_not, itemgetter
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor

from graphplan.callback.patches import Patches, settled

_value_of = itemgetter("value")


class GroupedMetric(_ResultMetric):
    """The class of a metric in a group, which catches up with its group before its attributes are read or set."""

    group: Group
    number: int
    since: int

    def settle(self) -> None:
        """Do what ``update`` does, except for the sum of values, for each step since the last time."""
        inner, group = vars(self), self.group
        missing = group.steps - self.since
        if missing:
            inner["since"] = group.steps
            inner["_update_count"] += missing
            inner["_computed"], inner["has_reset"] = None, False
            if self.meta.on_epoch:
                inner["cumulated_batch_size"] = inner["cumulated_batch_size"] + missing * group.sizes[self.number]
            if self.meta.on_step:
                inner["_forward_cache"] = group.values[self.number]
                if not self.meta.on_epoch:
                    inner["value"] = inner["_forward_cache"]


for _name in ("value", "cumulated_batch_size", "_update_count", "_forward_cache", "_computed", "has_reset"):
    # What Lightning changes in a metric when a value is logged.
    setattr(GroupedMetric, _name, settled(_name))


class Group:
    """The ``number``-th group of metrics that steps log together, the ``means`` over the epoch first, by Lightning's
    keys.

    ``totals`` are the sums of the means so far, an owner of the step. ``steps`` were counted; ``sizes`` are the batch
    sizes of those that a metric has not caught up with, ``values`` what the latest one logged.
    """

    def __init__(self, number: int, metrics: Mapping[str, Any], patches: Patches) -> None:
        keys = sorted(metrics, key=lambda key: not metrics[key].meta.on_epoch)
        means = [metrics[key].value.detach() for key in keys if metrics[key].meta.on_epoch]
        self.number, self.metrics, self.means = number, {key: metrics[key] for key in keys}, len(means)
        with torch.no_grad():
            self.totals = torch.stack(means) if means else torch.empty(0)
        self.steps = 0
        self.sizes: Sequence[int] = ()
        self.values: Sequence[Tensor] = ()
        self._views = self.totals.unbind() if means else ()
        self._inner = [vars(metric) for metric in self.metrics.values()][: self.means]
        for place, metric in enumerate(self.metrics.values()):
            patches.kind(metric, GroupedMetric, group=self, number=place, since=0)
        patches.callback(self._settle)

    def bind(self) -> None:
        """Have the means hold the elements of the vector again, with the values of the tensors that they hold now."""
        if any(map(is_not, map(_value_of, self._inner), self._views)):
            with torch.no_grad():
                for inner, view in zip(self._inner, self._views, strict=True):
                    if inner["value"] is not view:
                        view.copy_(inner["value"])
                        inner["value"] = view

    def add(self, values: Tensor, sizes: Sequence[int]) -> None:
        """In a step, do for each of ``values`` what Lightning does, bit by bit: ``value * size``, then the sum."""
        with torch.no_grad():
            size = sizes[0]
            if len(set(sizes)) > 1:
                parts = zip(values.unbind(), sizes, strict=True)
                self.totals.add_(torch.stack([value * size for value, size in parts]))
            elif size > 0 and size & (size - 1) == 0:
                # The product with a power of two is exact, so that it may be part of the same kernel, rounded once.
                self.totals.add_(values, alpha=size)
            else:
                self.totals.add_(values * size)

    def count(self, sizes: Sequence[int], values: Sequence[Tensor]) -> None:
        """After a step, note its sizes and what it logged."""
        if self.sizes != sizes:
            self._settle()
            self.sizes = sizes
        self.steps += 1
        self.values = values

    def _settle(self) -> None:
        for metric in self.metrics.values():
            metric.settle()
