"""Integers that optimizers keep in their parameter groups or their state, and raise by themselves: their steps are
refused, as the optimizer's fault, so that a Trainer replays the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from graphplan import HostScalarError, OptimizerError, graph_step
from graphplan.errors import CaptureError
from tests.facts import assert_same, flatten


class Counting(Optimizer):
    """Signs of gradients; each group counts its steps, and nothing depends on that."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.count(group, self.state[param])
                param.sub_(param.grad.sign(), alpha=group["lr"])

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Count one parameter's update."""
        group["step"] = group.get("step", 0) + 1


class CountingInState(Counting):
    """Counts in its state."""

    def count(self, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Count one parameter's update."""
        if "step" not in state:
            state["step"] = 0
        state["step"] += 1


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
    for _ in range(16):
        (run or step)(torch.randn(2, 4))
    groups = [{key: item for key, item in group.items() if key != "params"} for group in optimizer.param_groups]
    return flatten(model=model.state_dict(), groups=groups, state=list(optimizer.state.values())), run


@pytest.mark.parametrize("make", [Counting, Nested])
def test_counts_in_groups_are_hyper_parameters_that_keep_changing(make: Callable[[Any], Optimizer]) -> None:
    with pytest.raises(OptimizerError, match=r"param_groups\[0\]\.\w+: \d+ then \d+: the 3rd new value") as caught:
        _train(make, graphed=True)
    assert caught.value.component == "optimizer"


def test_counts_in_the_state_may_be_read() -> None:
    with pytest.raises(HostScalarError, match=r"reads optimizer\.state\[.*step, which it also counts up") as caught:
        _train(CountingInState, graphed=True)
    assert caught.value.component == "optimizer"


@pytest.mark.filterwarnings("ignore:graphplan runs this step eagerly")
@pytest.mark.parametrize("make", [Counting, CountingInState, Nested])
def test_refused_counts_leave_eager_steps(make: Callable[[Any], Optimizer]) -> None:
    expected, _ = _train(make, graphed=False)
    found, _ = _train(make, graphed=True, on_failure="eager")
    assert_same(found, expected)


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
