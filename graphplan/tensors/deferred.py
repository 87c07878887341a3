"""Deferred numbers and host copies: stand-ins for values that a step reads from the device.

A :class:`DeferredNumber` records the arithmetic done with it. Its value is read when code needs it. A number that no
code has needed, because the step only keeps, logs or returns it, can be computed after each replay.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphplan.tensors.number_operands import inverse, with_bounds, with_operand, with_value, with_weight

REPLACED_READ: ContextVar[str] = ContextVar("instead", default="")
"""Marks operators that replace a deferred read: ``"operators"`` that no eager step runs, or operators that make a
``"constant"`` whose value is different in an eager step.
"""
_PLAIN = (bool, int, float)
_EXACT = 2**53
"""Below this, float64 represents each integer exactly."""
_BINARY: tuple[Any, ...] = (
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.truediv, operator.pow,
)  # fmt: skip
_DIVISIONS: tuple[Any, ...] = (operator.floordiv, operator.mod, operator.truediv)
_ON_DEVICE: dict[Any, Callable[..., Tensor]] = {
    operator.add: torch.add, operator.sub: torch.sub, operator.mul: torch.mul, operator.truediv: torch.div,
    operator.neg: torch.neg, operator.pos: torch.positive, operator.abs: torch.abs, inverse: torch.reciprocal,
}  # fmt: skip
"""Functions that give the same bits in float64 on every device, as IEEE 754 requires."""
_WHOLE_ON_DEVICE: dict[Any, Callable[..., Tensor]] = {
    operator.mod: torch.remainder, operator.floordiv: torch.floor_divide,
}  # fmt: skip
"""Functions of integers that round down as in Python. Python integers do not overflow: see :func:`_fits_int64`."""
_SMALL = 2**31


class _Own:
    def __repr__(self) -> str:
        return "what was there before"


OWN = _Own()
"""Stands for the previous number at the place where the result is stored: ``self.total += loss.item()``."""


class _Made(int):
    """Stands for the result of the instruction at this position."""


class NumberForm(tuple[tuple[Any, tuple[Any, ...]], ...]):
    """How a number is computed: (function, operands) in order. A function of None reads a tensor, a path a number."""

    __slots__ = ()

    def compute(self, read: Sequence[Any], own: Any = None) -> Any:
        """Return the number, from the values ``read`` and the previous number ``own`` at its place."""
        values, made = iter(read), list[Any]()
        for function, operands in self:
            given = [made[o] if type(o) is _Made else own if o is OWN else o for o in operands]
            made.append(function(*given) if callable(function) else next(values))
        return made[-1]

    @property
    def has_own(self) -> bool:
        """Whether the previous number at its place is among the operands."""
        return any(operand is OWN for _, operands in self for operand in operands)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NumberForm) and self.key == other.key

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> tuple[Any, ...]:
        """The key for comparisons. It uses each constant's ``repr``, which tells ``0.0`` from ``-0.0``."""
        return tuple((function, *((type(o), repr(o)) for o in operands)) for function, operands in self)

    def __repr__(self) -> str:
        paths = [function for function, _ in self if type(function) is str]
        return (
            f"a number that is computed from {' and '.join(paths)}"
            if paths
            else "a number that is read from the device"
        )


