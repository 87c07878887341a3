"""The hooks that are registered on modules, parameters, optimizers, and for all of them."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from graphplan.compare.comparing import Column, Row, contents_of
from graphplan.compare.fast_compare import hooks_registered
from graphplan.owners.slots import Walk
from graphplan.trace.changes import same_value

_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL_HOOKS = [
    *((f"_global_{name}_hooks", modules) for name in ("forward", "forward_pre", "backward", "backward_pre")),
    *((f"_global_optimizer_{name}_hooks", optimizers) for name in ("pre", "post")),
]


class Odd:
    """A value of a type with an ``__eq__`` of its own, or without a hash, as a part of a key."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd) and same_value(self.value, other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        return repr(self.value)


class Hooks:
    """Hooks of the layers, parameters and optimizers of a walk, and those that torch calls for all of them."""

    def __init__(self, walk: Walk) -> None:
        self._places: list[tuple[str, Any, str]] = [(name, space, name) for name, space in _GLOBAL_HOOKS]
        for module in walk.modules:
            self._places += [(f"{type(module).__name__}.{name}", module, name) for name in _MODULE_HOOKS]
        for path, param in walk.parameters.values():
            self._places += [(path, param, name) for name in _TENSOR_HOOKS]
        for path, optimizer in walk.optimizers.items():
            self._places += [(f"{path}.{name}", optimizer, name) for name in _OPTIMIZER_HOOKS]
        self._registered: int | None = None
        self._filled = Column("same_attributes", [])

    def values(self) -> tuple[tuple[str, tuple[tuple[int, Odd], ...]], ...]:
        """Hooks by their numbers in torch's count. All places are asked again only after one was registered."""
        registered = hooks_registered()
        if registered != self._registered:
            self._registered = registered
            self._filled = Column("same_attributes", [place for place in self._places if getattr(*place[1:])])
        if not self._filled.paths:
            return ()
        held = zip(self._filled.paths, self._filled.read(), strict=True)
        return tuple(
            [(label, tuple([(number, Odd(hook)) for number, hook in hooks.items()])) for label, hooks in held if hooks]
        )

    def rows(self) -> list[Row]:
        """After :meth:`values`: what holds while no hook is added."""
        return [
            ("same_results", [hooks_registered], [self._registered]),
            self._filled.row(),
            *contents_of(list(self._filled.read())),
        ]
