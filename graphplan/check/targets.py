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


def find(target: str, *, what: str) -> Callable[[], Any]:
    """What evaluates ``target``, anew with each call.

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

    def evaluate() -> Any:
        try:
            return eval(expression, vars(module))
        except (NameError, AttributeError, SyntaxError) as error:
            raise OptionError(f"{what} is {target!r}, and {expression!r} means nothing in {place}: {error}") from error

    return evaluate


def load(target: str, *, what: str) -> Callable[[], Any]:
    """What ``target`` names, made anew by each call: a class is called without arguments. See :func:`find`."""
    evaluate = find(target, what=what)

    def make() -> Any:
        found = evaluate()
        return found() if isinstance(found, type) else found

    return make


def import_from(*folders: str) -> None:
    """Have modules in these folders found, as a script that is run there finds them."""
    for folder in map(os.path.abspath, folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def _imported(place: str, what: str) -> ModuleType:
    import_from(os.path.dirname(place), os.curdir)
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