class DeferredNumber:
    """A number that passes ``isinstance(number, kind)``: ``source``'s element, or ``function`` of ``operands``."""

    __slots__ = ("__weakref__", "_function", "_kind", "_operands", "_reader", "_source")
    is_array = is_symbolic = False

    def __init__(
        self, kind: type, reader: Any, source: Any = None, function: Any = None, operands: tuple[Any, ...] = ()
    ) -> None:
        self._kind, self._reader, self._source = kind, reader, source
        self._function, self._operands = function, operands

    def _computed(self, function: Any, operands: tuple[Any, ...], kind: type) -> DeferredNumber:
        """Return the deferred result of ``function`` for ``operands``, one of which is this number."""
        return DeferredNumber(kind, self._reader, None, function, operands)

    def as_tensor(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a scalar tensor with the value."""
        return on_device(self, dtype)

    def _value(self, needs: str = "") -> Any:
        """Read and return the value. ``needs`` says in words why code needs it."""
        known: dict[int, Any] = {}
        for node in in_order(self):
            if node.is_symbolic:
                known[id(node)] = value_of(node, needs)
            elif node._source is not None:
                known[id(node)] = node._reader.read(node._source, node._kind)
            else:
                operands = (known[id(o)] if is_deferred(o) else o for o in node._operands)
                known[id(node)] = node._function(*operands)
        return known[id(self)]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._kind

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function with a scalar tensor if that gives the same bits, else with the values."""
        if not kwargs and len(args) == 2 and is_deferred(args[1]) and not args[1].is_array:
            result = with_operand(func, *args)
            if result is not None:
                return result
        named = kwargs or {}
        numbers = [each for each in (*args[1:], *named.values()) if is_deferred(each) and not each.is_array]
        found = with_bounds(func, args, named, numbers) if numbers else None
        if found is None and len(numbers) == 1:
            found = with_value(func, args, named, numbers[0]) or with_weight(func, args, named, numbers[0])
        if found is not None:
            return found[0]
        needs = f"an argument of `{getattr(func, '__name__', func)}`"
        return func(*_with_values(args, needs), **_with_values(named, needs))

    def __getattr__(self, name: str) -> Any:
        return getattr(value_of(self), name)

    def __bool__(self) -> bool:
        return bool(operator.ne(self, 0))

    def __round__(self, digits: int | None = None) -> Any:
        given = () if digits is None else (digits,)
        if not self._reader.may_fail():
            return round(value_of(self), *given)
        return _computed(round, self, *given, kind=int if digits is None else self._kind)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        import numpy as np

        return np.array(value_of(self)).__array__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return value_of(self).__reduce_ex__(protocol)


_FACTS: tuple[Any, ...] = tuple(
    getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "is_cuda")
)
_FACTS += (
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.__len__, Tensor.is_floating_point, Tensor.__hash__,
)  # fmt: skip
"""Attributes and methods of a host copy that do not need its values."""
_MOVES: tuple[Any, ...] = (
    Tensor.detach, Tensor.clone, Tensor.contiguous, Tensor.flatten, Tensor.reshape, Tensor.view, Tensor.squeeze,
    Tensor.unsqueeze, Tensor.permute, Tensor.transpose, Tensor.norm,
)  # fmt: skip
"""Methods that only move values, and norm. A norm is computed on the source's device, so it may round differently."""


