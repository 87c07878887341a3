"""Functions that a step calls: a replay depends on the variables of those that outlive it, not of its own ones."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from graphplan import GuardError, capture, compile_plan
from graphplan.observe import executed_code as spaces
from tests.models import CALLS, Box, Mlp, float_batches
from tests.twins import Rig, assert_equals_eager, build

ROOT = Path(__file__).parents[2]
CHANGED = 12
CHANGE = r"weight(_\d)? was 0\.5 and is 2\.0"
"""Other functions of the same code may be waiting to be collected, with a variable of the same name."""


def rig_of(
    loss_of: Callable[[Any, Any, Tensor, Tensor], Tensor],
    box: Any,
    after: Callable[[int], object],
    model: nn.Module | None = None,
) -> Rig:
    """A training step that computes ``loss_of(box, model, x, y)``; nobody can look into a :class:`Box`."""
    model = model or Mlp()
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


def weighted(weight: float) -> tuple[Callable[..., Tensor], Callable[[float], None]]:
    """A loss, and what sets its variable."""

    def put(value: float) -> None:
        nonlocal weight
        weight = value

    return lambda model, x, y: weight * F.cross_entropy(model(x), y), put


def later_rig() -> Rig:
    """The first batches have a function, later and smaller ones another one of the same code, made later."""
    losses = {"large": weighted(0.5)}

    def after(index: int) -> None:
        if index == CHANGED:
            losses["small"] = weighted(0.25)
        elif index == CALLS + CHANGED:
            losses["small"][1](2.0)

    box = Box(lambda model, x, y: losses["large" if len(x) > 3 else "small"][0](model, x, y))
    rig = rig_of(lambda box, model, x, y: box.item(model, x, y), box, after)
    rig.calls += [(x[:3], y[:3]) for x, y in rig.calls]
    return rig


def test_functions_that_were_found_are_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector goes through all objects until they have turned up twice; another one of that code is found."""
    looked: list[int] = []
    monkeypatch.setattr(spaces, "gc", SimpleNamespace(get_referrers=lambda *codes: searched(looked, *codes)))
    assert_equals_eager(partial(hidden_rig, changed=0.5))
    assert len(looked) == 2


def test_functions_that_each_call_makes_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are gone after their call, so that no search finds them."""
    looked: list[int] = []
    monkeypatch.setattr(spaces, "gc", SimpleNamespace(get_referrers=lambda *codes: searched(looked, *codes)))

    def step(box: Box, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weight = torch.ones(len(x))

        def mean() -> Tensor:
            return (F.cross_entropy(model(x), y, reduction="none") * weight).mean()

        return mean()

    assert_equals_eager(partial(rig_of, step, Box(None), lambda index: None))
    assert looked == [1]


def searched(looked: list[int], *codes: Any) -> list[Any]:
    """What refers to ``codes``, and a note that it was looked for."""
    looked.append(len(codes))
    return gc.get_referrers(*codes)


class WithLoss(nn.Module):
    """A module that holds a function that its loss goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.change = Mlp(), lambda loss: loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.change(F.cross_entropy(self.model(x), y))


def _half(value: Tensor) -> Tensor:
    return value * 0.5


def _double(value: Tensor) -> Tensor:
    return value * 2.0


def _changing() -> tuple[Callable[[Tensor], Tensor], Callable[[bool], None]]:
    """A function, and what sets its variable."""
    change = _half

    def put(is_changed: bool) -> None:
        nonlocal change
        change = _double if is_changed else _half

    return lambda value: change(value), put


def _hold(model: WithLoss) -> Callable[[bool], None]:
    model.change, put = _changing()
    return put


def _hold_decorated(model: WithLoss) -> Callable[[bool], None]:
    change, put = _changing()
    model.change = torch.enable_grad()(change)
    return put


def _register_on_a_layer(model: WithLoss) -> Callable[[bool], None]:
    change = _half

    def put(is_changed: bool) -> None:
        nonlocal change
        change = _double if is_changed else _half

    model.model[4].register_forward_hook(lambda layer, args, out: change(out))
    return put


def _register_on_a_parameter(model: WithLoss) -> Callable[[bool], None]:
    change, put = _changing()
    model.model[4].weight.register_hook(change)
    return put


HOLD = [_hold, _hold_decorated, _register_on_a_layer, _register_on_a_parameter]


def held_rig(hold: Callable[[WithLoss], Callable[[bool], None]], *, changes: bool = True) -> Rig:
    """A function that a module holds whose method runs, or that torch calls as a hook, and a change of its variable."""
    model = WithLoss()
    put = hold(model)
    after = lambda index: put(changes and index >= CHANGED)  # noqa: E731
    return rig_of(lambda box, model, x, y: model(x, y), None, after, model)


