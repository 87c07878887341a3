"""What a check is asked to look at, by name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from graphplan.errors import OptionError


def load(target: str, *, what: str) -> Callable[[], Any]:
    """What makes the object that ``target`` names, anew with each call; a class is called without arguments.

    Args:
        target: ``pkg.module:expression`` or ``path/to/file.py:expression``, the expression in the words of that
            module: a class, a call of one, or any other object.
        what: what the target is, for errors.

    Raises:
        OptionError: if it is not of that form, or cannot be imported or found.
    """
    place, colon, expression = target.partition(":")
    if not colon or not expression:
        raise OptionError(
            f"{what} is {target!r}; expected a module and an expression in it, such as pkg.module:Module(width=64) or "
            "train.py:Module"
        )
    module = _imported(place, what)

    def make() -> Any:
        try:
            found = eval(expression, vars(module))
        except (NameError, AttributeError, SyntaxError) as error:
            raise OptionError(f"{what} is {target!r}, and {expression!r} means nothing in {place}: {error}") from error
        return found() if isinstance(found, type) else found

    return make


def _imported(place: str, what: str) -> ModuleType:
    # As a script that is run there finds its neighbours.
    for folder in map(os.path.abspath, (os.path.dirname(place), os.curdir)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise OptionError(f"{what} is in {place!r}, which cannot be imported: {error}") from error
