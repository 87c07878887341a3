"""Loops of Fabric and Accelerate, with and without replays: the same, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from graphplan import graph_step
from tests.facts import assert_same, flatten

ROWS, BATCH, EPOCHS = 96, 8, 3
STEPS = EPOCHS * ROWS // BATCH
BEFORE_REPLAY = 6


def parts() -> tuple[nn.Module, torch.optim.Optimizer, CosineAnnealingLR, DataLoader]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    # Without fused=True graphplan takes the fused kernel on a CPU, and the loop without it torch's default.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    data = TensorDataset(torch.randn(ROWS, 8), torch.randint(0, 3, (ROWS,)))
    return model, optimizer, CosineAnnealingLR(optimizer, 20), DataLoader(data, batch_size=BATCH)


def left(model: nn.Module, optimizer: Any, schedule: Any, losses: list[Tensor]) -> dict[str, Any]:
    return flatten(
        model=dict(model.state_dict()), optimizer=optimizer.state_dict(), schedule=schedule.state_dict(), losses=losses,
        generator=torch.get_rng_state(),
    )  # fmt: skip


def fabric_loop(precision: str, wrap: Callable[..., Any]) -> tuple[Any, dict[str, Any]]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)  # type: ignore[arg-type]
    model, optimizer, schedule, loader = parts()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        return loss

    step = wrap(train_step, owners={"model": model, "optimizer": optimizer})
    losses = []
    for _ in range(EPOCHS):
        for x, y in loader:
            losses.append(step(x, y).detach().clone())
            schedule.step()
    return step, left(model, optimizer, schedule, losses)


def accelerate_loop(accumulates: int, precision: str, wrap: Callable[..., Any]) -> tuple[Any, dict[str, Any]]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # What an Accelerator of another test has set holds for the whole process.
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulates, mixed_precision=precision)
    model, optimizer, schedule, loader = accelerator.prepare(*parts())

    def train_step(x: Tensor, y: Tensor, updates: bool) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if updates:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = wrap(train_step, owners={"model": model, "optimizer": optimizer})
    losses = []
    for _ in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                losses.append(step(x, y, accelerator.sync_gradients).detach().clone())
                schedule.step()
    return step, left(model, optimizer, schedule, losses)


def eager(step: Callable[..., Tensor], **_: Any) -> Callable[..., Tensor]:
    return step


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_loop_of_fabric(precision: str) -> None:
    pytest.importorskip("lightning.fabric")
    _, expected = fabric_loop(precision, eager)
    step, found = fabric_loop(precision, graph_step)
    assert_same(expected, found)
    # Whether the gradients' norm is finite is asserted alone, so one trace will do.
    assert (step.stats.captured, step.stats.replayed) == (1, STEPS - BEFORE_REPLAY + 1)


@pytest.mark.parametrize(("accumulates", "precision"), [(1, "no"), (2, "no"), (1, "bf16")])
def test_a_loop_of_accelerate(accumulates: int, precision: str) -> None:
    pytest.importorskip("accelerate")
    _, expected = accelerate_loop(accumulates, precision, eager)
    step, found = accelerate_loop(accumulates, precision, graph_step)
    assert_same(expected, found)
    # Batches with and without an update have a program each.
    assert (step.stats.captured, step.stats.replayed) == (accumulates, STEPS - accumulates * BEFORE_REPLAY)
