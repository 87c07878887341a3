"""What a step leaves set: modes of modules, flags of tensors, values in parameter groups, torch's global switches."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from graphplan import HostEffectError, HostSyncError, SkipReason, capture, compile_plan, graph_step, graphed
from graphplan.environment.switches import MIXED, NAMES, SWITCHES, Seen, Switch, read_all, set_all
from graphplan.owners.flags import Flags
from graphplan.owners.walk import walk_owners
from tests.crossing import by_key, each
from tests.facts import assert_same, flatten
from tests.models import CLASSES, Box, Mlp, float_batches
from tests.twins import (
    Rig,
    assert_falls_back,
    assert_refused,
    assert_same_runs,
    build,
    drive,
    managed,
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
        model(torch.ones(2, 8, device=model.head.weight.device))
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


def make_rig(acts: Acts) -> Rig:
    """A training step with these actions. After each call the model is called in the mode that it was left in."""
    set_all(BASE)
    model = Net()
    optimizer = AdamW(model.parameters(), lr=0.05, fused=True)

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
            model(torch.ones(2, 8, device=model.head.weight.device))
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


@each(name=sorted(ACTIONS), host=HOSTS, times=2)
@pytest.mark.crossed(2)
def test_what_a_step_leaves_is_left_by_its_replays(name: str, host: str) -> None:
    """At its beginning and at its end, whoever puts it back or does not."""
    for acts in (Acts(start=(name,), host=host), Acts(end=(name,), host=host)):
        check(acts)


_NAMES = st.lists(st.sampled_from(sorted(ACTIONS)), max_size=2).map(tuple)


@settings(
    max_examples=15, derandomize=True, phases=[Phase.generate], deadline=None, database=None,
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


def set_switch(switch: Switch, value: Any) -> None:
    """Set a switch as code of a user's does, by a call of torch's function."""
    assert switch.set is not None
    if switch.name == "torch.is_anomaly_check_nan_enabled()":
        torch.set_anomaly_enabled(torch.is_anomaly_enabled(), value)
    elif isinstance(switch.set, partial):
        switch.set.func(*switch.set.args, value)
    else:
        switch.set(value)


def read_switch(switch: Switch) -> Any:
    """Read a switch likewise."""
    return switch.get.func(*switch.get.args) if isinstance(switch.get, partial) else switch.get()


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

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        if begin:
            set_switch(switch, value)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[:, None]) + torch.rand(CLASSES, device=x.device), y)
        if begin and not end:
            set_switch(switch, before)
        loss.backward()
        optimizer.step()
        if end:
            set_switch(switch, value)
        return loss

    def after(index: int) -> None:
        if host or index % 5 == 4:
            set_all(BASE)

    return Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(CALLS)), after)


_ODD = ("torch.is_grad_enabled()", "torch.is_anomaly_enabled()", "torch.is_autocast_enabled('cpu')")
"""Without gradients there is no backward pass, anomaly mode reads values, and nobody clears the cache of casts."""
_by_name = partial(pytest.mark.parametrize, "switch", ids=lambda switch: switch.name)


@each(switch=by_key({switch.name: switch for switch in SETTABLE}), host=[True, False])
@pytest.mark.crossed(3)
def test_switches_of_torchs_are_left_as_the_step_leaves_them(switch: Switch, host: bool) -> None:
    """At the end of the step, which its beginning does not see where the host puts it back."""
    host = host or switch.name in _ODD
    make = partial(make_switching, switch, other_value(switch), begin=False, end=True, host=host)
    check_rigs(make, replayed=5)


@each(switch=by_key({switch.name: switch for switch in SETTABLE if switch.name not in _ODD}), end=[True, False])
@pytest.mark.crossed(3, 1)
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
        set_switch(switch, value)
        assert switch.get() == value
        set_all(BASE)
        assert read_all() == BASE


@_by_name(SETTABLE)
@pytest.mark.crossed(3, 2)
def test_programs_are_keyed_by_switches(switch: Switch) -> None:
    """A change between two calls is another program, and the way back the first one's; if code asks for the switch, or
    recordings depend on it in any case.
    """
    for uses in (False, True):
        seen: list[Any] = []

        def step(x: Tensor, uses: bool = uses, seen: list[Any] = seen) -> Tensor:
            seen.append(read_switch(switch) if uses else None)
            return x + 1

        run = graph_step(step, mode="inference", backend="tape", warmup_steps=1, verify="off", allow=("*seen*",))
        for _ in range(8):
            run(torch.ones(2))
        replayed = run.stats.replayed
        assert replayed >= 2
        set_switch(switch, other_value(switch))
        run(torch.ones(2))
        set_all(BASE)
        is_other = run.stats.replayed == replayed
        assert is_other or switch.seen is Seen.BY_USE, switch
        replayed = run.stats.replayed
        run(torch.ones(2))
        assert run.stats.replayed == replayed + 1
        if uses and switch.seen is Seen.BY_USE:
            assert is_other


@pytest.mark.parametrize("every", [1, 4, 10])
def test_a_step_that_trains_beside_one_that_evaluates(every: int) -> None:
    """Each finds the other's modes. Two programs at most serve each of them."""

    def run(graph: bool) -> tuple[list[Any], Any, Any]:
        torch.manual_seed(0)
        model = Net()
        optimizer = AdamW(model.parameters(), lr=0.05, fused=True)

        def train(x: Tensor, y: Tensor) -> Tensor:
            model.train()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        @torch.no_grad()
        def evaluate(x: Tensor) -> Tensor:
            model.eval()
            return model(x).sum()

        steps: tuple[Any, Any] = train, evaluate
        if graph:
            steps = graph_step(train, owners={"model": model, "optimizer": optimizer}), graphed(evaluate)
        found = []
        for index, (x, y) in enumerate(float_batches(100)):
            found.append(steps[0](x, y).clone())
            if index % every == 0:
                found.append(steps[1](x).clone())
            found.append(model(x).detach())
            found.append([module.training for module in model.modules()])
            found.append({name: value.clone() for name, value in model.state_dict().items()})
        return found, steps[0], steps[1]

    expected, _, _ = run(graph=False)
    found, train, evaluate = run(graph=True)
    assert_same(flatten(found=expected), flatten(found=found))
    assert train.stats.captured <= 2
    assert train.stats.replayed > 85
    assert evaluate.stats.captured == (1 if every > 1 else evaluate.stats.captured)
    assert evaluate.stats.captured <= 2


