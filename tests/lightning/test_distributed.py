"""Two processes over gloo: the fit with the callback is the fit without it on every rank, collectives included."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.ranks import BATCH, EPOCHS_ON, ROWS
from tests.sharded import CALLS
from tests.twins import BEFORE_REPLAY

REPOSITORY = Path(__file__).parents[2]
FULL = EPOCHS_ON["tape"] * 150 // BATCH - 6
"""Replays on each rank without anything in between."""
SIGNALLED = [(rank, step) for rank in (0, 1) for step in (2, 5, 20) if (rank + step) % 2 == 0 or step == 5]
LEFT_OUT = {"fails", "busy", "fsdp replicated"}
LEFT_OUT |= {f"sigterm to {rank} in step {step}" for rank in (0, 1) for step in (2, 5, 20)} - {
    f"sigterm to {rank} in step {step}" for rank, step in SIGNALLED
}
"""What only a GPU shows, and what four ranks show."""
RARE = {
    "clipped", "fsdp clipped", "fsdp evaluated", "fsdp offloaded", "slower on one", "no room to check again", "bert",
    "fsdp resumed from one file", "sigterm to 0 in step 2", "sigterm to 1 in step 5",
}  # fmt: skip
"""What other rows come close to: left to ``make soak``."""


def cases(*rows: str) -> list[Any]:
    """Rows as parameters, the rare ones with the mark."""
    return [pytest.param(row, marks=pytest.mark.soak) if row in RARE else row for row in rows]


pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs torch's gloo")


def run_ranks(
    folder: Path, rows: list[str], count: int = 2, launcher: Sequence[str] = (), **environment_of_ranks: str
) -> list[dict[str, Any]]:
    """What the rows came to, by rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **environment_of_ranks}
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.lightning.ranks", str(folder), *rows],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    # The ranks' own errors first: what torch and the launcher print around them may fill pages.
    told = [f"{path.stem}:\n{path.read_text()}" for path in sorted(folder.glob("error of rank *"))]
    assert done.returncode == 0, "\n".join([*told, done.stderr[-6000:]])
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def run_forked(folder: Path, rows: list[str], count: int) -> list[dict[str, Any]]:
    """:func:`run_ranks` without a launcher, whose ranks would each import everything."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return run_ranks(folder, rows, count, WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Rows of two ranks in one process group."""
    return run_forked(tmp_path_factory.mktemp("ranks"), [row for row in ROWS if row not in LEFT_OUT | RARE], 2)


@pytest.fixture(scope="module")
def rare_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The others."""
    return run_forked(tmp_path_factory.mktemp("rare"), [row for row in ROWS if row in RARE], 2)


@pytest.fixture
def found_on(row: str, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What a row came to, by rank."""
    ranks: list[dict[str, Any]] = request.getfixturevalue("rare_ranks" if row in RARE else "ranks")
    return [found[row] for found in ranks]


@pytest.mark.parametrize("row", cases("plain", "clipped", "evaluated", "one is slow"))
def test_a_fit_is_the_same_on_every_rank(found_on: list[dict[str, Any]], row: str) -> None:
    """One program steps; what comes after a validation, where DDP sends no buffers, is one of its own."""
    for found in found_on:
        assert found["replayed"] >= FULL - 4, found["report"]
        assert found["verified"] >= 4, "checked in the same steps"
        assert "differs" not in found["report"]


def test_accumulated_gradients_are_the_same_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    """A batch that is not stepped on communicates nothing."""
    for found in ranks:
        assert found["accumulated"]["captured"] == 2, found["accumulated"]["report"]
        assert found["accumulated"]["replayed"] >= FULL // 3, found["accumulated"]["report"]


@pytest.mark.parametrize("row", cases("slower", "slower on one"))
def test_ranks_stand_down_together(found_on: list[dict[str, Any]], row: str) -> None:
    """Where replays pay on none of them, in the same step."""
    for found in found_on:
        assert found["captured"] >= 1, found["report"]
        assert ("graphplan removed itself: the rest of the fit ran without it" in found["report"]) is (row == "slower")
        assert ("µs per step eagerly and" in found["report"]) is (row == "slower")
    assert found_on[0]["replayed"] == found_on[1]["replayed"]


@pytest.mark.parametrize("row", cases("no room for a check", "no room to check again"))
def test_ranks_end_a_check_together(found_on: list[dict[str, Any]], row: str) -> None:
    """As many replays on each, whose collectives would meet others otherwise; later ones are not checked."""
    reasons = ["another rank has no room for a check", "no memory"]
    for found, reason in zip(found_on, reasons, strict=True):
        assert f"not checked against eager: {reason}" in found["report"]
        assert found["verified"] == 0
        assert found["replayed"] >= FULL - 4


def test_a_program_that_is_wrong_on_one_rank_is_given_up_by_all(ranks: list[dict[str, Any]]) -> None:
    """By the others with their next check."""
    first, second = (found["wrong on one"] for found in ranks)
    assert (first["replayed"], first["verified"]) == (1, 1), first["report"]
    assert (second["replayed"], second["verified"]) == (0, 0), second["report"]
    assert "rank 1 cannot capture this step, so no rank does: replay 1 of" in first["report"]
    assert "model.net.0.bias: made up" in second["report"]


@pytest.mark.parametrize("row", cases("evaluated", "fsdp evaluated"))
def test_evaluation_is_replayed_on_every_rank(found_on: list[dict[str, Any]], row: str) -> None:
    for found in found_on:
        assert found["evaluated"] >= 2, found["report"]


