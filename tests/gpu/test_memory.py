"""What captures and programs take, what they give back, and captures for which memory runs out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._pytree import tree_map_only

from graphplan import CaptureMemoryError, EffectError, SkipReason, graph_step
from graphplan.backends.cudapools import move
from graphplan.program.program import Program
from tests.devices import (
    BACKEND,
    DEVICE,
    MIB,
    assert_memory_returned,
    drawing_nothing,
    is_healthy,
    memory,
    needs_cuda,
    on_device,
    oracle,
)
from tests.facts import assert_same
from tests.gpu.failing import AT, RIGS, forbidden, operators_of_capture, recorded, run_through, too_much
from tests.health import CALLS, FailAt, Planted
from tests.twins import Record, Rig, assert_same_runs, build, drive, managed, state_of


@pytest.mark.parametrize("name", RIGS)
@pytest.mark.twice
def test_memory_that_runs_out_in_a_capture(name: str) -> None:
    """A refusal that is also what torch raises; the memory is back, and the next call is captured."""
    count = operators_of_capture(RIGS[name])
    modes = [FailAt(count * part // 5, too_much, recorded) for part in range(5)]
    run_through(RIGS[name], modes, CaptureMemoryError, "memory ran out .*on_failure='eager'")


@pytest.mark.parametrize("what", [too_much, pytest.param(forbidden, marks=needs_cuda)])
@pytest.mark.parametrize("name", RIGS)
@pytest.mark.twice
def test_a_failed_capture_goes_on_eagerly(name: str, what: Callable[[], object]) -> None:
    """One warning, eager's numbers, and no more memory than before."""
    rig = build(RIGS[name])
    expected = drive(rig, oracle(rig))
    del expected.outputs[AT]
    count = operators_of_capture(RIGS[name])
    for part in range(3):
        rig = build(RIGS[name])
        step = managed(rig, backend=BACKEND, on_failure="eager")
        begun = drive(rig, step, AT)
        start = memory()
        with pytest.warns(UserWarning, match="runs this step eagerly"), FailAt(count * part // 3, what, recorded):
            step(*rig.calls[AT])
        assert_memory_returned(start)
        rig.after(AT)
        rest = drive(replace(rig, calls=rig.calls[AT + 1 :]), step)
        assert_same_runs(expected, Record(begun.outputs + rest.outputs, state_of(rig)))
        assert step.stats.skipped == {SkipReason.CAPTURE: CALLS - AT}
        with drawing_nothing():
            is_healthy()


def wide_rig() -> Rig:
    """A step whose activations are much larger than its state."""
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 8))
    optimizer = SGD(model.parameters(), lr=1e-3, fused=True)
    return squaring_rig(model, optimizer, (8192, 64))


def squaring_rig(model: nn.Module, optimizer: Optimizer, shape: tuple[int, ...]) -> Rig:
    """A step that trains ``model`` towards zero, on batches of ``shape``."""

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    calls = [(torch.randn(*shape),) for _ in range(CALLS)]
    return Rig(train_step, {"model": model, "optimizer": optimizer}, calls)


PARAMETERS = 4 * (64 * 4096 + 4096 + 4096 * 4096 + 4096 + 4096 * 8 + 8)
"""Bytes of the wide rig's parameters, and of its gradients."""
make_wide = on_device(wide_rig)


def eager_need(make: Callable[[], Rig] = make_wide) -> int:
    """What eager steps of the wide rig reserve at most beside what they leave allocated."""
    rig = build(make)
    memory()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    drive(rig, oracle(rig))
    return torch.cuda.max_memory_reserved(DEVICE) - torch.cuda.memory_allocated(DEVICE)


