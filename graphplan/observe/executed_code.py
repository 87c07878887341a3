"""Find the globals, closures, functions of modules and classes, and objects that a step's code uses.

A replay runs none of that code, so these names must still hold the same values.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, partialmethod
from importlib.util import resolve_name
from inspect import getmro
from itertools import chain
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ProxyTypes

from torch import nn

from graphplan.environment.origin import is_users, is_users_file, is_users_module
from graphplan.observe.names import Names, names_in, names_of
from graphplan.observe.source import Source, find_source
from graphplan.owners.kinds import SCALARS, is_user_object
from graphplan.owners.slots import Namespace
from graphplan.owners.views import Cell, Members, attributes_of
from graphplan.tensors.symbolic import SymbolicNumber

_SPACES: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()
"""One view of each class's dictionary, so that :class:`Namespace` recognizes a name by the identity of the view."""
_PASSING = frozenset({"<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"})
"""Functions that exist for one call only, so none can be called again with other closure variables."""
_MANY = 16
"""Limit of distinct sets of closure variables that are recorded for one function."""


class ExecutedCode:
    """The code of the user's own files that ran, with its globals, its closure variables and its objects."""

    def __init__(self) -> None:
        self._globals: dict[CodeType, dict[str, Any]] = {}
        self._free: dict[CodeType, set[frozenset[tuple[str, int]]]] = {}
        """The closure variables that each code ran with, by name and id, without numbers and strings."""
        self._ways: dict[CodeType, set[frozenset[tuple[str, int]]]] = {}
        """The same, including numbers and strings."""
        self._objects: dict[int, weakref.ref[Any]] = {}
        self._classes: dict[type, None] = {}
        self._hooks: Callable[[], Sequence[Any]] = tuple
        self.extensions: dict[str, str] = {}
        """Functions of extension modules that user code called, and the source lines."""
        self.writers: dict[str, str] = {}
        """Calls that wrote to files, queues, ``logging`` or other loggers, and the source lines."""
        self.threads: dict[str, Source] = {}
        """Calls that ran code in another thread or process, and the source lines."""
        self.switches: set[str] = set()
        """C functions that ran and read or set torch's switches of :attr:`.Seen.BY_USE`."""
        self.compiled: dict[int, tuple[Any, str]] = {}
        """Contexts of ``torch.compile`` by id, each with the name of the code that it compiled."""
        self.mentioned: set[str] = set()
        """Names and strings in all Python code that this thread ran."""
        self.beyond_libraries: set[str] = set()
        """Names in that code, except for torch's and Lightning's."""

    @property
    def codes(self) -> Collection[CodeType]:
        """The code that ran."""
        return self._globals.keys()

    def note_compiled(self, context: Any, function: Any) -> None:
        """Note a call of ``function``, if ``context`` compiles it; other contexts leave it uncompiled."""
        module = getattr(function, "__self__", None)
        name = type(module).__name__ if isinstance(module, nn.Module) else getattr(function, "__qualname__", "code")
        if callable(getattr(context, "callback", None)):
            self.compiled[id(context)] = context, name

    def note(self, frame: FrameType, owner: Any) -> None:
        """Note a call."""
        code = frame.f_code
        self._globals[code] = frame.f_globals
        if code.co_freevars and code.co_name not in _PASSING:
            values = frame.f_locals
            held = {name: values[name] for name in code.co_freevars if name in values}
            # The step itself may rebind numbers and strings.
            kept = {name: value for name, value in held.items() if not issubclass(type(value), SCALARS)}
            for calls, variables in ((self._free, kept), (self._ways, held)):
                known = calls.setdefault(code, set())
                if len(known) <= _MANY:
                    known.add(_identities(variables))
        if issubclass(type(owner), type):
            self._classes[owner] = None
        elif owner is not None:
            self._classes[type(owner)] = None
            # Objects without weak references have no attributes to walk either.
            with suppress(TypeError):
                self._objects[id(owner)] = weakref.ref(owner)

    def leave_out(self, objects: Iterable[Any]) -> None:
        """Forget ``objects`` that are arguments of the step: another call may have other ones."""
        for thing in objects:
            self._objects.pop(id(thing), None)

    def note_class(self, kind: type) -> None:
        """Note the class of an argument of the step."""
        self._classes[kind] = None

    def note_write(self, label: str | None) -> None:
        """Note a call that writes, under its ``label``, unless that is None."""
        if label is not None and label not in self.writers:
            self.writers[label] = str(find_source())

    def name_all(
        self,
        fn: Callable[..., Any],
        names: Namespace,
        has_met: Callable[[Any], bool],
        hooks: Callable[[], Sequence[Any]] = tuple,
    ) -> bool:
        """Add the names that ``fn`` uses and whose objects an earlier call ``has_met``; return True if any is new.
        ``hooks`` returns the hooks that torch may have called.
        """
        self._hooks = hooks
        new = [names.add(label, space, key) for label, space, key in self._places(fn, names, has_met)]
        # They lead to the owners, which this object must not keep alive.
        self._hooks = tuple
        found = names_in(self._globals)
        new.append(not names.asked.issuperset(found.asked))
        names.asked |= found.asked
        names.attributes |= found.attributes
        names.computes |= found.dynamic
        names.iterated |= found.iterated
        names.mentioned |= self.mentioned
        names.beyond_libraries |= self.beyond_libraries
        return any(new)

    def objects(self) -> Iterator[Any]:
        """Yield the user's objects whose methods ran and that still exist, except modules."""
        for reference in self._objects.values():
            thing = reference()
            if thing is not None and is_user_object(thing) and not isinstance(thing, nn.Module):
                yield thing

    def _places(
        self, fn: Callable[..., Any], names: Namespace, has_met: Callable[[Any], bool]
    ) -> Iterator[tuple[str, Any, Any]]:
        own = getattr(function_of(fn), "__globals__", None)
        for code, space in self._globals.items():
            if not (space is own or is_of_module(space)):
                # The methods of a ``namedtuple`` have generated globals, new ones in each call if the step makes it.
                continue
            found = names_of(code)
            # A closure variable is no global, even if a global has the same name.
            used = found.variables.difference(code.co_freevars, code.co_cellvars)
            # globals()["RATE"], sys.modules[__name__].RATE
            if "globals" in used:
                used |= {constant for constant in code.co_consts if type(constant) is str}
            if "sys" in used and "modules" in found.attributes:
                used |= found.attributes
            for name in sorted(used & space.keys()):
                if not name.startswith("__"):
                    yield name, space, name
                    yield from self._within(name, space[name], found)
            for name, module in _imported(found, space):
                yield from self._within(name, module, found)
        held = (function_of(member) for kind in self._kinds(has_met) for member in list(vars(kind).values()))
        methods = [function for function in held if function is not None and function.__code__ in self._globals]
        for function in self._functions([fn, *methods], names, has_met):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
                if name != "__class__":
                    yield name, Cell(cell), name
            for name, value in _variables_of(function).items():
                if name != "__class__":
                    yield from self._within(name, value, names_of(function.__code__))
        yield from self._members(has_met)

    def _within(self, name: str, thing: Any, found: Names) -> Iterator[tuple[str, Any, Any]]:
        """Yield the names that code takes from ``thing`` if it is a user's module; note ``thing`` if it is a class."""
        # Use type(), not isinstance(): a dead weak proxy raises.
        kind = type(thing)
        if issubclass(kind, ModuleType) and is_users_module(thing, thing.__name__):
            inner = vars(thing)
            for attribute in sorted((found.attributes | found.methods | found.stored) & inner.keys()):
                if isinstance(inner[attribute], type):
                    self._classes[inner[attribute]] = None
                if not isinstance(inner[attribute], ModuleType):
                    yield f"{name}.{attribute}", inner, attribute
                elif f".{attribute}" not in name:
                    yield from self._within(f"{name}.{attribute}", inner[attribute], found)
        elif issubclass(kind, type):
            self._classes[thing] = None

    def _kinds(self, has_met: Callable[[Any], bool]) -> list[type]:
        """Return the user's classes whose methods ran or that the code names."""
        # A class also gets attributes from its metaclass.
        kinds = dict.fromkeys(base for leaf in self._classes for base in (*leaf.__mro__, *getmro(type(leaf))))
        return [kind for kind in filter(is_users, kinds) if _is_in_module(kind) or has_met(kind)]

    def _members(self, has_met: Callable[[Any], bool]) -> Iterator[tuple[str, Any, Any]]:
        """Yield the methods of the user's classes that ran, and the values of these classes that the code names."""
        found = names_in(self._globals)
        used = found.attributes | found.stored
        called = used | found.methods
        for kind in self._kinds(has_met):
            methods, values = _SPACES.setdefault(kind, vars(kind)), Members(kind)
            for name, member in list(methods.items()):
                function = function_of(member)
                if function is not None and function.__code__ in self._globals:
                    yield f"{kind.__name__}.{name}", methods, name
                elif name in (called if type(member) is staticmethod else used) and _is_value(member):
                    yield f"{kind.__name__}.{name}", values, name

    def _functions(
        self, roots: Iterable[Callable[..., Any]], names: Namespace, has_met: Callable[[Any], bool]
    ) -> Iterator[FunctionType]:
        """Yield the functions with closures whose code ran: those that ``roots`` reach by name, and any other function
        whose closure variables match a call, unless the step makes a new one in each call.
        """
        left = dict.fromkeys(self._free)
        for function in _reachable(roots):
            if function.__code__ in self._free:
                left.pop(function.__code__, None)
                yield function
        # If functions that an earlier step found account for all calls, their names are known.
        known = {code: [reference() for reference in names.functions.get(code, ())] for code in left}
        codes = [code for code in left if not self._are_explained(code, filter(None, known[code]))]
        # gc.get_referrers looks at all objects of the process, in 60 ms: try hooks and known objects' attributes first.
        held = list(self._held()) if codes else []
        # Functions of one code may have equal numbers, which change independently: these do not tell them apart.
        unheld = [c for c in codes if self._ways[c] != self._free[c] or not self._are_explained(c, held)]
        # What a search did not find is made anew in each call, and is gone after it: do not search again.
        searched = [code for code in unheld if names.functions.get(code) != []]
        found = [function for function in held if function.__code__ in codes and function.__code__ not in unheld]
        referrers = gc.get_referrers(*searched) if searched else ()
        found += [thing for thing in referrers if isinstance(thing, FunctionType)]
        alike: dict[CodeType, list[FunctionType]] = {}
        for function in filter(self._matches, found):
            alike.setdefault(function.__code__, []).append(function)
        names.functions.update((code, []) for code in searched if code not in alike)
        for code, functions in alike.items():
            met = list(map(has_met, functions))
            if all(met):
                names.functions[code] = list(map(weakref.ref, functions))
                yield from functions

    def _held(self) -> Iterator[FunctionType]:
        """Yield hooks, and the functions that are attributes of the objects whose methods ran, and of their classes."""
        spaces = [attributes_of(reference()) or {} for reference in self._objects.values()]
        members = [list(space.values()) for space in (*spaces, *map(vars, filter(is_users, self._classes)))]
        for member in chain(self._hooks(), *members):
            yield from _wrapped_by(function_of(member))

    def _are_explained(self, code: CodeType, functions: Iterable[FunctionType]) -> bool:
        """Return True if the closures of ``functions`` account for all closure variables that ``code`` ran with."""
        held = [_identities(_variables_of(function)) for function in functions if function.__code__ is code]
        ways = self._ways[code]
        return len(ways) <= _MANY and all(any(way <= one for one in held) for way in ways)

    def _matches(self, function: FunctionType) -> bool:
        held = _identities(_variables_of(function))
        return any(call <= held for call in self._free.get(function.__code__, ()))


