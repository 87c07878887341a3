"""Every optimizer of torch: replayed with eager's numbers, or refused by name; and what preparing one leaves behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from graphplan import GraphPlanError, graph_step, prepare_optimizer
from tests.crossing import each
from tests.facts import assert_same, flatten
from tests.models import training_rig
from tests.twins import Rig, assert_equals_eager

MAKERS: dict[str, Callable[..., Any]] = {
    "Adam": optim.Adam,
    "Adam amsgrad": partial(optim.Adam, amsgrad=True),
    "AdamW": optim.AdamW,
    "SGD": optim.SGD,
    "SGD nesterov": partial(optim.SGD, momentum=0.9, nesterov=True),
    "SGD dampened": partial(optim.SGD, momentum=0.9, dampening=0.1),
    "Adagrad": optim.Adagrad,
    "RMSprop": partial(optim.RMSprop, momentum=0.9, centered=True),
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "Adamax": optim.Adamax,
    "Adadelta": optim.Adadelta,
    "ASGD": optim.ASGD,
    "Rprop": optim.Rprop,
    "Adafactor": optim.Adafactor,
}
if hasattr(optim, "Muon"):
    # Since PyTorch 2.9.
    MAKERS["Muon"] = optim.Muon
ON_DEVICE = {"Adam", "Adam amsgrad", "AdamW", "SGD", "SGD nesterov", "SGD dampened", "Adagrad"}
"""Those with a fused CPU kernel: they take the learning rate from a tensor."""
CONSTANT = {"RMSprop", "Muon", "Adadelta", "Rprop"} & MAKERS.keys()
"""Those whose CPU step has no Python number that changes, as long as the learning rate stays."""


def build(name: str, *, prepared: bool, device: str | torch.device = "cpu") -> tuple[nn.Module, Any]:
    """A model of matrices only (Muon takes nothing else) and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).to(device)
    optimizer = MAKERS[name](model.parameters(), lr=0.01)
    if prepared:
        prepare_optimizer(optimizer)
    return model, optimizer


