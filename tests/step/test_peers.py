"""What ranks tell each other through the process group's store, here two ranks of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import repeat
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore

from graphplan import CheckMemoryError
from graphplan.errors import HostSyncError, OptimizerError, PeerError, SkipReason, VerifyError
from graphplan.program.program import Program
from graphplan.step import peers
from graphplan.step.graphed_step import GraphedStep
from graphplan.step.options import Options
from graphplan.step.peers import Peers
from graphplan.step.replays import Replays
from graphplan.step.runner import Runner
from graphplan.verify import check
from tests.models import training_rig
from tests.twins import Rig, assert_same_runs, build, drive


class Ranks:
    """Two ranks that meet in one store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peers, "_numbers", repeat(0))
        self.store = HashStore()
        self.rank_0, self.rank_1 = (Peers(self.store, rank, 2) for rank in range(2))

    def say(self, question: str, answer: bool) -> None:
        """What rank 1 says before rank 0 asks."""
        if not answer:
            self.store.add(f"graphplan/0/{question}/no", 1)
        self.store.add(f"graphplan/0/{question}/asked", 1)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True), (False, False)])
def test_every_rank_hears_what_all_say(ranks: Ranks, first: bool, second: bool) -> None:
    heard: list[bool | None] = []
    other = threading.Thread(target=lambda: heard.append(ranks.rank_0.vote("the same", first)))
    other.start()
    heard.append(ranks.rank_1.vote("the same", second))
    other.join(60)
    assert heard == [first and second] * 2


@pytest.mark.parametrize("late", [True, False])
def test_who_comes_late_hears_what_was_decided(ranks: Ranks, late: bool) -> None:
    """One that checked a step alone would wait for ever in the step's collectives."""
    assert ranks.rank_0.vote("the same", True, 0.02) is None
    assert ranks.rank_1.vote("the same", late) is None


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(("together", "heard"), [(False, False), (True, None)])
def test_one_no_decides_unless_all_have_to_be_there(
    ranks: Ranks, late: bool, together: bool, heard: bool | None
) -> None:
    """Whoever comes later hears the same."""
    assert ranks.rank_0.vote("the same", False, 0.02, together=together) is heard
    assert ranks.rank_1.vote("the same", late, together=together) is heard


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True), (False, False)])
def test_all_that_are_there_hear_a_no(ranks: Ranks, first: bool, second: bool) -> None:
    ranks.say("the same", first)
    assert ranks.rank_0.vote("the same", second, together=True) is (first and second)


def test_a_rank_that_refuses_is_not_waited_for(ranks: Ranks) -> None:
    """What it says is heard of elsewhere."""
    ranks.rank_1.refuse(OptimizerError("no"))
    assert ranks.rank_0.vote("the same", True) is None
    assert ranks.rank_1.vote("the same", True) is None


Say = Callable[[Ranks, str], None]


@pytest.mark.parametrize(
    ("say", "reason", "expected"),
    [
        (lambda ranks, question: ranks.say(question, True), "", ""),
        (lambda ranks, question: ranks.say(question, False), "", "another rank has no room for a check"),
        (lambda ranks, question: ranks.say(question, True), "no room", "no room"),
        (lambda ranks, question: ranks.say(question, False), "no room", "no room"),
        (lambda ranks, question: None, "", "the ranks do not check the same steps"),
        (lambda ranks, question: None, "no room", "no room"),
    ],
)
def test_ranks_check_together(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, say: Say, reason: str, expected: str
) -> None:
    monkeypatch.setattr(Peers.vote, "__defaults__", (0.02,))
    say(ranks, "check 7")
    assert replays_of(ranks.rank_0)._ask_peers(reason) == expected


@pytest.mark.parametrize(
    ("differs", "other", "again"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, True)],
)
def test_ranks_replay_as_often(ranks: Ranks, differs: bool, other: bool, again: bool) -> None:
    """If any of them differs from eager."""
    ranks.say("check 7 1", not other)
    assert replays_of(ranks.rank_0)._on_any(differs) is again


@pytest.mark.parametrize("differs", [False, True])
def test_a_rank_that_leaves_a_check_ends_it_for_all(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, differs: bool
) -> None:
    """A replay here would meet its next step. Whoever comes later is told the same."""
    monkeypatch.setattr(Peers.vote, "__defaults__", (0.02,))
    for rank in (ranks.rank_0, ranks.rank_1):
        with pytest.raises(PeerError, match="another rank has left the check"):
            replays_of(rank)._on_any(differs)


def replays_of(rank: Peers) -> Replays:
    """Those of the seventh call."""
    runner = SimpleNamespace(stats=SimpleNamespace(calls=7), device=torch.device("cpu"))
    parts = SimpleNamespace(runner=runner, options=Options(), peers=rank)
    return Replays(cast("Any", parts))


CALLS = 12
CHECKED = 6
"""The call with the first check, and the one after with the second."""


def drive_rank(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, after: Callable[[int], object], **options: Any) -> Any:
    """Rank 0's steps, as if they communicated, beside a twin's eager ones; ``after(index)`` follows each."""
    monkeypatch.setattr(Peers.vote, "__defaults__", (0.02,))
    for stage in ("ready", "trace 0", "trace 1"):
        ranks.store.set(f"graphplan/0/1/{stage}", "1")
    twin = build(rig_of)
    expected = drive(twin, twin.step)
    rig = build(rig_of)
    step = GraphedStep(rig.step, rig.owners, Options(backend="tape", **options), peers=ranks.rank_0)

    def communicating(index: int) -> None:
        for program in step.programs:
            program.plan = replace(program.plan, communicates=True)
        after(index)

    schedule = rig.after
    found = drive(replace(rig, after=lambda index: (schedule(index), communicating(index))), step)
    assert_same_runs(expected, found)
    return step


