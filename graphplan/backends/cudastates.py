"""States of a CUDA generator that a captured step saves and restores: see :mod:`graphplan.trace.rng`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from graphplan.trace.rng import SavedStates, saving_states


class CapturedStates:
    """Generators that a captured step draws from instead of the default ``generator``: one for each restored state."""

    def __init__(self, generator: torch.Generator, states: SavedStates) -> None:
        self._generator: Any = generator
        self._growth = states.growth
        self._offsets = [restore.offset for restore in states.restores if restore.device == generator.device]
        self._others: list[Any] = [self._generator.clone_state() for _ in self._offsets]
        self._left = iter(self._others)

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Register the generators with ``graph``."""
        for other in self._others:
            graph.register_generator_state(other)

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Switch to the next generator whenever the captured step restores a state."""
        home = self._generator.graphsafe_get_state()
        try:
            with saving_states(self._save, self._put):
                yield
        finally:
            self._generator.graphsafe_set_state(home)

    def _save(self, generator: torch.Generator) -> Tensor:
        # A CUDA state cannot be read in a capture. Any tensor will do: the trace has noted which state is restored.
        return torch.default_generator.get_state() if generator.device.type == "cuda" else generator.get_state()

    def _put(self, generator: torch.Generator, state: Tensor) -> None:
        if generator is self._generator:
            self._generator.graphsafe_set_state(next(self._left))
        elif generator.device.type != "cuda":
            generator.set_state(state)

    def before_replay(self) -> int:
        """Set the generators to the offsets that a replay draws from. Return the offset for :meth:`after_replay`."""
        start, seed = self._generator.get_offset(), self._generator.initial_seed()
        for other, offset in zip(self._others, self._offsets, strict=True):
            if other.initial_seed() != seed:
                other.manual_seed(seed)
            other.set_offset(start + offset)
        return start + self._growth

    def after_replay(self, end: int) -> None:
        """After a replay, set the default generator to the offset that the step leaves."""
        self._generator.set_offset(end)
