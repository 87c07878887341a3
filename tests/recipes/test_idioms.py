"""``python -m recipes.benchmarks.idioms``: each idiom is replayed, and leaves what it leaves without the callback."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from recipes.benchmarks import idioms


@pytest.mark.filterwarnings("ignore")
def test_every_idiom_is_replayed_and_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "idioms.json"
    monkeypatch.setattr(sys, "argv", ["idioms", "--batches", "80", "--warm", "30", "--json", str(file)])
    idioms.main()
    rows = json.loads(file.read_text())["rows"]
    assert [row["idiom"] for row in rows] == [kind.__name__ for kind in idioms.IDIOMS]
    assert all(row["equal"] for row in rows), rows
    assert all(row["replayed"] > 0.5 for row in rows), rows
