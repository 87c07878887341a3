"""States of torch's default generators that a step saves and puts back within itself, as activation checkpointing does.

A replay can do the same if it is told: the tape saves and restores where the step did. A CUDA graph cannot set a
generator's state, but it can draw from several: each restore goes over to a generator of its own, which before each
replay is set to where the state was saved, counted from where the replay begins. A state from outside the step is not
known here, and refused where the traced step goes on to draw.

Python code saves and restores through functions of ``torch`` and ``torch.cuda``, which are replaced while a step is
traced or recorded, for the threads that run it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from graphplan.observe.capture_state import presents_capture

Save = Callable[[torch.Generator], Tensor]
Put = Callable[[torch.Generator, Tensor], object]
_FUNCTIONS = {"get_rng_state", "set_rng_state"}


@dataclass(frozen=True, slots=True)
class Restore:
    """A state that the step puts back: of the generator of which device, saved as which one of the step (counted from
    0), and there by how much its offset had grown since the step's start (0 on the CPU, which has none).
    """

    device: torch.device
    number: int
    offset: int


@contextmanager
def saving_states(save: Save, put: Put) -> Iterator[None]:
    """Have ``save(generator)`` and ``put(generator, state)`` called where the step saves and restores states."""
    names = ("torch", "torch.random", "torch.cuda", "torch.cuda.random")
    spaces = [vars(sys.modules[name]) for name in names]
    before = [(space, name, space[name]) for space in spaces for name in _FUNCTIONS]
    try:
        for (space, name, function), module in zip(before, [n for n in names for _ in _FUNCTIONS], strict=True):
            kind = "cuda" if "cuda" in module else "cpu"
            space[name] = _saving(function, kind, save) if name == "get_rng_state" else _putting(function, kind, put)
        yield
    finally:
        for space, name, function in before:
            space[name] = function


def _saving(function: Callable[..., Tensor], kind: str, save: Save) -> Callable[..., Tensor]:
    @wraps(function)
    def get_rng_state(device: Any = "cuda") -> Tensor:
        if not presents_capture():
            return function(device) if kind == "cuda" else function()
        return save(_generator_of(kind, device))

    return get_rng_state


def _putting(function: Callable[..., None], kind: str, put: Put) -> Callable[..., None]:
    @wraps(function)
    def set_rng_state(new_state: Tensor, device: Any = "cuda") -> None:
        if not presents_capture():
            function(new_state, device) if kind == "cuda" else function(new_state)
        else:
            put(_generator_of(kind, device), new_state)

    return set_rng_state


def _generator_of(kind: str, device: Any) -> torch.Generator:
    if kind == "cpu":
        return torch.default_generator
    index = torch.device("cuda", device).index if isinstance(device, int) else torch.device(device).index
    return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]


@dataclass(frozen=True, slots=True)
class SavedStates:
    """What a traced step did of the kind: how often it saved a state, what it put back, in order, and by how much it
    moved on the offset of its device's default generator (0 on the CPU).
    """

    saves: int = 0
    restores: tuple[Restore, ...] = ()
    growth: int = 0


class TracedStates:
    """Saves and restores as the step asks, and notes what it restores that it saved itself.

    Args:
        before: called before such a state is put back.
        after: called after that.
    """

    def __init__(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._before, self._after = before, after
        self._saved: dict[int, tuple[Tensor, torch.Generator, Restore]] = {}
        generators = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        self._starts = {generator.device: generator.get_offset() for generator in generators}
        self._restores: list[Restore] = []

    def save(self, generator: torch.Generator) -> Tensor:
        """The generator's state."""
        state = generator.get_state()
        restore = Restore(generator.device, len(self._saved), self._growth_of(generator))
        self._saved[id(state)] = state, generator, restore
        return state

    def put(self, generator: torch.Generator, state: Tensor) -> None:
        """Put a state back."""
        known = self._saved.get(id(state))
        if known is None or known[1] is not generator:
            generator.set_state(state)
            return
        self._before()
        generator.set_state(state)
        self._after()
        self._restores.append(known[2])

    def facts(self, device: torch.device | None) -> SavedStates:
        """What the step did, which computes on ``device``."""
        on_cuda = device is not None and device in self._starts
        growth = self._growth_of(_generator_of("cuda", device)) if on_cuda else 0
        return SavedStates(len(self._saved), tuple(self._restores), growth)

    def _growth_of(self, generator: torch.Generator) -> int:
        """By how much the offset has grown since the step's start."""
        start = self._starts.get(generator.device)
        return 0 if start is None else generator.get_offset() - start


class CapturedStates:
    """The generators that one CUDA graph draws from in place of the default one, one for each state that is put back.

    Args:
        graph: which is captured next.
        generator: the default one of the graph's device.
        states: of the traced step.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, generator: torch.Generator, states: SavedStates) -> None:
        self._generator: Any = generator
        self._growth = states.growth
        self._offsets = [restore.offset for restore in states.restores if restore.device == generator.device]
        self._others: list[Any] = [self._generator.clone_state() for _ in self._offsets]
        for other in self._others:
            graph.register_generator_state(other)
        self._left = iter(self._others)

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Go over to the next generator wherever the step that is captured puts a state back."""
        home = self._generator.graphsafe_get_state()
        try:
            with saving_states(self._save, self._put):
                yield
        finally:
            self._generator.graphsafe_set_state(home)

    def _save(self, generator: torch.Generator) -> Tensor:
        # A device's state cannot be read in a capture. Which one it is, the traced step has told.
        return torch.default_generator.get_state() if generator.device.type == "cuda" else generator.get_state()

    def _put(self, generator: torch.Generator, state: Tensor) -> None:
        if generator is self._generator:
            self._generator.graphsafe_set_state(next(self._left))
        elif generator.device.type != "cuda":
            generator.set_state(state)

    def set_out(self) -> int:
        """Before a replay: set the generators to where it draws from. Returns the offset that :meth:`arrive` wants."""
        start, seed = self._generator.get_offset(), self._generator.initial_seed()
        for other, offset in zip(self._others, self._offsets, strict=True):
            if other.initial_seed() != seed:
                other.manual_seed(seed)
            other.set_offset(start + offset)
        return start + self._growth

    def arrive(self, end: int) -> None:
        """After a replay: set the default generator to where the step leaves it."""
        self._generator.set_offset(end)
