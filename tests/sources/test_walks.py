"""How often the owners are walked before the first replay, and walks that are used once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from graphplan import graph_step
from graphplan.optimizers.preparation import Preparation
from graphplan.optimizers.rates import LearningRates
from graphplan.optimizers.scaling import ScaledSteps
from graphplan.owners import walk as walks
from graphplan.owners.slots import Walk
from tests.models import descent


def _step() -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = AdamW(model.parameters(), lr=0.01)
    step = descent(model, optimizer, lambda x: model(x).square().mean())
    return {"model": model, "optimizer": optimizer}, step


@pytest.mark.parametrize("is_named", [True, False])
def test_walks_up_to_the_first_replay(is_named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One before each call, one after each trace, one in the recording; two for the check of the first replay."""
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
    assert counts == [2 if is_named else 3, 1, 1, 2, 2, 2, 2]


def _outline(walk: Walk) -> Any:
    tables: list[dict[str, Any]] = [walk.slots, walk.scalars, walk.objects]
    places = [{path: (_whereabouts(s.container), s.key, s.name) for path, s in table.items()} for table in tables]
    return places, walk.parameters.keys(), walk.optimizers.keys(), list(map(id, walk.modules))


def _whereabouts(container: Any) -> Any:
    """What is the same in two walks: a dictionary or list, but not a view of an object."""
    return id(container) if isinstance(container, dict | list) else type(container)


@pytest.mark.parametrize("has_name", [False, True])
def test_a_walk_is_brought_up_to_date_with_rates(has_name: bool) -> None:
    """Also where something else leads to a group of an optimizer."""
    owners, train_step = _step()
    train_step(torch.ones(3, 4))
    optimizer = owners["optimizer"]
    owners |= {"groups": optimizer.param_groups} if has_name else {}
    rates = LearningRates(ScaledSteps())
    rates.keep(Preparation(optimizer))
    rates.attach([optimizer])
    before = walks.walk_owners(owners)
    with rates:
        assert _outline(before) != _outline(walks.walk_owners(owners))
        assert _outline(walks.with_rates(before, owners)) == _outline(walks.walk_owners(owners))
