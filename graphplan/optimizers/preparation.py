"""Make optimizers capturable.

On CUDA an optimizer is capturable when its step counter and learning rate are on the device (``capturable=True``, or
``fused=True`` for SGD). On the CPU torch has no such flag, but the fused kernels read both from tensors. A gradient
scaler needs fused kernels on CUDA too: only they can skip a step. Changes are reported and stripped from
``state_dict``, so that checkpoints equal those of the unprepared optimizer. A graphed step sets the flags only while
its Python code runs: callbacks between two steps see the user's flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from graphplan.compare.fast_compare import register_own
from graphplan.errors import Faults, OptimizerError
from graphplan.tensors.dtensors import is_sharded
from graphplan.tensors.storages import overlaps, span

_REFUSED = {
    "LBFGS": "it evaluates its closure a data-dependent number of times; use Adam or SGD, or step it eagerly",
    "SparseAdam": "its update has the shape of the sparse gradient's indices; use dense embeddings with AdamW",
}
_FUSED_ON_CPU = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_FUSED_ON_CPU_IN_HALF = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
"""Without SGD: torch's fused SGD does not update most of a half-precision CPU parameter (pytorch/pytorch#191763)."""
_FUSED_ON_CUDA = (torch.optim.SGD,)
_FUSED_IF_SHARDED = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose fused kernels take DTensors."""
_FUSED_IF_WANTED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_Place = tuple[int, str]
"""The index of a parameter group, and a key in it."""
_WARNED = "_warned_capturable_if_run_uncaptured"
_HOOKS = (
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
    "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_post_hooks",
)  # fmt: skip
"""Attributes that ``Optimizer.__init__`` sets and that hold the hooks which keep an optimizer capturable."""


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise OptimizerError, with a remedy, for an optimizer that no preparation can make capturable."""
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.optim") and kind.__name__ in _REFUSED:
            raise OptimizerError(
                f"{type(optimizer).__name__} cannot be captured: {_REFUSED[kind.__name__]}", component="optimizer"
            )
    if not all(hasattr(optimizer, name) for name in _HOOKS):
        raise OptimizerError(
            f"{type(optimizer).__name__} cannot be captured: it did not call torch.optim.Optimizer.__init__ (as is "
            "usual for wrappers of another optimizer), so its step and its state_dict have no hooks. Use the wrapped "
            "optimizer, or step it eagerly, outside the step (in a Trainer, graphplan does this)",
            component="optimizer",
        )


def may_be_captured(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if torch allows the optimizer to step in a capture without preparation."""
    groups = optimizer.param_groups
    return all(group.get("capturable", True) or device_of(group).type != "cuda" for group in groups)


def device_of(group: Mapping[str, Any]) -> torch.device:
    """Return the device of a group's parameters; the CPU for an empty group."""
    params = group["params"]
    return params[0].device if params else torch.device("cpu")


def _wanted_flags(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], *, fused: bool) -> dict[str, Any]:
    """Return flags that make the group's update read step, learning rate and (``fused``) ``found_inf`` from tensors."""
    plain = all(p.is_floating_point() and not p.is_complex() for p in group["params"])
    if not plain or group.get("differentiable") or not group["params"]:
        return {}
    device = device_of(group).type
    on_cuda = _FUSED_IF_WANTED if fused else _FUSED_ON_CUDA
    exact = all(p.dtype in (torch.float32, torch.float64) for p in group["params"])
    on_cpu = _FUSED_ON_CPU if exact else _FUSED_ON_CPU_IN_HALF
    fusable: tuple[type, ...] = on_cpu if device == "cpu" else on_cuda if device == "cuda" else ()
    if any(map(is_sharded, group["params"])):
        fusable = tuple(kind for kind in fusable if kind in _FUSED_IF_SHARDED)
    flags: dict[str, Any] = {}
    if device == "cuda" and "capturable" in group:
        flags["capturable"] = True
    if isinstance(optimizer, fusable) and "fused" in group:
        flags |= {"fused": True, "foreach": False}
    return flags


def _is_in_order(param: Tensor, state: Mapping[str, Any]) -> bool:
    """Return True if parameter, gradient and state have equal strides without gaps: fused CPU kernels require that."""
    shape = param.shape
    held = (param, param.grad, *state.values())
    tensors = [value for value in held if isinstance(value, Tensor) and value.shape == shape]
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    strides = {tuple(step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1) for t in tensors}
    stride = param.stride()
    return len(strides) == 1 and span(shape, stride) == param.numel() and not overlaps(shape, stride)


