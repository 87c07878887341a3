"""What ranks tell each other through the process group's store, here two ranks of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import repeat
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore

from graphplan.errors import OptimizerError
from graphplan.step import Options, Peers, peers
from graphplan.step.replays import Replays


class Ranks:
    """Two ranks that meet in one store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peers, "_numbers", repeat(0))
        self.store = HashStore()
        self.rank_0, self.rank_1 = (Peers(self.store, rank, 2) for rank in range(2))

    def say(self, question: str, answer: bool) -> None:
        """What rank 1 says before rank 0 asks."""
        if answer:
            self.store.add(f"graphplan/0/{question}/yes", 1)
        else:
            assert self.rank_1.vote(question, False) is False


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
    [(False, False, False), (False, True, True), (True, False, True), (True, True, True), (False, None, True)],
)
def test_ranks_replay_as_often(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, differs: bool, other: bool | None, again: bool
) -> None:
    """If any of them differs from eager, or was not heard: it hears the same when it comes."""
    monkeypatch.setattr(Peers.vote, "__defaults__", (0.02,))
    if other is not None:
        ranks.say("spread 7 1", not other)
    assert replays_of(ranks.rank_0)._wants_again(differs) is again
    if other is None:
        assert replays_of(ranks.rank_1)._wants_again(differs) is again


def replays_of(rank: Peers) -> Replays:
    """Those of the seventh call."""
    runner = SimpleNamespace(stats=SimpleNamespace(calls=7), device=torch.device("cpu"))
    return Replays(cast("Any", runner), Options(), rank)
