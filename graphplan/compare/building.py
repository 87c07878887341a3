"""Build and load the compiled guards, for one torch, one Python and one version of their source.

Importing graphplan loads the library from a wheel or from torch's folder of extensions. If there is none, the first
capture of the process starts another process that builds it, in half a minute, for later processes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Thread
from types import ModuleType

import torch

from graphplan.errors import BackendError

_NAME = "graphplan_guards"
_SOURCES = tuple(Path(__file__).with_name(name) for name in ("guards.cpp", "tensors.h", "moves.h"))
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
_COMPILERS = ("c++", "g++", "clang++")
_FAILED = "failed"
"""Name of the file that says why a build failed, or that a build is in progress."""
_WANTED = "GRAPHPLAN_NATIVE"
"""Environment variable: 0 disables the compiled guards, ``found`` uses existing ones but does not build them."""


@cache
def _key() -> str:
    """Return a name that identifies the versions of torch, Python and the sources, and the type of machine."""
    facts = f"{torch.__version__} {torch.version.git_version} {sys.implementation.cache_tag} {platform.machine()}"
    sources = [source.read_bytes() for source in _SOURCES]
    digest = hashlib.sha256(b"".join([facts.encode(), *sources])).hexdigest()[:16]
    return f"{_NAME}-{digest}"


def _folder() -> Path:
    """Return the folder in which the guards are built."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    return Path(root) / _key()


def find() -> Path | None:
    """Return the built library for this torch and this Python, of a wheel or built later; None if there is none."""
    # There may be no home directory, or one that cannot be read.
    with suppress(OSError, RuntimeError):
        installed = Path(__file__).with_name(f"{_key()}.so")
        return next((path for path in (installed, _folder() / f"{_NAME}.so") if path.is_file()), None)
    return None


def can_build() -> bool:
    """Return True if there is a compiler for the guards."""
    return os.name == "posix" and bool(_compiler())


def build_into(package: Path) -> None:
    """Copy the guards, built before or now, to a wheel's modules. The wheel is then for this torch and this Python."""
    shutil.copyfile(find() or build(), package / f"{_key()}.so")


def _compiler() -> list[str]:
    """Return the command of the C++ compiler; empty if there is none."""
    asked = os.environ.get("CXX")
    if asked:
        return shlex.split(asked)
    return [found for name in _COMPILERS if (found := shutil.which(name))][:1]


def _command(target: Path) -> list[str]:
    compiler = _compiler()
    if os.name != "posix" or not compiler:
        raise OSError(f"no C++ compiler was found ({', '.join(_COMPILERS)}, or what CXX names)")
    home = Path(torch.__file__).parent
    headers = [home / "include", home / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    # Compilers do not optimise by default, and every step would take twenty times as long for its guards.
    flags = ["-O3", "-std=c++20", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={_NAME}"]
    flags += ["-DTORCH_API_INCLUDE_EXTENSION_H", *(part for header in headers for part in ("-isystem", str(header)))]
    flags += ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    libraries = [f"-L{home / 'lib'}", *(f"-l{library}" for library in _LIBRARIES)]
    return [*compiler, *flags, str(_SOURCES[0]), "-o", str(target), *libraries]


def build() -> Path:
    """Build the guards and return the library. Several processes may build at once."""
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made = Path(work) / f"{_NAME}.so"
            done = subprocess.run(_command(made), capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(done.stderr.strip() or f"the compiler ended with status {done.returncode}")
            # Atomically, because other processes may be looking for the file.
            os.replace(made, folder / made.name)
    except OSError as error:
        with suppress(OSError):
            (folder / _FAILED).write_text(str(error))
        raise BackendError(
            f"the guards could not be built: {error}\nExpected a C++ compiler (g++ or clang++) and Python's headers. "
            "Nothing needs them: without them the same checks run in Python, slower"
        ) from error
    (folder / _FAILED).unlink(missing_ok=True)
    return folder / made.name


def build_later() -> None:
    """Start a process that builds the guards, unless they exist or are not wanted, or a build failed or has begun."""
    if os.environ.get(_WANTED, "1") != "1" or find() is not None or not (sys.executable and _compiler()):
        return
    with suppress(OSError, RuntimeError):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / _FAILED).open("x") as file:
            file.write("a build was begun, and has not ended")
        code = f"import sys; sys.path[:] = {sys.path!r}; from graphplan.compare.building import build; build()"
        command = [*filter(None, [shutil.which("nice")]), sys.executable, "-c", code]
        # The thread only waits for the process, which continues if this process ends.
        Thread(target=_run, args=(command,), name="graphplan builds its guards", daemon=True).start()


def _run(command: Sequence[str]) -> None:
    nothing = subprocess.DEVNULL
    with suppress(OSError):
        subprocess.run(
            command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True, check=False,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", _WANTED: "found"},
        )  # fmt: skip


def state() -> str:
    """Describe in which language the guards run, and why not in C++."""
    wanted = os.environ.get(_WANTED, "1")
    if wanted == "0":
        return "in Python, since GRAPHPLAN_NATIVE is 0"
    if find() is not None:
        return "in C++ in processes that start from now on"
    if not _compiler():
        return "in Python, since there is no C++ compiler"
    with suppress(OSError, RuntimeError):
        why = (_folder() / _FAILED).read_text().strip().splitlines()
        return f"in Python: they have not been built in C++ ({why[0] if why else 'the compiler said nothing'})"
    return "in Python until they are built in C++, for processes that start then"


def load() -> ModuleType | None:
    """Load the compiled guards. Return None if they were not built, are disabled or cannot be loaded."""
    found = find() if os.environ.get(_WANTED, "1") != "0" else None
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
            "build it anew: python -m graphplan.compare",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return module
