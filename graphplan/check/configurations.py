"""Models and data of configuration files: those of ``LightningCLI``, and those of Hydra, each made by its library."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from graphplan.environment.lightnings import NAMES, name_of
from graphplan.errors import OptionError

_MODELS, _DATA = ("model", "module"), ("data", "datamodule")
_TRAINER = ("accelerator=cpu", "devices=1", "num_nodes=1", "strategy=auto", "logger=false", "callbacks=null")
"""Arguments of the configured Trainer, which does not train here."""
_CLASS, _TARGET = "class_path", "_target_"


def configured(path: str, kind: type | None, data: type | None) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What makes the model and the data of a configuration file anew; data may be None.

    A file of Hydra's, alone or with a defaults list, names classes with ``_target_`` under ``model`` or ``module`` and
    ``data`` or ``datamodule``. Any other is for a ``LightningCLI``.

    Args:
        path: the file.
        kind: the class of the model, for a ``LightningCLI`` that is given it; None if the file has a ``class_path``.
        data: the class of the data likewise.

    Raises:
        OptionError: if the file does not exist, names no model, or its library is not installed or refuses it.
    """
    if not Path(path).is_file():
        raise OptionError(f"--config is {path!r}, and there is no such file")
    try:
        hydras = _of_hydra(path) if kind is None else {}
    except ImportError as error:
        raise OptionError(
            f'--config needs {error.name}, which is not installed: pip install "graphplan[hydra]"'
        ) from error
    model = _first(hydras, _MODELS)
    if isinstance(model, Mapping) and _TARGET in model:
        instantiate = importlib.import_module("hydra.utils").instantiate
        fed = _first(hydras, _DATA)
        return lambda: instantiate(model), lambda: None if fed is None else instantiate(fed)
    if kind is None and not (isinstance(model, Mapping) and _CLASS in model):
        raise OptionError(
            f"--config is {path!r}, which names no model; expected model (or module) with _target_, as Hydra has it, "
            "or with class_path, as LightningCLI has it, or the class as a target beside --config; found: "
            f"{', '.join(map(str, hydras)) or 'nothing'}"
        )
    made: list[Any] = []

    def make() -> Any:
        made[:] = [_of_lightning(path, kind, data, has_data=data is not None or "data" in hydras)]
        return made[0].model

    return make, lambda: made[0].datamodule


def _first(config: Any, names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if name in config), None)


def _of_hydra(path: str) -> Any:
    """The configuration as Hydra composes it; one that is for another library comes out as it is."""
    hydra, omegaconf = (importlib.import_module(name) for name in ("hydra", "omegaconf"))
    plain = omegaconf.OmegaConf.load(path)
    if "defaults" not in plain:
        return plain
    file = Path(path).resolve()
    with hydra.initialize_config_dir(str(file.parent), version_base="1.3"):
        return hydra.compose(file.stem)


def _of_lightning(path: str, kind: type | None, data: type | None, *, has_data: bool) -> Any:
    """Return the ``LightningCLI`` of the file, with model, data, optimizer and schedule; it does not train."""
    name = NAMES[0] if kind is None else name_of(kind)
    try:
        pl, cli = importlib.import_module(name), importlib.import_module(f"{name}.cli")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return cli.LightningCLI(
                kind or pl.LightningModule,
                data or (pl.LightningDataModule if has_data else None),
                subclass_mode_model=kind is None, subclass_mode_data=data is None, run=False, save_config_callback=None,
                args=["--config", path, *(f"--trainer.{each}" for each in _TRAINER)],
            )  # fmt: skip
    except (SystemExit, ImportError, AttributeError) as error:
        raise OptionError(
            f"--config is {path!r}, which LightningCLI does not take: {error}. It says more on stderr; it needs "
            '"jsonargparse[signatures]"'
        ) from error
