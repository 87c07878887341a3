"""What a step's code names in classes, modules, tuples and functions: followed where it lies, repeated where it counts.

Checks are off in here, so that it is guards and repeated effects that make the numbers eager's.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import HostEffectError, graph_step
from tests.failure_modes.naive import assert_handled, changing_rig, loss_of, stay
from tests.models import Memory, float_batches
from tests.twins import BEFORE_REPLAY, Rig, assert_equals_eager, build, drive, managed

Pair = tuple[Tensor, Tensor]
"""An alias that has the attributes of its class, which is no object to look into."""


class Settings:
    """Numbers that code reads from the class."""

    scale = 1.0
    steps = 0
    history: list[Tensor] = []  # noqa: RUF012

    @classmethod
    def scaled(cls, loss: Tensor) -> Tensor:
        return loss * cls.scale

    @staticmethod
    def by_name(loss: Tensor) -> Tensor:
        return loss * Settings.scale


class Inherited(Settings):
    """The same numbers by inheritance."""


settings_module = ModuleType("settings_module")
RATE = 1.0
latest = ""


@pytest.fixture(autouse=True)
def _fresh_settings() -> None:
    reset()


def reset() -> None:
    """Classes and modules are shared by all rigs."""
    Settings.scale, Settings.steps, Settings.history = 1.0, 0, []
    settings_module.steps = 0  # type: ignore[attr-defined]
    globals()["RATE"] = 1.0


def shared(make: Callable[[], Rig]) -> Callable[[], Rig]:
    """``make``, with the shared places as they are at the start."""

    def maker() -> Rig:
        reset()
        return make()

    return maker


Case = tuple[Callable[[Tensor], Tensor], Callable[[], object]]


def _in_the_class() -> Case:
    return lambda loss: loss * Settings.scale, lambda: setattr(Settings, "scale", 3.0)


def _in_a_class_method() -> Case:
    return lambda loss: Settings.scaled(loss), lambda: setattr(Settings, "scale", 3.0)


def _in_a_static_method() -> Case:
    return Settings.by_name, lambda: setattr(Settings, "scale", 3.0)


def _in_a_base_class() -> Case:
    return lambda loss: Inherited.scaled(loss), lambda: setattr(Settings, "scale", 3.0)


def _in_a_class_before_an_objects_base() -> Case:
    kind = type("Kind", (type("Between", (Settings,), {}),), {})
    thing = kind()
    return lambda loss: loss * thing.scale, lambda: setattr(kind.__base__, "scale", 3.0)


def _in_a_class_before_its_base() -> Case:
    kind = type("Kind", (Settings,), {})
    return lambda loss: loss * kind.scale, lambda: setattr(kind, "scale", 3.0)


def _in_a_class_of_a_closure() -> Case:
    kind = type("Kind", (), {"scale": 1.0})
    return lambda loss: loss * kind.scale, lambda: setattr(kind, "scale", 3.0)


def _in_a_module_of_a_closure() -> Case:
    module = ModuleType("inner")
    vars(module)["scale"] = 1.0
    return lambda loss: loss * module.scale, lambda: setattr(module, "scale", 3.0)


def _in_a_dictionary_in_a_tuple() -> Case:
    held = (1, ["x"], {"scale": 1.0})
    return lambda loss: loss * held[2]["scale"], lambda: held[2].update(scale=3.0)


def _on_an_object_in_a_tuple() -> Case:
    held = ((Memory(scale=1.0),),)
    return lambda loss: loss * held[0][0].scale, lambda: setattr(held[0][0], "scale", 3.0)


def _in_the_globals_by_key() -> Case:
    return lambda loss: loss * globals()["RATE"], lambda: globals().update(RATE=3.0)


def _in_the_module_by_its_name() -> Case:
    return lambda loss: loss * sys.modules[__name__].RATE, lambda: globals().update(RATE=3.0)


def _in_defaults() -> Case:
    def scaled(loss: Tensor, scale: float = 1.0) -> Tensor:
        return loss * scale

    return scaled, lambda: setattr(scaled, "__defaults__", (3.0,))


def _in_defaults_of_keywords() -> Case:
    def scaled(loss: Tensor, *, scale: float = 1.0) -> Tensor:
        return loss * scale

    return scaled, lambda: setattr(scaled, "__kwdefaults__", {"scale": 3.0})


@pytest.mark.parametrize(
    "case",
    [
        _in_the_class,
        _in_a_class_method,
        _in_a_static_method,
        _in_a_base_class,
        _in_a_class_before_an_objects_base,
        _in_a_class_before_its_base,
        _in_a_class_of_a_closure,
        _in_a_module_of_a_closure,
        _in_a_dictionary_in_a_tuple,
        _on_an_object_in_a_tuple,
        _in_the_globals_by_key,
        _in_the_module_by_its_name,
        _in_defaults,
        _in_defaults_of_keywords,
    ],
)
def test_values_that_the_host_changes(case: Callable[[], Case]) -> None:
    """The next step has the new value."""

    def make(changes: bool) -> Rig:
        use, change = case()
        act = (lambda model, optimizer: change()) if changes else stay
        return changing_rig(act, lambda model, x, y: use(loss_of(model, x, y)))

    assert_handled(shared(partial(make, True)), control=shared(partial(make, False)), verify="off")


@pytest.mark.parametrize("other", ["sys", "globals"])
def test_names_that_are_those_of_attributes_alone(other: str) -> None:
    """Code that has to do with ``sys`` or ``globals()`` reads no global of an attribute's name."""

    def make() -> Rig:
        def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
            assert sys.version_info if other == "sys" else globals()["RATE"]
            found: Tensor = loss_of(model, x, y) * model.latest
            return found

        def look(model: Any, optimizer: Any, index: int) -> None:
            globals()["latest"] = str(index)

        rig = changing_rig(stay, loss, each=look)
        rig.owners["model"].latest = 0.5
        return rig

    assert_equals_eager(shared(make), verify="off")


