"""Two GPUs over NCCL: the fit with the callback is the fit without it on every rank, collectives in the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from tests.lightning.ranks import BATCH, EPOCHS_ON
from tests.lightning.test_distributed import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SHARDED = ("fsdp", "fsdp clipped", "fsdp mixed", "fsdp replicated", "llama")
LAUNCHER = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d"]
LAUNCHER += ["--rdzv-endpoint", "localhost:0"]
ON_CUDA = {"GRAPHPLAN_RANKS": "cuda", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
SIGNALLED = tuple(f"sigterm to {rank} in step {step}" for rank in (0, 1) for step in (2, 5, 20))
SCARCE = ("no room for a check", "no room to check again")
EPOCHS = EPOCHS_ON["cudagraph"]
FULL = EPOCHS * 150 // BATCH - 14
"""Replays on each rank: DDP wants eleven warm-up steps on CUDA."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All rows in one process group."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    rows = ["plain", "clipped", "accumulated", "evaluated", *SHARDED, *SCARCE, "wrong on one", "one rank cannot"]
    rows += ["sigterm", "busy", "resumed", "fsdp resumed", "no_sync", "ragged", "other shapes on one", "one is slow"]
    rows += ["bert", *SIGNALLED]
    return run_ranks(folder, rows, 2, LAUNCHER, **ON_CUDA)


@pytest.mark.parametrize("row", ["plain", "clipped", "evaluated", "one is slow", "bert"])
def test_a_fit_is_the_same_on_every_rank(ranks: list[dict[str, Any]], row: str) -> None:
    """Forward, backward, all-reduce, clip and optimizer in one graph."""
    for found in ranks:
        assert found[row]["replayed"] >= FULL - 4, found[row]["report"]
        assert found[row]["verified"] >= 3, found[row]["report"]


@pytest.mark.parametrize("row", SHARDED)
def test_a_sharded_fit_is_the_same_on_every_rank(ranks: list[dict[str, Any]], row: str) -> None:
    """All-gathers and reduce-scatters in the graph."""
    for found in ranks:
        assert (found[row]["captured"], found[row]["replayed"]) == (1, 34), found[row]["report"]


def test_accumulated_gradients_are_the_same_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    """A batch that is not stepped on communicates nothing."""
    for found in ranks:
        assert found["accumulated"]["captured"] == 2, found["accumulated"]["report"]


@pytest.mark.parametrize("row", SCARCE)
def test_ranks_end_a_check_together(ranks: list[dict[str, Any]], row: str) -> None:
    """As many replays on each, whose collectives would meet others otherwise."""
    for found in ranks:
        assert "not checked against eager" in found[row]["report"]
        assert found[row]["verified"] == 0
        assert found[row]["replayed"] >= FULL - 4


def test_a_program_that_is_wrong_on_one_rank_is_given_up_by_all(ranks: list[dict[str, Any]]) -> None:
    """By the others with their next check."""
    assert [found["wrong on one"]["replayed"] for found in ranks] == [1, 0]
    assert "rank 1 cannot capture this step, so no rank does: replay 1 of" in ranks[0]["wrong on one"]["report"]


def test_one_rank_that_cannot_keeps_all_eager(ranks: list[dict[str, Any]]) -> None:
    """And says why."""
    assert [found["one rank cannot"]["replayed"] for found in ranks] == [0, 0]
    assert "rank 1 cannot capture this step, so no rank does" in ranks[0]["one rank cannot"]["report"]


def test_a_sigterm_ends_every_rank_before_the_same_step(ranks: list[dict[str, Any]]) -> None:
    """Without a synchronisation in every step."""
    ended = [found["sigterm"]["ended"] for found in ranks]
    assert ended[0] == ended[1]
    assert 5 < ended[0] <= 5 + 16


def test_ranks_whose_devices_are_busy_wait_together(ranks: list[dict[str, Any]]) -> None:
    """A program could not gain anything."""
    waits = [found["busy"]["waits"] for found in ranks]
    assert waits[0] == waits[1] >= EPOCHS * 150 // BATCH - 14, ranks[0]["busy"]["report"]
    assert [found["busy"]["captured"] for found in ranks] == [0, 0]


@pytest.mark.parametrize("row", ["resumed", "fsdp resumed"])
def test_a_fit_goes_on_from_a_checkpoint(ranks: list[dict[str, Any]], row: str) -> None:
    """From that of an eager fit and from that of one with the callback alike; half of a fit is short."""
    for found in ranks:
        assert min(found[row]["replayed"]) >= 1


def test_gradients_that_a_loop_accumulates_without_synchronisation(ranks: list[dict[str, Any]]) -> None:
    """DDP's eleven warm-up steps, two traces, the capture."""
    for found in ranks:
        assert found["no_sync"]["replayed"] >= 10, found["no_sync"]["report"]


def test_shapes_that_are_not_all_the_same(ranks: list[dict[str, Any]]) -> None:
    """A sampler's ragged ends, and smaller batches on one rank: equal to eager, and nobody hangs."""
    for found in ranks:
        assert found["ragged"]["steps"] == 24, found["ragged"]["report"]
        assert found["other shapes on one"]["replayed"] >= 5, found["other shapes on one"]["report"]


@pytest.mark.parametrize("row", SIGNALLED)
def test_a_sigterm_to_one_rank_ends_every_rank(ranks: list[dict[str, Any]], row: str) -> None:
    """Before the same step, in warm-up as among replays, and all say why."""
    words = row.split()
    rank, step = int(words[2]), int(words[-1])
    for found in ranks:
        assert found[row]["ended"] == ranks[0][row]["ended"]
        assert step < found[row]["ended"] <= step + 16
        assert found[row]["said"] == [f"rank {rank} got a SIGTERM: every rank ends before step {found[row]['ended']}"]


def test_a_program_with_collectives_keeps_no_process_that_fails(tmp_path: Path) -> None:
    """NCCL waits for it, and the traceback holds it; what a row may take has not passed when the ranks have ended."""
    with pytest.raises(AssertionError, match=r"ArithmeticError: of the user's own") as caught:
        run_ranks(tmp_path, ["plain", "fails"], 2, LAUNCHER, **ON_CUDA)
    assert "Timeout" not in str(caught.value)
