"""What a step's code can do without, and finds one day: attributes, globals and modules that were not there.

Checks are off in here, so that it is the guards alone that notice.
"""

from __future__ import annotations

import multiprocessing
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import graph_step

_NAME = "graphplan_absent"
_PLUGIN = "graphplan_plugin"
settings = ModuleType(_NAME)
here = sys.modules[__name__]
box = SimpleNamespace()
layer = nn.Linear(2, 2)
shared = multiprocessing.Value("d", 2.0)
by_path = operator.attrgetter("inner.factor", "other")
X = torch.arange(8.0).reshape(2, 4) / 8


class Thing:
    """Has nothing."""


thing = Thing()


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    def clean() -> None:
        for space in (vars(here), vars(settings), vars(layer), layer._buffers, box.__dict__):
            space.pop("FACTOR", None)
        with suppress(AttributeError):
            del Thing.FACTOR  # type: ignore[attr-defined]
        sys.modules.pop(_PLUGIN, None)
        vars(box).update(inner=SimpleNamespace(factor=2.0), other=0.0)
        shared.value = 2.0

    clean()
    sys.modules[_NAME] = settings
    yield
    clean()
    del sys.modules[_NAME]


def attribute() -> float:
    try:
        return box.FACTOR
    except AttributeError:
        return 2.0


def any_error() -> float:
    try:
        return box.FACTOR
    except:  # noqa: E722
        return 2.0


def one_of_several_errors() -> float:
    try:
        return box.FACTOR
    except (KeyError, AttributeError):
        return 2.0


def suppressed() -> float:
    with suppress(AttributeError):
        return box.FACTOR
    return 2.0


def of_a_layer() -> Any:
    try:
        return layer.FACTOR
    except AttributeError:
        return 2.0


def called() -> Any:
    try:
        return layer.FACTOR()  # type: ignore[operator]
    except AttributeError:
        return 2.0


def of_a_class() -> float:
    try:
        return thing.FACTOR  # type: ignore[attr-defined]
    except AttributeError:
        return 2.0


def of_a_class_by_default() -> float:
    return getattr(Thing, "FACTOR", 2.0)


def of_a_module() -> float:
    try:
        return settings.FACTOR
    except AttributeError:
        return 2.0


def of_a_module_by_default() -> float:
    return getattr(settings, "FACTOR", 2.0)


def a_global() -> float:
    try:
        return FACTOR  # type: ignore[name-defined]
    except NameError:
        return 2.0


def a_global_by_string() -> float:
    return globals().get("FACTOR", 2.0)


def a_module() -> float:
    try:
        import graphplan_plugin
    except ImportError:
        return 2.0
    return graphplan_plugin.FACTOR


def by_dictionary() -> float:
    return box.__dict__.get("FACTOR", 2.0)


def by_vars() -> float:
    return 3.0 if "FACTOR" in vars(box) else 2.0


def by_dir() -> float:
    return 3.0 if "FACTOR" in dir(box) else 2.0


def of_its_own_module() -> float:
    return 3.0 if hasattr(sys.modules[__name__], "FACTOR") else 2.0


def by_getter() -> float:
    factor, other = by_path(box)
    return factor + other


def by_shared_value() -> float:
    return shared.value


def plugin() -> None:
    vars(sys.modules.setdefault(_PLUGIN, ModuleType(_PLUGIN)))["FACTOR"] = 3.0


Change = Callable[[], object]
CASES: dict[Callable[[], Any], Change] = {
    **dict.fromkeys(
        [attribute, any_error, one_of_several_errors, suppressed, by_dictionary, by_vars, by_dir],
        lambda: setattr(box, "FACTOR", 3.0),
    ),
    of_a_layer: lambda: layer.register_buffer("FACTOR", torch.tensor(3.0)),
    called: lambda: setattr(layer, "FACTOR", lambda: 3.0),
    **dict.fromkeys([of_a_class, of_a_class_by_default], lambda: setattr(Thing, "FACTOR", 3.0)),
    **dict.fromkeys([of_a_module, of_a_module_by_default], lambda: setattr(settings, "FACTOR", 3.0)),
    **dict.fromkeys([a_global, a_global_by_string, of_its_own_module], lambda: setattr(here, "FACTOR", 3.0)),
    a_module: plugin,
    by_getter: lambda: setattr(box.inner, "factor", 3.0),
    by_shared_value: lambda: setattr(shared, "value", 3.0),
}


@pytest.mark.parametrize("read", CASES, ids=lambda read: read.__name__)
def test_what_was_not_there_is_followed(read: Callable[[], Any]) -> None:
    def step(x: Tensor) -> Tensor:
        return x * read()

    call = graph_step(step, backend="tape", warmup_steps=1, verify="off")
    for _ in range(8):
        assert torch.equal(call(X), X * 2.0)
    assert call.stats.replayed > 2
    CASES[read]()
    for _ in range(8):
        assert torch.equal(call(X), X * 3.0)
    assert call.stats.captured == 2
    assert call.stats.replayed > 6


def test_other_errors_and_other_names_cost_no_capture() -> None:
    """Code that goes on without a key is no code that goes on without an attribute."""

    def step(x: Tensor) -> Tensor:
        try:
            factor = vars_of_no_interest["a"]
        except KeyError:
            factor = 2.0
        return x * factor

    vars_of_no_interest: dict[str, float] = {}
    call = graph_step(step, backend="tape", warmup_steps=1, verify="off")
    for _ in range(6):
        call(X)
    box.FACTOR = settings.FACTOR = 3.0
    assert torch.equal(call(X), X * 2.0)
    assert call.stats.captured == 1
