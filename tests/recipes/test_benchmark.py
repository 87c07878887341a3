"""The benchmark runs, writes what it promises, and survives a contender that fails. No time is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from recipes.benchmarks import __main__ as benchmark
from recipes.benchmarks.bars import GPU_BARS, bars
from recipes.benchmarks.catalogue import CONTENDERS, CPU_SECONDS, SETS, Contender
from recipes.benchmarks.contenders import measure
from recipes.benchmarks.measuring import Job
from recipes.benchmarks.tables import BAR_COLUMNS, COLUMNS
from recipes.benchmarks.workloads import CPU_WORKLOADS, GPU_WORKLOADS

ROOT = Path(__file__).resolve().parents[2]
MEASURED = {"workload", "contender", "implementation", "compiled", "us", "us_of_repeats", "torch", "steps", "warmup"}
WARMUP, STEPS = 30, 3
CALLS = 10 + 2 * 3 + 1
"""Steps of what is measured in this process."""
PEER = """
def make_step(train_step, model, optimizer, device):
    assert device.type == "cpu" and len(list(model.parameters())) == 4, model
    assert optimizer.param_groups[0]["lr"] == 0.05
    return lambda x, y: train_step(x.to(device), y.to(device))
"""
BAD_PEER = """
def make_step(train_step, model, optimizer, device):
    raise RuntimeError("this tool takes no MLP")