def around_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], before: Callable[[], None], after: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return arguments for ``step`` whose closure runs between ``before()`` and ``after()``; None without a closure."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None

    def wrapped() -> Any:
        before()
        loss = closure()
        after()
        return loss

    return (args, {**kwargs, "closure": wrapped}) if "closure" in kwargs else ((args[0], wrapped, *args[2:]), kwargs)


class Preparation:
    """Flags set on one optimizer, and the hooks that keep them out of its checkpoints.

    The constructor sets the flags, :meth:`leave` removes them and :meth:`enter` sets them again. ``fused`` asks for
    fused kernels on CUDA too, for a gradient scaler or for their speed. If other code steps the optimizer (``steps`` is
    false), its counters are not moved until it is stepped here.

    Attributes:
        changes: the changes, one line per flag, also for groups that are added later; a list may be given.
        counted: integers in parameter groups that the optimizer's own step changes. A hyper-parameter, which the step's
            code may also set, counts only if the optimizer's step began with the value that the last one had left.
        stepped_newcomers: whether stock kernels stepped a group because some of its parameters were never stepped.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        fused: bool = False,
        steps: bool = True,
        changes: list[str] | None = None,
    ) -> None:
        check_optimizer(optimizer)
        self.optimizer = optimizer
        self._fused = fused
        self._steps = steps
        self.changes = [] if changes is None else changes
        self.counted: set[_Place] = set()
        self._counts: dict[_Place, int] = {}
        self._left: dict[_Place, int] = {}
        self._originals: dict[int, dict[str, Any]] = {}
        self._entered = False
        self._unfit: set[int] = set()
        self._contiguous: set[int] = set()
        self.stepped_newcomers = False
        self.faults = Faults()
        self._had_warned = vars(optimizer).get(_WARNED)
        try:
            self.enter()
        except Exception:
            with suppress(Exception):
                self.leave()
            raise
        self._handles = [
            optimizer.register_state_dict_post_hook(self._strip),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]

    def enter(self) -> None:
        """Set the flags on every group, and move step counters to their parameters' device."""
        if not self._entered:
            self._originals = {}
            self._counts = {}
            self.stepped_newcomers = False
            self._before = register_own(self.optimizer.register_step_pre_hook, self._before_step)
        self._entered = True
        for index, group in enumerate(self.optimizer.param_groups):
            original = self._originals.setdefault(index, {})
            flags = {} if index in self._unfit else _wanted_flags(self.optimizer, group, fused=self._fused)
            for key, value in flags.items():
                if bool(group.get(key)) != value:
                    original[key] = group.get(key)
                    group[key] = value
                    place = f"{type(self.optimizer).__name__}.param_groups[{index}]['{key}']"
                    text = f"{place}: {original[key]!r} -> {value!r}"
                    if text not in self.changes and (key != "foreach" or original[key]):
                        self.changes.append(text)
            self._move_scalars(group)
        if self._originals:
            # Suppress torch's warning about a capturable optimizer outside a capture: warm-up steps intend that.
            vars(self.optimizer)[_WARNED] = True

    def leave(self) -> None:
        """Restore the flags. Step counters stay on the device: recorded work reads them there."""
        if self._entered:
            self._entered = False
            self._before.remove()
            self._note_counts()
            for index, group in enumerate(self.optimizer.param_groups):
                group.update(self._originals.get(index, {}))

    def _note_counts(self) -> None:
        """Note which integers have changed since the optimizer's step began."""
        now = _integers(self.optimizer)
        changed = {place: value for place, value in self._counts.items() if now.get(place, value) != value}
        hypers = self.optimizer.defaults
        self.counted |= {p for p, value in changed.items() if p[1] not in hypers or self._left.get(p) == value}
        self._left = now if self._counts else self._left

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the flags on loaded groups and move their counters."""
        self._contiguous.clear()
        entered = self._entered
        self.enter()
        if not entered:
            self.leave()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check the gradients when they exist: after the closure, if there is one."""
        with self.faults.noting():
            self._counts = self._counts or _integers(self.optimizer)
            if self._entered and not self._steps:
                self._steps = True
                self.enter()
        changed = around_closure(args, kwargs, lambda: None, self._check_gradients)
        if changed is None:
            self._check_gradients()
        return changed

    def _check_gradients(self) -> None:
        """Restore a group's flags if only stock kernels can step it: permanently for sparse gradients and for memory
        layouts that fused kernels cannot traverse in one order; for one step if some parameters are newly unfrozen.
        """
        with self.faults.noting():
            for index, group in enumerate(self.optimizer.param_groups if self._entered else ()):
                stepped = [param for param in group["params"] if param.grad is not None]
                is_unfit = any(param.grad.layout is not torch.strided for param in stepped)
                if not is_unfit and group.get("fused"):
                    is_unfit = not all(map(self._stays_in_order, stepped))
                if is_unfit:
                    self._unfit.add(index)
                has_newcomers = not is_unfit and self._has_newcomers(group, stepped)
                self.stepped_newcomers |= has_newcomers
                if is_unfit or has_newcomers:
                    group.update(self._originals.get(index, {}))

    def _stays_in_order(self, param: Tensor) -> bool:
        """See :func:`_is_in_order`. State that was contiguous stays so until a state dict is loaded."""
        grad = param.grad
        if id(param) in self._contiguous and param.is_contiguous() and (grad is None or grad.is_contiguous()):
            return True
        state = self.optimizer.state.get(param, {})
        if not _is_in_order(param, state):
            return False
        if state and param.is_contiguous():
            self._contiguous.add(id(param))
        return True

    def _has_newcomers(self, group: Mapping[str, Any], stepped: Sequence[Any]) -> bool:
        """Return True if only some parameters have a momentum, others being newly unfrozen: torch's fused SGD fails."""
        if not isinstance(self.optimizer, torch.optim.SGD) or not group["momentum"]:
            return False
        have = {self.optimizer.state.get(param, {}).get("momentum_buffer") is not None for param in stepped}
        return len(have) > 1

    def _move_scalars(self, group: Mapping[str, Any]) -> None:
        on_device = self._steps and (group.get("capturable") or group.get("fused"))
        for param in group["params"] if on_device else ():
            state = self.optimizer.state.get(param, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim == 0 and value.device != param.device:
                    with torch.inference_mode(False):  # Later steps could not write to an inference tensor.
                        state[key] = value.to(param.device)

    def _strip(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        for index, group in enumerate(state_dict["param_groups"]):
            if self._entered:
                group.update(self._originals.get(index, {}))
            if self._keeps_on_host(index, group):
                for number in group["params"]:
                    if number in state_dict["state"]:
                        state_dict["state"][number] = _scalars_to_host(state_dict["state"][number])
        return state_dict

    def _keeps_on_host(self, index: int, group: Mapping[str, Any]) -> bool:
        """Return True if the unprepared optimizer keeps this group's counters on the host."""
        changed = self._originals.get(index, {}).keys() & {"capturable", "fused"}
        return bool(changed) and not group.get("capturable") and not group.get("fused")

    def undo(self) -> None:
        """Restore the flags, move counters to the host if the unprepared optimizer has them there, remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.leave()
        for index, group in enumerate(self.optimizer.param_groups):
            if self._steps and self._keeps_on_host(index, group):
                for param in group["params"]:
                    state = self.optimizer.state.get(param)
                    if state:
                        state.update(_scalars_to_host(state))
        if self._had_warned is None:
            vars(self.optimizer).pop(_WARNED, None)


def _scalars_to_host(values: Any) -> Any:
    """Return one parameter's state with its counters on the host."""
    if "eta" in values:
        return values  # ASGD always keeps its scalars on the parameter's device.
    counters = {key: values[key].cpu() for key in ("step", "mu_product") if isinstance(values.get(key), Tensor)}
    return {**values, **counters}


def _integers(optimizer: torch.optim.Optimizer) -> dict[_Place, int]:
    """Return the integers in the optimizer's parameter groups, without bools."""
    groups = enumerate(optimizer.param_groups)
    return {(index, key): item for index, group in groups for key, item in group.items() if type(item) is int}


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> list[str]:
    """Make ``optimizer`` capturable permanently, if torch supports that on its parameters' device.

    Examples:
        >>> import torch
        >>> from graphplan import prepare_optimizer
        >>> prepare_optimizer(torch.optim.AdamW([torch.zeros(2, requires_grad=True)]))
        ["AdamW.param_groups[0]['fused']: None -> True"]

    Args:
        optimizer: an optimizer of torch or of another library.

    Returns:
        The changes, one line per flag; empty if none was necessary.

    Raises:
        OptimizerError: for optimizers that cannot be captured at all (LBFGS, SparseAdam).
    """
    return Preparation(optimizer).changes
