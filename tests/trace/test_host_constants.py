"""Tensors that a step makes in host memory of Python's numbers alone, and gives to the device.

The device is torch's ``meta``, which copies nothing; ``tests/gpu/test_host_values.py`` has a GPU's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan import (
    CaptureError,
    GraphPlanError,
    HostSyncError,
    OutcomeError,
    TemporaryCopyError,
    compile_plan,
    graph_step,
)
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.signature import flatten
from graphplan.plan.difference import check_difference
from graphplan.step.compiled import refuse_beside_compiled
from graphplan.trace.given_values import GivenValues
from graphplan.trace.host_reads import ENGINE, CodePosition, HostRead, KnownReads
from graphplan.trace.host_transfers import Transfer
from graphplan.trace.records import Trace
from graphplan.trace.run import trace
from tests.twins import by_chance, line_of

GIVEN: dict[str, Callable[[], Tensor]] = {
    "number": lambda: torch.tensor(3.0),
    "range": lambda: torch.arange(4),
    "computed": lambda: torch.arange(4)[:, None].repeat(1, 2) - 1,
    "written": lambda: torch.zeros(3).fill_(2.0),
    "shape": lambda: torch.full((2,), 7).to(torch.int32),
}
FED = torch.ones(3)


class Copied(TorchDispatchMode):
    """Notes where the sources of transfers and indices lie."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in ("aten._to_copy.default", "aten.copy_.default"):
            self.devices.append(args[-1].device.type)
        elif str(func) == "aten.index.Tensor":
            self.devices.extend(index.device.type for index in args[1] if index is not None)
        return func(*args, **(kwargs or {}))


def constants_of(step: Callable[[Tensor], Any]) -> list[Transfer]:
    """The constants of the plan of ``step``."""
    plan = compile_plan(step, torch.ones(2), owners={})
    return list(plan.traced.transfers)


@pytest.mark.parametrize("name", GIVEN)
def test_they_are_noted_with_copies_on_the_device(name: str) -> None:
    make = GIVEN[name]
    (constant,) = constants_of(lambda x: [x * 2, make().to("meta")][0])
    assert torch.equal(constant.value, make())
    assert constant.copy.device.type == "meta"
    assert (constant.copy.shape, constant.copy.dtype) == (make().shape, make().dtype)


def test_what_copies_into_a_tensor_and_what_indexes_one() -> None:
    there = torch.empty(4, 3, device="meta")
    found = constants_of(
        lambda x: [x * 2, there[torch.tensor([-1])], there[torch.arange(2)], torch.empty(2).copy_(x)][0]
    )
    assert [constant.value.tolist() for constant in found] == [[-1], [0, 1]]


@pytest.mark.parametrize(
    "make", [lambda x: FED, lambda x: x, lambda x: torch.rand(3), lambda x: torch.arange(2) + x, lambda x: FED[:1]]
)
def test_others_are_refused(make: Callable[[Tensor], Tensor]) -> None:
    def step(x: Tensor) -> Tensor:
        make(x).to("meta")  # culprit
        return x * 2

    with pytest.raises(TemporaryCopyError, match=rf"copies host memory to meta at {line_of(step)}.*Pass the tensor"):
        compile_plan(step, torch.ones(2), owners={})


def test_numbers_that_change_are_refused() -> None:
    """Two traces see them; what has a name is guarded instead."""
    counts = iter(range(9))
    with pytest.raises(GraphPlanError, match=r"constant"):
        compile_plan(lambda x: [x * 2, torch.tensor([next(counts)]).to("meta")][0], torch.ones(2), owners={})


def test_a_capture_copies_from_the_device() -> None:
    known = [Transfer.of(ENGINE, torch.arange(4), torch.device("meta"), is_constant=True)]
    there = torch.empty(4, 3, device="meta")
    noted, constants = Copied(), GivenValues(transfers=known)
    with noted, constants:
        assert torch.arange(4).to("meta").shape == (4,)
        assert there[torch.arange(4)].shape == (4, 3)
        torch.empty(4, device="meta").copy_(torch.arange(4))
        torch.ones(3).to(torch.float64)
    constants.check()
    assert noted.devices == ["meta", "meta", "meta", "cpu"]


