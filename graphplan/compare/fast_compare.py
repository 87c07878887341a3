"""Fast answers to "is it as it was?", from the guards of torch's own compiler, where this torch has them. True means
that nothing changed, False that something may have.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from graphplan.compare.comparing import Row
from graphplan.environment.surroundings import COUNTS, LEVEL, surroundings
from graphplan.environment.switches import COMPARED, USED, answers, count_of_modes, default_device, read_all
from graphplan.tensors.attributes import has_memory
from graphplan.tensors.dtensors import is_sharded

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


_own_hooks = 0


def hooks_registered() -> int:
    """How many hooks were registered through torch so far: without a new one, no hook was added."""
    return RemovableHandle.next_id - _own_hooks


def register_own(register: Callable[[Any], Any], hook: Any) -> Any:
    """Register a hook of graphplan's own, gone before the next step, which :func:`hooks_registered` leaves out."""
    global _own_hooks
    before = RemovableHandle.next_id
    handle = register(hook)
    _own_hooks += RemovableHandle.next_id - before
    return handle


def accumulator_hooks(param: torch.Tensor) -> list[weakref.ref[dict[int, Any]]]:
    """Hooks on the node that accumulates ``param``'s gradient: they last as long as that node."""
    if not param.requires_grad or not param.is_leaf or is_sharded(param) or not has_memory(param):
        return []
    if param.is_inference():
        return []
    # A dispatch mode of the caller's watches the step, and this is no part of it.
    with torch.inference_mode(False), torch.enable_grad(), torch._C._DisableTorchDispatch():
        node: Any = param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    found = []
    for register in (node.register_hook, node.register_prehook):
        # A node shows its hooks to those alone that register one.
        handle = register_own(register, lambda *args: None)
        handle.remove()
        if handle.hooks_dict_ref():
            found.append(handle.hooks_dict_ref)
    return found


class Modes:
    """torch's global switches: those that its guard knows are read again only when one of them changed."""

    def __init__(self) -> None:
        self._getters = COMPARED
        self._state: Any = None
        self._compared: list[Any] = []
        self._device: Any = None
        self._known: tuple[Any, ...] = ()

    def watch(self, uses: Collection[str]) -> bool:
        """Compare the switches that functions in C of these names read or set, too; whether there are new ones."""
        used = dict.fromkeys(switch.get for name in uses for switch in USED.get(name, ()))
        new = [get for get in used if get not in self._getters]
        if new:
            self._getters, self._state = [*self._getters, *new], None
        return bool(new)

    def unchanged(self) -> bool:
        """Whether all are what :meth:`now` said last."""
        return (
            self._state is not None
            and answers(self._getters) == self._compared
            and self._state.check()
            and default_device() == self._device
        )

    def rows(self) -> list[Row] | None:
        """Comparisons that hold while all are what :meth:`now` said last; None if this torch has none."""
        if self._state is None:
            return None
        asked: list[tuple[Callable[[], Any], Any]]
        asked = [(default_device, self._device) if self._device is not None else (count_of_modes, 0)]
        # Modes that change nothing may be active.
        bare = self._device is None and all(function() == none for function, none in COUNTS)
        asked += COUNTS if bare else [(surroundings, None)]
        functions = [self._state.check, *(function for function, _ in asked), *self._getters]
        space, name, outside = LEVEL
        return [
            ("same_results", functions, [True, *(answer for _, answer in asked), *self._compared]),
            ("same_values", [space], [name], [outside]),
        ]

    def now(self) -> tuple[Any, ...]:
        """The values of the switches, which are part of a program's key."""
        if not self.unchanged():
            self._compared = answers(self._getters)
            self._device = default_device()
            known = tuple([tuple(value) if type(value) is list else value for value in read_all()])
            self._known = known if known != self._known else self._known
            self._state = _guards.GlobalStateGuard() if hasattr(_guards, "GlobalStateGuard") else None
        return self._known
