"""Lightning's dictionaries of metrics, which are filled when somebody asks: whoever looks finds what Lightning has."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.crossing import each
from tests.facts import assert_same, flatten
from tests.lightning.parts import ignore_lightning_warnings, loaders, tape, trainer_of, with_step

NAMES = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
BATCH, EPOCHS = 24, 3


def _step(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    self.log("shown", loss, prog_bar=True)
    self.log("both", loss * 2, on_step=True, on_epoch=True)
    return loss


class _Breaks(Callback):
    """Ends the run after a batch has been logged: before Lightning looks at what was, or ``later``."""

    def __init__(self, error: type[BaseException], *, later: bool) -> None:
        self._error, self._later = error, later

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 5) and not self._later:
            raise self._error

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 6):
            raise self._error


class _Keeps(Callback):
    """Asks for a dictionary once, and looks at it in each batch."""

    def __init__(self, name: str, begins: int) -> None:
        self._name, self._begins = name, begins
        self._kept: dict[str, Any] | None = None
        self.seen: list[list[Any]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._begins:
            self._kept = getattr(trainer, self._name)
        if self._kept is not None:
            self.seen.append([(name, type(value), float(value)) for name, value in self._kept.items()])


def _fit(folder: Path, callback: Any, *others: Callback, error: type[BaseException] = ValueError) -> dict[str, Any]:
    """Everything in the dictionaries after a fit in which nobody else looks at them."""
    torch.manual_seed(0)
    module: Any = with_step(_step)()
    trainer = trainer_of(folder, [*others, *([callback] if callback else [])], max_epochs=EPOCHS, log_every_n_steps=13)
    ignore_lightning_warnings()
    torch.manual_seed(1)
    with suppress(error):
        trainer.fit(module, *loaders(BATCH))
    return flatten(**{name: list(getattr(trainer, name).items()) for name in NAMES})


@pytest.mark.parametrize("error", [ValueError, StopIteration])
def test_a_batch_that_is_broken_off(error: type[BaseException], tmp_path: Path) -> None:
    """The dictionaries hold what it logged, as if it had been broken off a moment later."""
    expected = _fit(tmp_path / "eager", None, _Breaks(error, later=True), error=error)
    callback = tape(warmup_steps=1)
    found = _fit(tmp_path / "graphed", callback, _Breaks(error, later=False), error=error)
    assert callback.stats.replayed
    assert_same(expected, found)


@each(begins=[0, 9], name=NAMES)
def test_a_dictionary_that_somebody_keeps(name: str, begins: int, tmp_path: Path) -> None:
    """It goes on being filled, with numbers where they are for the bar."""
    runs = []
    for make in (None, partial(tape, warmup_steps=1)):
        keeps, callback = _Keeps(name, begins), make() if make is not None else None
        _fit(tmp_path / str(len(runs)), callback, keeps)
        runs.append(keeps.seen)
        assert callback is None or callback.stats.replayed
    assert len({str(seen) for seen in runs[0]}) > 9
    assert runs[0] == runs[1]
