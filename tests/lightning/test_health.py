"""Failures, signals and copies in the middle of a fit: the fit goes on as the eager one, or ends and leaves nothing."""

from __future__ import annotations

import copy
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import SIGTERMException

from graphplan import SkipReason
from tests.crossing import each, pairs
from tests.facts import assert_same, flatten
from tests.health import Planted, process_facts
from tests.lightning.endings import assert_nothing_installed
from tests.lightning.failing import Failing, Raising, fit_with, keeping
from tests.lightning.parts import (
    STEPS_PER_EPOCH,
    LitDigits,
    assert_same_fits,
    ignore_lightning_warnings,
    loaders,
    tape,
    trainer_of,
)

# What fails is told by its call.
pytestmark = pytest.mark.twice
PHASES = {"first trace": 3, "second trace": 4, "capture": 5, "replay": 6}
FULL = STEPS_PER_EPOCH - 1
_STEPS = "progress['optimizer']['step']['total']['{}']"


def _scaled() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def _stepping() -> LitDigits:
    """Its optimizer steps on the host: only forward and backward are captured."""
    module = keeping()
    type(module).optimizer_step = lambda self, *args, **kwargs: LitDigits.optimizer_step(self, *args, **kwargs)
    return module


FORMS: dict[str, Callable[[], dict[str, Any]]] = {
    "whole": dict,
    "scaled": _scaled,
    "components": lambda: {"base": _stepping},
}


@pytest.mark.parametrize("phase", ["first trace", "second trace", "capture"])
def test_memory_runs_out_where_logged_values_are_stacked(phase: str, tmp_path: Path) -> None:
    """In graphplan's own work within the step: the call is undone as for any other operator, and then made eagerly."""
    is_stack = lambda func: func is torch.ops.aten.stack.default  # noqa: E731
    failing = Failing(PHASES[phase], 0, torch.OutOfMemoryError("CUDA out of memory"), is_stack)
    expected, callback = fit_with(tmp_path / "eager", []), tape(on_failure="eager")
    with pytest.warns(UserWarning, match="eagerly: memory ran out"):
        found = fit_with(tmp_path / "graphed", [failing, callback])
    assert failing.mode.failed_at == "aten.stack.default"
    assert_same_fits(expected, found)
    assert callback.stats.replayed == 0


