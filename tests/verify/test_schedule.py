"""Which replays are checked, what the statistics say about it, and what is no schedule."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from graphplan import GraphPlanError, OptionError, SkipReason, graph_step
from tests.twins import BEFORE_REPLAY, build, drive, managed
from tests.zoo import Box, training_rig

PERIOD = 1000


def checked_replays(replays: int, **options: Any) -> list[int]:
    """The replays, counted from 1, in which the step's Python ran too: it counts where graphplan cannot look."""
    ran = Box(0)

    def step(x: Tensor) -> Tensor:
        ran.item += 1
        return x * 2

    graphed = graph_step(step, backend="tape", **options)
    x, found = torch.ones(2), []
    for number in range(1 - BEFORE_REPLAY, replays + 1):
        before = ran.item
        graphed(x)
        if number > 0 and ran.item > before:
            found.append(number)
    assert graphed.stats.replayed == replays
    assert graphed.stats.verified == len(found) == graphed.stats.phase_counts["verify"]
    return found


@pytest.mark.parametrize("options", [{}, {"verify": "geometric"}], ids=str)
def test_the_geometric_schedule(options: dict[str, Any]) -> None:
    """Powers of two, and from a thousand on every thousandth."""
    powers = [2**exponent for exponent in range(10)]
    assert checked_replays(2 * PERIOD + 10, **options) == [*powers, PERIOD, 2 * PERIOD]


@pytest.mark.parametrize("every", [1, 7])
def test_every_nth_replay(every: int) -> None:
    """A number counts replays, not calls."""
    assert checked_replays(30, verify=every) == list(range(every, 31, every))


@pytest.mark.parametrize("verify", ["off", 0, None, False])
def test_no_checks(verify: Any) -> None:
    """Four ways to say that nothing is checked."""
    assert checked_replays(30, verify=verify) == []


@pytest.mark.parametrize("verify", ["often", "", -1, 0.5, True, (), ["off"]])
def test_what_is_no_schedule(verify: Any) -> None:
    """Said when the step is made, with the value and what would do."""
    with pytest.raises(OptionError, match=r"verify is .*; expected 'geometric', 'off', or n >= 1") as caught:
        graph_step(lambda x: x, verify=verify)
    assert isinstance(caught.value, GraphPlanError)
    assert repr(verify) in str(caught.value)


def test_every_program_has_its_own_schedule() -> None:
    """Two batch sizes: replays 1, 2, 4 and 8 of each; a program that is captured anew starts again."""
    rig = build(partial(training_rig, "mlp", "adamw", sizes=[5 if index % 2 else 8 for index in range(40)]))
    step = managed(rig)
    drive(rig, step)
    assert (step.stats.captured, step.stats.replayed, step.stats.verified) == (2, 28, 2 * 4)
    step.invalidate("the test says so")
    drive(rig, step, 20)
    assert step.stats.verified > 2 * 4


def test_the_report_tells_of_checks() -> None:
    """How many, how much a check copies, how long they took; nothing where nothing is checked."""
    make = partial(training_rig, "mlp", "adamw", sizes=(8,) * 20)
    rig = build(make)
    step = managed(rig)
    drive(rig, step)
    stats = step.stats
    assert stats.verified == 4
    weights = sum(p.nbytes for p in rig.owners["model"].parameters())
    # Parameters, gradients and the optimizer's two moments at least.
    assert 4 * weights <= stats.bytes_verified < 5 * weights
    report = step.report()
    assert "4 replays checked against eager" in report
    assert "verify: 4 replays equal the eager step; each check copies 0.0 MiB of state" in report
    assert "verify" in report.split("phases:")[1]
    assert not stats.events and not stats.skipped[SkipReason.VERIFY]
    rig = build(make)
    silent = managed(rig, verify="off")
    drive(rig, silent)
    assert "verify" not in silent.report() and "checked" not in silent.report()


def test_a_check_is_no_steady_replay() -> None:
    """The time of checked replays is counted apart, so that it does not hide what a replay costs."""
    rig = build(partial(training_rig, "mlp", "adamw", sizes=(8,) * 20))
    step = managed(rig)
    drive(rig, step)
    counts = step.stats.phase_counts
    assert (counts["verify"], counts["steady"], counts["first_replay"]) == (4, 10, 0)
    assert step.stats.launches_replayed == 14
    # Every call but the ten unchecked replays issued the step's operators one by one.
    assert step.stats.launches_eager == step.plan.launches * (BEFORE_REPLAY + 4)
