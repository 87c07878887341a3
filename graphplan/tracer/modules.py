"""What the names in code lead to in modules, and what could come to stand before it there."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import resolve_name
from types import CodeType, FunctionType, ModuleType
from typing import Any

from graphplan.tracer.names import Names, names_of
from graphplan.tracer.source import is_library

_BUILTINS = vars(builtins)
_LOOKUPS = frozenset({"modules", "import_module", "__import__"})
"""Code with one of these names comes to modules by their names."""


def built_in(code: CodeType, space: dict[str, Any]) -> list[str]:
    """The names of built-in things that code uses."""
    own = {*code.co_freevars, *code.co_cellvars, *space.keys()}
    return sorted((names_of(code).variables & _BUILTINS.keys()) - own)


def made_by_modules(found: Names, space: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Names that code takes from the user's modules that make what they lack by a ``__getattr__`` of theirs."""
    for module in _modules(found, space):
        inner = module.__dict__
        function = inner.get("__getattr__")
        if isinstance(function, FunctionType) and not is_library(function.__code__.co_filename):
            yield from ((inner, name) for name in sorted(found.attributes | found.methods) if name not in inner)


def lacked(found: Names, code: CodeType, space: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where code looks for globals, modules and names in the user's modules that it can do without, and that are not
    there.
    """
    maybe = found.asked | found.risked
    wanted = found.absent - {*code.co_freevars, *code.co_cellvars} | (maybe if takes_own(found) else set())
    yield from ((space, name) for name in sorted(wanted) if name not in space)
    if found.absent:
        yield from ((sys.modules, name) for name, level in sorted(found.imports) if level == 0)
    for module in _modules(found, space) if maybe else ():
        if not is_library(getattr(module, "__file__", None) or ""):
            yield from ((vars(module), name) for name in sorted(maybe) if name not in vars(module))


def takes_own(found: Names) -> bool:
    """Whether code takes its own module's globals as attributes or items: ``sys.modules[__name__]``, ``globals()``."""
    return "globals" in found.variables or ("modules" in found.attributes and "__name__" in found.variables)


def _modules(found: Names, space: Mapping[str, Any]) -> list[Any]:
    """The modules that code names or imports."""
    named = [space[name] for name in sorted(found.variables & space.keys())]
    return [
        *(thing for thing in named if isinstance(thing, ModuleType)),
        *(thing for _, thing in imported(found, space)),
    ]


def imported(found: Names, space: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The modules that code imports, with those that they lie in."""
    by_name = _LOOKUPS & (found.attributes | found.methods | found.variables)
    for name, level in sorted(found.imports | {(name, 0) for name in found.attributes & sys.modules.keys() if by_name}):
        with suppress(ImportError, TypeError):
            parts = resolve_name("." * level + name, space.get("__package__")).split(".")
            for end in range(1, len(parts) + 1):
                whole = ".".join(parts[:end])
                if whole in sys.modules:
                    yield whole, sys.modules[whole]


def functions_by_name(space: dict[str, Any], code: CodeType) -> Iterator[tuple[dict[str, Any], str]]:
    """Where the functions lie that code calls: ``linear``, ``F.linear``, ``torch.nn.functional.linear``. All the names
    of the code are looked for everywhere: to tell variables from attributes takes reading its bytecode.
    """
    names = frozenset(code.co_names)
    seen: set[int] = set()
    left = [space]
    while left:
        inner = left.pop()
        for name in sorted(names & inner.keys()):
            thing = inner[name]
            if isinstance(thing, ModuleType) and id(thing) not in seen:
                seen.add(id(thing))
                left.append(vars(thing))
            elif callable(thing) and not isinstance(thing, type):
                yield inner, name
