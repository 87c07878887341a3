"""Which parameters each group of an optimizer has."""

from __future__ import annotations

from itertools import zip_longest
from operator import is_not
from typing import Any

from graphplan.compare.comparing import Checks, contents_of
from graphplan.owners.slots import Walk
from graphplan.specs.paths import Path


def difference(old: tuple[str, ...], new: tuple[str, ...]) -> str:
    """What the first place at which two groups' paths differ has in each, and how many more do."""
    differ = [pair for pair in zip_longest(old, new, fillvalue="nothing") if pair[0] != pair[1]]
    first, then = differ[0]
    more = f", and {len(differ) - 1} more" if len(differ) > 1 else ""
    return f"{first} then {then}{more}"


class Groups:
    """The parameters in the groups of a walk's optimizers: with others, a group's hyper-parameters act on others.

    ``values`` are the paths of each group's parameters, in their order. Paths, since a loaded state dictionary leaves
    them alone, and a parameter that is replaced by another one is the guards' affair.

    A program's guards compare the groups' lists before each replay, so that nothing of these is compared there.
    """

    def __init__(self, walk: Walk) -> None:
        self._optimizers = list(walk.optimizers.values())
        self._parameters = self._now()
        paths = {number: path for number, (path, _) in walk.parameters.items()}
        self.values = [tuple(paths[id(param)] for param in params) for params in self._parameters]
        self.labels = [
            Path.members(f"{path}.param_groups[{index}]")
            for path, optimizer in walk.optimizers.items()
            for index in range(len(optimizer.param_groups))
        ]
        spaces, outer = list(map(vars, self._optimizers)), [optimizer.param_groups for optimizer in self._optimizers]
        groups = [group for groups in outer for group in groups]
        lists = [group["params"] for group in groups]
        self._checks = Checks([
            ("same_values", spaces, ["param_groups"] * len(outer), outer),
            ("same_values", groups, ["params"] * len(lists), lists),
            *contents_of([*outer, *lists]),
        ])  # fmt: skip

    def _now(self) -> list[list[Any]]:
        return [list(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups]

    def hold(self) -> bool:
        """Whether all groups have the parameters that they had, in the same order: in other lists, perhaps."""
        if self._checks.hold():
            return True
        before, now = self._parameters, self._now()
        return list(map(len, before)) == list(map(len, now)) and not any(
            any(map(is_not, *pair)) for pair in zip(before, now, strict=True)
        )
