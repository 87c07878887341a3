"""Batches with file names and objects through a Trainer: the numbers of a Trainer without the callback."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from graphplan import GraphPlanCallback

BATCHES = 24


class Named(L.LightningModule):
    """Reads the tensor of its batches by ``take``, and logs without being told the batch size, if Lightning can."""

    def __init__(self, take: Callable[[Any], Tensor], size: int | None) -> None:
        super().__init__()
        self.size = size
        self.net = nn.Linear(8, 4)
        self.take = take

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(self.take(batch)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=self.size)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, fused=True)


class Batches(torch.utils.data.IterableDataset[Any]):
    """Batches of six rows, as ``make`` makes them of a number and a tensor."""

    def __init__(self, make: Callable[[int, Tensor], Any]) -> None:
        self._make = make

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        rows = torch.randn(BATCHES, 6, 8, generator=torch.Generator().manual_seed(3))
        return (self._make(index, x) for index, x in enumerate(rows))


def _names(index: int) -> list[str]:
    return [f"{index}_{row}.png" for row in range(6)]


KINDS: dict[str, tuple[Callable[[int, Tensor], Any], Callable[[Any], Tensor]]] = {
    "names in a dict": (lambda i, x: {"image": x, "path": _names(i)}, lambda b: b["image"]),
    "names in a tuple": (lambda i, x: (x, _names(i)), lambda b: next(x for x, _ in [b])),
    "an object": (lambda i, x: SimpleNamespace(image=x, path=_names(i)), lambda b: b.image),
    "all of a batch": (lambda i, x: {"image": x, "path": f"{i}"}, lambda b: dict(**b)["image"]),
}


def run(kind: str, callback: GraphPlanCallback | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a fit leaves: parameters, and what it logged."""
    make, take = KINDS[kind]
    torch.manual_seed(0)
    module = Named(take, 6 if kind == "an object" else None)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if callback is None else [callback],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(Batches(make), batch_size=None))
    return module.state_dict(), dict(trainer.callback_metrics)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.twice
def test_names_beside_tensors(kind: str) -> None:
    callback = GraphPlanCallback(backend="tape", min_speedup=0)
    (expected, metrics), (found, others) = run(kind, None), run(kind, callback)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert metrics == others
    assert (callback.stats.captured, callback.stats.replayed) == (1, 2 * BATCHES - 7)