def bytes_of_workspace() -> int:
    """What cuBLAS keeps for a stream. Forgotten or not, it stays cached: the caller's and that of eager steps."""
    torch._C._cuda_clearCublasWorkspaces()
    x = torch.ones(256, 256, device=DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    product = x @ x
    return torch.cuda.memory_allocated(DEVICE) - before - product.nbytes


@contextmanager
def limited_to(nbytes: int) -> Iterator[None]:
    """Have torch reserve no more than ``nbytes`` in the block."""
    _, total = torch.cuda.mem_get_info(DEVICE)
    torch.cuda.set_per_process_memory_fraction(nbytes / total, DEVICE)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


@needs_cuda
def test_a_capture_takes_what_eager_steps_have_left_cached() -> None:
    """It is given back before the capture, which could not have it freed: pool and cache need not fit side by side."""
    rig = build(make_wide)
    expected = drive(rig, oracle(rig))
    del rig
    rig = build(make_wide)
    step = managed(rig, backend=BACKEND, verify="off")
    begun = drive(rig, step, AT)
    gc.collect()
    with limited_to(torch.cuda.memory_reserved(DEVICE) + 2 * PARAMETERS + 64 * MIB):
        rest = drive(replace(rig, calls=rig.calls[AT:]), step)
    assert_same_runs(expected, Record(begun.outputs + rest.outputs, state_of(rig)))
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - AT - 1)


@needs_cuda
def test_a_program_takes_what_eager_steps_take() -> None:
    """Reserved in replays: at most 15 % above eager's peak and the static inputs. One set of gradients is alive."""
    need = eager_need()
    before = memory()
    rig = build(make_wide)
    step = managed(rig, backend=BACKEND, verify="off")
    drive(rig, step)
    torch.cuda.synchronize()
    gc.collect()
    reserved = torch.cuda.memory_reserved(DEVICE)
    # cuBLAS has a workspace for each stream, which is none of the step's. No replay comes after this.
    torch._C._cuda_clearCublasWorkspaces()
    allocated = torch.cuda.memory_allocated(DEVICE)
    workspaces = 2 * bytes_of_workspace()
    fed = sum(x.nbytes for (x,) in rig.calls)
    static = step.machine.buffers.nbytes
    assert step.stats.replayed == CALLS - AT - 1, step.report()
    assert allocated - before[0] <= 2 * PARAMETERS + fed + static + PARAMETERS // 2
    assert reserved - before[1] - workspaces <= 1.15 * (need + 2 * PARAMETERS) + fed + static + 64 * MIB


@needs_cuda
def test_an_estimate_is_near_to_what_a_capture_reserves() -> None:
    """Within a third: segments are larger than what lies in them, and kernels have workspaces."""
    rig = build(make_wide)
    step = managed(rig, backend=BACKEND, verify="off")
    drive(rig, step)
    (program,) = step.machine.programs.all()
    assert step.stats.bytes_estimated == pytest.approx(program.nbytes, rel=1 / 3), step.report()


@needs_cuda
@pytest.mark.twice
def test_a_program_that_is_too_large_is_not_captured() -> None:
    """One warning, eager's numbers, and nothing is reserved for a program."""
    rig = build(make_wide)
    expected = drive(rig, oracle(rig))
    rig = build(make_wide)
    step = managed(rig, backend=BACKEND, memory_budget=MIB)
    with pytest.warns(UserWarning, match=r"is estimated to take .* MiB, but memory_budget allows 1\.0 MiB"):
        found = drive(rig, step)
    assert_same_runs(expected, found)
    assert step.stats.skipped == {SkipReason.MEMORY: CALLS - AT}
    assert step.machine.programs.all() == []


@needs_cuda
def test_what_a_dropped_program_had_is_free() -> None:
    """By the device's own count, without anybody asking torch to empty its cache."""

    def fn(x: Tensor, kind: int) -> Tensor:
        return (x.expand(8 * MIB, -1).contiguous() + int(kind)).exp().sum(0)

    x = torch.zeros(1, 1, device=DEVICE)
    before = memory()
    step = graph_step(fn, backend=BACKEND, mode="inference", verify="off", memory_budget=160 * MIB)
    seen = []
    # Of a third number it is tried whether it can be followed.
    for kind in (0, 1, False, True):
        for _ in range(8):
            step(x, kind)
        seen.append(torch.cuda.memory_reserved(DEVICE) - before[1])
    assert step.stats.captured == 4
    assert step.stats.events == {"evicted: more bytes than memory_budget": 2}
    assert max(seen) <= 160 * MIB + 4 * MIB, seen
    free, _ = torch.cuda.mem_get_info(DEVICE)
    step.close()
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info(DEVICE)[0] >= free + 60 * MIB
    assert torch.cuda.memory_reserved(DEVICE) <= before[1] + 4 * MIB


