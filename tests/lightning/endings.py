"""What has to be gone after a fit, and fits that end in an exception."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.parts import Observer, ignore_lightning_warnings, loaders, trainer_of


def assert_nothing_installed(trainer: Any, module: Any) -> None:
    """No instance attribute shadows a class's method, and the optimizers are the user's again."""
    epoch_loop = trainer.fit_loop.epoch_loop
    for owner in (epoch_loop.automatic_optimization, epoch_loop.manual_optimization):
        assert not {"run", "output_result_cls"} & set(vars(owner))
    assert not {"advance", "on_advance_end"} & set(vars(epoch_loop))
    assert not {"optimizer_step", "training_step", "backward", "batch_to_device"} & set(vars(trainer.strategy))
    assert not {"training_step", "optimizer_step", "log", "log_dict", "_LightningModule__to_tensor"} & set(vars(module))
    assert all(type(logger).__module__.startswith("lightning.") for logger in trainer.loggers)
    assert "clip_gradients" not in vars(trainer.precision_plugin)
    for optimizer in trainer.optimizers:
        assert all(type(group["lr"]) is float for group in optimizer.param_groups)
        assert "step" not in vars(optimizer) or optimizer.step.__module__.startswith("torch")


def run_until(
    error: type[BaseException], match: str, make: Callable[[], Any], folder: Path, callback: Any
) -> tuple[Any, Any]:
    """Fit until ``error`` comes out with a message that matches; return trainer and module."""
    torch.manual_seed(0)
    module = make()
    trainer = trainer_of(folder, [Observer(), *([callback] if callback else [])])
    torch.manual_seed(1)
    with warnings.catch_warnings(), pytest.raises(error, match=match):
        ignore_lightning_warnings()
        trainer.fit(module, *loaders())
    return trainer, module
