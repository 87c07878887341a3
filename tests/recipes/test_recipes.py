"""The recipes' data, networks and scripts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from graphplan import graph_step
from recipes import embed_stream, lightning_digits, plain_loop, serve_buckets, weight_swap
from recipes.benchmarks import decode as decode_recipe
from recipes.benchmarks import host_path
from recipes.comparison import require_equal
from recipes.data import DigitsData, StdlibText
from recipes.datasets import (
    ALPHABET,
    DIGITS_CLASSES,
    UNKNOWN,
    VOCABULARY,
    decode,
    digits_splits,
    encode,
    read_stdlib,
    stdlib_splits,
    text_windows,
)
from recipes.latencies import require_close
from recipes.networks import GPT, DigitsMLP
from recipes.schedules import adamw, cosine_schedule

FEW_FILES = ("bisect.py", "heapq.py")


def test_digits_are_split_without_overlap_and_always_alike() -> None:
    train, val = digits_splits()
    assert (len(train), len(val)) == (1438, 359)
    assert train.tensors[0].shape[1:] == (64,)
    assert float(train.tensors[0].max()) == 1.0
    assert sorted(set(val.tensors[1].tolist())) == list(range(DIGITS_CLASSES))
    again, _ = digits_splits()
    assert torch.equal(train.tensors[0], again.tensors[0])
    assert not torch.equal(train.tensors[0], digits_splits(seed=1)[0].tensors[0])
    # No digit is in both: the data has no two equal images.
    rows = {tuple(row) for part in (train, val) for row in part.tensors[0].tolist()}
    assert len(rows) == 1797


def test_text_survives_encoding() -> None:
    assert decode(encode(ALPHABET)) == ALPHABET
    assert encode("\N{BULLET}").tolist() == [UNKNOWN]
    assert int(encode(read_stdlib()).max()) < VOCABULARY


def test_each_window_is_followed_by_its_target() -> None:
    windows = text_windows("abcdefghij", 3)
    assert [(decode(x), decode(y)) for x, y in windows] == [("abc", "bcd"), ("def", "efg"), ("ghi", "hij")]


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a text of 3 characters holds no window of block_size=3 .*a longer text"):
        text_windows("abc", 3)


def test_missing_sources_are_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"has no nowhere\.py: this recipe reads its sources, so use a"):
        read_stdlib(["bisect.py", "nowhere.py"])


def test_stdlib_text_is_long_enough_to_train_on() -> None:
    train, val = stdlib_splits(64)
    assert len(train) > 100 * 32
    assert len(val) > 10 * 32


@pytest.mark.parametrize(
    "data", [DigitsData(batch_size=64), StdlibText(batch_size=32, block_size=16)], ids=["digits", "stdlib"]
)
def test_every_batch_but_the_last_has_the_same_size(data: DigitsData | StdlibText) -> None:
    data.setup("fit")
    sizes = [len(x) for x, y in data.train_dataloader()]
    assert set(sizes[:-1]) == {data.batch_size}
    assert 0 < sizes[-1] <= data.batch_size


def test_batches_come_in_the_same_order_and_reshuffle_each_epoch() -> None:
    orders = []
    for draws in (0, 7):
        torch.rand(draws)
        data = DigitsData()
        data.setup("fit")
        loader = data.train_dataloader()
        orders.append([torch.cat([y for _, y in loader]) for _ in range(2)])
    assert torch.equal(orders[0][0], orders[1][0])
    assert torch.equal(orders[0][1], orders[1][1])
    assert not torch.equal(orders[0][0], orders[0][1])


def test_drop_last_leaves_out_the_smaller_batch() -> None:
    data = DigitsData(batch_size=64, drop_last=True)
    data.setup("fit")
    assert {len(x) for x, _ in data.train_dataloader()} == {64}
    assert sum(len(x) for x, _ in data.val_dataloader()) == 359


def test_loaders_need_setup() -> None:
    with pytest.raises(RuntimeError, match=r"call setup\('fit'\) before asking for a loader"):
        DigitsData().train_dataloader()


def test_gpt_does_not_look_ahead() -> None:
    model = GPT(block_size=8, width=16).eval()
    tokens = torch.randint(VOCABULARY, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % VOCABULARY
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 8, VOCABULARY)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_gpt_refuses_what_it_was_not_built_for() -> None:
    with pytest.raises(ValueError, match="heads=3 does not divide width=16: choose a width"):
        GPT(width=16, heads=3)
    with pytest.raises(ValueError, match=r"tokens have 9 positions, .* block_size=8: cut them"):
        GPT(block_size=8, width=16)(torch.zeros(1, 9, dtype=torch.long))


def test_gpt_learns() -> None:
    train, _ = stdlib_splits(32, files=FEW_FILES)
    model = GPT(block_size=32, width=32, layers=1)
    optimizer = adamw(model.parameters())
    x, y = train[:16]
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_cosine_rises_then_falls() -> None:
    optimizer = adamw(DigitsMLP().parameters())
    schedule = cosine_schedule(optimizer, 10, warmup_steps=4, final_fraction=0.1)
    rates = []
    for _ in range(13):
        rates.append(optimizer.param_groups[0]["lr"] / 1e-3)
        optimizer.step()
        schedule.step()
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4:11] == sorted(rates[4:11], reverse=True)
    assert rates[10:] == pytest.approx([0.1] * 3)


def test_comparison_names_the_first_difference() -> None:
    eager = {"loss[0]": torch.ones(2), "model.weight": torch.ones(3)}
    assert require_equal(eager, eager).startswith("equal to eager: bitwise, all 2 tensors")
    with pytest.raises(SystemExit, match=r"not equal to eager: 1 of 2 tensors differ, the first is model\.weight"):
        require_equal(eager, eager | {"model.weight": torch.tensor([1.0, 1.0, 1.0 + 2**-20])})
    with pytest.raises(SystemExit, match=r"not equal to eager: only one run has loss\[0\]"):
        require_equal(eager, {"model.weight": torch.ones(3)})


def test_plain_loop_replays_and_equals_eager(capsys: pytest.CaptureFixture[str]) -> None:
    plain_loop.main(["--epochs", "2", "--device", "cpu", "--backend", "tape"])
    printed = capsys.readouterr().out
    assert "plan of Run.step on cpu: 2 input, 10 param, 37 state" in printed
    # 22 full batches and a smaller one in each epoch: six calls of the full size come before its replays.
    assert re.search(r"launches saved: \d+ \(39 replays of a step", printed)
    # 46 losses, 16 entries of the state dict, 3 moments and counters of each of 10 parameters.
    assert "equal to eager: bitwise, all 92 tensors" in printed
    assert re.search(r"step time: \d+ µs eager, \d+ µs replayed", printed)


def test_lightning_digits_replays_and_equals_eager(capsys: pytest.CaptureFixture[str]) -> None:
    lightning_digits.main(["--epochs", "2", "--accelerator", "cpu", "--backend", "tape"])
    printed = capsys.readouterr().out
    assert re.search(r"launches saved: \d+ \(\d\d replays of a step", printed)
    assert "equal to eager: bitwise" in printed
    assert re.search(r"step time: \d+ µs eager, \d+ µs replayed", printed)


@pytest.mark.parametrize("main", [plain_loop.main, lightning_digits.main])
def test_a_run_without_steps_is_refused(main: Callable[..., None]) -> None:
    with pytest.raises(SystemExit, match="too few steps to trace one: ask for more epochs"):
        main(["--epochs", "0", "--backend", "tape"])


@pytest.mark.parametrize(
    ("main", "arguments", "expected"),
    [
        (serve_buckets.main, ["--requests", "4", "--slots", "2"], r"equal to eager: all 4 generated texts"),
        (
            embed_stream.main,
            ["--batches", "8", "--sizes", "2"],
            r"lengths: 2 sizes .* % of the elements are padding",
        ),
        (weight_swap.main, ["--steps", "2"], r"programs: 1, captured 1 time for 2 sets of weights"),
    ],
)
def test_serving_equals_eager(
    main: Callable[..., None], arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*arguments, "--device", "cpu", "--backend", "tape"])
    printed = capsys.readouterr().out
    # First what the times below can show.
    assert re.match(r"on a CPU this shows that .*\.\nIt cannot show a gain: .* Times need a CUDA device\.\n", printed)
    assert re.search(expected, printed), printed
    assert re.search(r"equal to eager: (bitwise|within rounding), ", printed)
    assert re.search(r", replayed +\d+ +\d+ +\d+ +\d+\n", printed)


def test_decoding_is_measured_and_equals_eager(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a machine cannot run is named with the reason; no bar is met for want of figures."""
    out = tmp_path / "decode.json"
    decode_recipe.main(
        ["--cpu", "--largest", "2", "--blocks", "1", "--steps", "2", "--warmup", "12", "--json", str(out)]
    )
    printed = capsys.readouterr().out
    assert re.search(r"batch 2, graphed: equal to eager: bitwise, all 4 results", printed), printed
    assert "hand-written graph is not there for batches of 1, 2: CUDA graphs need a GPU" in printed
    result = json.loads(out.read_text())
    assert {"torch", "device", "date", "command"} <= set(result)
    timed = {(row["batch"], row["contender"]) for row in result["rows"] if "us" in row}
    assert timed == {(b, name) for b in (1, 2) for name in ("eager", "graphed", "graphed, static results")}
    assert result["shapes"]["captures"] == 2 and result["shapes"]["memory_ratio"] is None
    assert [bar["verdict"] for bar in result["bars"]] == ["met"]


