"""Hooks that somebody writes where torch keeps them, and what an optimizer of the user's own holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from graphplan import graph_step
from tests.models import assert_losses_as_eager

X = torch.arange(8.0).reshape(2, 4) / 8


def _layer_hook(rig: Any) -> dict[int, Any]:
    rig.model.register_forward_hook(lambda layer, args, out: out * 2)
    return rig.model._forward_hooks


def _layer_pre_hook(rig: Any) -> dict[int, Any]:
    rig.model.register_forward_pre_hook(lambda layer, args: (args[0] * 2,))
    return rig.model._forward_pre_hooks


def _global_hook(rig: Any) -> dict[int, Any]:
    modules.register_module_forward_hook(lambda layer, args, out: out * 2)
    return modules._global_forward_hooks


def _tensor_hook(rig: Any) -> dict[int, Any]:
    rig.model.weight.register_hook(lambda grad: grad * 2)
    return rig.model.weight._backward_hooks


def _scaling(rig: Any, factor: int) -> Callable[..., None]:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        rig.model.weight.grad.mul_(factor)

    return hook


def _optimizer_hook(rig: Any) -> dict[int, Any]:
    rig.optimizer.register_step_pre_hook(_scaling(rig, 2))
    return rig.optimizer._optimizer_step_pre_hooks


HOOKS: dict[str, tuple[Callable[[Any], dict[int, Any]], Callable[[Any], Any]]] = {
    "of a layer": (_layer_hook, lambda rig: lambda layer, args, out: out * 3),
    "before a layer": (_layer_pre_hook, lambda rig: lambda layer, args: (args[0] * 3,)),
    "of all layers": (_global_hook, lambda rig: lambda layer, args, out: out * 3),
    "of a tensor": (_tensor_hook, lambda rig: lambda grad: grad * 3),
    "of an optimizer": (
        _optimizer_hook, lambda rig: _scaling(rig, 3),
    ),
}  # fmt: skip


def _losses(register: Callable[[Any], Any], change: Callable[[Any, Any], Any], *, replays: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    rig = SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3, fused=True))
    hooks = register(rig)

    def step(x: Tensor) -> Tensor:
        rig.optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        rig.optimizer.step()
        return loss.detach()

    owners = {"model": model, "optimizer": rig.optimizer}
    call: Any = graph_step(step, owners=owners, backend="tape", warmup_steps=1, verify="off") if replays else step
    losses = []
    for number in range(24):
        if number == 12:
            change(rig, hooks)
        losses.append(call(X).item())
    modules._global_forward_hooks.clear()
    return losses, call


def _compare(register: Callable[[Any], Any], change: Callable[[Any, Any], Any]) -> None:
    replayed, call = _losses(register, change, replays=True)
    eager, _ = _losses(register, change, replays=False)
    unchanged, _ = _losses(register, lambda rig, hooks: None, replays=False)
    assert replayed == eager != unchanged
    assert call.stats.captured == 2
    assert call.stats.replayed > 12


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_under_the_number_of_another(name: str) -> None:
    register, other = HOOKS[name]
    _compare(register, lambda rig, hooks: hooks.update({number: other(rig) for number in hooks}))


def test_a_dictionary_of_hooks_in_the_place_of_another() -> None:
    _compare(_layer_hook, lambda rig, hooks: setattr(rig.model, "_forward_hooks", OrderedDict()))


class Descent(torch.optim.Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "box": SimpleNamespace(factor=1.0)})
        self.held = SimpleNamespace(factor=1.0)
        self.function = lambda: 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Downhill."""
        for group in self.param_groups:
            factor = group["box"].factor * self.held.factor * self.function()
            for param in group["params"]:
                param.add_(param.grad, alpha=-0.1 * factor)


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer: setattr(optimizer.held, "factor", 3.0),
        lambda optimizer: setattr(optimizer.param_groups[0]["box"], "factor", 3.0),
        lambda optimizer: setattr(optimizer, "function", lambda: 3.0),
    ],
)
def test_what_an_optimizer_of_the_users_holds(change: Callable[[Any], Any]) -> None:
    call = assert_losses_as_eager(lambda model: Descent(model.parameters()), {10: change})
    assert call.stats.captured == 2
    assert call.stats.replayed > 8
