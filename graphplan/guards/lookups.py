"""What Python looks up where a step's code names an attribute or a method, and what could come to stand before it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from graphplan.owners import Walk, class_space, is_foreign
from graphplan.plan import Plan

Place = tuple[Any, Any, Any]
"""A container, a key in it, and what lies there."""

_PARTS = ("_parameters", "_buffers", "_modules")
_IN_THE_KEY = ("forward", "step", "zero_grad", "_wrapped_call_impl")
"""Methods whose own ones of an instance are part of the key, and one that nobody looks for in an instance."""
_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")
"""What a call of a layer goes through, whatever its code names."""


def methods_called(walk: Walk, plan: Plan) -> Iterable[Place]:
    """Methods of tensors', layers' and libraries' classes that the step may call: one replaced there is heeded."""
    kinds = [Tensor, Parameter, *map(type, walk.modules)]
    asked = [(kind, name) for kind in kinds for name in (*_CALLS, *sorted(plan.names.called))]
    asked += [(kind, name) for kind in (Tensor, Parameter) for name in sorted(plan.names.called_by_torch)]
    asked += sorted(plan.names.ran, key=lambda method: (method[0].__module__, method[0].__qualname__, method[1]))
    for kind, name in dict.fromkeys(asked):
        method = getattr(kind, name, None)
        # Of some, each look makes another object.
        if method is not None and getattr(kind, name) is method:
            yield kind, name, method


def _absent_methods(walk: Walk, plan: Plan) -> Iterable[tuple[dict[str, Any], str]]:
    """Methods of libraries' that the step calls, before which a layer's or optimizer's own would stand. What the key
    has is left out, and what is looked up in the class alone.
    """
    things = [*walk.modules, *walk.optimizers.values()]
    names = {
        kind: [
            name
            for base, name in plan.names.ran
            if issubclass(kind, base) and not name.startswith("__") and name not in _IN_THE_KEY
        ]
        for kind in map(type, things)
    }
    return [(vars(t), name) for t in things for name in sorted(names[type(t)]) if name not in vars(t)]


def _methods_of(kind: type, names: Collection[str]) -> list[str]:
    """Those of ``names`` that are functions of the class, before which an instance's own would stand. Modules' own
    ``forward`` is part of the key.
    """
    found = {name: next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None) for name in names}
    own_forward = issubclass(kind, Module)
    return [n for n, f in found.items() if isinstance(f, FunctionType) and not (own_forward and n == "forward")]


def absent_names(walk: Walk, plan: Plan) -> Iterator[tuple[dict[str, Any], str]]:
    """Names that dictionaries do not have, and that would be found there before what the step's code finds now."""
    looked_up: dict[type, list[str]] = {}
    # Of all that such code names, hardly anything is ever looked for in a library's objects, which are many.
    nowhere = [
        name for name in plan.names.risked if not any(_has(thing, inner, name) for thing, inner in walk.attributes)
    ]
    for thing, inner in walk.attributes:
        kind = type(thing)
        if kind not in looked_up:
            looked_up[kind] = [
                *plan.names.asked,
                *(nowhere if is_foreign(kind) else plan.names.risked),
                *_methods_of(kind, plan.names.methods),
                *_found_behind(kind, plan.names.named),
            ]
        yield from ((inner, name) for name in looked_up[kind] if name not in inner)
    maybe = {*plan.names.asked, *plan.names.risked}
    bases = dict.fromkeys(base for kind in looked_up for base in kind.__mro__) if maybe else {}
    for space in filter(None, map(class_space, bases)):
        yield from ((space, name) for name in sorted(maybe) if name not in space)
    yield from ((space, name) for space, name in walk.lacking if name not in space)
    yield from _absent_methods(walk, plan)


def _has(thing: Any, inner: dict[str, Any], name: str) -> bool:
    """Whether code finds the name there: among a module's parts, too, which its ``__getattr__`` looks through."""
    parts = (inner.get(part, ()) for part in _PARTS) if isinstance(thing, Module) else ()
    return name in inner or hasattr(type(thing), name) or any(name in part for part in parts)


def _found_behind(kind: type, names: Collection[str]) -> Iterator[str]:
    """Those of ``names`` that code finds in the user's classes, or that their ``__getattr__`` makes: an instance's own
    would stand before them. Methods are left out, and what stands before an instance's own.
    """
    bases = [base for base in kind.__mro__ if not is_foreign(base)]
    makes = any("__getattr__" in vars(base) for base in bases)
    for name in sorted(names) if bases else ():
        holder = next((base for base in kind.__mro__ if name in vars(base)), None)
        if holder is None:
            if makes:
                yield name
        elif holder in bases:
            member = vars(holder)[name]
            if not isinstance(member, FunctionType) and not hasattr(type(member), "__set__"):
                yield name
