"""Where the compiled guards are, how they come there, and how they are loaded.

They are built for one torch, one Python and one version of their source, into the folder that torch keeps built
extensions in. Importing graphplan loads what is there and never builds.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from subprocess import SubprocessError
from types import ModuleType

import torch

from graphplan.errors import BackendError

_NAME = "graphplan_guards"
_SUFFIXES = (".so", ".pyd")
_SOURCES = tuple(Path(__file__).with_name(name) for name in ("guards.cpp", "tensors.h", "moves.h"))


def _folder() -> Path:
    """Where they are, or would be."""
    facts = f"{torch.__version__} {torch.version.git_version} {sys.implementation.cache_tag} {platform.machine()}"
    sources = [source.read_bytes() for source in _SOURCES]
    digest = hashlib.sha256(b"".join([facts.encode(), *sources])).hexdigest()[:16]
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    return Path(root) / f"{_NAME}-{digest}"


def find() -> Path | None:
    """The built library for this torch and this Python, if there is one."""
    try:
        folder = _folder()
        return next((path for suffix in _SUFFIXES if (path := folder / f"{_NAME}{suffix}").is_file()), None)
    except (OSError, RuntimeError):
        # No home, or none that may be read.
        return None


@contextmanager
def _own_scripts() -> Iterator[None]:
    """Have this Python's own programs found, ninja among them, where its environment was not activated."""
    before = os.environ.get("PATH")
    os.environ["PATH"] = os.pathsep.join(filter(None, (sysconfig.get_path("scripts"), before)))
    try:
        yield
    finally:
        os.environ.pop("PATH")
        os.environ |= {} if before is None else {"PATH": before}


def build() -> Path:
    """Build them, unless they are there.

    Raises:
        BackendError: if they cannot be built, with the compiler's words.
    """
    from torch.utils import cpp_extension

    folder = _folder()
    work = folder / "build"
    try:
        work.mkdir(parents=True, exist_ok=True)
        with _own_scripts():
            # Without a flag nothing is optimised, which takes twenty times as long in every step.
            cpp_extension.load(
                _NAME, [str(_SOURCES[0])], ["-O3"], build_directory=str(work), with_cuda=False, is_python_module=False
            )
        built = next(path for suffix in _SUFFIXES if (path := work / f"{_NAME}{suffix}").is_file())
        # At one stroke: others may be looking for it.
        shutil.copy(built, folder / f"{built.name}.new")
        os.replace(folder / f"{built.name}.new", folder / built.name)
    except (OSError, RuntimeError, SubprocessError) as error:
        raise BackendError(
            f"the guards could not be built: {error}\nExpected a C++ compiler (g++ or clang++), Python's headers and "
            "ninja (pip install ninja). Nothing needs them: without them the same checks run in Python, slower"
        ) from error
    return folder / built.name


def load() -> ModuleType | None:
    """The compiled guards, or None if they were not built."""
    found = find() if os.environ.get("GRAPHPLAN_NATIVE", "1") != "0" else None
    if found is None:
        return None
    try:
        spec = spec_from_file_location(_NAME, found, loader=ExtensionFileLoader(_NAME, str(found)))
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        warnings.warn(
            f"graphplan: {found} cannot be loaded: {error}. Its checks run in Python, slower; delete the file, or "
            "build it anew: python -m graphplan.native",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return module
