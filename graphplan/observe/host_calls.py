"""Find calls whose effects no trace sees: work in another thread or process, and writes to files, streams, queues."""

from __future__ import annotations

import _thread
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from io import IOBase
from multiprocessing.pool import Pool, ThreadPool
from multiprocessing.process import BaseProcess
from threading import Thread, Timer
from traceback import walk_stack
from types import FrameType
from typing import Any

from graphplan.environment.origin import Codes, file_of, is_installed, is_library, is_standard, is_torchs, is_users_file

_OF_POOLS = ("apply", "apply_async", "map", "map_async", "starmap", "starmap_async", "imap", "imap_unordered")
_KINDS: dict[type, tuple[str, tuple[str, ...]]] = {
    Thread: ("Thread", ("start",)),
    BaseProcess: ("Process", ("start",)),
    ThreadPoolExecutor: ("ThreadPoolExecutor", ("submit", "map")),
    ProcessPoolExecutor: ("ProcessPoolExecutor", ("submit", "map")),
    ThreadPool: ("ThreadPool", _OF_POOLS),
    Pool: ("Pool", _OF_POOLS),
}
"""Classes that run work elsewhere, each with its name in messages and its methods; subclasses before their bases."""
STARTERS = Codes(*(getattr(kind, method) for kind, (_, methods) in _KINDS.items() for method in methods))
STARTERS_IN_C = [
    getattr(_thread, name) for name in ("start_new_thread", "start_joinable_thread") if hasattr(_thread, name)
]


def name_of_start(frame: FrameType) -> str | None:
    """Return the name of the call by which the user's code, a package or a layer of torch starts the work in ``frame``.
    None for other threads of torch and Lightning (compilers, loaders, writers), and for helper threads of packages.
    """
    name = None
    for around, _ in walk_stack(frame):
        code, thing = around.f_code, around.f_locals.get("self")
        if id(code) in STARTERS:
            kinds = (name for kind, (name, _) in _KINDS.items() if isinstance(thing, kind))
            name = f"{next(kinds, type(thing).__name__)}.{code.co_name}"
        elif not is_standard(code.co_filename):
            is_others = is_library(code.co_filename) and not is_torchs(code.co_filename)
            return None if is_others or _serves(frame.f_locals.get("self"), code.co_filename) else name
    return None


def _serves(thing: Any, filename: str) -> bool:
    """Return True if a thread runs the standard library's code, or is a package's daemon (of a progress bar)."""
    if not isinstance(thing, Thread) or isinstance(thing, Timer):
        return False
    code = getattr(getattr(thing, "_target", None), "__code__", None)
    return (code is not None and is_standard(code.co_filename)) or (thing.daemon and is_installed(filename))


_IN_C = {
    "write": "_io", "writelines": "_io", "writerow": "_csv", "writerows": "_csv", "put": "_queue",
    "put_nowait": "_queue", "dump": "_pickle",
}  # fmt: skip
"""Names of C functions and methods, and the module that has them or their object's class."""
WRITERS = frozenset(_IN_C)
"""The names that :func:`name_of_write` knows."""
_IN_PYTHON = {
    "save": "torch.serialization", "dump": "json", "write_text": "pathlib", "write_bytes": "pathlib", "writerow": "csv",
    "writerows": "csv", "writeheader": "csv", "put": "multiprocessing.queues",
}  # fmt: skip
"""Python functions of libraries. ``queue.Queue`` is not among them: replays append to its deque."""
_LOGS = ("log_metrics", "log_hyperparams", "log_graph", "log_image", "log_audio", "log_video", "log_text", "log_table")
_LIGHTNINGS = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
_LOGGERS: dict[str, tuple[str, ...]] = {"logging.": ("_log",), "torch.utils.tensorboard.": ("add_",)}
_LOGGERS |= {f"{lightning}.loggers.": _LOGS for lightning in _LIGHTNINGS}
"""Modules of loggers, and prefixes of the methods that write."""
_LOGGING = tuple(start for starts in _LOGGERS.values() for start in starts)


def name_of_write(frame: FrameType, function: Any) -> str | None:
    """Return the name in messages of a C function that writes, if user code calls it in ``frame``; else None."""
    name, owner = function.__name__, function.__self__
    home = _IN_C.get(name)
    if home is None or not _is_users(frame):
        return None
    for stream in ("stdout", "stderr"):
        if owner is getattr(sys, stream):
            return f"sys.{stream}.{name}"
    if function.__module__ is not None:
        return f"{home.lstrip('_')}.{name}" if function.__module__ == home else None
    kind = type(owner)
    is_one = isinstance(owner, IOBase) if home == "_io" else any(base.__module__ == home for base in kind.__mro__)
    return f"{kind.__name__}.{name}" if is_one else None


def name_of_saving(frame: FrameType, name: str, owner: Any) -> str | None:
    """Return the name in messages of a library's ``name`` that writes: a logger's method, or one that users call."""
    if name not in _IN_PYTHON and not name.startswith(_LOGGING):
        return None
    home = f"{frame.f_globals.get('__name__')}."
    if any(home.startswith(module) and name.startswith(starts) for module, starts in _LOGGERS.items()):
        kinds = [kind for kind in type(owner).__mro__ if f"{kind.__module__}.".startswith(tuple(_LOGGERS))]
        return "logging" if home == "logging." else f"{[*kinds, type(owner)][0].__name__}.{name}"
    module = _IN_PYTHON.get(name)
    if module is None or not home.startswith(f"{module}.") or frame.f_back is None or not _is_users(frame.f_back):
        return None
    return f"{module.removesuffix('.serialization')}.{name}"


def _is_users(frame: FrameType) -> bool:
    """Return True if the code is the user's own: writes of installed packages (progress bars) are left to them."""
    return is_users_file(file_of(frame.f_code, frame.f_globals))
