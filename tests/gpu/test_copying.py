"""The same on the device as on the host, where small tensors are handled together only in tests."""

import pytest
import torch

from graphplan.tensors.copying import copy_all, unequal, write_all
from tests.devices import needs_cuda
from tests.program.test_copying import *  # noqa: F403


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("place", ["cuda", "cpu"])
@needs_cuda
def test_nobody_waits_for_copies(place: str) -> None:
    """Of the device's tensors and the host's, large and small, together; on the device and on the host, and back."""
    device, to = torch.device("cuda"), torch.device(place)
    tensors = [torch.randn(3, device=device), torch.randn(5, device=device), torch.randn(2**21, device=device)]
    tensors += [torch.randn(2, 3, 4, 4, device=device).to(memory_format=torch.channels_last)]
    tensors.append(torch.cuda.get_rng_state())
    copy_all(tensors, to)
    try:
        torch.cuda.set_sync_debug_mode("error")
        copies = copy_all(tensors, to)
        write_all(tensors, copies)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [copy.device.type for copy in copies] == [place] * 4 + ["cpu"]
    assert unequal(tensors, copies) == []


@pytest.mark.parametrize(("beside", "places"), [(0, {"cpu"}), (9_000, {"cuda", "cpu"}), (2**30, {"cuda"})])
@needs_cuda
def test_copies_on_the_host_go_back(beside: int, places: set[str]) -> None:
    """Of many tensors and several dtypes, in the order in which they were copied and in another one; and where some
    stay on the device.
    """
    device, host = torch.device("cuda"), torch.device("cpu")
    tensors = [torch.randn(size, device=device) for size in range(1, 60)]
    tensors += [torch.randn(3, 4, device=device, dtype=torch.bfloat16), torch.randn(2**21, device=device)]
    tensors += [torch.arange(7, device=device), torch.randn(4, 6, device=device).T]
    copies = copy_all(tensors, host, beside)
    assert {copy.device.type for copy in copies} == places
    assert sum(copy.nbytes for copy in copies if not copy.is_cpu) <= beside
    assert not unequal(tensors, copies)
    values = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    tensors[3].fill_(1)
    assert unequal(tensors, copies) == list(range(len(tensors)))
    order = [*range(0, len(tensors), 2), *range(1, len(tensors), 2)]
    write_all([tensors[index] for index in order], [copies[index] for index in order])
    assert all(map(torch.equal, tensors, values))
