"""Checks a composed Hydra configuration before anything is built from it, and names the choices when it is wrong.

Three kinds of mistakes have three places: a key that a configuration file misspells (the schema, and the signatures of
the ``_target_``s), a role or mode that does not exist (:class:`graphplan.Policy`), and a key that the command line
misspells, which Hydra notices before any of our code runs (:func:`explain_overrides`).
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hydra.utils import get_object
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from graphplan import Policy, graphed
from graphplan.backends.backend import BACKENDS
from graphplan.specs.policy import MODES
from graphplan.step.buckets import SHAPES

# Keys that mean something to Hydra's instantiate and never reach the target.
HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}
# Keys that are there and nobody would want to set by hand; never offered as a choice.
NOT_CHOICES = HYDRA_KEYS | {"hydra"}


class ConfigError(ValueError):
    """The configuration has a key or value that does not exist; the message names the choices."""


@dataclass
class Roles:
    """Schema of one policy."""

    static_roles: list[str] = MISSING
    copy_roles: list[str] = MISSING


@dataclass
class Mode:
    """Schema of the group ``mode``."""

    name: str = MISSING
    policies: dict[str, Roles] = MISSING


@dataclass
class Backend:
    """Schema of the group ``backend``."""

    name: str = MISSING


@dataclass
class Optimizer:
    """Schema of the group ``optimizer``; what is in the two is checked against their targets."""

    update: dict[str, Any] = MISSING
    schedule: dict[str, Any] = MISSING


@dataclass
class Schema:
    """Schema of the whole configuration; groups that are one ``_target_`` are checked against its signature."""

    mode: Mode = MISSING
    shapes: dict[str, Any] = MISSING
    backend: Backend = MISSING
    model: dict[str, Any] = MISSING
    data: dict[str, Any] = MISSING
    optimizer: Optimizer = MISSING
    trainer: dict[str, Any] = MISSING
    callbacks: dict[str, Any] = MISSING
    seed: int = MISSING
    threads: int | None = MISSING
    ckpt_path: str | None = None


def unknown_key(where: str, key: str, choices: Iterable[str]) -> str:
    """The message for a ``key`` that ``where`` does not have."""
    names = sorted(name for name in choices if name not in NOT_CHOICES)
    if not names:  # An interpolation, too, has none by the time that OmegaConf reports the key.
        return f"{where} has no key {key!r}, nor any other: override it whole, or what it is taken from (--cfg job)"
    close = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{where} has no key {key!r}: {hint}Choose from: {', '.join(names)}"


def check_config(cfg: DictConfig) -> None:
    """Check every key, role, mode and backend of ``cfg``.

    Raises:
        ConfigError: for the first one that does not exist, naming those that do.
        PolicyError: for a role or mode that does not exist, or roles that contradict each other.
    """
    try:
        checked = OmegaConf.merge(OmegaConf.structured(Schema), cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(describe_omegaconf(error)) from error
    if checked.mode.name not in MODES:
        raise ConfigError(f"mode.name is {checked.mode.name!r}; choose from: {', '.join(MODES)}")
    if checked.backend.name not in BACKENDS:
        raise ConfigError(f"backend.name is {checked.backend.name!r}; choose from: {', '.join(BACKENDS)}")
    check_arguments(cfg.shapes, "shapes", graphed)
    if checked.shapes.shapes not in SHAPES:
        raise ConfigError(f"shapes.shapes is {checked.shapes.shapes!r}; choose from: {', '.join(SHAPES)}")
    for mode, roles in checked.mode.policies.items():
        Policy.parse(mode, {"static_roles": list(roles.static_roles), "copy_roles": list(roles.copy_roles)})
    if checked.mode.name == "inference" and cfg.ckpt_path is None:
        raise ConfigError("mode=inference predicts with trained weights: add ckpt_path=..., the checkpoint of a run")
    check_targets(cfg, "")


def check_targets(node: Any, path: str) -> None:
    """Check the keys of ``node``, and of every node below it that has a ``_target_``, against that target.

    Raises:
        ConfigError: for a key that is no argument of its target, or a value of the wrong plain type.
    """
    if not isinstance(node, DictConfig):
        return
    if "_target_" in node:
        check_arguments(node, path, get_object(node["_target_"]), f"{path} ({node['_target_']})")
    keys: list[Any] = list(node)
    for key in keys:
        # Dimensions, to which capture sizes belong, are numbers.
        if not OmegaConf.is_interpolation(node, key):
            check_targets(node[key], f"{path}.{key}" if path else str(key))


def check_arguments(node: DictConfig, path: str, target: Callable[..., Any], name: str = "") -> None:
    """Check one node against the signature of ``target``, which is called with it; errors call the node ``name``."""
    parameters = inspect.signature(target).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in (key for key in map(str, node) if key not in HYDRA_KEYS):
        if key not in parameters and not open_ended:
            raise ConfigError(unknown_key(name or path, key, parameters))
        # What is interpolated is checked where it comes from; some of it exists only once the run has a folder.
        if key in parameters and not OmegaConf.is_interpolation(node, key):
            check_type(f"{path}.{key}", node[key], parameters[key].annotation)


def check_type(path: str, value: Any, annotation: Any) -> None:
    """Check ``value`` where ``annotation`` is one plain type, or None; written as such or as a string."""
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if value is None and name.endswith(" | None"):
        return
    name = name.removesuffix(" | None")
    # By exact type: a bool is an int to isinstance. A whole number is a good float.
    accepted = {"int": (int,), "float": (float, int), "bool": (bool,), "str": (str,)}.get(name)
    if accepted is not None and type(value) not in accepted:
        raise ConfigError(f"{path} is {value!r}: expected {name}")


def describe_omegaconf(error: OmegaConfBaseException) -> str:
    """The choices, where ``error`` is about a key that does not exist; else OmegaConf's own message."""
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)) and isinstance(error.parent_node, DictConfig):
        where = error.parent_node._get_full_key(None) or "the configuration"
        return unknown_key(where, str(error.key), map(str, error.parent_node))
    return str(error)


@contextmanager
def explain_overrides() -> Iterator[None]:
    """Name the choices when Hydra stops over a misspelt key on the command line.

    Hydra prints that the key does not exist and exits with the error that it met as the exit's context; this adds what
    does exist. Any other exit passes through unchanged.
    """
    try:
        yield
    except SystemExit as stop:
        cause: BaseException | None = stop.__context__
        while cause is not None and not isinstance(cause, OmegaConfBaseException):
            cause = cause.__cause__
        if cause is not None:
            sys.stderr.write(f"{describe_omegaconf(cause)}\n")
        raise
