"""Calls by which the user's code writes to files, streams and queues, which no replay does."""

from __future__ import annotations

import sys
from io import IOBase
from types import FrameType
from typing import Any

from graphplan.origin import file_of, is_users_file

_METHODS = {
    "write": ("_io",),
    "writelines": ("_io",),
    "writerow": ("_csv",),
    "writerows": ("_csv",),
    "put": ("_queue",),
    "put_nowait": ("_queue",),
    "dump": ("_pickle",),
}
"""Names of functions and methods in C, and the modules that have them or their object's class."""
_FUNCTIONS = {
    "save": ("torch.serialization",),
    "dump": ("json",),
    "write_text": ("pathlib",),
    "write_bytes": ("pathlib",),
    "writerow": ("csv",),
    "writerows": ("csv",),
    "writeheader": ("csv",),
    "put": ("multiprocessing.queues",),
}
"""Names of functions of the libraries in Python, and the modules that have them. What ``queue.Queue`` gets lies in a
deque, to which replays append.
"""
WRITERS = frozenset(_METHODS)
"""Names of functions in C that :func:`name_of_write` has to look at."""


def name_of_write(frame: FrameType, function: Any) -> str | None:
    """What to call a function in C that writes, if code of the user's calls it in ``frame``."""
    name, owner = function.__name__, function.__self__
    homes = _METHODS.get(name)
    if homes is None or not _is_users(frame):
        return None
    for stream in ("stdout", "stderr"):
        if owner is getattr(sys, stream):
            return f"sys.{stream}.{name}"
    if function.__module__ is not None:
        return f"{function.__module__.lstrip('_')}.{name}" if function.__module__ in homes else None
    kind = type(owner)
    is_one = isinstance(owner, IOBase) if "_io" in homes else any(base.__module__ in homes for base in kind.__mro__)
    return f"{kind.__name__}.{name}" if is_one else None


def name_of_saving(frame: FrameType) -> str | None:
    """What to call the library's function that runs in ``frame``, if it writes and the user's code called it."""
    name = frame.f_code.co_name
    if name not in _FUNCTIONS:
        return None
    home = str(frame.f_globals.get("__name__"))
    found = next((module for module in _FUNCTIONS[name] if f"{home}.".startswith(f"{module}.")), None)
    if found is None or frame.f_back is None or not _is_users(frame.f_back):
        return None
    return f"{found.removesuffix('.serialization')}.{name}"


def _is_users(frame: FrameType) -> bool:
    """Whether the code is the user's own: what installed packages write, progress bars for one, is their affair."""
    return is_users_file(file_of(frame.f_code, frame.f_globals))
