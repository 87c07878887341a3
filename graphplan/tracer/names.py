"""Which Python values a step reads: the attribute names in the code that ran.

A replay freezes what Python reads, so the owners' scalars that the traced code can have read are guarded. A profile
function collects the code objects that ran, with the object each method ran on. From their bytecode come the attributes
that they load (not the methods that they call). Library code counts only for its own ``self``: torch's modules read
``self.p``, but torch's many other names would match everything.
"""

from __future__ import annotations

import dis
import sys
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType
from typing import Any

from graphplan.tracer.source import is_library

SCALARS = (bool, int, float, complex, str)


@dataclass(slots=True)
class Reads:
    """Names that code may have read: by any user code, by methods of one object (its id), and module globals."""

    anywhere: set[str] = field(default_factory=set)
    of_self: dict[int, set[str]] = field(default_factory=dict)
    global_values: dict[tuple[int, str], tuple[dict[str, Any], str]] = field(default_factory=dict)

    def covers(self, owner: Any, attribute: str) -> bool:
        """Whether ``owner.attribute`` may have been read."""
        return attribute in self.anywhere or attribute in self.of_self.get(id(owner), ())


class ReadsProfile:
    """Collects code objects while it is entered. It steps aside for another profiler."""

    def __init__(self) -> None:
        self._ran: dict[tuple[CodeType, int], FrameType | None] = {}
        self._globals: dict[CodeType, dict[str, Any]] = {}
        self._active = False

    def __enter__(self) -> ReadsProfile:
        self._active = sys.getprofile() is None
        if self._active:
            sys.setprofile(self._event)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._active:
            sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        owner = 0
        if code.co_argcount and code.co_varnames[0] == "self":
            owner = id(frame.f_locals.get("self"))
        self._ran[code, owner] = None
        self._globals[code] = frame.f_globals

    def reads(self) -> Reads:
        """What the collected code may have read."""
        found = Reads()
        for code, owner in self._ran:
            attributes, names = _loads(code)
            if owner:
                found.of_self.setdefault(owner, set()).update(attributes)
            if is_library(code.co_filename):
                continue
            found.anywhere.update(attributes)
            space = self._globals[code]
            for name in names:
                if isinstance(space.get(name), SCALARS):
                    found.global_values[id(space), name] = (space, name)
        return found


@cache
def _loads(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Attributes that the code loads without calling them at once, and globals that it loads."""
    attributes: set[str] = set()
    names: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_ATTR" and not _is_method_load(step):
            attributes.add(str(step.argval))
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(str(step.argval))
    if not is_library(code.co_filename):
        # getattr(self, "temperature")
        attributes.update(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
    return frozenset(attributes), frozenset(names)


def _is_method_load(step: dis.Instruction) -> bool:
    """Whether a ``LOAD_ATTR`` loads a method to call it, which since Python 3.12 is its lowest argument bit."""
    return sys.version_info >= (3, 12) and bool((step.arg or 0) & 1)
