"""``python -m recipes.benchmarks.idioms``: each idiom is replayed, and leaves what it leaves without the callback."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from recipes.benchmarks import idioms


@pytest.mark.filterwarnings("ignore")
def test_every_idiom_is_replayed_and_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "idioms.json"
    monkeypatch.setattr(sys, "argv", ["idioms", "--batches", "80", "--warm", "30", "--json", str(file)])
    idioms.main()
    rows = json.loads(file.read_text())["rows"]
    assert [row["idiom"] for row in rows] == [kind.__name__ for kind in idioms.IDIOMS]
    assert all(row["equal"] for row in rows), rows
    # On the CPU an array lies where its tensor does: to wait for it, as for a copy, would show other values.
    refused = [] if torch.cuda.is_available() else ["KeepsCopies"]
    assert [row["idiom"] for row in rows if row["replayed"] <= 0.5] == refused
