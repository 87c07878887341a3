"""Two sets of weights through one program: the classifier of the digits before and after training.

    python -m recipes.weight_swap --backend tape

A CPU shows that one program serves both sets, bit by bit as eager calls do. It cannot show a gain, and loses time: the
weights are copied before each call, and the tape replays operators one by one. The gain is that of a CUDA graph.

With ``copy_roles=("input", "param")`` a program reads its weights from memory of its own, and each replay says which
ones to put there: an average of the weights, a customer's adapter, the version of last week.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import graphed
from recipes.comparison import now
from recipes.datasets import digits_splits
from recipes.latencies import device_of, print_latencies, print_limits, require_close
from recipes.networks import DigitsMLP
from recipes.schedules import adamw


def train(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> None:
    """A few steps on all images at once."""
    optimizer = adamw(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def run(call: Callable[[Tensor], Tensor], images: Tensor, device: torch.device) -> tuple[list[Tensor], list[float]]:
    """Scores of the images in batches of 32, the rest left out, and the seconds that each batch took."""
    results, seconds = [], []
    for batch in images.split(32):
        if len(batch) == 32:
            start = now(device)
            results.append(call(batch))
            seconds.append(now(device) - start)
    return results, seconds


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    args, device = device_of(parser, argv)
    print_limits(device, "that one program serves several sets of weights", "the weights are copied for each call")
    training, validation = digits_splits()
    images, labels = (tensor.to(device) for tensor in validation.tensors)
    models = {"fresh": DigitsMLP().to(device), "trained": DigitsMLP().to(device)}
    inputs, targets = (tensor.to(device) for tensor in training.tensors)
    train(models["trained"], inputs, targets, args.steps)

    served = DigitsMLP().to(device).eval()
    fast: Any = graphed(served, copy_roles=("input", "param"), backend=args.backend)
    times: dict[str, list[float]] = {}
    with torch.inference_mode():
        for name, model in models.items():
            model.eval()
            weights = model.state_dict()
            expected, times[f"{name}, eager"] = run(model, images, device)
            swapped = lambda batch, weights=weights: fast.replay((batch,), params=weights)  # noqa: E731
            found, _ = run(swapped, images, device)
            _, times[f"{name}, replayed"] = run(swapped, images, device)
            right = (torch.cat(found).argmax(-1) == labels[: 32 * len(found)]).float().mean()
            print(f"{name}: accuracy {right:.3f}; {require_close(expected, found, exact=True)}")
    print(f"programs: {fast.num_graphs}, captured {fast.stats.captured} time for {len(models)} sets of weights")
    print_latencies(times)


if __name__ == "__main__":
    main()
