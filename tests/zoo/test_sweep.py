"""``python -m recipes.zoo.sweep``: what becomes of an architecture."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("lightning")

from recipes.zoo import sweep


@pytest.mark.filterwarnings("ignore")
def test_each_outcome_has_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Replayed and equal, refused with the line, and skipped where there is no eager step."""
    file = tmp_path / "rows.json"
    sweep.main(["--only", "masked/mpnet", "causal/jetmoe", "s2s/bigbird_pegasus", "s2s/t5", "--json", str(file)])
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert (rows["masked/mpnet"]["is"], rows["masked/mpnet"]["replayed"]) == ("bitwise", sweep.STEPS - 5)
    assert rows["causal/jetmoe"]["is"] == "refused"
    assert re.search(r"modeling_jetmoe\.py:\d+", rows["causal/jetmoe"]["why"])
    assert rows["s2s/t5"]["is"] == "skipped"
    printed = capsys.readouterr().out
    assert "causal/jetmoe" in printed
    assert "s2s/t5" not in printed


def test_names_are_shared_out() -> None:
    names = sweep.names()
    assert {name.split("/")[0] for name in names} == set(sweep.TASKS)
    assert len(names) == len(set(names)) > 100
