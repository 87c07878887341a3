"""Different things of one name, in a step's code and among its owners: each is followed where it lies.

Checks are off in here, so that it is guards that make the numbers eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from tests.crossing import pairs
from tests.models import CALLS, float_batches
from tests.twins import BEFORE_REPLAY, Rig, assert_equals_eager, build, drive, managed

WHEN = 12
Weigh = Callable[[Tensor], Tensor]


def thing() -> Any:
    """Something that code reads numbers and tensors from."""
    return SimpleNamespace(scale=1.0, offset=torch.zeros(()), history=torch.zeros(()))


weights = thing()
config = ModuleType("config")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    reset()


def reset() -> None:
    """What is global is shared by all rigs."""
    vars(weights).update(vars(thing()))
    vars(config).update(scale=1.0, offset=torch.zeros(()))


def rig_with(weigh: Weigh, change: Callable[[], None], **owners: Any) -> Rig:
    """A step that weighs its loss. The host makes a change after call ``WHEN``."""
    model = nn.Linear(8, 4)
    optimizer = SGD(model.parameters(), lr=0.05, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = weigh(F.cross_entropy(model(x), y))
        loss.backward()
        optimizer.step()
        return loss.detach()

    named = {"model": model, "optimizer": optimizer, **owners}
    after = lambda index: change() if index == WHEN else None  # noqa: E731
    return Rig(train_step, named, float_batches(CALLS), after)


def change(name: str, what: Any) -> Callable[[], None]:
    """Another value in place of one."""
    values = {"scale": 3.0, "offset": torch.ones(())}
    return lambda: setattr(what, name, values[name])


def a_variable_and_a_global(name: str, which: int) -> Rig:
    """The owner is what the code means by its variable; nobody reads the global."""

    def make(weights: Any) -> Weigh:
        return lambda loss: loss * weights.scale + weights.offset

    mine = thing()
    return rig_with(make(mine), change(name, mine), weights=mine)


def an_owner_and_a_global(name: str, which: int) -> Rig:
    """The code reads both."""
    mine = thing()
    weigh = lambda loss: loss * (weights.scale + mine.scale) + weights.offset + 2 * mine.offset  # noqa: E731
    return rig_with(weigh, change(name, (mine, weights)[which]), weights=mine)


def two_variables(name: str, which: int) -> Rig:
    """Two functions mean different things by one name, and neither is an owner."""
    one, other = thing(), thing()

    def make(weights: Any, inner: Weigh) -> Weigh:
        return lambda loss: inner(loss) * weights.scale + weights.offset

    return rig_with(make(one, make(other, lambda loss: loss)), change(name, (one, other)[which]))


def a_variable_and_a_module(name: str, which: int) -> Rig:
    """One function means a module by a name, and another one a variable that has as much."""
    mine = thing()

    def make(config: Any) -> Weigh:
        return lambda loss: loss * config.scale + config.offset

    inner = make(mine)
    weigh = lambda loss: inner(loss) * config.scale + config.offset  # noqa: E731
    return rig_with(weigh, change(name, (mine, config)[which]))


CASES = [a_variable_and_a_global, an_owner_and_a_global, two_variables, a_variable_and_a_module]


@pairs(which=[0, 1], name=["scale", "offset"], case=CASES)
def test_each_is_followed(case: Callable[[str, int], Rig], name: str, which: int) -> None:
    """Other numbers lead to another program, and other tensors to other values."""

    def make() -> Rig:
        reset()
        return case(name, which)

    # One warm step, two traces, the capture.
    anew = 4 if name == "scale" else 0
    assert_equals_eager(make, captured=2 if anew else 1, replayed=CALLS - BEFORE_REPLAY - anew, verify="off")


def test_a_state_that_is_called_like_a_global() -> None:
    """What the step rebinds in its owner is carried, whatever else has that name."""

    def make() -> Rig:
        reset()
        mine = thing()

        def make(weights: Any) -> Weigh:
            def weigh(loss: Tensor) -> Tensor:
                weights.history = weights.history * 0.5 + loss.detach()
                return loss * weights.history

            return weigh

        return rig_with(make(mine), lambda: None, weights=mine)

    assert_equals_eager(make, verify="off")


def test_a_global_that_only_shares_a_variables_name_is_not_looked_at() -> None:
    """It may change as it likes: the step goes on with its program."""
    reset()
    rig = build(lambda: a_variable_and_a_global("offset", 0))
    rig.after = lambda index: vars(weights).update(scale=float(index), offset=torch.full((), float(index)))
    step = managed(rig, verify="off")
    drive(rig, step)
    assert step.stats.captured == 1 and step.stats.recaptured == 0
