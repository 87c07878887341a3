"""graphplan without Lightning: the digits in a plain PyTorch loop, eagerly and replayed, compared bit by bit.

    python -m recipes.plain_loop --backend tape

The optimizer, the learning-rate schedule and the loop are the usual ones. The only change is the line with
``graph_step``; the ragged last batch of each epoch simply gets a program of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from graphplan import graph_step
from recipes.comparison import describe_launches, describe_times, now, require_equal, training_state
from recipes.datasets import TensorBatches, digits_splits
from recipes.networks import DigitsMLP
from recipes.schedules import adamw, cosine_schedule

Step = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Run:
    """One training run: what is trained, and what was measured on the way."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One training step, as one would write it without graphplan."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss


def batches(
    data: TensorBatches, *, batch_size: int, epochs: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """``epochs`` passes over ``data`` in an order that is the same every time; the last batch of each is smaller."""
    generator = torch.Generator().manual_seed(0)
    images, labels = (tensor.to(device) for tensor in data.tensors)
    for _ in range(epochs):
        order = torch.randperm(len(data), generator=generator).to(device)
        for indices in order.split(batch_size):
            yield images[indices], labels[indices]


def build(device: torch.device, total_steps: int) -> Run:
    """A model and its optimizer, the same every time."""
    torch.manual_seed(0)
    model = DigitsMLP().to(device)
    optimizer = adamw(model.parameters())
    return Run(model, optimizer, cosine_schedule(optimizer, total_steps))


def train(run: Run, step: Step, feed: Iterator[tuple[Tensor, Tensor]], device: torch.device) -> dict[str, Tensor]:
    """Train on ``feed``; every number that came of it."""
    torch.manual_seed(1)
    for x, y in feed:
        start = now(device)
        loss = step(x, y)
        run.seconds.append(now(device) - start)
        run.losses.append(loss.detach())
        run.schedule.step()
    return training_state(run.model, run.optimizer, run.losses)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--backend", default="auto", choices=["auto", "cudagraph", "tape"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    # Operators this small lose more by waiting for each other's threads than they gain.
    torch.set_num_threads(1)
    data, _ = digits_splits()
    total_steps = args.epochs * -(-len(data) // args.batch_size)

    def feed() -> Iterator[tuple[Tensor, Tensor]]:
        return batches(data, batch_size=args.batch_size, epochs=args.epochs, device=device)

    eager = build(device, total_steps)
    expected = train(eager, eager.step, feed(), device)

    graphed = build(device, total_steps)
    step = graph_step(
        graphed.step, owners={"model": graphed.model, "optimizer": graphed.optimizer}, backend=args.backend
    )
    actual = train(graphed, step, feed(), device)

    if step.plan is None:
        raise SystemExit("too few steps to trace one: ask for more epochs")
    print(step.plan)
    print(step.report())
    print(describe_launches(step.plan.launches, step.stats.replayed))
    print(require_equal(expected, actual))
    print(describe_times(eager.seconds, graphed.seconds))


if __name__ == "__main__":
    main()
