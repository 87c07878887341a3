"""What a step leaves set: modes of modules, flags of tensors, values in parameter groups, torch's global switches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from graphplan import HostEffectError, SkipReason, VerifyError, capture, compile_plan, graph_step, graphed
from graphplan.owners import Flags, walk_owners
from graphplan.switches import NAMES, SWITCHES, Seen, Switch, read_all, set_all, switched
from tests.facts import assert_same
from tests.models import CLASSES, Mlp, float_batches
from tests.twins import (
    SECOND_TRACE,
    Rig,
    assert_falls_back,
    assert_refused,
    assert_same_as_eager,
    assert_same_runs,
    build,
    drive,
    managed,
    prepare_steps,
    state_of,
)

CALLS = 16
BASE = read_all()


@pytest.fixture(autouse=True)
def _switches_go_back() -> Iterator[None]:
    yield
    set_all(BASE)
    torch.clear_autocast_cache()


class Net(nn.Module):
    """A backbone with running statistics, a buffer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Mlp(width=8)
        self.head = nn.Linear(CLASSES, CLASSES)
        self.register_buffer("scale", torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x) * self.scale)

    def freeze(self) -> None:
        """Fine-tune the head alone, as a method of the model's."""
        self.backbone.eval()
        self.backbone.requires_grad_(False)


Action = Callable[[Net, Optimizer], object]


def _set(optimizer: Optimizer, key: str, value: Any) -> None:
    for group in optimizer.param_groups:
        group[key] = value


ACTIONS: dict[str, Action] = {
    "train": lambda model, optimizer: model.train(),
    "eval": lambda model, optimizer: model.eval(),
    "backbone.eval": lambda model, optimizer: model.backbone.eval(),
    "backbone.train": lambda model, optimizer: model.backbone.train(),
    "one layer": lambda model, optimizer: setattr(model.backbone[1], "training", False),
    "other mode": lambda model, optimizer: model.backbone.train(not model.backbone.training),
    "freeze": lambda model, optimizer: model.freeze(),
    "thaw": lambda model, optimizer: model.requires_grad_(True),
    "one bias": lambda model, optimizer: setattr(model.backbone[0].bias, "requires_grad", False),
    "other flag": lambda model, optimizer: model.backbone.requires_grad_(not model.backbone[0].bias.requires_grad),
    "a buffer": lambda model, optimizer: setattr(model.scale.requires_grad_(), "grad", None),
    "weight decay": lambda model, optimizer: _set(optimizer, "weight_decay", 0.3),
    "integral weight decay": lambda model, optimizer: _set(optimizer, "weight_decay", 1),
    "other weight decay": lambda model, optimizer: _set(
        optimizer, "weight_decay", 0.25 - optimizer.param_groups[0]["weight_decay"]
    ),
    "lr": lambda model, optimizer: _set(optimizer, "lr", 0.02),
    "a new entry": lambda model, optimizer: _set(optimizer, "stage", "late"),
    "a tuple": lambda model, optimizer: _set(optimizer, "betas", (0.5, 0.25)),
    "an option": lambda model, optimizer: _set(optimizer, "maximize", False),
}
"""What a step may do at its beginning, in its middle or at its end."""

HOSTS: dict[str, Callable[[Net, Optimizer, int], object]] = {
    "nothing": lambda model, optimizer, index: None,
    "all back": lambda model, optimizer, index: put_back(model, optimizer),
    "back every third": lambda model, optimizer, index: put_back(model, optimizer) if index % 3 == 0 else None,
    "back late": lambda model, optimizer, index: put_back(model, optimizer) if index > 8 else None,
    "another rate": lambda model, optimizer, index: _set(optimizer, "lr", 0.1 / (1 + index)),
    "a validation": lambda model, optimizer, index: validate(model) if index % 4 == 3 else None,
}
"""What somebody does between two calls."""


