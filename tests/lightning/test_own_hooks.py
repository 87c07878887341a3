"""Hooks inside the step that come, change or go in the middle of a fit: on the instance, or with a callback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from tests.lightning.parts import LitDigits, assert_same_fits, fit, tape


def _scale(module: Any, factor: float) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


class _Scales(Callback):
    """Scales gradients before they are used."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        _scale(module, 0.25)


def _module_hook(trainer: Any, module: Any, owner: Any) -> None:
    module.on_after_backward = lambda: _scale(module, 0.5)


def _module_method(trainer: Any, module: Any, owner: Any) -> None:
    plain = module.backward
    module.backward = lambda loss, *args: plain(loss * 0.5, *args)


def _callback_hook(trainer: Any, module: Any, owner: Any) -> None:
    owner.on_after_backward = lambda *args: _scale(module, 0.5)


def _changed_hook(trainer: Any, module: Any, owner: Any) -> None:
    module.on_after_backward = lambda: _scale(module, 2.0)


def _removed_hook(trainer: Any, module: Any, owner: Any) -> None:
    vars(module).pop("on_after_backward", None)


def _new_callback(trainer: Any, module: Any, owner: Any) -> None:
    trainer.callbacks.append(_Scales())


class _Changes(Callback):
    """Makes a change after batch 3 of the second epoch; where it is one of a hook, another one after batch 6."""

    def __init__(self, *changes: Callable[[Any, Any, Any], None]) -> None:
        self._changes = dict(zip((3, 6), changes, strict=False))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx in self._changes:
            self._changes[batch_idx](trainer, module, self)


CHANGES = {
    "a module's hook": (_module_hook,),
    "a module's method": (_module_method,),
    "a callback's hook": (_callback_hook,),
    "a hook for another": (_module_hook, _changed_hook),
    "a hook that goes": (_module_hook, _removed_hook),
    "a callback": (_new_callback,),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.crossed(2)
def test_a_hook_that_comes_in_the_middle(name: str, tmp_path: Path) -> None:
    """The next step has it, as a program of its own."""
    expected = fit(LitDigits, tmp_path / "eager", more=[_Changes(*CHANGES[name])])
    callback = tape(loop="stock" if name == "a callback's hook" else "auto")
    found = fit(LitDigits, tmp_path / "graphed", callback, more=[_Changes(*CHANGES[name])])
    assert_same_fits(expected, found)
    assert callback.stats.captured >= 2
    unchanged = fit(LitDigits, tmp_path / "unchanged")
    with pytest.raises(AssertionError):
        assert_same_fits(unchanged, found)
