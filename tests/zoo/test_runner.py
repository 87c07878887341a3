"""The zoo's clock, its comparisons, its table, and what it makes of entries that fail."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import GraphPlanCallback
from recipes.zoo import __main__ as command
from recipes.zoo.batches import IGNORED, padding, sentences
from recipes.zoo.clock import BLOCK, Feed, Turns
from recipes.zoo.measuring import compare, distance, measure, oracles_of
from recipes.zoo.registry import ENTRIES, Case, Entry, Scale, entry, load_entries
from recipes.zoo.table import cells, markdown, reason, summary
from recipes.zoo.training import Prepared, Run, answering_captured, fit

CPU = Scale(gpu=False)


def test_entries_are_declared_without_their_libraries() -> None:
    entries = load_entries()
    assert len(entries) >= 80
    assert all(name.partition("/")[0] and name.partition("/")[2] for name in entries)
    assert sum(each.core for each in entries.values()) >= 30
    with pytest.raises(ValueError, match=r"two entries are called 'science/mlp'"):
        entry("science/mlp")(lambda scale: Case(nn.Linear(1, 1), []))


def test_missing_libraries_are_named_as_pip_names_them() -> None:
    needs = ("torch", "no-such-library", "pip-name:no_such_module", "pip-name:torch")
    assert Entry("a/b", _linear, needs).missing == ["no-such-library", "pip-name"]


def test_batches_have_true_padding_and_no_loss_of_it() -> None:
    torch.manual_seed(0)
    mask = padding(6, 10)
    assert mask.sum(1).max() == 10
    assert (mask.sum(1) < 10).any()
    batch = sentences(CPU, "next")
    assert (batch["labels"][batch["attention_mask"] == 0] == IGNORED).all()


def test_the_clock_counts_blocks_and_the_share_of_replays() -> None:
    replays = iter([0] * 6 + [1] * 100)
    feed = Feed(list(range(4)), 12, 2 * BLOCK, gpu=False, turns=Turns(None), replays=lambda: next(replays))
    given = list(feed)
    assert len(given) == len(feed) == 12 + 2 * BLOCK + 1
    assert given[:5] == [0, 1, 2, 3, 0]
    facts = feed.facts()
    assert len(feed.marks) == 3
    assert facts["first_replay_step"] == 6
    assert facts["share"] == 0


def test_nothing_is_timed_without_timed_steps() -> None:
    feed = Feed([[torch.ones(1)]], 3, 0, gpu=False, turns=Turns(None))
    given = list(feed)
    assert len(given) == 4
    assert given[0] is not given[1]
    assert given[0][0] is given[1][0]
    assert feed.facts() == {}
    named = Feed([{"x": torch.ones(1), "name": ["a", "b"]}], 2, 0, gpu=False, turns=Turns(None))
    assert [batch["name"] for batch in named] == [["0/a", "0/b"], ["1/a", "1/b"], ["2/a", "2/b"]]


def test_whoever_is_timed_is_alone(tmp_path: Path) -> None:
    turns, inside, order = Turns(tmp_path), threading.Event(), []

    def share() -> None:
        inside.wait()
        with turns.taken(alone=False):
            order.append("shared")

    other = threading.Thread(target=share)
    other.start()
    with turns.taken(alone=True):
        inside.set()
        other.join(0.2)
        order.append("alone")
    other.join()
    assert order == ["alone", "shared"]
    with turns.taken(alone=False), turns.taken(alone=False):
        pass


def test_enrolled_processes_wait_while_one_is_timed(tmp_path: Path) -> None:
    turns = Turns(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as other:
        turns.enroll(other.pid)
        turns.enroll(os.getpid())
        with turns.taken(alone=True):
            assert os.WIFSTOPPED(os.waitpid(other.pid, os.WUNTRACED)[1])
        assert os.WIFCONTINUED(os.waitpid(other.pid, os.WCONTINUED)[1])
        other.kill()
    turns.dismiss(other.pid)
    with turns.taken(alone=True):
        pass


def test_a_loop_that_an_error_ended_holds_nothing(tmp_path: Path) -> None:
    turns = Turns(tmp_path)
    given = iter(Feed([0], 3, 0, gpu=False, turns=turns))
    assert isinstance(given, Generator)
    next(given)
    turns.drop()
    with turns.taken(alone=True):
        given.close()


def test_a_run_is_held_to_eager_ones() -> None:
    one, near, far = ({"w": torch.tensor([1.0, value])} for value in (1.0, 1.0 + 1e-6, 2.0))
    assert compare(one, [("first", lambda: near), ("second", lambda: one)]) == {"equal": "bitwise", "oracle": "second"}
    found = compare({"w": torch.tensor([1.0, 1.0 + 2e-6])}, [("first", lambda: near), ("second", lambda: one)])
    assert found["equal"] == "within spread"
    found = compare(far, [("first", lambda: near), ("second", lambda: one)])
    assert (found["equal"], found["tensor"]) == ("different", "w")


def test_distances_of_what_cannot_be_subtracted() -> None:
    one = {"w": torch.tensor([float("nan"), 1.0])}
    assert distance(one, {"w": one["w"].clone()}) == (0.0, "")
    assert distance(one, {"w": torch.tensor([0.5, 1.0])})[0] == float("inf")
    assert distance(one, {"v": one["w"]})[1] == "only one run has ['v', 'w']"
    assert "against (1,)" in distance(one, {"w": torch.ones(1)})[1]


def test_code_that_asks_hears_that_it_is_captured() -> None:
    own = torch.cuda.is_current_stream_capturing
    with answering_captured():
        assert torch.cuda.is_current_stream_capturing()
    assert torch.cuda.is_current_stream_capturing is own


def _linear(scale: Scale) -> Case:
    return Case(nn.Linear(2, 1), [torch.ones(4, 2)], _mean)


def _mean(model: Any, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).mean()
    return found


def _run(make: Callable[[Scale], Case]) -> Run:
    return Run(Entry("test/entry", make), gpu=False, warm=8, steps=BLOCK, turns=Turns(None))


def test_a_row_is_written_after_each_stage(tmp_path: Path) -> None:
    predict = lambda model, batch: model(batch)  # noqa: E731
    measure(_run(lambda scale: replace(_linear(scale), predict=predict)), tmp_path / "row.json")
    row = json.loads((tmp_path / "row.json").read_text())
    assert row["fit"]["equal"] == row["loop"]["equal"] == row["service"]["equal"] == "bitwise"
    assert row["fit"]["share"] == row["loop"]["share"] == row["service"]["share"] == 1
    assert "error" not in row
    assert "at" not in row


def _mlp(scale: Scale) -> Case:
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 8))
    return Case(model, [torch.randn(4, 16) for _ in range(4)], lambda model, batch: model(batch).square().mean())


def _reading(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss * len(torch.unique(loss.detach()))


@pytest.mark.parametrize("loss", [None, _reading], ids=["replayed", "refused"])
@pytest.mark.filterwarnings("ignore:graphplan runs this step eagerly")
def test_a_fit_whose_first_steps_are_timed_has_an_eager_run_of_equal_bits(loss: Any) -> None:
    """The optimizer's stock kernels run in the steps that are timed and after a refusal, the prepared ones between."""
    run = replace(_run(lambda scale: replace(_mlp(scale), **{"loss": loss} if loss else {})), warm=60, steps=0)
    row, found = fit(run, GraphPlanCallback(min_speedup=1e-6, on_failure="eager"))
    assert (row["counts"]["replayed"] > 0) == (loss is None)
    steps = range(*row["managed_steps"])
    assert steps[0] >= 5
    (name, make), *_ = oracles_of(run, {}, lambda untimed, prepared: fit(untimed, prepared)[1], steps=steps)
    assert compare(found, [(name, make)]) == {"equal": "bitwise", "oracle": "prepared"}
    assert all(distance(found, fit(run, *others)[1])[0] > 0 for others in [(), (Prepared(),)])