def put_back(model: Net, optimizer: Optimizer) -> None:
    """Have everything as it was in the beginning."""
    model.train()
    model.requires_grad_(True)
    model.scale.requires_grad_(False)
    _set(optimizer, "weight_decay", 0)
    _set(optimizer, "betas", (0.9, 0.999))
    _set(optimizer, "lr", 0.05)
    for group in optimizer.param_groups:
        group.pop("stage", None)
    set_all(BASE)


def validate(model: Net) -> None:
    """Run in eval mode, and leave each module in its own."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 8))
    for module, training in modes.items():
        module.training = training


@dataclass(frozen=True)
class Acts:
    """The actions of a step, by where they are; ``host`` comes between the calls."""

    start: tuple[str, ...] = ()
    middle: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    host: str = "nothing"


def _act(names: tuple[str, ...], model: Net, optimizer: Optimizer) -> None:
    for name in names:
        ACTIONS[name](model, optimizer)


def make_rig(acts: Acts, make_optimizer: Callable[..., Optimizer] = partial(AdamW, lr=0.05, fused=True)) -> Rig:
    """A training step with these actions, after each call of which the model is called in the mode that it was left in."""
    set_all(BASE)
    model = Net()
    optimizer = make_optimizer(model.parameters())

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        _act(acts.start, model, optimizer)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        _act(acts.middle, model, optimizer)
        loss.backward()
        optimizer.step()
        _act(acts.end, model, optimizer)
        return loss

    def after(index: int) -> None:
        with torch.enable_grad():
            model(torch.ones(2, 8))
        HOSTS[acts.host](model, optimizer, index)

    return Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(CALLS)), after)


def check(acts: Acts, **options: Any) -> Any:
    """:func:`check_rigs` of :func:`make_rig`."""
    return check_rigs(partial(make_rig, acts), **options)


def check_rigs(make: Callable[[], Rig], *, replayed: int = 1, captured: int = 3, **options: Any) -> Any:
    """The step equals eager, call by call, and is replayed."""
    rig = build(make)
    expected = drive_fully(rig, rig.step)
    rig = build(make)
    step = managed(rig, **{"verify": "off", "warmup_steps": 1, **options})
    found = drive_fully(rig, step)
    for number, (left, right) in enumerate(zip(expected, found, strict=True)):
        assert_same(left, right, f" after call {number}")
    assert step.stats.replayed >= replayed, step.stats
    assert step.stats.captured <= captured, step.stats
    return step


def drive_fully(rig: Rig, step: Any) -> list[dict[str, Any]]:
    """The result and the state after each of the rig's calls."""
    states = []
    for index, args in enumerate(rig.calls):
        result = step(*args)
        states.append({**state_of(rig), "result": result.detach().clone()})
        rig.after(index)
    return states

@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", sorted(ACTIONS))
def test_what_a_step_leaves_is_left_by_its_replays(name: str, host: str) -> None:
    """At its beginning and at its end, whoever puts it back or does not."""
    for acts in (Acts(start=(name,), host=host), Acts(end=(name,), host=host)):
        check(acts)


_NAMES = st.lists(st.sampled_from(sorted(ACTIONS)), max_size=2).map(tuple)


