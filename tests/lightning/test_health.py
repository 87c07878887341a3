"""Failures, signals and copies in the middle of a fit: the fit goes on as the eager one, or ends and leaves nothing."""

from __future__ import annotations

import copy
import itertools
import pickle
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import SGD

from graphplan import CopyError, GraphPlanCallback, SkipReason
from tests.facts import assert_same, flatten
from tests.health import FailAt, Planted, process_facts
from tests.lightning.endings import assert_nothing_installed
from tests.lightning.parts import (
    STEPS_PER_EPOCH,
    Fit,
    LitDigits,
    assert_same_fits,
    fit,
    ignore_lightning_warnings,
    loaders,
    tape,
    trainer_of,
    with_step,
)

PHASES = {"first trace": 3, "second trace": 4, "capture": 5, "replay": 6}
FULL = STEPS_PER_EPOCH - 1


def _keeping_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
    self.tp = self.tp + batch[0].mean(0)
    self.seen += 1
    loss = self.loss_of(batch)
    self.losses.append(loss.detach())
    self.log("train_loss", loss, on_step=True, on_epoch=True)
    self.log("tp", self.tp.sum())
    return loss


def keeping() -> LitDigits:
    """A module with a carry, a counter and a list, and fused SGD."""
    module = with_step(_keeping_step)(make_optimizer=partial(SGD, lr=0.1, momentum=0.9, fused=True))
    module.tp, module.seen, module.losses = torch.zeros(64), 0, []
    return module


class Failing(Callback):
    """Lets operator number ``number`` fail, counted from the start of batch ``at``; or calls something there."""

    def __init__(self, at: int, number: int, error: Any, counts: Callable[[Any], bool] = lambda func: True) -> None:
        self.at = at
        self.mode = FailAt(number, error, counts)
        self.entered = False

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.at:
            self.mode.__enter__()
            self.entered = True

    def on_train_batch_end(self, *args: Any) -> None:
        if self.entered:
            self.mode.__exit__(None, None, None)
            self.entered = False

    def on_exception(self, *args: Any) -> None:
        self.on_train_batch_end()


def fit_with(
    folder: Path,
    callbacks: list[Callback],
    *,
    base: Callable[[], LitDigits] = keeping,
    scaler: bool = False,
    **options: Any,
) -> Fit:
    """Fit a module for an epoch, with some more callbacks."""
    if scaler:
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3))
        options["plugins"] = [plugin]
    own = next((callback for callback in callbacks if isinstance(callback, GraphPlanCallback)), None)
    others = [callback for callback in callbacks if callback is not own]

    def make() -> LitDigits:
        module = base()
        module.configure_callbacks = lambda: others  # type: ignore[method-assign]
        return module

    return fit(make, folder, own, **{"max_epochs": 1, **options})


