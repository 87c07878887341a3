"""Numbers that a class holds, and that code finds through its objects and subclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import HostEffectError, graph_step


class Model(nn.Module):
    """A layer with numbers in its class."""

    calls, rate, share = 0, 1.0, 0.5

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-2, 3, 8))
        self.helpers = [Helper(), Helper()]


class Helper:
    """A plain object with numbers in its class."""

    made, rate = 0, 1.0

    def __call__(self, x: Tensor) -> Tensor:
        Helper.made += 1
        return x * self.rate


class Config:
    """A class that is read itself."""

    rate = 1.0


class Other(Config):
    """A class that has nothing of its own."""


def _through_type(model: Any, x: Tensor) -> Tensor:
    type(model).calls += 1
    return x * model.calls * (2.0 if Model.calls % 3 == 0 else 1.0)


TABLE = {"model": Model}


def _in_a_table(model: Any, x: Tensor) -> Tensor:
    type(model).share = 0.9 * type(model).share + 0.1
    return x * model.share * len(TABLE["model"].__name__)


def _through_objects(model: Any, x: Tensor) -> Tensor:
    return model.helpers[0](x) * 2 + model.helpers[1](x) + Helper.made


def _by_instance(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    return x / model.calls


@pytest.fixture(autouse=True)
def classes_as_they_were() -> Iterator[None]:
    """What the classes hold is put back."""
    kinds = (Model, Helper, Config, Other)
    held = [{name: value for name, value in vars(kind).items() if type(value) in (int, float)} for kind in kinds]
    yield
    for kind, values in zip(kinds, held, strict=True):
        for name in [name for name, value in vars(kind).items() if type(value) in (int, float) and name not in values]:
            delattr(kind, name)
        for name, value in values.items():
            setattr(kind, name, value)


def _train(act: Callable[[Model, int], None], body: Callable[[Any, Tensor], Tensor], *, graphed: bool) -> Any:
    Model.calls, Model.share, Helper.made, Helper.rate = 0, 0.5, 0, 1.0
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = body(model, model.weight * x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    owners = {"model": model, "optimizer": optimizer}
    step: Any = graph_step(train, owners=owners, verify="off") if graphed else train
    torch.manual_seed(0)
    losses = []
    for index in range(60):
        act(model, index)
        losses.append(step(torch.randn(8)))
    return losses, [model.weight.detach().clone()], (Model.calls, Model.share, Helper.made), step


def _decay(model: Model, index: int) -> None:
    Helper.rate *= 0.99


def _decay_and_part(model: Model, index: int) -> None:
    Helper.rate *= 0.99
    if index == 25:
        model.helpers[0].rate = 3.0
    if index == 45:
        del model.helpers[0].rate


def _drop_own(model: Model, index: int) -> None:
    if index in (25, 45):
        del model.calls


BODIES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Model, int], None]]] = {
    "counted by its class": (_through_type, lambda model, index: None),
    "held in a table": (_in_a_table, lambda model, index: None),
    "seen through two objects": (_through_objects, _decay),
    "one object gets its own": (_through_objects, _decay_and_part),
    "an object loses its own": (_by_instance, _drop_own),
}


@pytest.mark.parametrize("name", BODIES)
def test_numbers_of_classes_are_followed(name: str) -> None:
    body, act = BODIES[name]
    (*tensors, counts, step), (*expected, others, _) = (_train(act, body, graphed=graphed) for graphed in (True, False))
    for found, eager in zip(tensors, expected, strict=True):
        assert all(map(torch.equal, found, eager))
    assert counts == others and step.stats.replayed > 20, step.report()


def _rate_of_class(model: Any, x: Tensor) -> Tensor:
    return x * Other.rate


def _rate_of_object(model: Any, x: Tensor) -> Tensor:
    return x * model.rate


OWNERS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Model], Any]]] = {
    "a subclass": (_rate_of_class, lambda model: Other),
    "an object": (_rate_of_object, lambda model: model),
}


@pytest.mark.parametrize("name", OWNERS)
def test_what_hides_a_number_of_a_class_is_seen(name: str) -> None:
    body, holder = OWNERS[name]

    def act(model: Model, index: int) -> None:
        if index == 25:
            holder(model).rate = 0.5
        if index == 45:
            del holder(model).rate

    found, expected = _train(act, body, graphed=True), _train(act, body, graphed=False)
    assert all(map(torch.equal, found[0], expected[0])) and found[-1].stats.replayed > 20


def _count(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    return x


def _add(model: Any, x: Tensor) -> Tensor:
    model.calls += x.sum().item()
    return x


@pytest.mark.parametrize("body", [_count, _add], ids=["counted", "read"])
def test_a_number_that_hides_that_of_a_class_and_goes_after_each_step_is_refused(
    body: Callable[[Any, Tensor], Tensor],
) -> None:
    def act(model: Model, index: int) -> None:
        vars(model).pop("calls", None)

    with pytest.raises(HostEffectError, match=r"model\.calls"):
        _train(act, body, graphed=True)
    assert Model.calls == 0


class _Base:
    count = 1


class _Deriving(_Base):
    def scale(self, loss: Tensor) -> Tensor:
        type(self).count += 1
        return loss * self.count


def test_a_count_of_a_class_that_the_caller_deletes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class has its base's again until the next step."""
    monkeypatch.setattr(_Deriving, "count", 1, raising=False)
    del _Deriving.count
    counts = _Deriving()

    def step(x: Tensor) -> Tensor:
        return counts.scale(x.sum())

    graphed = graph_step(step, mode="inference", verify="off", backend="tape", on_failure="eager")
    for call in range(40):
        if call == 20:
            del _Deriving.count
        assert graphed(torch.ones(3)) == 3 * _Deriving.count
    assert graphed.stats.replayed > 20, graphed.stats.reasons
