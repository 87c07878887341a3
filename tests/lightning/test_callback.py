"""The callback's own life: what it installs and removes, what it refuses and reports."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim.lr_scheduler import ConstantLR

from graphplan import (
    GraphPlanCallback,
    GraphPlanError,
    HostSyncError,
    NotCapturedError,
    OptionError,
    PolicyError,
    SkipReason,
)
from tests.crossing import each
from tests.facts import assert_same, flatten
from tests.lightning.endings import assert_nothing_installed, run_until
from tests.lightning.parts import (
    LitDigits,
    Observer,
    assert_fit_equals_eager,
    assert_same_fits,
    fit,
    ignore_lightning_warnings,
    loaders,
    per_step,
    tape,
    trainer_of,
    with_step,
)

FULL = 21


@pytest.mark.twice
def test_nothing_stays_installed_after_a_fit(tmp_path: Path) -> None:
    """The trainer, the module and the optimizer are as after an eager fit."""
    found = fit(LitDigits, tmp_path, tape())
    assert found.callback.stats.replayed == FULL
    assert_nothing_installed(found.trainer, found.module)


class Mine(Exception):
    """Raised by a training step in here."""


@each(error=[Mine, SystemExit], batch=[0, 3, 4, 5])
def test_an_exception_in_the_step(error: type[BaseException], batch: int, tmp_path: Path) -> None:
    """In warm-up, traces and capture: it comes out, nothing stays installed, the state is the eager one."""

    def step(self: Any, data: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == batch:
            raise error("from the step")
        return self.loss_of(data)

    states = []
    for name, callback in (("eager", None), ("graphed", tape(allow=("trainer.*",)))):
        trainer, module = run_until(error, "from the step", with_step(step), tmp_path / name, callback)
        assert_nothing_installed(trainer, module)
        states.append(flatten(module=module, optimizers=trainer.optimizers, rng=torch.get_rng_state()))
    assert_same(*states)


class Interrupting(Observer):
    """Presses Ctrl-C, or fails, after a replayed batch."""

    def __init__(self, error: type[BaseException], at: int) -> None:
        super().__init__()
        self.error, self.at = error, at

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.at:
            raise self.error("from a callback")


@pytest.mark.parametrize("error", [Mine, KeyboardInterrupt])
@pytest.mark.parametrize("at", [2, 12])
@pytest.mark.twice
def test_an_interrupted_fit(error: type[BaseException], at: int, tmp_path: Path) -> None:
    """Ctrl-C and errors of other callbacks leave nothing behind, before and after the first replay."""
    callback = tape()
    trainer = trainer_of(tmp_path, [Interrupting(error, at), callback])
    module = LitDigits()
    # Lightning turns Ctrl-C into an exit with status 1, or before 2.4 into the fit's early end.
    is_an_end = error is KeyboardInterrupt and "exit(1)" not in getsource(call._call_and_handle_interrupt)
    warned = pytest.warns(UserWarning, match="Detected KeyboardInterrupt")
    with warned if is_an_end else pytest.raises((error, SystemExit), match=r"from a callback|^1$"):
        ignore_lightning_warnings()
        trainer.fit(module, *loaders())
    assert_nothing_installed(trainer, module)
    # Of twelve batches six come before the first replay, and the tenth is ragged.
    assert callback.stats.replayed == (5 if at == 12 else 0)


def reading_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    self.last = complex(loss.detach()).real
    return loss


def test_a_refusal_raises(tmp_path: Path) -> None:
    """A step that cannot be replayed is an error that names the line; the trainer is left as it was."""
    text = r"_local_scalar_dense.* at test_callback\.py:\d+ in reading_step: `self\.last = complex\(loss\.detach"
    trainer, module = run_until(HostSyncError, text, with_step(reading_step), tmp_path / "graphed", tape())
    assert_nothing_installed(trainer, module)
    assert trainer.global_step == 3


def test_a_refusal_falls_back_to_eager(tmp_path: Path) -> None:
    """``on_failure="eager"``: one warning with the line, the eager numbers, and the reason in the report."""
    expected = fit(with_step(reading_step), tmp_path / "eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = tape(on_failure="eager", components=("forward_backward", "optimizer"))
        found = fit(with_step(reading_step), tmp_path / "graphed", whole)
    messages = [str(w.message) for w in caught if "test_callback.py" in str(w.message)]
    assert len(messages) == 1, messages
    assert_same_fits(expected, found)
    stats = found.callback.stats
    assert stats.replayed == 0
    assert stats.skipped[SkipReason.HOST_SYNC] >= 24
    assert "test_callback.py" in found.callback.report()


def test_a_capture_that_was_due_and_did_not_happen(tmp_path: Path) -> None:
    """Batches whose shape is another one each time: an error that says so, or eager steps with the right numbers."""
    with pytest.raises(NotCapturedError, match=r"no step was captured in \d+ steps.*shape.*on_failure='eager'"):
        fit(LitDigits, tmp_path / "raise", tape(), sizes=range(2, 62))
    expected = fit(LitDigits, tmp_path / "eager", sizes=range(2, 62))
    with pytest.warns(UserWarning, match=r"no step was captured in \d+ steps"):
        found = fit(LitDigits, tmp_path / "graphed", tape(on_failure="eager"), sizes=range(2, 62))
    assert_same_fits(expected, found)
    assert (found.callback.stats.captured, found.callback.stats.eager) == (0, 180)


def test_a_fit_of_which_no_step_can_be_captured(tmp_path: Path) -> None:
    """Said when training starts, with the next move; ``on_failure="eager"`` warns and goes on as without us."""
    reason = "detect_anomaly=True reads every gradient on the host; turn it off"
    text = f"no step of this fit can be captured: {reason}"
    with pytest.raises(NotCapturedError, match=f"{text}, or pass on_failure='eager'"):
        fit(LitDigits, tmp_path / "raise", tape(), detect_anomaly=True)
    expected = fit(LitDigits, tmp_path / "eager", detect_anomaly=True)
    with pytest.warns(UserWarning, match=f"graphplan runs this fit eagerly: {text}"):
        found = fit(LitDigits, tmp_path / "graphed", tape(on_failure="eager"), detect_anomaly=True)
    assert_same_fits(expected, found)
    assert reason in found.callback.report()


def test_a_module_without_optimizers(tmp_path: Path) -> None:
    """An empty list, over which Lightning itself would stumble with an IndexError."""
    make = with_step(LitDigits.training_step, configure_optimizers=lambda self: [])
    text = "the module has 0 optimizers, and automatic optimization steps exactly one: return one from configure_optim"
    with pytest.raises(NotCapturedError, match=text):
        fit(make, tmp_path, tape())


STRATEGIES: dict[str, tuple[dict[str, Any], str]] = {
    "looks for unused parameters": (
        {"find_unused_parameters": True},
        "has find_unused_parameters=True, which inspects",
    ),
    "communication hook": (
        {"ddp_comm_hook": allreduce_hook},
        "has a communication hook, and a replay would leave out its Python code",
    ),
}


@pytest.mark.parametrize(("options", "text"), STRATEGIES.values(), ids=list(STRATEGIES))
def test_a_strategy_that_cannot_be_captured(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    """Refused by its name, in training and in evaluation."""
    before = dict(os.environ)
    train, validate = loaders()
    try:
        for eval_only in (False, True):
            strategy = DDPStrategy(process_group_backend="gloo", **options)
            trainer = trainer_of(tmp_path, [tape(eval=True)], strategy=strategy, devices=1, num_sanity_val_steps=0)
            with warnings.catch_warnings(), pytest.raises(NotCapturedError, match=f"the DDPStrategy {text}"):
                ignore_lightning_warnings()
                if eval_only:
                    trainer.validate(LitDigits(), validate)
                else:
                    trainer.fit(LitDigits(), train, validate)
            torch.distributed.destroy_process_group()
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_a_strategy_of_another_kind(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, [])
    trainer._accelerator_connector.strategy = FSDPStrategy()
    with pytest.raises(NotCapturedError, match="FSDPStrategy; only single-device strategies, DDPStrategy and ModelP"):
        tape().on_train_start(trainer, LitDigits())


def test_a_fit_that_is_meant_to_be_eager(tmp_path: Path) -> None:
    """``eager_if`` for every batch is no failure to capture, and the report gives it as the reason."""
    found = assert_fit_equals_eager(LitDigits, tmp_path, replayed=0, callback=tape(eager_if=1))
    assert found.callback.stats.skipped[SkipReason.EAGER_IF] == 30
    assert SkipReason.EAGER_IF.value in found.callback.report()


def test_a_fit_that_is_too_short_only_says_so(tmp_path: Path) -> None:
    """``fast_dev_run`` and other short fits are no failure; the report says that nothing was captured."""
    found = fit(LitDigits, tmp_path, tape(), fast_dev_run=2)
    stats = found.callback.stats
    assert (stats.eager, stats.replayed) == (2, 0)
    assert "2" in found.callback.report() and "replay" in found.callback.report()
    short = fit(LitDigits, tmp_path / "short", tape(), max_epochs=1, limit_train_batches=4)
    assert short.callback.stats.replayed == 0


@pytest.mark.twice
def test_the_summary_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: Any) -> None:
    """One line at the end of the fit says how many steps were replayed."""
    caplog.set_level("INFO")
    fit(LitDigits, tmp_path, tape())
    out, err = capfd.readouterr()
    lines = [line for line in (out + err + caplog.text).splitlines() if "replayed" in line]
    assert any("21" in line for line in lines), lines


def test_the_report(tmp_path: Path) -> None:
    """Counts of every kind are in the report, with the reasons for eager steps."""
    callback = tape(eager_if=5)
    assert isinstance(callback.report(), str)
    found = fit(LitDigits, tmp_path, callback)
    stats, report = found.callback.stats, found.callback.report()
    for count in (stats.eager, stats.traced, stats.captured, stats.replayed):
        assert str(count) in report
    assert SkipReason.EAGER_IF.value in report


@pytest.mark.parametrize("make", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))])
@pytest.mark.twice
def test_the_callback_can_be_copied_before_a_fit(make: Callable[[Any], Any], tmp_path: Path) -> None:
    """Spawning strategies and tuners copy callbacks; the copy works like the original."""
    copied = make(tape(warmup_steps=4, allow=("model.calls",)))
    assert fit(LitDigits, tmp_path, copied).callback.stats.replayed == 20


def test_the_eager_backend(tmp_path: Path) -> None:
    """``backend="eager"`` is the fit without the callback, and no failure."""
    found = assert_fit_equals_eager(LitDigits, tmp_path, replayed=0, callback=tape(backend="eager"))
    assert found.callback.stats.eager == 30


@pytest.mark.twice
def test_policies_from_a_configuration(tmp_path: Path) -> None:
    """Policies can be written as plain lists; one without storage for the state is refused by name."""
    full = {"train": {"static_roles": ["input", "param", "state"], "copy_roles": ["input"]}}
    assert fit(LitDigits, tmp_path / "full", tape(policies=full)).callback.stats.replayed == FULL
    short = {"train": {"static_roles": ["input", "param"], "copy_roles": ["input"]}}
    with pytest.raises(GraphPlanError, match=r"running_mean.*static_roles"):
        fit(LitDigits, tmp_path / "short", tape(policies=short))


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "backend": ({"backend": "cuda"}, r"'cuda'.*cudagraph, tape, eager"),
    "mode": ({"mode": "fit"}, r"'fit'.*'auto' or 'train'"),
    "on_failure": ({"on_failure": "warn"}, r"on_failure.*warn.*raise.*eager"),
    "warmup_steps": ({"warmup_steps": 0}, r"warmup_steps.*0"),
    "eval": ({"eval": "yes"}, "eval is 'yes'; expected True or False"),
    "policies": ({"policies": {"training": None}}, r"'training'.*train, inference"),
    "roles": ({"policies": {"train": {"static_roles": ["weights"]}}}, r"'weights'.*input, param, state"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_do_not_exist(name: str) -> None:
    """Said when the callback is made; the message has the choices."""
    options, pattern = OPTIONS[name]
    with pytest.raises(ValueError, match=pattern) as caught:
        GraphPlanCallback(**options)
    assert isinstance(caught.value, PolicyError | GraphPlanError)


def test_two_callbacks_in_one_trainer(tmp_path: Path) -> None:
    """Both would stand in for the same loop: the fit does not begin."""
    with pytest.raises(
        OptionError, match=r"the Trainer has 2 GraphPlanCallbacks \(callbacks\[\d\] and callbacks\[\d\]\)"
    ):
        fit(LitDigits, tmp_path, tape(), more=[tape(on_failure="eager")])


@pytest.mark.twice
def test_one_callback_serves_two_trainers(tmp_path: Path) -> None:
    """Statistics are those of the last fit; programs of the first fit do not outlive it."""
    callback = tape()
    fit(LitDigits, tmp_path / "first", callback)
    other = partial(LitDigits, schedule=lambda optimizer: per_step(ConstantLR(optimizer)))
    found = fit(other, tmp_path / "second", callback)
    assert (callback.stats.captured, callback.stats.replayed) == (1, FULL)
    assert_nothing_installed(found.trainer, found.module)