def test_a_rank_reads_no_batch_before_its_step(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batch would have a program of its own, and the others would wait for another."""
    monkeypatch.setattr(Peers.vote, "__defaults__", (0.02,))
    ranks.store.set("graphplan/0/1/ready", "1")
    step = GraphedStep(lambda x: x[x > 0], {}, Options(backend="tape"), peers=ranks.rank_0)
    with pytest.raises(HostSyncError, match="makes a tensor whose shape depends on values"):
        for _ in range(6):
            step(torch.ones(3))
    assert step.stats.replayed == 0


def rig_of() -> Rig:
    return training_rig("mlp", "nesterov", fused=True, sizes=(6,) * CALLS)


def test_a_rank_whose_program_is_wrong_stops_the_others(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would go on with a program that was found wrong elsewhere. They hear of it with their next check."""

    def after(index: int) -> None:
        if index == CHECKED - 1:
            ranks.say(f"check {CHECKED}", True)
            ranks.say(f"check {CHECKED} 1", True)
            ranks.say(f"check {CHECKED} 2", True)
        if index == CHECKED:
            ranks.rank_1.refuse(VerifyError("replay 1 of train_step is not what the eager step does"))

    with pytest.warns(UserWarning, match="rank 1 cannot capture this step.*is not what the eager step does"):
        step = drive_rank(ranks, monkeypatch, after, on_failure="eager")
    assert (step.stats.replayed, step.stats.verified) == (1, 1)
    assert step.stats.skipped == {SkipReason.PEER: CALLS - CHECKED - 1}
    assert step.programs == []


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """Replays that are run, those of checks included."""
    runs: list[Program] = []
    plain = Program.run
    monkeypatch.setattr(
        Program, "run", lambda program, *args, **kwargs: (runs.append(program), plain(program, *args, **kwargs))[1]
    )
    return runs


LEFT, NO_ROOM = "another rank has left the check", "another rank has no room for a check"


@pytest.mark.parametrize(
    ("answers", "reason", "replays"),
    [
        # It could not copy what was there before.
        ([False], NO_ROOM, 1),
        # It could not compare.
        ([True], LEFT, 1),
        # It differs, so that all are to repeat their replay, and could not copy what there was until then.
        ([True, False, False], NO_ROOM, 1),
        ([True, False], LEFT, 1),
        # It could not copy what the second replay left.
        ([True, False, True], LEFT, 2),
    ],
)
def test_a_rank_that_has_no_memory_for_a_check_ends_it(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, answers: list[bool], reason: str, replays: int
) -> None:
    """Not one replay more is run here than there; what was not compared does not count as verified."""
    runs = count_runs(monkeypatch)
    checked: list[int] = []

    def after(index: int) -> None:
        if index == CHECKED - 1:
            ranks.say(f"check {CHECKED}", True)
            for number, answer in enumerate(answers, 1):
                ranks.say(f"check {CHECKED} {number}", answer)
        if index == CHECKED:
            checked.append(len(runs))

    step = drive_rank(ranks, monkeypatch, after)
    assert (step.stats.replayed, step.stats.verified) == (CALLS - CHECKED, 0)
    assert step.stats.events == {f"not checked against eager: {reason}": 1}
    assert checked == [replays]


@pytest.mark.parametrize(
    ("failing", "heard"),
    [
        # Of the copies before the replay and after the eager step.
        (1, [False]),
        (2, [True, False, False]),
    ],
)
def test_a_rank_without_memory_for_a_check_says_so(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, failing: int, heard: list[bool]
) -> None:
    """Before the others run what it cannot. The other one here differs from eager, and has room."""
    runs, copies = count_runs(monkeypatch), []
    snapshot = check.Check.snapshot

    def scarce(self: Any, *args: Any) -> Any:
        copies.append(args)
        if len(copies) == failing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return snapshot(self, *args)

    monkeypatch.setattr(check.Check, "snapshot", scarce)
    checked: list[int] = []

    def after(index: int) -> None:
        if index == CHECKED - 1:
            ranks.say(f"check {CHECKED}", True)
            for number, answer in enumerate((True, False, True), 1):
                ranks.say(f"check {CHECKED} {number}", answer)
        if index == CHECKED:
            checked.append(len(runs))

    step = drive_rank(ranks, monkeypatch, after)
    assert step.stats.events == {"not checked against eager: CUDA out of memory": 1}
    assert checked == [1]
    told = [ranks.rank_1.vote(f"check {CHECKED} {number}", True, together=True) for number in range(1, len(heard) + 1)]
    assert told == heard


def test_checks_that_follow_each_other(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asks its own questions, whatever was asked in the one before."""

    def after(index: int) -> None:
        if index in (CHECKED - 1, CHECKED):
            for number in ("", " 1", " 2"):
                ranks.say(f"check {index + 1}{number}", True)

    step = drive_rank(ranks, monkeypatch, after)
    assert (step.stats.replayed, step.stats.verified) == (CALLS - CHECKED, 2)
    assert step.stats.events == {"not checked against eager: the ranks do not check the same steps": 1}


def test_an_eager_step_that_others_wait_for_cannot_be_left_out(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its collectives may be under way. Without a check the step would have had room: its user is told."""

    def after(index: int) -> None:
        if index == CHECKED - 1:
            ranks.say(f"check {CHECKED}", True)
            ranks.say(f"check {CHECKED} 1", True)
            monkeypatch.setattr(Runner, "call", out_of_memory)

    def out_of_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it")

    with pytest.raises(CheckMemoryError, match=r"allocate 2.00 GiB.*other ranks wait for.*verify='off'"):
        drive_rank(ranks, monkeypatch, after)
