"""Page-locked memory is lent again when nothing is left in it. The driver that locks pages is played by a list."""

from __future__ import annotations

import gc
import mmap
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from graphplan.tensors.page_locked import PageLocked, fits_host_memory

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux alone has huge pages on demand")
_MIB = 2**20


class _Driver:
    """Notes of what was asked, with ``locked`` sizes by address; it can lock ``most`` pieces."""

    def __init__(self, most: int = 100, *, unlocks: bool = True) -> None:
        self.locked: dict[int, int] = {}
        self.waits = 0
        self._most, self._unlocks = most, unlocks
        self.pieces = PageLocked(self._lock, self._unlock, self._wait)

    def _lock(self, address: int, nbytes: int) -> bool:
        if len(self.locked) == self._most:
            return False
        self.locked[address] = nbytes
        return True

    def _unlock(self, address: int) -> bool:
        del self.locked[address]
        return self._unlocks

    def _wait(self) -> None:
        self.waits += 1

    def empty(self, nbytes: int) -> torch.Tensor:
        memory = self.pieces.empty(nbytes)
        assert memory is not None
        assert (memory.dtype, memory.shape) == (torch.uint8, (nbytes,))
        return memory


def test_a_piece_is_whole_pages_and_can_be_written() -> None:
    driver = _Driver()
    memory = driver.empty(3 * _MIB)
    assert driver.locked == {memory.data_ptr(): 4 * _MIB}
    assert memory.data_ptr() % (2 * _MIB) == 0
    row = memory.view(torch.float32).copy_(torch.arange(3 * _MIB // 4))
    assert row[-1] == 3 * _MIB // 4 - 1


def test_it_is_lent_again_when_no_view_is_left() -> None:
    driver = _Driver()
    first = driver.empty(4 * _MIB)
    view, address = first[8:].view(torch.int64), first.data_ptr()
    del first
    gc.collect()
    second = driver.empty(4 * _MIB)
    assert second.data_ptr() != address
    assert driver.waits == 0
    del view
    gc.collect()
    # What was queued with it is over first. The smallest that is large enough is taken.
    assert driver.empty(2 * _MIB).data_ptr() == address
    assert driver.waits == 1
    assert len(driver.locked) == 2


def test_what_has_become_too_small_is_given_back() -> None:
    driver = _Driver()
    small = driver.empty(2 * _MIB)
    address = small.data_ptr()
    del small
    gc.collect()
    large = driver.empty(8 * _MIB)
    assert driver.locked == {large.data_ptr(): 8 * _MIB}
    assert address not in driver.locked


def test_less_than_a_page_is_left_to_torch() -> None:
    driver = _Driver()
    assert driver.pieces.empty(_MIB) is None
    assert not driver.locked


def test_where_pages_cannot_be_locked_there_is_none() -> None:
    driver = _Driver(most=1)
    kept = driver.empty(2 * _MIB)
    assert driver.pieces.empty(2 * _MIB) is None
    address = kept.data_ptr()
    del kept
    gc.collect()
    # The driver is not asked again, and what there is is lent.
    assert driver.pieces.empty(4 * _MIB) is None
    assert driver.locked == {address: 2 * _MIB}
    assert driver.empty(2 * _MIB).data_ptr() == address


def test_where_pages_cannot_be_unlocked_there_is_none_either() -> None:
    driver = _Driver(unlocks=False)
    small = driver.empty(2 * _MIB)
    del small
    gc.collect()
    assert driver.pieces.empty(8 * _MIB) is None


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_other_memory() -> None:
    """A device goes on to write to the parent's."""
    memory = _Driver().empty(2 * _MIB).fill_(1)
    child = os.fork()
    if child == 0:
        os._exit(int(memory[::4096].tolist() != [0] * (2 * _MIB // 4096)))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert memory.all()


def test_memory_is_there_while_it_is_unlocked() -> None:
    driver = _Driver()
    small = driver.empty(2 * _MIB)
    address = small.data_ptr()
    del small
    gc.collect()
    mapped: list[bool] = []
    driver.pieces._unlock = lambda address: mapped.append(_is_mapped(address)) or True  # type: ignore[func-returns-value]
    driver.empty(4 * _MIB)
    assert mapped == [True]
    assert not _is_mapped(address) or driver.waits == 1


def test_threads_take_turns() -> None:
    """No piece is lent twice at a time."""
    driver, lent = _Driver(), Counter[int]()

    def take() -> None:
        for _ in range(200):
            memory = driver.empty(2 * _MIB)
            lent[memory.data_ptr()] += 1
            assert lent[memory.data_ptr()] == 1
            lent[memory.data_ptr()] -= 1
            del memory

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(take) for _ in range(4)]:
            future.result()
    assert len(driver.locked) <= 4


def _is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning")
def test_what_lies_in_it() -> None:
    """Tensors without gaps, in the order in which they lie."""
    weight = torch.randn(3, 4, 5, 6)
    assert fits_host_memory(weight)
    assert fits_host_memory(weight.to(memory_format=torch.channels_last))
    assert not fits_host_memory(weight[..., ::2])
    assert not fits_host_memory(weight.expand(2, 3, 4, 5, 6))
    assert not fits_host_memory(torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8))
    assert not fits_host_memory(torch.view_as_complex(weight[..., :2].contiguous()).conj())