def train(name: str, *, scheduled: bool, graphed: bool) -> tuple[dict[str, Any], Any]:
    """State after 30 steps, and the graphed step."""
    model, optimizer = build(name, prepared=not graphed)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)

    def fn(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    step = graph_step(fn, owners=[model, optimizer], backend="tape") if graphed else fn
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(30):
        losses.append(step(torch.randn(5, 6, generator=generator)).detach())
        if scheduled:
            scheduler.step()
    return flatten(model=model, state=optimizer.state_dict()["state"], losses=losses), step


@each(name=sorted(ON_DEVICE), scheduled=[False, True])
@pytest.mark.twice
def test_fused_optimizers_are_replayed_under_any_schedule(name: str, scheduled: bool) -> None:
    """Prepared: the fused kernel, a device learning rate, one capture; bitwise the prepared eager run."""
    expected, _ = train(name, scheduled=scheduled, graphed=False)
    found, step = train(name, scheduled=scheduled, graphed=True)
    assert_same(expected, found)
    assert (step.stats.captured, step.stats.replayed) == (1, 24)
    assert any("fused" in change for change in step.facts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(ON_DEVICE))
def test_what_is_prepared_in_half_precision_still_trains(name: str, dtype: torch.dtype) -> None:
    """One step by the prepared kernel is one by the stock kernel, up to roundings: no element is left out, as torch's
    fused SGD leaves out most on the CPU.
    """
    after = []
    for prepared in (False, True):
        weight = torch.linspace(-1, 1, 70, dtype=dtype).requires_grad_()
        weight.grad = torch.ones_like(weight)
        optimizer = MAKERS[name]([weight], lr=0.25)
        if prepared:
            prepare_optimizer(optimizer)
        optimizer.step()
        after.append(weight.detach())
    torch.testing.assert_close(*after, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("name", sorted(CONSTANT))
@pytest.mark.twice
def test_optimizers_without_a_device_lr_are_replayed_while_it_stays(name: str) -> None:
    """A constant learning rate is a constant of the program; a schedule is refused by name."""
    expected, _ = train(name, scheduled=False, graphed=False)
    found, step = train(name, scheduled=False, graphed=True)
    assert_same(expected, found)
    assert step.stats.replayed == 24
    with pytest.raises(GraphPlanError, match=rf"{name}.*param_groups\[0\]\.lr"):
        train(name, scheduled=True, graphed=True)


@pytest.mark.parametrize("name", sorted(MAKERS.keys() - ON_DEVICE - CONSTANT))
def test_host_counters_are_refused(name: str) -> None:
    """Optimizers whose CPU step computes with a Python step count: refused as the optimizer's doing, with a fix."""
    with pytest.raises(GraphPlanError, match=f"optimizer {name} does this") as caught:
        train(name, scheduled=False, graphed=True)
    assert caught.value.component == "optimizer"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(ON_DEVICE))
def test_close_gives_the_optimizer_back(name: str) -> None:
    """Between calls and after ``close``, groups and state dict are those of an optimizer that was never prepared."""
    _, optimizer = build(name, prepared=False)
    flags = [dict(group, params=None) for group in optimizer.param_groups]
    parameter = optimizer.param_groups[0]["params"][0]

    def fn(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (parameter @ x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    step = graph_step(fn, owners=[optimizer], backend="tape")
    for _ in range(9):
        step(torch.ones(6))
        assert [dict(group, params=None) for group in optimizer.param_groups] == flags
        saved = optimizer.state_dict()["param_groups"][0]
        assert {key: value for key, value in saved.items() if key != "params"} == {
            key: value for key, value in flags[0].items() if key != "params"
        }
    assert step.stats.replayed > 0
    step.close()
    assert [dict(group, params=None) for group in optimizer.param_groups] == flags


def test_betas_in_a_list() -> None:
    """As some checkpoints bring them: what is changed in place is captured anew, and comes back with its program."""

    def make() -> Rig:
        rig = training_rig("mlp", "adamw", sizes=(8,) * 20)
        group = rig.owners["optimizer"].param_groups[0]
        group["betas"] = [0.9, 0.99]
        betas = group["betas"]

        def change(index: int) -> None:
            rig.after(index)
            betas[0] = 0.5 if 8 <= index < 14 else 0.9

        return replace(rig, after=change)

    step = assert_equals_eager(make, captured=2, replayed=3 + 5)
    assert step.stats.recaptured == 1


@pytest.mark.parametrize("dampening", [0.0, 0.5])
@pytest.mark.twice
def test_parameters_that_are_unfrozen_have_no_momentum_yet(dampening: float) -> None:
    """torch's fused SGD, which is graphplan's choice, takes parameters with a momentum or without, not both."""

    def run(backend: str) -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9, dampening=dampening)
        model[0].requires_grad_(False)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        graph = graph_step(step, owners={"model": model, "optimizer": optimizer}, backend=backend)
        losses = []
        for number in range(24):
            model[0].requires_grad_(number >= 10)
            losses.append(graph(torch.full((2, 4), 1.0 + number % 3)))
        assert graph.stats.replayed == (0 if backend == "eager" else 24 - 2 * 3 - 6)
        return optimizer.param_groups[0]["fused"], flatten(losses=losses, model=model)

    (flag, expected), (own, found) = run("eager"), run("tape")
    assert flag is own is None
    for path, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[path], value, msg=path)


@pytest.mark.twice
def test_parameters_that_a_later_path_takes_have_no_momentum_yet() -> None:
    """The trace of their first step, which stock kernels take, is not counted."""

    def run(backend: str) -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(0)
        model: Any = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model[0](x).square().mean()
            if model.stage >= 1:
                loss = loss + model[1](x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        graph = graph_step(step, owners={"model": model, "optimizer": optimizer}, backend=backend)
        losses = []
        for number in range(30):
            model.stage = number // 10
            losses.append(graph(torch.full((2, 4), 1.0 + number % 3)))
        return graph, flatten(losses=losses, model=model)

    (_, expected), (step, found) = run("eager"), run("tape")
    assert (step.stats.captured, step.stats.traced, step.stats.replayed) == (2, 4, 30 - 3 - 1 - 4 - 2)
    for path, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[path], value, msg=path)


def _gappy() -> tuple[torch.Tensor, Callable[[nn.Parameter], None]]:
    return torch.randn(8, 8)[:, ::2], lambda param: None


def _turned() -> tuple[torch.Tensor, Callable[[nn.Parameter], None]]:
    def turn(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.grad = param.grad.t().contiguous().t()

    return torch.randn(8, 4), turn


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, partial(optim.SGD, momentum=0.9), optim.Adagrad])
@pytest.mark.parametrize("make", [_gappy, _turned], ids=["gaps", "another order"])
def test_memory_that_fused_kernels_go_through_otherwise(kind: Callable[..., Any], make: Callable[[], Any]) -> None:
    """torch's kernels on the CPU take all tensors as they lie there: the stock optimizer steps."""
    found = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        data, after = make()
        base = data._base
        param = nn.Parameter(data)
        optimizer = kind([param], lr=0.1)

        def step(x: torch.Tensor, param: nn.Parameter = param, after: Any = after, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = (param * x).sum()
            loss.backward()
            after(param)
            optimizer.step()
            return loss.detach()

        fast: Any = graph_step(step, owners={"optimizer": optimizer}, on_failure="eager") if is_graphed else step
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="graphplan runs this step eagerly")
            losses = [fast(torch.randn(8, 4)) for _ in range(20)]
        found.append([param.detach(), *losses, *([] if base is None else [base])])
    assert all(map(torch.equal, *found))
    assert fast.stats.eager > 10
    assert "none whose memory layout differs" in fast.report() or "in Python" in fast.report(), fast.report()


