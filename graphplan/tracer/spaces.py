"""Where the names lie that a step's code uses: globals, closures, functions of modules and classes, objects.

A replay runs none of that code, so whatever it found behind these names must still be there.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import nn

from graphplan.owners import SCALARS, Cell, Namespace, is_user_object
from graphplan.tracer.names import names_of
from graphplan.tracer.source import is_library

_SPACES: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()
"""One view of each class's dictionary, so that a name is known by it."""
_MANY = 16
"""Calls of one function with other closure variables that are told apart."""


class Ran:
    """Code of the user's that ran: with which globals, which closure variables, and on which objects."""

    def __init__(self) -> None:
        self._globals: dict[CodeType, dict[str, Any]] = {}
        self._free: dict[CodeType, list[dict[str, int]]] = {}
        self._objects: dict[int, weakref.ref[Any]] = {}
        self._classes: dict[type, None] = {}

    @property
    def codes(self) -> Collection[CodeType]:
        """The code that ran."""
        return self._globals.keys()

    def note(self, frame: FrameType, owner: Any) -> None:
        """Note a call."""
        code = frame.f_code
        self._globals[code] = frame.f_globals
        if code.co_freevars:
            calls = self._free.setdefault(code, [])
            values = frame.f_locals
            # Numbers and strings are rebound by the step itself, perhaps.
            held = {name: values[name] for name in code.co_freevars if name in values}
            found = {name: id(value) for name, value in held.items() if not isinstance(value, SCALARS)}
            if found not in calls and len(calls) < _MANY:
                calls.append(found)
        if owner is not None:
            self._classes[type(owner)] = None
            # Objects that cannot be referred to weakly have no attributes to walk either.
            with suppress(TypeError):
                self._objects[id(owner)] = weakref.ref(owner)

    def name_all(self, fn: Callable[..., Any], names: Namespace, lasts: Callable[[Any], bool]) -> bool:
        """Add every name to ``names``; whether any is new. ``fn`` is the step, ``lasts`` says of a function whether it
        was there before this step already.
        """
        new = [names.add(label, space, key) for label, space, key in self._places(fn, lasts)]
        return any(new)

    def objects(self) -> Iterator[Any]:
        """The user's objects whose methods ran and that are still there, other than modules."""
        for reference in self._objects.values():
            thing = reference()
            if thing is not None and is_user_object(thing) and not isinstance(thing, nn.Module):
                yield thing

    def _places(self, fn: Callable[..., Any], lasts: Callable[[Any], bool]) -> Iterator[tuple[str, Any, Any]]:
        for code, space in self._globals.items():
            found = names_of(code)
            for name in sorted(found.variables & space.keys()):
                if name.startswith("__"):
                    continue
                yield name, space, name
                if isinstance(space[name], ModuleType):
                    inner = vars(space[name])
                    for attribute in sorted((found.attributes | found.methods) & inner.keys()):
                        if not isinstance(inner[attribute], ModuleType):
                            yield f"{name}.{attribute}", inner, attribute
        for function in self._functions(fn, lasts):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
                if name != "__class__":
                    yield name, Cell(cell), name
        yield from self._methods()

    def _methods(self) -> Iterator[tuple[str, Any, Any]]:
        """Methods of the user's classes that ran: somebody may replace them in the class."""
        for kind in {base: None for leaf in self._classes for base in leaf.__mro__}:
            space = _SPACES.setdefault(kind, vars(kind))
            for name, member in space.items():
                function = getattr(member, "__func__", getattr(member, "fget", member))
                if isinstance(function, FunctionType) and function.__code__ in self._globals:
                    yield f"{kind.__name__}.{name}", space, name

    def _functions(self, fn: Callable[..., Any], lasts: Callable[[Any], bool]) -> Iterator[FunctionType]:
        """The functions with closures whose code ran: those that the step reaches by name, and any other one whose
        variables are those that it ran with. Functions that the step itself makes have new variables each time.
        """
        left = dict.fromkeys(code for code in self._free)
        for function in _reachable(fn):
            if function.__code__ in self._free:
                left.pop(function.__code__, None)
                yield function
        if left:
            # A function of the step's own that calls itself by its name stays until it is collected. It is young.
            gc.collect(0)
            for thing in gc.get_referrers(*left):
                if isinstance(thing, FunctionType) and self._matches(thing) and lasts(thing):
                    yield thing

    def _matches(self, function: FunctionType) -> bool:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        held = {name: id(Cell(cell)[name]) for name, cell in cells.items() if _is_set(cell)}
        return any(call.items() <= held.items() for call in self._free.get(function.__code__, ()))


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _reachable(fn: Any) -> Iterable[FunctionType]:
    """``fn`` and the functions that it reaches through closures and globals by name."""
    found: dict[int, FunctionType] = {}
    left = [fn]
    while left:
        thing = left.pop()
        if isinstance(thing, partial):
            left += [thing.func]
        function = getattr(thing, "__func__", thing)
        if not isinstance(function, FunctionType) or id(function) in found or is_library(function.__code__.co_filename):
            continue
        found[id(function)] = function
        left += [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
        left += [function.__globals__.get(name) for name in names_of(function.__code__).variables]
    return found.values()
