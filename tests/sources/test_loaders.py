"""Loaders in a plain loop: what a step's code reads through one is guarded, and nobody walks into its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from graphplan import graph_step
from tests.models import Mlp
from tests.twins import BEFORE_REPLAY, SEED

EPOCHS, STEPS, WHEN = 6, 5, 4
"""The host changes something before an epoch of that number, which no check begins."""


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


class Stream(IterableDataset[Any]):
    """Samples one after another; it has a length, too."""

    def __init__(self) -> None:
        self.samples = list(map(Curriculum().__getitem__, range(20)))
        self.asked = 0

    def __len__(self) -> int:
        self.asked += 1
        return 20

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def _pairs(count: int = 20) -> list[Any]:
    held = Curriculum()
    return [held[number % 20] for number in range(count)]


def train(
    make: Callable[[], Any], read: Callable[[Any], float], change: Callable[[Any], object], *, replays: bool
) -> tuple[list[float], Any]:
    """Losses of some epochs of a loop whose step reads something through its loader, and the step."""
    torch.manual_seed(SEED)
    model, loader = Mlp(), make()
    optimizer = SGD(model.parameters(), lr=0.05, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y) + out.square().mean() * read(loader)
        loss.backward()
        optimizer.step()
        return loss

    owners = {"model": model, "optimizer": optimizer}
    step: Any = graph_step(train_step, owners=owners, backend="tape", verify="off") if replays else train_step
    losses = []
    for epoch in range(EPOCHS):
        if epoch == WHEN:
            change(loader)
        losses += [step(x, y).item() for x, y in loader]
    return losses, step


def assert_as_eager(
    make: Callable[[], Any], read: Callable[[Any], float], change: Callable[[Any], object] = lambda loader: None
) -> Any:
    """Fail unless the loop is eager's; the graphed step is handed out."""
    expected, _ = train(make, read, change, replays=False)
    found, step = train(make, read, change, replays=True)
    assert found == expected
    assert step.stats.replayed >= len(found) - 2 * BEFORE_REPLAY
    return step


def _lengthen(loader: Any) -> None:
    loader.dataset.extend(_pairs(4))


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], object]]] = {
    "an attribute of the dataset": (
        lambda: DataLoader(Curriculum(), 4),
        lambda loader: loader.dataset.level,
        lambda loader: setattr(loader.dataset, "level", 0.5),
    ),
    "the length": (lambda: DataLoader(_pairs(), 4), lambda loader: 1 / len(loader), _lengthen),
    "the length of the dataset": (
        lambda: DataLoader(_pairs(), 4),
        lambda loader: 1 / len(loader.dataset),
        lambda loader: loader.dataset.extend(_pairs(4)),
    ),
    "the shape of the dataset's tensors": (
        lambda: DataLoader(TensorDataset(*map(torch.stack, zip(*_pairs(), strict=True))), 4),
        lambda loader: 1 / len(loader.dataset.tensors[0]),
        lambda loader: setattr(loader.dataset, "tensors", tuple(t[:16] for t in loader.dataset.tensors)),
    ),
    "the epoch of the sampler": (
        lambda: DataLoader(data := Curriculum(), 4, sampler=DistributedSampler(data, 1, 0)),
        lambda loader: 1 / (1 + loader.sampler.epoch),
        lambda loader: loader.sampler.set_epoch(3),
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_what_a_step_reads_through_a_loader(change: Any) -> None:
    """A change reaches the next step."""
    assert assert_as_eager(*change).stats.captured == 2


@pytest.mark.parametrize("persistent", [True, False])
def test_a_loader_with_workers(persistent: bool) -> None:
    """Its iterator, queues and processes are nobody's affair."""
    make = lambda: DataLoader(Curriculum(), 4, num_workers=2, persistent_workers=persistent)  # noqa: E731
    read = lambda loader: loader.dataset.level / len(loader)  # noqa: E731
    change = lambda loader: setattr(loader.dataset, "level", 0.25)  # noqa: E731
    assert assert_as_eager(make, read, change).stats.captured == 1


def test_the_length_of_a_long_dataset() -> None:
    """Whoever asks how many batches there are does not look at the samples, of which there may be any number."""
    data = _pairs()

    class Long(Dataset[Any]):
        samples = data * 4000

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Any:
            return data[index]

    assert assert_as_eager(lambda: DataLoader(Long(), 4), lambda loader: 1 / len(loader)).stats.captured == 1


def test_the_length_of_a_stream() -> None:
    """Nobody asks it but the step: torch notes that somebody did, and warns."""
    made = []

    def make() -> Any:
        made.append(DataLoader(Stream(), 4))
        return made[-1]

    assert_as_eager(make, lambda loader: 1 / len(loader))
    # What the step counts is counted in replays, too: anybody else's questions would come on top of that.
    eager, replayed = (loader.dataset.asked for loader in made)
    assert replayed == eager == EPOCHS * STEPS


def test_a_dataset_without_a_length() -> None:
    """It has none later, either."""

    class Endless(Curriculum):
        def __len__(self) -> int:
            raise TypeError("no length")

    make = lambda: DataLoader(Endless(), batch_sampler=[[0, 1, 2], [3, 4, 5]] * STEPS)  # noqa: E731
    assert assert_as_eager(make, lambda loader: loader.dataset.level).stats.captured == 1


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
