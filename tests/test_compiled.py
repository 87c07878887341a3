"""Steps that run code which ``torch.compile`` compiled: as it is in every real step, as it was written in traces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from graphplan import CaptureError
from tests.twins import Rig, assert_equals_eager, assert_refused


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def whole(net: nn.Module, backend: Any) -> Any:
    return torch.compile(net, backend=backend, fullgraph=True)


def in_place(net: nn.Module, backend: Any) -> Any:
    net.compile(backend=backend, fullgraph=True)
    return net


def function(net: nn.Module, backend: Any) -> Any:
    return torch.compile(lambda x: net(x), backend=backend)


def rig(how: Callable[[nn.Module, Any], Any], backend: Any = "aot_eager", drops: float = 0.3) -> Rig:
    torch._dynamo.reset()
    net, losses = Net(), []
    net.layers[2].p = drops
    optimizer = AdamW(net.parameters(), lr=1e-2, fused=True)
    compiled = how(net, backend)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(compiled(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        return loss

    return Rig(step, {"net": net, "optimizer": optimizer, "losses": losses}, calls())


def calls() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(5, 6), torch.randint(0, 3, (5,))) for _ in range(14)]


@pytest.mark.parametrize(("how", "replayed"), [(whole, 4), (in_place, 7), (function, 6)])
def test_compiled_code_is_replayed(how: Callable[[nn.Module, Any], Any], replayed: int) -> None:
    """Dropout, running statistics and a list included: a trace is undone, and the step taken as it is.

    What compiled code names is seen in a trace for the first time, so that tracing, or the warm-up, begins anew.
    """
    assert_equals_eager(partial(rig, how), replayed=replayed)


def other_numbers(graph: Any, examples: Any) -> Any:
    """A compiler whose code comes to other bits than what it is made of."""
    return lambda *args: [out * 1.001 for out in graph(*args)]


def test_other_numbers_are_refused() -> None:
    text = r"torch\.compile compiled.*another result than the compiled code"
    assert_refused(partial(rig, whole, other_numbers), CaptureError, text)


def test_what_is_exempt_from_compilation_is_not_compiled() -> None:
    """Traces of it are real steps."""
    step = assert_equals_eager(partial(rig, lambda net, backend: torch.compiler.disable(lambda x: net(x))))
    assert step.stats.traced == 2
