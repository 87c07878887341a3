"""Kinds of values: plain values, objects of libraries, and objects whose attributes are walked."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping, Sequence
from enum import Enum
from functools import partial
from types import FunctionType, ModuleType
from typing import Any
from weakref import ProxyTypes, WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from graphplan.environment.origin import is_users
from graphplan.errors import OwnersError
from graphplan.owners.contents import Unseen
from graphplan.owners.views import attributes_of
from graphplan.specs.paths import free_name
from graphplan.tensors.deferred import DeferredArray, DeferredNumber
from graphplan.tensors.records import slots_of

SCALARS = (bool, int, float, complex, str, bytes, type(None), DeferredNumber)
PLAIN = frozenset((*SCALARS, DeferredArray))
MAX_DEPTH = 24
MAX_ITEMS = 4096
TOO_DEEP = Unseen(
    f"which is more than {MAX_DEPTH} attributes deep; a value at that depth",
    "Name an object that is nearer to it in owners=",
)
TOO_MANY = Unseen(f"of which there are more than {MAX_ITEMS}; their content", "Keep numbers in a tensor")
_FLAT = (Tensor, torch.dtype, torch.device, type, range)
MAPPINGS = (dict, MutableMapping)
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Dictionaries come first: ``isinstance`` is slow for an abstract class."""
_LIBRARIES = ("graphplan", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "numpy", "antlr4")
_NAMESPACES = {"argparse", "types", "configparser", "__main__"}
_HOLDERS = {*_NAMESPACES, "collections", "os", "queue", "threading", "_thread"}
FOREIGN = (sys.stdlib_module_names | {*_LIBRARIES}) - _HOLDERS
"""Packages whose objects are not walked. Modules of the standard library whose objects hold values are excluded."""
_PARSERS = "omegaconf.grammar"
"""Modules that parse strings such as ``${rate}``. Their objects are temporary: the configuration holds the values."""
_OPEN = ("torch.distributions.", "torch.utils.data.dataset", "multiprocessing.sharedctypes")
"""Modules of those packages whose objects hold the user's values, and are walked."""
_ATOMS = (type, ModuleType, Enum, partial)
_USERS_BASES: WeakKeyDictionary[type, tuple[type, ...]] = WeakKeyDictionary()


def is_plain(value: Any) -> bool:
    """Return True if a member of a class or module is a value rather than code."""
    code = isinstance(value, FunctionType | ModuleType | staticmethod | classmethod | property)
    return not code and not hasattr(type(value), "__get__")


def is_known(module: str) -> bool:
    """Return True if the module belongs to Python or to one of the packages listed here."""
    root = module.split(".")[0]
    return root in FOREIGN or root in _HOLDERS


def holds_values(thing: Any) -> bool:
    """Return True if an object or class holds the user's attributes: its class is the user's or a Python namespace."""
    kind = thing if issubclass(type(thing), type) else type(thing)
    return is_users(kind) or str(kind.__module__).split(".")[0] in _NAMESPACES


def users_bases(kind: type) -> tuple[type, ...]:
    """Return the user's own classes among ``kind`` and its bases."""
    found = _USERS_BASES.get(kind)
    if found is None:
        found = _USERS_BASES[kind] = tuple(base for base in kind.__mro__ if is_users(base))
    return found


def is_gone(value: Any) -> bool:
    """Return True if ``value`` is a weak proxy whose referent no longer exists."""
    try:
        return type(value) in ProxyTypes and value.__class__ is None
    except ReferenceError:
        return True


def key_name(key: Any, number: int) -> str:
    """Return a name that no other key of the dictionary has; an object is named by its type and position."""
    parts = key if isinstance(key, tuple) else (key,)
    return repr(key) if all(isinstance(part, SCALARS) for part in parts) else f"{type(key).__name__} {number}"


def is_user_object(value: Any) -> bool:
    """Return True if the attributes of ``value`` are walked: its class is of no package in :data:`FOREIGN`."""
    kind = type(value)
    if issubclass(kind, LRScheduler):
        return True
    # Optimizers, also those of other packages, are walked as optimizers where they are owners.
    if issubclass(kind, (*_ATOMS, *SCALARS)) or has_groups(value) or is_of_library(kind):
        return False
    # An alias such as tuple[int, str] has the ``__dict__`` of its class, which is no dictionary.
    return attributes_of(value) is not None or bool(slots_of(kind))


def is_of_library(kind: type) -> bool:
    """Return True if objects of the class are not walked: those of the packages in :data:`FOREIGN`, with exceptions."""
    module = kind.__module__ if isinstance(kind.__module__, str) else ""
    is_known_here = module.split(".")[0] in FOREIGN or module.startswith(_PARSERS)
    return is_known_here and not module.startswith(_OPEN)


def has_groups(value: Any) -> bool:
    """Return True for an optimizer that stores its groups. One that computes them is walked like any other object."""
    return issubclass(type(value), torch.optim.Optimizer) and "param_groups" in vars(value)


def unwrapped(owner: Any) -> Any:
    """Return the optimizer in a wrapper without groups of its own (Fabric, Accelerate); any other owner unchanged."""
    while isinstance(owner, torch.optim.Optimizer) and not has_groups(owner):
        kept = [value for value in vars(owner).values() if isinstance(value, torch.optim.Optimizer)]
        if len(kept) != 1:
            break
        owner = kept[0]
    return owner


def check_names(owners: Mapping[str, Any] | Sequence[Any] | None) -> None:
    """Raise OwnersError if a name begins with another one and a dot: two values could then have the same path."""
    names = list(owners) if isinstance(owners, Mapping) else []
    for name in names:
        outer = next((other for other in names if str(name).startswith(f"{other}.")), None)
        if outer is not None:
            raise OwnersError(
                f"the owners {outer!r} and {name!r} may hold values of the same path; expected names of which none "
                "begins with another one and a dot: rename one of them"
            )


def name_owners(owners: Mapping[str, Any] | Sequence[Any] | None) -> dict[str, Any]:
    """Return owners by name: the keys of a mapping, or the type names of a sequence. None gives an empty dictionary."""
    if owners is None:
        return {}
    if isinstance(owners, Mapping):
        return {name: unwrapped(owner) for name, owner in owners.items()}
    if isinstance(owners, Sequence) and not isinstance(owners, str):
        named: dict[str, Any] = {}
        for owner in owners:
            named[free_name(type(owner).__name__.lower(), named)] = unwrapped(owner)
        return named
    raise OwnersError(f"owners is a {type(owners).__name__}; expected a mapping from name to object, or a sequence")


def holds_nothing_else(item: Any) -> bool:
    """Return True if comparing ``item`` itself compares everything that it holds."""
    flat = type(item) in PLAIN or isinstance(item, _FLAT)
    return flat or (type(item) is tuple and all(map(holds_nothing_else, item)))
