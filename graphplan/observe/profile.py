"""Watch the interpreter: reads of tensor memory that bypass the dispatcher, and Python values that code may read.

A ``TorchFunctionMode`` would see reads such as ``Tensor.tolist``. But under one, torch's modules leave their fast
paths, which changes the numbers. A profile function changes nothing.

The attributes that bytecode loads tell which values code may have read. The user's own code counts for every owner,
code of installed packages for objects of their classes (a model's configuration), and code of torch and Lightning only
for its own ``self``, since their many names would match everything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import cached_property
from inspect import getattr_static, isfunction
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from graphplan.environment.collector import no_collections
from graphplan.environment.origin import TORCH, Codes, file_of, is_library, is_librarys, is_users, is_users_file
from graphplan.environment.switches import USED
from graphplan.errors import Faults
from graphplan.observe.conversions import READERS, Conversions
from graphplan.observe.executed_code import ExecutedCode, function_of
from graphplan.observe.host_calls import STARTERS, STARTERS_IN_C, WRITERS, name_of_saving, name_of_start, name_of_write
from graphplan.observe.names import LazyNameIndex, Names, names_in, names_of
from graphplan.observe.number_calls import note_code
from graphplan.observe.source import find_source
from graphplan.observe.subscripts import used_otherwise_by
from graphplan.observe.type_calls import TypeCalls, handles_errors, type_calls
from graphplan.observe.watching import Unwatched, Watcher, is_silent, new_watcher
from graphplan.owners.discovery import CALLS, INITIALIZERS, note_called, note_made
from graphplan.owners.kinds import holds_values, is_known
from graphplan.owners.slots import Namespace, Presence, Scalar
from graphplan.owners.views import ReadOnly

_IMPORTS = "<frozen importlib."
_DYNAMO = os.path.join(TORCH, "_dynamo") + os.sep
_COMPILES, _ENTERS_COMPILED = f"{_DYNAMO}convert_frame.py", f"{_DYNAMO}eval_frame.py"
"""The files in which ``torch.compile`` compiles code, and enters compiled code."""
_LOOKED_AT = WRITERS | READERS.keys() | USED.keys() | {"print"} | {function.__name__ for function in STARTERS_IN_C}
"""Names of the C functions that are reported from all code."""
_CALL = Module._call_impl
_FREQUENT: tuple[Any, ...] = (Module.__getattr__, _CALL, *filter(isfunction, vars(Tensor).values()))
_UNOWNED = Codes(*(each for each in _FREQUENT if each.__code__.co_filename.startswith(TORCH)))
"""Frequent methods of torch whose ``self`` need not be noted: ``Module.__getattr__`` leads only to parameters, buffers
and modules; the module of ``_call_impl`` is known by then; tensors hold no guarded values.
"""


@dataclass
class Reads:
    """Names that code may have read.

    Attributes:
        ran: code that ran, by its id and that of the object whose method it is, or 0.
        by_users: names in the user's code.
        by_packages: attributes that code of installed packages other than torch and Lightning loads.
        stored: attributes of modules that were assigned, each with the module's id.
        ask_classes: whether the user's code may have called ``type`` on a stand-in, for any use of the result.
        compared: classes that the user's code compared with the type of a value, which may have been a stand-in.
    """

    ran: dict[tuple[int, int], CodeType] = field(default_factory=dict)
    by_users: Names = field(default_factory=lambda: names_in(()))
    by_packages: LazyNameIndex = field(default_factory=lambda: LazyNameIndex("attributes"))
    stored: set[tuple[int, str]] = field(default_factory=set)
    ask_classes: bool = False
    compared: set[type] = field(default_factory=set)

    def __or__(self, other: Reads) -> Reads:
        """Return the names that code may have read in either of two steps."""
        return Reads(*(getattr(self, each.name) | getattr(other, each.name) for each in fields(self)))

    @cached_property
    def codes(self) -> list[tuple[CodeType, int]]:
        """The code of the user and of installed packages, each with the id of the object whose method it is, or 0."""
        return [(code, owner) for (_, owner), code in self.ran.items() if not is_library(code.co_filename)]

    @cached_property
    def assigned(self) -> LazyNameIndex:
        """Attributes that this code assigns other than by ``+=``."""
        return LazyNameIndex("assigned", (code for code, _ in self.codes))

    @cached_property
    def methods_on(self) -> dict[int, list[CodeType]]:
        """The code of the methods that ran, by the id of their object."""
        found: dict[int, list[CodeType]] = {}
        for (_, owner), code in self.ran.items():
            found.setdefault(owner, []).append(code)
        return found

    def detects(self, kinds: tuple[type, ...]) -> bool:
        """Return True if code may have told a stand-in from a real value of one of ``kinds``."""
        return self.ask_classes or any(issubclass(kind, kinds) for kind in self.compared)

    def may_cover(self, scalar: Scalar) -> bool:
        """Return True if user code may have read ``scalar`` by a computed attribute name."""
        is_value = scalar.via is None and not isinstance(scalar, Presence)
        return self.by_users.dynamic and is_value and any(holds_values(owner) for owner, _ in scalar.ways())

    def reads_mark(self, name: str) -> bool:
        """Return True if code may have read the attribute ``name`` of a fed tensor."""
        return self.by_users.dynamic or name in self.by_users.attributes or name in self.by_users.methods

    def misused(self, names: Collection[str]) -> set[str]:
        """Return the ``names`` that code uses for anything other than reads by an index and ``len``."""
        # Other code may access a global of a module as the module's attribute.
        every = {*names, *(f".{name}" for name in names)}
        found = set[str]().union(*(used_otherwise_by(code, every) for code, _ in self.codes)) if names else set()
        return {name for name in names if name in found or f".{name}" in found}

    def covers(self, scalar: Scalar) -> bool:
        """Return True if traced code may have read this value."""
        if isinstance(scalar, Presence):
            # An existing attribute is compared by its value. Of the many modules, most are never asked for others.
            name, is_module = scalar.attribute, isinstance(scalar.owner, Module)
            is_asked = not is_module or name in self.by_users.methods or self._is_read_within(scalar.owner, name)
            return is_asked and not scalar.get()
        if isinstance(scalar.owner, Namespace) or scalar.name is not None or self._is_listed(scalar):
            return True
        if scalar.via is not None and scalar.via not in self.by_users.attributes:
            return False
        return any(self._covers(scalar, *way) for way in scalar.ways())

    def _covers(self, scalar: Scalar, owner: Any, attribute: str) -> bool:
        if attribute in self.by_users.attributes or self._is_read_within(owner, attribute):
            return True
        if attribute not in self.by_users.methods:
            return False
        # The value is called, or is part of a callable: keywords of a partial, the cache of a function.
        return callable(scalar.get()) or callable(getattr_static(owner, attribute, None))

    def _is_listed(self, scalar: Scalar) -> bool:
        """Return True if an owner lists the value by name, as it does the Trainer's numbers, and the code of an
        installed package reads that name. Such code may reach it through properties of a library's base class.
        """
        is_listed = isinstance(scalar.container, ReadOnly) and bool(scalar.container.names)
        return is_listed and all(map(self.by_packages.is_loaded, filter(None, (scalar.attribute, scalar.via))))

    def _is_read_within(self, owner: Any, attribute: str) -> bool:
        """Return True if methods that ran on ``owner``, or its package's code, read the ``attribute``."""
        if any(attribute in names.attributes for names in self._names_on(owner, attribute)):
            return True
        kind = type(owner)
        return attribute in self.by_packages and not is_users(kind) and not is_librarys(kind)

    def may_store(self, scalar: Scalar) -> bool:
        """Return True if a method of the object with ``scalar`` has assigned it, and does so in each such step."""
        if isinstance(scalar.owner, Module):
            names_on = self._names_on(scalar.owner, scalar.attribute) if self._is_stored(scalar) else ()
            return any(scalar.attribute in names.assigned for names in names_on)
        names_on = self._names_on(scalar.owner, scalar.attribute)
        return any(scalar.attribute in names.always for names in names_on)

    def may_assign(self, scalar: Scalar) -> bool:
        """Return True if code other than a method of the object with ``scalar`` may have assigned it."""
        is_named = scalar.attribute in self.assigned and scalar.via is None
        return is_named and self._is_stored(scalar) and not self.may_store(scalar)

    def _is_stored(self, scalar: Scalar) -> bool:
        """Return True if the attribute was assigned. This is known for modules alone: also return True for others."""
        return not isinstance(scalar.owner, Module) or (id(scalar.owner), scalar.attribute) in self.stored

    def _names_on(self, owner: Any, attribute: str) -> Iterator[Names]:
        """Yield the names of each method that ran on ``owner`` and contains the word ``attribute``."""
        word = attribute.removesuffix("[:]")
        for code in self.methods_on.get(id(owner), ()):
            # Skip other code: to find all its names takes half a millisecond.
            if word in code.co_names or word in code.co_consts:
                yield names_of(code)

    def uses(self, scalar: Scalar) -> bool:
        """Return True if code reads the attribute or variable that leads to ``scalar`` other than for ``+=``."""
        if (scalar.name is not None and self._uses_name(scalar.name)) or self._is_listed(scalar):
            return True
        if scalar.via is not None and scalar.via not in self.by_users.attributes:
            return False
        return any(self._uses(*way) for way in scalar.ways())

    def _uses(self, owner: Any, attribute: str) -> bool:
        if isinstance(owner, Namespace):
            return self._uses_name(attribute)
        return attribute.removeprefix(".") in self.by_users.attributes or self._is_read_within(owner, attribute)

    def _uses_name(self, name: str) -> bool:
        # A leading dot marks a value of a module or class, which code uses as an attribute.
        return name.removeprefix(".") in (self.by_users.attributes if name.startswith(".") else self.by_users.read)


