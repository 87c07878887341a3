"""The same on the device as on the host, where small tensors are handled together only in tests."""

import pytest
import torch

from graphplan.tensors.copying import copy_all, copy_into, unequal
from graphplan.tensors.page_locked import PageLocked, _pieces_for
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
        copy_into(tensors, copies)
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
    copy_into([tensors[index] for index in order], [copies[index] for index in order])
    assert all(map(torch.equal, tensors, values))


@needs_cuda
def test_large_copies_on_the_host_have_memory_that_is_kept() -> None:
    """Page-locked memory, lent again once the copies are gone; what is queued with it is over by then."""
    host = torch.device("cpu")
    tensor = torch.arange(2**22, device="cuda")
    (copy,) = copy_all([tensor], host)
    address = copy.data_ptr()
    assert copy.is_pinned()
    assert address % 2**21 == 0
    target = torch.zeros_like(tensor)
    torch.cuda._sleep(10**8)
    copy_into([target], [copy])
    del copy
    (again,) = copy_all([-tensor], host)
    assert again.data_ptr() == address
    assert torch.equal(target, tensor)
    assert not unequal([-tensor], [again])


@needs_cuda
def test_memory_that_cannot_be_locked_is_given_up_in_peace() -> None:
    """torch's takes its place, and no kernel raises the driver's error later."""
    of_device = _pieces_for(torch.device("cuda", 0))
    memory = of_device.empty(2**22)
    assert memory is not None
    # It is locked already.
    lock = lambda address, nbytes: of_device._lock(memory.data_ptr(), 2**22)  # noqa: E731
    refusing = PageLocked(lock, of_device._unlock, of_device._wait)
    assert refusing.empty(2**22) is None
    assert torch.ones(3, device="cuda").mul_(2).sum().item() == 6
