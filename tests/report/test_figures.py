"""What a report says of times, and where: timelines, seconds saved, loggers, terminals, logs."""

from __future__ import annotations

import csv
import json
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from graphplan import GraphPlanCallback, OptionError, graph_step, graphed
from graphplan.errors import SkipReason
from graphplan.report.figures import Figures
from graphplan.report.stats import Stats
from tests.check.subjects import Data, Good, HostOptimizer


def fit(
    callback: GraphPlanCallback, module: pl.LightningModule | None = None, data: Data | None = None, **options: Any
) -> None:
    """Train for two epochs of eight batches."""
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, callbacks=[callback], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=4,
        **{"logger": False, **options},
    )  # fmt: skip
    trainer.fit(module or Good(), data or Data())


def made(kinds: str) -> Stats:
    """Counts of calls: ``e``\\ ager, ``r``\\ eplayed, each a second long by the clock."""
    stats = Stats()
    for number, kind in enumerate(kinds):
        if kind == "r":
            stats.count_replay(number, number + 1, 0, first=False)
        else:
            stats.eager += 1
            stats.end_call("eager")
            stats.last_end = number + 1
    return stats


def test_a_timeline_has_a_stretch_for_each_change() -> None:
    assert [tuple(each.values()) for each in made("eerrre").timeline()] == [
        ("eager", 0, 2, None),
        ("replayed", 2, 3, 3.0),
        ("eager", 5, 1, 1.0),
    ]
    assert Stats().timeline() == []


def test_calls_that_are_told_of_afterwards_are_in_the_timeline() -> None:
    stats = made("rr")
    stats.count_stock(5)
    stats.count_stock(2)
    assert [tuple(each.values())[:3] for each in stats.timeline()] == [("replayed", 0, 2), ("eager", 2, 7)]


def test_timelines_follow_one_another_where_counts_are_added() -> None:
    stats = made("ee")
    stats.merge(made("rrr"))
    assert [tuple(each.values())[:3] for each in stats.timeline()] == [("eager", 0, 2), ("replayed", 2, 3)]
    assert stats.calls == 5


def test_the_headline_says_why_most_steps_were_eager() -> None:
    """By the wording of most of them, where that says more than the kind of the reason; and what became of traces."""
    step = graph_step(lambda x, text: x * len(text), on_failure="eager", backend="tape")
    with pytest.warns(
        UserWarning, match=("In the data loader's collate_fn, make tensors of numbers and tokenize strings")
    ):
        found = [step(torch.ones(2), "a" * index) for index in range(40)]
    assert [int(each[0]) for each in found] == list(range(40))
    headline = step.report().splitlines()[0]
    assert "no program exists yet for this batch signature: no step was captured in 24 steps" in headline
    assert "0 traced and 1 given up, 0 captured" in headline
    total = Stats()
    total.merge(step.stats)
    assert total.detail_of(SkipReason.SHAPE) == step.stats.detail_of(SkipReason.SHAPE)


def test_one_long_step_between_two_replays_is_no_steps_time() -> None:
    """A validation, say: the median leaves it out."""
    stats = made("rrrrr")
    stats.count_replay(99.0, 100.0, 0, first=False)
    assert stats.step_us("replayed") == 1e6


def test_calls_that_come_when_they_come() -> None:
    """Requests of a service: the time between two of them is not that of a call."""
    fast = graphed(torch.nn.Linear(4, 2), verify="off")
    with torch.no_grad():
        for _ in range(6):
            fast(torch.randn(3, 4))
    assert re.search(r"call \d+ µs on the host where replayed", fast.report().splitlines()[0])
    assert fast.stats.step_us("replayed") == fast.stats.replay_us()


def test_nothing_is_said_of_eager_time_that_was_not_measured() -> None:
    stats = made("eeerrr")
    assert stats.step_us("eager") is None
    assert stats.gain() is None
    assert "step 1000000 µs where replayed" in Figures(stats).headline()
    assert "->" not in Figures(stats).headline()


def test_seconds_saved_and_spent() -> None:
    stats = made("eerrrr")
    stats.measured = {"eager": 3.0, "replayed": 1.0}
    stats.add_time("trace", 5.0)
    gain = stats.gain()
    assert gain is not None
    assert (gain.saved, gain.spent, gain.net) == (8.0, 2.0, 6.0)
    assert "step 3000000 -> 1000000 µs; saved 8.0 s and spent 2.0 s on it: net +6.0 s" in Figures(stats).headline()


