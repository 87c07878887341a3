"""Contents of buffers and random generators, to compare them; and why other values are not compared."""

from __future__ import annotations

import random
from collections.abc import Callable, ItemsView, KeysView, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ProxyTypes, WeakKeyDictionary, WeakSet, WeakValueDictionary
from zlib import crc32

_STANDING = (ContextVar, KeysView, ValuesView, ItemsView)
"""Types whose objects only lead to the values that code reads."""
WIDEST = 65536
"""Maximum size, in bytes, of a buffer whose contents are compared before each replay."""


@dataclass(frozen=True, slots=True)
class Unseen:
    """Stands for a value that is not compared before each replay, and says why."""

    what: str
    instead: str = field(compare=False)


def is_proxy(value: Any) -> bool:
    """Return True for a weak proxy. Its type defines all special methods, whatever its referent is."""
    return type(value) in ProxyTypes


def unseen(value: Any) -> Unseen | None:
    """Return an :class:`Unseen` if a change of ``value``, which a step's code reads, would not be detected."""
    if isinstance(value, Unseen):
        return value
    if is_proxy(value) or isinstance(value, _STANDING):
        what = "weak proxy" if is_proxy(value) else type(value).__name__
        return Unseen(f"a {what}, whose object", "Use the object itself in the code")
    if _holds_objects(value):
        return Unseen("an array of Python objects, whose content", "Keep them in a list")
    if size_of(value) > WIDEST:
        what = f"a {type(value).__name__} of {size_of(value)} bytes; a buffer of more than {WIDEST} bytes"
        return Unseen(what, "Keep it in a tensor, make it read-only (array.setflags(write=False))")
    if isinstance(value, WeakKeyDictionary | WeakValueDictionary | WeakSet):
        return Unseen(
            f"a {type(value).__name__}, from which items disappear by themselves and which",
            "Keep them in a dict or set",
        )
    return None


class _Bytes(bytes):
    """The contents of a buffer."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{len(self)} bytes of sum {crc32(self):08x}"


def has_contents(value: Any) -> bool:
    """Return True for a writable buffer or a random generator of the host whose state can be compared."""
    return _access_to(value) is not None or (0 <= size_of(value) <= WIDEST and not _holds_objects(value))


def _holds_objects(value: Any) -> bool:
    """Return True for a NumPy array whose elements, or their fields, are Python objects."""
    return _is_array(value) and bool(value.dtype.hasobject)


def size_of(buffer: Any) -> int:
    """Return the number of bytes in a writable buffer; -1 for anything else."""
    if _is_array(buffer):
        return buffer.nbytes if buffer.flags.writeable else -1
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError):
        return -1
    return -1 if view.readonly else view.nbytes


def _is_array(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "flags") and hasattr(value, "tobytes")


def _access_to(value: Any) -> tuple[Callable[[Any], object], Callable[[], Any]] | None:
    """Return functions that set and get the state of a random generator; None for anything else."""
    if isinstance(value, random.Random):
        return value.setstate, value.getstate
    if type(value).__module__.partition(".")[0] != "numpy":
        return None
    if hasattr(value, "set_state") and hasattr(value, "get_state"):
        # A legacy generator also holds a number of ``randn`` for the next call, which its bit generator does not know.
        return value.set_state, partial(value.get_state, legacy=False)
    bits = getattr(value, "bit_generator", None)
    return (partial(setattr, bits, "state"), partial(getattr, bits, "state")) if hasattr(bits, "state") else None


def spelt(state: Any) -> str:
    """Return the state of a random generator as a text to compare."""
    if isinstance(state, dict):
        # The texts of large arrays leave numbers out.
        state = {**state, "state": {k: getattr(v, "tolist", lambda v=v: v)() for k, v in state["state"].items()}}
    return repr(state)


def state_of(value: Any) -> Any:
    """Return what a buffer or random generator holds, as one value."""
    access = _access_to(value)
    if access is not None:
        return spelt(access[1]())
    if _is_array(value):
        return _Bytes(f"{value.shape}{value.dtype.str}".encode() + value.tobytes())
    return _Bytes(memoryview(value))


def kept(value: Any) -> tuple[Callable[[Any], object], Any]:
    """Return a function that restores a buffer or random generator, and a copy of its contents to call it with."""
    access = _access_to(value)
    if access is not None:
        return access[0], access[1]()
    if _is_array(value):
        return partial(value.__setitem__, ...), value.copy()
    return lambda held: memoryview(value).cast("B").__setitem__(slice(None), held), bytes(memoryview(value))