class Switching(nn.Module):
    """A layer that sets its own mode, and its neighbours'."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        self.inner.eval()
        out = self.inner(x)
        self.train(False)
        return out


def _leave_frozen(module: nn.Module) -> None:
    for child in module.children():
        _leave_frozen(child)
    module.training = False
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad = False


def _deep_rig(change: Callable[[nn.Module], object], host: Callable[[nn.Module], object]) -> Rig:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Switching(Mlp())), nn.Linear(CLASSES, CLASSES))
    optimizer = AdamW(model.parameters(), lr=0.05, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        change(model)
        return loss

    return Rig(train_step, {"model": model}, list(float_batches(CALLS)), lambda index: host(model))


@pytest.mark.parametrize("host", [lambda model: None, lambda model: model.train().requires_grad_(True)])
@pytest.mark.parametrize("change", [lambda model: None, lambda model: _leave_frozen(model[1])])
def test_helpers_and_layers_that_set_modes(change: Callable[..., Any], host: Callable[..., Any]) -> None:
    """Where in the user's code it is does not matter."""
    check_rigs(partial(_deep_rig, change, host), replayed=5)


def _scripted_rig() -> Rig:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))), nn.Linear(8, CLASSES))
    optimizer = AdamW(model.parameters(), lr=0.05, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        model.eval()
        return loss

    def after(index: int) -> None:
        modes.append([module.training for module in model.modules()])
        model.train()

    modes: list[Any] = []
    return Rig(train_step, {"model": model}, list(float_batches(CALLS)), after, {"modes": modes})


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_modes_of_scripted_modules() -> None:
    """They are kept in C++."""
    rig = build(_scripted_rig)
    expected = drive(rig, rig.step)
    rig = build(_scripted_rig)
    step = managed(rig, on_failure="eager", verify=1)
    assert_same_runs(expected, drive(rig, step))


@pytest.mark.parametrize("asks", [True, False])
def test_a_fed_tensor_that_the_step_has_ask_for_gradients(asks: bool) -> None:
    """Or no longer."""

    def make() -> Rig:
        model = Mlp()
        optimizer = AdamW(model.parameters(), lr=0.05, fused=True)

        def train_step(x: Tensor, y: Tensor) -> Tensor:
            x.requires_grad_()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            x.requires_grad_(asks)
            return loss

        calls = [(x.requires_grad_(not asks), y) for x, y in float_batches(CALLS)]
        return Rig(train_step, {"model": model, "optimizer": optimizer}, calls)

    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig)
    assert_same_runs(expected, drive(rig, step))
    assert step.stats.replayed == CALLS - 6
    assert step.plan.left == {"args[0].requires_grad": asks}


