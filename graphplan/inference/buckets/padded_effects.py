"""What a padded call does to owners and draws, undone so that the call as it came can do it instead, and compared with
that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan.effects.finding import is_allowed
from graphplan.environment.devices import default_generators
from graphplan.observe.source import find_source
from graphplan.owners.slots import Walk
from graphplan.owners.snapshot import Snapshot
from graphplan.owners.walk import walk_owners
from graphplan.step.padding.slicing import distance, tolerance
from graphplan.tensors.copying import same_bits
from graphplan.tensors.dtensors import is_imagined, is_wrapped
from graphplan.trace.operator_schemas import schema_of


class Draws(TorchDispatchMode):
    """Notes what draws random numbers in a padded call of Python: ``places`` are lines, ``states`` those of generators
    of the function's own before it drew from them.
    """

    changes_nothing = True

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, None] = {}
        self.states: list[tuple[torch.Generator, Tensor]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as without it."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_wrapped(types):
            return NotImplemented
        if schema_of(func).is_random and not is_imagined():
            self.places[f"at {find_source()}"] = None
            own = kwargs.get("generator")
            if own is not None and all(own is not known for known, _ in self.states):
                self.states.append((own, own.get_state()))
        return func(*args, **kwargs)


class Effects:
    """Begun before a padded call. ``allow`` names tensors in which padding may leave something; copies of what the
    owners hold lie on the device ``room``; ``generators`` are the function's own, ``draws`` notes what others it has.

    Attributes:
        has_drawn: after :meth:`undo`, whether the padded call has drawn random numbers.
    """

    def __init__(
        self,
        owners: Mapping[str, Any],
        allow: Sequence[str],
        room: torch.device,
        generators: Sequence[torch.Generator],
        draws: Draws | None,
    ) -> None:
        self._walk: Callable[[], Walk] = lambda: walk_owners(owners)
        self._allow = allow
        self._room = room
        self._start = Snapshot(self._walk(), device=room)
        self._states = [(generator, generator.get_state()) for generator in (*default_generators(), *generators)]
        self._draws = draws
        self._left: dict[str, Tensor] = {}
        self.has_drawn = False

    def undo(self) -> None:
        """After the padded call: keep what it left, and put back what was there before it."""
        self._left = {path: tensor.to(self._room, copy=True) for path, tensor in self._changed()}
        # Which operators may draw is no answer: those of attention say so whether or not anything is dropped.
        states = [*self._states, *(self._draws.states if self._draws is not None else ())]
        self.has_drawn = any(not torch.equal(generator.get_state(), state) for generator, state in states)
        self._start.restore()
        for generator, state in states:
            generator.set_state(state)

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