def test_what_replays_have_saved_in_eager_steps() -> None:
    """By steps if they were timed from end to end, else by the shortest eager step of warm-up and checks."""
    stats = made("eerrrr")
    assert stats.balance() == (0.0, 0.0, 0.0)
    for seconds in (30.0, 4.0, 5.0):
        stats.add_time("warmup", seconds)
    stats.phases |= {"trace": 20.0, "steady": 4.0}
    stats.phase_counts |= {"trace": 2, "steady": 4}
    assert stats.balance() == (3.0, 3.0, 0.0)
    stats.shortest = 2.0
    assert stats.balance() == (2.0, 8.0, -6.0)
    # Looking a program up, and following what has moved, is a part of a replay's time.
    stats.lookups = 1.0
    assert stats.balance() == (1.5, 8.0, -6.5)
    stats.lookups = 0.0
    stats.phases["steady"] = 10.0
    assert stats.balance() == (-1.0, 8.0, -9.0)
    stats.phases["steady"], stats.phase_counts["steady"] = 0.0, 0
    assert stats.balance() == (0.0, 8.0, -8.0)
    stats.phases["steady"], stats.phase_counts["steady"] = 4.0, 4
    stats.measured = {"eager": 5.0, "replayed": 1.0}
    assert stats.balance() == pytest.approx((3.2, 6.8, -3.6))


def test_steps_are_batches() -> None:
    """Where an optimizer steps after several of them, too; a second fit begins anew."""
    callback = GraphPlanCallback(backend="tape")
    fit(callback, accumulate_grad_batches=2)
    calls = callback.stats.calls
    assert f"of {calls} steps replayed" in callback.report()
    assert f"of {calls} steps replayed" in pickle.loads(pickle.dumps(callback)).report()
    fit(callback, accumulate_grad_batches=2)
    assert callback.report().count(f"of {calls} steps replayed") == 2


def test_a_part_of_the_step_is_named_in_the_headline() -> None:
    callback = GraphPlanCallback(backend="tape", on_failure="eager")
    fit(callback, HostOptimizer())
    assert "steps replayed (forward and backward alone)" in callback.report().splitlines()[0]


def test_all_fits_of_a_callback_are_reported() -> None:
    callback = GraphPlanCallback(backend="tape")
    fit(callback)
    assert not callback.report().startswith("training")
    fit(callback)
    texts = callback.report().split("training ")
    assert [text.split(":")[0] for text in texts if text] == ["1", "2"]
    data = json.loads(callback.report("json"))
    assert list(data) == ["training 1", "training 2"]
    for run in data.values():
        assert run["stats"]["replayed"] > 5
        assert "model.net.weight" in [row[0] for row in run["programs"][0]["table"]]
        assert sum(stretch["count"] for stretch in run["timeline"]) == run["stats"]["calls"]
    html = callback.report("html")
    assert "<h2>training 1</h2>" in html
    assert "<h2>training 2</h2>" in html


def test_evaluations_are_reported_beside_fits() -> None:
    class Evaluated(Good):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("validated", self.net(batch[0]).mean())

    callback = GraphPlanCallback(backend="tape", eval=True)
    data = Data()
    data.val_dataloader = data.train_dataloader  # type: ignore[method-assign]
    fit(callback, Evaluated(), data)
    assert callback.report().count("training:") == 1
    assert callback.report().count("evaluation:") == 1
    told = json.loads(callback.report("json"))
    assert list(told) == ["training", "evaluation"]
    assert all(run["programs"] for run in told.values())


def test_a_form_that_reports_of_a_callback_do_not_have() -> None:
    with pytest.raises(OptionError, match="format is 'dot'; expected one of: text, json, html"):
        GraphPlanCallback().report("dot")


def test_figures_through_the_trainers_logger(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    callback = GraphPlanCallback(backend="tape", log=True)
    fit(callback, logger=logger)
    with open(Path(logger.log_dir) / "metrics.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("graphplan/replayed_share")]
    assert [int(row["step"]) for row in rows] == [8, 16]
    assert float(rows[-1]["graphplan/replayed_share"]) == callback.stats.replayed / 16
    assert float(rows[-1]["graphplan/recaptures"]) == 0
    assert float(rows[-1]["graphplan/step_us"]) > 0
    with pytest.raises(OptionError, match="log is 1; expected True or False"):
        GraphPlanCallback(log=1)  # type: ignore[arg-type]


def test_events_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Each by the logger of its kind."""
    caplog.set_level(logging.DEBUG, "graphplan")
    weight = torch.ones(3, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        return (weight * x).sum().detach()

    graphed = graph_step(step, owners={"weight": [weight]}, eager_if=lambda *args: False)
    for _ in range(6):
        graphed(torch.ones(3))
    graphed.invalidate("a test")
    graphed.stats.skip(SkipReason.EAGER_IF, "by hand")
    graphed.close()
    assert ("graphplan.guards", logging.INFO, "invalidated: a test") in caplog.record_tuples
    assert ("graphplan.eager", logging.DEBUG, "by hand") in caplog.record_tuples


def test_figures_of_nothing() -> None:
    assert Figures().text().startswith("graphplan: 0 plans")
    assert "phases" not in Figures().text()
