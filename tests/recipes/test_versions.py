"""``make matrix``: what becomes of a combination, and that the table in the repository is that of its result."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.benchmarks import versions
from recipes.benchmarks.versions import (
    COLUMNS,
    COMBINATIONS,
    NEWEST,
    RESULT,
    Combination,
    NotRunError,
    _called,
    _chosen,
    cells,
    main,
    run,
    write,
)

ROOT = Path(__file__).parents[2]
HERE = Combination(f"{sys.version_info[0]}.{sys.version_info[1]}", NEWEST, NEWEST)
TESTS = """
import pytest
def test_right(): pass
def test_wrong(): assert False
def test_left_out(): pytest.skip("no reason")
"""


def _silent(stage: str, percent: float) -> None:
    """Nobody looks at the progress."""


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This environment in place of a new one, and files in a folder of the test's."""

    def install(one: Combination, folder: Path, pip: Any) -> Path:
        folder.mkdir(parents=True)
        return Path(sys.executable)

    monkeypatch.setattr(versions, "_install", install)
    monkeypatch.setattr(versions, "FOLDER", tmp_path / "matrix")
    monkeypatch.setenv("CXX", "false")


@pytest.mark.usefixtures("_installed")
@pytest.mark.soak
def test_a_combination_is_run(tmp_path: Path) -> None:
    """Counts, names of what failed, and what was found installed."""
    file = tmp_path / "test_three.py"
    file.write_text(TESTS)
    stages: list[str] = []
    row = run(HERE, [str(file)], (), lambda stage, percent: stages.append(stage))
    assert (row["passed"], row["skipped"]) == (1, 1)
    assert [name.rpartition("::")[2] for name in row["failed"]] == ["test_wrong"]
    assert row["found"]["guards"] is False
    assert row["found"]["loop"] is True
    assert list(dict.fromkeys(stages)) == ["installs", "builds the guards", "tests"]
    assert not (tmp_path / "matrix" / HERE.name).exists()
    write([row], tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text())["rows"] == [row]
    assert "| loop seam | Python | 1 | 1 | 1 | " in (tmp_path / "result.md").read_text()


@pytest.mark.usefixtures("_installed")
@pytest.mark.soak
def test_tests_that_cannot_be_run() -> None:
    assert re.search(r"^pytest: .*no tests ran", run(HERE, ["tests/no_such_test.py"], (), _silent)["reason"], re.DOTALL)


def test_a_python_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    row = run(HERE._replace(python="2.9"), [], (), _silent)
    assert row["reason"] == "no python2.9 with venv and ensurepip on the PATH"
    assert cells(row)[-1] == f"not run: {row['reason']}"


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("a word\\nERROR: no torch==0.0.7 (from versions: 1, 2)\\nERROR: in short", "ERROR: no torch==0.0.7"),
        ("ERROR: no\\n  asked for\\n  asked for (constraint) 1", "ERROR: no asked for (constraint) 1"),
        ("a word", "a word"),
        ("", "no word"),
    ],
)
def test_a_release_that_is_not_there(printed: str, reason: str) -> None:
    """The row has pip's first error, or whatever it said last."""
    command = [sys.executable, "-c", f"print('{printed}'); raise SystemExit(1)"]
    with pytest.raises(NotRunError, match=rf"^pip install: {re.escape(reason)}$"):
        _called(command, {}, "pip install")


def test_names_of_combinations(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--list", "--only", "torch2.8.0", "lightning2.2", "--tests", "tests"])
    assert capsys.readouterr().out.split() == ["python3.10-torch2.8.0-lightning2.2.5"]
    with pytest.raises(SystemExit):
        main(["--only", "torch0", "--tests", "tests"])
    assert "no combination has ['torch0'] in its name" in capsys.readouterr().err


def test_what_needs_no_lightning_is_run_once() -> None:
    none, first, *_ = COMBINATIONS
    tests = ["tests/plan", "tests/lightning/test_callback.py"]
    assert (_chosen(none, tests), _chosen(first, tests)) == (tests[:1], tests[1:])
    assert _chosen(Combination("3.10", "2.8.0", "2.2.5"), tests) == _chosen(HERE._replace(torch="0"), tests) == tests


def test_old_releases_get_what_they_import() -> None:
    assert "setuptools<81" in Combination("3.10", "2.8.0", "2.3.3").requirements
    assert "setuptools<81" not in Combination("3.10", "2.8.0", "2.4.0").requirements
    assert not any("lightning" in name for name in Combination("3.10", "2.8.0", "").requirements)


def test_the_table_is_that_of_the_result(tmp_path: Path) -> None:
    """Every combination has a row: what was run, or why it was not."""
    rows = json.loads(RESULT.read_text())["rows"]
    write(rows, tmp_path / "matrix.json")
    assert (tmp_path / "matrix.md").read_text() == RESULT.with_suffix(".md").read_text()
    assert {Combination(row["python"], row["torch"], row["lightning"]) for row in rows} >= set(COMBINATIONS)
    assert all(len(cells(row)) == len(COLUMNS) for row in rows)


def test_the_lowest_bounds_were_run() -> None:
    """Nothing failed in any row that was run, and the lower bounds of the project are among them."""
    project = (ROOT / "pyproject.toml").read_text()
    found = [row for row in json.loads(RESULT.read_text())["rows"] if "passed" in row]
    assert [row["failed"] for row in found] == [[]] * len(found)
    for key, bound in {
        "torch": re.findall(r'"torch>=([\d.]+)"', project),
        "lightning": re.findall(r'"lightning>=([\d.]+)"', project),
        "python": re.findall(r'requires-python = ">=([\d.]+)"', project),
    }.items():
        run = {
            ".".join((row["python"] if key == "python" else row["found"].get(key, "")).split(".")[:2]) for row in found
        }
        assert bound and bound[0] in run, f"{key}>={bound}: {sorted(run)}"
