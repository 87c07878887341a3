"""Fits out of which the callback takes everything again: the rest is the fit without it."""

from __future__ import annotations

import gc
import pickle
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loops.optimization.automatic import Closure
from torch import Tensor
from torch.nn.modules import module as modules
from torch.optim import AdamW, optimizer

from graphplan import GraphPlanCallback, SkipReason
from graphplan.program.program import Program
from graphplan.step.gate import SKIPPED, STEPS
from tests.clocks import Clock, set_clock
from tests.crossing import each
from tests.lightning.parts import LitDigits, assert_same_fits, fit, tape
from tests.lightning.rows_of_parts import Manual

TIMED = SKIPPED + STEPS
BATCHES, EPOCHS = 20, 4
CALLS = BATCHES * EPOCHS
OPTIONS: dict[str, Any] = {"sizes": [20] * BATCHES, "max_epochs": EPOCHS}


def _facts(thing: Any) -> dict[str, str]:
    """The class of an object, and what attributes it has, of which classes."""
    own = {name: f"{type(value).__module__}.{type(value).__name__}" for name, value in vars(thing).items()}
    return {"its class": f"{type(thing).__module__}.{type(thing).__name__}", **own}


class Picture(Callback):
    """Notes before some batch what there is on all of a fit's objects. ``passes``: what a step takes by the clock."""

    def __init__(self, graphplan: GraphPlanCallback | None, clock: Clock, replay: float, at: int) -> None:
        self._graphplan, self._clock, self._replay, self._at = graphplan, clock, replay, at
        self.seen: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        replays = self._graphplan is not None and self._graphplan.stats.captured
        self._clock.time += self._replay if replays else 1.0
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self._at:
            self.seen = self._look(trainer, module)

    @staticmethod
    def _look(trainer: Any, module: Any) -> dict[str, Any]:
        loop = trainer.fit_loop.epoch_loop
        things = [
            trainer, trainer.fit_loop, loop, loop.automatic_optimization, loop.manual_optimization, loop.val_loop,
            loop._results, trainer.strategy, trainer.precision_plugin, trainer._logger_connector,
            *trainer.optimizers, *(part for _, part in module.named_modules()),
        ]  # fmt: skip
        found: dict[str, Any] = {
            f"{number} {type(thing).__name__}": _facts(thing) for number, thing in enumerate(things)
        }
        found["metrics"] = {name: _facts(metric) for name, metric in dict.items(loop._results)}
        for space in (modules, optimizer):
            found[space.__name__] = {
                name: len(x) for name, x in vars(space).items() if name.startswith("_global") and name.endswith("hooks")
            }
        for its in trainer.optimizers:
            found["groups"] = [
                {key: value for key, value in group.items() if key != "params"} for group in its.param_groups
            ]
            found["hooks"] = {name: len(value) for name, value in vars(its).items() if name.endswith("hooks")}
            found["state"] = [
                (key, value.device, value.dtype) for state in its.state.values() for key, value in state.items()
            ]
        found["tracing"] = sys.getprofile(), sys.gettrace(), Closure.__module__, Program.run.__module__
        if hasattr(sys, "monitoring"):
            found["tools"] = [sys.monitoring.get_tool(number) for number in range(6)]
        return found


def pictured(
    monkeypatch: pytest.MonkeyPatch, folder: Path, make: Any, callback: GraphPlanCallback | None,
    replay: float = 5.0, at: int = CALLS - 5, idle: float = 1.0, **options: Any,
) -> Any:  # fmt: skip
    """A fit, and what there was on its objects before a late batch."""
    clock = set_clock(monkeypatch, Clock(idle))
    picture = Picture(callback, clock, replay, at)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The callback itself comes first, as ``fit`` has it.
        found = fit(make, folder, callback, more=[picture], **{**OPTIONS, **options})
    assert picture.seen
    return found, picture.seen, clock


