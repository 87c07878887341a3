"""What a check is asked to look at: objects by name, and those of a configuration file."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from graphplan.errors import OptionError


def load(target: str, *, what: str) -> Callable[[], Any]:
    """What ``target`` names, made anew by each call.

    Args:
        target: ``pkg.module:expression`` or ``path/to/file.py:expression``, the expression in the words of that
            module: a class, which is called without arguments, a call, or any other object.
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
    # As the script that is in the working directory would find its own modules.
    for folder in (os.path.dirname(os.path.abspath(place)), os.getcwd()):
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


def configured(path: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The model and the data of a configuration file, each made anew by each call; data may be None.

    A file of a ``LightningCLI`` names classes with ``class_path``, one of Hydra's with ``_target_``; the model is under
    ``model`` or ``module``, the data under ``data`` or ``datamodule``.

    Raises:
        OptionError: if the file does not exist, or names no model.
    """
    try:
        from omegaconf import OmegaConf

        config: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except ImportError as error:
        raise OptionError(
            '--config is read by omegaconf, which is not installed: pip install "graphplan[hydra]"'
        ) from error
    except FileNotFoundError as error:
        raise OptionError(f"--config is {path!r}, and there is no such file") from error
    found = config if isinstance(config, Mapping) else {}
    model = found.get("model", found.get("module"))
    if not isinstance(model, Mapping) or not ({"class_path", "_target_"} & model.keys()):
        raise OptionError(
            f"--config is {path!r}, which names no model; expected model (or module) with class_path and init_args, as "
            f"LightningCLI writes it, or with _target_, as Hydra does; found: {', '.join(map(str, found)) or 'nothing'}"
        )
    data = found.get("data", found.get("datamodule"))
    return lambda: _made(model), lambda: _made(data)


def _made(value: Any) -> Any:
    """Objects in the place of what names their classes."""
    if isinstance(value, list):
        return [_made(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    name = value.get("class_path", value.get("_target_"))
    if name is None:
        return {key: _made(item) for key, item in value.items()}
    own = value.get("init_args", {}) if "class_path" in value else value
    arguments = {key: _made(item) for key, item in own.items() if key not in ("_target_", "_partial_", "_convert_")}
    module, _, attribute = str(name).rpartition(".")
    kind = getattr(_imported(module, "a class of --config"), attribute, None)
    if kind is None:
        raise OptionError(f"--config names {name}, and {module} has no {attribute}")
    return kind(**arguments)
