"""State that an optimizer creates in its first step, at the value it is created with.

A program adopts optimizer state, so the state has to exist before capture; but the step that creates it also updates
it. Watching the operators of that one step gives the value each tensor was born with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan.errors import CaptureError
from graphplan.owners.slots import Walk
from graphplan.tensors.dtensors import is_imagined, is_wrapped, local
from graphplan.tensors.storages import storage_id
from graphplan.trace.operator_schemas import tensors_in

_FILLS = ("zeros", "ones", "full", "lift_fresh", "lift", "scalar_tensor", "zero_", "fill_", "new_zeros", "new_full")
_FILLS_LIKE = tuple(f"{name}_like" for name in ("zeros", "ones", "full"))


class InitialState(TorchDispatchMode):
    """Remembers the values of tensors that are made with constant contents."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[int, Tensor] = {}
        self._weak: list[StorageWeakRef] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_wrapped(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket._qualified_op_name.split("::")[-1]
        if (name in _FILLS or name in _FILLS_LIKE) and not is_imagined():
            for tensor in tensors_in(out):
                storage = storage_id(tensor)
                if storage is not None and storage not in self._values:
                    self._values[storage] = tensor.detach().clone()
                    self._weak.append(StorageWeakRef(tensor.untyped_storage()))
        return out

    def value(self, tensor: Tensor) -> Tensor | None:
        """What ``tensor``'s memory was filled with when it was made, if with a constant."""
        storage = storage_id(tensor)
        return None if storage is None else self._values.get(storage)


def _starts_at_zero(path: str, walk: Walk) -> bool:
    """SGD makes its momentum from the first gradient, which is what momentum 0 leads to if nothing is dampened."""
    name = path.split(".state[", 1)[0]
    optimizer = walk.optimizers.get(name)
    undamped = optimizer is not None and all(group.get("dampening") == 0 for group in optimizer.param_groups)
    return path.endswith("].momentum_buffer") and isinstance(optimizer, torch.optim.SGD) and undamped


def create_state(missing: Sequence[str], walk: Callable[[], Walk], step: Callable[[], Any]) -> Callable[[], None]:
    """Run ``step`` once to learn the initial values of the slots ``missing``.

    Returns:
        A function that, once the step is undone, makes those slots with their initial values.

    Raises:
        CaptureError: for state whose first value is computed from the batch.
    """
    births = InitialState()
    with births:
        step()
    now = walk()
    made: list[tuple[Any, Any, Tensor]] = []
    for path in missing:
        slot = now.slots.get(path)
        if slot is None or slot.param is not None:
            continue
        tensor = slot.get()
        memory = local(tensor)
        initial = births.value(memory)
        if initial is None and _starts_at_zero(path, now):
            initial = torch.zeros_like(memory)
        if initial is None or initial.shape != memory.shape:
            raise CaptureError(
                f"{path} does not exist yet, and its first value is computed from the batch, so a replay cannot be the "
                "first step: run the step eagerly once before capture"
            )
        with torch.no_grad():
            memory.detach().copy_(initial)
        made.append((slot.container, slot.key, tensor))
    inner = [(container, key, child) for container, key, child in now.links if any(child is c for c, _, _ in made)]

    def make() -> None:
        for container, key, child in inner:
            container[key] = child
        for container, key, tensor in made:
            container[key] = tensor

    return make
