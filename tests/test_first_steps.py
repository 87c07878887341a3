"""Contexts around steps in which optimizers make their state. What for, ``tests/gpu/test_memory.py`` shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from graphplan.optimizers import within_first_steps
from graphplan.pools import MemoryApart


class Around:
    """Counts how often it was entered, and is true while it is."""

    def __init__(self) -> None:
        self.entered, self.depth = 0, 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.entered += 1
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


@pytest.fixture
def around() -> Around:
    """A context that nobody has entered."""
    return Around()


def parameter() -> nn.Parameter:
    """A parameter with a gradient."""
    made = nn.Parameter(torch.ones(3))
    made.grad = torch.ones(3)
    return made


def watched(kind: type[Optimizer], seen: list[int], around: Around) -> Callable[..., Any]:
    """A class of optimizers whose updates note how deep ``around`` is entered."""

    class Watched(kind):  # type: ignore[valid-type,misc]
        def _init_group(self, *args: Any) -> Any:
            seen.append(around.depth)
            return super()._init_group(*args)

    return Watched


def test_only_what_makes_state(around: Around) -> None:
    """One context for the first step of each optimizer, none for later ones; one without state has it every time."""
    seen: list[int] = []
    adam = watched(AdamW, seen, around)([parameter()])
    momentum, plain = (watched(SGD, seen, around)([parameter()], lr=0.1, momentum=m) for m in (0.9, 0.0))
    for _ in range(2):
        with within_first_steps(around):
            adam.step()
            momentum.step()
            plain.step()
        assert around.depth == 0
    assert seen == [1, 1, 1, 0, 0, 1]
    adam.step()
    assert (seen[-1], around.entered) == (0, 4)


@pytest.mark.parametrize("named", [True, False])
def test_not_while_the_closure_runs(around: Around, *, named: bool) -> None:
    """It computes the loss and the gradients, which nobody keeps."""
    seen: list[int] = []
    param = parameter()
    optimizer = watched(AdamW, seen, around)([param])

    def closure() -> Tensor:
        seen.append(around.depth)
        loss = param.sum()
        loss.backward()
        return loss.detach()

    with within_first_steps(around):
        loss = optimizer.step(closure=closure) if named else optimizer.step(closure)
        assert around.depth == 0
    assert loss == 3
    assert seen == [0, 1]


def test_optimizers_within_optimizers(around: Around) -> None:
    """The context is that of the outer step, until it ends."""
    seen: list[int] = []
    inner = watched(AdamW, seen, around)([parameter()])

    class Outer(SGD):
        def step(self, closure: Any = None) -> None:
            inner.step()
            seen.append(around.depth)

    with within_first_steps(around):
        Outer([parameter()], lr=0.1).step()
    assert (seen, around.entered, around.depth) == ([1, 1], 1, 0)


@pytest.mark.parametrize("where", ["update", "closure"])
def test_a_step_that_fails(around: Around, where: str) -> None:
    """It leaves the context, and no hook."""

    class Failing(SGD):
        def _init_group(self, *args: Any) -> Any:
            raise RuntimeError("out of luck")

    def closure() -> float:
        if where == "closure":
            raise RuntimeError("out of luck")
        return 0.0

    optimizer = Failing([parameter()], lr=0.1)
    with pytest.raises(RuntimeError, match="out of luck"), within_first_steps(around):
        optimizer.step(closure)
    entered = around.entered
    assert around.depth == 0
    with pytest.raises(RuntimeError, match="out of luck"):
        optimizer.step(closure)
    assert around.entered == entered


def test_other_threads(around: Around) -> None:
    """What they train meanwhile is not the step's."""
    seen: list[int] = []
    other = watched(AdamW, seen, around)([parameter()])
    with within_first_steps(around):
        thread = Thread(target=other.step)
        thread.start()
        thread.join()
    assert (seen, around.entered) == ([0], 0)


def test_torch_without_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older releases have none: memory lies where it lay."""
    monkeypatch.delattr(torch.cuda, "MemPool", raising=False)
    assert isinstance(MemoryApart(torch.device("cuda:0"))(), nullcontext)
