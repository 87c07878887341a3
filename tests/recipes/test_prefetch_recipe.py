"""``python -m recipes.benchmarks.prefetch``: the command on the tape, and its verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

from recipes.benchmarks import prefetch


def test_the_command_on_the_tape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prefetch.json"
    prefetch.main(["--cpu", "--steps", "3", "--depths", "1", "--json", str(path)])
    (row,) = json.loads(path.read_text())["rows"]
    assert row["loss_difference"] == 0
    assert row["trainer_prefetch_ms"] > 0
    assert "ms per step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([(3.0, 0.5, 0.99)], "no depth computes about as long as it copies"),
        ([(3.0, 1.0, 0.99), (3.0, 2.8, 0.6), (3.0, 5.9, 0.95)], "prefetching pays: 0.60 of the time at depth 2"),
        ([(3.0, 3.5, 0.97)], "prefetching does not pay: 0.97 of the time at depth 1"),
    ],
)
def test_the_verdict(rows: list[tuple[float, float, float]], text: str) -> None:
    """Of the depth whose copy and computation are most alike."""
    measured: list[dict[str, Any]] = [
        {"depth": depth, "copy_ms": copy, "compute_ms": compute, "ratio": ratio}
        for depth, (copy, compute, ratio) in enumerate(rows, 1)
    ]
    assert prefetch.verdict(measured).startswith(text)
