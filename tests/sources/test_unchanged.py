"""The fast answers that guards rely on: never "as it was" for something that changed, and engaged on this torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphplan import Program, graph_step
from graphplan.compare import comparing
from graphplan.compare.comparing import Tensors, facts_of
from graphplan.compare.fast_compare import Modes, hooks_registered


def test_modes_are_read_again_when_they_change() -> None:
    modes = Modes()
    plain = modes.now()
    assert modes.now() is plain, "the same object: nothing was read"
    seen = {plain}
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode:
            assert modes.now() not in seen
            seen.add(modes.now())
        assert modes.now() == plain
    with torch.autocast("cpu", torch.float16):
        assert modes.now() not in seen
    torch.use_deterministic_algorithms(True)
    try:
        assert modes.now() not in seen
    finally:
        torch.use_deterministic_algorithms(False)
    assert modes.now() == plain


def test_modes_as_comparisons() -> None:
    modes = Modes()
    assert modes.rows() is None, "nothing was read yet"
    modes.now()
    checks = comparing.Checks(modes.rows() or [])
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta")):
        assert checks.hold()
        with mode:
            assert not checks.hold()
            modes.now()
            assert comparing.Checks(modes.rows() or []).hold()
    assert checks.hold()


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_counts_when_it_is_registered_through_torch(kind: str) -> None:
    param = nn.Parameter(torch.ones(1))
    before = hooks_registered()
    handle = getattr(param, kind)(lambda *_: None)
    assert hooks_registered() > before
    handle.remove()


def test_a_hook_that_comes_and_goes_is_in_the_key_of_the_step() -> None:
    def run(graphed: bool) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        call: Any = graph_step(step, owners={"model": model, "optimizer": optimizer}) if graphed else step
        losses, handle = [], None
        for index in range(40):
            if index == 10:
                handle = model.weight.register_hook(lambda grad: grad * 0.5)
            if index == 25 and handle is not None:
                handle.remove()
            losses.append(call(torch.ones(2, 3)).detach().clone())
        return [*losses, *model.parameters()], call

    eager, _ = run(graphed=False)
    graphed, step = run(graphed=True)
    assert [tensor.tolist() for tensor in eager] == [tensor.tolist() for tensor in graphed]
    assert step.stats.captured == 2, "without the hook and with it; the first program comes back"
    assert step.stats.replayed > 20


GEOMETRIES: dict[str, Callable[[nn.Parameter], Any]] = {
    "frozen": lambda param: param.requires_grad_(False),
    "other strides in the same memory": lambda param: setattr(param, "data", param.data.t()),
    "another dtype": lambda param: setattr(param, "data", param.data.double()),
    "another shape": lambda param: setattr(param, "data", param.data[:2]),
}


@pytest.fixture(params=["torch's", "own"])
def own_guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether tensors are compared by graphplan's own guards in C++, where they were built, or by torch's."""
    if request.param == "own" and Tensors is None:
        pytest.skip("not built: python -m graphplan.compare says why")
    if request.param != "own":
        monkeypatch.setattr(comparing, "Tensors", None)
    return bool(request.param == "own")


@pytest.mark.parametrize("change", GEOMETRIES.values(), ids=list(GEOMETRIES))
def test_geometries_notice_every_change(change: Callable[[nn.Parameter], Any], own_guards: bool) -> None:
    params = [nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(2))]
    facts = facts_of(params, placed=False)
    assert facts.fit(params)
    change(params[0])
    assert not facts.fit(params)


def test_geometries_without_gradient_mode(own_guards: bool) -> None:
    """There torch's guard overlooks ``requires_grad``; and what it noted in one mode says nothing in the other."""
    params = [nn.Parameter(torch.ones(3, 3))]
    facts = facts_of(params, placed=False)
    with torch.no_grad():
        assert facts.fit(params) is own_guards
        made_without = facts_of(params, placed=False)
        assert made_without.fit(params)
        params[0].requires_grad_(False)
        assert not made_without.fit(params)
        params[0].requires_grad_(True)
    assert facts.fit(params)
    assert made_without.fit(params) is own_guards


@pytest.mark.usefixtures("own_guards")
def test_geometries_of_nothing() -> None:
    assert facts_of([], placed=False).fit([])


@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
def test_a_scheduler_that_steps_moves_nothing(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its list of rates is another one after each step: no step uses it, so that nothing has to be looked up again."""
    looked: list[Any] = []
    resync = Program.resync
    monkeypatch.setattr(Program, "resync", lambda program, *args: looked.append(program) or resync(program, *args))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    owners = {"model": model, "optimizer": optimizer, **({"scheduler": scheduler} if named else {})}

    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step = graph_step(train_step, owners=owners, verify="off")
    for _ in range(20):
        step(torch.ones(2, 3))
        scheduler.step()
    assert step.stats.replayed == 14
    assert not looked


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, *, graphed: bool) -> Any:
    """A training step, as it is or graphed."""

    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    owners = {"model": model, "optimizer": optimizer}
    return graph_step(train_step, owners=owners, verify="off") if graphed else train_step


def _scale(model: nn.Linear, factor: float) -> None:
    assert model.weight.grad is not None
    model.weight.grad.mul_(factor)


@pytest.mark.parametrize("where", ["module", "parameter", "optimizer", "everywhere"])
def test_a_hook_in_the_place_of_another_is_another_step(where: str) -> None:
    """As many as before, and torch's own count of hooks tells them apart."""

    def run(graphed: bool) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

        def hook(factor: float) -> Any:
            if where == "module":
                return model.register_forward_hook(lambda module, args, out: out * factor)
            if where == "parameter":
                return model.weight.register_hook(lambda grad: grad * factor)
            if where == "optimizer":
                return optimizer.register_step_pre_hook(lambda *_: _scale(model, factor))
            return nn.modules.module.register_module_forward_hook(lambda module, args, out: out * factor)

        call = _trained(model, optimizer, graphed=graphed)
        handle, losses = hook(0.5), []
        try:
            for index in range(30):
                if index == 12:
                    handle.remove()
                    handle = hook(2.0)
                losses.append(call(torch.ones(2, 3)).item())
        finally:
            handle.remove()
        return [losses, *(param.tolist() for param in model.parameters())], call

    eager, _ = run(graphed=False)
    graphed, step = run(graphed=True)
    assert eager == graphed
    assert step.stats.captured == 2
    assert step.stats.replayed >= 16


def test_a_default_device_that_is_gone_is_noticed() -> None:
    modes = Modes()
    with torch.device("meta"):
        there = modes.now()
    assert not comparing.Checks(modes.rows() or []).hold()
    assert modes.now() != there
