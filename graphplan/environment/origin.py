"""Find where code and classes come from: user files, installed packages, torch, Lightning or the standard library.

Guards compare the values in globals, closures and classes of the user's own files. For all other code, they compare
only attributes of *instances*. ``watch`` makes guards treat an installed package like the user's own files.
"""

from __future__ import annotations

import contextlib
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import CodeType, ModuleType, TracebackType
from typing import Any, TypeVar

import torch

TORCH = os.path.dirname(torch.__file__) + os.sep
OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The folders of torch and of this package."""
LAYERS = os.path.join(TORCH, "nn") + os.sep
OPTIM = os.path.join(TORCH, "optim") + os.sep
_PARTS = (
    *(LAYERS, OPTIM),
    *(os.path.join(TORCH, name) + os.sep for name in ("amp", "autograd", "distributions")),
    *(os.path.join(TORCH, name) for name in ("_tensor.py", "functional.py")),
    *(os.path.join(TORCH, "utils", name) for name in ("_foreach_utils.py", "checkpoint.py")),
)
"""torch's files that compute. Files that watch or compile are left out: their calls vary without changing results."""
_FAMILIAR = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics")
_HOMEPAGE = "https://github.com/Lightning-AI/"
"""The ``__homepage__`` that all of them declare. A package of the user's own may have one of these names, too."""
_STANDARD = (os.path.dirname(os.__file__) + os.sep, "<frozen ")
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_SITES = tuple(
    os.path.join(path, "")
    for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    if path
)
_BETWEEN = (
    contextlib.__file__,
    *(os.path.join(TORCH, name) for name in ("_ops.py", "_compile.py")),
    *(os.path.join(TORCH, "utils", name) for name in ("_contextlib.py", "_python_dispatch.py")),
)
"""Files of the frames that may lie between frames of this package in the middle of a step."""
PASSING: set[CodeType] = set()
"""Code of this package that runs the step's operators: an error that it raises comes from an operator."""
_watched: set[str] = set()
"""Installed packages that guards treat like the user's own code."""
_Marked = TypeVar("_Marked", bound=Callable[..., Any])


class Codes(dict[int, CodeType]):
    """The code of ``functions``, by id: hashing a code object takes time in proportion to its length."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        super().__init__((id(function.__code__), function.__code__) for function in functions)

    def mark(self, run: _Marked) -> _Marked:
        """Add the code of ``run`` and return ``run``: usable as a decorator."""
        self[id(run.__code__)] = run.__code__
        return run


def watch(packages: Iterable[str]) -> None:
    """Treat installed ``packages`` (top-level names) like the user's own code from now on, in the whole process."""
    if not _watched.issuperset(packages):
        _watched.update(packages)
        for cached in (is_library, is_installed, is_users_file):
            cached.cache_clear()


@cache
def is_familiar(filename: str) -> bool:
    """Return True if the file belongs to Lightning or torchmetrics, and its package is imported."""
    packages = map(sys.modules.get, _FAMILIAR)
    known = (package for package in packages if str(getattr(package, "__homepage__", "")).startswith(_HOMEPAGE))
    files = (getattr(package, "__file__", None) for package in known)
    return filename.startswith(tuple(os.path.dirname(file) + os.sep for file in files if file))


@cache
def is_library(filename: str) -> bool:
    """Return True if the file belongs to torch, Lightning, this package, or Python's standard library."""
    return filename.startswith((TORCH, OURS)) or is_standard(filename) or is_familiar(filename)


@cache
def is_installed(filename: str) -> bool:
    """Return True if the file is of an installed package that is not watched. Editable installs are the user's own."""
    inner = [filename.removeprefix(place) for place in _SITES if filename.startswith(place)]
    inner += [filename.partition(mark)[2] for mark in _INSTALLED if mark in filename]
    return bool(inner) and inner[0].partition(os.sep)[0].removesuffix(".py") not in _watched


@cache
def is_standard(filename: str) -> bool:
    """Return True if the file belongs to Python's standard library."""
    return filename.startswith(_STANDARD) and not any(mark in filename for mark in _INSTALLED)


@cache
def is_ours(filename: str) -> bool:
    """Return True if the file belongs to this package."""
    return filename.startswith(OURS)


@cache
def is_torchs(filename: str) -> bool:
    """Return True if the file defines torch's layers, optimizers, tensors, scalers or other computing code."""
    return filename.startswith(_PARTS)


@cache
def is_users_file(filename: str) -> bool:
    """Return True if the file belongs to no library and no installed package."""
    return not is_library(filename) and not is_installed(filename)


def leave_out_own_frames(trace: TracebackType | None, *, is_refusal: bool = False) -> None:
    """Remove this package's frames from a traceback, except its first frame. If this package itself raised the error,
    leave the traceback as it is; for a refusal, still remove them, but keep the last frame.
    """
    last = trace
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    is_own = last is None or (is_ours(last.tb_frame.f_code.co_filename) and last.tb_frame.f_code not in PASSING)
    if is_own and not is_refusal:
        return
    while trace is not None:
        following = trace.tb_next
        while following is not None and ((file := following.tb_frame.f_code.co_filename) in _BETWEEN or is_ours(file)):
            following = following.tb_next
        if following is None and is_own and trace is not last:
            following = last
        trace.tb_next, trace = following, following


def file_of(code: CodeType, space: Mapping[str, Any]) -> str:
    """Return the file of ``code``; for generated code (a dataclass's ``__init__``), the file of its module."""
    return space.get("__file__") or "" if code.co_filename == "<string>" else code.co_filename


def is_users(thing: Any) -> bool:
    """Return True if a class or function is defined in the user's own code."""
    name = getattr(thing, "__module__", None)
    if not isinstance(name, str) or name == "builtins":
        return False
    return is_users_module(sys.modules.get(name), name)


def is_librarys(kind: type) -> bool:
    """Return True if a class belongs to Python, torch, Lightning or this package."""
    name = kind.__module__
    file = getattr(sys.modules.get(name), "__file__", None) if isinstance(name, str) else None
    if isinstance(file, str):
        return is_library(file)
    return isinstance(name, str) and (name == "builtins" or name.partition(".")[0] in sys.stdlib_module_names)


def is_users_module(module: ModuleType | None, name: str) -> bool:
    """Return True if a module is the user's own. One without a file (an interactive session) is, unless Python's."""
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        return is_users_file(file)
    return name.partition(".")[0] not in sys.stdlib_module_names
