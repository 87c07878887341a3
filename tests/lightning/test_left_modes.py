"""What a ``training_step`` or ``validation_step`` leaves set: replays leave it too, with validation between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from graphplan.environment.switches import read_all, set_all
from tests.crossing import by_key, each
from tests.facts import assert_same, flatten
from tests.lightning.parts import LitDigits, assert_same_fits, fit, tape, with_step
from tests.lightning.rows_of_parts import Manual
from tests.twins import keep

BASE = read_all()


@pytest.fixture(autouse=True)
def _switches_go_back() -> Iterator[None]:
    yield
    set_all(BASE)


class Looks(Callback):
    """Calls the module after each batch in the mode that it was left in, and keeps modes, flags and switches.

    ``change``: what the host does after a batch.
    """

    def __init__(self, change: Callable[[Any], object] = lambda module: None) -> None:
        self.kept: list[Any] = []
        self.change = change

    def _look(self, module: Any) -> None:
        with torch.no_grad():
            out = module(torch.linspace(0, 1, 128).view(2, 64))
        modes = [part.training for part in module.modules()]
        flags = [parameter.requires_grad for parameter in module.parameters()]
        groups = [{**group, "params": None} for group in module.optimizers().param_groups]
        self.kept.append(keep([out, modes, flags, groups, read_all(), dict(module.state_dict())]))

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self._look(module)
        self.change(module)

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self._look(module)


def _frozen_statistics(self: Any, batch: Any, batch_idx: int) -> Any:
    self.net[1].eval()
    return LitDigits.training_step(self, batch, batch_idx)


def _eval_afterwards(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = LitDigits.training_step(self, batch, batch_idx)
    self.net.eval()
    return loss


def _train_first(self: Any, batch: Any, batch_idx: int) -> Any:
    self.train()
    return LitDigits.training_step(self, batch, batch_idx)


def _evaluates(self: Any, batch: Any, batch_idx: int) -> None:
    self.eval()
    LitDigits.validation_step(self, batch, batch_idx)


def _freezes(self: Any, batch: Any, batch_idx: int) -> Any:
    self.net[0].requires_grad_(False)
    return LitDigits.training_step(self, batch, batch_idx)


def _decays(self: Any, batch: Any, batch_idx: int) -> Any:
    for group in self.optimizers().param_groups:
        group["weight_decay"] = 0.25
    return LitDigits.training_step(self, batch, batch_idx)


def _sets_switches(self: Any, batch: Any, batch_idx: int) -> Any:
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    return LitDigits.training_step(self, batch, batch_idx)


STEPS = [_frozen_statistics, _eval_afterwards, _train_first, _freezes, _decays, _sets_switches]


def _back(module: Any) -> None:
    module.train()
    module.requires_grad_(True)
    for group in module.optimizers().param_groups:
        group["weight_decay"] = 0.01
    set_all(BASE)


def run(make: Callable[[], Any], folder: Path, callback: Any = None, change: Any = lambda module: None) -> Any:
    """A fit with validation in the middle of each epoch, and what was looked at."""
    set_all(BASE)
    looks = Looks(change)
    return fit(make, folder, callback, more=[looks], val_check_interval=5, max_epochs=4), looks


def check(make: Callable[[], Any], folder: Path, change: Any = lambda module: None, *, replayed: int = 20) -> Any:
    """The same modes, flags, groups, switches, weights and outputs after each batch, with replays and without."""
    expected, eager = run(make, folder / "eager", None, change)
    found, graphed = run(make, folder / "graphed", tape(eval=True), change)
    for number, (one, two) in enumerate(zip(eager.kept, graphed.kept, strict=True)):
        assert_same(flatten(kept=one), flatten(kept=two), f" after batch {number}")
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed >= replayed, found.callback.report()
    return found


@each(change=by_key({"nothing": lambda module: None, "put back": _back}), step=STEPS)
@pytest.mark.crossed(2)
def test_replays_leave_what_the_training_step_leaves(step: Any, change: Any, tmp_path: Path) -> None:
    """Validation comes in between, evaluated by replays too."""
    check(lambda: with_step(step)(schedule=None), tmp_path, change)


def test_a_validation_step_that_sets_modes(tmp_path: Path) -> None:
    """And a training step that sets others."""
    module = with_step(_train_first, validation_step=_evaluates)
    found = check(lambda: module(schedule=None), tmp_path)
    assert found.callback.stats.captured <= 3


class Toggled(Manual):
    """Toggles its optimizer, and leaves it so: what is not the optimizer's stays frozen."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.toggle_optimizer(self.optimizers())  # type: ignore[arg-type]
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.net[4].parameters())


class Other(Toggled):
    """It trains another layer with another optimizer."""

    def configure_optimizers(self) -> Any:
        return [self.make_optimizer(self.net[number].parameters()) for number in (0, 4)]

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return super().optimizers(use_pl_optimizer)[1]  # type: ignore[index]


@pytest.mark.parametrize("make", [Toggled, Other])
def test_an_optimizer_that_stays_toggled(make: Any, tmp_path: Path) -> None:
    """``untoggle_optimizer`` is forgotten."""
    check(make, tmp_path)
    check(make, tmp_path / "back", lambda module: module.requires_grad_(True))


def _decays_in_turns(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = LitDigits.training_step(self, batch, batch_idx)
    for group in self.optimizers().param_groups:
        group["weight_decay"] = 0.5 - group["weight_decay"]
    return loss


def test_a_value_that_alternates(tmp_path: Path) -> None:
    """Each of two programs leaves what the other one begins with."""
    found = check(lambda: with_step(_decays_in_turns)(schedule=None), tmp_path, replayed=15)
    assert found.callback.stats.captured <= 3


def _freezes_by_turns(self: Any, batch: Any, batch_idx: int) -> Any:
    self.net[0].requires_grad_(self.global_step % 2 == 0)
    return LitDigits.training_step(self, batch, batch_idx)


def test_a_layer_that_is_frozen_by_turns(tmp_path: Path) -> None:
    """Its gradients have places only in every other step: a check looked for them where there were none before."""
    found = check(lambda: with_step(_freezes_by_turns)(schedule=None), tmp_path, replayed=15)
    assert found.callback.stats.verified >= 2
