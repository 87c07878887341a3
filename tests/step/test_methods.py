"""A graphed step that lies in a class is a method: each instance has its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from graphplan import GraphedStep, OptionError, graph_step, graphed
from tests.facts import assert_same, flatten
from tests.twins import BEFORE_REPLAY


class Trainer:
    """A trainer whose step is graphed."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)
        self.optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9, fused=True)
        self.steps = 0

    def plain(self, x: Tensor) -> Tensor:
        """One step."""
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return loss

    step = graph_step(plain)


class Model(nn.Module):
    """A model whose forward is replaced by a graphed one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Two layers in one."""
        return 2 * self.layer(x)


class GraphedModel(Model):
    """The same, graphed."""


GraphedModel.forward = graph_step(Model.forward, mode="inference")  # type: ignore[assignment]


@pytest.mark.twice
def test_each_instance_has_a_step_of_its_own() -> None:
    torch.manual_seed(0)
    found, expected = [Trainer(), Trainer()], [Trainer(), Trainer()]
    for one, two in zip(found, expected, strict=True):
        two.model.load_state_dict(one.model.state_dict())
    for _ in range(12):
        x = torch.randn(3, 4)
        for one, two in zip(found, expected, strict=True):
            assert torch.equal(one.step(x), two.plain(x))
    assert found[0].step is not found[1].step
    assert found[0].step is found[0].step
    assert [trainer.step.stats.replayed for trainer in found] == [6, 6]
    assert_same(
        flatten(a=[vars(one)["model"] for one in found], n=[one.steps for one in found]),
        flatten(a=[vars(two)["model"] for two in expected], n=[two.steps for two in expected]),
    )
    assert isinstance(Trainer.step, GraphedStep)


@pytest.mark.twice
def test_a_forward_that_is_replaced_in_its_class() -> None:
    models: list[Any] = [GraphedModel(), GraphedModel()]
    with torch.no_grad():
        for _ in range(12):
            x = torch.randn(3, 4)
            for model in models:
                assert torch.equal(model(x), Model.forward(model, x))
    assert [model.forward.stats.replayed for model in models] == [6, 6]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_an_instance_has_another_step(copied: Any) -> None:
    trainer = Trainer()
    for _ in range(8):
        trainer.step(torch.randn(3, 4))
    own, other = trainer.step, copied(trainer)
    assert other.step is not own
    assert (other.step.stats.calls, own.stats.calls) == (0, 8)
    assert trainer.step is own


def test_a_shallow_copy_of_an_instance_computes_with_its_own() -> None:
    class Factor:
        def __init__(self, value: float) -> None:
            self.value = value

        @graphed
        def times(self, x: Tensor) -> Tensor:
            return x * self.value

    one = Factor(2.0)
    with torch.no_grad():
        assert one.times(torch.ones(1)).item() == 2
        other = copy.copy(one)
        other.value = 3.0
        for _ in range(8):
            assert (one.times(torch.ones(1)).item(), other.times(torch.ones(1)).item()) == (2, 3)


def test_a_step_in_an_instance_is_no_method() -> None:
    trainer: Any = Trainer()
    trainer.double = graph_step(lambda x: 2 * x, mode="inference")
    assert torch.equal(trainer.double(torch.ones(2)), torch.full((2,), 2.0))


def test_an_instance_without_a_dictionary_has_no_step() -> None:
    class Slotted:
        __slots__ = ()

        @graph_step
        def run(self, x: Tensor) -> Tensor:
            return x + 1

    with pytest.raises(OptionError, match="run is graphed on a Slotted, which has no __dict__"):
        Slotted().run(torch.ones(2))


def test_a_method_that_is_called_on_its_class() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        Trainer.step(torch.ones(2, 4))


@pytest.mark.twice
def test_a_method_at_capture_sizes() -> None:
    class Padding(Trainer):
        def sums(self, x: Tensor) -> Tensor:
            self.optimizer.zero_grad()
            loss = (self.model(x) * (x != 0).any(1, keepdim=True)).square().sum()
            loss.backward()
            self.optimizer.step()
            return loss

        padded = graph_step(sums, shapes="bucket", buckets=[4, 8])

    trainer = Padding()
    for number in range(12):
        trainer.padded(torch.randn(3 + number % 2, 4))
    assert trainer.padded._padded is not None
    assert trainer.padded.shapes.padded_calls == 5
    assert trainer.padded.stats.replayed == 12 - BEFORE_REPLAY
