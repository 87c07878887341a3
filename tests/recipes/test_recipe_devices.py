"""Recipes that measure GPUs, on a machine that has too few of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

from recipes.benchmarks import __main__ as benchmark
from recipes.benchmarks import decode, memory, prefetch, two_devices
from tests.lightning import matrix

MAINS: dict[str, tuple[Callable[[Sequence[str]], object], int]] = {
    "benchmark": (benchmark.main, 1),
    "decode": (decode.main, 1),
    "memory": (memory.main, 1),
    "prefetch": (prefetch.main, 1),
    "two_devices": (two_devices.main, 2),
}


@pytest.mark.parametrize("name", MAINS)
def test_a_recipe_without_its_gpus_says_what_to_do(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence, exit status 2, and no file that would look like a result."""
    main, count = MAINS[name]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count - 1)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["--json", str(tmp_path / "new" / "figures.json")])
    told = capsys.readouterr().err
    expected = rf"this measures {count} CUDA devices?, and torch \S+ finds {count - 1}: --cpu runs the same on the tape"
    assert re.search(expected, told)
    assert not list(tmp_path.iterdir())


def test_a_benchmark_that_only_merges_needs_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of an earlier run are shown where they were not measured."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    earlier = Path(benchmark.__file__).parents[1] / "results" / "h200.json"
    assert benchmark.main(["--merge", str(earlier), "--workloads", "mlp", "--contenders", "floor,graph_step"]) == 0
    assert "graph_step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot be read as JSON: .*No such file"),
        ("{", "cannot be read as JSON: Expecting property name"),
        ('{"runs": []}', "expected what --json has written, found no rows of workloads and contenders"),
        ('{"rows": [{"guards": 3}]}', "expected what --json has written, found no rows of workloads and contenders"),
        ('{"rows": [1]}', "expected what --json has written, found no rows of workloads and contenders"),
        ("[1]", "expected what --json has written, found no rows of workloads and contenders"),
    ],
)
def test_what_is_merged_must_be_a_result(tmp_path: Path, text: str | None, told: str) -> None:
    """Before anything is measured."""
    path = tmp_path / "earlier.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match=f"--merge {re.escape(str(path))}: {told}"):
        benchmark.main(["--cpu", "--merge", str(path)])


def test_the_matrix_names_its_groups() -> None:
    """A part that no row has is no empty table with status 0."""
    with pytest.raises(SystemExit, match="no row has '--cpu' in its name; the names begin with: step, logs, batch"):
        matrix.main("--cpu")
