"""Contexts around steps in which optimizers make their state. What for, ``tests/gpu/test_memory.py`` shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from graphplan import graph_step
from graphplan.backends.cudapools import memory_apart
from graphplan.backends.tape import TapeBackend
from graphplan.optimizers.first_steps import within_first_steps
from graphplan.optimizers.scaling import takes_found_inf

POOL = ("beginAllocateCurrentThreadToPool", "endAllocateToPool", "releasePool")


class Around:
    """Counts how often it was entered and for how many bytes, and how deep it is entered."""

    def __init__(self) -> None:
        self.entered, self.depth, self.nbytes = 0, 0, 0

    @contextmanager
    def __call__(self, nbytes: int) -> Iterator[None]:
        self.entered += 1
        self.nbytes = nbytes
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
    assert around.nbytes == 16 * 3 * 4


def test_state_that_somebody_looked_for(around: Around) -> None:
    """Looking leaves an empty dictionary."""
    seen: list[int] = []
    param = parameter()
    optimizer = watched(AdamW, seen, around)([param])
    assert optimizer.state[param] == {}
    with within_first_steps(around):
        optimizer.step()
    assert seen == [1]


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


def test_optimizers_within_closures(around: Around) -> None:
    """They have contexts of their own."""
    seen: list[int] = []
    outer, inner = (watched(kind, seen, around)([parameter()], lr=0.1) for kind in (AdamW, SGD))
    with within_first_steps(around):
        outer.step(inner.step)
        assert around.depth == 0
    assert (seen, around.entered) == ([1, 1], 3)


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
    with within_first_steps(around):
        with pytest.raises(RuntimeError, match="out of luck"):
            optimizer.step(closure)
        other = AdamW([parameter()])
        other.step()
    assert (around.depth, len(other.state)) == (0, 1)


def test_other_threads(around: Around) -> None:
    """What they train meanwhile is not the step's."""
    seen: list[int] = []
    other = watched(AdamW, seen, around)([parameter()])
    with within_first_steps(around):
        thread = Thread(target=other.step)
        thread.start()
        thread.join()
    assert (seen, around.entered) == ([0], 0)


def test_steps_that_are_managed(around: Around, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend's context is entered once, in the first warm-up, also where a Trainer hands the step a closure."""
    monkeypatch.setattr(TapeBackend, "apart", lambda self, nbytes: around(nbytes))
    model = nn.Linear(3, 1)
    seen: list[int] = []
    optimizer = watched(AdamW, seen, around)(model.parameters())

    def train_step(x: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).sum()
            loss.backward()
            return loss

        return optimizer.step(closure)

    step = graph_step(train_step, owners={"model": model, "optimizer": optimizer})
    for _ in range(8):
        step(torch.randn(4, 3))
    assert step.stats.replayed > 0, step.report()
    assert (around.entered, around.depth, seen[:2]) == (2, 0, [1, 0])


def test_scalers_leave_the_decision_to_the_kernel(around: Around) -> None:
    """The hooks are graphplan's own, which do nothing in a step that is skipped."""
    optimizer = AdamW([parameter()], fused=True)
    with within_first_steps(around):
        assert takes_found_inf(optimizer)
    hook = register_optimizer_step_post_hook(lambda *args: None)
    assert not takes_found_inf(optimizer)
    hook.remove()
    assert takes_found_inf(optimizer)


@dataclass
class Device:
    """What torch says of a device that is not there: bytes that are free, in all and reserved, a fraction for us."""

    free: int = 500
    total: int = 1000
    reserved: int = 100
    fraction: float = 1.0
    allocator: str = "native"

    def put(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Have torch say so; what it is told to do is noted."""
        did: list[str] = []
        facts = {
            "get_allocator_backend": lambda: self.allocator,
            "mem_get_info": lambda device: (self.free, self.total),
            "memory_reserved": lambda device: self.reserved,
            "get_per_process_memory_fraction": lambda device: self.fraction,
            "graph_pool_handle": lambda: (0, 7),
        }
        for name, fact in facts.items():
            monkeypatch.setattr(torch.cuda, name, fact)
        for name in POOL:
            note = lambda *place, name=name: did.append(f"{name} {place}")  # noqa: E731
            monkeypatch.setattr(torch._C, f"_cuda_{name}", note, raising=False)
        return did


@pytest.mark.parametrize("device", [Device(), Device(reserved=300, fraction=0.8)])
def test_where_the_device_has_room(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is entered in this thread, left and released, also where the step fails."""
    did = device.put(monkeypatch)
    place = (1, (0, 7))
    with pytest.raises(ZeroDivisionError), memory_apart(torch.device("cuda:1"), 500):
        did.append("step")
        raise ZeroDivisionError
    begun, *ended = (f"{name} {place}" for name in POOL)
    assert did == [begun, "step", *ended]


@pytest.mark.parametrize(
    "device",
    [Device(free=499), Device(reserved=501), Device(fraction=0.5), Device(allocator="cudaMallocAsync")],
)
def test_where_memory_is_short(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cached a pool could neither use nor free; and another allocator has no pools."""
    did = device.put(monkeypatch)
    with memory_apart(torch.device("cuda:0"), 500):
        did.append("step")
    assert did == ["step"]
