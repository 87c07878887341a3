"""The same on the device as on the host, where small tensors are handled together only in tests."""

import pytest
import torch

from graphplan.owners import copy_all
from graphplan.owners.copying import write_all
from tests.gpu.helpers import needs_cuda
from tests.test_copying import *  # noqa: F403


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@needs_cuda
def test_nobody_waits_for_copies() -> None:
    """Of the device's tensors and the host's, large and small, together."""
    device = torch.device("cuda")
    tensors = [torch.randn(3, device=device), torch.randn(5, device=device), torch.randn(2**21, device=device)]
    tensors.append(torch.cuda.get_rng_state())
    copy_all(tensors, device)
    try:
        torch.cuda.set_sync_debug_mode("error")
        copies = copy_all(tensors, device)
        write_all(tensors, copies)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [copy.device.type for copy in copies] == ["cuda", "cuda", "cuda", "cpu"]