def test_turns_time_fits_and_count_their_calls(tmp_path: Path) -> None:
    def loss(model: Any, batch: Tensor) -> Tensor:
        found = _mean(model, batch)
        return found * 2 if complex(found.detach()).real > 1e9 else found

    run = replace(_run(lambda scale: replace(_linear(scale), loss=loss)), warm=60, stages=("turns",))
    measure(run, tmp_path / "row.json")
    row = json.loads((tmp_path / "row.json").read_text())["turns"]
    assert row["share"] == 0
    assert 100 < row["calls"] < 1.005 * row["eager_calls"]
    assert len(row["runs_us"]) == len(row["eager_runs_us"])


def test_an_error_in_one_stage_leaves_the_others(tmp_path: Path) -> None:
    def loss(model: Any, batch: Tensor) -> Tensor:
        if isinstance(model, nn.Linear) and not model.in_features:
            raise ZeroDivisionError("as the test wants it")
        return _mean(model, batch)

    def predict(model: Any, batch: Tensor) -> Tensor:
        raise ZeroDivisionError("as the test wants it")

    measure(_run(lambda scale: replace(_linear(scale), loss=loss, predict=predict)), tmp_path / "row.json")
    row = json.loads((tmp_path / "row.json").read_text())
    assert row["fit"]["share"] == 1
    assert row["service"]["error"] == "ZeroDivisionError: as the test wants it"
    assert reason(row["service"]) == row["service"]["error"]