@needs_cuda
def test_checks_under_a_budget_keep_nothing() -> None:
    """What the eager step of a check takes goes back to the device; without a budget only if it is much."""
    kept = []
    for budget in (None, 1 << 40):
        start = memory()[1]
        rig = build(make_wide)
        step = managed(rig, backend=BACKEND, verify=1, memory_budget=budget)
        drive(rig, step)
        assert step.stats.verified > 0
        kept.append(torch.cuda.memory_reserved(DEVICE) - start)
        step.close()
        del rig, step
    assert kept[1] <= kept[0] + 4 * MIB, kept


class Block(nn.Module):
    """A layer of a small GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and two linear layers."""
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mix(self.norms[0](x)).chunk(3, -1))
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.shrink(nn.functional.gelu(self.grow(self.norms[1](x))))


def gpt_rig() -> Rig:
    """A step whose activations are much larger than its state."""
    model = nn.Sequential(*(Block(256) for _ in range(4)), nn.Linear(256, 64))
    optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    return squaring_rig(model, optimizer, (64, 128, 256))


def stateful_rig() -> Rig:
    """A step whose state is much larger than its activations."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)))
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
    return squaring_rig(model, optimizer, (16, 2048))


def most_reserved(make: Callable[[], Rig], **options: Any) -> tuple[int, Record, Any]:
    """What is reserved at most in steps, with ``options`` in the hands of graph_step, what they leave, and the step."""
    memory()
    most = 0
    torch.cuda.reset_peak_memory_stats(DEVICE)

    rig = build(make)
    after = rig.after

    def look(index: int) -> None:
        # The record of a run copies its state, and that is no part of the steps.
        nonlocal most
        after(index)
        most = torch.cuda.max_memory_reserved(DEVICE)

    rig.after = look
    step = managed(rig, backend=BACKEND, **options) if options else oracle(rig)
    return most, on_host(drive(rig, step)), step


def on_host(record: Record) -> Record:
    """Copies on the device would count as memory of the next run's eager steps."""
    return Record(*tree_map_only(Tensor, Tensor.cpu, (record.outputs, record.state)))


@needs_cuda
@pytest.mark.parametrize("make", [gpt_rig, stateful_rig])
@pytest.mark.twice
def test_checks_take_little_more_than_eager_steps(make: Callable[[], Rig]) -> None:
    """At most 1.3 times what eager steps have reserved, from the first step to the last checked one."""
    eager, expected, _ = most_reserved(on_device(make))
    checked, found, step = most_reserved(on_device(make), verify=1)
    assert_same_runs(expected, found)
    assert step.stats.captured == 1
    assert step.stats.verified == CALLS - AT - 1, step.report()
    assert checked <= 1.3 * eager, (checked / MIB, eager / MIB)


@needs_cuda
@pytest.mark.parametrize("make", [gpt_rig, stateful_rig])
def test_steps_that_were_timed_leave_no_second_set_of_memory(make: Callable[[], Rig]) -> None:
    """They run on the caller's stream, and what torch has cached there is of no use to the stream of captures."""

    def make_long() -> Rig:
        rig = make()
        return replace(rig, calls=4 * rig.calls)

    eager, expected, _ = most_reserved(on_device(make_long))
    # With an option that helps on a busy device, too, the step is captured in any case.
    timed, found, step = most_reserved(on_device(make_long), verify=1, min_speedup=1e-6, fuse_optimizer=True)
    assert_same_runs(expected, found)
    assert step.stats.measured["eager"] > 0
    assert step.stats.verified == step.stats.replayed > 0, step.report()
    assert timed <= 1.3 * eager, (timed / MIB, eager / MIB)


