"""Compiled modules and fused optimizers, asked for by an argument."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from graphplan import GraphedStep, OptionError, graph_step
from graphplan.optimizers.preparation import Preparation
from graphplan.step.compiled import CompiledModules
from tests.facts import assert_same, flatten
from tests.lightning.parts import LitDigits, assert_same_fits, fit, tape
from tests.models import descent


def make(kind: Callable[..., Optimizer] = AdamW) -> tuple[nn.Module, Optimizer, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = kind(model.parameters(), lr=0.01)
    return model, optimizer, descent(model, optimizer, lambda x: model(x).square().mean())


def graphed(**options: Any) -> tuple[nn.Module, Optimizer, GraphedStep]:
    model, optimizer, step = make()
    owners = {"model": model, "optimizer": optimizer}
    return model, optimizer, graph_step(step, owners=owners, **{"backend": "tape", **options})


def batches(count: int, rows: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 6, generator=generator) for _ in range(count)]


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "negative": ({"min_speedup": -1}, r"min_speedup is -1; expected a number >= 0, or None"),
    "no number": ({"min_speedup": "fast"}, r"min_speedup is 'fast'; expected a number >= 0"),
    "a flag": ({"min_speedup": True}, r"min_speedup is True; expected a number >= 0"),
    "not a number": ({"min_speedup": float("nan")}, r"min_speedup is nan; expected a number >= 0"),
    "compile": ({"compile": "default"}, r"compile is 'default'; expected True, False, or arguments of torch.compile"),
    "compile by position": ({"compile": {0: 1}}, r"compile is \{0: 1\}; expected True, False, or arguments"),
    "fuse": ({"fuse_optimizer": 1}, r"fuse_optimizer is 1; expected True or False"),
    "fuse, not prepare": ({"fuse_optimizer": True, "prepare_optimizers": False}, r"expected prepare_optimizers=True"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_make_no_sense(name: str) -> None:
    options, match = OPTIONS[name]
    with pytest.raises(OptionError, match=match):
        graphed(**options)
    with pytest.raises(OptionError, match=match):
        tape(**options)


def test_a_compiled_step_needs_its_module() -> None:
    _, optimizer, step = make()
    with pytest.raises(OptionError, match=r"compile= is given without a module to compile; name it: owners="):
        graph_step(step, owners={"optimizer": optimizer}, compile=True)


def test_modules_are_compiled_before_the_first_step_and_not_afterwards() -> None:
    """The numbers are those of the same module compiled by hand."""
    torch._dynamo.reset()
    model, _, step = make(partial(AdamW, fused=True))
    model.compile(backend="aot_eager")
    expected = [step(x) for x in batches(12)]
    own, _, graph = graphed(compile={"backend": "aot_eager"}, fuse_optimizer=True)
    assert own._compiled_call_impl is not None
    found = [graph(x) for x in batches(12)]
    assert_same(flatten(losses=expected, model=model), flatten(losses=found, model=own))
    assert graph.stats.replayed >= 5, graph.report()
    assert "compiled: Sequential" in graph.report()
    graph.close()
    assert own._compiled_call_impl is None


@pytest.mark.parametrize("kind", ["container", "own class"])
def test_what_is_called_compiled_is(kind: str) -> None:
    """A container of torch's too, whose frames the compiler leaves alone unless they are within one of its own."""
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x).relu()
            return out

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 3), nn.ReLU()) if kind == "container" else Own()
    compiled = CompiledModules([model], {"backend": backend})
    x = batches(1)[0]
    called = model(x)
    assert len(seen) == 1
    compiled.undo()
    assert torch.equal(called, model(x))
    assert len(seen) == 1


def test_a_module_that_is_compiled_already_stays_so() -> None:
    torch._dynamo.reset()
    model, optimizer, step = make()
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    graph = graph_step(step, owners=[model, optimizer], backend="tape", compile={"backend": "aot_eager"})
    graph(batches(1)[0])
    graph.close()
    assert model._compiled_call_impl is compiled


@pytest.mark.parametrize("backend", ["tape", "eager"])
def test_nothing_is_compiled_on_the_cpu(backend: str) -> None:
    model, _, step = graphed(compile=True, backend=backend)
    assert model._compiled_call_impl is None
    for x in batches(8):
        step(x)
    assert ("compile: Sequential is not compiled on the CPU" in step.report()) is (backend == "tape")


def test_the_callback_compiles_the_modules_parts(tmp_path: Path) -> None:
    torch._dynamo.reset()

    def compiled() -> LitDigits:
        module = LitDigits()
        module.net.compile(backend="aot_eager")
        return module

    expected = fit(compiled, tmp_path / "eager", max_epochs=2)
    found = fit(LitDigits, tmp_path / "graphed", tape(compile={"backend": "aot_eager"}), max_epochs=2)
    assert found.callback.stats.replayed >= 8
    assert "compiled: Sequential" in found.callback.report()
    assert "compiled: LitDigits" in found.callback.report()
    assert found.module.net._compiled_call_impl is None
    assert found.module._compiled_call_impl is None
    assert_same_fits(expected, found)


@pytest.mark.parametrize(
    ("kind", "fused"), [(Adam, True), (AdamW, True), (SGD, True), (RMSprop, False)], ids=lambda value: str(value)
)
def test_fused_kernels_on_cuda(kind: Callable[..., Optimizer], fused: bool) -> None:
    """While a step runs, and only if asked for; where torch has them. (Flags need no device.)"""
    with FakeTensorMode():
        optimizer = kind([nn.Parameter(torch.empty(2, device="cuda"))], lr=0.1, foreach=True)
    preparation = Preparation(optimizer, fused=True)
    group = optimizer.param_groups[0]
    assert (bool(group.get("fused")), bool(group["foreach"])) == (fused, not fused)
    preparation.leave()
    assert (bool(group.get("fused")), group["foreach"]) == (False, True)
    plain = Preparation(optimizer)
    assert bool(group.get("fused")) is (kind is SGD)
    plain.undo()
    preparation.undo()


def test_counters_of_an_optimizer_that_others_step() -> None:
    """They stay where those have them, on the host or on the device, until the optimizer is stepped here all the same.
    (Where tensors are needs no device.)
    """
    with FakeTensorMode():
        param = nn.Parameter(torch.empty(2, device="cuda"))
        optimizer = AdamW([param])
        host, device = torch.zeros(()), torch.zeros((), device="cuda")
        for counter in (host, device):
            optimizer.state[param] = {"step": counter}
            preparation = Preparation(optimizer, steps=False)
            assert optimizer.param_groups[0]["capturable"]
            preparation.leave()
            preparation.enter()
            preparation.undo()
            assert optimizer.state[param]["step"] is counter
        optimizer.state[param] = {"step": host}
        preparation = Preparation(optimizer, steps=False)
        with torch.inference_mode():
            # As an evaluation's are. Training's steps write them.
            optimizer.step()
        assert optimizer.state[param]["step"].device.type == "cuda"
        assert not optimizer.state[param]["step"].is_inference()
        preparation.undo()
        assert optimizer.state[param]["step"].device.type == "cpu"
