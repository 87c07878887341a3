"""Python effects that a plan records and a program repeats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphplan.specs.roles import Overlay

AliasedSlots = tuple[tuple[str, Overlay], ...]
"""Slots by path that overlap in one memory, and where each lies there."""


@dataclass(frozen=True, slots=True)
class Counter:
    """A Python number that grows by the same ``delta`` in every step; replays add it."""

    path: str
    delta: int | float


@dataclass(frozen=True, slots=True)
class Assignment:
    """A Python value that the step's code assigns and that is the same after every step; replays assign it again."""

    path: str
    value: Any


@dataclass(frozen=True, slots=True)
class Append:
    """A list or deque that every step appends ``count`` items to; replays append copies of the tensors."""

    path: str
    count: int