def test_nothing_is_done_where_nothing_moved() -> None:
    """A plan says what is left, and lists it."""
    step = check(Acts(start=("train",)), replayed=10)
    assert not step.plan.left
    step = check(Acts(start=("backbone.eval",), end=("lr",), host="all back"), replayed=8)
    assert step.plan.left["model.backbone.training"] is False
    assert "left: model.backbone.1.training = False" in str(step.plan)
    assert "left: optimizer.param_groups[0].lr = 0.02" in str(step.plan)
    assert not any("head" in path for path in step.plan.left)


def _counting_rig(change: Callable[[Net, Optimizer, int], object]) -> Rig:
    """A step with a change that depends on how often it was called, which nobody sees, and is put back."""
    rig = make_rig(Acts(host="all back"))
    model, optimizer = rig.owners["model"], rig.owners["optimizer"]
    inner, count = rig.step, Box(itertools.count())

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = inner(x, y)
        change(model, optimizer, next(count.item))
        return loss

    return replace(rig, step=train_step)


def _decay(model: Net, optimizer: Optimizer, count: int) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.25 * count


def _rate(model: Net, optimizer: Optimizer, count: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.25 * count


def _mode(model: Net, optimizer: Optimizer, count: int) -> None:
    model.head.train(count % 2 == 0)


def _flag(model: Net, optimizer: Optimizer, count: int) -> None:
    model.head.weight.requires_grad_(count % 2 == 0)


def _precision(model: Net, optimizer: Optimizer, count: int) -> None:
    torch.set_float32_matmul_precision("high" if count % 2 else "highest")


UNEVEN = {
    _decay: (4, r"optimizer\.param_groups\[0\]\.weight_decay", r"\(0 to 0\.75\)", r"\(0 to 1\.0\)"),
    _rate: (5, r"optimizer\.param_groups\[0\]\.lr", r"\(a tensor to 1\.0\)", r"\(a tensor to 1\.25\)"),
    _mode: (6, r"model\.head\.training", r"\(True to False\)", r"\(unchanged\)"),
    _flag: (6, r"model\.head\.weight\.requires_grad", r"\(True to False\)", r"\(unchanged\)"),
    _precision: (
        7,
        "fp32_precision of matmul in torch.backends.cuda",
        r"\('none' to 'tf32'\)",
        r"\('none' to 'ieee'\)",
    ),
}
"""How many calls come before: some more to warm up where the first ones begin otherwise than the ones before ended."""


@pytest.mark.parametrize("change", UNEVEN, ids=lambda change: change.__name__)
def test_what_is_left_otherwise_each_time_is_refused(change: Callable[..., Any]) -> None:
    """By name, with both changes; the refused call leaves everything as it was."""
    make = partial(_counting_rig, change)
    done, path, *values = UNEVEN[change]
    text = (
        rf"the step changes {path} in one way on one call .* and in another way on the next .*restore "
        r"it within the step.*allow="
    )
    assert_refused(make, HostEffectError, text, *values, done=done)
    assert_falls_back(make, SkipReason.HOST_EFFECT, rf"the step changes {path}")


def test_what_replays_may_leave_alone() -> None:
    """``allow`` names it: then it is what it was before the replay, and checks do not mind."""
    rig = build(partial(_counting_rig, _decay))
    step = managed(rig, allow=("optimizer.param_groups[0].weight_decay",), verify=1)
    drive(rig, step)
    assert step.stats.replayed == CALLS - 6
    assert not step.plan.left


def _hold(thing: Any) -> Any:
    thing.__enter__()
    return thing


UNSET = {
    "saved tensors": (
        lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone),
        r"torch\.autograd\.graph\.saved_tensors_hooks",
    ),
    "a list": (lambda: None, r"optimizer\.param_groups\[0\]\.milestones"),
    "what is gone": (lambda: None, r"optimizer\.param_groups\[0\]\.stage .*'late' to nothing"),
}


@pytest.mark.parametrize("name", UNSET)
def test_what_cannot_be_set_after_a_replay_is_refused(name: str) -> None:
    """By name, with the way out."""
    context, path = UNSET[name]
    open_contexts: list[Any] = []

    def make() -> Rig:
        model = Mlp()
        optimizer = AdamW(model.parameters(), lr=0.05, fused=True)
        optimizer.param_groups[0].update({"milestones": [3], "stage": "late"})

        def train_step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if name == "a list":
                optimizer.param_groups[0]["milestones"] = [4]
            if name == "what is gone":
                del optimizer.param_groups[0]["stage"]
            entered = context()
            if entered is not None:
                open_contexts.append(_hold(entered))
            return loss

        def after(index: int) -> None:
            while open_contexts:
                open_contexts.pop().__exit__(None, None, None)
            optimizer.param_groups[0].update({"milestones": [3], "stage": "late"})

        return Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(CALLS)), after)

    rig = build(make)
    step = managed(rig, allow=("*open_contexts*",))
    with pytest.raises(
        HostEffectError,
        match=rf"the step changes {path}.* does not restore it, but graphplan cannot set it after a replay",
    ) as caught:
        try:
            drive(rig, step)
        finally:
            # The refused call is undone, and with it what the list held.
            while torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
                torch._C._autograd._pop_saved_tensors_default_hooks()
    assert "for example by a with statement" in str(caught.value)