def test_an_entry_that_cannot_be_made_is_a_row(tmp_path: Path) -> None:
    def make(scale: Scale) -> Case:
        raise ValueError("no such size")

    measure(_run(make), tmp_path / "row.json")
    row = json.loads((tmp_path / "row.json").read_text())
    assert row["error"] == "ValueError: no such size"
    assert "no such size" in cells({"name": "test/entry", **row})[0][-1]


@pytest.mark.soak
def test_a_process_that_dies_or_takes_too_long_is_a_row(tmp_path: Path) -> None:
    args = command.parse(["--set", "cpu"])
    lost = Entry("test/unknown", _linear)
    assert "KeyError: 'test/unknown'" in command.run_child(lost, args, tmp_path, 60)["error"]
    assert command.run_child(lost, args, tmp_path, 0.01)["error"] == "not finished after 0 s (in the beginning)"


def test_one_entry_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "zoo.json"
    options = ["--set", "cpu", "--only", "science/mlp", "--steps", "5", "--warm", "10", "--json", str(path)]
    assert command.main(options) == 0
    assert "| science/mlp | fit |" in capsys.readouterr().out
    (row,) = json.loads(path.read_text())["rows"]
    assert row["fit"]["form"] == "whole"
    assert row["fit"]["share"] == 1
    assert path.with_suffix(".md").read_text() == markdown([row])


def test_the_command_line_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list", "--only", "rl/*"]) == 0
    assert capsys.readouterr().out.split() == [name for name in ENTRIES if name.startswith("rl/")]
    with pytest.raises(SystemExit):
        command.main(["--steps", "3"])
    assert "--steps is below 5" in capsys.readouterr().err


def test_entries_beyond_the_budget_are_not_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    earlier, merged = tmp_path / "earlier.json", tmp_path / "merged.json"
    rows = [{"name": "rl/ppo", "error": "as it was"}, {"name": "science/mlp", "error": "as it was"}]
    earlier.write_text(json.dumps({"rows": rows}))
    options = [
        "--set",
        "cpu",
        "--only",
        "science/mlp",
        "--budget",
        "-1",
        "--merge",
        str(earlier),
        "--json",
        str(merged),
    ]
    assert command.main(options) == 0
    assert "not started within -1 s" in capsys.readouterr().out
    errors = [row["error"] for row in json.loads(merged.read_text())["rows"]]
    assert errors == ["as it was", "not started within -1 s"]


def test_a_missing_library_is_a_row() -> None:
    row = command.run_child(Entry("a/b", _linear, ("no-such-library",)), command.parse([]), Path(), 60)
    assert "not installed: pip install no-such-library" in summary(row)
    assert "not installed: pip install no-such-library" in markdown([row])
