"""A budget of memory: programs are estimated before they are captured, and what is dropped is freed."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import re
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from graphplan import CaptureError, MemoryBudgetError, OptionError, SkipReason, graph_step, graphed
from graphplan.backends.tape import TapeBackend
from graphplan.environment.devices import free_bytes
from graphplan.report.stats import Stats
from graphplan.specs.roles import Footprint
from graphplan.step.entries import Entry
from graphplan.step.memory_budget import MemoryBudget
from graphplan.step.options import Options
from graphplan.step.programs import Programs
from tests.models import training_rig
from tests.twins import BEFORE_REPLAY, assert_same_runs, build, drive, managed, prepare_steps

MIB = 2**20
make_rig = partial(training_rig, "mlp", "adamw", sizes=(8,) * 12)


def needed(make: Any = make_rig) -> int:
    """What the tape is estimated to take for a rig's step."""
    rig = build(make)
    step = managed(rig)
    drive(rig, step)
    return int(step.stats.bytes_estimated)


def test_an_estimate_is_what_the_tape_takes() -> None:
    rig = build(make_rig)
    step = managed(rig)
    drive(rig, step)
    (program,) = step.machine.programs.all()
    assert step.stats.bytes_estimated == pytest.approx(program.nbytes, rel=0.1)
    assert step.plan.footprint.total == step.stats.bytes_estimated
    assert re.search(r"the largest program was estimated at \d+\.\d MiB before its capture", step.report())


def test_the_peak_counts_what_is_alive_at_once() -> None:
    """Of temporaries that go at once, one; of activations that the backward pass reads, all."""
    weight = torch.ones(1, requires_grad=True)
    size = 1024 * 4

    def temporaries(x: Tensor) -> Tensor:
        for _ in range(8):
            x = x + 1
        return x.sum()

    def activations(x: Tensor) -> Tensor:
        x = x * weight
        for _ in range(8):
            x = x.exp()
        x.sum().backward()
        return x.detach().sum()

    peaks = []
    for fn in (temporaries, activations):
        step = graph_step(fn, owners={"weight": weight}, backend="tape", mode="train")
        for _ in range(6):
            weight.grad = None
            step(torch.zeros(1024))
        footprint = step.plan.footprint
        assert footprint.peak <= footprint.total
        peaks.append(footprint.peak)
    assert 2 * size <= peaks[0] < 3.5 * size
    assert 9 * size <= peaks[1] < 13 * size


def test_memory_that_is_given_back_is_not_counted() -> None:
    """``storage.resize_`` is what FSDP2 does with gathered parameters."""

    def fn(x: Tensor) -> Tensor:
        for _ in range(8):
            y = x + 1
            x = y * 2
            y.untyped_storage().resize_(0)
            kept.append(y)
        kept.clear()
        return x.sum()

    kept: list[Tensor] = []
    step = graph_step(fn, backend="tape", allow=("*",))
    for _ in range(6):
        step(torch.zeros(1024))
    assert step.plan.footprint.peak < 4 * 4096


def test_memory_that_grows_where_it_lies_is_counted() -> None:
    """A loop that frees as much as it makes comes after it."""

    def fn(x: Tensor) -> Tensor:
        grown = [torch.empty(1024).resize_(4096).zero_() for _ in range(20)]
        for _ in range(100):
            x = x.sin()
        return x.sum() + sum(each.sum() for each in grown)

    step = graph_step(fn, backend="tape")
    for _ in range(6):
        step(torch.zeros(1024))
    assert 20 * 4 * 4096 <= step.plan.footprint.peak < 1.2 * 20 * 4 * 4096


@pytest.mark.twice
def test_a_program_that_is_too_large_is_not_captured() -> None:
    """Eager's numbers, one warning, the reason in the report; also where refusals raise."""
    budget = needed() - 1
    eager = build(make_rig)
    prepare_steps(eager.owners["optimizer"])
    expected = drive(eager, eager.step)
    rig = build(make_rig)
    step = managed(rig, memory_budget=budget)
    text = r"is estimated to take .* MiB, but memory_budget allows .*Make the batch smaller, or raise memory_budget="
    with pytest.warns(UserWarning, match=text) as caught:
        found = drive(rig, step)
    assert len([w for w in caught if "eager" in str(w.message)]) == 1
    assert_same_runs(expected, found)
    assert (step.stats.captured, step.stats.replayed) == (0, 0)
    assert step.stats.skipped == {SkipReason.MEMORY: len(rig.calls) - BEFORE_REPLAY + 1}
    assert "memory_budget allows" in step.report()


def test_a_budget_that_is_raised() -> None:
    """After ``invalidate`` the refusal is gone."""
    rig = build(make_rig)
    step = managed(rig, memory_budget=1)
    with pytest.warns(UserWarning, match=r"takes? .*memory_budget allows 0\.0 MiB"):
        drive(rig, step)
    object.__setattr__(step._options, "memory_budget", 2**40)
    step.machine.memory._budget = 2**40
    step.invalidate("more memory")
    drive(rig, step)
    assert step.stats.captured == 1


