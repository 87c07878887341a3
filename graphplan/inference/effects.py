"""What a padded call does to owners, undone so that the call as it came can do it instead, and compared with that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphplan.compiler import is_allowed
from graphplan.inference.slicing import distance, tolerance
from graphplan.owners import Snapshot, Walk, same_bits, walk_owners


class Effects:
    """Begun before a padded call. ``allow`` names tensors in which padding may leave something; copies of what the
    owners hold lie on the device ``room``.
    """

    def __init__(self, owners: Mapping[str, Any], allow: Sequence[str], room: torch.device) -> None:
        self._walk: Callable[[], Walk] = lambda: walk_owners(owners)
        self._allow = allow
        self._room = room
        self._start = Snapshot(self._walk(), device=room)
        self._left: dict[str, Tensor] = {}

    def undo(self) -> None:
        """After the padded call: keep what it left, and put back what was there before it."""
        self._left = {path: tensor.to(self._room, copy=True) for path, tensor in self._changed()}
        self._start.restore()

    def problems(self) -> list[str]:
        """After the call as it came: what the padded one left otherwise, in words."""
        now = dict(self._changed())
        held = {path: tensor for slot in self._walk().slots.values() for path, tensor in [(slot.path, slot.tensors())]}
        found = []
        for path in dict.fromkeys([*self._left, *now]):
            tensors = held.get(path)
            if is_allowed(path, self._allow) or not tensors:
                continue
            own = now.get(path, tensors[0]).to(self._room)
            before = self._start.value(tensors[0])
            padded = self._left.get(path, own if before is None else before)
            apart = float("inf") if own.shape != padded.shape else distance(own, padded)
            if apart > tolerance(own.dtype):
                found.append(f"{path}, which the function changes, differs by {apart:.2g} of its largest value")
        return found

    def _changed(self) -> list[tuple[str, Tensor]]:
        changed = []
        for slot in self._walk().slots.values():
            for tensor in slot.tensors()[:1]:
                before = self._start.value(tensor)
                if not slot.is_parameter and (before is None or not same_bits(tensor.to(self._room), before)):
                    changed.append((slot.path, tensor.detach()))
        return changed