class Branching(LitDigits):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss * 2 if complex(loss.detach()).real > 1e9 else loss


WAYS: dict[str, tuple[Any, dict[str, Any], SkipReason]] = {
    "slower": (LitDigits, {"min_speedup": 1.0}, SkipReason.SLOWER),
    "slower, by hand": (Manual, {"min_speedup": 1.0}, SkipReason.SLOWER),
    "slower, stock loop": (LitDigits, {"min_speedup": 1.0, "loop": "stock"}, SkipReason.SLOWER),
    "slower parts": (LitDigits, {"min_speedup": 1.0, "components": "forward_backward"}, SkipReason.SLOWER),
    "slower, evaluated": (LitDigits, {"min_speedup": 1.0, "eval": True}, SkipReason.SLOWER),
    "refused": (Branching, {"on_failure": "eager"}, SkipReason.HOST_SYNC),
    "refused parts": (Branching, {"on_failure": "eager", "components": "forward_backward"}, SkipReason.HOST_SYNC),
}


@each(bar=[False, True], name=WAYS)
@pytest.mark.crossed(2)
def test_nothing_is_left(name: str, bar: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On none of the fit's objects, and the numbers are those of the fit without the callback."""
    make, options, reason = WAYS[name]
    callback = tape(**options)
    expected, stock, _ = pictured(monkeypatch, tmp_path / "eager", make, None, enable_progress_bar=bar)
    found, left, clock = pictured(monkeypatch, tmp_path / "graphed", make, callback, enable_progress_bar=bar)
    for place, facts in stock.items():
        if options.get("eval") and (place.endswith("Strategy") or place == "hooks"):
            # Evaluation has replays of its own.
            continue
        assert left[place] == facts, place
    assert_same_fits(expected, found)
    stats = callback.stats
    assert stats.calls == CALLS
    assert stats.skipped.keys() == {reason}
    assert stats.skipped[reason] > CALLS // 2
    assert "graphplan removed itself: the rest of the fit ran without it" in callback.report()
    assert clock.watching == 0


def test_what_was_measured_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    callback = tape(min_speedup=1.0)
    pictured(monkeypatch, tmp_path, LitDigits, callback)
    assert "µs per step eagerly and 5000000 µs with replays" in callback.report()
    assert "step 1000000 -> 5000000 µs" in callback.report()


@pytest.mark.twice
def test_a_fit_that_pays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its first steps are Lightning's own, and then all is installed in the middle of the epoch."""
    callback = tape(min_speedup=1.0)
    expected, stock, _ = pictured(monkeypatch, tmp_path / "eager", LitDigits, None, at=TIMED)
    found, before, _ = pictured(monkeypatch, tmp_path / "graphed", LitDigits, callback, replay=0.25, at=TIMED)
    assert before == stock
    assert_same_fits(expected, found)
    assert (callback.stats.captured, callback.stats.replayed) == (1, CALLS - TIMED - 6), callback.report()
    assert callback.stats.skipped == {}
    assert "step 1000000 -> 250000 µs" in callback.report()


def test_a_busy_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is ever installed."""
    callback = tape(min_speedup=1.0)
    expected, stock, _ = pictured(monkeypatch, tmp_path / "eager", LitDigits, None, max_epochs=8)
    found, left, clock = pictured(monkeypatch, tmp_path / "graphed", LitDigits, callback, idle=0.01, max_epochs=8)
    assert left == stock
    assert_same_fits(expected, found)
    assert clock.watched == 1
    assert callback.stats.skipped == {SkipReason.BUSY: 8 * BATCHES - TIMED}
    assert callback.stats.traced == 0


def test_accumulated_steps_are_timed_in_whole_periods(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    callback = tape(min_speedup=1.0)
    options: dict[str, Any] = {"accumulate_grad_batches": 4}
    expected, *_ = pictured(monkeypatch, tmp_path / "eager", LitDigits, None, **options)
    found, _, _ = pictured(monkeypatch, tmp_path / "graphed", LitDigits, callback, replay=0.25, **options)
    assert_same_fits(expected, found)
    assert callback.stats.replayed > 20


@pytest.mark.parametrize("replay", [0.25, 5.0])
def test_validation_has_a_gate_of_its_own(replay: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its first calls are Lightning's own and timed; where replays are slower, its method is Lightning's own again."""
    set_clock(monkeypatch, Clock(passes=lambda: replay if callback.eval_stats.captured else 1.0))
    monkeypatch.setattr("graphplan.callback.callback.GraphPlanCallback._time_eager_steps", lambda self, gate: None)
    callback = tape(min_speedup=1.0, eval=True)
    own: list[bool] = []

    class Looks(Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            own.append("validation_step" not in vars(trainer.strategy))

    options: dict[str, Any] = {"sizes": [20] * 2, "max_epochs": 20}
    expected = fit(LitDigits, tmp_path / "eager", **options)
    found = fit(LitDigits, tmp_path / "graphed", callback, more=[Looks()], **options)
    assert_same_fits(expected, found)
    assert callback.eval_stats.captured == 1, callback.report()
    assert own[-1] is (replay > 1)
    assert ("per call eagerly and" in callback.report()) is (replay > 1)


def test_a_callback_is_copied_while_steps_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without what leads to the fit."""
    callback = tape(min_speedup=1.0)
    copies: list[Any] = []

    class Copies(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            copies.append(pickle.loads(pickle.dumps(callback)))

    fit(LitDigits, tmp_path, callback, more=[Copies()], sizes=[20] * 3, max_epochs=1)
    assert [copy.stats.eager for copy in copies] == [1, 2, 3]
    assert "on_train_batch_end" not in vars(callback)
    assert callback.stats.eager == 3


@pytest.mark.parametrize("repeatable", [False, True])
def test_the_kernels_of_an_optimizer(repeatable: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own in timed steps and afterwards; where runs are to be repeatable, those of replays from the way on, since
    it is a matter of time when the callback stands down.
    """
    flags: list[bool] = []

    class Flags(LitDigits):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            flags.append(bool(optimizer.param_groups[0]["fused"]))

    torch.use_deterministic_algorithms(repeatable)
    try:
        found, *_ = pictured(monkeypatch, tmp_path, lambda: Flags(AdamW), tape(min_speedup=1.0))
    finally:
        torch.use_deterministic_algorithms(False)
    assert flags[:TIMED] == [False] * TIMED
    assert flags[TIMED : TIMED + 5] == [True] * 5
    assert flags[-40:] == [repeatable] * 40
    assert not found.trainer.optimizers[0].param_groups[0]["fused"]


class Calls(Callback):
    """Counts the functions that the last steps call, in Python and C, by file or class and name."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def _note(self, frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            self.counts[frame.f_code.co_filename, frame.f_code.co_name] += 1
        elif event == "c_call":
            self.counts["", arg.__name__] += 1

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == EPOCHS - 1 and batch_idx == 2:
            # A collection calls what other libraries have hung on it.
            gc.disable()
            sys.setprofile(self._note)
        elif batch_idx == BATCHES - 2:
            sys.setprofile(None)
            gc.enable()


@pytest.mark.parametrize("name", ["refused", "refused parts"])
def test_the_rest_makes_the_calls_of_a_fit_without(name: str, tmp_path: Path) -> None:
    """As one with a callback in its place that does nothing: so it takes as long."""
    make, options, _ = WAYS[name]
    counted = list[Counter[tuple[str, str]]]()
    for callback in (tape(**options), None):
        calls = Calls()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(
                make,
                tmp_path / str(len(counted)),
                callback,
                more=[calls] if callback else [Callback(), calls],
                **OPTIONS,
            )
        counted.append(calls.counts)
    assert counted[0].total() > 1000
    assert counted[0] - counted[1] == counted[1] - counted[0] == Counter()
