"""Functions that a step calls: a replay depends on the variables of those that outlive it, not of its own ones."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD

from graphplan import GuardError, capture, compile_plan
from tests.twins import Rig, assert_equals_eager, build
from tests.zoo import CALLS, Box, Mlp, float_batches

CHANGED = 12
CHANGE = r"weight(_\d)? was 0\.5 and is 2\.0"
"""Other functions of the same code may be waiting to be collected, with a variable of the same name."""


def rig_of(loss_of: Callable[[Box, Any, Tensor, Tensor], Tensor], box: Box, after: Callable[[int], object]) -> Rig:
    """A training step that computes ``loss_of(box, model, x, y)``; nobody can look into the box."""
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.05, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(box, model, x, y)
        loss.backward()
        optimizer.step()
        return loss

    return Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(CALLS)), after)


def _recursive(box: Box, model: Any, x: Tensor, y: Tensor) -> Tensor:
    def scaled(times: int) -> Tensor:
        return x if times == 0 else 0.5 * scaled(times - 1)

    return F.cross_entropy(model(scaled(3)), y)


def _kept(box: Box, model: Any, x: Tensor, y: Tensor) -> Tensor:
    box.item = lambda: F.cross_entropy(model(x), y)
    return box.item()


def _generated(box: Box, model: Any, x: Tensor, y: Tensor) -> Tensor:
    return sum(F.cross_entropy(model(x * factor), y) for factor in (0.5, 1.0))


@pytest.fixture
def _no_collections() -> Iterator[None]:
    """Collections come when they come; a function that refers to itself may wait for a long time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collections")
@pytest.mark.parametrize("loss_of", [_recursive, _kept, _generated])
def test_a_function_that_the_step_makes(loss_of: Callable[..., Tensor]) -> None:
    """Its variables are new ones each time, so that no replay depends on them, though it may outlive the step."""
    assert_equals_eager(lambda: rig_of(loss_of, Box(None), lambda index: None))


def hidden_rig(*, changed: float = 2.0) -> Rig:
    """A step that calls a function to which no name leads, and a change of that function's variable."""
    weight = 0.5

    def after(index: int) -> None:
        nonlocal weight
        weight = changed if index >= CHANGED else 0.5

    box = Box(lambda model, x, y: weight * F.cross_entropy(model(x), y))
    return rig_of(lambda box, model, x, y: box.item(model, x, y), box, after)


def test_a_function_in_a_box() -> None:
    """A function that outlives the step is found although nothing names it, and its variables are guarded."""
    assert_equals_eager(partial(hidden_rig, changed=0.5))
    step = assert_equals_eager(hidden_rig, captured=2, replayed=CALLS - 6 - 4)
    assert re.search(CHANGE, step.report())


def test_a_function_in_a_box_under_a_bare_plan() -> None:
    """A plan without a state machine guards it too."""
    rig = build(hidden_rig)
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    program = capture(plan, feed=rig.calls[0], backend="tape")
    program.replay(rig.calls[0])
    rig.after(CHANGED)
    with pytest.raises(GuardError, match=f"no longer fits: the step's code reads .*{CHANGE}; capture it again"):
        program.replay(rig.calls[1])


class Total:
    """Adds losses up in a tensor; a plain object."""

    def __init__(self) -> None:
        self.value = torch.full((), 7.0)

    def add(self, loss: Tensor) -> Tensor:
        self.value += loss.detach()
        return loss


def test_an_object_in_a_box_under_a_bare_plan() -> None:
    """It is found in the second run, taken for an owner from then on, and has its values back afterwards."""
    total = Total()
    rig = build(lambda: rig_of(lambda box, model, x, y: box.item.add(_recursive(box, model, x, y)), Box(total), print))
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    assert [external.name for external in plan.state if external.path == "total.value"]
    assert total.value.item() == 7.0
    program = capture(plan, feed=rig.calls[0], backend="tape")
    loss = program.replay(rig.calls[0])
    assert total.value.item() == (7.0 + loss).item()


def _half_the_gradients(original: Any) -> Any:
    def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
        original(self * 0.5, *args, **kwargs)

    return backward


def _twice_the_output(original: Any) -> Any:
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        return out * 2 if isinstance(self, torch.nn.Linear) else out

    return called


def _mean_of_half(original: Any) -> Any:
    return lambda tensor: original(tensor) * 0.5


def _half_of_what_it_finds(original: Any) -> Any:
    def init_group(self: Any, group: Any, params: Any, grads: list[Tensor], *others: Any) -> Any:
        found = original(self, group, params, grads, *others)
        grads[:] = [grad * 0.5 for grad in grads]
        return found

    return init_group


def _at_least_two(original: Any) -> Any:
    return lambda tensor, least: original(tensor, 2.0)


def _half_of_the_seed(original: Any) -> Any:
    return lambda *args, **kwargs: tuple(grad * 0.5 for grad in original(*args, **kwargs))


REPLACED: dict[str, tuple[Any, str, Callable[[Any], Any], int]] = {
    "a method of every tensor's": (Tensor, "backward", _half_the_gradients, 4),
    # A first trace finds the new method, whose variable is one more thing to look at.
    "one that tensors have from C": (Tensor, "mean", _mean_of_half, 5),
    "the call of every layer": (torch.nn.Module, "_call_impl", _twice_the_output, 4),
    "one that only torch's optimizer calls": (SGD, "_init_group", _half_of_what_it_finds, 4),
    "one from C that only torch's code calls": (Tensor, "clamp_min", _at_least_two, 5),
    "a function that only torch's code calls": (torch.autograd, "_make_grads", _half_of_the_seed, 5),
}
"""The class, the method, what takes its place, and the calls from then on until there are replays again."""


@pytest.mark.parametrize("name", ["_init_group", "_call_impl"])
def test_a_method_of_torch_that_an_instance_gets(name: str) -> None:
    """Torch's own code looks for it in the instance first."""

    def rig() -> Rig:
        def put(index: int) -> None:
            thing = made.owners["optimizer"] if name == "_init_group" else made.owners["model"][0]
            if index == CHANGED:
                wrap = _half_of_what_it_finds if name == "_init_group" else _twice_the_output
                setattr(thing, name, partial(wrap(getattr(type(thing), name)), thing))

        made = rig_of(lambda box, model, x, y: F.cross_entropy(model(x), y), Box(None), put)
        return made

    # A first trace finds the new function's variable.
    step = assert_equals_eager(rig, captured=2, replayed=CALLS - 6 - 5)
    assert f"an attribute '{name}'" in step.report()


@pytest.mark.parametrize("name", REPLACED)
def test_a_method_of_torch_that_somebody_replaces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its class, in the middle of a run: the next call is eager, and the new one is captured."""
    kind, method, wrap, until = REPLACED[name]
    own = method in vars(kind)
    original = getattr(kind, method)

    def put(index: int) -> None:
        if index == CHANGED:
            setattr(kind, method, wrap(original))

    def take_off() -> None:
        if own:
            setattr(kind, method, original)
        elif method in vars(kind):
            delattr(kind, method)

    def rig() -> Rig:
        take_off()

        def loss_of(box: Box, model: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(F.normalize(model(x)), y, reduction="none").mean()

        return rig_of(loss_of, Box(None), put)

    try:
        step = assert_equals_eager(rig, captured=2, replayed=CALLS - 6 - until)
    finally:
        take_off()
    assert re.search(f"{method} was (replaced|<function)", step.report())