@each(form=FORMS, phase=["first trace", "second trace", "capture"])
@pytest.mark.crossed(2)
def test_a_failed_capture_goes_on_eagerly(phase: str, form: str, tmp_path: Path) -> None:
    """At operators all over the step: progress, logs, checkpoints, the scaler and Python values are the eager fit's."""
    expected = fit_with(tmp_path / "eager", [], **FORMS[form]())
    failed = []
    for number in range(0, 160, 16):
        failing = Failing(PHASES[phase], number, torch.OutOfMemoryError("CUDA out of memory"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = fit_with(tmp_path / str(number), [failing, tape(on_failure="eager")], **FORMS[form]())
            except torch.OutOfMemoryError:
                continue  # It was Lightning's own code that failed, before or after the graphed step.
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


@each(
    hook=["on_before_backward", "on_after_backward", "on_before_optimizer_step"], phase=["first trace", "second trace"]
)
def test_an_error_of_the_users_in_a_trace(phase: str, hook: str, tmp_path: Path) -> None:
    """It leaves what it leaves without the callback: running statistics, gradients, random numbers."""

    def end(folder: Path, callbacks: list[Callback]) -> dict[str, Any]:
        armed: list[Any] = []

        def fail(*args: Any) -> None:
            if armed:
                raise Planted("in the batch")

        arming = Raising(PHASES[phase], armed.append)
        return ended_by(Planted, folder, [arming, *callbacks], "in the batch", lambda: keeping(**{hook: fail}))

    assert_same(*map(_without_progress, (end(tmp_path / "eager", []), end(tmp_path / "graphed", [tape()]))))


def _without_progress(facts: dict[str, Any]) -> dict[str, Any]:
    """That the batch was begun does not show: resuming sets these counters back."""
    return {name: fact for name, fact in facts.items() if not name.startswith("progress")}


@pytest.mark.parametrize("number", [5, 39, 70])
def test_an_error_of_the_users_in_the_capture(number: int, tmp_path: Path) -> None:
    """What its call had done is undone: module and optimizer are as before the batch."""
    at = PHASES["capture"]
    expected = ended_by(Planted, tmp_path / "eager", [Raising(at, Planted("before the batch"))], "before the batch")
    failing = Failing(at, number, Planted("in the batch"))
    found = ended_by(Planted, tmp_path / "graphed", [failing, tape()], "in the batch")
    assert found[_STEPS.format("completed")] == at
    assert_same(*map(_without_progress, (expected, found)))


def ended_by(
    error: type[BaseException],
    folder: Path,
    callbacks: list[Callback],
    match: str | None = None,
    make: Callable[[], LitDigits] = keeping,
) -> dict[str, Any]:
    """A fit that ends in ``error`` and leaves nothing installed: module, optimizers, progress, generator."""
    facts, handlers = process_facts(), [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    torch.manual_seed(0)
    module = make()
    trainer = trainer_of(folder, callbacks)
    torch.manual_seed(1)
    with warnings.catch_warnings(), pytest.raises(error, match=match):
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


@pytest.fixture
def interruptible() -> Iterator[None]:
    """An interrupt raises KeyboardInterrupt, also in a process that a shell started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pairs(name=ENDS, phase=PHASES, within=[False, True])
@pytest.mark.crossed(2)
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


@pytest.mark.parametrize("how", [*COPIES.values(), copy.copy], ids=[*COPIES, "copy"])
def test_a_copy_has_nothing_to_take_back(how: Callable[[Any], Any], tmp_path: Path) -> None:
    """What is replaced for the whole fit, here to clip gradients as Lightning alone refuses to, is the original's."""
    made: list[Any] = []
    callback = tape()
    copying = Raising(8, lambda trainer: made.append(how(callback)), at_end=True)
    options: dict[str, Any] = {"precision": "bf16-mixed", "gradient_clip_val": 1.0}
    fit_with(tmp_path, [copying, callback], **options)
    assert callback.stats.replayed == FULL - 6
    (copied,) = made
    assert vars(copied).keys() == vars(tape()).keys()
    assert not copied._fit_patches._exit_callbacks


@pytest.mark.parametrize("form", ["whole", "components"])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_a_loop_is_copied_in_the_middle_of_a_fit(how: Any, form: str, tmp_path: Path) -> None:
    """As averaging callbacks copy the module, and tuners the Trainer: the copies have Lightning's own methods."""
    made: list[Any] = []

    def copies(trainer: Any) -> None:
        made.append(copy.deepcopy(trainer.lightning_module))
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        trainer, loop.trainer = loop.trainer, None
        made.append(how(loop))
        loop.trainer = trainer

    expected = fit_with(tmp_path / "eager", [], **FORMS[form]())
    found = fit_with(tmp_path / "graphed", [Raising(8, copies, at_end=True), tape()], **FORMS[form]())
    assert_same_fits(expected, found)
    module, loop = made
    assert len(module.losses) == 8
    for name in ("run", "_make_closure", "_optimizer_zero_grad"):
        method = getattr(loop, name)
        assert method.__self__ is loop and method.__func__ is getattr(type(loop), name)


def test_a_trainer_is_copied_in_the_middle_of_a_fit(tmp_path: Path) -> None:
    """A copied Trainer is one without a seam, and its callback can be used for another fit."""
    made: list[Any] = []
    callback = tape()
    copying = Raising(8, lambda trainer: made.append(copy.deepcopy(trainer)), at_end=True)
    assert_same_fits(fit_with(tmp_path / "eager", []), fit_with(tmp_path / "graphed", [copying, callback]))
    copied = next(one for one in made[0].callbacks if type(one) is type(callback))
    assert copied is not callback and copied.stats.calls == 8
