"""States of torch's default generators that a step saves and restores itself, as activation checkpointing does.

The tape saves and restores where the step did. A CUDA graph cannot set a generator's state, but it can draw from
several generators: each restore changes to a generator of its own. Before each replay, that one is set to the offset of
the save, counted from the start of the replay. A state from outside the step is refused if the step draws afterwards.

The functions of ``torch`` that save and restore are replaced while a step is traced or recorded, for its threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from graphplan.environment.devices import accelerator_generators, default_generators
from graphplan.errors import GeneratorSeekError, RefusalError
from graphplan.observe.capture_state import presents_capture
from graphplan.observe.source import Source, find_source
from graphplan.trace.call_recorder import CallRecorder

Save = Callable[[torch.Generator], Tensor]
Put = Callable[[torch.Generator, Tensor], object]
_ACCELERATORS = [kind for kind in ("cuda", "xpu") if hasattr(torch, kind)]


@dataclass(frozen=True, slots=True)
class Restore:
    """A state that the step restores: the device of its generator, the number of the save in the step (from 0), and
    the growth of the offset from the step's start to the save (0 on the CPU, which has no offset).
    """

    device: torch.device
    number: int
    offset: int


@contextmanager
def saving_states(save: Save, put: Put) -> Iterator[None]:
    """Call ``save(generator)`` and ``put(generator, state)`` where the step saves and restores states."""
    modules = [("cpu", torch), ("cpu", torch.random)]
    for kind in _ACCELERATORS:
        modules += [(kind, module) for module in (getattr(torch, kind), getattr(torch, kind).random)]
    with ExitStack() as undo:
        for kind, module in modules:
            for function in _functions_of(kind, save, put):
                plain = getattr(module, function.__name__)
                undo.callback(setattr, module, function.__name__, plain)
                setattr(module, function.__name__, _within_step(function, plain))
        yield


def _functions_of(kind: str, save: Save, put: Put) -> Sequence[Callable[..., Any]]:
    def get_rng_state(*device: Any, **options: Any) -> Tensor:
        return save(_generator_of(kind, *device, **options))

    def set_rng_state(new_state: Tensor, *device: Any, **options: Any) -> None:
        put(_generator_of(kind, *device, **options), new_state)

    return get_rng_state, set_rng_state


def _within_step(function: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` for the threads of the step, and ``plain`` for others."""

    @wraps(plain)
    def within_step(*args: Any, **kwargs: Any) -> Any:
        return (function if presents_capture() else plain)(*args, **kwargs)

    return within_step


def _generator_of(kind: str, device: Any = None) -> torch.Generator:
    if kind == "cpu":
        return torch.default_generator
    index = device if isinstance(device, int) else torch.device(device or kind).index
    module = getattr(torch, kind)
    return module.default_generators[module.current_device() if index is None else index]


@dataclass(frozen=True, slots=True)
class SavedStates:
    """The number of saves of a traced step, its restores in order, and the growth of its device's offset."""

    saves: int = 0
    restores: tuple[Restore, ...] = ()
    growth: int = 0


class TracedGenerators:
    """The generators of a traced step, whose states it saves and restores for the step. ``refuse`` is called if a state
    is set in another way, since a replay can only draw. ``recorders`` record saves and restores on the host.
    """

    def __init__(
        self, refuse: Callable[[type[RefusalError], str], None], recorders: Sequence[CallRecorder] = ()
    ) -> None:
        self._refuse, self._recorders = refuse, recorders
        self._states = [(gen, gen.get_state()) for gen in default_generators()]
        self._starts = {generator.device: generator.get_offset() for generator in accelerator_generators()}
        self._saved: dict[int, tuple[Tensor, torch.Generator, Restore]] = {}
        self._restores: list[Restore] = []

    def add(self, generator: torch.Generator) -> Tensor | None:
        """Watch a generator of the step's own, too. Return its state; None if it was watched already."""
        if any(generator is known for known, _ in self._states):
            return None
        state = generator.get_state()
        self._states.append((generator, state))
        return state

    def check(self, source: Source | None = None) -> None:
        """Check that only random operators changed the states: before one at ``source``, or at the step's end."""
        for position, (generator, state) in enumerate(self._states):
            now = generator.get_state()
            if not torch.equal(now, state):
                self._states[position] = (generator, now)
                place = f"before the random operator at {source}" if source else "within the step"
                self._refuse(
                    GeneratorSeekError,
                    f"the {generator.device} generator's state was set {place}, to a state that the step had not "
                    "saved itself (manual_seed, Generator.set_state, a state from before the step, or another thread "
                    "that draws); a replay only continues to draw. Seed outside the step, or save the state in the "
                    "step with torch.get_rng_state",
                )

    def take(self) -> None:
        """Remember the current states as those that random operators left."""
        self._states = [(gen, gen.get_state()) for gen, _ in self._states]

    def save(self, generator: torch.Generator) -> Tensor:
        """Return the generator's state, and record the save."""
        state = generator.get_state()
        restore = Restore(generator.device, len(self._saved), self._growth_of(generator))
        self._saved[id(state)] = state, generator, restore
        if generator is torch.default_generator:
            for recorder in self._recorders:
                recorder.note_saved(state)
        return state

    def put(self, generator: torch.Generator, state: Tensor) -> None:
        """Restore a state, and record it if the step has saved it."""
        known = self._saved.get(id(state))
        if known is None or known[1] is not generator:
            generator.set_state(state)
            return
        with _disable_current_modes():
            self.check(find_source())
        generator.set_state(state)
        self.take()
        self._restores.append(known[2])
        if generator is torch.default_generator:
            for recorder in self._recorders:
                recorder.note_restored(state)

    def facts(self, device: torch.device | None) -> SavedStates:
        """Return the saves and restores of the step, which computes on ``device``."""
        growth = self._growth_of(_generator_of(device.type, device)) if device in self._starts and device else 0
        return SavedStates(len(self._saved), tuple(self._restores), growth)

    def _growth_of(self, generator: torch.Generator) -> int:
        """Return the growth of the offset since the step's start."""
        start = self._starts.get(generator.device)
        return 0 if start is None else generator.get_offset() - start
