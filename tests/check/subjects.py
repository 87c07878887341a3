"""What the tests of ``graphplan check`` look at: modules, data and steps, as a user's file has them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Good(pl.LightningModule):
    """A module whose steps are replayed."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Linear(width, 1)
        self.best, self.seen = 1e9, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Bad(Good):
    """Four blockers in four lines."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        if int(loss) > self.best:  # line of the first
            loss = loss * 2
        if int(loss + 1) > 5:  # line of the second
            loss = loss * 2
        kept = loss.detach().cpu()
        self.seen = torch.rand(()).tolist()  # line of the fourth, and of a changed attribute
        return loss + 0 * kept  # line of the third


class Own(Good):
    """Has a loader of its own."""

    def train_dataloader(self) -> DataLoader[Any]:
        return loader


class OptimizerOnly(Good):
    """Reads its loss, so that no more than the optimizer's step can be replayed."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        return loss if int(loss) >= 0 else loss * 2


class HostOptimizer(Good):
    """Has an optimizer that is stepped on the host, so that forward and backward alone are replayed."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


class Data(pl.LightningDataModule):
    """Batches of eight rows."""

    def __init__(self, rows: int = 64) -> None:
        super().__init__()
        self.rows = rows

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(self.rows, 8)), batch_size=8)


loader: DataLoader[Any] = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8)
batches = [(torch.randn(4, 8),) for _ in range(3)]
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step(x: Tensor) -> Tensor:
    """A plain step that prints."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    print("a step")  # noqa: T201
    return loss.detach()


def moves(x: Tensor) -> Tensor:
    """Copies to the host by name and by device; only the first is the host's wherever it runs."""
    return model(x.to(x.device)).detach().to("cpu") * 2
