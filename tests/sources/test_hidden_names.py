"""Attributes that an object comes to have: they hide methods of its class, and what its ``__getattr__`` makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import graph_step


class Settings:
    """Has what another object has, unless it has its own."""

    def __init__(self, rest: Any) -> None:
        self.rest = rest

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["rest"], name)


class Criterion:
    """A plain object with methods."""

    reduce = staticmethod(torch.mean)

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    @classmethod
    def shift(cls, loss: Tensor) -> Tensor:
        return loss


class Model(nn.Module):
    """A layer that calls all of these."""

    error = staticmethod(F.mse_loss)

    def __init__(self) -> None:
        super().__init__()
        self.net, self.criterion = nn.Linear(4, 2), Criterion()
        self.settings = Settings(SimpleNamespace(rate=1.0))

    def __getattr__(self, name: str) -> Any:
        return 1.0 if name == "boost" else super().__getattr__(name)

    def weigh(self, loss: Tensor) -> Tensor:
        return loss

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x) * self.boost * self.settings.rate
        loss = self.error(y, torch.zeros_like(y), reduction="none")
        return self.criterion.shift(self.criterion.scale(self.criterion.reduce(self.weigh(loss))))


def _double(loss: Tensor) -> Tensor:
    return loss * 2


OWN: dict[str, tuple[Callable[[Model], Any], str, Any]] = {
    "a method of a module": (lambda model: model, "weigh", _double),
    "a static method of a module": (lambda model: model, "error", F.l1_loss),
    "a method of an object": (lambda model: model.criterion, "scale", _double),
    "a static method of an object": (lambda model: model.criterion, "reduce", torch.sum),
    "a class method": (lambda model: model.criterion, "shift", _double),
    "what an object makes": (lambda model: model.settings, "rate", 2.0),
    "what a module makes": (lambda model: model, "boost", 2.0),
    "a static method of the class": (type, "error", staticmethod(F.l1_loss)),
}


def _losses(name: str, *, graphed: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model, (holder, attribute, own) = Model(), OWN[name]
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step: Any = graph_step(train, owners={"model": model, "optimizer": optimizer}, verify="off") if graphed else train
    thing, losses = holder(model), []
    before = vars(thing).get(attribute)
    back = partial(delattr, thing, attribute) if before is None else partial(setattr, thing, attribute, before)
    for call in range(40):
        if call == 15:
            setattr(thing, attribute, own)
        if call == 30:
            back()
        losses.append(step(torch.randn(8, 4)))
    assert not graphed or step.stats.replayed > 15, step.report()
    return losses


@pytest.mark.parametrize("name", OWN)
def test_what_an_object_comes_to_have_is_seen(name: str) -> None:
    assert all(map(torch.equal, _losses(name, graphed=True), _losses(name, graphed=False)))


def test_names_that_no_attribute_has_are_not_looked_for() -> None:
    """What code does with what it loads (``x[:]``) and Python's own names would take a guard each, for each object."""
    settings = Settings(SimpleNamespace(rates=[1.0, 2.0]))
    step = graph_step(lambda x: x * settings.rates[0] * len(settings.rates), mode="inference")
    for _ in range(8):
        step(torch.ones(3))
    assert step.stats.replayed
    asked = [path for path in step.plan.reads.values if path.startswith("hasattr(")]
    assert any("'rates'" in path for path in asked)
    assert not any("[" in path or "'__" in path for path in asked)