"""


def run(path: Path, contenders: str, status: int, *more: str) -> tuple[dict[str, Any], str]:
    """Run a tiny benchmark in a new process; return its JSON and what it printed."""
    command = [sys.executable, "-m", "recipes.benchmarks", "--cpu", "--workloads", "mlp2", "--contenders", contenders]
    command += ["--steps", str(STEPS), "--repeats", "1", "--threads", "1", "--json", str(path / "out" / "result.json")]
    command += ["--markdown", str(path / "result.md"), *more]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == status, done.stderr + done.stdout
    return json.loads((path / "out" / "result.json").read_text()), done.stdout


def measured(workload: str, contender: str) -> dict[str, Any]:
    """The row of one contender, measured in this process."""
    (row,) = measure(Job(workload, contender, cpu=True, steps=3, repeats=2, warmup=10))
    assert set(row) >= MEASURED | {"weights", "warmup_seconds"}
    assert len(row["us_of_repeats"]) == 2 and row["us"] > 0
    return row


@pytest.mark.soak
def test_result_of_the_loops(tmp_path: Path) -> None:
    """Eager and graphed blocks are interleaved in one process; a contender that fails is a row with its error."""
    peer = tmp_path / "peer.py"
    peer.write_text(BAD_PEER)
    result, printed = run(tmp_path, "eager,graph_step", 1, "--peer", str(peer), "--bars")
    eager, graphed, failing = result["rows"]
    assert {"command", "date", "torch", "device", "python", "repeats", "bars", "rows"} <= set(result)
    assert result["device"] == "cpu" and "--workloads mlp2" in result["command"]
    for row in (eager, graphed):
        assert set(row) >= MEASURED | {"ratio_to_floor", "speedup"}
        assert row["us"] > 0 and len(row["us_of_repeats"]) == 1
    assert eager["speedup"] == 1
    assert (graphed["eager"], graphed["traced"], graphed["captured"]) == (3, 2, 1)
    assert graphed["replayed"] == WARMUP + STEPS - 6
    assert {"trace", "capture", "steady"} <= set(graphed["phases"])
    assert failing["error"] == "exit status 1: RuntimeError: this tool takes no MLP" and "us" not in failing
    (bar,) = result["bars"]
    assert (bar["workload"], bar["contender"], bar["at_least"]) == ("mlp2", "graph_step", 1.5)
    assert bar["value"] == graphed["speedup"] and bar["verdict"] == ("met" if bar["value"] >= 1.5 else "missed")
    assert "mlp2, peer: peer: exit status 1" in printed and printed.isascii()
    assert printed.splitlines()[-1].split() == ["mlp2", "peer:", "peer", "failed"]
    lines = (tmp_path / "result.md").read_text().splitlines()
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == list(COLUMNS)
    assert [cell.strip() for cell in lines[6].strip("|").split("|")] == list(BAR_COLUMNS)
    assert len(lines) == (2 + 3) + 1 + (2 + 1)


@pytest.mark.skipif(find_spec("tensordict") is not None, reason="tensordict is installed")
def test_a_tool_that_is_not_installed_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """It has a row that says so."""
    assert benchmark.main(["--cpu", "--workloads", "mlp2", "--contenders", "tensordict"]) == 0
    printed, said = capsys.readouterr()
    assert said.startswith("1 processes, one after the other: about 1 min on two cores\n")
    assert "mlp2, tensordict CudaGraphModule: tensordict is not installed" in printed
    assert printed.splitlines()[-1].split()[-2:] == ["not", "installed"]


@pytest.mark.parametrize("contender", ["floor+compile", "reduce_overhead", "make_graphed"])
def test_graphs_need_a_cuda_device(contender: str) -> None:
    """What cannot run on the CPU says so."""
    with pytest.raises(SystemExit, match=r" needs a CUDA device: leave it out of --contenders with --cpu"):
        measured("mlp2", contender)


def test_result_of_the_callback() -> None:
    """A bare Trainer trains the same weights with the callback, and its batches are replayed."""
    pytest.importorskip("lightning")
    trainer, callback = (measured("mlp2", name) for name in ("trainer", "trainer_callback"))
    assert trainer["weights"] == callback["weights"]
    calls = [callback[name] for name in ("eager", "traced", "captured", "replayed")]
    assert sum(calls) == CALLS and callback["captured"] == 1
    assert f"{CALLS} steps" in callback["report"].splitlines()[0]


@pytest.mark.parametrize(
    "workload", ["gpt2", "gpt2_small", "gpt2_large", "sac", "sac_large", "pinn", "pinn_large", "resnet_large"]
)
@pytest.mark.crossed(2)
def test_workloads_are_replayed(workload: str) -> None:
    """Every kind of step is captured on the tape and trains the same weights, with the same kernels."""
    eager, graphed = (measured(workload, f"{way}+fuse") for way in ("eager", "graph_step"))
    assert eager["implementation"] == graphed["implementation"] == "fused"
    assert graphed["replayed"] in (CALLS - 6, CALLS - 5), graphed["report"]
    assert eager["weights"] == graphed["weights"]


def test_tools_train_the_same_weights(tmp_path: Path) -> None:
    """Compiled models, a peer, Trainers: they all train what the eager loop trains."""
    peer = tmp_path / "peer.py"
    peer.write_text(PEER)
    weights = measured("mlp2", "eager")["weights"]
    for contender in ("eager+compile", "graph_step+compile+fuse", f"peer:{peer}"):
        assert measured("mlp2", contender)["weights"] == weights, contender
    assert measured("mlp2", "graph_step+compile")["compiled"]


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
def test_typical_trainers_train_the_same_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """A typical Trainer, with the callback and all of its options too, trains what the eager loop trains. Its progress
    bar is out of the way: what a process prints is its row.
    """
    pytest.importorskip("lightning")
    weights = measured("mlp2", "eager")["weights"]
    for contender in ("typical", "typical+compile", "typical_callback", "typical_callback+compile+fuse"):
        row = measured("mlp2", contender)
        assert row["weights"] == weights, contender
        assert "callback" not in contender or row["replayed"] >= 8, row["report"]
    assert capsys.readouterr().out == ""


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
def test_trainers_with_several_optimizers_and_in_mixed_precision() -> None:
    """Several optimizers are Lightning's manual optimization; bfloat16 is the typical Trainer's own."""
    pytest.importorskip("lightning")
    eager, callback = (measured("sac", name) for name in ("trainer+fuse", "trainer_callback+fuse"))
    assert eager["weights"] == callback["weights"] and callback["replayed"] == CALLS - 5, callback["report"]
    typical = measured("gpt", "typical_callback")
    assert typical["replayed"] == CALLS - 5, typical["report"]
    assert "fused" in typical["report"]


def test_peers_that_are_no_tools(tmp_path: Path) -> None:
    """A file that is not there, or has no make_step, is named with what was expected of it."""
    empty = tmp_path / "empty.py"
    empty.write_text("")
    with pytest.raises(SystemExit, match=r"empty.py has no make_step; expected make_step\(train_step, model"):
        measured("mlp2", f"peer:{empty}")
    with pytest.raises(SystemExit, match=r"none.py is not a Python file; expected one with make_step"):
        measured("mlp2", f"peer:{tmp_path / 'none.py'}")


def rows_of(times: dict[str, float], workload: str = "gpt") -> list[dict[str, Any]]:
    """Rows as a CUDA device's contenders give them."""
    memory = {"max_memory_allocated": 2**20, "max_memory_reserved": None}
    place = {"torch": "2", "device": "H", **memory}
    return [{"workload": workload, "contender": name, "us": us, **place} for name, us in times.items()]