def test_a_capture_that_copies_other_values_is_refused() -> None:
    constants = GivenValues(transfers=[Transfer.of(ENGINE, torch.arange(4), torch.device("meta"), is_constant=True)])
    with constants:
        torch.arange(1, 5).to("meta")
    with pytest.raises(
        CaptureError,
        match=(
            r"copies values from host memory to the device at "
            r"test_host_constants\.py:\d+.* that the traced steps did not make there"
        ),
    ):
        constants.check()


def test_shapes_that_follow_from_them_are_replayed() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.repeat_interleave(torch.tensor([2, 1])), torch.tensor([1, 0, 1]).bincount() * x

    fast = graph_step(step, backend="tape", warmup_steps=1)
    for number in range(6):
        x = torch.tensor([1.0, number])
        assert all(map(torch.equal, fast(x), step(x)))
    assert (fast.stats.traced, fast.stats.replayed) == (1, 3)


def test_beside_compiled_code_they_are_refused() -> None:
    """That does not run compiled within the mode that answers a capture."""
    plan = compile_plan(lambda x: [x * 2, torch.arange(4).to("meta")][0], torch.ones(2), owners={})
    with pytest.raises(
        HostSyncError, match=r"copies a tensor of shape \(4,\) from host memory, and runs compiled code"
    ):
        refuse_beside_compiled(plan)
    refuse_beside_compiled(compile_plan(lambda x: x * 2, torch.ones(2), owners={}))


def test_beside_compiled_code_assertions_are_refused() -> None:
    def step(x: Tensor) -> Tensor:
        assert x.sum() > 0
        return x * 2

    with pytest.raises(HostSyncError, match=r"asserts .*, and runs compiled code; a capture of both would wait"):
        refuse_beside_compiled(compile_plan(step, torch.ones(2), owners={}))


def test_beside_compiled_code_products_are_not_derived() -> None:
    x = torch.ones(3, requires_grad=True)
    plan = compile_plan(lambda y: torch.autograd.grad((x * y).prod(), x), torch.ones(3), owners={"x": x})
    with pytest.raises(HostSyncError, match=r"derives a product .*, and runs compiled code"):
        refuse_beside_compiled(plan)
    with torch.no_grad():
        refuse_beside_compiled(compile_plan(lambda y: (x * y).prod(), torch.ones(3), owners={"x": x}))