def fn_of(size: int) -> Any:
    """A step that makes three tensors of ``size`` bytes, with a literal that tells its programs apart."""

    def fn(x: Tensor, kind: int = 0) -> Tensor:
        y = x.expand(size // 4, -1).contiguous()
        return (y + 1).exp().sum(0)

    return fn


def test_programs_go_for_a_new_one_and_their_memory_with_them() -> None:
    """The least recently used one goes, before the new one is captured; so do its bytes, as the system counts them."""
    size = 64 * MIB  # glibc gives back at once what is larger than 32 MiB
    make = partial(graph_step, fn_of(size), backend="tape", mode="inference", verify="off")
    one = torch.ones(1, 1)
    start = resident()
    step = make()
    for _ in range(6):
        step(one)
    taken = step.machine.programs.nbytes
    assert taken >= 3 * size
    assert resident() - start >= 2.5 * size
    step.close()
    assert resident() - start <= size // 2

    step = make(memory_budget=taken + size)
    for kind in (1, 2, 3):
        for _ in range(6):
            assert step(one, kind).item() == pytest.approx(math.exp(2) * (size // 4), rel=1e-3)
        assert step.machine.programs.nbytes <= taken + size
        assert resident() - start <= taken + size
    assert step.stats.events == {"evicted: more bytes than memory_budget": 2}
    assert step.stats.captured == 3


@pytest.mark.twice
def test_a_program_that_turns_out_to_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate may be too low: what was captured all the same is dropped, and the calls go on eagerly."""
    monkeypatch.setattr(TapeBackend, "needs", lambda *_, alone: 0)
    step = graph_step(fn_of(MIB), backend="tape", mode="inference", memory_budget=MIB)
    one = torch.ones(1, 1)
    with pytest.warns(UserWarning, match=r"takes \d\.\d MiB in fact, but memory_budget allows 1\.0 MiB"):
        found = [step(one).item() for _ in range(8)]
    assert found == pytest.approx([math.exp(2) * MIB / 4] * 8, rel=1e-3)
    assert (step.stats.captured, step.stats.replayed) == (1, 0)
    assert step.stats.skipped == {SkipReason.MEMORY: 2}
    assert step.machine.programs.all() == []


@pytest.mark.twice
def test_a_device_that_has_too_little_memory() -> None:
    """Of a step that makes more than there is, bit by bit, the tape would keep all."""
    free = free_bytes(torch.device("cpu"))
    assert free is not None
    count = free // 2**30 + 8

    def fn(x: Tensor) -> Tensor:
        for _ in range(count):
            torch.empty(2**28)
        return x + 1

    step = graph_step(fn, backend="tape", mode="inference")
    with pytest.warns(UserWarning, match=r"is estimated to take .* MiB, but cpu has .* MiB free\. Make the batch"):
        assert [step(torch.ones(1)).item() for _ in range(8)] == [2] * 8
    assert step.stats.skipped == {SkipReason.MEMORY: 3}
    assert step.plan.footprint.peak < 2**31


def test_a_graphed_function_that_is_too_large() -> None:
    """What is graphed for predictions is estimated alike; to prewarm it is refused, with the reason."""
    fast = graphed(fn_of(MIB), backend="tape", memory_budget=MIB)
    one = torch.ones(1, 1)
    with pytest.warns(UserWarning, match=r"memory_budget allows 1\.0 MiB"):
        found = [fast(one).item() for _ in range(6)]
    assert found == pytest.approx([math.exp(2) * MIB / 4] * 6, rel=1e-3)
    assert fast.num_graphs == 0
    with pytest.raises(OptionError, match=r"nothing is captured for the size .*: there is no memory for a program"):
        fast.prewarm([1], example=(one,))


class Votes:
    """Another rank that answers, or is not heard."""

    def __init__(self, other: bool | None) -> None:
        self.other = other

    def vote(self, question: str, answer: bool) -> bool | None:
        """Whether both say yes."""
        return None if self.other is None else self.other and answer


@pytest.mark.parametrize(
    ("other", "budget", "text"),
    [
        (True, 2**40, ""),
        (False, 2**40, "another rank has no memory"),
        (True, 1, "memory_budget allows"),
        (False, 1, "memory_budget allows"),
        (None, 2**40, ""),
        (None, 1, "memory_budget allows"),
    ],
)
def test_ranks_that_communicate_agree(other: bool | None, budget: int, text: str) -> None:
    rig = build(make_rig)
    step = managed(rig)
    drive(rig, step, BEFORE_REPLAY)
    plan = dataclasses.replace(step.plan, communicates=True)
    options = Options(memory_budget=budget)
    entry, warned = Entry(), list[str]()
    parts = SimpleNamespace(
        options=options,
        programs=Programs(options, Stats()),
        peers=Votes(other),
        refusals=SimpleNamespace(warn=warned.append),
    )
    error = MemoryBudget(cast("Any", parts)).make(entry, plan, TapeBackend())
    assert entry.refusal is error
    assert warned == ([] if error is None else [f"graphplan runs this step eagerly: {error}"])
    assert (error is None) == (text == "")
    if error is not None:
        assert isinstance(error, MemoryBudgetError | CaptureError)
        assert text in str(error)


def test_the_larger_of_two_footprints() -> None:
    assert Footprint(3, 4).merge(Footprint(2, 9)) == Footprint(3, 9)


def resident() -> int:
    """Bytes of memory that this process has."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as facts:
        return int(facts.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
