"""Fast answers to "is it as it was?", from the guards of torch's own compiler, where this torch has them.

Each of them is exact in one direction: True means that nothing changed. False means that something may have, and the
caller looks closely.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from graphplan.dtensors import is_sharded
from graphplan.marks import has_memory
from graphplan.native.comparing import Row
from graphplan.surroundings import COUNTS, LEVEL, surroundings

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


_own_hooks = 0


def hooks_registered() -> int:
    """How many hooks were registered through torch so far: without a new one, nobody got a hook."""
    return RemovableHandle.next_id - _own_hooks


def register_own(register: Callable[[Any], Any], hook: Any) -> Any:
    """Register a hook of graphplan's own, gone before the next step, which :func:`hooks_registered` leaves out."""
    global _own_hooks
    before = RemovableHandle.next_id
    handle = register(hook)
    _own_hooks += RemovableHandle.next_id - before
    return handle


def accumulator_hooks(param: torch.Tensor) -> list[weakref.ref[dict[int, Any]]]:
    """Hooks on the node that accumulates ``param``'s gradient: they last while somebody keeps that node."""
    if not param.requires_grad or not param.is_leaf or is_sharded(param) or not has_memory(param):
        return []
    if param.is_inference():
        return []
    # A dispatch mode of the caller's watches the step, and this is no part of it.
    with torch.inference_mode(False), torch.enable_grad(), torch._C._DisableTorchDispatch():
        node: Any = param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    found = []
    for register in (node.register_hook, node.register_prehook):
        # A node shows its hooks to those alone that register one.
        handle = register_own(register, _no_hook)
        handle.remove()
        if handle.hooks_dict_ref():
            found.append(handle.hooks_dict_ref)
    return found


def _no_hook(*args: Any) -> None:
    """Changes nothing."""


class Modes:
    """torch's global modes and settings: those that its guard knows are read again only when one of them changed."""

    def __init__(self) -> None:
        self._state: Any = None
        self._settings: list[Any] = []
        self._device: Any = None
        self._known: tuple[Any, ...] = ()

    def unchanged(self) -> bool:
        """Whether all are what :meth:`now` said last."""
        return (
            self._state is not None
            and _all_settings() == self._settings
            and self._state.check()
            and _default_device() == self._device
        )

    def rows(self) -> list[Row] | None:
        """Comparisons that hold while all are what :meth:`now` said last; None if this torch has none."""
        if self._state is None:
            return None
        asked = [(_default_device, self._device) if self._device is not None else (_count_of_modes, 0)]
        # Modes that change nothing may be active.
        bare = self._device is None and all(function() == none for function, none in COUNTS)
        asked += COUNTS if bare else [(surroundings, None)]
        functions = [self._state.check, *(function for function, _ in asked), *_SETTINGS]
        space, name, outside = LEVEL
        return [
            ("same_results", functions, [True, *(answer for _, answer in asked), *self._settings]),
            ("same_values", [space], [name], [outside]),
        ]

    def now(self) -> tuple[Any, ...]:
        """Gradient and inference mode, autocast by device, the default dtype, and which kernels torch may choose."""
        if not self.unchanged():
            self._settings = _all_settings()
            self._device = _default_device()
            known = (*_read_modes(), self._device, *self._settings)
            self._known = known if known != self._known else self._known
            self._state = _guards.GlobalStateGuard() if hasattr(_guards, "GlobalStateGuard") else None
        return self._known


def _read_modes() -> tuple[Any, ...]:
    cuda = torch.is_autocast_enabled("cuda")
    cpu = torch.is_autocast_enabled("cpu")
    return (
        torch.is_grad_enabled(),
        torch.get_autocast_dtype("cuda") if cuda else None,
        torch.get_autocast_dtype("cpu") if cpu else None,
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        *[setting() for setting in _GUARDED],
    )


def _settings_of(*names: str) -> list[Callable[[], Any]]:
    """Those of torch's getters that this torch has."""
    return [getattr(torch._C, name) for name in names if hasattr(torch._C, name)]


_count_of_modes = torch._C._len_torch_function_stack


def _default_device() -> Any:
    # A default device is a mode on this stack.
    return torch.get_default_device() if _count_of_modes() else None


def _saved_tensor_hooks() -> list[Callable[[], Any]]:
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return [] if top is None else [partial(top, False)]


def _precisions() -> list[Callable[[], Any]]:
    """How exact matrix products and convolutions are, for each library that has a say in it."""
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    places = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"))
    return [] if getter is None else [partial(getter, *place) for place in places]


_SETTINGS: list[Callable[[], Any]] = [
    torch.is_inference_mode_enabled,
    torch.is_anomaly_enabled,
    *_saved_tensor_hooks(),
    *_settings_of("_get_cudnn_enabled", "_get_cudnn_benchmark", "_get_cudnn_deterministic", "_get_mkldnn_enabled"),
    *_settings_of("_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled"),
    *_settings_of("_get_cudnn_sdp_enabled", "_get_math_sdp_allow_fp16_bf16_reduction", "_get_cudnn_allow_tf32"),
    *_settings_of("_get_blas_preferred_backend", "_get_linalg_preferred_backend"),
    *_precisions(),
    # Whether distributions look at their arguments.
    partial(getattr, torch.distributions.Distribution, "_validate_args"),
]
"""Settings that torch's own guard leaves out. With that, all of torch's global switches that are guarded."""
_call: Callable[[Callable[[], Any]], Any] = getattr(operator, "call", lambda function: function())


def _all_settings() -> list[Any]:
    return list(map(_call, _SETTINGS))


_GUARDED = _settings_of(
    "_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only", "_get_cublas_allow_tf32",
    "_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_is_torch_function_enabled",
)  # fmt: skip
