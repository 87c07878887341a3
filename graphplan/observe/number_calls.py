"""``float(x)`` and ``int(x)`` in a step's code: calls of classes, which no method of ``x`` can answer with what waits.

While stand-ins are about, modules whose code does nothing with these classes but call them have others under their
names. What else may be done with a class shows before it is: as code begins to run that is about to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import CodeType, ModuleType
from typing import Any

from torch.nn.utils import clip_grad

from graphplan.observe.bytecode import loads_callee, steps_of

Convert = Callable[[type, Any], Any]
_CLASSES: tuple[type, ...] = (float, int)
_modules: dict[tuple[str, str], ModuleType] = {(clip_grad.__name__, "float"): clip_grad}
"""By their names and that of the class, modules with code that calls it. Of torch's, the one that is given norms."""
_spoilt: set[tuple[str, str]] = set()
"""Those with code that ran and does something else with the class."""


class _Called(type):
    """A class that stands for ``kind`` where that is called, or a value is asked whether it is of it."""

    kind: type
    convert: Convert

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        found = cls.convert(cls.kind, args[0]) if len(args) == 1 and not kwargs else None
        return cls.kind(*args, **kwargs) if found is None else found

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.kind)


def replacements(convert: Convert) -> Iterator[tuple[ModuleType, str, Any]]:
    """Modules, names and classes to put there: ``convert(kind, x)`` gives what ``kind(x)`` is to give, or None."""
    stand_ins = {kind.__name__: _stand_in(kind, convert) for kind in _CLASSES}
    for (_, name), module in list(_modules.items()):
        if name not in vars(module):
            yield module, name, stand_ins[name]


@lru_cache
def _stand_in(kind: type, convert: Convert) -> Any:
    return _Called(kind.__name__, (), {"kind": kind, "convert": staticmethod(convert), "__module__": "builtins"})


def note_code(code: CodeType, space: Mapping[str, Any]) -> None:
    """Take in that a step is about to run ``code``, whose globals are ``space``."""
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
    """Whether ``code`` only calls the global ``name``, or hands it to ``isinstance``. Since Python 3.11, what loads a
    function says that it is called next; before, nothing is known.
    """
    called = ""
    for step in steps_of(code):
        is_global = step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        is_callee = loads_callee(step)
        if is_global and step.argval == name and not is_callee and called != "isinstance":
            return False
        if is_callee:
            called = str(step.argval) if is_global else ""
        elif step.opname in ("LOAD_METHOD", "PUSH_NULL") or step.opname.startswith("CALL"):
            called = ""
    return True
