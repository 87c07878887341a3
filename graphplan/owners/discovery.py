"""Discover the modules and optimizers that a step uses and that were not named as owners."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from inspect import unwrap
from types import CellType, CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from graphplan.environment.origin import Codes
from graphplan.errors import Faults
from graphplan.owners.slots import Walk
from graphplan.owners.views import attributes_of
from graphplan.specs.paths import free_name
from graphplan.tensors.trees import named_leaves

INITIALIZERS = Codes(
    *(nn.Module.__init__, nn.Module.__setstate__),
    *(unwrap(torch.optim.Optimizer.__init__), unwrap(torch.optim.Optimizer.__setstate__)),
)
"""Code that runs whenever a module or optimizer is made; ``__setstate__`` for copied and unpickled ones."""
_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None)
CALLS = Codes(nn.Module.__call__, _STEP)
"""Code that runs whenever a module is called or an optimizer steps."""
_ENTERED: ContextVar[Discovery | None] = ContextVar("entered", default=None)


class Discovery:
    """Finds the modules and optimizers that a step uses in this thread. :class:`graphplan.observe.profile.Profile`
    reports them by :func:`note_called` and :func:`note_made`. It does not use torch's global hooks: compilers would
    build these into compiled code, and another thread may be iterating over them. ``on_optimizer`` is called with each
    optimizer before it steps, ``on_first_sight`` once with each module and optimizer before it runs. For an optimizer
    that the step itself made, ``on_made`` is called instead of both.
    """

    def __init__(
        self,
        on_optimizer: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
        on_first_sight: Callable[[Any], None] = lambda thing: None,
        on_made: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
    ) -> None:
        self._on_optimizer = on_optimizer
        self._on_first_sight = on_first_sight
        self._on_made = on_made
        # Weak references: modules and optimizers that the step makes and drops again are not owners.
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        """By identity."""
        self._optimizers, self._made = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self._token: Token[Discovery | None] | None = None
        self.faults = Faults()

    def __enter__(self) -> Discovery:
        self._token = _ENTERED.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._token is not None:
            _ENTERED.reset(self._token)

    def _saw_module(self, module: nn.Module) -> None:
        known = self._modules.get(id(module))
        if known is not None and known() is module:
            return
        with self.faults.noting():
            self._modules[id(module)] = weakref.ref(module)
            if module not in self._made:
                self._on_first_sight(module)

    def _saw_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        with self.faults.noting():
            if optimizer in self._made:
                self._on_made(optimizer)
                return
            self._on_optimizer(optimizer)
            if optimizer not in self._optimizers:
                self._optimizers[optimizer] = True
                self._on_first_sight(optimizer)

    def kept(self, walk: Walk, result: Any) -> dict[str, str]:
        """Return the class and line, by path, of what the step has made and returned or left in its owners."""
        left = [*walk.parts.items(), *named_leaves(result)]
        made = {path: thing for path, thing in left if thing in self._made}
        return {path: f"{type(thing).__name__}, at {self._made[thing]}" for path, thing in made.items()}

    @property
    def has_made(self) -> bool:
        """Whether a module or an optimizer that the step made still exists."""
        return bool(self._made)

    def seen(self) -> list[nn.Module]:
        """Return the modules that ran, except those that the step made."""
        seen = [reference() for reference in self._modules.values()]
        return [module for module in seen if module is not None and module not in self._made]

    def unknown(self, fn: Callable[..., Any], *walks: Walk) -> dict[str, Any]:
        """Return the outermost modules and the optimizers that ran and are in no walk, by their names in ``fn``."""
        known = {id(module) for walk in walks for module in walk.modules}
        known |= {id(optimizer) for walk in walks for optimizer in walk.optimizers.values()}
        fresh = [module for module in self.seen() if id(module) not in known]
        inner = {id(child) for module in fresh for child in module.modules() if child is not module}
        found: list[Any] = [module for module in fresh if id(module) not in inner]
        found += [optimizer for optimizer in self._optimizers if id(optimizer) not in known]
        names = {id(value): name for name, value in names_in(fn)}
        named: dict[str, Any] = {}
        for thing in found:
            named[free_name(names.get(id(thing), type(thing).__name__.lower()), named)] = thing
        return named


def note_made(thing: Any, source: Callable[[], object]) -> None:
    """Record in the innermost discovery that its step makes ``thing`` at ``source()``."""
    discovery = _ENTERED.get()
    if discovery is not None and thing not in discovery._made:
        discovery._made[thing] = str(source())


def note_called(frame: FrameType, code: CodeType) -> nn.Module | None:
    """Record in the innermost discovery the module or optimizer for which ``code``, one of :data:`CALLS`, is about to
    run in ``frame``. Return the module.
    """
    discovery, found = _ENTERED.get(), frame.f_locals
    if code is _STEP.__code__:
        if discovery is not None and found["args"]:
            discovery._saw_optimizer(found["args"][0])
        return None
    module: nn.Module = found["self"]
    if discovery is not None:
        discovery._saw_module(module)
    return module


def names_in(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values that ``fn`` can use: globals, closure variables, and attributes of its ``self``."""
    inner = getattr(fn, "__func__", fn)
    code = getattr(inner, "__code__", None)
    if code is not None:
        for name in code.co_names:
            if name in inner.__globals__:
                yield name, inner.__globals__[name]
        for name, cell in zip(code.co_freevars, inner.__closure__ or (), strict=False):
            if cell != CellType():
                yield name, cell.cell_contents
    yield from (attributes_of(getattr(fn, "__self__", None)) or {}).items()
