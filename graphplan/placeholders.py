"""What a trace hands to the step in the place of fed values that it is not expected to read.

File names, numpy arrays and other host values differ from batch to batch. As part of a key they would make a new
program of each batch; left out of it, they must not be read. So traces and captures get a :class:`Placeholder` for each:
it may be passed on, unpacked, put into other containers and let go, and ``isinstance`` says of it what it says of the
value. Anything else raises :class:`ReadSignal`, upon which the call is undone and run again with the values.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from graphplan.errors import GraphPlanError


class ReadSignal(BaseException):
    """Placeholders were used. No ``Exception``, so that the step's own handlers let it pass.

    Attributes:
        indices: those of the leaves that they stand for.
    """

    def __init__(self, indices: Iterable[int] = ()) -> None:
        super().__init__()
        self.indices = tuple(indices)


class Placeholder:
    """Stands for a value of class ``kind``. ``on_read()`` is called when it is used, and raises."""

    __slots__ = ("_kind", "_on_read")

    def __init__(self, kind: type, on_read: Callable[[], Any]) -> None:
        _set_kind(self, kind)
        _set_on_read(self, on_read)

    def __getattribute__(self, name: str) -> Any:
        return kind_of(self) if name == "__class__" else _on_read(self)()


kind_of: Callable[[Any], type] = vars(Placeholder)["_kind"].__get__
"""The class of the value that a placeholder stands for."""
_on_read: Callable[[Any], Callable[[], Any]] = vars(Placeholder)["_on_read"].__get__
_set_kind: Callable[[Any, type], None] = vars(Placeholder)["_kind"].__set__
_set_on_read: Callable[[Any, Callable[[], Any]], None] = vars(Placeholder)["_on_read"].__set__

_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or".split()
_SPECIAL = [
    *(prefix + name for name in _BINARY for prefix in ("", "r", "i")),
    *"abs neg pos invert index int float complex round trunc floor ceil bool len length_hint iter next reversed".split(),
    *"contains getitem setitem delitem setattr delattr call hash eq ne lt le gt ge str repr format bytes".split(),
    *"fspath enter exit aenter aexit aiter anext await dir sizeof reduce reduce_ex copy deepcopy get set".split(),
    *"buffer torch_function".split(),
]
for _name in _SPECIAL:
    # The interpreter looks these up on the class.
    setattr(Placeholder, f"__{_name}__", lambda self, *_, **__: _on_read(self)())


def is_placeholder(value: Any) -> bool:
    """Return True for a placeholder, without a use of it."""
    return type(value) is Placeholder


class Placeholders:
    """Placeholders for the leaves at ``indices`` of ``leaves``. Entered around the step, it tells which of them that
    used: on the way out :class:`ReadSignal` is raised with their indices.

    ``leaves`` are those given with the placeholders in their places.
    """

    def __init__(self, leaves: Sequence[Any], indices: Iterable[int]) -> None:
        self.leaves = list(leaves)
        self._used: set[int] = set()
        self._made: dict[int, Placeholder] = {}
        self._references: dict[int, int] = {}
        for index in indices:
            self._made[index] = self.leaves[index] = Placeholder(type(leaves[index]), self._signal(index))

    def _signal(self, index: int) -> Callable[[], Any]:
        def on_read() -> Any:
            self._used.add(index)
            raise ReadSignal

        return on_read

    def __enter__(self) -> None:
        self._references = self._count()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        """Raise :class:`ReadSignal` for placeholders that were used, or are kept in more places than before."""
        if error is None and self._count() != self._references:
            # Cycles that the step has left hold them, too.
            gc.collect()
            now = self._count()
            self._used.update(index for index, number in now.items() if number > self._references[index])
        if self._used:
            raise ReadSignal(self._used) from None
        if isinstance(error, Exception) and not isinstance(error, GraphPlanError):
            # C code that is handed a placeholder says that it wants something else.
            raise ReadSignal(self._made) from None

    def _count(self) -> dict[int, int]:
        return {index: sys.getrefcount(made) for index, made in self._made.items()}