class HostCopy(Tensor):
    """A copy of ``source`` in host memory whose values no code has read. An operator that only moves values, or a norm,
    returns another host copy; any other operator reads the values, and the copy becomes an ordinary tensor.
    """

    source: Tensor
    _reader: Any

    @classmethod
    def of(cls, source: Tensor, memory: Tensor, reader: Any) -> HostCopy:
        """Return the host copy of ``source`` that uses ``memory``."""
        copy: HostCopy = Tensor._make_subclass(cls, memory)
        copy.source, copy._reader = source, reader
        return copy

    def settle(self) -> None:
        """Become an ordinary tensor."""
        del self.source, self._reader
        self.__class__ = Tensor  # type: ignore[assignment]

    def numpy(self, *, force: bool = False) -> Any:
        """Return a deferred array. ``force`` makes no difference, since the copy is on the host."""
        return self._reader.array_of(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run functions that need no values without reading them; before any other function, read the values."""
        first = args[0] if args else None
        if func in _FACTS:
            pass
        elif func in _MOVES and type(first) is HostCopy:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                function = lambda tensor: func(tensor, *args[1:], **(kwargs or {}))  # noqa: E731
                return first._reader.move(first, function, detaches=func is Tensor.detach)
        else:
            for copy in pytree.tree_leaves((args, kwargs)):
                if type(copy) is HostCopy:
                    copy._reader.need(copy)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _with_values(tree: Any, needs: str) -> Any:
    """Return ``tree`` with values for deferred numbers. Without pytree, so that no torch frame hides the caller."""
    if type(tree) is dict:
        return {key: _with_values(item, needs) for key, item in tree.items()}
    if type(tree) is list or type(tree) is tuple:
        return type(tree)([_with_values(item, needs) for item in tree])
    return value_of(tree, needs)


def _computed(function: Any, *operands: Any, kind: type) -> DeferredNumber:
    return _device_first(operands)._computed(function, operands, kind)


def _device_first(operands: Iterable[Any]) -> DeferredNumber:
    """Return the first deferred operand that is read from the device, else the first symbolic number."""
    return min((operand for operand in operands if is_deferred(operand)), key=lambda number: number.is_symbolic)


def _binary(function: Any, *, reflected: bool) -> Callable[[DeferredNumber, Any], Any]:
    def method(self: DeferredNumber, other: Any) -> Any:
        if isinstance(other, Tensor):
            # The tensor's reflected method runs next, and calls __torch_function__ of this number.
            return NotImplemented
        kind = other._kind if is_deferred(other) else type(other)
        operands = (other, self) if reflected else (self, other)
        second: Any = operands[1]
        is_power = function is operator.pow
        first = _device_first(operands)
        if first.is_symbolic and (is_power or kind not in _PLAIN):
            return first.apply(function, operands)
        # The result of any other power may have another class.
        is_known = kind in _PLAIN and not (is_power and not (type(second) in (int, float) and second >= 0))
        fails = is_power or (function in _DIVISIONS and (is_deferred(second) or second == 0))
        if function in _DIVISIONS and is_deferred(second) and second.is_symbolic:
            # The value of a symbolic divisor is known: ask whether it is zero, which a replay compares.
            fails = not second
        elif first.is_symbolic and fails:
            fails = not second
        is_summed = function is operator.add and first._reader.is_summed()
        if not is_known or is_summed or (fails and not first._reader.may_fail()):
            return with_values(function, operands)
        is_whole = float not in (kind, self._kind) and function is not operator.truediv
        return _computed(function, *operands, kind=int if is_whole else float)

    return method


def _unary(function: Any) -> Callable[[DeferredNumber], Any]:
    return lambda self: _computed(function, self, kind=self._kind)


def _needing(function: Any) -> Callable[..., Any]:
    return lambda self, *others: with_values(function, (self, *others))


def _comparing(function: Any) -> Callable[[DeferredNumber, Any], Any]:
    """Return a method that compares on the device: code branches on the truth value, which replays can compare."""

    def method(self: DeferredNumber, other: Any) -> Any:
        kind = other._kind if is_deferred(other) else type(other)
        is_exact = kind in _PLAIN and (is_deferred(other) or kind is float or abs(other) < _EXACT)
        if not is_exact:
            return function(*map(value_of, (self, other)))
        dtype = torch.float64 if float in (kind, self._kind) else torch.int64
        with torch.no_grad():
            own, given = on_device(self, dtype), other
            if is_deferred(other):
                given = _filled(other, dtype, own.device) if other.is_symbolic else on_device(other, dtype)
            return bool(function(own, given))

    return method


class DeferredArray(DeferredNumber):
    """The array of a whole tensor. Unlike a number it can be indexed. Any operation with it reads its values."""

    __slots__ = ()
    is_array = True

    __round__ = _needing(round)
    __len__, __iter__ = _needing(len), _needing(iter)
    __getitem__, __setitem__ = _needing(operator.getitem), _needing(operator.setitem)
    __contains__ = _needing(operator.contains)


def is_deferred(value: Any) -> TypeGuard[DeferredNumber]:
    """Return True if ``value`` is a deferred number or array, without reading ``__class__`` of other objects."""
    return issubclass(type(value), DeferredNumber)


def replaced_classes(*, copies: bool) -> tuple[type, ...]:
    """Return the classes that deferred numbers, deferred arrays and (``copies``) host copies stand for."""
    numpy: Any = sys.modules.get("numpy")
    arrays = (numpy.generic, numpy.ndarray) if hasattr(numpy, "ndarray") else ()
    return (int, float, complex, *arrays, *((Tensor,) if copies else ()))


for _function in _BINARY:
    _name = _function.__name__
    setattr(DeferredNumber, f"__{_name}__", _binary(_function, reflected=False))
    setattr(DeferredNumber, f"__r{_name}__", _binary(_function, reflected=True))
    setattr(DeferredArray, f"__{_name}__", _needing(_function))
    setattr(DeferredArray, f"__r{_name}__", _needing(lambda array, other, function=_function: function(other, array)))
COMPARISONS: tuple[Any, ...] = (
    operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
)  # fmt: skip
_NEEDING: tuple[Any, ...] = (
    int, float, complex, hash, str,
    repr, format, divmod, math.trunc, math.floor, math.ceil, operator.index, operator.matmul, operator.and_,
    operator.or_, operator.xor, operator.lshift, operator.rshift, operator.invert,
)  # fmt: skip
_UNARY: tuple[Any, ...] = (operator.neg, operator.pos, operator.abs)
for _class, _methods, _functions in (
    (DeferredNumber, _unary, _UNARY), (DeferredNumber, _comparing, COMPARISONS), (DeferredNumber, _needing, _NEEDING),
    (DeferredArray, _needing, (*_UNARY, *COMPARISONS, bool)),
):  # fmt: skip
    for _function in _functions:
        setattr(_class, f"__{_function.__name__.rstrip('_')}__", _methods(_function))
for _name in ("copy", "deepcopy"):
    setattr(DeferredNumber, f"__{_name}__", lambda self, *_: value_of(self))


def in_order(number: DeferredNumber) -> Iterable[DeferredNumber]:
    """Yield all that ``number`` is computed from, operands first, then itself. Sums may have thousands of terms."""
    done: set[int] = set()
    left = [number]
    while left:
        node = left[-1]
        waits = [o for o in node._operands if is_deferred(o) and id(o) not in done]
        if waits and id(node) not in done:
            left += waits
            continue
        left.pop()
        if id(node) not in done:
            done.add(id(node))
            yield node


def form_of(number: DeferredNumber, own: Any = None) -> tuple[NumberForm, list[Any]]:
    """Return how ``number`` is computed, and the tensors, or paths of owners' numbers, that are read for it. ``own`` is
    the previous object at its place, or None. Only as the leftmost operand, as in ``+=``, does it mean :data:`OWN`;
    elsewhere it is a constant that happens to be the same object.
    """
    begin = number
    while begin._operands and is_deferred(begin._operands[0]):
        begin = begin._operands[0]
    places: dict[int, _Made] = {}
    instructions: list[tuple[Any, tuple[Any, ...]]] = []
    read: list[Any] = []
    for node in in_order(number):
        if node._source is not None:
            read.append(node._source)
        operands = [places[id(o)] if is_deferred(o) else o for o in node._operands]
        if node is begin and own is not None and operands and operands[0] is own:
            operands[0] = OWN
        places[id(node)] = _Made(len(instructions))
        function = node._source if node.is_symbolic and node._source is not None else node._function
        instructions.append((function, tuple(operands)))
    return NumberForm(instructions), read


def value_of(number: Any, needs: str = "") -> Any:
    """Return the value of a deferred number, or any other object itself. ``needs`` says what needs the value."""
    return number._value(needs) if is_deferred(number) else number


def with_values(function: Callable[..., Any], operands: Iterable[Any]) -> Any:
    """Return ``function`` of the values of ``operands``, which are read."""
    needs = f"`{function.__name__.strip('_')}`"
    return function(*(value_of(operand, needs) for operand in operands))


@contextmanager
def instead(what: str) -> Iterator[None]:
    """Mark the operators that run within as replacements of reads: see :data:`REPLACED_READ`."""
    token = REPLACED_READ.set(what)
    try:
        yield
    finally:
        REPLACED_READ.reset(token)


def on_device(number: DeferredNumber, dtype: torch.dtype) -> Tensor:
    """Return a scalar tensor with the value of ``number``, computed in float64 or int64 on the device of its source
    tensors. If that would not give the same bits as on the host, the value is read instead.
    """
    made: dict[int, Tensor] = {}
    number._reader.computes |= not REPLACED_READ.get()
    with torch.no_grad():
        for node in in_order(number):
            if node.is_symbolic:
                continue
            if node._source is not None:
                made[id(node)] = node._source
                continue
            function, operands = _device_function(node)
            if function is None:
                return torch.tensor(value_of(number), dtype=dtype, device=next(iter(made.values())).device)
            wide = torch.int64 if node._kind is int else torch.float64
            device = next(made[id(o)].device for o in node._operands if id(o) in made)
            given = (made[id(o)].to(wide) if id(o) in made else _filled(o, wide, device) for o in operands)
            made[id(node)] = function(*given)
        return made[id(number)].to(dtype)


def may_be_on_device(number: DeferredNumber) -> bool:
    """Return True if :func:`on_device` need not read the value."""
    nodes = (node for node in in_order(number) if not node.is_symbolic and node._source is None)
    return all(_device_function(node)[0] is not None for node in nodes)


def _filled(number: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a scalar tensor with a number that is not read from the device; replays fill in an owner's number."""
    tensor: Tensor | None = number._reader.tensor_of(number, dtype, device) if is_deferred(number) else None
    return torch.full((), value_of(number), dtype=dtype, device=device) if tensor is None else tensor


def _device_function(node: DeferredNumber) -> tuple[Any, tuple[Any, ...]]:
    """Return the tensor function for the function of ``node``, or None, and its operands."""
    if node._function is operator.pow and node._kind is float:
        base, exponent = node._operands
        return {2: torch.square, 0.5: torch.sqrt}.get(exponent), (base,)
    if node._function in _DIVISIONS and is_deferred(node._operands[1]):
        # For a zero divisor Python raises an exception, but a device returns inf.
        return None, ()
    if node._function in _WHOLE_ON_DEVICE and _fits_int64(node):
        return _WHOLE_ON_DEVICE[node._function], node._operands
    return _ON_DEVICE.get(node._function), node._operands


def _fits_int64(number: DeferredNumber) -> bool:
    """Return True if an integer is made by nothing but sums and divisions of read integers with small constants."""
    functions = (operator.add, operator.sub, operator.neg, *_WHOLE_ON_DEVICE)
    for node in in_order(number):
        numbers = [operand for operand in node._operands if not is_deferred(operand)]
        is_sum = node._source is not None or (node._function in functions and len(numbers) == len(node._operands) - 1)
        if node.is_symbolic or not is_sum or node._kind is not int or any(abs(each) >= _SMALL for each in numbers):
            return False
    return bool(number._operands[1])
