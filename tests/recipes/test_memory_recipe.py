"""``python -m recipes.benchmarks.memory``: its figures on the tape, and the bars that it holds them to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.benchmarks import memory

MIB = 2**20
ROW: dict[str, Any] = {
    "workload": "gpt", "eager": 600 * MIB, "program": 650 * MIB, "at_most": 900 * MIB, "static": MIB,
    "estimate": 450 * MIB, "took": 452 * MIB, "checked": 660 * MIB, "budget": 660 * MIB, "shared": 1.2,
    "checked_most": 770 * MIB, "timed_most": 760 * MIB, "gradient_sets": 1.1, "update_result": "cudaSuccess",
}  # fmt: skip


@pytest.mark.soak
def test_one_workload_on_the_tape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command itself, in a process of its own."""
    path = tmp_path / "memory.json"
    assert memory.main(["--cpu", "--workloads", "mlp", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["eager"] is None
    assert row["replayed"] > 0
    assert row["estimate"] == pytest.approx(row["took"], rel=0.1)
    # On the tape programs share nothing.
    assert row["shared"] > 2
    assert memory.bars(row) == []
    assert "shared" in capsys.readouterr().out


def test_a_child_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(memory.sys, "executable", "/bin/false")
    assert memory.main(["--cpu", "--workloads", "mlp"]) == 1
    assert capsys.readouterr().err.startswith("mlp:")


def test_figures_are_held_to_bars(capsys: pytest.CaptureFixture[str]) -> None:
    assert [bar["met"] for bar in memory.bars(ROW)] == [True] * 5
    bad = {**ROW, "program": 900 * MIB, "shared": 1.4, "gradient_sets": 2.0}
    bad["checked_most"] = bad["timed_most"] = 800 * MIB
    assert [bar["met"] for bar in memory.bars(bad)] == [False] * 5
    memory.show([ROW, {**bad, "gradient_sets": None}])
    said = capsys.readouterr().out
    assert "gpt: program / (eager + static): 1.08, at most 1.15: met" in said
    assert "update_result: cudaSuccess" in said
