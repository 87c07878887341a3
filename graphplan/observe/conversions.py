"""Replace methods and functions that read tensors unseen by dispatch modes, while a step is watched.

To make a tensor of a list, torch turns its modes off and calls ``t.__float__()`` of each tensor in it; a profile
function does not see these calls either. ``one_hot`` reads classes only to check their range. ``Tensor.item``, ``cpu``,
``to`` and ``float(tensor)`` may return deferred numbers and copies; ``torch.tensor``, slices, :mod:`math`, ``float``
and ``int`` accept these.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from threading import get_ident, local
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from graphplan.observe import number_calls
from graphplan.observe.replacements import Replacements
from graphplan.observe.watching import is_silent
from graphplan.tensors.attributes import PLAIN_KINDS
from graphplan.tensors.deferred import HostCopy, is_deferred, value_of
from graphplan.tensors.deferred_slices import put_slice
from graphplan.tensors.storages import storage_id

_IN_PYTHON = ("tolist", "numpy", "apply_", "map_", "map2_")
"""Methods that pass a tensor's values to Python; the last three pass each element to a function."""
READERS = {name: f"Tensor.{name}" for name in _IN_PYTHON}
READERS |= dict.fromkeys(("_to_dlpack", "_to_dlpack_versioned"), "Tensor.__dlpack__")
"""C functions that read a tensor's memory and that a profile function sees, with the method that calls each."""
_NUMBERS = ("__float__", "__index__", "__int__", "__bool__", "__complex__")
_OF_NUMBERS = (
    "acos", "asin", "atan", "atan2", "ceil", "copysign", "cos", "cosh", "exp", "exp2", "expm1", "fabs", "floor", "fmod",
    "hypot", "isclose", "isfinite", "isinf", "isnan", "log", "log10", "log1p", "log2", "pow", "sin", "sinh", "sqrt",
    "tan", "tanh", "trunc",
)  # fmt: skip
"""Functions of :mod:`math` that can be computed again for other numbers."""
_OF_LIST = "torch.tensor, as_tensor, new_tensor or a similar call with a list of tensors (torch.stack does not)"


