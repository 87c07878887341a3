"""Calls that have something run in another thread or process, where no trace sees it."""

from __future__ import annotations

import _thread
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.pool import Pool, ThreadPool
from multiprocessing.process import BaseProcess
from threading import Thread, Timer
from types import CodeType, FrameType
from typing import Any

from graphplan.origin import is_installed, is_library, is_standard, is_torchs

_OF_POOLS = ("apply", "apply_async", "map", "map_async", "starmap", "starmap_async", "imap", "imap_unordered")
_KINDS: dict[type, tuple[str, tuple[str, ...]]] = {
    Thread: ("Thread", ("start",)),
    BaseProcess: ("Process", ("start",)),
    ThreadPoolExecutor: ("ThreadPoolExecutor", ("submit", "map")),
    ProcessPoolExecutor: ("ProcessPoolExecutor", ("submit", "map")),
    ThreadPool: ("ThreadPool", _OF_POOLS),
    Pool: ("Pool", _OF_POOLS),
}
"""What has something run elsewhere, by a name to call it and by its methods; a class stands before its bases."""
STARTERS: dict[int, CodeType] = {
    id(code): code
    for kind, (_, methods) in _KINDS.items()
    for code in (getattr(kind, method).__code__ for method in methods)
}
"""By identity: to hash a code object takes as long as it has instructions."""
STARTERS_IN_C = [
    getattr(_thread, name) for name in ("start_new_thread", "start_joinable_thread") if hasattr(_thread, name)
]


def name_of_start(frame: FrameType) -> str | None:
    """What the user's code, a package that it calls, or a layer of torch's called to come to the start in ``frame``.
    None for other threads of torch's and Lightning's (compilers, loaders, writers), and where one only serves whoever
    starts it.
    """
    name, thread = None, frame.f_locals.get("self")
    around: FrameType | None = frame
    while around is not None:
        code = around.f_code
        if id(code) in STARTERS:
            name = _name_of(around.f_locals.get("self"), code.co_name)
        elif not is_standard(code.co_filename):
            break
        around = around.f_back
    if around is None:
        return None
    file = around.f_code.co_filename
    return None if (is_library(file) and not is_torchs(file)) or _serves(thread, file) else name


def _name_of(thing: Any, method: str) -> str:
    kind = next((name for kind, (name, _) in _KINDS.items() if isinstance(thing, kind)), type(thing).__name__)
    return f"{kind}.{method}"


def _serves(thing: Any, filename: str) -> bool:
    """Whether a thread does what the standard library itself has to do, such as to feed a queue of another process, or
    is a daemon of an installed package's, such as a progress bar's monitor.
    """
    if not isinstance(thing, Thread) or isinstance(thing, Timer):
        return False
    code = getattr(getattr(thing, "_target", None), "__code__", None)
    return (code is not None and is_standard(code.co_filename)) or (thing.daemon and is_installed(filename))