@pytest.mark.parametrize("hold", HOLD)
def test_a_function_that_an_object_of_the_step_holds(
    hold: Callable[[WithLoss], Callable[[bool], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is guarded without the collector's going through all objects, which takes a dozen steps of a small model."""
    looked: list[int] = []
    monkeypatch.setattr(spaces, "gc", SimpleNamespace(get_referrers=lambda *codes: searched(looked, *codes)))
    assert_equals_eager(partial(held_rig, hold, changes=False))
    step = assert_equals_eager(partial(held_rig, hold), captured=2, replayed=CALLS - 6 - 4)
    assert "recapture: change was" in step.report()
    assert not looked


def two_alike_rig(hold: Callable[[WithLoss, Any], object]) -> Rig:
    """Two functions of one code with equal variables: one is held where functions are looked for, one is not."""

    def scaled(factor: float) -> tuple[Callable[..., Tensor], Callable[[float], None]]:
        def put(value: float) -> None:
            nonlocal factor
            factor = value

        return lambda value, *others: others[-1] * factor if others else value * factor, put

    model = WithLoss()
    (found, _), (hidden, put) = scaled(0.5), scaled(0.5)
    hold(model, found)
    after = lambda index: put(2.0 if index >= CHANGED else 0.5)  # noqa: E731
    return rig_of(lambda kept, model, x, y: kept[0](model(x, y)), [hidden], after, model)


@pytest.mark.parametrize(
    "hold",
    [
        lambda model, function: setattr(model, "change", function),
        lambda model, function: model.model[4].register_forward_hook(function),
        lambda model, function: model.model[4].weight.register_hook(function),
    ],
    ids=["an attribute", "a layer", "a parameter"],
)
def test_a_function_like_one_that_is_held(hold: Callable[[WithLoss, Any], object]) -> None:
    """It is guarded beside the other one, whose variable has the same value until one of them changes."""
    assert_equals_eager(partial(two_alike_rig, hold), captured=2, replayed=CALLS - 6 - 4)


def _scaled_by(held: Any, layer: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * held[0]


@pytest.mark.parametrize("kind", [list, deque, lambda items: dict(enumerate(items))], ids=["list", "deque", "dict"])
def test_what_a_hook_is_given(kind: Callable[[list[float]], Any]) -> None:
    """torch hands what a partial function holds to code, which has a name of its own for it."""

    def make() -> Rig:
        model, held = Mlp(), kind([0.5])
        model[4].register_forward_hook(partial(_scaled_by, held))
        after = lambda index: held.__setitem__(0, 2.0 if index >= CHANGED else 0.5)  # noqa: E731
        return rig_of(lambda box, model, x, y: F.cross_entropy(model(x), y), None, after, model)

    assert_equals_eager(make, captured=2, replayed=CALLS - 6 - 4)


@pytest.mark.twice
def test_another_function_of_the_same_code() -> None:
    """It is a name once it has turned up twice, which one trace of a further shape would not do."""
    step = assert_equals_eager(later_rig, captured=4, replayed=CALLS)
    assert re.search(r"weight(_\d)? was 0\.25 and is 2\.0", step.report())


def test_a_function_in_a_box_under_a_bare_plan() -> None:
    """A plan without a state machine guards it too."""
    rig = build(hidden_rig)
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    program = capture(plan, feed=rig.calls[0], backend="tape")
    program.replay(rig.calls[0])
    rig.after(CHANGED)
    with pytest.raises(GuardError, match=f"no longer fits: .*{CHANGE}, and the step's code reads it; capture it again"):
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


_METHODS_FIRST = """
import torch

class Gate:
    def __init__(self, factor):
        self.factor = factor
    def gate(self):
        return self * 2

def scaling(gate):
    return lambda tensor: tensor * gate.factor

one, other = Gate(2.0), Gate(3.0)
torch.Tensor.scaled_by_one, torch.Tensor.scaled_by_other = scaling(one), scaling(other)
from graphplan import graph_step

def step(x):
    return x.scaled_by_one() + x.scaled_by_other()

fast = graph_step(step, backend="tape", mode="inference")
for call in range(20):
    other.factor = 3.0 if call < 10 else 5.0
    assert fast(torch.ones(2)).tolist() == step(torch.ones(2)).tolist(), call
assert fast.stats.captured == 2 and fast.stats.replayed > 8, fast.stats
"""


def test_methods_that_tensors_had_before_graphplan_was_imported(tmp_path: Path) -> None:
    """They are the user's, as others are: only torch's own need not be looked at in each call."""
    script = tmp_path / "methods.py"
    script.write_text(_METHODS_FIRST)
    subprocess.run([sys.executable, str(script)], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
