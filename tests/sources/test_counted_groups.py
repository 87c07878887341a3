"""Integers that optimizers keep in their parameter groups and raise by themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from graphplan import GraphedStep, HostScalarError, OptimizerError, graph_step
from graphplan.errors import CaptureError
from tests.facts import assert_same, flatten


class Counting(Optimizer):
    """Signs of gradients; each group counts its steps, and nothing depends on that."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if "step" not in group:
                group["step"] = 0
            group["step"] += 1
            for param in group["params"]:
                state = self.state[param]
                if "seen" not in state:
                    state["seen"] = 0
                state["seen"] += 1
                self.update(param, param.grad, group)

    def update(self, param: Tensor, grad: Any, group: dict[str, Any]) -> None:
        """What one parameter gets."""
        param.sub_(grad.sign(), alpha=group["lr"])


class Branching(Counting):
    """Looks whether the count is even, which no operator shows."""

    def update(self, param: Tensor, grad: Any, group: dict[str, Any]) -> None:
        """What one parameter gets."""
        if group["step"] % 64 == 63:
            param.mul_(0.5)
        super().update(param, grad, group)


class Corrected(Counting):
    """Computes a number from the count, as bias corrections do."""

    def update(self, param: Tensor, grad: Any, group: dict[str, Any]) -> None:
        """What one parameter gets."""
        param.sub_(grad, alpha=group["lr"] / (1 - 0.9 ** group["step"]))


class Fetching(Counting):
    """Gets the count by a method."""

    def update(self, param: Tensor, grad: Any, group: dict[str, Any]) -> None:
        """What one parameter gets."""
        if group.get("step", 0) < 100:
            super().update(param, grad, group)


class Nested(SGD):
    """Counts around the step of its base class."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)

    def step(self, closure: Any = None) -> Any:
        """One step."""
        for group in self.param_groups:
            if "calls" not in group:
                group["calls"] = 0
            group["calls"] += 1
        return super().step(closure)


class Around(Optimizer):
    """A wrapper that shows the state and groups of the optimizer that it keeps."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self._optimizer_step_pre_hooks = {}
        self._optimizer_step_post_hooks = {}
        self._patch_step_function()

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The inner optimizer's."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's."""
        return self.inner.state

    def step(self, closure: Any = None) -> Any:
        """The inner optimizer's."""
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The inner optimizer's."""
        self.inner.zero_grad(set_to_none)


Run = tuple[dict[str, Any], Any]


def _train(
    make: Callable[[Any], Optimizer],
    *,
    graphed: bool,
    calls: int = 16,
    between: Callable[[int, Optimizer, GraphedStep | None], None] = lambda index, optimizer, step: None,
    **options: Any,
) -> Run:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = make(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    owners = {"model": model, "optimizer": optimizer}
    run = graph_step(step, owners=owners, min_speedup=0, **options) if graphed else None
    for index in range(calls):
        (run or step)(torch.randn(2, 4))
        between(index, optimizer, run)
    groups = [{key: item for key, item in group.items() if key != "params"} for group in optimizer.param_groups]
    return flatten(model=model.state_dict(), groups=groups, state=list(optimizer.state.values())), run


@pytest.mark.parametrize("make", [Counting, Nested])
@pytest.mark.twice
def test_what_nothing_depends_on_is_counted_up_after_replays(make: Callable[[Any], Optimizer]) -> None:
    expected, _ = _train(make, graphed=False)
    found, run = _train(make, graphed=True)
    assert run.stats.replayed == 10
    assert_same(found, expected)
    assert "counted: optimizer.param_groups[0]." in str(run.plan)


@pytest.mark.parametrize("make", [Branching, Fetching])
def test_what_code_looks_at_is_refused(make: Callable[[Any], Optimizer]) -> None:
    with pytest.raises(HostScalarError, match=r"reads optimizer\.param_groups\[0\]\.step, which it also") as caught:
        _train(make, graphed=True)
    assert caught.value.component == "optimizer"


def test_what_numbers_are_computed_from_is_refused() -> None:
    with pytest.raises(HostScalarError, match=r"gets alpha=.* The Python code of the") as caught:
        _train(Corrected, graphed=True)
    assert caught.value.component == "optimizer"


@pytest.mark.filterwarnings("ignore:graphplan runs this step eagerly")
@pytest.mark.parametrize("make", [Branching, Corrected, Fetching])
def test_refused_counts_leave_eager_steps(make: Callable[[Any], Optimizer]) -> None:
    expected, _ = _train(make, graphed=False)
    found, _ = _train(make, graphed=True, on_failure="eager")
    assert_same(found, expected)


def test_a_loaded_checkpoint_is_counted_on_from() -> None:
    kept: dict[str, Any] = {}

    def between(index: int, optimizer: Optimizer, step: GraphedStep | None) -> None:
        if index == 3:
            kept.update(copy.deepcopy(optimizer.state_dict()))
        if index == 12:
            optimizer.load_state_dict(kept)

    expected, _ = _train(Counting, graphed=False, calls=24, between=between)
    kept.clear()
    found, run = _train(Counting, graphed=True, calls=24, between=between)
    assert run.stats.replayed > 8
    assert_same(found, expected)
    assert found["groups[0]['step']"] == 4 + 11


def test_a_hyper_parameter_that_others_change_is_none_of_the_optimizers_counts() -> None:
    def between(index: int, optimizer: Optimizer, step: GraphedStep | None) -> None:
        optimizer.param_groups[0]["epoch"] = index

    with pytest.raises(OptimizerError, match=r"param_groups\[0\]\.epoch: \d then \d: the 3rd new value"):
        _train(Counting, graphed=True, between=between)


def test_an_optimizer_around_another_is_refused() -> None:
    with pytest.raises(OptimizerError, match=r"Around cannot be captured: it did not call torch\.optim"):
        _train(lambda params: Around(SGD(params, lr=0.1)), graphed=True)


class Compiling(Optimizer):
    """Compiles its update where it needs it."""

    def __init__(self, params: Any, backend: str) -> None:
        super().__init__(params, {"backend": backend})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                torch.compile(_descend, fullgraph=True, dynamic=False, backend=group["backend"])(param, param.grad)


def _descend(param: Tensor, grad: Tensor) -> None:
    param.sub_(grad, alpha=0.1)


def test_what_an_optimizer_compiles_is_replayed_and_stays_compiled() -> None:
    seen: list[int] = []

    def backend(module: Any, inputs: Any) -> Any:
        seen.append(1)
        return module

    torch._dynamo.reset()
    expected, _ = _train(lambda params: Compiling(params, backend), graphed=False)  # type: ignore[arg-type]
    found, run = _train(lambda params: Compiling(params, backend), graphed=True)  # type: ignore[arg-type]
    assert run.stats.replayed > 5
    assert_same(found, expected)
    run.close()
    torch._dynamo.reset()
    seen.clear()
    _train(lambda params: Compiling(params, backend), graphed=False)  # type: ignore[arg-type]
    assert seen


def test_compiled_updates_that_differ_are_the_optimizers_fault() -> None:
    def backend(module: Any, inputs: Any) -> Any:
        return lambda param, grad: (param.sub_(grad, alpha=0.2),)[:0]

    torch._dynamo.reset()
    with pytest.raises(CaptureError, match=r"torch\.compile compiled, and the tape records") as caught:
        _train(lambda params: Compiling(params, backend), graphed=True)  # type: ignore[arg-type]
    assert caught.value.component == "optimizer"
    torch._dynamo.reset()