def trained(param: nn.Parameter, optimizer: Any, *, is_graphed: bool, loaded: Any = None) -> Any:
    """Train a parameter for 20 steps, with the state dict ``loaded`` from the tenth on; return the step."""

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (param * x).sum().backward()
        optimizer.step()

    fast: Any = graph_step(step, owners={"optimizer": optimizer}, on_failure="eager") if is_graphed else step
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="graphplan runs this step eagerly")
        for number in range(20):
            if number == 10 and loaded is not None:
                optimizer.load_state_dict(loaded)
            fast(torch.randn(4, 3, 2, 2))
    return fast


def state_of(param: nn.Parameter) -> Any:
    """The state dict of an optimizer that has stepped the parameter once."""
    optimizer = optim.AdamW([param], lr=0.1)
    param.grad = torch.randn_like(param)
    optimizer.step()
    return optimizer.state_dict()


def test_parameters_in_another_order_than_their_checkpoint() -> None:
    """Its momentum was that of parameters in the usual order."""
    found = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        usual = nn.Parameter(torch.randn(4, 3, 2, 2))
        loaded = state_of(usual)
        param = nn.Parameter(usual.detach().to(memory_format=torch.channels_last))
        optimizer = optim.AdamW([param], lr=0.1)
        optimizer.load_state_dict(loaded)
        trained(param, optimizer, is_graphed=is_graphed)
        found.append(param.detach())
    assert torch.equal(*found)


def test_state_in_another_order_that_is_loaded_between_steps() -> None:
    """It is found, although the state before was in order. Until then, fused kernels round in another way."""
    found = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(4, 3, 2, 2))
        optimizer = optim.AdamW([param], lr=0.1)
        loaded = state_of(nn.Parameter(param.detach().to(memory_format=torch.channels_last)))
        fast = trained(param, optimizer, is_graphed=is_graphed, loaded=loaded)
        assert not optimizer.state[param]["exp_avg"].is_contiguous()
        found.append(param.detach())
    assert fast.stats.replayed > 2
    torch.testing.assert_close(*found)


def test_a_group_that_is_added_is_reported() -> None:
    """Its kernel rounds otherwise, too."""
    body, head = nn.Linear(4, 4), nn.Linear(4, 2)
    optimizer = optim.Adam(head.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = head(body(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    graphed_step = graph_step(step, backend="tape")
    for number in range(20):
        if number == 10:
            optimizer.add_param_group({"params": body.parameters()})
        graphed_step(torch.randn(3, 4))
    for index in range(2):
        assert f"prepared: Adam.param_groups[{index}]['fused']: None -> True" in graphed_step.report()