@settings(
    max_examples=40, derandomize=True, phases=[Phase.generate], deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(st.builds(Acts, start=_NAMES, middle=_NAMES, end=_NAMES, host=st.sampled_from(sorted(HOSTS))))
def test_several_of_these_in_one_step(acts: Acts) -> None:
    """Also in the middle, between the forward and the backward pass."""
    check(acts, replayed=0, captured=8)


def other_value(switch: Switch) -> Any:
    """A value of the switch that is not the one that it has."""
    value = switch.get()
    if isinstance(value, bool):
        return not value
    if switch.name.startswith("fp32_precision"):
        return "tf32" if value != "tf32" else "ieee"
    if switch.name == "torch.get_default_device()":
        # Of the same kind, so that the step works.
        return torch.device("cpu")
    return {
        "torch.get_default_dtype()": torch.float64,
        "torch.get_autocast_dtype('cpu')": torch.float16,
        "torch.get_autocast_dtype('cuda')": torch.bfloat16,
        "torch.get_float32_matmul_precision()": "medium",
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (False, True),
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (False, True),
        "the order of attention kernels": [2, 1, 0, 3, 4],
    }[switch.name]


_OF_CUDA = ("torch.backends.cuda.preferred_blas_library", "torch.backends.cuda.preferred_linalg_library")
"""A build without CUDA has one library."""
SETTABLE = [switch for switch in SWITCHES if switch.set is not None and switch.name not in _OF_CUDA]


def make_switching(switch: Switch, value: Any, *, begin: bool, end: bool, host: bool) -> Rig:
    """A step that sets a switch at its beginning, or at its end, or for its first half; the host puts it back."""
    set_all(BASE)
    torch.clear_autocast_cache()
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(24, CLASSES))
    optimizer = AdamW(model.parameters(), lr=0.05, fused=True)
    before = switch.get()
    assert switch.set is not None
    set_switch = switch.set

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        if begin:
            set_switch(value)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[:, None]) + torch.rand(CLASSES), y)
        if begin and not end:
            set_switch(before)
        loss.backward()
        optimizer.step()
        if end:
            set_switch(value)
        return loss

    def after(index: int) -> None:
        if host or index % 5 == 4:
            set_all(BASE)

    return Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(CALLS)), after)


@pytest.mark.parametrize("switch", SETTABLE, ids=lambda switch: switch.name)
def test_switches_of_torchs_are_left_as_the_step_leaves_them(switch: Switch) -> None:
    """At the end of the step, which its beginning does not see where the host puts it back."""
    for host in (True, False):
        make = partial(make_switching, switch, other_value(switch), begin=False, end=True, host=host)
        check_rigs(make, replayed=5)


_NEVER_BEGUN = ("torch.is_grad_enabled()", "torch.is_anomaly_enabled()", "torch.is_autocast_enabled('cpu')")
"""Without gradients there is no backward pass, anomaly mode reads values, and nobody clears the cache of casts."""


@pytest.mark.parametrize(
    "switch", [switch for switch in SETTABLE if switch.name not in _NEVER_BEGUN], ids=lambda switch: switch.name
)
@pytest.mark.parametrize("end", [True, False])
def test_switches_that_the_step_sets_first(switch: Switch, end: bool) -> None:
    """Its operators run under them in replays too, also where it puts them back in the middle."""
    make = partial(make_switching, switch, other_value(switch), begin=True, end=end, host=True)
    check_rigs(make, replayed=5)


def test_the_tests_know_every_switch() -> None:
    """Of a torch that has others, too."""
    assert len(SETTABLE) > 35
    assert len(set(NAMES)) == len(NAMES)
    for switch in SETTABLE:
        value = other_value(switch)
        with switched({switch.name: value}):
            assert switch.get() == value
        assert read_all() == BASE


@pytest.mark.parametrize("switch", SETTABLE, ids=lambda switch: switch.name)
def test_programs_are_keyed_by_switches(switch: Switch) -> None:
    """A change between two calls is another program, and the way back the first one's."""
    seen: list[Any] = []

    def step(x: Tensor) -> Tensor:
        seen.append(switch.get())
        return x + 1

    run = graph_step(step, mode="inference", backend="tape", warmup_steps=1, verify="off")
    calls = 5
    for _ in range(calls):
        run(torch.ones(2))
    begun = len(seen)
    with switched({switch.name: other_value(switch)}):
        run(torch.ones(2))
    is_seen = switch.seen is not Seen.BY_CHECKS and switch.name != "torch.get_autocast_dtype('cpu')"
    is_seen = is_seen and switch.name != "torch.get_autocast_dtype('cuda')"
    assert len(seen) == begun + is_seen
    replayed = run.stats.replayed
    run(torch.ones(2))
    assert run.stats.replayed == replayed + 1
