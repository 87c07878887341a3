"""Sums of logged values over an epoch, computed inside the step.

For a mean over the epoch, Lightning needs four launches per value and step. Here the metrics that a step logs form a
*group*. The step adds all means to one vector, and the metrics hold its elements. After a step, the group keeps the
logged values. A metric applies the steps that it has missed when it is read. If Lightning resets a metric, it gets new
tensors. Their values are copied into the vector before the next step.
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
    """The class of a metric in a group. It applies missed steps before its attributes are read or set."""

    group: Group
    number: int
    since: int

    def settle(self) -> None:
        """Apply ``update`` for each missed step, except for the sum of values, which the step computes."""
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
    # Attributes of a metric that Lightning changes when a value is logged.
    setattr(GroupedMetric, _name, settled(_name))


class Group:
    """The ``number``-th group of metrics that steps log together, by Lightning's keys.

    The first ``means`` metrics are means over the epoch. ``totals`` are their sums so far, and an owner of the step.
    ``steps`` is the number of counted steps. ``sizes`` are the batch sizes of each step that a metric has yet to apply.
    ``values`` are the logged values of the latest step.
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
        """Make the means hold the elements of the vector again, with the values that they hold now."""
        if any(map(is_not, map(_value_of, self._inner), self._views)):
            with torch.no_grad():
                for inner, view in zip(self._inner, self._views, strict=True):
                    if inner["value"] is not view:
                        view.copy_(inner["value"])
                        inner["value"] = view

    def add(self, values: Tensor, sizes: Sequence[int]) -> None:
        """In a step, add ``value * size`` to the sum of each of ``values``, with the same bits as in Lightning."""
        with torch.no_grad():
            size = sizes[0]
            if len(set(sizes)) > 1:
                parts = zip(values.unbind(), sizes, strict=True)
                self.totals.add_(torch.stack([value * size for value, size in parts]))
            elif size > 0 and size & (size - 1) == 0:
                # The product with a power of two is exact, so one kernel, which rounds once, gives the same bits.
                self.totals.add_(values, alpha=size)
            else:
                self.totals.add_(values * size)

    def count(self, sizes: Sequence[int], values: Sequence[Tensor]) -> None:
        """After a step, note its batch sizes and its logged values."""
        if self.sizes != sizes:
            self._settle()
            self.sizes = sizes
        self.steps += 1
        self.values = values

    def _settle(self) -> None:
        for metric in self.metrics.values():
            metric.settle()
