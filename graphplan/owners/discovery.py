"""Finding the modules and optimizers that a step uses without being told."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphplan.owners.naming import free_name
from graphplan.owners.records import Walk
from graphplan.owners.spaces import attributes_of


class Discovery:
    """Finds the modules and optimizers that a step uses, through torch's global forward and step hooks. What other
    threads run meanwhile is not the step's.

    ``on_optimizer`` is called with each optimizer before its step runs, so that one that nobody named is prepared in
    time. ``on_first_sight`` is called once with each module and optimizer, before it runs.
    """

    def __init__(
        self,
        on_optimizer: Callable[[torch.optim.Optimizer], None],
        on_first_sight: Callable[[Any], None] = lambda thing: None,
    ) -> None:
        self._on_optimizer = on_optimizer
        self._on_first_sight = on_first_sight
        # Weakly: what the step makes and drops again is no owner.
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._handles: list[Any] = []
        self._thread = get_ident()

    def __enter__(self) -> Discovery:
        forward = nn.modules.module.register_module_forward_pre_hook(self._saw_module)
        step = register_optimizer_step_pre_hook(self._saw_optimizer)
        self._handles = [forward, step]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _saw_module(self, module: nn.Module, args: Any) -> None:
        if get_ident() == self._thread and not _knows(self._modules, module):
            self._modules[id(module)] = weakref.ref(module)
            self._on_first_sight(module)

    def _saw_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if get_ident() != self._thread:
            return
        self._on_optimizer(optimizer)
        if not _knows(self._optimizers, optimizer):
            self._optimizers[id(optimizer)] = weakref.ref(optimizer)
            self._on_first_sight(optimizer)

    def unknown(self, walk: Walk, fn: Callable[..., Any]) -> dict[str, Any]:
        """What was seen and no owner holds, top modules only, under the names that ``fn`` knows it by."""
        known = {id(module) for module in walk.modules} | {id(opt) for opt in walk.optimizers.values()}
        alive = {key: module for key, seen in self._modules.items() if (module := seen()) is not None}
        fresh = {key: module for key, module in alive.items() if key not in known}
        inner = {id(child) for module in fresh.values() for child in module.modules() if child is not module}
        found: list[Any] = [module for key, module in fresh.items() if key not in inner]
        optimizers = [(key, seen()) for key, seen in self._optimizers.items()]
        found += [opt for key, opt in optimizers if key not in known and opt is not None]
        names = dict(_names_in(fn))
        named: dict[str, Any] = {}
        for thing in found:
            named[free_name(names.get(id(thing), type(thing).__name__.lower()), named)] = thing
        return named


def _knows(seen: Mapping[int, weakref.ref[Any]], thing: Any) -> bool:
    """Whether ``thing`` itself was seen, and not one that had its ``id`` before."""
    return id(thing) in seen and seen[id(thing)]() is thing


def _names_in(fn: Callable[..., Any]) -> Iterator[tuple[int, str]]:
    """Identities of what ``fn`` reaches by a name: globals it uses, its closure, its ``self``'s attributes."""
    inner = getattr(fn, "__func__", fn)
    code = getattr(inner, "__code__", None)
    if code is not None:
        for name in code.co_names:
            if name in inner.__globals__:
                yield id(inner.__globals__[name]), name
        for name, cell in zip(code.co_freevars, inner.__closure__ or (), strict=False):
            try:
                yield id(cell.cell_contents), name
            except ValueError:
                continue
    owner = getattr(fn, "__self__", None)
    for name, value in (attributes_of(owner) or {}).items():
        yield id(value), name
