"""Let ``float(x)`` and ``int(x)`` return stand-ins: no method of ``x`` can, since these classes check their result.

While stand-ins may be present, modules whose code only calls ``float`` and ``int`` get other classes under these names.
Code that uses the names otherwise is noticed when it starts to run, before it does so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import CodeType, ModuleType
from typing import Any

from torch.nn.utils import clip_grad

from graphplan.observe.bytecode import instructions_of, loads_callee

Convert = Callable[[type, Any], Any]
_CLASSES: tuple[type, ...] = (float, int)
_modules: dict[tuple[str, str], ModuleType] = {(clip_grad.__name__, "float"): clip_grad}
"""Modules whose code calls a class, by both names. ``clip_grad`` is the only one of torch's: it converts norms."""
_spoilt: set[tuple[str, str]] = set()
"""Names of modules and classes where code that ran uses the class otherwise."""


class _Called(type):
    """Metaclass of a class that replaces ``kind`` in calls and in ``isinstance``."""

    kind: type
    convert: Convert

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        found = cls.convert(cls.kind, args[0]) if len(args) == 1 and not kwargs else None
        return cls.kind(*args, **kwargs) if found is None else found

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.kind)


def replacements(convert: Convert) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield module, name and replacement class. ``convert(kind, x)`` returns the result of ``kind(x)``, or None."""
    stand_ins = {kind.__name__: _stand_in(kind, convert) for kind in _CLASSES}
    for (_, name), module in list(_modules.items()):
        if name not in vars(module):
            yield module, name, stand_ins[name]


@lru_cache
def _stand_in(kind: type, convert: Convert) -> Any:
    return _Called(kind.__name__, (), {"kind": kind, "convert": staticmethod(convert), "__module__": "builtins"})


def note_code(code: CodeType, space: Mapping[str, Any]) -> None:
    """Note that a step is about to run ``code``, whose globals are ``space``."""
    for kind in _CLASSES:
        name = kind.__name__
        if name not in code.co_names:
            continue
        module = sys.modules.get(str(space.get("__name__")))
        if module is None or vars(module) is not space:
            continue
        key = (module.__name__, name)
        if not _only_calls(code, name):
            _spoilt.add(key)
            _modules.pop(key, None)
            if type(space.get(name)) is _Called:
                delattr(module, name)
        elif key not in _spoilt:
            _modules[key] = module


@lru_cache(1024)
def _only_calls(code: CodeType, name: str) -> bool:
    """Return True if ``code`` only calls the global ``name``, or passes it to ``isinstance``. Python before 3.11 does
    not mark loads of callables: then return False.
    """
    called = ""
    for step in instructions_of(code):
        is_global = step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        is_callee = loads_callee(step)
        if is_global and step.argval == name and not is_callee and called != "isinstance":
            return False
        if is_callee:
            called = str(step.argval) if is_global else ""
        elif step.opname in ("LOAD_METHOD", "PUSH_NULL") or step.opname.startswith("CALL"):
            called = ""
    return True
