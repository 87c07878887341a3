"""Checks of replays inside a Trainer: they leave no trace in logs, metrics and checkpoints, and find hidden faults."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import RMSprop

from graphplan import GraphPlanCallback, OptionError, SkipReason, VerifyError
from tests.facts import assert_same, flatten
from tests.lightning.endings import assert_nothing_installed, run_until
from tests.lightning.matrix import ROWS
from tests.lightning.parts import LitDigits, assert_fit_equals_eager, assert_same_fits, fit, tape, with_step
from tests.lightning.rows import check
from tests.models import Box

FULL = 21
"""Replays of a fit of thirty batches; six come before the first one, and every tenth is ragged."""
FIRST = 6
"""The batch, from 0, that is replayed first."""
MATRIX = (
    "hook: noise after the transfer", "batch: modified in place", "callback: host effects in the step's hooks",
    "callback: EMAWeightAveraging", "callback: reloads the optimizer", "callback: replaces a layer",
    "callback: reseeds", "logs: metrics and collections", "step: a hidden state", "trainer: accumulation and clipping",
)  # fmt: skip
"""Rows in which a check has something to put back: batches, generators, metrics, effects, layers, optimizers."""


@pytest.mark.parametrize("verify", ["geometric", 1, "off"])
@pytest.mark.twice
def test_checks_leave_no_trace(verify: Any, tmp_path: Path) -> None:
    """Rows, metrics after each batch, weights, optimizer state, checkpoints: those of the fit without the callback."""
    found = assert_fit_equals_eager(LitDigits, tmp_path, replayed=FULL, callback=tape(verify=verify))
    stats, report = found.callback.stats, found.callback.report()
    # Replays 1, 2, 4, 8 and 16 of 21.
    assert stats.verified == {"geometric": 5, 1: FULL, "off": 0}[verify]
    assert ("replays checked against eager" in report) is (verify != "off")
    assert_nothing_installed(found.trainer, found.module)


@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.crossed(2)
@pytest.mark.twice
def test_rows_of_the_matrix(name: str, tmp_path: Path) -> None:
    """Accumulation, clipping, logs, other batches, and what callbacks do to a run."""
    check(replace(ROWS[name], options={**ROWS[name].options, "verify": 1}), tmp_path)


def test_an_optimizer_that_steps_on_the_host(tmp_path: Path) -> None:
    """Forward and backward alone are replayed and checked; the optimizer steps once."""
    make = partial(LitDigits, partial(RMSprop, lr=1e-3))
    found = assert_fit_equals_eager(make, tmp_path, replayed=15, callback=tape(verify=1))
    assert found.callback.stats.verified == found.callback.stats.replayed


def _weighted(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch) * self._hidden.item
    self.log("train_loss", loss, on_step=True, on_epoch=True)
    return loss


def hidden(begin: int, stop: int | None = None) -> LitDigits:
    """A module with a weight in its training step where graphplan cannot look; it changes before batch ``begin``.

    After batch ``stop`` it raises.
    """

    def on_train_batch_end(self: Any, *args: Any) -> None:
        if self.trainer.global_step == begin:
            self._hidden.item = 3.0
        if stop is not None and self.trainer.global_step == stop + 1:
            raise Stopped

    module = with_step(_weighted, on_train_batch_end=on_train_batch_end)(schedule=None)
    module._hidden = Box(1.0)
    return module


class Stopped(Exception):
    """Ends a fit."""


@pytest.mark.twice
def test_a_first_replay_that_is_wrong(tmp_path: Path) -> None:
    """The fit ends with an error that names the loss and its figures, after the batch was trained on as in eager."""
    states = []
    ends = (
        ("eager", None, Stopped, "^$"),
        ("graphed", tape(), VerifyError, "replay 1 of .*Keep the value in a tensor"),
    )
    for name, callback, error, text in ends:
        stop = FIRST if callback is None else None
        trainer, module = run_until(error, text, partial(hidden, FIRST, stop), tmp_path / name, callback)
        assert_nothing_installed(trainer, module)
        states.append(flatten(module=module, optimizers=trainer.optimizers, rng=torch.get_rng_state()))
    assert_same(*states)
    torch.manual_seed(0)
    match = (
        r"replay 1 of .* result\['result'\].*: [\d.]+ by the replay, [\d.]+ by the eager step; two replays differ by 0"
    )
    with pytest.raises(VerifyError, match=match):
        fit(partial(hidden, FIRST), tmp_path / "again", tape())


@pytest.mark.parametrize("on_failure", ["raise", "eager"])
@pytest.mark.twice
def test_a_later_replay_that_is_wrong(on_failure: str, tmp_path: Path) -> None:
    """One warning, the event in the report, and eager steps from then on; with every replay checked, eager's fit."""
    make = partial(hidden, FIRST + 1)
    with pytest.warns(UserWarning, match="replay 2 of .* is not what the eager step does") as caught:
        found = fit(make, tmp_path / "graphed", tape(on_failure=on_failure))
    assert len([warning for warning in caught if "graphplan" in str(warning.message)]) == 1
    stats = found.callback.stats
    assert (stats.replayed, stats.verified, stats.skipped[SkipReason.VERIFY]) == (1, 1, 30 - FIRST - 1)
    assert "event 1x: invalidated: replay 2 of" in found.callback.report()
    assert_same_fits(fit(make, tmp_path / "eager"), found)
    with pytest.raises(AssertionError, match="differences"):
        assert_same_fits(fit(make, tmp_path / "eager"), fit(make, tmp_path / "off", tape(verify="off")))


@pytest.mark.parametrize("verify", ["always", -1, True])
def test_what_is_no_schedule(verify: Any) -> None:
    """Said when the callback is made."""
    with pytest.raises(OptionError, match=r"verify is .*; expected 'geometric', 'off', or n >= 1"):
        GraphPlanCallback(verify=verify)