@needs_cuda
def test_without_memory_for_copies_nothing_is_moved() -> None:
    """The gaps between gradients stay then, and the step goes on."""
    memory()
    one = torch.arange(16 * MIB, dtype=torch.float32, device=DEVICE)
    address, total = one.data_ptr(), torch.cuda.get_device_properties(DEVICE).total_memory
    freed: list[None] = []
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(DEVICE) + 16 * MIB) / total, DEVICE)
    try:
        move([one], lambda: freed.append(None))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    assert (one.data_ptr(), freed) == (address, [])
    move([one], lambda: freed.append(None))
    assert len(freed) == 1
    assert torch.equal(one, torch.arange(16 * MIB, dtype=torch.float32, device=DEVICE))


@needs_cuda
def test_a_capture_copies_nothing_on_its_device() -> None:
    """Nothing runs in it: what a failure leaves is what was there, and no copy lies beside the program."""
    rig = build(on_device(stateful_rig))
    step = managed(rig, backend=BACKEND, verify="off", on_failure="eager")
    drive(rig, step, AT)
    expected = state_of(rig)
    start = memory()[0]
    torch.cuda.reset_peak_memory_stats(DEVICE)
    seen = []

    def fails() -> None:
        seen.append(torch.cuda.max_memory_allocated(DEVICE) - start)
        raise Planted("in the capture")

    with pytest.raises(Planted, match="in the capture"), FailAt(2, fails, recorded):
        step(*rig.calls[AT])
    assert seen[0] < sum(parameter.nbytes for parameter in rig.owners["model"].parameters()) // 4
    assert_same(expected, state_of(rig))


@needs_cuda
def test_what_fails_after_a_capture_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replay has run, and no copy of the state is left to undo it: the next step goes on from there."""
    rig = build(on_device(gpt_rig))
    expected = drive(rig, oracle(rig), AT + 1)
    rig = build(on_device(gpt_rig))
    step = managed(rig, backend=BACKEND, verify="off")
    drive(rig, step, AT)
    with monkeypatch.context() as patched:
        patched.setattr(Program, "collect", lambda *args: too_much())
        with pytest.raises(EffectError, match=r"OutOfMemoryError.*has run: its tensors are those of the next step"):
            step(*rig.calls[AT])
    found = state_of(rig)
    names = [name for name in found if name.startswith(("model", "optimizer")) and "grad" not in name]
    assert_same({name: expected.state[name] for name in names}, {name: found[name] for name in names})


class Hidden:
    """A place where graphplan does not look."""

    __slots__ = ("kept",)
    kept: Tensor


def saved(kept: Tensor) -> Any:
    """The means that a layer norm's derivative needs, which have been no object of Python's; None after a replay, which
    keeps no graph.
    """
    return getattr(kept.grad_fn, "_saved_result1", None)


@needs_cuda
@pytest.mark.parametrize("where", ["a cache", "a graph"])
def test_what_a_check_leaves_where_nobody_looks_is_not_overwritten(where: str) -> None:
    """It lies in memory that replays write. What Python has is given other memory; for what only autograd has, the
    program goes, and further checks take memory of their own.
    """
    hidden = Hidden()

    def make() -> Rig:
        rig = wide_rig()
        model, optimizer = rig.owners["model"], rig.owners["optimizer"]

        def train_step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            out = model(x)
            kept = out.detach()
            hidden.kept = kept if where == "a cache" else layer_norm(kept.requires_grad_(), (8,))
            loss = out.square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return replace(rig, step=train_step, calls=rig.calls * 3)

    _, expected, _ = most_reserved(on_device(make))
    rig = build(on_device(make))
    step = managed(rig, backend=BACKEND, verify=2)
    after, pairs = rig.after, []

    def compare(index: int) -> None:
        after(index)
        kept = hidden.kept if where == "a cache" else saved(hidden.kept)
        if kept is not None:
            pairs.append((kept, kept.detach().clone()))

    rig.after = compare
    memory()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    assert_same_runs(expected, on_host(drive(rig, step)))
    (backend,) = step.machine.runner._backends._known.values()
    assert (step.stats.captured, backend._lends) == ((1, True) if where == "a cache" else (2, False))
    checked = {id(kept): (kept, copy) for kept, copy in pairs}
    assert len(checked) > 1
    # What the captured calls have left there is their programs'.
    assert sum(not torch.equal(kept, copy) for kept, copy in checked.values()) <= step.stats.captured
