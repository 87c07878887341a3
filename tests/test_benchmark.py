"""The benchmark runs, writes what it promises, and survives a contender that fails. No time is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes import benchmark
from recipes.tables import COLUMNS

ROOT = Path(__file__).resolve().parents[1]
MEASURED = {"workload", "contender", "implementation", "us", "us_of_repeats", "speedup", "ratio_to_floor", "torch"}
WARMUP, STEPS = 30, 3


def run(path: Path, contenders: str, status: int) -> tuple[dict[str, Any], str]:
    """Run a tiny benchmark in a new process; return its JSON and what it printed."""
    command = [sys.executable, "-m", "recipes.benchmark", "--cpu", "--workloads", "mlp2", "--contenders", contenders]
    command += ["--steps", str(STEPS), "--repeats", "1", "--threads", "1", "--json", str(path / "out" / "result.json")]
    command += ["--markdown", str(path / "result.md")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == status, done.stderr + done.stdout
    return json.loads((path / "out" / "result.json").read_text()), done.stdout


def test_result_of_the_loops(tmp_path: Path) -> None:
    """Eager and graphed blocks are interleaved in one process; the floor fails on a CPU and becomes a row."""
    result, printed = run(tmp_path, "eager,graph_step,floor", status=1)
    eager, graphed, floor = sorted(result["rows"], key=lambda row: "eager graph_step floor".index(row["contender"]))
    assert {"command", "date", "torch", "device", "python", "steps", "repeats", "bars", "rows"} <= set(result)
    assert result["device"] == "cpu" and "--workloads mlp2" in result["command"]
    for row in (eager, graphed):
        assert set(row) >= MEASURED
        assert row["us"] > 0 and len(row["us_of_repeats"]) == 1
    assert eager["speedup"] == 1
    assert (graphed["eager"], graphed["traced"], graphed["captured"]) == (3, 2, 1)
    assert graphed["replayed"] == WARMUP + STEPS - 6
    assert {"trace", "capture", "steady"} <= set(graphed["phases"])
    assert "needs a CUDA device" in floor["error"] and "us" not in floor
    (bar,) = result["bars"]
    assert bar["workload"] == "mlp2" and bar["least"] == 1.5 and bar["speedup"] == graphed["speedup"]
    assert "eager loop" in printed and "needs a CUDA device" in printed and printed.isascii()
    lines = (tmp_path / "result.md").read_text().splitlines()
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == list(COLUMNS)
    assert len(lines) == 2 + 3


def test_result_of_the_callback(tmp_path: Path) -> None:
    """A bare Trainer trains the same weights with the callback, and its batches are replayed."""
    pytest.importorskip("lightning")
    result, _ = run(tmp_path, "trainer,trainer_callback", status=0)
    trainer, callback = result["rows"]
    assert (trainer["contender"], callback["contender"]) == ("trainer", "trainer_callback")
    assert trainer["weights"] == callback["weights"]
    calls = sum(callback[name] for name in ("eager", "traced", "captured", "replayed"))
    assert calls == WARMUP + STEPS + 1 and callback["captured"] == 1
    assert result["bars"] == []


def test_unknown_names_are_refused() -> None:
    """A misspelt workload is an error that lists the known ones, before anything is measured."""
    with pytest.raises(SystemExit, match=r"no workload is called mpl; choose from: mlp2, transformer4"):
        benchmark.main(["--cpu", "--workloads", "mpl"])
    with pytest.raises(SystemExit, match=r"no contender is called fast; choose from: eager, floor"):
        benchmark.main(["--cpu", "--contenders", "fast"])