def is_of_module(space: Mapping[str, Any]) -> bool:
    """Return True if ``space`` is the namespace of a module, rather than a dictionary that was passed to ``exec``."""
    module = sys.modules.get(str(space.get("__name__")))
    return module is not None and vars(module) is space


def _is_value(member: Any) -> bool:
    """Return True if ``member`` of a class is a value or a static method, which may hold a library's function."""
    return type(member) is staticmethod or not hasattr(type(member), "__get__")


def _is_in_module(kind: type) -> bool:
    """Return True if a module holds the class under its qualified name, so that no call makes it anew."""
    outer, *inner = kind.__qualname__.split(".")
    found = vars(sys.modules[kind.__module__]).get(outer) if kind.__module__ in sys.modules else None
    return found is kind or (bool(inner) and "<locals>" not in inner and issubclass(type(found), type))


def _variables_of(function: FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def _identities(values: Mapping[str, Any]) -> frozenset[tuple[str, int]]:
    """Return pairs of name and id. A stand-in counts as the number that it replaces."""
    own = ((name, value._known if type(value) is SymbolicNumber else value) for name, value in values.items())
    return frozenset((name, id(value)) for name, value in own)


def function_of(member: Any) -> FunctionType | None:
    """Return the function behind a method, property or partial; None if there is none."""
    if isinstance(member, (staticmethod, classmethod, MethodType)):
        return function_of(member.__func__)
    if isinstance(member, (partial, partialmethod)):
        return function_of(member.func)
    if isinstance(member, property):
        return function_of(member.fget)
    return member if isinstance(member, FunctionType) else None


def _wrapped_by(function: FunctionType | None) -> Iterator[FunctionType]:
    """Yield ``function`` and those that it wraps: a package's decorator (``torch.no_grad()``) hides the user's own."""
    found: list[FunctionType] = []
    while isinstance(function, FunctionType) and function not in found:
        found.append(function)
        function = vars(function).get("__wrapped__")
    yield from found


def _reachable(roots: Iterable[Any]) -> Iterable[FunctionType]:
    """Return the functions of ``roots`` and those that they reach by name through closures and globals."""
    found: dict[int, FunctionType] = {}
    left = list(roots)
    while left:
        thing = left.pop()
        if type(thing) in ProxyTypes:
            continue
        function = function_of(thing)
        if function is None or id(function) in found or not is_users_file(function.__code__.co_filename):
            continue
        found[id(function)] = function
        left += _variables_of(function).values()
        left += [function.__globals__.get(name) for name in names_of(function.__code__).variables]
    return found.values()


def _imported(found: Names, space: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the user's modules that code imports as it runs."""
    for name, level in sorted(found.imports):
        with suppress(ImportError, TypeError):
            whole = resolve_name("." * level + name, space.get("__package__"))
            if whole in sys.modules and is_users_module(sys.modules[whole], whole):
                yield whole, sys.modules[whole]
