"""Progress bars that are drawn as often as somebody can see it, not once per step.

Lightning's ``TQDMProgressBar`` writes two lines to the terminal after every ``refresh_rate`` batches, one by default:
more time than a small replay takes. While steps are that fast, a bar is drawn some twenty times a second.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from graphplan.callback.instance_patch import InstancePatch, PatchedMethods, Recover
from graphplan.callback.logging.bar_metrics import LazyNumbers

_INTERVAL = 0.05
"""Seconds between two pictures."""
_SLOW_START = 64
"""So many updates of a bar are drawn in any case: those of short runs, which are looked at one by one."""


class ThrottledBar(PatchedMethods):
    """Stands where a Trainer's bar asks whether to draw itself, unless the bar has an opinion of its own.

    An update that is not drawn still sets the count of the bar that it is of: whatever draws that bar next, its close
    included, shows where it is.
    """

    def __init__(self, trainer: Trainer, numbers: LazyNumbers) -> None:
        self._trainer, self._numbers = trainer, numbers
        bar: Any = trainer.progress_bar_callback
        known = isinstance(bar, TQDMProgressBar) and type(bar)._should_update is TQDMProgressBar._should_update
        self._bar: Any = bar if known else None
        super().__init__(*([InstancePatch(bar, "_should_update", self._should_update)] if known else []))
        self._asked = 0
        self._drawn = 0.0

    def _should_update(self, current: int, total: int | None) -> bool:
        if not TQDMProgressBar._should_update(self._bar, current, total):  # type: ignore[arg-type]
            return False
        self._asked += 1
        now = perf_counter()
        is_last = current == total
        if (
            self._asked > _SLOW_START
            and not is_last
            and (now - self._drawn < _INTERVAL or not self._numbers.are_here())
        ):
            bar = self._bar.train_progress_bar if self._trainer.training else self._bar.val_progress_bar
            bar.n = current
            return False
        self._drawn = now
        return True

    def rests(self, batch_idx: int) -> bool:
        """Return True if there is nothing to draw after this training batch, as is sure without asking the bar."""
        if self._asked <= _SLOW_START or perf_counter() - self._drawn >= _INTERVAL:
            return False
        bar, current = self._bar, batch_idx + 1
        if bar is None or current == bar.train_progress_bar.total:
            return False
        if bar.is_enabled and current % bar.refresh_rate == 0:
            bar.train_progress_bar.n = current
        return True


_AFTER_BATCH = {"train_progress_bar", "_should_update", "total", "_update_n", "set_postfix", "get_metrics"}
"""All that Lightning's bar names after a batch: it does nothing where it is not to update."""


def resting(callback: Any) -> Callable[[int], bool] | None:
    """What says after which batches ``callback`` has nothing to do, if it is a bar that stays silent now and then."""
    hook: Any = getattr(type(callback), "on_train_batch_end", None)
    asked = vars(callback).get("_should_update")
    bar = getattr(getattr(asked, "func", None), "__self__", None)
    if not isinstance(bar, ThrottledBar) or hook is not TQDMProgressBar.on_train_batch_end:
        return None
    return bar.rests if _AFTER_BATCH.issuperset(hook.__code__.co_names) else None


def stand_ins_of_bars(trainer: Trainer, recover: Recover) -> list[PatchedMethods]:
    """All that has to do with a Trainer's bars."""
    numbers = LazyNumbers(trainer, recover)
    return [numbers, ThrottledBar(trainer, numbers)]
