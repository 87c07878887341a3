"""How often the owners are walked before the first replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from graphplan import graph_step
from graphplan.owners import walk as walks
from tests.models import descent


def _step() -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = AdamW(model.parameters(), lr=0.01)
    step = descent(model, optimizer, lambda x: model(x).square().mean())
    return {"model": model, "optimizer": optimizer}, step


@pytest.mark.parametrize("is_named", [True, False])
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