def test_bars_of_decoding_are_met_or_missed() -> None:
    rows = [
        {"batch": 1, "contender": "graphed", "ratio": 1.04},
        {"batch": 1, "contender": "hand-written graph", "ratio": 1.0},
        {"batch": 2, "contender": "graphed", "ratio": 1.06},
        {"batch": 2, "contender": "reduce-overhead", "missing": "no compiler"},
    ]
    shapes = {"capture_sizes": [1, 2], "captures": 3, "shapes": 4, "memory_ratio": 1.29}
    verdicts = {bar["bar"]: bar["verdict"] for bar in decode_recipe.judge(rows, shapes)}
    assert verdicts == {
        "captures for 4 shapes": "missed",
        "memory / largest alone": "met",
        "graphed / hand-written graph, batch 1": "met",
        "graphed / hand-written graph, batch 2": "missed",
    }


def test_results_that_differ_end_a_recipe() -> None:
    one = [torch.ones(3)]
    assert require_close(one, [torch.ones(3) + 1e-6]).startswith("equal to eager: within rounding, 1 of 1 results")
    with pytest.raises(SystemExit, match="not equal to eager: 1 of 1 results differ, by up to 1"):
        require_close(one, [torch.zeros(3)])
    with pytest.raises(SystemExit, match="not equal to eager: 1 of 1 results differ, by up to inf"):
        require_close(one, [torch.ones(2)])
    with pytest.raises(SystemExit, match="not equal to eager"):
        require_close(one, [torch.ones(3) + 1e-6], exact=True)


def test_replays_are_timed_where_some_are_checked() -> None:
    """A check asks a program to run in a way of its own."""
    step = graph_step(lambda x: x * 2, backend="tape", mode="inference")
    with host_path.replays_timed() as times:
        for _ in range(12):
            step(torch.ones(3))
    assert step.stats.verified > 2
    assert len(times) >= step.stats.replayed and min(times) > 0
