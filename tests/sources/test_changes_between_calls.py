"""What the host changes between two calls, long after the capture, reaches the next step as it reaches an eager one."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from graphplan import GuardError, capture, compile_plan
from graphplan.program import adopted_tensors
from tests.crossing import each
from tests.models import CALLS as ZOO_CALLS
from tests.models import Mlp, attributes, float_batches, updating_rig
from tests.twins import (
    BEFORE_REPLAY,
    SECOND_TRACE,
    TRACED,
    Rig,
    assert_equals_eager,
    assert_same_as_eager,
    assert_same_runs,
    build,
    drive,
    managed,
)

CALLS, WHEN = 24, 12
pytestmark = pytest.mark.filterwarnings("ignore:graphplan")
"""A change may be met by eager steps, which are announced."""


def _lr(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.05


def _lr_and_back(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 2
    optimizer.param_groups[0]["lr"] /= 2


def _weight_decay(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.5


def _betas(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["betas"] = (0.5, 0.9)


def _listed_betas(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["betas"] = [0.5, 0.9]


def _optimizer_state(model: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _older_optimizer_state(model: Any, optimizer: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for moments in state["state"].values():
        moments["exp_avg"].mul_(0.1)
        moments["step"].fill_(2)
    state["param_groups"][0]["lr"] = 0.002
    optimizer.load_state_dict(state)


def _cleared_optimizer_state(model: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def _new_group(model: Any, optimizer: Any) -> None:
    model.bonus.requires_grad_()
    optimizer.add_param_group({"params": [model.bonus], "lr": 0.3})


def _weights(model: Any, optimizer: Any) -> None:
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})


def _assigned_weights(model: Any, optimizer: Any) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _data(model: Any, optimizer: Any) -> None:
    model[0].weight.data = model[0].weight.data * 0.5


def _in_place(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model[0].weight.mul_(0.5)


def _new_buffer(model: Any, optimizer: Any) -> None:
    model[1].running_mean = torch.ones(16)


def _eval(model: Any, optimizer: Any) -> None:
    model.eval()


def _eval_one(model: Any, optimizer: Any) -> None:
    model[1].eval()


def _freeze(model: Any, optimizer: Any) -> None:
    model[0].weight.requires_grad_(False)


def _dropout(model: Any, optimizer: Any) -> None:
    model[3].p = 0.7


def _momentum(model: Any, optimizer: Any) -> None:
    model[1].momentum = 0.5


def _attribute(model: Any, optimizer: Any) -> None:
    model.temperature = 0.25


def _branch(model: Any, optimizer: Any) -> None:
    model.sharp = True


def _dict_entry(model: Any, optimizer: Any) -> None:
    model.options["smoothing"] = 0.3


def _activation(model: Any, optimizer: Any) -> None:
    model[2] = nn.Tanh()


def _gradients(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()


def _own_gradients(model: Any, optimizer: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, 3.0)


def _seed(model: Any, optimizer: Any) -> None:
    torch.manual_seed(99)


CHANGES = [
    _lr,
    _lr_and_back,
    _weight_decay,
    _betas,
    _listed_betas,
    _optimizer_state,
    _older_optimizer_state,
    _cleared_optimizer_state,
]
CHANGES += [_new_group, _weights, _assigned_weights, _data, _in_place, _new_buffer, _eval, _eval_one, _freeze, _dropout]
ZERO = partial(torch.zeros, ())
REVERSIBLE = [_eval, _eval_one, _attribute, _branch, _dict_entry]
CHANGES += [_momentum, _attribute, _branch, _dict_entry, _activation, _gradients, _own_gradients, _seed]


def changing_rig(change: Callable[[Any, Any], None], back: bool, when: int = WHEN) -> Rig:
    """A step that reads many things, one of which the host changes after call ``when``, and perhaps back again."""
    model: Any = Mlp()
    model.bonus = nn.Parameter(torch.zeros(4), requires_grad=False)
    model.temperature, model.sharp, model.options = 0.5, False, {"smoothing": 0.1}
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits = (model(x) + model.bonus) * model.temperature
        if model.sharp:
            logits = 2 * logits
        loss = F.cross_entropy(logits, y, label_smoothing=model.options["smoothing"])
        loss.backward()
        optimizer.step()
        return loss

    def after(index: int) -> None:
        if index == when:
            change(model, optimizer)
        if index == when + 4 and back:
            model.train()
            model.temperature, model.sharp, model.options["smoothing"] = 0.5, False, 0.1

    return Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(CALLS)), after)


@each(change=CHANGES, on_failure=["raise", "eager"])
@pytest.mark.crossed(2)
def test_a_change_reaches_the_next_step(change: Callable[[Any, Any], None], on_failure: str) -> None:
    """Copied in, recaptured or done eagerly: the numbers are eager's."""
    make = partial(changing_rig, change, back=False)
    step = assert_same_as_eager(make, on_failure=on_failure)
    assert step.stats.replayed >= WHEN + 1 - 6


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.crossed(2, 1)
def test_a_change_between_the_traces_and_the_capture(change: Callable[[Any, Any], None]) -> None:
    """What is captured is the step that was traced: another one is traced first."""
    make = partial(changing_rig, change, back=False, when=SECOND_TRACE)
    step = assert_same_as_eager(make, verify="off")
    assert step.stats.replayed >= CALLS - 2 * BEFORE_REPLAY


