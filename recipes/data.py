"""The recipes' real data as LightningDataModules: every batch has ``batch_size`` items but the last of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from recipes.datasets import Splits, TensorBatches, digits_splits, stdlib_splits

Batch = tuple[Tensor, ...]


def keep_batch(batch: Any) -> Any:
    """The batch as :class:`TensorBatches` made it, though a loader promises a list: nothing is left to collate."""
    return batch


class SplitData(pl.LightningDataModule):
    """Loaders of a training and a validation set that :meth:`setup` makes once, with ``make_splits``."""

    def __init__(
        self, make_splits: Callable[[], Splits], *, batch_size: int, seed: int, drop_last: bool, num_workers: int
    ) -> None:
        super().__init__()
        self.make_splits = make_splits
        self.batch_size = batch_size
        self.seed = seed
        self.drop_last = drop_last
        self.num_workers = num_workers
        self.splits: Splits | None = None

    @override
    def setup(self, stage: str) -> None:
        if self.splits is None:
            self.splits = self.make_splits()

    def _loader(self, data: TensorBatches, *, train: bool) -> DataLoader[Batch]:
        return DataLoader(
            data,
            batch_size=self.batch_size,
            shuffle=train,
            # Its own generator: the order of the batches does not depend on how much the model draws.
            generator=torch.Generator().manual_seed(self.seed),
            drop_last=self.drop_last and train,
            num_workers=self.num_workers,
            collate_fn=keep_batch,
        )

    def _get_splits(self) -> Splits:
        if self.splits is None:
            raise RuntimeError("the data is not there yet: call setup('fit') before asking for a loader")
        return self.splits

    @override
    def train_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self._get_splits()[0], train=True)

    @override
    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self._get_splits()[1], train=False)

    @override
    def predict_dataloader(self) -> DataLoader[Batch]:
        return self.val_dataloader()


class DigitsData(SplitData):
    """The 1797 handwritten digits that scikit-learn carries."""

    def __init__(
        self,
        *,
        batch_size: int = 64,
        val_fraction: float = 0.2,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
    ) -> None:
        make_splits = partial(digits_splits, val_fraction=val_fraction, seed=seed)
        super().__init__(make_splits, batch_size=batch_size, seed=seed, drop_last=drop_last, num_workers=num_workers)


class StdlibText(SplitData):
    """Windows of ``block_size`` characters of the source text of Python's own standard library."""

    def __init__(
        self,
        *,
        block_size: int = 64,
        batch_size: int = 32,
        val_fraction: float = 0.1,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
    ) -> None:
        make_splits = partial(stdlib_splits, block_size, val_fraction=val_fraction)
        super().__init__(make_splits, batch_size=batch_size, seed=seed, drop_last=drop_last, num_workers=num_workers)
