"""Rows 1 to 4: optimizers and their hyper-parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer, RMSprop

from graphplan import OptimizerError
from tests.failure_modes.naive import (
    WHEN,
    assert_change_handled,
    assert_handled,
    assert_naive_is_wrong,
    changing_rig,
    loss_of,
    stay,
)
from tests.models import Mlp, float_batches
from tests.twins import BEFORE_TWO, Rig, assert_equals_eager, assert_refused


def _load(scale: float = 1.0, **hypers: Any) -> Callable[[Any, Any], None]:
    def change(model: Any, optimizer: Any) -> None:
        state = copy.deepcopy(optimizer.state_dict())
        for moments in state["state"].values():
            moments["exp_avg"].mul_(scale)
        state["param_groups"][0].update(hypers)
        optimizer.load_state_dict(state)

    return change


LOADED = {
    "moments": _load(0.1),
    "lr": _load(lr=0.1),
    "weight_decay": _load(weight_decay=0.9),
    "betas": _load(betas=(0.1, 0.2)),
    "maximize": _load(maximize=True),
}


@pytest.mark.parametrize("what", LOADED)
def test_row_01_load_state_dict(what: str) -> None:
    """A loaded state moves every tensor and may change every number: the very next step goes on from it."""
    assert_change_handled(LOADED[what])


def test_row_01_load_state_dict_with_two_programs() -> None:
    """Two batch sizes, one optimizer: a load reaches both programs."""
    calls = [(x[:size], y[:size]) for (x, y), size in zip(float_batches(56), [6, 4] * 28, strict=True)]
    each = lambda model, optimizer, index: _load(0.1, weight_decay=0.9)(model, optimizer) if index == 30 else None  # noqa: E731
    make = partial(changing_rig, stay, calls=calls, each=each)
    step = assert_equals_eager(make, captured=4, replayed=56 - 2 * BEFORE_TWO)
    assert step.stats.recaptured == 2


def _swap_state(model: Any, optimizer: Any) -> None:
    one, two = optimizer.state[model[0].bias], optimizer.state[model[1].weight]
    one["exp_avg"], two["exp_avg"] = two["exp_avg"], one["exp_avg"]


def test_row_01_two_moments_swapped() -> None:
    """Each of two state tensors takes the other's place: copying one after the other would lose one."""
    assert_change_handled(_swap_state)


def test_row_02_betas_change_once() -> None:
    """Kernels take betas as Python numbers: another value needs another capture, and gets it."""
    assert assert_change_handled(lambda m, o: o.param_groups[0].update(betas=(0.5, 0.9))).stats.recaptured == 1


def test_row_02_weight_decay_alternates() -> None:
    """A few values have a program each."""
    flip = lambda model, optimizer, index: optimizer.param_groups[0].update(weight_decay=0.1 * (index // 6 % 2))  # noqa: E731
    assert_handled(partial(changing_rig, stay, each=flip, calls=float_batches(48)), replayed=48 - 18)


def _cycle_betas(model: Any, optimizer: Any, index: int) -> None:
    optimizer.param_groups[0]["betas"] = (0.85 + 0.001 * index, 0.99)


def test_row_02_a_schedule_of_betas_is_refused() -> None:
    """A new value at every step: refused before a capture, naming the optimizer, ``betas`` and what to do."""
    make = partial(changing_rig, stay, each=_cycle_betas)
    assert_naive_is_wrong(make)
    assert_refused(make, OptimizerError, r"AdamW", r"betas", r"move optimizer\.step\(\) out", done=3)


class HandMade(Optimizer):
    """Gradient descent as third parties write it: the learning rate is a Python number."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"])


def _set_lr(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


@pytest.mark.parametrize(
    "make", [partial(SGD, lr=0.1, fused=True), partial(HandMade, lr=0.1), partial(RMSprop, lr=1e-3)], ids=repr
)
def test_row_03_float_lr(make: Callable[..., Optimizer]) -> None:
    """A device learning rate where the kernel takes one, a new capture where it does not."""
    assert_change_handled(_set_lr, make_optimizer=make)


def test_row_03_a_schedule_that_the_kernel_cannot_read_is_refused() -> None:
    """RMSprop on the CPU has no fused kernel: a new lr for each step names the optimizer and the alternatives."""
    decay = lambda model, optimizer, index: optimizer.param_groups[0].update(lr=0.1 / (index + 1))  # noqa: E731
    make = partial(changing_rig, stay, each=decay, make_optimizer=partial(RMSprop, lr=0.1))
    assert_naive_is_wrong(make)
    assert_refused(make, OptimizerError, r"RMSprop", r"\.lr", r"AdamW, Adam, SGD, Adagrad with fused=True", done=4)


class Descent:
    """An optimizer that is no ``torch.optim.Optimizer``."""

    def __init__(self, params: Any) -> None:
        self.params, self.lr = list(params), 0.1

    @torch.no_grad()
    def step(self) -> None:
        for param in self.params:
            param.sub_(self.lr * param.grad)


def test_row_03_an_optimizer_that_torch_does_not_know() -> None:
    """Its lr is a number on an object that no owner holds."""

    def make() -> Rig:
        model = Mlp()
        optimizer = Descent(model.parameters())

        def train_step(x: Tensor, y: Tensor) -> Tensor:
            model.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            return loss

        def after(index: int) -> None:
            optimizer.lr = 0.1 if index < WHEN else 0.5

        return Rig(train_step, {"model": model}, list(float_batches(24)), after)

    assert_handled(make)


def _rebind_group(**hypers: Any) -> Callable[[Any, Any], None]:
    def change(model: Any, optimizer: Any) -> None:
        optimizer.param_groups = [{**optimizer.param_groups[0], **hypers}]

    return change


REBOUND = {
    "the lr": _set_lr,
    "a tensor lr": lambda model, optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.5)),
    "a group with another lr": _rebind_group(lr=0.5),
    "a group with another weight decay": _rebind_group(lr=0.5, weight_decay=0.5),
}


@pytest.mark.parametrize("what", REBOUND)
def test_row_04_rebinding_in_param_groups(what: str) -> None:
    """Numbers and whole groups may be set anew."""
    assert_change_handled(REBOUND[what])
