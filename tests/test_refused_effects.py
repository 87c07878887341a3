"""Steps whose Python effects, operators, generators or results differ from step to step: refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from graphplan import ControlFlowError, GeneratorSeekError, HostEffectError, OutputError, SkipReason
from tests.twins import SECOND_TRACE, Rig, assert_equals_eager, assert_falls_back, assert_refused
from tests.zoo import attributes, updating_rig


def doubling(model: Any, x: Tensor, loss: Tensor) -> None:
    model.weird *= 2


def irregular(model: Any, x: Tensor, loss: Tensor) -> None:
    model.weird[len(model.weird) ** 2] = "seen"


def appending_numbers(model: Any, x: Tensor, loss: Tensor) -> None:
    model.weird.append(7 * len(model.weird) ** 2)


def renaming(model: Any, x: Tensor, loss: Tensor) -> None:
    model.weird = model.weird + "x"


EFFECTS: dict[Callable[..., None], Any] = {doubling: 3, irregular: dict, appending_numbers: list, renaming: "x"}


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda effect: effect.__name__)
def test_irregular_host_effects_are_refused(effect: Callable[..., None]) -> None:
    """The message names the attribute's path, and the attribute is put back."""
    make = partial(updating_rig, effect, attributes(weird=EFFECTS[effect]))
    assert_refused(make, HostEffectError, r"model\.weird", "allow", done=SECOND_TRACE)
    assert_falls_back(make, SkipReason.HOST_EFFECT, r"model\.weird")


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda effect: effect.__name__)
def test_a_declared_host_effect_is_allowed(effect: Callable[..., None]) -> None:
    """``allow`` accepts that replays leave this one attribute alone; everything else is eager's."""

    def make() -> Rig:
        rig = updating_rig(effect, attributes(weird=EFFECTS[effect]))
        model = rig.owners["model"]
        rig.after = lambda index: setattr(model, "weird", None) if index == len(rig.calls) - 1 else None
        return rig

    assert_equals_eager(make, allow=("model.weird",))


def branch_on_a_counter(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    model.count += 1
    if model.count % 2:
        return x.sin()
    return x.cosh()


def one_more_operator(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    model.count += 1
    for _ in range(model.count):
        x = x.tanh()
    return x


def test_a_branch_on_a_counter_is_refused() -> None:
    """Two traces that run different operators: both are named."""
    make = partial(updating_rig, branch_on_a_counter, attributes(count=0))
    assert_refused(make, ControlFlowError, "sin", "cosh", r"test_refused_effects\.py", done=SECOND_TRACE)
    assert_falls_back(make, SkipReason.CONTROL_FLOW, "sin", "cosh")


def test_a_loop_that_grows_is_refused() -> None:
    """One trace has an operator more than the other."""
    make = partial(updating_rig, one_more_operator, attributes(count=0))
    assert_refused(make, ControlFlowError, "tanh", done=SECOND_TRACE)


def seeks_with_fork(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    with torch.random.fork_rng():  # culprit
        return torch.rand_like(x)


def seeks_with_seed(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    torch.manual_seed(3)  # culprit
    return torch.rand_like(x)


def seeks_with_state(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.rand_like(x)
    torch.set_rng_state(state)  # culprit
    return noise


SEEKS = [seeks_with_fork, seeks_with_seed, seeks_with_state]


@pytest.mark.parametrize("seek", SEEKS, ids=lambda seek: seek.__name__)
def test_generator_seeks_are_refused(seek: Callable[..., Any]) -> None:
    """A step that sets the generator's state would draw other numbers than its replays."""
    make = partial(updating_rig, seek, attributes())
    assert_refused(make, GeneratorSeekError, r"test_refused_effects\.py|generator")


def test_a_python_value_that_changes_in_the_result_is_refused() -> None:
    """Constants may be returned; a number that grows may not."""

    def halve(model: Any, index: int) -> None:
        model.share *= 0.5

    make = partial(updating_rig, lambda model, x, loss: {"share": model.share}, attributes(share=0.5), halve)
    assert_refused(make, OutputError, "share", r"0\.0625", r"0\.03125", done=SECOND_TRACE)
    assert_falls_back(make, SkipReason.OUTPUT, "share")
