"""On the device: reads of what is only asserted, and what steps hear that ask whether they are captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from graphplan import CaptureError, HostSyncError, graph_step
from tests.devices import BACKEND, CUDA, DEVICE, is_healthy, needs_cuda
from tests.trace.test_assertions import ASSERTED, COMPUTED, snippets, step_of
from tests.twins import by_chance

HEARD: list[bool] = []


@pytest.mark.parametrize("snippet", snippets(ASSERTED))
def test_what_is_only_asserted_refuses_nothing(snippet: str) -> None:
    """A capture is given what the traces read, and does not wait for the device."""
    fast = graph_step(step_of(snippet), backend=BACKEND, verify=4)
    for _ in range(11):
        assert torch.equal(fast(torch.tensor(1.0, device=DEVICE)), torch.tensor(2.0, device=DEVICE))
    assert (fast.stats.replayed, fast.stats.verified) == (5, 1)


@pytest.mark.parametrize("snippet", snippets(COMPUTED)[::6])
def test_what_is_computed_with_is_refused(snippet: str) -> None:
    step = step_of(snippet)
    fast = graph_step(lambda x: step(by_chance(x)), backend=BACKEND)
    with pytest.raises(HostSyncError, match="on the host"):
        for _ in range(6):
            fast(torch.tensor(1.0, device=DEVICE))
    is_healthy()


class Block(nn.Module):
    """Asserts and asks, and does both again in the backward pass, which a thread of autograd's runs on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def block(self, x: Tensor) -> Tensor:
        assert x.isfinite().all(), x.max().item()
        HEARD.append(torch.cuda.is_current_stream_capturing())
        return self.linear(x).relu() * (2.0 if torch.cuda.is_current_stream_capturing() else 3.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)
        return -Normal(y.mean(), y.square().mean() + 1).log_prob(y).mean()


def test_the_backward_pass_takes_the_same_way() -> None:
    torch.manual_seed(0)
    model = Block().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    HEARD.clear()
    fast = graph_step(step, owners={"model": model, "optimizer": optimizer}, backend=BACKEND, verify=2)
    for _ in range(12):
        fast(torch.rand(3, 4, device=DEVICE))
    assert (fast.stats.replayed, fast.stats.verified) == (6, 3)
    assert set(HEARD) == {True}
    if CUDA:
        assert not torch.cuda.is_current_stream_capturing()


@pytest.mark.twice
def test_classes_with_a_given_number() -> None:
    fast = graph_step(lambda x: F.one_hot(x, 3), backend=BACKEND)
    for _ in range(8):
        x = torch.tensor([0, 1], device=DEVICE)
        assert torch.equal(fast(x), F.one_hot(x, 3))
    assert fast.stats.replayed == 2


def test_a_read_that_no_trace_saw_fails_the_capture() -> None:
    """It is not answered, and the process stays as able as before."""
    seen: list[int] = []

    def step(x: Tensor) -> Tensor:
        assert x.min() > 0
        seen.append(1)
        if len(seen) == 6:
            assert x.max() > 0
        return x * 2

    fast = graph_step(step, backend=BACKEND, allow=("seen",))
    with pytest.raises((CaptureError, HostSyncError), match=r"captured|record|on the host"):
        for _ in range(8):
            fast(torch.ones(2, device=DEVICE))
    is_healthy()


@needs_cuda
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_compiled_code_and_assertions() -> None:
    """A capture that answers reads runs nothing compiled: refused, and not captured otherwise than it is checked."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(DEVICE)
    compiled: Any = torch.compile(model)

    def step(x: Tensor) -> Tensor:
        assert x.isfinite().all()
        return compiled(x)

    fast = graph_step(step, owners={"model": model}, backend=BACKEND)
    with (
        pytest.raises(HostSyncError, match="runs compiled code; a capture of both would wait for the device"),
        torch.no_grad(),
    ):
        # The first trace runs what was compiled as it was written, and its names are new: steps warm up again.
        for _ in range(16):
            fast(torch.rand(3, 4, device=DEVICE))
