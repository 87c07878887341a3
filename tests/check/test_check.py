"""``graphplan check``: all blockers at once, each with its line; exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from graphplan import check_step
from graphplan.check import fit
from graphplan.check.command import environment, load, main
from tests.check import subjects

HERE = "tests.check.subjects"
FILE = str(Path(subjects.__file__))


def line_of(comment: str) -> str:
    """``file:line`` of the line in the subjects that ends with a comment."""
    lines = Path(FILE).read_text(encoding="utf-8").splitlines()
    return f"subjects.py:{next(number for number, line in enumerate(lines, 1) if line.endswith(comment))}"


def test_all_blockers_are_listed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["check", f"{HERE}:Bad", "--data", f"{HERE}:Data", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert status == 1
    assert result["replayed"].startswith("nothing would be replayed")
    places = ["first", "second", "third"]
    for place in places:
        assert sum(line_of(f"line of the {place}") in text for text in result["blockers"]) == 1, place
    assert sum(line_of("and of a changed attribute") in text for text in result["blockers"]) == 1
    assert sum("model.seen" in text for text in result["blockers"]) == 1
    assert len(result["blockers"]) == 5
    assert result["plan"]["launches"] > 10


def test_a_module_that_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{FILE}:Good(width=8)", "--data", f"{FILE}:Data(rows=32)"]) == 0
    out = capsys.readouterr().out
    assert "each step would be one replay" in out
    assert "0 blockers" in out


@pytest.mark.parametrize(
    "arguments",
    [
        [f"{HERE}:Own"],
        [f"{HERE}:Good", "--data", f"{HERE}:loader"],
        [f"{HERE}:Good", "--data", f"{HERE}:batches"],
        [f"{HERE}:Good", "--batch", "(torch.randn(4, 8),)"],
        [f"{HERE}:model", "--batch", "torch.randn(2, 4)"],
    ],
    ids=["own loader", "loader", "batches", "batch", "callable"],
)
def test_ways_to_name_data(arguments: list[str]) -> None:
    assert main(["check", *arguments]) == 0


def test_what_replays_leave_out_is_no_blocker(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{HERE}:step", "--batch", "(torch.randn(3, 4),)"]) == 0
    assert "warning: the step prints at subjects.py" in capsys.readouterr().out


def test_a_copy_to_the_host_that_does_nothing_on_the_host() -> None:
    """CUDA's rules: ``.to("cpu")`` is a copy there, ``.to(x.device)`` is none anywhere."""
    result = check_step(subjects.moves, [(torch.randn(2, 4),)])
    assert len(result.blockers) == 1
    assert "uses its values at subjects.py" in result.blockers[0]
    assert result.replayed == "replayed on the CPU, and not on a CUDA device"
    assert "to" not in vars(torch.Tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.randn(8).to(x.device),
        lambda x: torch.rand(8).type_as(x),
        lambda x: torch.arange(8.0).to(x.device),
        lambda x: torch.ones(8, device=x.device).to(torch.float64).to(x.dtype),
    ],
    ids=["randn", "rand as", "arange", "to dtype"],
)
def test_a_copy_of_host_memory_that_does_nothing_on_the_host(make: Callable[[Tensor], Tensor]) -> None:
    """Is no blocker: on a device, it is made again before each replay. All is as before afterwards."""
    before = [torch.arange, torch.tensor, Tensor.to, Tensor.cpu]
    result = check_step(lambda x: (x * make(x)).sum(), [(torch.randn(8),)])
    assert not result.blockers, result.text()
    assert [torch.arange, torch.tensor, Tensor.to, Tensor.cpu] == before


@pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="this torch multiplies no groups")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_operators_read_of_a_device(dtype: torch.dtype) -> None:
    """They are found on the CPU, where the tape repeats such reads."""
    ends, weight = torch.tensor([8, 16], dtype=torch.int32), torch.randn(2, 16, 16, dtype=dtype)
    result = check_step(lambda x: functional.grouped_mm(x, weight, offs=ends), [(torch.randn(16, 16, dtype=dtype),)])
    found = [blocker for blocker in result.blockers if "_grouped_mm.default reads the sizes of its groups" in blocker]
    assert bool(found) == (dtype == torch.float32), result.text()


def test_a_part_that_is_replayed() -> None:
    result = fit.check_fit(subjects.OptimizerOnly, subjects.Data)
    assert len(result.blockers) == 1
    assert result.replayed == "nothing would be replayed"
    result = fit.check_fit(subjects.HostOptimizer, subjects.Data)
    assert result.replayed.startswith("a part of each step would be replayed (")
    assert "optimizer" in result.replayed


def test_a_fit_that_is_refused_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first step, so that no step was counted."""
    monkeypatch.setattr("graphplan.callback.callback.training_obstacle", lambda *args, **options: "a reason")
    result = fit.check_fit(subjects.Good, subjects.Data)
    assert result.blockers == ("no step of this fit can be captured: a reason",)
    assert result.replayed == "nothing would be replayed"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "expected a module and an expression in it"),
        (["nowhere:Module"], "which cannot be imported: No module named 'nowhere'"),
        (["nowhere.py:Module"], "which cannot be imported"),
        ([f"{HERE}:Missing"], "'Missing' cannot be evaluated in"),
        ([f"{HERE}:Good"], "data is NoneType; expected a LightningDataModule, a DataLoader"),
        ([f"{HERE}:FILE_OF_A_STEP"], "cannot be evaluated"),
        ([f"{HERE}:HERE if False else 3"], "is a int; expected a LightningModule, or a step to call"),
        ([f"{HERE}:step"], "is a step and needs its arguments: pass --batch"),
        ([f"{HERE}:step", "--batch", "torch.nothing"], "which cannot be evaluated: AttributeError"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_calls(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_step_without_calls() -> None:
    with pytest.raises(ValueError, match="calls is empty; expected the arguments of one call at least"):
        check_step(subjects.step, [])


def test_a_target_is_made_anew_each_time() -> None:
    make = load(f"{HERE}:Good", what="the target")
    assert make() is not make()


@pytest.mark.parametrize("loaded", [object, None])
def test_in_what_the_guards_of_this_process_run(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphplan.check.command.Tensors", loaded)
    monkeypatch.setattr("graphplan.compare.building.state", lambda: "in Python")
    assert environment()["guards"] == ("in Python" if loaded is None else "in C++")


def test_the_command_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "graphplan", "env"], capture_output=True, text=True, timeout=120, check=True
    )
    assert f"torch: {torch.__version__}" in done.stdout
    assert "guards: in " in done.stdout
