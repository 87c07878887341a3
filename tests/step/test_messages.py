"""What refusals say: the place, what was found, and ways out that apply, each once."""

from __future__ import annotations

import ctypes
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from graphplan import DeviceError, HostScalarError, RefusalError, graph_step
from graphplan.observe.source import find_load
from graphplan.report.stats import Stats
from graphplan.step.runner import Refusals
from graphplan.trace.changes import told_apart
from tests.twins import BEFORE_REPLAY

WAY_OUT = "Or pass on_failure='eager' to continue without replays"


class Loop:
    """What a step may read and change."""

    def __init__(self) -> None:
        self.net = nn.Linear(3, 3)
        self.optimizer = SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = StepLR(self.optimizer, 3)
        self.losses: list[Any] = []
        self.number = 0
        self.kept: Any = 0


UNSEEN = ctypes.c_int(0)
"""A number where no guard looks, and no stand-in can be put."""


def _appends_numbers(loop: Loop, loss: Tensor) -> Tensor:
    UNSEEN.value = (UNSEEN.value + 1) % 10
    loop.losses.append(float(UNSEEN.value))
    return loss


def _draws(loop: Loop, loss: Tensor) -> Tensor:
    loop.kept = random.choice(range(2)) < 2
    return loss


def _computes_with_a_number(loop: Loop, loss: Tensor) -> Tensor:
    UNSEEN.value += 1
    return loss * UNSEEN.value


def _decides_by_a_number(loop: Loop, loss: Tensor) -> Tensor:
    loop.kept = len(f"{loop.number}") > 9
    return loss


def _reads(loop: Loop, loss: Tensor) -> Tensor:
    loop.kept = complex(loss.detach()).real
    return loss


def _schedules(loop: Loop, loss: Tensor) -> Tensor:
    loop.scheduler.step()
    return loss


def _counts_in_a_group(loop: Loop, loss: Tensor) -> Tensor:
    loop.optimizer.param_groups[0]["step"] = loop.optimizer.param_groups[0].get("step", 0) + 1
    return loss


def _branches(loop: Loop, loss: Tensor) -> Tensor:
    UNSEEN.value += 1
    return loss * 2 if UNSEEN.value % 2 else loss


def _packs(loop: Loop, loss: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(
        loop.net.weight[None], (loss.detach() * 0).long()[None] + 3, batch_first=True
    )
    return loss + packed.data.sum()


_TWO_NUMBERS = (
    r"appends \[(\d)\.0\] and then \[(?!\1)\d\.0\] to .*losses.*Append tensors, or, if "
    r"replays may leave the list unchanged,"
)
_READ = r"uses \S*number at test_messages\.py:\d+ in _decides_by_a_number: `.*`, which is"
_VALUE = r"\.item\(\).* at test_messages\.py:\d+ in _reads.*If only some calls do this, select them with eager_if="
_BRANCH = r"control flow changes.*select the calls of the rarer path with eager_if="
SAID: dict[str, tuple[Callable[[Loop, Tensor], Tensor], str, bool]] = {
    "numbers that a list gets": (_appends_numbers, _TWO_NUMBERS, False),
    "random": (_draws, r"Python's random generator at test_messages\.py:\d+ in _draws: `.*random\.choice", False),
    "a number": (_computes_with_a_number, r"test_messages\.py:\d+ in _computes_with_a_number: .* gets other=", False),
    "a number that is read": (_decides_by_a_number, _READ, False),
    "a value": (_reads, _VALUE, True),
    "a scheduler": (_schedules, r"learning rate at .* in _schedules.*Call scheduler\.step\(\) after the step", False),
    "a counter in a group": (_counts_in_a_group, r"\]\.step: .*Keep your own counts in a tensor", False),
    "a branch": (_branches, _BRANCH, True),
    "lengths": (_packs, r"reads the lengths of sequences.*Keep the batch padded", False),
}


@pytest.mark.parametrize("name", SAID)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_refusal_names_the_place_and_the_ways_out(name: str) -> None:
    """``eager_if=`` only where it helps, and the way that is always open last, once."""
    act, pattern, helps = SAID[name]
    loop, UNSEEN.value = Loop(), 0

    def step(x: Tensor) -> Tensor:
        loop.optimizer.zero_grad()
        loss = act(loop, loop.net(x).square().mean())
        loss.backward()
        loop.optimizer.step()
        return loss.detach()

    graphed = graph_step(step, owners={"loop": loop}, backend="tape")
    with pytest.raises(RefusalError, match=pattern) as caught:
        for _ in range(20):
            graphed(torch.randn(4, 3))
            loop.number += 1
    text = str(caught.value)
    assert ("eager_if=" in text) is helps
    assert text.endswith(WAY_OUT) and text.count("on_failure=") == 1


@pytest.mark.twice
def test_all_values_that_change_are_named_at_once() -> None:
    """One may lead to another: to allow one after the other would take as many runs."""
    loop, other = Loop(), Loop()

    def step(x: Tensor) -> Tensor:
        loop.kept = other.kept = len(f"{loop.number}{other.number}") > 9
        return loop.net(x).sum().detach()

    def run(**options: Any) -> Any:
        graphed = graph_step(step, owners={"loop": loop, "other": other}, backend="tape", **options)
        for _ in range(20):
            graphed(torch.randn(4, 3))
            loop.number, other.number = loop.number + 1, other.number + 1
        return graphed

    with pytest.raises(HostScalarError, match=r"uses loop\.number at .*allow=\('loop\.number', 'other\.number'\)"):
        run()
    assert run(allow=("loop.number", "other.number")).stats.replayed == 20 - BEFORE_REPLAY


def test_what_is_always_raised_has_no_other_way_out() -> None:
    """Whatever ``on_failure`` says."""
    error = DeviceError("elsewhere")
    refusals = Refusals("eager", Stats(), None)
    with pytest.raises(DeviceError, match=r"^elsewhere$"):
        refusals.refuse(error)


class Silent:
    """Says the same of whatever it is."""

    def __repr__(self) -> str:
        return "Silent()"


@pytest.mark.parametrize(("first", "second"), [(1, 1.0), (Silent(), Silent()), (True, 1), ("a", "b")])
def test_two_texts_that_read_the_same_are_no_difference(first: Any, second: Any) -> None:
    one, other = told_apart(first, second, str)
    assert one != other


def test_the_line_that_loads_a_name() -> None:
    """Attributes and variables; none where no code does."""
    codes = [_reads.__code__, _decides_by_a_number.__code__]
    found = find_load(codes, "number")
    assert re.fullmatch(r"test_messages\.py:\d+ in _decides_by_a_number: `.*loop\.number.*`", str(found))
    assert find_load(codes, "nothing") is None
