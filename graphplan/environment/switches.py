"""torch's global switches. They are part of a program's key; guards compare them before a replay, checks after it.

A replay leaves the switches as the step leaves them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributions import Distribution

_C: Any = torch._C
_VALIDATES = "_validate_args"
_Get = Callable[[], Any]
count_of_modes: Callable[[], int] = _C._len_torch_function_stack
"""Return the number of active function modes. A default device is one."""


class Seen(Enum):
    """How a change of a switch is noticed before a replay. To read a switch takes 0.1 µs."""

    BY_GUARDS = "by a comparison of its own"
    BY_OTHERS = "by torch's GlobalStateGuard, or by the comparison of switches that change along with it"
    BY_USE = "by a comparison of its own where the step's code reads or sets it: no other recording depends on it"


class Switch(NamedTuple):
    """One of torch's global settings: its ``name`` in messages and in ``allow=``, and functions to read and set it.
    ``set`` is None if torch has no such function. ``uses`` are the names of the C functions by which code reads or
    sets it.
    """

    name: str
    get: _Get
    set: Callable[[Any], object] | None
    seen: Seen = Seen.BY_GUARDS
    uses: tuple[str, ...] = ()


MIXED = "mixed"
"""The value of an old switch if newer ones have values that it cannot express: torch raises an error then."""


def _or_mixed(get: _Get) -> Any:
    try:
        return get()
    except RuntimeError:
        return MIXED


def _of_torch(name: str, getter: str, setter: str, seen: Seen = Seen.BY_GUARDS) -> list[Switch]:
    """Return a switch of ``torch._C`` in a list; an empty list if this torch lacks it."""
    get = getattr(_C, getter, None)
    return [] if get is None else [Switch(name, get, getattr(_C, setter, None), seen, (getter, setter))]


def _of_library(name: str, getter: str = "", setter: str = "") -> list[Switch]:
    """Return a switch of ``torch.backends``. ``getter`` defaults to ``name``, ``setter`` to ``getter``."""
    getter = getter or name
    return _of_torch(f"torch.backends.{name}", f"_get_{getter}", f"_set_{setter or getter}")


def _autocast(device: str, alias: str) -> list[Switch]:
    enabled = partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)
    dtype = partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)
    uses = tuple(f"{verb}_autocast_{kind}dtype" for verb in ("get", "set") for kind in ("", f"{alias}_"))
    return [
        Switch(f"torch.is_autocast_enabled({device!r})", *enabled, Seen.BY_OTHERS),
        Switch(f"torch.get_autocast_dtype({device!r})", *dtype, Seen.BY_USE, uses),
    ]


def default_device() -> torch.device | None:
    """Return the default device; None if none was set."""
    return torch.get_default_device() if count_of_modes() else None


def _fp32() -> list[Switch]:
    """Return the newer switches of precision, those of whole libraries first."""
    get, put = getattr(_C, "_get_fp32_precision_getter", None), getattr(_C, "_set_fp32_precision_setter", None)
    if get is None or put is None:
        return []
    seen = dict.fromkeys([(library, "all") for library in ("generic", "cuda", "mkldnn")], Seen.BY_USE)
    seen |= dict.fromkeys([("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul")], Seen.BY_GUARDS)
    # The tape's replays run kernels under the current precision, as eager steps do.
    seen |= dict.fromkeys([("mkldnn", "conv"), ("mkldnn", "rnn")], Seen.BY_USE)
    names = "fp32_precision of {1} in torch.backends.{0}"
    uses = "_get_fp32_precision_getter", "_set_fp32_precision_setter"
    return [
        Switch(names.format(*place), partial(get, *place), partial(put, *place), by, uses) for place, by in seen.items()
    ]


def _precision(name: str, kind: str) -> Switch:
    """Return an old switch of precision. To set it changes newer switches, which guards compare."""
    get, seen = getattr(_C, f"_get_{kind}"), Seen.BY_OTHERS if _fp32() else Seen.BY_GUARDS
    return Switch(name, partial(_or_mixed, get), getattr(_C, f"_set_{kind}"), seen)


def _reduction(kind: str) -> Switch:
    full = f"allow_{kind}_reduced_precision_reduction"
    get, put = getattr(_C, f"_get_cublas_{full}"), getattr(_C, f"_set_cublas_{full}")
    name = f"torch.backends.cuda.matmul.{full}"
    # The value is a pair in torch versions that have a second setting.
    return Switch(name, get, lambda value: put(*(value if type(value) is tuple else (value,))), Seen.BY_OTHERS)


# fmt: off
SWITCHES: tuple[Switch, ...] = (
    Switch("torch.is_grad_enabled()", torch.is_grad_enabled, _C._set_grad_enabled, Seen.BY_OTHERS),
    Switch("torch.is_inference_mode_enabled()", torch.is_inference_mode_enabled, None),
    Switch("torch.is_anomaly_enabled()", torch.is_anomaly_enabled,
           lambda value: torch.set_anomaly_enabled(value, torch.is_anomaly_check_nan_enabled())),
    Switch("torch.is_anomaly_check_nan_enabled()", torch.is_anomaly_check_nan_enabled,
           lambda value: torch.set_anomaly_enabled(torch.is_anomaly_enabled(), value), Seen.BY_USE,
           ("is_anomaly_check_nan_enabled", "set_anomaly_enabled")),
    *_of_torch("torch.autograd.set_multithreading_enabled", "_is_multithreading_enabled", "_set_multithreading_enabled",
               Seen.BY_USE),
    Switch("torch.autograd.graph.saved_tensors_hooks", partial(_C._autograd._top_saved_tensors_default_hooks, False),
           None),
    *_autocast("cuda", "gpu"),
    *_autocast("cpu", "cpu"),
    Switch("torch.is_autocast_cache_enabled()", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled,
           Seen.BY_OTHERS),
    Switch("torch.get_default_dtype()", torch.get_default_dtype, torch.set_default_dtype, Seen.BY_OTHERS),
    Switch("torch.get_default_device()", default_device, torch.set_default_device, Seen.BY_OTHERS),
    Switch("torch.are_deterministic_algorithms_enabled()", _C._get_deterministic_algorithms,
           lambda value: torch.use_deterministic_algorithms(
               value, warn_only=_C._get_deterministic_algorithms_warn_only()), Seen.BY_OTHERS),
    Switch("torch.is_deterministic_algorithms_warn_only_enabled()", _C._get_deterministic_algorithms_warn_only,
           lambda value: _C._set_deterministic_algorithms(_C._get_deterministic_algorithms(), warn_only=value),
           Seen.BY_OTHERS),
    *_of_torch("torch.utils.deterministic.fill_uninitialized_memory", "_get_deterministic_fill_uninitialized_memory",
               "_set_deterministic_fill_uninitialized_memory", Seen.BY_USE),
    *_of_torch("torch function", "_is_torch_function_enabled", "", Seen.BY_OTHERS),
    Switch("torch.distributions.Distribution.set_default_validate_args", partial(getattr, Distribution, _VALIDATES),
           partial(setattr, Distribution, _VALIDATES)),
    # Setting an old switch of precision also sets newer ones, so these follow. Setting a whole library also sets its
    # parts.
    _precision("torch.backends.cuda.matmul.allow_tf32", "cublas_allow_tf32"),
    _precision("torch.get_float32_matmul_precision()", "float32_matmul_precision"),
    _precision("torch.backends.cudnn.allow_tf32", "cudnn_allow_tf32"),
    *_fp32(),
    _reduction("fp16"),
    _reduction("bf16"),
    *_of_library("cuda.matmul.allow_fp16_accumulation", "cublas_allow_fp16_accumulation"),
    *_of_library("cudnn_enabled"),
    *_of_library("cudnn_benchmark"),
    *_of_library("cudnn_deterministic"),
    *_of_library("mkldnn_enabled"),
    *_of_library("math_sdp_allow_fp16_bf16_reduction"),
    *_of_library("cuda.enable_flash_sdp", "flash_sdp_enabled", "sdp_use_flash"),
    *_of_library("cuda.enable_mem_efficient_sdp", "mem_efficient_sdp_enabled", "sdp_use_mem_efficient"),
    *_of_library("cuda.enable_math_sdp", "math_sdp_enabled", "sdp_use_math"),
    *_of_library("cuda.enable_cudnn_sdp", "cudnn_sdp_enabled", "sdp_use_cudnn"),
    *_of_library("cuda.enable_fa3_sdp", "fa3_sdp_enabled", "sdp_use_fa3"),
    *_of_library("cuda.enable_overrideable_sdp", "overrideable_sdp_enabled", "sdp_use_overrideable"),
    *_of_library("cuda.preferred_blas_library", "blas_preferred_backend"),
    *_of_library("cuda.preferred_linalg_library", "linalg_preferred_backend"),
    *_of_torch("the order of attention kernels", "_get_sdp_priority_order", "_set_sdp_priority_order"),
    *_of_torch("torch.backends.nnpack", "_get_nnpack_enabled", "_set_nnpack_enabled", Seen.BY_USE),
)
# fmt: on
"""The global switches of torch that graphplan knows, in an order in which they can be set."""
NAMES = tuple(switch.name for switch in SWITCHES)
COMPARED: list[_Get] = [switch.get for switch in SWITCHES if switch.seen is Seen.BY_GUARDS]
"""Getters that all guards call."""
USED: dict[str, list[Switch]] = {}
"""Switches that only some steps read or set, by the names of the C functions that do so."""
for _switch in SWITCHES:
    for _name in _switch.uses if _switch.seen is Seen.BY_USE else ():
        USED.setdefault(_name, []).append(_switch)
_ALL: list[_Get] = [switch.get for switch in SWITCHES]
_call: Callable[[_Get], Any] = getattr(operator, "call", lambda function: function())


def answers(functions: Sequence[_Get]) -> list[Any]:
    """Return the results of ``functions``."""
    return list(map(_call, functions))


def read_all() -> list[Any]:
    """Return the values of all switches."""
    return answers(_ALL)


def set_all(values: Sequence[Any]) -> None:
    """Set the switches whose values differ, if torch has a function for that."""
    for switch, value in zip(SWITCHES, values, strict=True):
        if switch.set is not None and value != MIXED and switch.get() != value:
            switch.set(value)


def set_some(values: Mapping[str, Any]) -> None:
    """Set switches by name. Restore all others, including those that change along with them."""
    set_all([values.get(name, value) for name, value in zip(NAMES, read_all(), strict=True)])


@contextmanager
def switched(values: Mapping[str, Any]) -> Iterator[None]:
    """Set switches to ``values`` for the block, then restore all switches."""
    before = read_all()
    try:
        set_some(values)
        yield
    finally:
        set_all(before)
