"""Modes, transforms and forward-mode AD around a call: it is eager, for a reason that is reported, or it is refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan import (
    NotCapturedError,
    Policy,
    SkipReason,
    SurroundingsError,
    capture,
    compile_plan,
    graph_step,
    graphed,
)
from tests.crossing import each
from tests.models import descent

X = torch.arange(8.0).reshape(2, 4) / 8


class Doubling(TorchDispatchMode):
    """Doubles matrix products."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As the class says."""
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.addmm.default else out


class DoublingFunctions(TorchFunctionMode):
    """Doubles what linear layers give."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As the class says."""
        out = func(*args, **(kwargs or {}))
        return out * 2 if getattr(func, "__name__", "") == "linear" else out


class Watching(TorchDispatchMode):
    """Counts operators."""

    changes_nothing = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As the class says."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def _training() -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    return descent(model, optimizer, lambda x: model(x).square().sum())


@pytest.fixture
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="graphplan runs calls eagerly while")
        yield


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("mode", [Doubling, DoublingFunctions])
@pytest.mark.parametrize("first", [False, True])
def test_a_mode_around_some_calls(mode: Any, first: bool) -> None:
    """From the start, and in between: nothing that happens within it is learnt."""
    plain, traced = _training(), _training()
    call = graph_step(traced, owners=traced.owners, backend="tape", warmup_steps=1, verify="off")  # type: ignore[attr-defined]
    for number in range(30):
        if (number < 6) if first else (15 <= number < 18):
            with mode():
                assert torch.equal(call(X), plain(X))
        else:
            assert torch.equal(call(X), plain(X))
    count = 6 if first else 3
    assert call.stats.skipped[SkipReason.SURROUNDINGS] == count
    assert call.stats.reasons[f"a mode of the caller ({mode.__name__})"] == count
    assert call.stats.replayed == 30 - 4 - count and call.stats.captured == 1


def test_a_mode_is_told_of_once() -> None:
    step = _training()
    call = graph_step(step, owners=step.owners, backend="tape")  # type: ignore[attr-defined]
    told = r"runs calls eagerly while a mode of the caller \(Doubling\) is active, because a replay would ignore it"
    with Doubling():
        with pytest.warns(UserWarning, match=told):
            call(X)
        call(X)


def test_modes_that_only_watch_see_replays() -> None:
    step = _training()
    call = graph_step(step, owners=step.owners, backend="tape", warmup_steps=1, verify="off")  # type: ignore[attr-defined]
    for _ in range(8):
        call(X)
    replayed = call.stats.replayed
    with Watching() as watching:
        for _ in range(3):
            call(X)
    assert call.stats.replayed == replayed + 3
    assert watching.count > 0


def test_a_default_device_is_no_such_mode() -> None:
    step = _training()
    call = graph_step(step, owners=step.owners, backend="tape", warmup_steps=1, verify="off")  # type: ignore[attr-defined]
    with torch.device("cpu"):
        for _ in range(8):
            call(X)
    assert call.stats.replayed == 4


class Tripling(Tensor):
    """Triples what is added to it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As the class says."""
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 3 if func is Tensor.add else out


def test_tensor_classes_that_are_turned_off() -> None:
    """That has a program of its own."""
    x = X.as_subclass(Tripling)
    call = graph_step(lambda x: x.add(1).as_subclass(Tensor), backend="tape", warmup_steps=1, verify="off")
    for _ in range(3):
        for _ in range(6):
            assert torch.equal(call(x), (X + 1) * 3)
        with torch._C.DisableTorchFunctionSubclass():
            for _ in range(6):
                assert torch.equal(call(x), X + 1)
    assert call.stats.captured == 2


def _predictions() -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).requires_grad_(False)
    return lambda x: model(x).tanh()


TRANSFORMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "jvp": (lambda f: func.jvp(f, (X,), (torch.ones_like(X),))[1], r"forward-mode AD"),
    "vmap": (lambda f: torch.vmap(f)(X.expand(3, 2, 4)), r"torch\.func \(Vmap\)"),
    "grad": (lambda f: func.grad(lambda x: f(x).sum())(X), r"torch\.func \(Grad\)"),
    "jacfwd": (lambda f: func.jacfwd(f)(X), r"forward-mode AD"),
    "hessian": (lambda f: func.hessian(lambda x: f(x).sum())(X), r"forward-mode AD"),
    "functionalize": (lambda f: func.functionalize(f)(X), r"torch\.func \(Functionalize\)"),
    "dual numbers": (lambda f: _tangent(f), r"forward-mode AD"),
    "jit": (lambda f: torch.jit.trace(lambda x: f(x), (X,), check_trace=False)(X * 2), r"torch\.jit\.trace"),
}


def _tangent(function: Callable[[Tensor], Tensor]) -> Tensor:
    with forward_ad.dual_level():
        result = forward_ad.unpack_dual(function(forward_ad.make_dual(X, torch.ones_like(X))))
        assert result.tangent is not None
        return result.tangent


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@each(name=TRANSFORMS, kind=["graphed", "bucket", "step"])
def test_transforms(name: str, kind: str) -> None:
    """Before there is a program, and after."""
    plain, served = _predictions(), _predictions()
    call: Any = {
        "graphed": lambda: graphed(served, backend="tape", verify="off"),
        "bucket": lambda: graphed(served, backend="tape", verify="off", shapes="bucket", buckets=[4]),
        "step": lambda: graph_step(served, mode="inference", backend="tape", verify="off", warmup_steps=1),
    }[kind]()
    transform, reason = TRANSFORMS[name]
    for _ in range(2):
        assert torch.equal(transform(call), transform(plain))
        with torch.no_grad():
            for _ in range(6):
                assert torch.allclose(call(X), plain(X))
    assert call.stats.replayed >= 6
    assert call.stats.skipped[SkipReason.SURROUNDINGS] >= 2
    assert any(re.search(reason, told) for told in call.stats.reasons)


@pytest.mark.parametrize("doing", ["a plan is compiled", "a step is captured", "a program is replayed"])
def test_single_stages_are_refused(doing: str) -> None:
    """Nothing can be called eagerly there."""
    function = _predictions()
    plan = compile_plan(function, X)
    program = capture(plan, feed=(X,), policy=Policy.inference(), backend="tape")
    stages: dict[str, Callable[[], Any]] = {
        "a plan is compiled": lambda: compile_plan(function, X),
        "a step is captured": lambda: capture(plan, feed=(X,), policy=Policy.inference(), backend="tape"),
        "a program is replayed": lambda: program.replay((X,)),
    }
    message = rf"a mode of the caller \(Doubling\) is active while {doing}; expected no mode or transform"
    with Doubling(), pytest.raises(SurroundingsError, match=message):
        stages[doing]()
    assert torch.equal(program.replay((X,)), function(X))


def test_a_replay_of_other_weights_is_refused() -> None:
    call = graphed(_predictions(), backend="tape", copy_roles=("input", "param"))
    with (
        pytest.warns(UserWarning, match="a mode of the caller"),
        Doubling(),
        pytest.raises(NotCapturedError, match=r"has no program for these arguments: a mode of the caller \(Doubling"),
    ):
        call.replay((X,))
