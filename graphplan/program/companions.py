"""Slots that eager steps bind to one memory, and replays to memories of their own."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from graphplan.effects.rebindings import AliasedSlots
from graphplan.errors import GuardError
from graphplan.owners.slots import Slot, Walk
from graphplan.specs.roles import Overlay
from graphplan.tensors.attributes import PLAIN_KINDS
from graphplan.tensors.copying import same_bits


class _Left(NamedTuple):
    """What a replay left in a slot, and the tensor's version then."""

    path: str
    overlay: Overlay
    slot: Slot
    tensor: Tensor
    version: int

    @property
    def is_written(self) -> bool:
        """Whether the tensor was written to since."""
        return self.tensor._version != self.version


_PENDING: list[weakref.ref[Companions]] = []
"""What replays of any step have noted, until anything else runs: one step's copies are no writes of the host's."""


def settle_companions() -> None:
    """Before any step runs: bring what was written to one of several slots of one memory to the others.

    Raises:
        GuardError: if tensors were written to that overlap, each with something else.
    """
    if not _PENDING:
        return
    pending = _PENDING[:]
    # Other threads may have added some.
    del _PENDING[: len(pending)]
    for reference in pending:
        companions = reference()
        if companions is not None:
            companions.settle()


class Companions:
    """Brings what is written in place to one of several slots (``self.h = self.state[0]``) to the others."""

    def __init__(self, groups: tuple[AliasedSlots, ...]) -> None:
        self._groups = groups
        self._left: list[list[_Left]] = []
        self._reference = weakref.ref(self)

    def note(self, walk: Walk) -> None:
        """After a replay, which left tensors in ``walk``'s slots."""
        _PENDING.append(self._reference)
        self._left = [
            [
                _Left(path, overlay, slot, held, held._version)
                for path, overlay in group
                if (slot := walk.slots.get(path)) is not None
                and type(held := slot.get()) in PLAIN_KINDS
                and not held.is_inference()
            ]
            for group in self._groups
        ]

    def settle(self) -> None:
        """Look for writes. A tensor that was taken out of its slot was let go by the others then."""
        groups, self._left = self._left, []
        for group in groups:
            written = [left for left in group if left.is_written]
            if written:
                _bring([left for left in group if not left.is_written and left.slot.get() is left.tensor], written)


def _bring(others: list[_Left], written: list[_Left]) -> None:
    """Lay all on one memory, what was written last, and take from there what each would show."""
    size = max(left.overlay.end for left in (*others, *written))
    with torch.no_grad(), torch.inference_mode(False):
        memory = written[0].tensor.new_empty(size)
        for left in (*others, *written):
            left.overlay.of(memory).copy_(left.tensor)
        for left in written:
            if not same_bits(left.overlay.of(memory), left.tensor):
                raise GuardError(
                    f"{' and '.join(one.path for one in written)} were each written to in place since the last replay; "
                    "the step binds them to one memory, which replays do not, so that the last one is unknown. "
                    "Write to one of them, or bind the others to copies (.clone())"
                )
        for left in others:
            left.tensor.copy_(left.overlay.of(memory))
