"""Objects whose own code raises, wherever a step has them: the step is done once, and what is said is a refusal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from graphplan import GraphPlanError
from tests.crossing import each
from tests.facts import assert_same
from tests.twins import Rig, build, managed, state_of

CALLS = 12


class ForeignError(Exception):
    """What an object's own code raises."""


def _raises(*args: Any, **kwargs: Any) -> Any:
    raise ForeignError("not to be asked")


def _kind(base: type, *names: str) -> type:
    return type("Foreign", (base,), dict.fromkeys(names, _raises))


class _Cold(type):
    __getattr__ = __eq__ = __hash__ = __instancecheck__ = _raises


class ColdInstance(metaclass=_Cold):
    """An object of a class that raises."""


class WithoutClass:
    """An object that does not say what it is."""

    __class__ = property(_raises)  # type: ignore[assignment]


class WithoutAttributes:
    """An object that has a property for its attributes."""

    __dict__ = property(_raises)  # type: ignore[assignment]


class UnusableTensor(Tensor):
    """A tensor that no function of torch takes."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ForeignError("not to be used")


THINGS: dict[str, Callable[[], Any]] = {
    "no attributes": _kind(object, "__getattribute__"),
    "no attributes that are not there": _kind(object, "__getattr__"),
    "no comparison": _kind(object, "__eq__", "__ne__", "__hash__"),
    "no length": _kind(object, "__len__", "__bool__"),
    "no text": _kind(object, "__repr__", "__str__", "__format__"),
    "no copies": _kind(object, "__deepcopy__", "__copy__", "__reduce_ex__"),
    "no calls": _kind(object, "__call__"),
    "no class": WithoutClass,
    "no dictionary": WithoutAttributes,
    "a cold class": ColdInstance,
    "a list without items": partial(_kind(list, "__getitem__", "__setitem__"), [1, 2]),
    "a list without end": partial(_kind(list, "__iter__", "__len__"), [1, 2]),
    "a tuple without end": partial(_kind(tuple, "__iter__", "__len__"), (1, 2)),
    "a tuple without attributes": partial(_kind(tuple, "__getattr__"), (1, 2)),
    "a set without attributes": partial(_kind(set, "__getattribute__"), (1, 2)),
    "a set without end": partial(_kind(set, "__iter__", "__contains__"), (1, 2)),
    "a dictionary without keys": partial(_kind(dict, "__contains__", "keys", "items"), a=1),
    "a dictionary without items": partial(_kind(dict, "__getitem__", "__setitem__"), a=1),
    "a text without comparison": partial(_kind(str, "__eq__", "__hash__"), "a"),
    "a tensor without functions": lambda: torch.ones(2).as_subclass(UnusableTensor),
}


class Holder:
    """What holds the objects."""

    thing: Any = None

    def __init__(self) -> None:
        self.things: list[Any] = []


def _rig(place: str, thing: Any) -> Rig:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    holder = Holder()

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model[0](x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def plain(x: Tensor, *_: Any) -> Tensor:
        return train(x)

    def reading(x: Tensor) -> Tensor:
        assert holder.thing is not holder.things
        return train(x)

    def enclosing(x: Tensor) -> Tensor:
        assert thing is not holder
        return train(x)

    def with_default(x: Tensor, option: Any = thing) -> Tensor:
        return train(x)

    def writing(x: Tensor) -> Tensor:
        holder.thing = thing
        return train(x)

    def appending(x: Tensor) -> Tensor:
        holder.things.append(thing)
        return train(x)

    def unpacking(batch: dict[str, Any]) -> Tensor:
        return train(batch["x"])

    def returning(x: Tensor) -> Any:
        return {"loss": train(x), "thing": thing}

    steps: dict[str, Callable[..., Any]] = {
        "an attribute": reading, "a closure": enclosing, "a default": with_default, "an assignment": writing,
        "an appended item": appending, "an item of the batch": unpacking, "a result": returning,
    }  # fmt: skip
    if place in ("an attribute", "an assignment"):
        holder.thing = thing
    elif place == "a module's attribute":
        vars(model)["thing"] = thing
    elif place == "an item":
        holder.things.append(thing)
    elif place == "a hyper-parameter":
        optimizer.param_groups[0]["thing"] = thing
    elif place == "a tensor's attribute":
        vars(model[0].weight)["thing"] = thing
    batches: list[tuple[Any, ...]] = [(torch.randn(3, 4),) for _ in range(CALLS)]
    if place == "an argument":
        batches = [(x, thing) for (x,) in batches]
    elif place == "an item of the batch":
        batches = [({"x": x, "thing": thing},) for (x,) in batches]
    return Rig(steps.get(place, plain), {"model": model, "optimizer": optimizer, "holder": holder}, batches)


PLACES = (
    "an attribute", "a closure", "a default", "an assignment", "an appended item", "an argument",
    "an item of the batch", "a result", "a module's attribute", "an item", "a hyper-parameter", "a tensor's attribute",
)  # fmt: skip


def _state(rig: Rig) -> dict[str, Any]:
    """What the step trains: nobody else can look at the objects either."""
    owners = {name: rig.owners[name] for name in ("model", "optimizer")}
    for group in owners["optimizer"].param_groups:
        group.pop("thing", None)
    vars(owners["model"]).pop("thing", None)
    return state_of(Rig(rig.step, owners, []))


def _run(rig: Rig, call: Callable[..., Any], count: int = CALLS) -> int:
    """How many calls came to their end."""
    for number, args in enumerate(rig.calls[:count]):
        try:
            call(*args)
        except GraphPlanError:
            return number
    return count


@each(times=3, place=PLACES, name=THINGS)
@pytest.mark.filterwarnings("ignore:graphplan")
@pytest.mark.crossed(2)
def test_objects_that_raise_when_they_are_asked(name: str, place: str) -> None:
    make = THINGS[name]
    for on_failure in ("raise", "eager"):
        rig = build(lambda: _rig(place, make()))
        step = managed(rig, on_failure=on_failure)
        done = _run(rig, step)
        assert done == CALLS or on_failure == "raise"
        twin = build(lambda: _rig(place, make()))
        assert _run(twin, twin.step, done) == done
        assert_same(_state(twin), _state(rig))
        assert "graphplan" in step.report()