def _count_in_the_class() -> int:
    Settings.steps += 1
    return Settings.steps


def _count_in_a_module() -> int:
    settings_module.steps += 1  # type: ignore[attr-defined]
    return settings_module.steps


def _raise_in_the_class() -> None:
    Settings.steps += 1


def _raise_in_a_module() -> None:
    settings_module.steps += 2  # type: ignore[attr-defined]


def _append_in_the_class() -> None:
    Settings.history.append(torch.ones(()))


def counting_rig(count: Callable[[], object]) -> Rig:
    """A step that calls ``count``; what it counts is looked at after every call."""
    seen: list[Any] = []

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        count()
        return loss_of(model, x, y)

    def look(model: Any, optimizer: Any, index: int) -> None:
        seen.append((Settings.steps, settings_module.steps, len(Settings.history)))  # type: ignore[attr-defined]

    rig = changing_rig(stay, loss, each=look)
    rig.extra["seen"] = seen
    return rig


@pytest.mark.parametrize("count", [_raise_in_the_class, _raise_in_a_module, _append_in_the_class])
def test_effects_in_classes_and_modules(count: Callable[[], object]) -> None:
    """Replays repeat them where the class or the module holds the number or the list."""
    assert_equals_eager(shared(partial(counting_rig, count)), verify="off")


@pytest.mark.parametrize("count", [_count_in_the_class, _count_in_a_module])
def test_counters_that_are_read(count: Callable[[], int]) -> None:
    """A number that the step raises and reads is followed."""
    assert_equals_eager(shared(partial(counting_rig, count)), verify="off")


def _hook_in_each_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    factor = 1 + x.mean().detach()
    logits = model(x)
    logits.register_hook(lambda grad: grad * factor)
    return F.cross_entropy(logits, y)


def _class_in_each_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    class Scale:
        factor = 0.5

        def apply(self, loss: Tensor) -> Tensor:
            return loss * self.factor

    return Scale().apply(loss_of(model, x, y))


def _function_in_each_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    half = x * 0.5

    def inner() -> Tensor:
        return loss_of(model, half, y)

    return inner()


@pytest.mark.parametrize("loss", [_hook_in_each_step, _class_in_each_step, _function_in_each_step])
def test_what_a_step_makes_anew_is_no_name(loss: Callable[..., Tensor]) -> None:
    """Closures and classes of the step's own are others in each call, and delay the capture by none."""
    assert_equals_eager(partial(changing_rig, stay, loss))


def test_a_function_that_the_step_keeps_is_refused_by_name() -> None:
    """A new function in an owner in each call is an effect that replays cannot repeat; it is not traced for ever."""

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        factor = 2.0
        model.double = lambda value: value * factor
        return model.double(loss_of(model, x, y))

    make = partial(changing_rig, stay, loss)
    rig = build(make)
    with pytest.raises(HostEffectError, match=r"the step changes model\.double in Python"):
        drive(rig, managed(rig))


class Lookup(dict):
    """A dictionary whose items are attributes too: asking it for a name that it lacks is a KeyError."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def test_odd_things_behind_names() -> None:
    """Aliases, dictionaries with attributes and references to what is gone: looked at without calling them."""
    lookup, thing = Lookup(scale=2.0), Memory()
    gone = weakref.proxy(thing)
    del thing

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        pair: Any = Pair
        assert pair is not gone
        return loss_of(model, x, y) * lookup.scale

    assert_equals_eager(partial(changing_rig, stay, loss), verify=1)


@pytest.mark.twice
def test_an_import_in_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a module does while it is imported is not the step's doing: nothing of it is guarded."""
    lines = ["LIMIT = 3", "def tripled(value):", "    return value * LIMIT", "TABLE = tripled(9)", "SCALE = 2.0"]
    (tmp_path / "late_module.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))

    def step(x: Tensor) -> Tensor:
        import late_module

        return x * late_module.SCALE

    graphed = graph_step(step, backend="tape")
    for x, _ in float_batches(12):
        assert torch.equal(graphed(x), x * 2)
    assert "late_module" in sys.modules and graphed.stats.replayed == 12 - BEFORE_REPLAY
    assert not {"LIMIT", "tripled"} & set(graphed.plan.reads.values)
    monkeypatch.delitem(sys.modules, "late_module")


@pytest.mark.parametrize("name", ["model", "names", "dropout_states"])
def test_an_owner_may_have_any_name(name: str) -> None:
    """graphplan's own owners, such as that of the names in code, get others."""
    step = graph_step(lambda x: x * RATE, owners={name: nn.Linear(1, 1)}, backend="tape", verify="off")
    outputs = [step(torch.ones(2)) for _ in range(8)]
    globals()["RATE"] = 2.0
    outputs.append(step(torch.ones(2)))
    assert [output.tolist() for output in outputs] == [[1.0, 1.0]] * 8 + [[2.0, 2.0]]
    assert step.stats.replayed > 0