def test_a_refused_call_leaves_flags_and_switches_as_they_were() -> None:
    """Also those that no container of an owner's holds."""
    model = Net()
    optimizer = AdamW(model.parameters(), lr=0.05, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        model.freeze()
        x.requires_grad_()
        torch.set_default_dtype(torch.float64)
        torch.backends.cudnn.benchmark = True
        torch.use_deterministic_algorithms(True, warn_only=True)
        optimizer.param_groups[0]["weight_decay"] = 0.5
        return complex(loss.detach()).real

    owners = {"model": model, "optimizer": optimizer}
    step = graph_step(train_step, owners=owners)
    for x, y in float_batches(8):
        put_back(model, optimizer)
        flags = Flags(walk_owners(owners), {"x": x})
        found = flags.read()
        try:
            step(x, y)
        except HostSyncError:
            break
    else:
        pytest.fail("the call that is traced was not refused")
    assert flags.read() == found


def test_checks_compare_what_is_left() -> None:
    """A replay that leaves other modes, flags, values or switches than the eager step is found out, by name."""
    acts = Acts(end=("backbone.eval", "weight decay", "one bias"), host="all back")
    for path in (
        "model.backbone.training",
        "optimizer.param_groups[0].weight_decay",
        "model.backbone.0.bias.requires_grad",
    ):
        rig = build(partial(make_rig, acts))
        step = managed(rig, verify=4)
        drive(replace(rig, calls=rig.calls[:9]), step)
        (program,) = step.machine.programs.all()
        program.plan = replace(
            program.plan, left={key: value for key, value in program.plan.left.items() if key != path}
        )
        with pytest.warns(UserWarning, match=rf"{re.escape(path)}: .* after the replay, .* after the eager step"):
            drive(replace(rig, calls=rig.calls[9:]), step)


@pytest.mark.parametrize("verify", ["off", 1, 3])
def test_replays_that_are_checked_leave_what_others_do(verify: Any) -> None:
    """A check undoes its replay before the eager step, switches and flags included."""
    acts = Acts(start=("backbone.eval",), middle=("weight decay",), end=("one bias", "lr"), host="all back")
    step = check(acts, replayed=8, verify=verify)
    assert bool(step.stats.verified) == (verify != "off")


def test_plans_and_programs_alone() -> None:
    """They begin with what is there when a plan is compiled, which is put back, and leave what the step leaves."""

    def run(graph: bool) -> list[Any]:
        torch.manual_seed(0)
        set_all(BASE)
        model = Net()
        optimizer = AdamW(model.parameters(), lr=0.05, fused=True)

        def train_step(x: Tensor, y: Tensor) -> Tensor:
            model.freeze()
            torch.set_default_dtype(torch.float64)
            optimizer.param_groups[0]["weight_decay"] = 0.5
            optimizer.param_groups[0]["lr"] = 0.01
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        owners, batches = {"model": model, "optimizer": optimizer}, list(float_batches(6))
        found = [train_step(*batches[0]).clone()]
        put_back(model, optimizer)
        call: Any = train_step
        if graph:
            before = flatten(**owners)
            plan = compile_plan(train_step, *batches[0], owners=owners)
            program = capture(plan, feed=batches[0], backend="tape")
            assert_same(before, flatten(**owners))
            assert read_all() == BASE
            call = lambda *args: program.replay(args)  # noqa: E731
        for x, y in batches[1:]:
            found.append([call(x, y).clone(), read_all(), flatten(**owners)])
            put_back(model, optimizer)
        return found

    assert_same(flatten(found=run(graph=False)), flatten(found=run(graph=True)))


def test_old_switches_of_precision_need_not_know_the_new_ones() -> None:
    """Where torch itself cannot say what an old switch is, the newer ones tell."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    assert read_all()[NAMES.index("torch.backends.cudnn.allow_tf32")] is MIXED
    check_switching = partial(make_switching, SETTABLE[0], True, begin=False, end=False, host=False)
    rig = build(check_switching)
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    step = managed(rig)
    drive(rig, step)
    assert step.stats.replayed > 0