class Profile:
    """A context manager that watches the interpreter. It calls ``on_read(name, tensor)`` for each read of a tensor's
    memory (None: the tensor is unknown), ``on_print()`` for each ``print``, and ``on_write(values)`` before a Python
    function writes its arguments. The garbage collector is off meanwhile: finalizers are no part of the step.
    """

    def __init__(
        self,
        on_read: Callable[[str, Tensor | None], None] | None = None,
        on_print: Callable[[], None] = lambda: None,
        on_write: Callable[[Iterable[Any]], None] = lambda values: None,
    ) -> None:
        self._on_read = on_read
        self._on_print = on_print
        self._on_write = on_write
        self._codes: dict[tuple[int, int], CodeType] = {}
        self._owners: dict[int, tuple[str | None, bool]] = dict.fromkeys(_UNOWNED, (None, False))
        """Results of :meth:`_meet`, by the id of the code."""
        self._known: set[Any] = set()
        self._stored: set[tuple[int, str]] = set()
        self._users: set[int] = set()
        """Ids of the user's code that ran."""
        self._asked: dict[int, TypeCalls] = {}
        """Calls of ``type`` on arguments, by the id of the code: each call of the code may get a stand-in or not."""
        self._compared: set[type] = set()
        self._ask_classes = self._ask_in_errors = self._handle_errors = False
        self._others = ExitStack()
        self._importing: FrameType | None = None
        self._setattr = Module.__setattr__.__code__
        self._watcher: Watcher
        self.executed = ExecutedCode()
        self.faults = Faults()

    def __enter__(self) -> Profile:
        self._others.enter_context(no_collections())
        if self._on_read is not None:
            self._others.enter_context(Conversions(self._note_conversion))
        self._watcher = new_watcher(self._note_call, self._note_c_call, _LOOKED_AT, self._users, self.faults)
        try:
            self._watcher.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._watcher.stop()
        finally:
            self._others.close()
            # One code object may have run on many modules: look at it once.
            for code in {id(code): code for code in self._codes.values()}.values():
                self.executed.mentioned.update(code.co_names, (each for each in code.co_consts if type(each) is str))
                if not is_library(code.co_filename):
                    self.executed.beyond_libraries.update(code.co_names)
            # Break the reference cycle and release the frame, so that nothing outlives this object.
            del self._watcher
            self._importing = None

    def _is_importing(self) -> bool:
        """Return True while a module is imported or code compiled, which is no part of the step."""
        if self._importing is not None:
            try:
                # This raises RuntimeError while the frame runs.
                self._importing.clear()
            except RuntimeError:
                return True
            self._importing = None
        return False

    def _note_call(self, frame: FrameType, code: CodeType) -> bool:
        """Note that ``code`` runs in ``frame``. Return True if this code need not be reported again."""
        if self._importing is not None and self._is_importing():
            return False
        number = id(code)
        if number in CALLS:
            # First of all, because module calls are the most frequent ones, and `f_locals` is slow.
            module = note_called(frame, code)
            if module is not None:
                self._codes[id(_CALL.__code__), id(module)] = _CALL.__code__
            self._codes[number, 0 if module is None else id(module)] = code
            return False
        name, is_closure = self._owners.get(number) or self._meet(frame, code, number)
        # The object or class whose method runs.
        owner = None if name is None else frame.f_locals.get(name)
        # By id: hashing a code object takes time in proportion to its length.
        key = (number, 0 if owner is None else id(owner))
        known = key in self._codes
        asked = self._asked.get(number)
        if asked is not None:
            self._ask_classes |= asked.are_stand_ins(frame)
        if known and not is_closure:
            return name is None and asked is None
        if self._importing is not None:
            return False
        self._codes[key] = code
        if is_library(code.co_filename):
            if not known and (label := name_of_saving(frame, code.co_name, owner)) is not None:
                self.executed.note_write(label)
                if label != "logging":
                    # `logging` itself reads the values, when it formats a record that a handler wants.
                    self._on_write(frame.f_locals.values())
            return name is None
        if not known:
            note_code(code, frame.f_globals)
        if is_users_file(file_of(code, frame.f_globals)):
            if number not in self._users:
                self._note_asked(frame, code)
            self.executed.note(frame, owner)
            return False
        return name is None

    def _note_asked(self, frame: FrameType, code: CodeType) -> None:
        """Note the user's ``code`` and its calls of ``type``."""
        self._users.add(id(code))
        asked = type_calls(code)
        if asked.paths:
            self._asked[id(code)] = asked
        classes = asked.classes(frame)
        self._ask_classes |= asked.others or None in classes or asked.are_stand_ins(frame)
        self._compared.update(filter(None, classes))
        self._ask_in_errors |= asked.in_errors
        self._handle_errors |= handles_errors(code)

    def _meet(self, frame: FrameType, code: CodeType, number: int) -> tuple[str | None, bool]:
        """Return the variable with the object or class whose method runs, or None; and whether code is a closure's."""
        if code.co_filename.startswith(_IMPORTS) or (code.co_filename == _COMPILES and code.co_name == "__call__"):
            self._importing = frame
            return None, True
        found = _owner_name(frame, code), bool(code.co_freevars)
        if code.co_filename == _ENTERS_COMPILED and {"self", "fn"} <= {*code.co_freevars}:
            self.executed.note_compiled(frame.f_locals["self"], frame.f_locals["fn"])
        elif code is self._setattr:
            self._stored.add((id(frame.f_locals["self"]), frame.f_locals["name"]))
        elif number in INITIALIZERS:
            note_made(frame.f_locals["self"], find_source)
        elif number not in STARTERS:
            self._owners[number] = found
        elif (start := name_of_start(frame)) is not None:
            self.executed.threads.setdefault(start, find_source())
        return found

    def _note_conversion(self, name: str, tensor: Tensor | None) -> None:
        assert self._on_read is not None
        if not (self._watcher.is_paused or self._is_importing()):
            with Unwatched(), self.faults.noting():
                self._on_read(name, tensor)

    def _note_c_call(self, frame: FrameType, function: Any) -> None:
        if is_silent(frame.f_code) or (self._importing is not None and self._is_importing()):
            return
        owner, home = function.__self__, function.__module__
        if self._on_read and function.__name__ in READERS and (isinstance(owner, Tensor) or owner is torch._C):
            self._on_read(READERS[function.__name__], owner if isinstance(owner, Tensor) else None)
        elif function is print:
            self._on_print()
        elif function.__name__ in USED:
            self.executed.switches.add(function.__name__)
        elif function in STARTERS_IN_C and not is_library(frame.f_code.co_filename):
            self.executed.threads.setdefault(f"_thread.{function.__name__}", find_source())
        elif (writes := name_of_write(frame, function)) is not None:
            self.executed.note_write(writes)
        elif (type(owner) if home is None else home) not in self._known:
            self._note_extension(frame, function)

    def _note_extension(self, frame: FrameType, function: Any) -> None:
        """Note a call by user code of a function of an extension module, whose state cannot be seen."""
        name = _name_of(function)
        if is_known(name):
            self._known.add(type(function.__self__) if function.__module__ is None else function.__module__)
        elif is_users_file(file_of(frame.f_code, frame.f_globals)):
            self.executed.extensions[name] = str(find_source())

    def reads(self) -> Reads:
        """Return the names that the code that ran may have read."""
        # The step raised no error: a call of `type` for an error's text has run only if code catches errors.
        may_ask = self._ask_classes or (self._ask_in_errors and self._handle_errors)
        ran = ((number, code) for (number, _), code in self._codes.items() if not is_library(code.co_filename))
        by_packages = LazyNameIndex("attributes", (code for number, code in ran if number not in self._users))
        by_users = names_in(self.executed.codes)
        return Reads(self._codes, by_users, by_packages, self._stored, may_ask, self._compared)


def _owner_name(frame: FrameType, code: CodeType) -> str | None:
    """Return the name of the variable that holds the object or class whose method runs; None if there is none."""
    arguments = code.co_varnames[: code.co_argcount]
    if "self" in arguments or "self" in code.co_freevars:
        return "self"
    if not arguments or not is_users_file(code.co_filename):
        return "cls" if arguments[:1] == ("cls",) else None
    thing = frame.f_locals.get(arguments[0])
    kinds = thing.__mro__ if type(thing) is type else type(thing).__mro__
    functions = (function_of(vars(kind).get(code.co_name)) for kind in kinds)
    is_method = any(function is not None and function.__code__ is code for function in functions)
    return arguments[0] if is_method or arguments[0] == "cls" else None


def _name_of(function: Any) -> str:
    """Return module and name of a C function or method. A method belongs to the module of the class that defines it."""
    if function.__module__ is not None:
        return f"{function.__module__}.{function.__qualname__}"
    owner = function.__self__
    kind = owner if isinstance(owner, type) else type(owner)
    base = next((base for base in kind.__mro__ if function.__name__ in vars(base)), kind)
    return f"{base.__module__}.{function.__qualname__}"
