"""Checks of a LightningModule, by a few steps of a fit in a separate Trainer."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, Dataset

from graphplan.check.run import STEPS, Ran, Result, check
from graphplan.environment.lightnings import callback_class, name_of
from graphplan.errors import OptionError


def check_fit(make: Callable[[], Any], data: Callable[[], Any], *, name: str = "fit") -> Result:
    """Train a module for a few steps on the CPU, and list everything that keeps its steps from being replayed.

    Examples:
        >>> from graphplan.check.fit import check_fit
        >>> from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
        >>> print(check_fit(BoringModel, BoringDataModule).replayed)
        each step would be one replay

    Args:
        make: returns the LightningModule, of either of Lightning's packages; called twice.
        data: returns a DataModule, a DataLoader, a Dataset of batches, or a list of batches; None if the module has
            its own loaders.
        name: the heading of the result.

    Returns:
        The result. ``print(result.text())`` lists the blockers.

    Raises:
        OptionError: if the data is none of these, or there is none.
    """

    def run() -> Ran:
        module, fed = make(), data()
        package = name_of(module)
        pl = importlib.import_module(package)
        callback = callback_class(package)(backend="tape", on_failure="eager")
        with _quiet(package):
            trainer = pl.Trainer(
                accelerator="cpu", devices=1, max_steps=STEPS, max_epochs=-1, logger=False, callbacks=[callback],
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
            )  # fmt: skip
            loader = getattr(module.train_dataloader, "__func__", None)
            is_own = fed is None and loader is not pl.LightningModule.train_dataloader
            # ``fit`` takes a data module in place of a loader.
            trainer.fit(module, fed if is_own or isinstance(fed, pl.LightningDataModule) else _loader_of(fed))
        return callback.stats, callback.plan, callback.notes

    return check(run, name)


@contextmanager
def _quiet(package: str) -> Iterator[None]:
    """Suppress Lightning's messages about a fit."""
    logger = logging.getLogger(package)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _loader_of(data: Any) -> DataLoader[Any]:
    if isinstance(data, DataLoader):
        return data
    if isinstance(data, Dataset | list) and len(data):  # type: ignore[arg-type]
        return DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    raise OptionError(
        f"data is {type(data).__name__}; expected a LightningDataModule, a DataLoader, a Dataset of batches or a list "
        "of them (--data, --batch), or a module with a train_dataloader of its own"
    )