@pytest.mark.parametrize("scaler", [False, True])
@pytest.mark.parametrize("phase", ["first trace", "second trace", "capture"])
def test_a_failed_capture_goes_on_eagerly(phase: str, scaler: bool, tmp_path: Path) -> None:
    """At operators all over the step: progress, logs, checkpoints, the scaler and Python values are the eager fit's."""
    expected = fit_with(tmp_path / "eager", [], scaler=scaler)
    failed = []
    for number in itertools.count(step=16):
        failing = Failing(PHASES[phase], number, torch.OutOfMemoryError("CUDA out of memory"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = fit_with(tmp_path / str(number), [failing, tape(on_failure="eager")], scaler=scaler)
            except torch.OutOfMemoryError:
                break  # From here on it is Lightning's logging that fails, after the step.
        if not failing.mode.failed_at:
            break
        failed.append(failing.mode.failed_at)
        (text,) = [str(warning.message) for warning in caught if "graphplan" in str(warning.message)]
        assert "eagerly: memory ran out" in text
        assert_same_fits(expected, found)
        assert_nothing_installed(found.trainer, found.module)
        stats = found.callback.stats
        assert (stats.skipped[SkipReason.CAPTURE], stats.replayed) == (FULL - PHASES[phase], 0)
    assert len(failed) > 3


@pytest.mark.parametrize("number", [5, 40, 70])
@pytest.mark.parametrize("phase", ["first trace", "second trace", "capture"])
def test_an_error_of_the_users_ends_the_fit(phase: str, number: int, tmp_path: Path) -> None:
    """What its call had done is undone: the module, the optimizer and its progress are as before the batch."""
    expected = ended_by(Planted, tmp_path / "eager", [Raising(PHASES[phase], Planted("before the batch"))])
    failing = Failing(PHASES[phase], number, Planted("in the batch"))
    found = ended_by(Planted, tmp_path / "graphed", [failing, tape()])
    assert_same(expected, found)


class Raising(Callback):
    """Does something at the start, or at the end, of batch ``at``."""

    def __init__(self, at: int, what: Any, *, at_end: bool = False) -> None:
        self.at, self.what, self.at_end = at, what, at_end

    def _act(self, trainer: Any) -> None:
        if isinstance(self.what, BaseException):
            raise self.what
        self.what(trainer)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if not self.at_end and trainer.global_step == self.at:
            self._act(trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self.at_end and trainer.global_step == self.at:
            self._act(trainer)


def ended_by(error: type[BaseException], folder: Path, callbacks: list[Callback]) -> dict[str, Any]:
    """A fit that ends in ``error`` and leaves nothing installed: module, optimizers, progress, generator."""
    facts, handlers = process_facts(), [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    torch.manual_seed(0)
    module = keeping()
    trainer = trainer_of(folder, callbacks)
    torch.manual_seed(1)
    with warnings.catch_warnings(), pytest.raises(error):
        ignore_lightning_warnings()
        trainer.fit(module, *loaders())
    assert_nothing_installed(trainer, module)
    assert facts == process_facts()
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict()
    return flatten(module=module, optimizers=trainer.optimizers, progress=progress, rng=torch.get_rng_state())


def send(number: signal.Signals) -> Callable[..., None]:
    """A function that sends this process a signal."""
    return lambda *args: signal.raise_signal(number)


ENDS = {
    "SIGTERM": (SIGTERMException, send(signal.SIGTERM)),
    "SIGINT": (SystemExit, send(signal.SIGINT)),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("within", [False, True])
def test_a_signal_ends_the_fit(within: bool, phase: str, name: str, tmp_path: Path) -> None:
    """Between two batches, or in the middle of one: the callback is gone, and serves the next fit."""
    error, what = ENDS[name]
    at = PHASES[phase]
    killer = Failing(at, 20, what) if within else Raising(at, what)
    callback = tape()
    found = ended_by(error, tmp_path / "graphed", [killer, callback])
    if name == "SIGTERM":
        # Lightning lets the batch end first.
        expected = ended_by(error, tmp_path / "eager", [Raising(at, what)])
        assert_same(expected, found)
    assert "replayed" in callback.report()
    fresh, again = fit_with(tmp_path / "fresh", []), fit_with(tmp_path / "again", [callback])
    assert_same_fits(fresh, again)
    assert callback.stats.replayed == FULL - 6


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
}


@pytest.mark.parametrize("how", COPIES)
def test_the_callback_is_copied(how: str, tmp_path: Path) -> None:
    """Before, in and after a fit, with its figures and without its seam; the fit does not notice, the copy works."""
    made: list[tuple[Any, Any]] = []
    callback = tape()
    COPIES[how](callback)
    copying = Raising(8, lambda trainer: made.append((COPIES[how](callback), callback.stats.replayed)), at_end=True)
    expected = fit_with(tmp_path / "eager", [])
    found = fit_with(tmp_path / "graphed", [copying, callback])
    assert_same_fits(expected, found)
    ((copied, replayed),) = made
    assert replayed == copied.stats.replayed == 2
    assert callback.stats.replayed == FULL - 6
    after = COPIES[how](callback)
    assert after.report() == callback.report()
    for number, fresh in enumerate((copied, after)):
        again = fit_with(tmp_path / str(number), [fresh])
        assert_same_fits(expected, again)
        assert fresh.stats.replayed == FULL - 6


def test_the_module_is_copied_in_the_middle_of_a_fit(tmp_path: Path) -> None:
    """As averaging callbacks do; the Trainer itself cannot be, and says why."""
    made: list[Any] = []

    def copies(trainer: Any) -> None:
        made.append(copy.deepcopy(trainer.lightning_module))
        with pytest.raises(CopyError, match="a graphed step cannot be copied"):
            copy.deepcopy(trainer.fit_loop.epoch_loop.automatic_optimization)

    expected = fit_with(tmp_path / "eager", [])
    found = fit_with(tmp_path / "graphed", [Raising(8, copies, at_end=True), tape()])
    assert_same_fits(expected, found)
    assert len(made[0].losses) == 8
