"""Integers in parameter groups that an optimizer's own step changes: its state, not hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch


class GroupCounts(MutableMapping[str, Any]):
    """The entries of one parameter group that its optimizer counts with, whichever dictionary the group is now: loading
    a checkpoint makes new ones.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        self._optimizer = optimizer
        self._index = index
        self.keys_counted: set[str] = set()

    @property
    def group(self) -> dict[str, Any]:
        """The parameter group; empty if it is gone."""
        groups = self._optimizer.param_groups
        return groups[self._index] if self._index < len(groups) else {}

    def __getitem__(self, key: str) -> Any:
        if key not in self.keys_counted:
            raise KeyError(key)
        return self.group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.group[key] = value

    def __delitem__(self, key: str) -> None:
        del self.group[key]

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.group if key in self.keys_counted)

    def __len__(self) -> int:
        return sum(1 for _ in self)