@dataclass(eq=False)
class Conversions:
    """A context manager that calls these functions for reads in the thread that entered it. If several are nested, the
    innermost one with the function is used. ``on_read(what, tensor)`` is called for each unseen read, with None if the
    tensor is unknown. The others return a result: ``on_item`` of ``item()``, ``on_copy`` of a copy to host memory,
    ``on_list`` of ``torch.tensor`` of scalar tensors, ``on_bool`` of ``bool(tensor)``, read in place of the values
    that it is computed from, ``on_int`` of ``int(tensor)``. Where the type allows None, that means torch's result.
    """

    on_read: Callable[[str, Tensor | None], None] | None = None
    on_item: Callable[[Tensor], Any] | None = None
    on_copy: Callable[[Tensor], Tensor | None] | None = None
    on_list: Callable[[Sequence[Tensor]], Tensor | None] | None = None
    on_bool: Callable[[Tensor], bool] | None = None
    on_int: Callable[[Tensor], Any] | None = None
    _thread = 0

    def __enter__(self) -> Conversions:
        self._thread = get_ident()
        _READS.enter(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _READS.leave(self)

    @classmethod
    def _innermost(cls, function: str) -> Any:
        """Return ``function`` of the innermost context of this thread that has it; None if there is none."""
        own = (getattr(watch, function) for watch in reversed(_READS.entered) if watch._thread == get_ident())
        return next(filter(None, own), None)

    @classmethod
    def report_read(cls, what: str, tensor: Tensor | None = None) -> None:
        """Report a read to the watcher of this thread."""
        on_read = cls._innermost("on_read")
        if on_read is not None:
            on_read(what, tensor)

    @classmethod
    def copy_of(cls, tensor: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return this thread's deferred copy for ``tensor.to(*args, **kwargs)``; None if torch is to copy it."""
        on_copy = cls._innermost("on_copy")
        return on_copy(tensor) if on_copy is not None and _is_to_host(tensor, args, kwargs) else None

    @classmethod
    def truth_of(cls, tensor: Tensor) -> bool | None:
        """Return this thread's answer to ``bool(tensor)`` of a number; None if torch is to answer."""
        is_number = type(tensor) in PLAIN_KINDS and tensor.numel() == 1 and tensor.dtype is not torch.bool
        on_bool = cls._innermost("on_bool") if is_number else None
        return None if on_bool is None else on_bool(tensor.detach() != 0)

    @classmethod
    def equality_of(cls, first: Any, second: Any) -> bool | None:
        """Return this thread's answer to ``torch.equal(first, second)``; None if torch is to answer."""
        on_bool = cls._innermost("on_bool")
        if on_bool is None or not all(type(each) in PLAIN_KINDS for each in (first, second)):
            return None
        facts = [(each.shape, each.dtype, each.device, each.layout) for each in (first, second)]
        # If both share a storage, torch may not need to read values.
        is_other = facts[0] == facts[1] and storage_id(first) != storage_id(second)
        may_compare = is_other and first.layout is torch.strided
        return on_bool((first.detach() == second.detach()).all()) if may_compare else None

    @classmethod
    def stack_of(cls, numbers: Sequence[Any]) -> Tensor | None:
        """Return this thread's tensor for ``torch.tensor(numbers)``; None if torch is to read the values."""
        are_scalars = bool(numbers) and all(type(each) is Tensor and not each.dim() for each in numbers)
        on_list = cls._innermost("on_list") if are_scalars else None
        return None if on_list is None else on_list(numbers)


def _is_to_host(tensor: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if ``tensor.to(*args, **kwargs)`` only copies to the host."""
    if not args and not kwargs:
        return True
    if type(tensor) is HostCopy and len(args) + len(kwargs) > 1:
        # The arguments may ask for another copy.
        return False
    try:
        others = {name: value for name, value in kwargs.items() if name != "copy"}
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **others)
    except (TypeError, RuntimeError):
        return False
    is_alike = dtype in (None, tensor.dtype) and layout in (None, torch.preserve_format)
    return is_alike and device is not None and device.type == "cpu"


def _number(name: str) -> Callable[..., Any]:
    convert = getattr(torch._C.TensorBase, name)

    @wraps(convert)
    def converting(self: Tensor) -> Any:
        # If dispatch modes are active, they see the operator.
        if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
            Conversions.report_read(_OF_LIST)
        elif name == "__bool__" and (truth := Conversions.truth_of(self)) is not None:
            return truth
        return convert(self)

    return converting


def _reader(name: str, home: Any) -> Callable[..., Any]:
    read = getattr(home, name)

    @wraps(read)
    def reading(tensor: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        if not is_silent(sys._getframe(1).f_code):
            Conversions.report_read(READERS[name], tensor)
        return read(tensor, *args, **kwargs)

    return reading


def _comparing(home: Any) -> Callable[..., bool]:
    compare = home.equal

    @wraps(compare)
    def equal(*args: Any, **kwargs: Any) -> bool:
        is_ours = len(args) != 2 or bool(kwargs) or is_silent(sys._getframe(1).f_code)
        truth = None if is_ours else Conversions.equality_of(*args)
        return bool(compare(*args, **kwargs)) if truth is None else truth

    return equal


@wraps(torch._C.TensorBase.item)
def _item(self: Tensor) -> Any:
    return (Conversions._innermost("on_item") or torch._C.TensorBase.item)(self)


@wraps(torch._C.TensorBase.__setitem__)
def _put(self: Tensor, index: Any, value: Any) -> None:
    if not put_slice(self, index, value):
        torch._C.TensorBase.__setitem__(self, index, value)


def _copier(name: str) -> Callable[..., Any]:
    plain = getattr(torch._C.TensorBase, name)

    @wraps(plain)
    def copying(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = Conversions.copy_of(self, args, kwargs) if args or kwargs or name == "cpu" else None
        return plain(self, *args, **kwargs) if copy is None else copy

    return copying


def _making(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(make)
    def making(*args: Any, **kwargs: Any) -> Tensor:
        if not args or not (is_deferred(args[0]) or type(args[0]) in (list, tuple)):
            return make(*args, **kwargs)
        first, *rest = args
        made = None if rest or not kwargs.keys() <= {"dtype", "device"} else _made_of(make, first, kwargs)
        if made is None and type(first) is list and not (rest or kwargs):
            made = Conversions.stack_of(first)
        return make(value_of(first), *rest, **kwargs) if made is None else made

    return making


def _made_of(make: Callable[..., Tensor], data: Any, options: Mapping[str, Any]) -> Tensor | None:
    """Return the tensor that ``make`` gives for a stand-in or a list with stand-ins; None if it needs their values."""
    is_list = type(data) in (list, tuple)
    numbers = data if is_list else [data]
    waiting = {place: number for place, number in enumerate(numbers) if is_deferred(number)}
    are_numbers = all(type(each) in (bool, int, float) for each in numbers if not is_deferred(each))
    if not (waiting and are_numbers) or any(number.is_array for number in waiting.values()):
        return None
    known = [number._kind() if is_deferred(number) else number for number in numbers]
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        dtype = make(known if is_list else known[0], dtype=options.get("dtype"), device="cpu").dtype
    device = torch.get_default_device() if options.get("device") is None else torch.device(options["device"])
    given = {place: each._reader.tensor_of(each, dtype, device) for place, each in waiting.items()}
    if any(tensor is None for tensor in given.values()):
        return None
    if not is_list:
        return given[0].clone()
    # Use torch.full for Python numbers: torch.tensor would copy from the host.
    parts = [given[at] if at in given else torch.full((), n, dtype=dtype, device=device) for at, n in enumerate(known)]
    return torch.stack(parts)


_AS_COMPARED: dict[str, Callable[[Any], bool]] = {
    "isnan": lambda number: number != number, "isinf": lambda number: abs(number) == math.inf,
    "isfinite": lambda number: abs(number) < math.inf,
}  # fmt: skip
"""These predicates as comparisons, which can be computed on the device."""
_WHOLE = ("ceil", "floor", "trunc")


def _computing(function: Callable[..., Any]) -> Callable[..., Any]:
    compared = _AS_COMPARED.get(function.__name__)

    @wraps(function)
    def computing(*args: Any, **kwargs: Any) -> Any:
        waiting = () if kwargs else [each for each in args if is_deferred(each) and not each.is_array]
        for number in waiting:
            if number.is_symbolic:
                return number.apply(function, args)
        if not waiting:
            return function(*args, **kwargs)
        if compared is not None:
            return compared(*args)
        number = waiting[0]
        are_numbers = all(is_deferred(each) or type(each) in (bool, int, float) for each in args)
        if function is math.isclose or not are_numbers or not number._reader.may_fail():
            return function(*args)
        return number._computed(function, args, int if function.__name__ in _WHOLE else float)

    return computing


def _converted(kind: type, value: Any) -> Any:
    """Return a stand-in for ``kind(value)``; None if there is none."""
    if is_deferred(value) and not value.is_array:
        if value.is_symbolic:
            return value.apply(kind, (value,))
        # A product can be computed on the device.
        number: Any = value
        return (number if number._kind is float else number * 1.0) if kind is float else None
    if type(value) not in PLAIN_KINDS or value.numel() != 1 or value.is_complex():
        return None
    if kind is int:
        on_int = None if value.is_floating_point() else Conversions._innermost("on_int")
        return None if on_int is None else on_int(value)
    on_item = Conversions._innermost("on_item")
    number = None if on_item is None else on_item(value)
    return _converted(kind, number) if is_deferred(number) else number


class _Here(local):
    """Per thread: storages passed to scripted code, innermost call last; and the depth of validating functions."""

    def __init__(self) -> None:
        self.given: list[set[int | None]] = []
        self.validating = 0


_HERE = _Here()


def given_to_script() -> set[int | None] | None:
    """Return the storages of the tensors passed to the scripted code that this thread runs; None if it runs none."""
    return _HERE.given[-1] if _HERE.given else None


def _calling(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def calling(script: Any, /, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        _HERE.given.append({storage_id(leaf) for leaf in leaves if isinstance(leaf, Tensor)})
        try:
            return call(script, *args, **kwargs)
        finally:
            _HERE.given.pop()

    return calling


def validates() -> bool:
    """Return True while this thread is within a function that reads values only to check their range."""
    return _HERE.validating > 0


def _validating(one_hot: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(one_hot)
    def validating(*args: Any, **kwargs: Any) -> Any:
        told = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        # A tensor as `num_classes` is read like any other tensor.
        is_told = not isinstance(told, Tensor) and bool(told != -1)
        _HERE.validating += is_told
        try:
            return one_hot(*args, **kwargs)
        finally:
            _HERE.validating -= is_told

    return validating


_METHODS = {name: _number(name) for name in _NUMBERS}
_METHODS |= {name: _reader(name, torch._C.TensorBase) for name in _IN_PYTHON} | {"item": _item, "__setitem__": _put}
_METHODS |= {name: _copier(name) for name in ("cpu", "to")} | {"equal": _comparing(torch._C.TensorBase)}


def _find_readers() -> list[tuple[Any, str, Any]]:
    functional = torch.nn.functional
    return [
        # Keep a method that the user has set on Tensor: it reads at once.
        *((Tensor, name, method) for name, method in _METHODS.items() if name not in vars(Tensor)),
        *((torch._C, name, _reader(name, torch._C)) for name in READERS if hasattr(torch._C, name)),
        *((torch, make.__name__, _making(make)) for make in (torch.tensor, torch.as_tensor)),
        (torch, "equal", _comparing(torch)),
        *number_calls.replacements(_converted),
        (functional, "one_hot", _validating(functional.one_hot)),
        *((math, name, _computing(getattr(math, name))) for name in _OF_NUMBERS if hasattr(math, name)),
        *((kind, "__call__", _calling(kind.__call__)) for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod)),
    ]


_READS = Replacements(_find_readers)
