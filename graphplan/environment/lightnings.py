"""Support both packages of Lightning: ``lightning.pytorch``, and ``pytorch_lightning`` with a copy of the same code.

Their classes are distinct. The callback is written for ``lightning.pytorch``. For Trainers of ``pytorch_lightning``,
its files are loaded a second time, with the names of the packages replaced in the source.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

NAMES = ("lightning.pytorch", "pytorch_lightning")
_FIRST, _SECOND = "graphplan.callback", "graphplan.callback_of_pytorch_lightning"
_READ_AS = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric", _FIRST: _SECOND}
_NAME = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in _READ_AS))


def name_of(thing: Any) -> str:
    """Return the entry of :data:`NAMES` whose package defines the class or its nearest base; else the first entry."""
    roots = [f"{kind.__module__}." for kind in (thing if isinstance(thing, type) else type(thing)).__mro__]
    return next((name for root in roots for name in NAMES if root.startswith(f"{name}.")), NAMES[0])


def callback_class(name: str) -> Any:
    """Return the callback's class for Trainers of ``name`` in :data:`NAMES`; ModuleNotFoundError if that is missing."""
    package = _FIRST
    if name != NAMES[0]:
        importlib.import_module(name)
        package = _SECOND
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            # Put it before the path finder, which would find the first package's modules for the second one.
            sys.meta_path.insert(0, _Finder())
    return importlib.import_module(f"{package}.callback").GraphPlanCallback


def blank_callback(name: str) -> Any:
    """Return a ``GraphPlanCallback`` without attributes, for Trainers of ``name``: unpickling sets the attributes."""
    kind = callback_class(name)
    return kind.__new__(kind)


def installed_callback_class() -> Any:
    """Return ``GraphPlanCallback``, which changes its class to fit its Trainer's package. If only one package is
    imported, it has that package's class at once: Trainers before 2.6 accept no other.

    Raises:
        ImportError: if Lightning is installed under neither name.
        ModuleNotFoundError: if something that an installed Lightning needs is missing.
    """
    errors, names = [], sorted(NAMES, key=lambda name: sys.modules.get(name) is None)
    for name in names:
        try:
            return callback_class(name)
        except ModuleNotFoundError as error:
            errors.append(error)
    missing = errors[0]
    if not f"{names[0]}.".startswith(f"{missing.name}."):
        raise missing
    raise ImportError(
        f'GraphPlanCallback is for Lightning, and {missing.name} is not installed: pip install "graphplan[lightning]"'
    ) from missing


class _Finder(MetaPathFinder):
    """A finder of the second package's modules in the files of the first."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _SECOND and not name.startswith(f"{_SECOND}."):
            return None
        inner_name = filter(None, name.removeprefix(_SECOND).split("."))
        stem = Path(importlib.import_module("graphplan").__path__[0], "callback", *inner_name)
        file = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
        inner = [str(file.parent)] if file.name == "__init__.py" else None
        loader = _Loader(name, str(file))
        return importlib.util.spec_from_file_location(name, file, loader=loader, submodule_search_locations=inner)


class _Loader(SourceFileLoader):
    """A loader that compiles a module of the first package for the second, without writing to ``__pycache__``."""

    def get_code(self, fullname: str) -> CodeType:
        source = _NAME.sub(lambda found: _READ_AS[found[0]], self.get_source(fullname) or "")
        return compile(source, self.path, "exec", dont_inherit=True)
