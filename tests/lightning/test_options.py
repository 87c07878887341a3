"""The bounds and debugging options of ``graph_step``, given to the callback: each works inside a Trainer."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from graphplan import GraphPlanCallback, OptionError, RecaptureError, SkipReason, graph_step
from tests.lightning.endings import assert_nothing_installed, run_until
from tests.lightning.parts import LitDigits, assert_fit_equals_eager, assert_same_fits, fit, tape, with_step
from tests.models import Box
from tests.twins import BEFORE_REPLAY, FURTHER

FULL = 21
"""Replays of a fit of thirty batches; six come before the first one, and every tenth is ragged."""
DECIDED = {"fn", "owners", "policy", "device", "mask"}
"""Arguments of ``graph_step`` that the Trainer, or ``policies``, decide about; a ``training_step`` takes no mask."""


def test_the_callback_takes_what_graph_step_takes() -> None:
    """Each option under the same name with the same default."""
    options = inspect.signature(graph_step).parameters
    found = inspect.signature(GraphPlanCallback).parameters
    assert set(options) - DECIDED <= set(found)
    assert all(found[name].default == options[name].default for name in set(options) - DECIDED - {"mode"})


def test_the_callers_list_is_not_the_callbacks(tmp_path: Path) -> None:
    """A path that is put on the list after the callback was made allows nothing."""
    allow: list[str] = []
    callback = tape(allow=allow)
    allow.append("*")
    assert callback.options.allow == ()


@pytest.mark.parametrize("name", ["max_graphs", "max_recaptures", "memory_budget"])
def test_bounds_that_make_no_sense(name: str) -> None:
    """Said when the callback is made."""
    with pytest.raises(OptionError, match=rf"{name} is -1; expected"):
        GraphPlanCallback(**{name: -1})


def test_a_budget_that_no_program_fits_into(tmp_path: Path) -> None:
    """Eager's fit, also where refusals raise, and the report says why."""
    expected = fit(LitDigits, tmp_path / "eager", max_epochs=1)
    callback = tape(memory_budget=1000)
    with pytest.warns(UserWarning, match=r"is estimated to take .* MiB, but memory_budget allows 0\.0 MiB"):
        found = fit(LitDigits, tmp_path / "graphed", callback, max_epochs=1)
    assert_same_fits(expected, found)
    assert callback.stats.captured == 0
    assert callback.stats.skipped[SkipReason.MEMORY] > 0
    assert "memory_budget allows" in callback.report()


def test_prefetching_where_there_is_nothing_to_fetch(tmp_path: Path) -> None:
    """On a CPU batches are where they are needed; the report says so."""
    found = assert_fit_equals_eager(LitDigits, tmp_path, replayed=FULL, callback=tape(prefetch=True))
    assert "prefetch has no effect: replays do not copy batches from host memory to a device" in found.callback.report()


def _counting(self: Any, batch: Any, batch_idx: int) -> Tensor:
    self._runs.item += 1
    loss = self.loss_of(batch)
    self.log("train_loss", loss, on_step=True, on_epoch=True)
    return loss


def counted(**arguments: Any) -> LitDigits:
    """A module that counts where graphplan cannot look how often its training step ran as Python."""
    module = with_step(_counting)(**arguments)
    module._runs = Box(0)
    return module


def test_debug_changes_no_number(tmp_path: Path) -> None:
    """``debug=True`` only waits for the device, and checks what it can: what it does there is in tests/gpu."""
    found = assert_fit_equals_eager(LitDigits, tmp_path, replayed=FULL, callback=tape(debug=True))
    assert found.callback.options.debug


