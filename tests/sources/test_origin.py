"""The line between what is guarded and what is trusted: the user's own files on one side, installed packages on the
other, of which only objects' attributes are compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import graph_step, graphed
from graphplan.environment import origin
from graphplan.errors import OptionError
from tests.twins import BEFORE_REPLAY

_PACKAGE = '''
import torch

RATE = 2.0
TABLE = {"scale": 3.0}

class Config:
    kinds = {"a": 1}

    def __init__(self):
        self.scale = 1.0

    @property
    def doubled(self):
        return 2 * self.scale

class Special(Config):
    kinds = {"a": 1, "b": 2}

class Registry(dict):
    """Makes an object whenever it is read."""

    def __getitem__(self, key):
        return torch.nn.ReLU()

ACTIVATIONS = Registry(relu=None)

class Counter:
    """Does otherwise in every tenth call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return 2 * x if self.calls % 10 == 0 else x

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Special()

    def forward(self, x):
        x = ACTIVATIONS["relu"](x) * RATE * TABLE["scale"]
        return x * self.config.doubled * len(self.config.kinds) * len(Config.kinds)
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package that looks installed."""
    home = tmp_path / "site-packages"
    (home / "librarylike").mkdir(parents=True)
    (home / "librarylike" / "__init__.py").write_text(_PACKAGE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(home))
    invalidate_caches()
    yield import_module("librarylike")
    sys.modules.pop("librarylike")
    origin._watched.discard("librarylike")
    for cached in (origin.is_library, origin.is_installed, origin.is_users_file):
        cached.cache_clear()


def _replays(step: Any, count: int = 8) -> int:
    """How many of ``count`` further calls of a step are replayed."""
    before = step.stats.replayed
    for _ in range(count):
        step(torch.ones(3))
    replayed: int = step.stats.replayed - before
    return replayed


def _ready(package: ModuleType, **options: Any) -> tuple[Any, Any]:
    layer = package.Layer()
    step = graph_step(lambda x: layer(x).sum(), mode="inference", backend="tape", verify="off", **options)
    for _ in range(BEFORE_REPLAY + 1):
        step(torch.ones(3))
    assert step.stats.replayed == 1
    return layer, step


CHANGES: dict[str, Callable[[ModuleType], object]] = {
    "a global": lambda package: setattr(package, "RATE", 5.0),
    "an item of a global": lambda package: package.TABLE.update(scale=7.0),
    "a class attribute": lambda package: setattr(package.Config, "kinds", {}),
    "a registry": lambda package: package.ACTIVATIONS.update(gelu=None),
    "a method": lambda package: setattr(package.Layer, "forward", lambda self, x: x),
    "a function of torch's": lambda package: setattr(package.torch.nn.functional, "relu", torch.relu),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_an_installed_package_holds_is_trusted(
    name: str, package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.functional, "relu", torch.nn.functional.relu)
    _, step = _ready(package)
    CHANGES[name](package)
    assert _replays(step) == 8
    assert step.stats.captured == 1


@pytest.mark.parametrize("name", ["a global", "an item of a global", "a class attribute", "a method"])
def test_a_package_that_is_watched_is_the_users_own(name: str, package: ModuleType) -> None:
    _, step = _ready(package, watch=("librarylike",))
    CHANGES[name](package)
    step(torch.ones(3))
    assert step.stats.replayed == 1, "the change was not seen"


def test_attributes_of_an_installed_packages_objects_are_guarded(package: ModuleType) -> None:
    layer, step = _ready(package)
    expected = step(torch.ones(3))
    layer.config.scale = 4.0
    assert step(torch.ones(3)).item() == 4 * expected.item()


def test_what_an_installed_packages_object_counts_is_read_by_its_methods(package: ModuleType) -> None:
    counter = package.Counter()
    step = graph_step(lambda x: counter(x).sum(), owners={"counter": counter}, backend="tape", verify="off")
    found = [step(torch.ones(3)).item() for _ in range(50)]
    assert found == [6.0 if call % 10 == 0 else 3.0 for call in range(1, 51)]
    assert counter.calls == 50 and step.stats.replayed > 10


class Base:
    table: dict[str, Any] = {}  # noqa: RUF012 - what a class holds is what this is about


class Sub(Base):
    table: dict[str, Any] = {"a": 1}  # noqa: RUF012


def test_a_class_attribute_that_a_subclass_overrides_is_two() -> None:
    layer = nn.Linear(8, 8)
    fast = graphed(lambda x: layer(x) * (len(Base.table) + len(Sub.table)), backend="tape")
    x = torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(16):
            fast(x)
        assert (fast.stats.captured, fast.stats.recaptured) == (1, 0)
        Base.table["b"] = 2
        try:
            assert torch.equal(fast(x), layer(x) * 2)
        finally:
            del Base.table["b"]


class Hostile:
    """What is not there is asked of code that must not run."""

    def __init__(self) -> None:
        self.gain = 2.0
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is not for you")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("nor is this")

    __hash__ = None  # type: ignore[assignment]

    @property
    def secret(self) -> float:
        raise RuntimeError("nor this")


class Slotted:
    __slots__ = ("gain", "unset")

    def __init__(self) -> None:
        self.gain = 2.0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize("kind", [Hostile, Slotted])
@pytest.mark.twice
def test_guards_run_no_code_of_the_objects_that_they_read(kind: type) -> None:
    layer = nn.Linear(3, 3)
    layer.thing = kind()  # type: ignore[assignment]

    def loss(x: Tensor) -> Tensor:
        return layer(x).sum() * layer.thing.gain  # type: ignore[operator, union-attr]

    step = graph_step(loss, owners={"model": layer}, mode="inference", backend="tape", verify=1)
    with torch.no_grad():
        for _ in range(BEFORE_REPLAY + 3):
            step(torch.ones(3))
        assert step.stats.replayed == 3
        layer.thing.gain = 5.0  # type: ignore[operator, union-attr]
        assert torch.equal(step(torch.ones(3)), loss(torch.ones(3)))


def test_a_property_is_not_asked_between_replays() -> None:
    asked: list[int] = []

    class Settings:
        def __init__(self) -> None:
            self.value = 3.0

        @property
        def rate(self) -> float:
            asked.append(1)
            return self.value

    layer = nn.Linear(3, 3)
    layer.settings = Settings()  # type: ignore[assignment]
    step = graph_step(
        lambda x: layer(x) * layer.settings.rate,  # type: ignore[union-attr]
        owners={"model": layer},
        mode="inference",
        backend="tape",
        verify="off",
        allow=("asked",),
    )
    for _ in range(BEFORE_REPLAY):
        step(torch.ones(3))
    count = len(asked)
    assert _replays(step) == 8
    assert len(asked) == count
    layer.settings.value = 4.0  # type: ignore[union-attr, assignment]
    assert torch.equal(step(torch.ones(3)), layer(torch.ones(3)) * 4.0)


@pytest.mark.parametrize("watch", ["torch", (1,), ("a.b",)])
def test_names_of_packages_to_watch(watch: Any) -> None:
    with pytest.raises(OptionError, match=r"watch is .*; expected a sequence of top-level names of packages"):
        graph_step(print, watch=watch)


def test_where_files_lie() -> None:
    assert origin.is_users_file(__file__)
    assert origin.is_users(Base)
    assert origin.is_installed(pytest.__file__)
    assert not origin.is_users(pytest.MonkeyPatch)
    assert origin.is_library(torch.__file__)
    assert origin.is_library(origin.__file__)
    assert not origin.is_users(dict)
    assert not origin.is_users(Path)
    assert not origin.is_users(object())
    assert origin.is_users_module(ModuleType("__main__"), "__main__")
    assert origin.is_librarys(dict)
    assert not origin.is_librarys(Base)


SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "validation": (
        lambda: torch.distributions.Distribution._validate_args,
        torch.distributions.Distribution.set_default_validate_args,
        [True, False],
    ),
    "flash attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, [True, False]),
    "determinism": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        [True, False],
    ),
    "autotuning": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
        [True, False],
    ),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, [torch.float32, torch.float64]),
    "mkldnn": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, [True, False]),
}
"""What each switch is now, what sets it, and two values, of which other tests may have left either."""


@pytest.mark.parametrize("name", SWITCHES)
def test_global_switches_of_torch_are_guarded(name: str) -> None:
    layer, x = nn.Linear(3, 3), torch.ones(3)
    step = graph_step(lambda x: layer(x), mode="inference", backend="tape", verify="off")
    for _ in range(BEFORE_REPLAY + 1):
        step(x)
    now, switch, values = SWITCHES[name]
    before = now()
    try:
        switch(*(value for value in values if value != before))
        step(x)
        assert step.stats.replayed == 1
    finally:
        switch(before)
    assert _replays(step, 3) == 3, "and the first program is still there"
