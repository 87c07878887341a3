"""Loaders in a plain loop: nobody walks into their workers and datasets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

from graphplan import graph_step
from tests.models import Mlp
from tests.twins import BEFORE_REPLAY, SEED

EPOCHS = 6


class Curriculum(Dataset[Any]):
    """Samples, and how hard they are."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.x = torch.randn(20, 8, generator=generator)
        self.y = torch.randint(4, (20,), generator=generator)
        self.level = 0.25

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


@pytest.mark.parametrize("persistent", [True, False])
def test_a_loader_with_workers(persistent: bool) -> None:
    """A step reads something through it. Its iterator, queues and processes are nobody's affair."""

    def train(*, replays: bool) -> tuple[list[float], Any]:
        torch.manual_seed(SEED)
        model, loader = Mlp(), DataLoader(Curriculum(), 4, num_workers=2, persistent_workers=persistent)
        optimizer = SGD(model.parameters(), lr=0.05, fused=True)

        def train_step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y) + out.square().mean() * loader.dataset.level / len(loader)
            loss.backward()
            optimizer.step()
            return loss

        owners = {"model": model, "optimizer": optimizer}
        step: Any = graph_step(train_step, owners=owners, backend="tape", verify="off") if replays else train_step
        return [step(x, y).item() for _ in range(EPOCHS) for x, y in loader], step

    found, step = train(replays=True)
    assert found == train(replays=False)[0]
    assert step.stats.replayed >= len(found) - 2 * BEFORE_REPLAY


def test_a_loader_that_no_step_names_is_left_alone() -> None:
    """Nobody copies its dataset, or looks into it."""

    class Loop:
        def __init__(self) -> None:
            self.model, self.loader = Mlp(), DataLoader(Curriculum(), 4)
            self.optimizer = SGD(self.model.parameters(), lr=0.05, fused=True)

        def step(self, x: Tensor, y: Tensor) -> Tensor:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            return loss

    loop = Loop()
    step = graph_step(loop.step, backend="tape")
    for _ in range(2):
        for x, y in loop.loader:
            step(x, y)
    assert step.stats.replayed
    assert not any("dataset" in path for path in step.machine.managed.walk().slots)
