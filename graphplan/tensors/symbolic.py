"""Symbolic numbers: stand-ins in a traced step for numbers of its owners, such as ``self.global_step``.

A :class:`SymbolicNumber` records the arithmetic done with it and the outcomes of its comparisons. Both can be repeated
for another number. If code needs the value itself (an index, a text), a replay is valid for that value alone.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dis import opname
from functools import cached_property
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from graphplan.tensors.deferred import (
    COMPARISONS,
    DeferredNumber,
    NumberForm,
    form_of,
    in_order,
    is_deferred,
    value_of,
    with_values,
)

NUMBERS = (int, float)
"""Python's classes with stand-ins. bool has none, since code may test whether a truth value *is* ``True``."""
_BITWISE: tuple[Any, ...] = (operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift)
_NARROWING: tuple[Any, ...] = (operator.floordiv, operator.mod, operator.and_, operator.rshift)
_ROUNDING: tuple[Any, ...] = (int, round, math.floor, math.ceil, math.trunc)


def has_stand_ins(kind: type) -> bool:
    """Return True if numbers of class ``kind`` have stand-ins: Python's, and NumPy's subclass of float (float64)."""
    return kind in NUMBERS or (issubclass(kind, float) and kind.__module__ == "numpy")


@dataclass(frozen=True)
class Question:
    """A value that a step computes from owners' numbers and depends on: the truth value of a branch or, with
    ``needs_value``, the number from which it makes an index or a size.
    """

    form: NumberForm
    needs_value: bool = False

    @classmethod
    def about(cls, path: str, *, needs_value: bool = False) -> Question:
        """Return the question about the number at ``path`` itself."""
        return cls(NumberForm([(path, ())]), needs_value)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The paths of these numbers, in the order in which they are read."""
        return tuple(function for function, _ in self.form if type(function) is str)

    def answer(self, numbers: Mapping[str, Any]) -> Any:
        """Return the answer for ``numbers`` by path. An impossible comparison raises the exception of the step."""
        value = self.form.compute([numbers[path] for path in self.paths])
        return value if self.needs_value else bool(value)


@dataclass(frozen=True, slots=True)
class Gives:
    """A predicate: ``function`` returns a value of class ``kind``, or raises an exception of that class."""

    function: Callable[..., Any]
    kind: type

    def __call__(self, *operands: Any) -> bool:
        """Return True if this holds for ``operands``."""
        try:
            return type(self.function(*operands)) is self.kind
        except Exception as error:  # noqa: BLE001 - code of the step's may catch it
            return type(error) is self.kind


def answers_hold(asked: Mapping[Question, Any], numbers: Mapping[str, Any]) -> bool:
    """Return True if all questions have the same answers as before, for ``numbers`` by path."""
    return all(_is_same(question.answer(numbers), answer) for question, answer in asked.items())


def _is_same(value: Any, answer: Any) -> bool:
    return value is answer or (type(value) is type(answer) and value == answer and repr(value) == repr(answer))


class SymbolicNumber(DeferredNumber):
    """An owner's number with the value ``known`` at the path ``source``, or ``function`` of such ``operands``."""

    __slots__ = ("_known",)
    is_symbolic = True

    def __init__(
        self, reader: Any, known: Any, source: Any = None, function: Any = None, operands: tuple[Any, ...] = ()
    ) -> None:
        super().__init__(type(known), reader, source, function, operands)
        self._known = known

    def _computed(self, function: Any, operands: tuple[Any, ...], kind: type) -> DeferredNumber:
        self._reader.touch(self)
        value = function(*(o._known if type(o) is SymbolicNumber else o for o in operands))
        return SymbolicNumber(self._reader, value, None, function, operands)

    def apply(self, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """Return ``function`` of ``operands``, one of which is this number: a stand-in, if all operands are numbers.
        ``function`` must depend on its operands alone. The class of a result and a truth value become questions.
        """
        if not all(type(operand) is SymbolicNumber or _is_number(operand) for operand in operands):
            return with_values(function, operands)
        try:
            made: Any = self._computed(function, tuple(operands), float)
        except Exception as error:
            self._ask(Gives(function, type(error)), operands)
            raise
        if type(made._known) is bool or _is_numpys(made._known):
            self._ask(function, operands, answer=bool(made._known))
            return made._known
        if not _is_number(made._known):
            return with_values(function, operands)
        self._ask(Gives(function, made._kind), operands)
        return made

    def _ask(self, function: Callable[..., Any], operands: Sequence[Any], *, answer: bool = True) -> None:
        asked = SymbolicNumber(self._reader, answer, None, function, tuple(operands))
        self._reader.ask(Question(form_of(asked)[0]), answer)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Apply NumPy's ufuncs like functions of numbers."""
        if method == "__call__" and not kwargs and ufunc.nout == 1:
            # For a comparison, NumPy wraps its scalars in zero-dimensional arrays.
            are_numpys = [hasattr(type(each), "__array_interface__") and not each.ndim for each in inputs]
            numbers = [each[()] if is_numpys else each for each, is_numpys in zip(inputs, are_numpys, strict=True)]
            # ``**`` of NumPy scalars rounds differently from the ufunc ``power``.
            is_power = ufunc.__name__ == "power" and any(are_numpys) and _is_operator(sys._getframe(1))
            return self.apply(operator.pow if is_power else ufunc, numbers)
        return getattr(ufunc, method)(*map(value_of, inputs), **kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Apply NumPy's other functions (``clip``) likewise."""
        if not kwargs:
            return self.apply(function, args)
        return function(*map(value_of, args), **{name: value_of(value) for name, value in kwargs.items()})

    def __round__(self, digits: int | None = None) -> Any:
        return self.apply(round, (self,) if digits is None else (self, digits))

    def as_tensor(self, dtype: torch.dtype, device: torch.device, *, is_operand: bool = False) -> Tensor:
        """Return a scalar tensor that is filled with the value before each replay, or that has the traced value if no
        such tensor can be made. ``is_operand``: an eager step runs the same operator.
        """
        tensor: Tensor | None = self._reader.tensor_of(self, dtype, device, is_operand=is_operand)
        return torch.tensor(self._value(), dtype=dtype, device=device) if tensor is None else tensor

    def _value(self, needs: str = "") -> Any:
        if _gives_few(self):
            self._reader.ask(Question(form_of(self)[0], needs_value=True), self._known)
        else:
            self._reader.use(self, needs)
        return self._known

    def __bool__(self) -> bool:
        self._reader.ask(Question(form_of(self)[0]), bool(self._known))
        return bool(self._known)

    def __index__(self) -> int:
        self._reader.look_up(sys._getframe(1).f_code)
        return int(with_values(operator.index, (self,)))


def _gives_few(number: DeferredNumber) -> bool:
    """Return True if it has few values for many numbers, like ``step // 1000``: each value can have its own program."""
    few: set[int] = set()
    for node in in_order(number):
        narrows = node._function in _NARROWING or node._source in node._reader.small_draws
        narrows |= node._function in _ROUNDING and getattr(node._operands[0], "_kind", None) is float
        if narrows or (node._source is None and all(id(o) in few for o in node._operands if is_deferred(o))):
            few.add(id(node))
    return id(number) in few


def _is_operator(frame: FrameType) -> bool:
    """Return True if the current instruction of ``frame`` is a binary operator, not a call."""
    return opname[frame.f_code.co_code[frame.f_lasti]].startswith(("BINARY", "INPLACE"))


def _is_number(value: Any) -> bool:
    """Return True for a real number. Uses ``type``, since a stand-in reports the number's class as ``__class__``."""
    return issubclass(type(value), NUMBERS)


def _is_numpys(value: Any) -> bool:
    """Return True if ``value`` is a NumPy bool."""
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


def _comparing(function: Any) -> Callable[[SymbolicNumber, Any], Any]:
    def method(self: SymbolicNumber, other: Any) -> Any:
        if isinstance(other, Tensor) or (is_deferred(other) and not other.is_symbolic):
            # The other's own comparison takes this number and compares on the device.
            return NotImplemented
        if type(other) not in (SymbolicNumber, bool) and not has_stand_ins(type(other)):
            return function(value_of(self), other)
        # Comparisons of NumPy's numbers return NumPy bools, which `apply` turns into questions.
        return self.apply(function, (self, other))

    return method


def _applying(function: Any, *, reflected: bool = False) -> Callable[[SymbolicNumber, Any], Any]:
    return lambda self, other: self.apply(function, (other, self) if reflected else (self, other))


for _function in _BITWISE:
    _name = _function.__name__.strip("_")
    setattr(SymbolicNumber, f"__{_name}__", _applying(_function))
    setattr(SymbolicNumber, f"__r{_name}__", _applying(_function, reflected=True))
for _function in COMPARISONS:
    setattr(SymbolicNumber, f"__{_function.__name__}__", _comparing(_function))
# Containers call __hash__ before they compare.
SymbolicNumber.__hash__ = lambda self: hash(value_of(self))  # type: ignore[method-assign]
