"""Gradient scalers that let the optimizer's kernel decide whether to skip a step.

``GradScaler.step`` reads on the host whether gradients overflowed, unless the optimizer declares that its kernel takes
``found_inf``. A prepared optimizer must not declare that: Lightning would assume that the kernel also unscales, and
refuse to clip. So ``_maybe_opt_step`` is replaced on the scaler instance while a managed step runs: the scaler unscales
as usual, and the kernel skips.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import optimizer as hooks

LENT = ("grad_scale", "found_inf")
"""Attributes that a scaler sets on an optimizer during one step."""
_DECISION = "_maybe_opt_step"


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer's kernel can skip the step by ``found_inf``: it has torch's own fused step, and no
    user hooks, which would run for a skipped step too.
    """
    own_step = inspect.unwrap(optimizer.step).__module__.startswith("torch.optim.")
    kinds = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        hooks._global_optimizer_post_hooks,
    )
    modules = {str(getattr(hook, "__module__", None)) for kind in kinds for hook in kind.values()}
    is_hooked = not all(module.startswith(__package__) for module in modules)
    return own_step and not is_hooked and all(group.get("fused") for group in optimizer.param_groups)


def _has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if every parameter to be stepped already has its state, which a skipped step does not create."""
    return all(
        any(isinstance(value, Tensor) for value in optimizer.state.get(param, {}).values())
        for group in optimizer.param_groups
        if group.get("momentum") != 0  # SGD without momentum keeps no state.
        for param in group["params"]
        if param.grad is not None
    )


class ScaledSteps:
    """Replaces the scalers' decisions in a managed step. ``skipped_without_state``: an optimizer got no state."""

    def __init__(self, scalers: Iterable[GradScaler] = ()) -> None:
        # Do not touch a scaler whose class overrides the decision.
        self._scalers = [s for s in scalers if getattr(type(s), _DECISION, None) is GradScaler._maybe_opt_step]
        self.skipped_without_state = False

    def __enter__(self) -> ScaledSteps:
        self.skipped_without_state = False
        for scaler in self._scalers:
            setattr(scaler, _DECISION, partial(self._step, scaler))
        return self

    def __exit__(self, *exc: object) -> None:
        for scaler in self._scalers:
            vars(scaler).pop(_DECISION, None)

    def _step(
        self, scaler: GradScaler, optimizer: torch.optim.Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Replace ``GradScaler._maybe_opt_step``."""
        found = state["found_inf_per_device"].values()
        born = _has_state(optimizer)
        if not born or not takes_found_inf(optimizer):
            self.skipped_without_state |= not born and any(tensor.item() for tensor in found)
            return GradScaler._maybe_opt_step(scaler, optimizer, state, *args, **kwargs)
        lent: Any = optimizer
        lent.found_inf = sum(found)
        try:
            return lent.step(*args, **kwargs)
        finally:
            del lent.found_inf
