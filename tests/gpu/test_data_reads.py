"""What reads a tensor's values on the host, in inference mode on the device: refused by name; the rest is replayed."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from graphplan import HostSyncError, graphed
from tests.gpu.helpers import BACKEND, DEVICE
from tests.trace.test_data_reads import FINE, READS, calls

ON_THE_HOST = {"numpy", "tensor_split", "equal", "allclose"}
"""They ask for a tensor in host memory, or compare with one."""


def inference(*, casts: bool) -> ExitStack:
    """Inference mode, and autocast where it is asked for."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode())
    stack.enter_context(torch.autocast(DEVICE.type, torch.bfloat16, enabled=casts))
    return stack


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("read", sorted(READS.keys() - ON_THE_HOST))
def test_reads_are_refused(read: str, casts: bool) -> None:
    fast = graphed(READS[read], backend=BACKEND, min_speedup=0)
    with pytest.raises(HostSyncError, match=r"test_data_reads\.py:\d+ in"), inference(casts=casts):
        for x, mask in calls():
            fast(x.to(DEVICE), mask.to(DEVICE))
    assert fast.stats.replayed == 0


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("step", FINE)
def test_what_reads_nothing_is_replayed(step: str, casts: bool) -> None:
    fast = graphed(FINE[step], backend=BACKEND, min_speedup=0)
    with inference(casts=casts):
        for x, mask in calls():
            call = x.to(DEVICE), mask.to(DEVICE)
            found, expected = fast(*call), FINE[step](*call)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
    assert fast.stats.replayed == 8
