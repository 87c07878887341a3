"""Different things of one name, in a step's code and among its owners, and one thing of several names: each is followed
where it lies.

Checks are off in here, so that it is guards that make the numbers eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from tests.crossing import pairs
from tests.models import CALLS, float_batches
from tests.twins import BEFORE_REPLAY, Rig, assert_equals_eager, assert_same_as_eager, build, drive, managed

WHEN = 12
Weigh = Callable[[Tensor], Tensor]


def thing() -> Any:
    """Something that code reads numbers and tensors from."""
    return SimpleNamespace(scale=1.0, offset=torch.zeros(()), history=torch.zeros(()))


weights = thing()
config = ModuleType("config")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    reset()


def reset() -> None:
    """What is global is shared by all rigs."""
    vars(weights).update(vars(thing()))
    vars(config).update(scale=1.0, offset=torch.zeros(()))


def rig_with(weigh: Weigh, change: Callable[[], None], **owners: Any) -> Rig:
    """A step that weighs its loss. The host makes a change after call ``WHEN``."""
    model = nn.Linear(8, 4)
    optimizer = SGD(model.parameters(), lr=0.05, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = weigh(F.cross_entropy(model(x), y))
        loss.backward()
        optimizer.step()
        return loss.detach()

    named = {"model": model, "optimizer": optimizer, **owners}
    after = lambda index: change() if index == WHEN else None  # noqa: E731
    return Rig(train_step, named, float_batches(CALLS), after)


def change(name: str, what: Any) -> Callable[[], None]:
    """Another value in place of one."""
    values = {"scale": 3.0, "offset": torch.ones(())}
    return lambda: setattr(what, name, values[name])


def a_variable_and_a_global(name: str, which: int) -> Rig:
    """The owner is what the code means by its variable; nobody reads the global."""

    def make(weights: Any) -> Weigh:
        return lambda loss: loss * weights.scale + weights.offset

    mine = thing()
    return rig_with(make(mine), change(name, mine), weights=mine)


def an_owner_and_a_global(name: str, which: int) -> Rig:
    """The code reads both."""
    mine = thing()
    weigh = lambda loss: loss * (weights.scale + mine.scale) + weights.offset + 2 * mine.offset  # noqa: E731
    return rig_with(weigh, change(name, (mine, weights)[which]), weights=mine)


def two_variables(name: str, which: int) -> Rig:
    """Two functions mean different things by one name, and neither is an owner."""
    one, other = thing(), thing()

    def make(weights: Any, inner: Weigh) -> Weigh:
        return lambda loss: inner(loss) * weights.scale + weights.offset

    return rig_with(make(one, make(other, lambda loss: loss)), change(name, (one, other)[which]))


def a_variable_and_a_module(name: str, which: int) -> Rig:
    """One function means a module by a name, and another one a variable that has as much."""
    mine = thing()

    def make(config: Any) -> Weigh:
        return lambda loss: loss * config.scale + config.offset

    inner = make(mine)
    weigh = lambda loss: inner(loss) * config.scale + config.offset  # noqa: E731
    return rig_with(weigh, change(name, (mine, config)[which]))


CASES = [a_variable_and_a_global, an_owner_and_a_global, two_variables, a_variable_and_a_module]


@pairs(which=[0, 1], name=["scale", "offset"], case=CASES)
def test_each_is_followed(case: Callable[[str, int], Rig], name: str, which: int) -> None:
    """Other numbers lead to another program, and other tensors to other values."""

    def make() -> Rig:
        reset()
        return case(name, which)

    # One warm step, two traces, the capture.
    anew = 4 if name == "scale" else 0
    assert_equals_eager(make, captured=2 if anew else 1, replayed=CALLS - BEFORE_REPLAY - anew, verify="off")


def test_a_state_that_is_called_like_a_global() -> None:
    """What the step rebinds in its owner is carried, whatever else has that name."""

    def make() -> Rig:
        reset()
        mine = thing()

        def make(weights: Any) -> Weigh:
            def weigh(loss: Tensor) -> Tensor:
                weights.history = weights.history * 0.5 + loss.detach()
                return loss * weights.history

            return weigh

        return rig_with(make(mine), lambda: None, weights=mine)

    assert_equals_eager(make, verify="off")


def test_a_global_that_only_shares_a_variables_name_is_not_looked_at() -> None:
    """It may change as it likes: the step goes on with its program."""
    reset()
    rig = build(lambda: a_variable_and_a_global("offset", 0))
    rig.after = lambda index: vars(weights).update(scale=float(index), offset=torch.full((), float(index)))
    step = managed(rig, verify="off")
    drive(rig, step)
    assert step.stats.captured == 1 and step.stats.recaptured == 0


class Weighing(nn.Module):
    """Has a container that was made elsewhere by another name."""

    def __init__(self, held: Any, key: Any) -> None:
        super().__init__()
        self.conf, self.key = held, key

    def forward(self, loss: Tensor) -> Tensor:
        return loss * self.conf[self.key]


class Model(nn.Linear):
    """Keeps it as well, and reads it by that name alone. ``turn`` is what the host does with it."""

    def __init__(self, settings: Any, key: Any) -> None:
        super().__init__(8, 4)
        self.settings = settings
        self.weigh = Weighing(
            settings["inner"] if isinstance(settings, dict) and "inner" in settings else settings, key
        )


class Outer:
    """Shows the list of one of its parts, as a scheduler of schedulers does."""

    def __init__(self) -> None:
        self.parts = [SimpleNamespace(rates=[1.0]), SimpleNamespace(rates=[2.0])]
        self.rates = self.parts[0].rates

    def read(self) -> float:
        return self.rates[0]

    def turn(self, index: int) -> None:
        part = self.parts[index > WHEN]
        part.rates = [part.rates[0] + index // 10]
        self.rates = part.rates


def renew(model: Any, settings: Any) -> None:
    model.settings = model.weigh.conf = settings


ONE_THING: dict[str, tuple[Callable[[], Any], Any, Callable[[Any], object]]] = {
    "a dictionary": (lambda: {"scale": 1.0}, "scale", lambda model: model.settings.update(scale=3.0)),
    "a list": (lambda: [1.0], 0, lambda model: model.settings.__setitem__(0, 3.0)),
    "one within another": (
        lambda: {"inner": {"scale": 1.0}}, "scale", lambda model: model.settings["inner"].update(scale=3.0),
    ),
    "another one by both names": (lambda: [1.0], 0, lambda model: renew(model, [3.0])),
    "another one by one name": (lambda: [1.0], 0, lambda model: setattr(model.weigh, "conf", [3.0])),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_THING)
def test_a_container_of_two_names_is_read_by_the_second(name: str) -> None:
    """What the host changes by either name is seen."""
    make_settings, key, turn = ONE_THING[name]

    def make() -> Rig:
        model = Model(make_settings(), key)
        return rig_with(model.weigh, lambda: turn(model), model_of_settings=model)

    step = assert_same_as_eager(make, verify="off")
    assert step.stats.replayed >= CALLS - 2 * BEFORE_REPLAY, step.report()


@pytest.mark.parametrize("at_once", [False, True])
def test_a_list_of_two_names_becomes_another_ones(at_once: bool) -> None:
    """The name by which code reads it leads to the list of another part from some call on, or in each call."""

    def make() -> Rig:
        outer = Outer()
        rig = rig_with(lambda loss: loss * outer.read(), lambda: None, outer=outer)
        after = outer.turn if at_once else lambda index: outer.turn(index) if index == WHEN + 1 else None
        return replace(rig, after=after)

    step = assert_same_as_eager(make, verify="off")
    assert step.stats.replayed >= CALLS // 3, step.report()


Share = Callable[[], tuple[Weigh, Callable[[int], None], Any]]


def two_modules() -> tuple[Weigh, Callable[[int], None], Any]:
    """Both read one dictionary, until one of them gets its own."""
    one = Weighing({"scale": 1.0}, "scale")
    other = Weighing(one.conf, "scale")

    def after(index: int) -> None:
        one.conf["scale"] += 0.5
        if index == WHEN:
            other.conf = {"scale": 2.0}
        elif index > WHEN:
            other.conf["scale"] -= 0.25

    return lambda loss: other(one(loss)), after, nn.ModuleList([one, other])


def a_variable_and_an_attribute() -> tuple[Weigh, Callable[[int], None], Any]:
    """The code reads the variable, and the attribute gets another list."""
    rates = [1.0]
    holder = SimpleNamespace(rates=rates)

    def after(index: int) -> None:
        holder.rates[0] += 0.5
        rates[0] += 0.25
        if index == WHEN:
            holder.rates = [0.0]

    return lambda loss: loss * rates[0], after, holder


def within_a_tuple() -> tuple[Weigh, Callable[[int], None], Any]:
    """The dictionary is in a tuple in the list that both have."""
    one, other = SimpleNamespace(rows=[({"scale": 1.0},)]), SimpleNamespace()
    other.kept = one.rows

    def after(index: int) -> None:
        one.rows[0][0]["scale"] += 0.5 * (index % WHEN == 0)

    return lambda loss: loss * other.kept[0][0]["scale"], after, {"one": one, "other": other}


def many_modules() -> tuple[Weigh, Callable[[int], None], Any]:
    """So many that none is asked where the dictionary lies: it is compared for all of them."""
    settings = {"scale": 1.0}
    modules = nn.ModuleList(Weighing(settings, "scale") for _ in range(6))

    def after(index: int) -> None:
        settings["scale"] += 0.5
        if index == 2 * WHEN:
            modules[4].conf = {"scale": 2.0}

    return modules[4], after, modules


@pytest.mark.parametrize("share", [two_modules, a_variable_and_an_attribute, within_a_tuple, many_modules])
def test_what_two_names_led_to_becomes_two_things(share: Share) -> None:
    """What was traced of one thing is no good for two."""

    def make() -> Rig:
        weigh, after, holder = share()
        rig = rig_with(weigh, lambda: None, holder=holder)
        return replace(rig, calls=rig.calls * 3, after=after)

    step = assert_same_as_eager(make, verify="off")
    assert step.stats.replayed >= CALLS, step.report()