@pytest.mark.parametrize("row", cases("fsdp", "fsdp clipped", "fsdp evaluated", "fsdp mixed", "fsdp offloaded"))
def test_a_fit_under_fsdp_is_the_same_on_every_rank(found_on: list[dict[str, Any]], row: str) -> None:
    """All-gathers, reduce-scatters, clipping and optimizer are one program, whatever a validation left gathered."""
    for found in found_on:
        assert found["captured"] == 1, found["report"]
        assert found["replayed"] == FULL, found["report"]
        assert found["verified"] >= 4, "checked in the same steps"


def test_gradients_that_fsdp_accumulates_are_the_same_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    """Each batch reduces its gradients, and adds its part to this rank's shard."""
    for found in ranks:
        assert found["fsdp accumulated"]["captured"] == 2, found["fsdp accumulated"]["report"]
        assert found["fsdp accumulated"]["replayed"] >= FULL // 3, found["fsdp accumulated"]["report"]


@pytest.mark.parametrize(
    ("row", "replayed"),
    [("resumed", 3), ("fsdp resumed", 4), pytest.param("fsdp resumed from one file", 4, marks=pytest.mark.soak)],
)
def test_a_fit_goes_on_from_a_checkpoint(found_on: list[dict[str, Any]], row: str, replayed: int) -> None:
    """From that of an eager fit and from that of one with the callback alike."""
    for found in found_on:
        assert found["replayed"] == [replayed] * 3


@pytest.mark.soak
def test_replicas_of_shards_are_the_same_on_every_rank(tmp_path: Path) -> None:
    """HSDP on four ranks: sharded over two, twice."""
    for found in run_forked(tmp_path, ["fsdp replicated"], 4):
        assert found["fsdp replicated"]["captured"] == 1, found["fsdp replicated"]["report"]
        assert found["fsdp replicated"]["replayed"] >= 12, found["fsdp replicated"]["report"]
        assert found["fsdp replicated"]["verified"] >= 4, "checked in the same steps"


def test_a_loop_without_lightning_under_fsdp_is_the_same_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["fsdp loop"]["replayed"] == CALLS - BEFORE_REPLAY


@pytest.mark.parametrize("row", cases("bert", "llama"))
def test_models_of_a_library_are_the_same_on_every_rank(found_on: list[dict[str, Any]], row: str) -> None:
    """Dropout, padding masks and bfloat16; DDP and FSDP2."""
    pytest.importorskip("transformers")
    for found in found_on:
        assert found["captured"] == 1, found["report"]
        assert found["replayed"] >= FULL - 4, found["report"]
        assert found["verified"] >= 3, found["report"]


def test_ragged_ends_of_a_sampler_are_the_same_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    """Each epoch ends with a smaller batch on all ranks, which comes too seldom here to have a program."""
    for found in ranks:
        assert (found["ragged"]["captured"], found["ragged"]["replayed"]) == (1, 10), found["ragged"]["report"]


def test_a_rank_whose_batches_have_other_shapes(ranks: list[dict[str, Any]]) -> None:
    """Each rank replays what it can, and says that no replay was checked: checks are steps of all ranks."""
    for found in ranks:
        assert found["other shapes on one"]["replayed"] >= 20, found["other shapes on one"]["report"]
        assert "the ranks do not check the same steps" in found["other shapes on one"]["report"]
    assert ranks[1]["other shapes on one"]["captured"] == 2, ranks[1]["other shapes on one"]["report"]


def test_gradients_that_a_loop_accumulates_without_synchronisation(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["no_sync"]["replayed"] == 30 - BEFORE_REPLAY, found["no_sync"]["report"]


@pytest.mark.parametrize("row", cases(*(f"sigterm to {rank} in step {step}" for rank, step in SIGNALLED)))
def test_a_sigterm_to_one_rank_ends_every_rank(found_on: list[dict[str, Any]], row: str) -> None:
    """Before the same step, in warm-up as among replays, and all say why."""
    rank, step = int(row.split()[2]), int(row.split()[-1])
    for found in found_on:
        assert found["ended"] == found_on[0]["ended"]
        assert step < found["ended"] <= step + 16
        assert found["said"] == [f"rank {rank} got a SIGTERM: every rank ends before step {found['ended']}"]
        assert found["replayed"] >= 9


def test_tensor_parallelism_is_refused_by_name(ranks: list[dict[str, Any]]) -> None:
    text = (
        "the ModelParallelStrategy uses tensor parallelism, which graphplan does not capture: use "
        "tensor_parallel_size=1"
    )
    for found in ranks:
        assert found["tensor parallel"]["error"].startswith("NotCapturedError: ")
        assert text in found["tensor parallel"]["error"]


def test_one_rank_that_cannot_keeps_all_eager(ranks: list[dict[str, Any]]) -> None:
    """And says why, on each of them."""
    for found in ranks:
        assert found["one rank cannot"]["replayed"] == 0
        assert found["one rank cannot"]["captured"] == 0
        assert "self.seen = complex(loss.detach()).real" in found["one rank cannot"]["report"]
    assert "rank 1 cannot capture this step, so no rank does" in ranks[0]["one rank cannot"]["report"]


def test_one_rank_that_cannot_stops_all(ranks: list[dict[str, Any]]) -> None:
    """Where a refusal raises, it does so on every rank, and nobody is left waiting."""
    errors = [found["one rank cannot, and that raises"]["error"] for found in ranks]
    assert errors[1].startswith("HostSyncError: ")
    assert errors[0].startswith("PeerError: rank 1 cannot capture this step, so no rank does: ")
    assert "self.seen = complex(loss.detach()).real" in errors[0]


def test_a_sigterm_ends_every_rank_before_the_same_step(ranks: list[dict[str, Any]]) -> None:
    """Rank 0 got it when five steps were done; the ranks read of it some steps later."""
    ended = [found["sigterm"]["ended"] for found in ranks]
    assert ended[0] == ended[1]
    assert 5 < ended[0] <= 5 + 16
