"""Programs that do not pay are dropped; compiled modules and fused optimizers, asked for by an argument."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from graphplan import GraphedStep, OptionError, SkipReason, graph_step
from graphplan.optimizers import Preparation
from graphplan.program import Program
from graphplan.step import CompiledModules
from graphplan.verify import Trials
from graphplan.verify.speed import timed
from tests.facts import assert_same, flatten
from tests.lightning.parts import LitDigits, assert_same_fits, fit, tape
from tests.zoo import descent

CHECKS = 7
"""Six pairs that count, and the first, which does not."""


def trials(*speedups: float) -> Trials:
    found = Trials()
    for speedup in speedups:
        found.add(1.0, speedup)
    return found


@pytest.mark.parametrize(
    ("speedups", "loses"),
    [
        ([0.1] + [0.5] * 6, True),
        ([0.1] + [0.5] * 5, False),
        ([0.1] + [2.0] * 6, False),
        ([0.1, 0.97, 0.98, 0.97, 0.96, 0.97, 0.98], True),
        ([0.1, 0.5, 1.3, 0.6, 1.2, 0.7, 1.1], False),
        ([], False),
    ],
    ids=["slow", "too few", "fast", "a little slower each time", "slower on average", "none"],
)
def test_only_what_surely_does_not_pay(speedups: list[float], loses: bool) -> None:
    assert trials(*speedups).surely_below(1.0) is loses
    assert not trials(*speedups).surely_below(0.0)


def test_the_mean_of_pairs() -> None:
    assert trials(9.0, 2.0, 0.5, 4.0).speedup == pytest.approx(4 ** (1 / 3))
    assert trials().speedup == 1.0


@pytest.mark.parametrize(
    ("speedups", "bound", "more"),
    [
        ([0.1] + [2.0] * 5, 1.0, True),
        ([0.1] + [2.0] * 6, 1.0, False),
        ([0.1] + [2.0] * 6, 0.0, False),
        ([0.1, 0.9, 1.2, 1.0, 1.1, 0.95, 1.05], 1.0, True),
        ([0.1, 0.9, 1.2, 1.0, 1.1, 0.95, 1.05, 1.0, 1.1, 0.9], 1.0, False),
    ],
    ids=["too few", "surely pays", "pays in any case", "not clear", "never clear"],
)
def test_pairs_are_timed_until_they_have_decided(speedups: list[float], bound: float, more: bool) -> None:
    assert trials(*speedups).want_more(bound) is more


def queued(*speedups: float) -> Trials:
    found = Trials()
    for speedup in speedups:
        found.add(1.0, speedup, alone=False)
    return found


def test_a_gain_behind_other_work_is_a_gain_anywhere() -> None:
    """Nobody has to wait for the device as long as eager steps that are at their fastest are slower than replays."""
    found = queued(0.1, *[1.02, 1.03] * 3)
    assert not found.want_alone(1.0)
    assert not found.want_more(1.0)
    assert found.want_alone(1.5)
    assert found.want_more(1.5)
    assert found.speedup == pytest.approx((1.02 * 1.03) ** 0.5)


def test_a_loss_behind_other_work_has_to_be_shown_without_it() -> None:
    found = queued(9.0, *[0.9] * 12)
    assert found.want_alone(1.0)
    assert not found.surely_below(1.0)
    for _ in range(6):
        assert found.want_more(1.0)
        found.add(1.0, 0.95)
    assert found.surely_below(1.0)
    assert found.speedup == pytest.approx(0.95)


def test_a_gain_that_only_a_device_at_rest_shows_is_a_gain() -> None:
    """Launches that a queue hides are what a Trainer waits for otherwise."""
    found = queued(9.0, 0.9)
    for _ in range(6):
        found.add(1.0, 1.5)
    assert found.want_alone(1.0)
    assert not found.want_more(1.0)
    assert not found.surely_below(1.0)


def test_ranks_that_wait_for_the_device_and_ranks_that_do_not_are_ready_together() -> None:
    """Each check gives either of them one pair more: from the seventh on they ask each other."""
    waits, goes_on = Trials(), Trials()
    for number in range(12):
        waits.add(1.0, 0.99, alone=waits.want_alone(1.0))
        goes_on.add(1.0, 1.05, alone=goes_on.want_alone(1.0))
        assert waits.are_enough is goes_on.are_enough is (number >= 6)
    assert waits.want_alone(1.0)
    assert not goes_on.want_alone(1.0)


def test_checks_are_timed_until_their_pairs_have_decided() -> None:
    _, _, step = graphed(verify=1, min_speedup=1e-3)
    eager: list[bool] = []
    with patch(
        "graphplan.verify.check.timed", side_effect=lambda *a, alone: (eager.append(alone), timed(*a, alone=alone))[1]
    ):
        for index in range(40):
            step(torch.full((4, 6), float(index)))
    assert step.stats.verified > 20
    # The replay and the eager step of seven pairs, of which the first does not count.
    assert eager == [False, True] * 7


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


def test_a_program_that_does_not_pay_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """No replay is a million times as fast. Nothing is lost, memory is given back, other shapes keep their programs."""
    programs: list[weakref.ref[Program]] = []
    original = Program.__init__
    monkeypatch.setattr(
        Program,
        "__init__",
        lambda self, *args, **kw: (programs.append(weakref.ref(self)), original(self, *args, **kw))[1],
    )
    calls = batches(30)
    twin = graphed(eager_if=1)
    expected = [twin[2](x) for x in calls]
    model, optimizer, step = graphed(min_speedup=1e6, verify=1)
    found = [step(x) for x in calls]
    assert_same(
        flatten(losses=expected, model=twin[0], optimizer=twin[1]),
        flatten(losses=found, model=model, optimizer=optimizer),
    )
    assert step.stats.verified == CHECKS
    assert step.stats.skipped[SkipReason.SLOWER] == 30 - 6 - CHECKS
    assert re.search(r"dropped: replays of \S+step were measured to take [\d.]+ times as long", step.report())
    assert "min_speedup=0 keeps the program all the same" in step.report()
    gc.collect()
    assert [program() for program in programs] == [None]
    other = batches(8, rows=4)
    for x in other:
        step(x)
    assert step.stats.captured == 2


@pytest.mark.parametrize("options", [{"min_speedup": 0}, {}, {"min_speedup": 1e6, "verify": "off"}])
def test_programs_that_are_kept(options: dict[str, Any]) -> None:
    """Asked to; on the CPU, unless asked not to; and where nothing is measured."""
    *_, step = graphed(**{"verify": 1, **options})
    for x in batches(20):
        step(x)
    assert step.stats.replayed == 14
    assert not step.stats.skipped


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
