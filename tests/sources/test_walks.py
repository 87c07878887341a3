"""How often the owners are walked before the first replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import Dataset

from graphplan import graph_step
from graphplan.owners import walk as walks
from tests.facts import assert_same, flatten
from tests.models import descent


def _step() -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
    step = descent(model, optimizer, lambda x: model(x).square().mean())
    return {"model": model, "optimizer": optimizer}, step


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.twice
def test_walks_up_to_the_first_replay(is_named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One before each call, two around each trace and capture; two for the check of the first replay."""
    made: list[int] = []
    finish = walks._Walker.take_rest
    monkeypatch.setattr(walks._Walker, "take_rest", lambda self: (made.append(1), finish(self)))
    owners, train_step = _step()
    step = graph_step(train_step, owners=owners if is_named else None, backend="tape", verify=1)
    counts = []
    for _ in range(7):
        before = len(made)
        step(torch.ones(3, 4))
        counts.append(len(made) - before)
    assert (step.stats.eager, step.stats.traced, step.stats.captured, step.stats.verified) == (3, 2, 1, 1)
    # A step whose owners are not named is first walked without any; both once more with what the first call has used.
    assert counts == [2 if is_named else 3, 1, 1, 3, 3, 3, 2]


class Rows(Dataset[Tensor]):
    """As many rows, and their number."""

    def __init__(self, count: int) -> None:
        self.rows = [torch.full((4,), float(index)) for index in range(count)]

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def _holder() -> Any:
    owners, _ = _step()
    model: Any = owners["model"]
    model.kept_set, model.kept_items = Rows(100), [torch.ones(4) * index for index in range(100)]
    model.kept_table = {"rows": [(f"{index}", [index], {"at": np.ones(2)}) for index in range(100)]}
    model.kept_few, model.kept_numbers = [1.0], deque(map(float, range(100)))
    model.kept_few.append(model.kept_few)
    return owners


@pytest.mark.twice
def test_what_no_code_mentions_is_passed_over() -> None:
    """Data sets, and many numbers and texts; code may come to anything where the user's computes names."""
    found = []
    for read in (lambda layer, _: layer.weight, lambda layer, name: getattr(layer, name)):
        owners = _holder()
        model, optimizer = owners.values()

        def loss(x: Tensor, model: Any = model, read: Any = read) -> Tensor:
            return (model(x) * read(model[0], "weight").mean()).square().mean()

        step = graph_step(descent(model, optimizer, loss), owners=owners, backend="tape")
        for _ in range(8):
            step(torch.ones(3, 4))
        assert step.stats.replayed == 2
        walk = step.plan.handles.walk()
        found.append({path.split("[")[0] for path in (*walk.slots, *walk.scalars) if path.startswith("model.")})
    for path in ("model.kept_set.rows", "model.kept_table.rows", "model.kept_numbers"):
        assert [path in paths for paths in found] == [False, True]
    # What a step may write to is walked, and few items are, whatever they are.
    assert all({"model.kept_few", "model.kept_items"} <= paths for paths in found)


def _numbers(model: Any) -> Any:
    return model.kept_numbers


@pytest.mark.parametrize("read", [lambda model: model.kept_set.rows, lambda model: model.kept_items, _numbers])
def test_what_code_comes_to_mention_is_walked(read: Any) -> None:
    """Another shape leads to code that reads a row of a data set or a list, which the host replaces now and then."""
    outputs = []
    for replays in (False, True):
        torch.manual_seed(0)
        owners = _holder()
        model, optimizer = owners.values()

        def of_kept(model: Any = model) -> Any:
            return read(model)[7]

        def loss(x: Tensor, model: Any = model, of_kept: Any = of_kept) -> Tensor:
            return model(x * of_kept() if len(x) == 2 else x).square().mean()

        step: Any = descent(model, optimizer, loss)
        step = graph_step(step, owners=owners, backend="tape") if replays else step
        for index in range(60):
            if index in (15, 35, 36):
                read(model)[7] = 1 / index if read is _numbers else torch.full((4,), 1 / index)
            outputs.append(step(torch.ones(2 + (index < 10 or index > 50), 4)).clone())
    assert_same(flatten(outputs=outputs[:60]), flatten(outputs=outputs[60:]))
    # Each number has a program; a tensor is copied in.
    assert step.stats.captured == (4 if read is _numbers else 2), step.report()
    assert step.stats.replayed >= (40 if read is _numbers else 46), step.report()
