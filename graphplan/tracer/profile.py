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

import dis
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from graphplan.tracer.source import is_library

SCALARS = (bool, int, float, complex, str)
_READERS = frozenset({"tolist", "numpy", "__dlpack__"})


@dataclass(slots=True)
class Reads:
    """Names that code may have read: by any user code, by methods of one object (its id), and module globals; and names
    that methods of one object may have assigned.
    """

    anywhere: set[str] = field(default_factory=set)
    of_self: dict[int, set[str]] = field(default_factory=dict)
    stored: dict[int, set[str]] = field(default_factory=dict)
    global_values: dict[tuple[int, str], tuple[dict[str, Any], str]] = field(default_factory=dict)

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

    def reads(self) -> Reads:
        """What the code that ran may have read."""
        found = Reads()
        for code, owner in self._ran:
            attributes, names, stored = _names(code)
            if owner:
                found.of_self.setdefault(owner, set()).update(attributes)
                found.stored.setdefault(owner, set()).update(stored)
            if is_library(code.co_filename):
                continue
            found.anywhere.update(attributes)
            space = self._globals[code]
            for name in names:
                if isinstance(space.get(name), SCALARS):
                    found.global_values[id(space), name] = (space, name)
        return found


@cache
def _names(code: CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Attributes that the code loads without calling them at once, globals that it loads, attributes that it stores."""
    attributes: set[str] = set()
    names: set[str] = set()
    stored: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_ATTR" and not _is_method_load(step):
            attributes.add(str(step.argval))
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(str(step.argval))
        elif step.opname == "STORE_ATTR":
            stored.add(str(step.argval))
    if not is_library(code.co_filename):
        # getattr(self, "temperature")
        attributes.update(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
    return frozenset(attributes), frozenset(names), frozenset(stored)


def _is_method_load(step: dis.Instruction) -> bool:
    """Whether a ``LOAD_ATTR`` loads a method to call it, which since Python 3.12 is its lowest argument bit."""
    return sys.version_info >= (3, 12) and bool((step.arg or 0) & 1)
