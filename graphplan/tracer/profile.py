"""What the interpreter ran: reads of tensor memory behind the dispatcher, and the Python values that code may have
read.

``Tensor.tolist`` and ``.numpy`` look straight at memory and never reach the dispatcher. A ``TorchFunctionMode`` would
see them, but torch's modules look for such a mode and then leave their fast paths, which changes the numbers; a profile
function changes nothing.

A replay freezes what Python reads, so the owners' scalars that the traced code can have read are guarded. From the
bytecode of the code objects that ran come the attributes that they load (not the methods that they call). Library code
counts only for its own ``self``: torch's modules read ``self.p``, but torch's many other names would match everything.
"""

from __future__ import annotations

import cProfile
import dis
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

from torch import Tensor

from graphplan.tracer.source import is_library

SCALARS = (bool, int, float, complex, str)
_MAX_ITEMS = 64
_PADDING = ("CACHE", "EXTENDED_ARG", "NOP", "RESUME", "PRECALL")
_DUPLICATES = ("COPY", "DUP_TOP")
_READERS = frozenset({"tolist", "numpy", "__dlpack__"})


@dataclass(slots=True)
class Reads:
    """Names that code may have read: by any user code, by methods of one object (its id), and module globals; and names
    that methods of one object may have assigned.
    """

    anywhere: set[str] = field(default_factory=set)
    of_self: dict[int, set[str]] = field(default_factory=dict)
    stored: dict[int, set[str]] = field(default_factory=dict)
    assigned: set[str] = field(default_factory=set)
    values: dict[str, tuple[Any, Any, Any]] = field(default_factory=dict)

    def add_value(self, space: Any, name: str) -> None:
        """Note a global or a closure's variable, or the items of one that is a small dict or list, with its value."""
        try:
            value = space[name]
        except KeyError:
            return
        if isinstance(value, SCALARS):
            self.values[name] = (space, name, value)
        elif isinstance(value, dict | list) and len(value) <= _MAX_ITEMS:
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in pairs:
                if isinstance(item, SCALARS):
                    self.values[f"{name}[{key!r}]"] = (value, key, item)

    def covers(self, owner: Any, attribute: str) -> bool:
        """Whether ``owner.attribute`` may have been read."""
        return attribute in self.anywhere or attribute in self.of_self.get(id(owner), ())


class Profile:
    """Watches the interpreter while it is entered, in place of another profiler, which it puts back.

    ``on_read(name)`` is called for each read of a tensor's memory.
    """

    def __init__(self, on_read: Callable[[str], None]) -> None:
        self._on_read = on_read
        self._ran: dict[tuple[CodeType, int], None] = {}
        self._globals: dict[CodeType, dict[str, Any]] = {}
        self._previous: Any = None

    def __enter__(self) -> Profile:
        self._previous = sys.getprofile()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)
        if isinstance(self._previous, cProfile.Profile):
            # cProfile shows as its object, which is no profile function.
            self._previous.enable()
        elif self._previous is not None:
            sys.setprofile(self._previous)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            owner = 0
            if "self" in code.co_varnames[: code.co_argcount] or "self" in code.co_freevars:
                owner = id(frame.f_locals.get("self"))
            self._ran[code, owner] = None
            self._globals[code] = frame.f_globals
        elif event == "c_call" and arg.__name__ in _READERS and isinstance(arg.__self__, Tensor):
            self._on_read(f"Tensor.{arg.__name__}")

    def reads(self, fn: Any) -> Reads:
        """What the code that ran may have read; ``fn`` is the step, from which closures are reached."""
        found = Reads()
        for code, owner in self._ran:
            names = _names(code)
            if owner:
                found.of_self.setdefault(owner, set()).update(names.loaded)
                found.stored.setdefault(owner, set()).update(names.stored)
            if is_library(code.co_filename):
                continue
            found.anywhere.update(names.loaded)
            found.assigned.update(names.assigned)
            space = self._globals[code]
            for name in names.used_globals & space.keys():
                found.add_value(space, name)
        ran = {code for code, _ in self._ran}
        for function in _functions(fn):
            if function.__code__ in ran:
                for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
                    found.add_value(Cell(cell), name)
        return found


@dataclass(frozen=True, slots=True)
class _Names:
    """Names in one code object; ``assigned`` are the attributes that it stores by other means than ``+=``."""

    loaded: frozenset[str]
    stored: frozenset[str]
    assigned: frozenset[str]
    used_globals: frozenset[str]


@cache
def _names(code: CodeType) -> _Names:
    steps = [step for step in dis.get_instructions(code) if step.opname not in _PADDING]
    loaded: set[str] = set()
    stored: set[str] = set()
    assigned: set[str] = set()
    used: set[str] = set()
    counted: list[str] = []
    for before, step in zip([None, *steps], steps, strict=False):
        name = str(step.argval)
        if step.opname == "LOAD_ATTR" and not _is_method_load(step):
            if before is not None and before.opname in _DUPLICATES:
                counted.append(name)  # self.calls += 1 loads and stores through one duplicated reference
            else:
                loaded.add(name)
        elif step.opname == "STORE_ATTR":
            stored.add(name)
            if name in counted:
                counted.remove(name)
            else:
                assigned.add(name)
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            used.add(name)
    if not is_library(code.co_filename):
        # getattr(self, "temperature")
        loaded.update(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
    return _Names(frozenset(loaded), frozenset(stored), frozenset(assigned), frozenset(used))


def _is_method_load(step: dis.Instruction) -> bool:
    """Whether a ``LOAD_ATTR`` loads a method to call it, which since Python 3.12 is its lowest argument bit."""
    return sys.version_info >= (3, 12) and bool((step.arg or 0) & 1)


def _functions(fn: Any) -> Iterator[FunctionType]:
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
        left += [Cell(cell).get() for cell in function.__closure__ or ()]
        left += [function.__globals__.get(name) for name in _names(function.__code__).used_globals]
    yield from found.values()


class Cell:
    """A closure's variable, read like a dictionary."""

    def __init__(self, cell: CellType) -> None:
        self.cell = cell

    def get(self) -> Any:
        """The value; None while there is none."""
        try:
            return self.cell.cell_contents
        except ValueError:
            return None

    def __getitem__(self, name: str) -> Any:
        return self.get()
