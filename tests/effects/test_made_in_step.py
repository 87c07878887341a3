"""Modules and optimizers that a step makes: captured where they die in it, refused by name where they do not."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from graphplan import HostEffectError, SkipReason, compile_plan
from tests.crossing import each
from tests.twins import (
    WARMUP,
    Rig,
    assert_equals_eager,
    assert_falls_back,
    assert_refused,
    build,
    drive,
    line_of,
    managed,
)

CALLS = 24


class Keeper:
    """Holds what a step keeps."""

    def __init__(self) -> None:
        self.one: Any = None
        self.all: list[Any] = []
        self.latest: deque[Any] = deque(maxlen=2)
        self.named: dict[str, Any] = {}


Step = Callable[[nn.Module, Any, Keeper, Tensor], Any]


def rig_of(step: Step) -> Rig:
    """A model, its optimizer and a keeper, for ``step``."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    keeper = Keeper()
    batches = [(torch.randn(6, 4),) for _ in range(CALLS)]
    owners = {"model": model, "optimizer": optimizer, "keeper": keeper}
    return Rig(lambda x: step(model, optimizer, keeper, x), owners, batches)


def _loss(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()


def _adapted(model: nn.Module, optimizer: Any, x: Tensor, inner: nn.Module, descent: Any) -> Tensor:
    """Steps of an inner optimizer on an inner model, and one of the outer ones towards where they end (Reptile)."""
    for _ in range(3):
        descent.zero_grad()
        loss = _loss(inner, x)
        loss.backward()
        descent.step()
    for outer, adapted in zip(model.parameters(), inner.parameters(), strict=True):
        outer.grad = (outer - adapted).detach()
    optimizer.step()
    return loss


def _reptile(make: Callable[..., Any], model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    inner = copy.deepcopy(model)
    return _adapted(model, optimizer, x, inner, make(inner.parameters()))


def step_of_reptile(make: Callable[..., Any]) -> Step:
    """A step whose inner optimizer ``make`` makes of the inner model's parameters."""
    return partial(_reptile, make)


def _copied_pair(model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    return _adapted(model, optimizer, x, *copy.deepcopy((model, optimizer)))


def _loaded(model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    inner.load_state_dict(model.state_dict())
    return _adapted(model, optimizer, x, inner, SGD(inner.parameters(), lr=0.1))


def _scheduled(model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    inner = copy.deepcopy(model)
    descent = SGD(inner.parameters(), lr=0.1)
    schedule = ExponentialLR(descent, 0.5)
    for _ in range(3):
        descent.zero_grad()
        loss = _loss(inner, x)
        loss.backward()
        descent.step()
        schedule.step()
    return loss


def _cyclic(model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    inner: Any = copy.deepcopy(model)
    descent: Any = SGD(inner.parameters(), lr=0.1)
    inner.itself, descent.itself = [inner], descent
    return _adapted(model, optimizer, x, inner, descent)


def _checkpointed(model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    inner = copy.deepcopy(model)
    inputs = x.clone().requires_grad_()
    run = partial(checkpoint, inner, use_reentrant=True, preserve_rng_state=False)
    inner_step = SGD(inner.parameters(), lr=0.1)
    loss = _loss(run, inputs)
    loss.backward()
    inner_step.step()
    for outer, adapted in zip(model.parameters(), inner.parameters(), strict=True):
        outer.grad = (outer - adapted).detach()
    optimizer.step()
    return loss


def _of_outer(make: Callable[..., Any], model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    descent = make(model.parameters())
    descent.zero_grad()
    loss = _loss(model, x)
    loss.backward()
    descent.step()
    return loss


def _trained(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = _loss(model, x)
    loss.backward()
    optimizer.step()
    return loss


def _layer(model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    return _trained(nn.Sequential(model, nn.Linear(4, 4), nn.Dropout(0.5)), optimizer, x)


def _averaged(model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    _trained(model, optimizer, x)
    average = AveragedModel(model)
    average.update_parameters(model)
    return _loss(average, x)


DYING: dict[str, Step] = {
    "SGD": step_of_reptile(partial(SGD, lr=0.1)),
    "SGD, momentum": step_of_reptile(partial(SGD, lr=0.1, momentum=0.9)),
    "Adam": step_of_reptile(partial(Adam, lr=0.1)),
    "Adam, foreach": step_of_reptile(partial(Adam, lr=0.1, foreach=True)),
    "AdamW, fused": step_of_reptile(partial(AdamW, lr=0.1, fused=True)),
    "Adagrad": step_of_reptile(partial(Adagrad, lr=0.1)),
    "RMSprop": step_of_reptile(partial(RMSprop, lr=0.01)),
    "a copied optimizer": _copied_pair,
    "a loaded model": _loaded,
    "a schedule": _scheduled,
    "cycles": _cyclic,
    "a checkpoint": _checkpointed,
    "SGD of the owner's parameters": partial(_of_outer, partial(SGD, lr=0.1)),
    "Adam of the owner's parameters": partial(_of_outer, partial(Adam, lr=0.1)),
    "a layer": _layer,
    "an average": _averaged,
}


@pytest.mark.parametrize("name", DYING)
@pytest.mark.crossed(2, 1)
@pytest.mark.twice
def test_what_dies_in_the_step_is_captured(name: str) -> None:
    step = assert_equals_eager(partial(rig_of, DYING[name]))
    assert set(step.machine.managed.owners) == {"model", "optimizer", "keeper", "names"}


def _size(step: Any) -> dict[str, int]:
    """How much graphplan has to look at, and how many objects there are."""
    gc.collect()
    walk = step.machine.managed.walk()
    places = sum(map(len, (walk.slots, walk.scalars, walk.objects, walk.links, walk.containers)))
    return {"owners": len(step.machine.managed.owners), "places": places, "objects": len(gc.get_objects())}


@each(name=DYING, warmup=[3, CALLS])
@pytest.mark.crossed(2)
def test_nothing_grows_with_the_calls(name: str, warmup: int) -> None:
    rig = build(partial(rig_of, DYING[name]))
    step = managed(rig, warmup_steps=warmup, verify="off")
    drive(rig, step, CALLS // 2)
    first = _size(step)
    drive(rig, step, CALLS // 2)
    last = _size(step)
    assert (first["owners"], first["places"]) == (last["owners"], last["places"])
    # What torch and Python remember of a call is no matter of theirs.
    assert last["objects"] - first["objects"] < CALLS


def _keep_one(model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    loss = _trained(model, optimizer, x)
    keeper.one = copy.deepcopy(model)  # culprit
    return loss


def _keep_all(model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    loss = _trained(model, optimizer, x)
    keeper.all.append(copy.deepcopy(model))  # culprit
    return loss


def _keep_latest(model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    loss = _trained(model, optimizer, x)
    keeper.latest.append(copy.deepcopy(model[0]))  # type: ignore[index]  # culprit
    return loss


def _keep_named(model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    loss = _trained(model, optimizer, x)
    keeper.named["best"] = nn.Linear(4, 4)  # culprit
    return loss


def _keep_used(model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    loss = _trained(model, optimizer, x)
    loss = loss if keeper.one is None else loss + _loss(keeper.one, x).detach()
    keeper.one = copy.deepcopy(model)  # culprit
    return loss


def _keep_optimizer(model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    keeper.one = SGD(model.parameters(), lr=0.1)  # culprit
    return _trained(model, keeper.one, x)


def _keep_layer(model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    model.extra = nn.Tanh()  # culprit
    return _trained(model, optimizer, x)


def _return(model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Any:
    loss = _trained(model, optimizer, x)
    return {"loss": loss.detach(), "best": copy.deepcopy(model)}  # culprit


_BEST: Any = None


def _keep_in_global(model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    global _BEST
    loss = _trained(model, optimizer, x)
    _BEST = copy.deepcopy(model)  # culprit
    return loss


KEPT: dict[str, tuple[Step, str, str]] = {
    "an attribute": (_keep_one, "keeper.one", "Sequential"),
    "a list": (_keep_all, "keeper.all[2]", "Sequential"),
    "a deque": (_keep_latest, "keeper.latest[1]", "Linear"),
    "a dictionary": (_keep_named, "keeper.named.best", "Linear"),
    "used in the next call": (_keep_used, "keeper.one", "Sequential"),
    "an optimizer": (_keep_optimizer, "keeper.one", "SGD"),
    "a layer of an owner's": (_keep_layer, "model.extra", "Tanh"),
    "a global": (_keep_in_global, "_BEST", "Sequential"),
    "a result": (_return, "result['best']", "Sequential"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_outlives_the_step_is_refused_by_name(name: str) -> None:
    step, path, kind = KEPT[name]
    found = assert_refused(partial(rig_of, step), HostEffectError, line_of(step), "which still exists after the step")
    assert f"the step creates {path} ({kind}, at " in str(found)


@pytest.mark.parametrize("name", KEPT)
def test_steps_that_keep_what_they_make_go_on_eagerly(name: str) -> None:
    step, *_ = KEPT[name]
    assert_falls_back(partial(rig_of, step), SkipReason.HOST_EFFECT, "which still exists after the step")


@pytest.mark.parametrize("name", KEPT)
def test_steps_that_keep_what_they_make_leave_no_owners(name: str) -> None:
    rig = build(partial(rig_of, KEPT[name][0]))
    step = managed(rig, on_failure="eager")
    with pytest.warns(UserWarning, match="which still exists after the step"):
        drive(rig, step)
    assert set(step.machine.managed.owners) == {"model", "optimizer", "keeper", "names"}


def _make_once(model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    if keeper.one is None:
        keeper.one = nn.Linear(4, 4), SGD(model.parameters(), lr=0.1)
    layer, descent = keeper.one
    descent.zero_grad()
    loss = _loss(layer, model(x))
    loss.backward()
    descent.step()
    return loss


def test_what_the_first_call_makes_is_an_owner_from_the_next_one_on() -> None:
    step = assert_equals_eager(partial(rig_of, _make_once))
    assert "sgd" in step.machine.managed.owners


def _keep_sometimes(model: nn.Module, optimizer: Any, keeper: Keeper, x: Tensor) -> Tensor:
    keeper.all.append(None)
    if len(keeper.all) == WARMUP + 1:
        keeper.one = copy.deepcopy(model)  # culprit
    return _trained(model, optimizer, x)


def test_what_only_a_trace_makes_and_keeps_is_refused() -> None:
    found = assert_refused(partial(rig_of, _keep_sometimes), HostEffectError, line_of(_keep_sometimes))
    assert "the step creates keeper.one (Sequential, at " in str(found)


def test_a_plan_is_not_compiled_of_a_step_that_keeps_what_it_makes() -> None:
    rig = build(partial(rig_of, _keep_one))
    with pytest.raises(HostEffectError, match=r"the step creates keeper.one \(Sequential, at "):
        compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    assert rig.owners["keeper"].one is None


def test_a_plan_is_compiled_of_a_step_whose_optimizer_dies_in_it() -> None:
    rig = build(partial(rig_of, DYING["Adam"]))
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    assert not any("adam" in external.name for external in plan.externals)


class Referring(nn.Module):
    """Notes weakly what each call makes, as torch's transforms of distributions note their inverses."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.latest = nn.Linear(4, 2), None

    def forward(self, x: Tensor) -> Tensor:
        made = nn.Identity()
        self.latest = weakref.ref(made)  # type: ignore[assignment]
        y: Tensor = self.net(made(x))
        return y


@pytest.mark.twice
def test_weak_references_to_what_is_gone_are_alike() -> None:
    def make() -> Rig:
        model = Referring()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return Rig(step, {"model": model, "optimizer": optimizer}, [(torch.randn(8, 4),) for _ in range(16)])

    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig)
    found = drive(rig, step)
    assert all(map(torch.equal, expected.outputs, found.outputs))
    assert step.stats.replayed == 10
    assert rig.owners["model"].latest() is None
