"""A step in two parts, of which one or both are captured: forward and backward, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import HostSyncError, graph_step
from tests.crossing import pairs
from tests.facts import assert_same, flatten
from tests.split import Parts


class Run(Parts):
    """A small model with a normalisation and ``make``'s optimizer."""

    def __init__(self, make: Callable[..., Any], *, sets_to_none: bool) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        super().__init__(model, make(model.parameters()), sets_to_none=sets_to_none)

    def state(self, losses: list[Any]) -> Any:
        return flatten(losses=losses, model=self.model, optimizer=self.optimizer)


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
}


def drive(run: Run, first: Callable[..., Any], second: Callable[..., Any], *, accumulates: int = 1) -> Any:
    """30 batches, whose learning rate follows a schedule; what is left of them."""
    generator, schedule = torch.Generator().manual_seed(1), torch.optim.lr_scheduler.StepLR(run.optimizer, 4, 0.9)
    losses = []
    for index in range(30):
        losses.append(first(torch.randn(6, 4, generator=generator)))
        if (index + 1) % accumulates == 0:
            losses.append(second())
            schedule.step()
    return run.state(losses)


@pairs(sets_to_none=[True, False], name=OPTIMIZERS, accumulates=[1, 3])
@pytest.mark.twice
def test_the_optimizer_alone(name: str, sets_to_none: bool, accumulates: int) -> None:
    """Forward branches on a value, and makes new gradients each time; clipping, step and zero_grad are a replay."""
    eager, own = (Run(OPTIMIZERS[name], sets_to_none=sets_to_none) for _ in range(2))
    update = graph_step(own.update, owners=own.owners, backend="tape")
    expected = drive(eager, eager.branching, eager.update, accumulates=accumulates)
    assert_same(expected, drive(own, own.branching, update, accumulates=accumulates))
    steps = 30 // accumulates
    assert update.stats.calls == steps and update.stats.captured == 1, update.report()
    assert update.stats.replayed == steps - 6, update.report()


@pytest.mark.parametrize("sets_to_none", [True, False])
@pytest.mark.parametrize("accumulates", [1, 3])
def test_forward_and_backward_alone(sets_to_none: bool, accumulates: int) -> None:
    """The optimizer is one that no program could contain."""
    eager, own = (Run(lambda p: torch.optim.Rprop(p, lr=1e-3), sets_to_none=sets_to_none) for _ in range(2))
    first = graph_step(own.forward_backward, owners={"model": own.model}, backend="tape")
    expected = drive(eager, eager.forward_backward, eager.update, accumulates=accumulates)
    assert_same(expected, drive(own, first, own.update, accumulates=accumulates))
    assert first.stats.replayed >= 12, first.report()


@pytest.mark.parametrize("accumulates", [1, 3])
def test_both_sides_in_programs_of_their_own(accumulates: int) -> None:
    """Gradients that one program leaves are what the other reads, with Python between them."""
    eager, own = (Run(OPTIMIZERS["adamw"], sets_to_none=True) for _ in range(2))
    first = graph_step(own.forward_backward, owners={"model": own.model}, backend="tape")
    second = graph_step(own.update, owners=own.owners, backend="tape")
    expected = drive(eager, eager.forward_backward, eager.update, accumulates=accumulates)
    assert_same(expected, drive(own, first, second, accumulates=accumulates))
    assert first.stats.replayed >= 12 and second.stats.replayed >= 4, (first.report(), second.report())


def test_the_side_that_cannot_be_captured_is_told() -> None:
    """The whole step is refused for its forward, by the line; its optimizer's side alone is not."""
    run = Run(OPTIMIZERS["sgd"], sets_to_none=True)

    def whole(x: Tensor) -> Tensor:
        loss = run.branching(x)
        run.update()
        return loss

    step = graph_step(whole, owners=run.owners, backend="tape")
    with pytest.raises(HostSyncError, match=r"complex\(loss"):
        for _ in range(6):
            step(torch.randn(6, 4))