def _one_or_the_other(model: Any, x: Tensor, loss: Tensor) -> None:
    name = "a" if model.first else "b"
    setattr(model, name, getattr(model, name) * 0.5 + loss.detach())


def _other_one(model: Any, index: int) -> None:
    model.first = index < SECOND_TRACE


def test_what_is_carried_changes_between_the_traces_and_the_capture() -> None:
    """The plan says what is carried, and is another one."""
    prepare = attributes(first=True, a=ZERO, b=ZERO)
    make = partial(updating_rig, _one_or_the_other, prepare, _other_one)
    step = assert_equals_eager(make, verify="off", replayed=ZOO_CALLS - BEFORE_REPLAY - TRACED)
    assert step.plan.rebindings.carries == ("model.b",)
    assert any(re.search(r"traced anew: model\.first was True .* and is False", text) for text in step.stats.events)


def test_a_plan_that_is_out_of_date() -> None:
    """Captured by hand, it is refused."""
    rig = build(partial(updating_rig, _one_or_the_other, attributes(first=True, a=ZERO, b=ZERO)))
    rig.step(*rig.calls[0])
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    rig.owners["model"].first = False
    with pytest.raises(GuardError, match=r"model\.first was True .* and is False; compile another one"):
        capture(plan, feed=rig.calls[0])


@pytest.mark.parametrize("change", REVERSIBLE, ids=lambda change: change.__name__.strip("_"))
def test_a_change_that_is_taken_back(change: Callable[[Any, Any], None]) -> None:
    """The step as it was before is right again afterwards."""
    make = partial(changing_rig, change, back=True)
    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    assert_same_runs(expected, drive(rig, managed(rig)))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_the_changes_matter(change: Callable[[Any, Any], None]) -> None:
    """Each change, but those that change nothing, gives another eager run: the tests above can fail."""
    runs = []
    for change_ in (change, lambda model, optimizer: None):
        rig = build(partial(changing_rig, change_, back=False))
        runs.append(drive(rig, rig.step))
    if change in {_lr_and_back, _optimizer_state, _gradients, _own_gradients}:
        assert_same_runs(*runs)
    else:
        with pytest.raises(AssertionError, match="differences"):
            assert_same_runs(*runs)


def test_memory_that_is_new_before_each_step_renews_no_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target network that is updated by ``p.data = ...``: its values are copied to where the recording reads them."""
    made = []
    kind = adopted_tensors.Guards
    monkeypatch.setattr(adopted_tensors, "Guards", lambda *args, **given: made.append(kind(*args, **given)) or made[-1])

    def make() -> Rig:
        model, target = Mlp(), Mlp().requires_grad_(False)
        optimizer = AdamW(model.parameters(), fused=True)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + (model(x) - target(x)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        def update(index: int) -> None:
            for old, new in zip(target.parameters(), model.parameters(), strict=True):
                old.data = old.data * 0.9 + new.data * 0.1

        owners = {"model": model, "target": target, "optimizer": optimizer}
        return Rig(step, owners, float_batches(CALLS), after=update)

    step = assert_same_as_eager(make, verify="off")
    assert step.stats.replayed == CALLS - BEFORE_REPLAY
    assert len(made) == 1, "those of the capture"


class _Scaling:
    """Multiplies by its factor."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


def _scaled(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    scaled: Tensor = sum(scaling(loss.detach()) for scaling in model.scalings) / len(model.scalings)
    return scaled


SCALINGS: dict[str, Callable[[Any], Any]] = {
    "other objects": lambda scalings: (_Scaling(5.0), _Scaling(7.0)),
    "another order": lambda scalings: scalings[::-1],
    "one more": lambda scalings: (*scalings, _Scaling(9.0)),
    "another class": lambda scalings: (nn.Identity(), scalings[1]),
    "a copy": copy.deepcopy,
}


@pytest.mark.parametrize("name", SCALINGS)
def test_a_tuple_of_objects_that_is_replaced(name: str) -> None:
    """Which tuple it is says nothing, but what lies in it does."""

    def replace(model: Any, index: int) -> None:
        if index == WHEN:
            model.scalings = SCALINGS[name](model.scalings)

    prepare = attributes(scalings=lambda: (_Scaling(2.0), _Scaling(3.0)))
    step = assert_same_as_eager(partial(updating_rig, _scaled, prepare, replace))
    assert step.stats.replayed >= WHEN - BEFORE_REPLAY