@pytest.mark.twice
def test_max_graphs_bounds_what_is_kept(tmp_path: Path) -> None:
    """Two sizes of batches, and room for one program: the other one is given up, and captured again."""
    sizes = ([16] * 8 + [8] * 8) * 2
    options = {"sizes": sizes, "max_epochs": 1, "replayed": 8 - BEFORE_REPLAY}
    kept = assert_fit_equals_eager(LitDigits, tmp_path / "kept", **options).callback.stats
    assert (kept.captured, kept.replayed, kept.events) == (2, 4 * 8 - BEFORE_REPLAY - FURTHER, {})
    found = assert_fit_equals_eager(LitDigits, tmp_path / "bound", callback=tape(max_graphs=1), **options)
    stats = found.callback.stats
    assert stats.events["evicted: more programs than max_graphs"] == stats.captured - 1 > 0
    assert stats.replayed < kept.replayed
    assert "evicted: more programs than max_graphs" in found.callback.report()


def _sharpened(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch) * complex(self.sharpness).real


def sharpened(every: int, ahead: int = 0) -> LitDigits:
    """A module with a flag that its step reads, another one after each ``every`` batches, ``ahead`` batches early."""

    def on_train_batch_end(self: Any, *args: Any) -> None:
        self.sharpness = 1.0 + (self.trainer.global_step - 1 + ahead) // every

    module = with_step(_sharpened, on_train_batch_end=on_train_batch_end)(schedule=None)
    module.sharpness = 1.0
    return module


MANY: dict[str, Any] = {"sizes": [16] * 24, "max_epochs": 1}


def test_captures_that_do_not_pay_demote_the_step(tmp_path: Path) -> None:
    """After a replay: one warning with the reason, and eager steps; the default bound lets as many captures be."""
    make = partial(sharpened, 6)
    expected = fit(make, tmp_path / "eager", **MANY)
    text = (
        r"captured again 1 times in a row, each time for fewer than 16 replays: .*model\.sharpness was 1\.0 and is 2\.0"
    )
    with pytest.warns(UserWarning, match=text):
        found = fit(make, tmp_path / "graphed", tape(max_recaptures=1), **MANY)
    assert_same_fits(expected, found)
    stats = found.callback.stats
    assert stats.captured == 2 and stats.replayed > 0
    assert stats.skipped[SkipReason.RECAPTURE] > 0
    assert "captures repeat too often to save time" in found.callback.report()
    more = assert_fit_equals_eager(make, tmp_path, replayed=1, **MANY).callback.stats
    assert more.captured > 2


@pytest.mark.twice
def test_captures_that_do_not_pay_raise_before_the_first_replay(tmp_path: Path) -> None:
    """Where nothing was ever replayed, nobody would lose a run."""
    callback = tape(max_recaptures=1, warmup_steps=1)
    with pytest.raises(RecaptureError, match=r"each time for fewer than 16 replays: .*max_recaptures \(now 1\)"):
        fit(partial(sharpened, 4, 1), tmp_path / "raised", callback, **MANY)
    assert callback.stats.replayed == 0
    text, options = "each time for fewer than 16 replays", {"max_recaptures": 1, "warmup_steps": 1}
    trainer, module = run_until(RecaptureError, text, partial(sharpened, 4, 1), tmp_path / "ended", tape(**options))
    assert_nothing_installed(trainer, module)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_options_from_a_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LightningCLI reads their names, types and defaults off the signature."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    options = ["--trainer.callbacks=graphplan.GraphPlanCallback", "--trainer.callbacks.max_graphs=3"]
    quiet = ["--trainer.accelerator=cpu", "--trainer.logger=false", f"--trainer.default_root_dir={tmp_path}"]
    cli = LightningCLI(BoringModel, run=False, seed_everything_default=0, args=[*quiet, *options])
    (callback,) = (each for each in cli.trainer.callbacks if isinstance(each, GraphPlanCallback))
    assert callback.options == replace(GraphPlanCallback().options, max_graphs=3)
    with pytest.raises(SystemExit):
        LightningCLI(
            BoringModel,
            run=False,
            seed_everything_default=0,
            args=[*quiet, *options, "--trainer.callbacks.max_graphs=many"],
        )
    assert "key='max_graphs', val='many'" in capsys.readouterr().err