def test_a_capture_is_given_the_positions_that_masks_select(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which the traces found them, and whatever the masks hold by then."""
    x, mask = torch.arange(6.0).reshape(2, 3), torch.tensor([[True, False, True], [False, False, True]])

    def select(mask: Tensor) -> list[Tensor]:
        changed = x.clone()
        changed[mask] = -x[mask]
        return [x[mask], changed, mask.nonzero(), x[:, mask[0]]]

    places: list[CodePosition] = []
    with monkeypatch.context() as noting, GivenValues([]):
        noting.setattr(KnownReads, "__contains__", lambda known, place: bool(places.append(place)))
        expected = select(mask)
    positions = mask.nonzero(as_tuple=True)
    values = [positions, positions, positions, mask.nonzero(), mask[0].nonzero(as_tuple=True)]
    reads = [HostRead(place, value, constant=True, waits=True) for place, value in zip(places, values, strict=True)]
    with GivenValues(reads):
        found = select(torch.zeros_like(mask))
    assert all(map(torch.equal, found, expected))


def test_a_capture_is_given_the_positions_of_masks_that_selected_all() -> None:
    """Replays compare whether a mask does so. What the step does to the positions changes no later capture."""

    def step(x: Tensor) -> Tensor:
        places = (by_chance(x) < 5).nonzero()
        places += 1
        return places

    plan = compile_plan(step, torch.arange(4.0), owners={})
    reads, odd = plan.traced.reads, torch.tensor([0.0, 9.0, 2.0, 3.0])
    split: list[tuple[Tensor, HostRead]] = []
    for _ in range(2):
        split.clear()
        with GivenValues(reads, on_expected=lambda tensor, read: split.append((tensor, read))):
            places = step(odd)
        assert places.flatten().tolist() == [1, 2, 3, 4]
        ((mask, read),) = split
        outcome = read.outcome_of(mask)
        assert (outcome.dtype, outcome.shape, bool(outcome)) == (torch.bool, (), False)
        assert [read] == list(reads)
        assert read.outcome is True
    with pytest.raises(OutcomeError, match=r"the mask at test_host_constants\.py:\d+ in step.* does not select all"):
        reads[0].compare(False)


def test_only_what_a_traced_step_read_is_answered() -> None:
    """One line may select of tensors on the host, and then of others: all of it is noted, and in that order."""
    record = Trace()

    def select(x: Tensor, mask: Tensor) -> Tensor:
        return x[mask]

    def step(x: Tensor) -> list[Tensor]:
        first = select(torch.arange(4), torch.tensor([True, False, False, True]))
        return [first, select(x, torch.tensor([False, True, True, False]))]

    feed = flatten((torch.arange(4.0),), {})
    expected = step(*feed.leaves)
    trace(step, feed, CallArguments(*feed.rebuild(feed.leaves)).watch(), owners={}, device=None, record=record)
    assert [read.value[0].tolist() for read in record.host_reads] == [[0, 3], [1, 2]]
    with GivenValues(record.host_reads):
        assert all(map(torch.equal, step(*feed.leaves), expected))


def test_constants_that_something_unseen_writes_are_none() -> None:
    """The first replay shows that the positions change, and two traces show where."""

    def step(x: Tensor) -> Tensor:
        mask = torch.zeros(4)
        ctypes.memmove(mask.data_ptr(), x.contiguous().data_ptr(), 16)
        return x[mask > 0]

    fast = graph_step(step, backend="tape", warmup_steps=1)
    with pytest.raises(
        HostSyncError, match=r"test_host_constants\.py:\d+ in step.* reads other values than in the step bef"
    ):
        for number in range(12):
            x = torch.tensor([1.0, -1.0, (-1.0) ** number, 1.0])
            assert torch.equal(fast(x), step(x))


def test_a_mask_that_a_generator_of_numpy_draws() -> None:
    """The error names what makes it unseen, and what to draw with instead."""
    generator = np.random.default_rng(0)

    def step(x: Tensor) -> Tensor:
        return x[torch.from_numpy(generator.random(64) < 0.5)].sum()

    fast = graph_step(step, backend="tape")
    with pytest.raises(
        HostSyncError, match=r"reads other values .* Python, NumPy or .* Draw random numbers with torch"
    ):
        for _ in range(6):
            fast(torch.ones(64))


def test_what_comes_from_a_file_is_no_constant(tmp_path: Path) -> None:
    file = tmp_path / "mask"
    torch.from_file(str(file), shared=True, size=4).copy_(torch.tensor([1.0, 0.0, 1.0, 0.0]))
    fast = graph_step(lambda x: x[torch.from_file(str(file), size=4) > 0], backend="tape")
    with pytest.raises(HostSyncError, match=r"a mask makes a tensor whose shape depends on values"):
        for _ in range(6):
            fast(torch.ones(4))


def test_reads_in_no_certain_order_are_refused() -> None:
    """Those of autograd's engine, where it may run operators in another order."""
    read = HostRead(ENGINE, torch.tensor([[0]]), constant=True, waits=True)
    first, second = Trace(host_reads=[read]), Trace(host_reads=[read])
    check_difference(first, second)
    second.graph_elsewhere = True
    with pytest.raises(HostSyncError, match=r"a derivative of a derivative reads values of a device"):
        check_difference(first, second)
