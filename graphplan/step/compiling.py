"""``compile=``: modules compiled in place, before their first step, and back as they were afterwards."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn


def _from_the_top() -> AbstractContextManager[Any]:
    """Have the compiler take in the call itself. It leaves torch's own frames alone, and so the layers of a container,
    unless the outermost frame is one of its own.
    """
    config: Any = importlib.import_module("torch._dynamo.config")
    if not hasattr(config, "wrap_top_frame"):
        return nullcontext()
    patch: AbstractContextManager[Any] = config.patch(wrap_top_frame=True)
    return patch


class CompiledModules:
    """Modules whose calls go through ``torch.compile`` until :meth:`undo`.

    Args:
        modules: each is compiled as a whole; one that is compiled already is left alone.
        how: arguments of ``torch.compile``; True for its own defaults, which on the CPU compile nothing, since the tape
            records what compiled code is made of; False for no compilation.
    """

    def __init__(self, modules: Iterable[nn.Module], how: bool | Mapping[str, Any]) -> None:
        self.notes: list[str] = []
        self._ours: list[nn.Module] = []
        if how is False:
            return
        for module in modules:
            name = type(module).__name__
            if how is True and all(parameter.device.type == "cpu" for parameter in module.parameters()):
                self.notes.append(
                    f"compile: {name} is not compiled on the CPU, where the tape records the operators that compiled "
                    "code is made of; compile={'backend': 'aot_eager'} compiles it all the same"
                )
            elif module._compiled_call_impl is None:
                with _from_the_top():
                    module.compile(**({} if how is True else how))
                self._ours.append(module)
                self.notes.append(f"compiled: {name}")

    def undo(self) -> None:
        """Have the modules called as they are written."""
        for module in self._ours:
            module._compiled_call_impl = None
        self._ours = []
