"""Parameters and groups of an optimizer that change places between calls: other numbers, hence another program.

Checks are off in here, so that it is the program's key and its guards that make the numbers eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from tests.crossing import each
from tests.models import CALLS, CLASSES, float_batches
from tests.twins import BEFORE_REPLAY, Rig, assert_equals_eager, build, drive, managed

Change = Callable[[Any], object]
MAKERS: dict[str, Callable[..., Optimizer]] = {"sgd": partial(SGD, momentum=0.9), "adamw": AdamW}
AT = BEFORE_REPLAY + 2
"""The call after which groups change."""


def swap_lists(optimizer: Any) -> None:
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]


def swap_one(optimizer: Any) -> None:
    first, second = (group["params"] for group in optimizer.param_groups)
    first[1], second[1] = second[1], first[1]


def swap_dictionaries(optimizer: Any) -> None:
    groups = optimizer.param_groups
    groups[0], groups[1] = groups[1], groups[0]


def reverse(optimizer: Any) -> None:
    optimizer.param_groups.reverse()


def move_one(optimizer: Any) -> None:
    """There and back."""
    first, second = sorted((group["params"] for group in optimizer.param_groups), key=len)
    first.append(second.pop())


def reload(optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def copy_lists(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["params"] = list(group["params"])


def lay_elsewhere(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.data = param.data.clone()


MOVES: tuple[Change, ...] = (swap_lists, swap_one, swap_dictionaries, reverse, move_one)
STAYS: tuple[Change, ...] = (reload, copy_lists, lay_elsewhere)


def grouped_rig(change: Change, kind: str, *, at: tuple[int, ...] = (AT,), owned: bool = True, **more: Any) -> Rig:
    """Two layers of which one learns slowly, with other hyper-parameters ``more``; ``change(optimizer)`` comes after
    the calls ``at``. The step trains what is ``owned``, or tensors that only the optimizer has.
    """
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    fast: dict[str, Any] = {"params": list(model[0].parameters()), "lr": 0.1, **more}
    slow: dict[str, Any] = {"params": list(model[2].parameters()), "lr": 1e-4}
    optimizer = MAKERS[kind]([fast, slow], fused=True)
    held = [param for group in (fast, slow) for param in group["params"]]

    def forward(x: Tensor) -> Tensor:
        if owned:
            return model(x)
        first, bias, second, other_bias = held
        return F.linear(torch.tanh(F.linear(x, first, bias)), second, other_bias)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    owners = {"model": model, "optimizer": optimizer} if owned else {"optimizer": optimizer}
    calls = list(float_batches(CALLS + 4))
    return Rig(step, owners, calls, after=lambda index: change(optimizer) if index in at else None)


@each(kind=MAKERS, change=MOVES)
def test_parameters_that_change_groups_are_captured_anew(change: Change, kind: str) -> None:
    """What was recorded would train them with the hyper-parameters of the group that they were in."""
    step = assert_equals_eager(partial(grouped_rig, change, kind), captured=2, verify="off")
    events = [event for event in step.stats.events if event.startswith("another program: ")]
    assert len(events) == 1, step.stats.events
    assert "['params']: other ones" in events[0]


@each(kind=MAKERS, change=MOVES)
def test_the_first_program_comes_back_with_the_groups(change: Change, kind: str) -> None:
    """Two orders of groups are two programs, each of which is replayed whenever its order is there."""
    make = partial(grouped_rig, change, kind, at=(AT, AT + BEFORE_REPLAY + 1, AT + BEFORE_REPLAY + 3))
    assert_equals_eager(make, captured=2, verify="off")


@pytest.mark.parametrize("change", [swap_dictionaries, reverse], ids=lambda change: change.__name__)
def test_groups_of_other_keys_change_places(change: Change) -> None:
    """Hyper-parameters are named with what they were, whatever the order of a group's keys."""
    make = partial(grouped_rig, change, "adamw", weight_decay=0.5)
    step = assert_equals_eager(make, captured=2, verify="off")
    text = "another program: AdamW optimizer.param_groups[0].weight_decay: 0.5 then 0.01; "
    assert any(event.startswith(text) for event in step.stats.events), step.stats.events


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("change", STAYS, ids=lambda change: change.__name__)
def test_other_lists_of_the_same_parameters_are_followed(change: Change, kind: str) -> None:
    """A loaded state dictionary replaces dictionaries and lists, ``param.data = ...`` memory: the program goes on."""
    assert_equals_eager(partial(grouped_rig, change, kind), captured=1, verify="off")


@pytest.mark.parametrize("change", MOVES, ids=lambda change: change.__name__)
def test_parameters_of_no_model_change_groups(change: Change) -> None:
    """They have their names from the groups."""
    assert_equals_eager(partial(grouped_rig, change, "sgd", owned=False), captured=2, verify="off")


@pytest.mark.parametrize("change", [swap_lists, reverse], ids=lambda change: change.__name__)
def test_groups_that_change_places_between_calls_of_other_shapes(change: Change) -> None:
    """A call of another shape may come while they are as they were: what was seen of them last is asked again."""

    def make() -> Rig:
        rig = grouped_rig(change, "sgd")
        large = [(x[:4], y[:4]) for x, y in rig.calls]
        # Small, changed: small; changed back: large; changed: small.
        rig.calls = [*rig.calls[:10], *large[:8], *rig.calls[10:12], *large[8:9], *rig.calls[12:22]]
        optimizer = rig.owners["optimizer"]
        rig.after = lambda index: change(optimizer) if index in (17, 19, 20) else None
        return rig

    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig, verify="off")
    assert [loss.item() for loss in drive(rig, step).outputs] == [loss.item() for loss in expected.outputs]
    assert step.stats.captured == 3