def test_each_contender_has_its_own_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ratios are to the hand-written graph with the same compilation and kernels; merged rows are not measured anew."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    floors = {"floor": 100.0, "floor+fuse": 80.0, "floor+compile": 50.0, "floor+compile+fuse": 40.0}
    ours = {"typical_callback": 101.0, "typical_callback+fuse": 88.0, "typical_callback+compile+fuse": 44.0}
    old = [
        *rows_of({**floors, "typical": 440.0, "graph_step": 999.0}),
        {"workload": "gpt", "contender": "eager", "error": ""},
    ]
    first.write_text(json.dumps({"rows": old}))
    second.write_text(json.dumps({"rows": rows_of({"reduce_overhead": 75.0, "graph_step": 101.0, **ours})}))
    command = ["--merge", str(first), "--merge", str(second), "--workloads", "gpt", "--bars"]
    command += ["--contenders", "graph_step,typical,typical_callback+compile+fuse", "--chart", str(tmp_path / "c.png")]
    assert benchmark.main([*command, "--json", str(tmp_path / "all.json")]) == 0
    result = json.loads((tmp_path / "all.json").read_text())
    assert [row["contender"] for row in result["rows"]] == [
        name for name in CONTENDERS if name in {**floors, **ours, "typical": 0, "graph_step": 0, "reduce_overhead": 0}
    ]
    ratios = {row["contender"]: row["ratio_to_floor"] for row in result["rows"]}
    assert ratios["graph_step"] == ratios["typical_callback"] == 1.01
    assert ratios["typical_callback+fuse"] == ratios["typical_callback+compile+fuse"] == pytest.approx(1.1)
    assert ratios["reduce_overhead"] == 1.5 and ratios["typical"] == 4.4
    verdicts = {(bar["contender"], bar["against"]): bar["verdict"] for bar in result["bars"]}
    assert verdicts == {
        ("graph_step", "floor"): "met",
        ("typical_callback", "floor"): "met",
        ("typical_callback+fuse", "floor+fuse"): "missed",
        ("typical_callback", "typical"): "met",
        ("typical_callback+compile+fuse", "typical"): "met",
    }
    printed = capsys.readouterr().out
    assert printed.index("missed") < printed.index("us/step") and (tmp_path / "c.png").stat().st_size > 0


def test_bars_of_what_failed_or_became_slower() -> None:
    """A contender that failed is not measured, one that was slowed down by the callback is missed on any workload."""
    failed = {"workload": "gpt", "contender": "graph_step", "error": "no"}
    rows = [*rows_of({"trainer": 90.0, "trainer_callback": 100.0}, "sac"), *rows_of({"floor": 1.0}), failed]
    benchmark.compare(rows)
    found = [(bar["workload"], bar["contender"], bar["verdict"]) for bar in bars(rows, cpu=False)]
    assert found == [("gpt", "graph_step", "not measured"), ("sac", "trainer_callback", "missed")]
    assert {bar.workload for bar in GPU_BARS} <= set(GPU_WORKLOADS)


def test_sets_name_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Every set's workloads and contenders exist, every workload has a small version, and all means all of them."""
    assert set(GPU_WORKLOADS) <= set(CPU_WORKLOADS)
    for chosen in SETS.values():
        assert set(chosen.contenders) <= set(CONTENDERS)
        assert set(chosen.workloads) <= set(CPU_WORKLOADS) and set(chosen.workloads) & set(GPU_WORKLOADS)
    assert set(SETS["all"].workloads) == set(CPU_WORKLOADS)
    everything = list(benchmark.processes(benchmark.parse(["--set", "all"])))
    assert {workload for workload, _ in everything} == set(GPU_WORKLOADS)
    assert ("gpt2", "floor+compile") in everything
    assert not any(Contender(name).wraps_model for workload, name in everything if workload in ("sac", "pinn"))
    assert "pinn: torch.compile, reduce-overhead is left out" in capsys.readouterr().err


def test_how_long_it_takes_is_said_beforehand() -> None:
    said = benchmark.expected_time(benchmark.parse(["--cpu"]), 120)
    assert said == f"120 processes, one after the other: about {2 * CPU_SECONDS} min on two cores"
    said = benchmark.expected_time(benchmark.parse(["--set", "rivals"]), 3)
    assert said == "3 processes, one after the other; all of --set rivals takes about 9 min on an H200"


def test_unknown_names_are_refused() -> None:
    """A misspelt workload is an error that lists the known ones, before anything is measured."""
    with pytest.raises(SystemExit, match=r"no workload is called mpl; choose from: mlp2, transformer4"):
        benchmark.main(["--cpu", "--workloads", "mpl"])
    with pytest.raises(SystemExit, match=r"no contender is called fast; choose from: eager, reduce_overhead"):
        benchmark.main(["--cpu", "--contenders", "fast"])
    with pytest.raises(SystemExit, match=r"no contender is called typical\+fuse; choose from"):
        benchmark.main(["--cpu", "--contenders", "typical+fuse"])
