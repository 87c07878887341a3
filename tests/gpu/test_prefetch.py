"""Inputs that are copied while the device computes: eager's numbers, however the streams lie in time."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from graphplan import graph_step
from graphplan.program import inputs
from tests.devices import BACKEND, CUDA, DEVICE, needs_cuda
from tests.facts import assert_same, flatten

STEPS, SIZE = 24, 2**21
"""Inputs have 8 MiB, twice what is staged."""
Between = Callable[[int, Any], object]


def pinned(index: int, size: int = SIZE) -> Tensor:
    """A batch of its own in each step, so that pinned memory is used again soon."""
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(64, size // 64, generator=generator)
    return x.pin_memory() if CUDA else x


def train(
    between: Between = lambda index, step: None, *, size: int = SIZE, make: Any = pinned, **options: Any
) -> tuple[dict[str, Any], Any]:
    """Losses and weights after some steps, and the step. ``between`` is called before each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1)).to(DEVICE)
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        optimizer.zero_grad()
        # Reads all of the input: bits that came too late or too early show.
        loss = model(x.view(64, -1).T[:: size // 4096 or 1]).square().mean() * weight + x.mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = graph_step(
        fn, owners={"model": model, "optimizer": optimizer}, backend=BACKEND, device=DEVICE, verify="off", **options
    )
    losses = []
    for index in range(STEPS):
        between(index, step)
        losses.append(step(make(index, size), torch.tensor(float(index + 1))))
    if CUDA:
        torch.cuda.synchronize()
    return flatten(model=model, losses=losses), step


def test_prefetching_changes_nothing() -> None:
    expected, _ = train(eager_if=1)
    found, step = train(prefetch=True)
    assert_same(expected, found)
    assert step.stats.replayed == STEPS - 6, step.report()
    (program,) = step.machine.programs.all()
    assert program.inputs.staged_bytes == (4 * SIZE if CUDA else 0)
    step.close()
    assert program.inputs.staged_bytes == 0


def sleeping(seed: int) -> Between:
    """Has the device wait at random on either stream, before a step: a copy comes late, or the one before it does."""
    dice = random.Random(seed)

    def wait(index: int, step: Any) -> None:
        for program in step.machine.programs.all():
            if dice.random() < 0.5:
                with torch.cuda.stream(program.inputs._staging._stream):
                    torch.cuda._sleep(dice.randrange(20_000_000))
        if dice.random() < 0.5:
            torch.cuda._sleep(dice.randrange(20_000_000))

    return wait


@needs_cuda
@pytest.mark.parametrize("seed", range(4))
def test_streams_that_are_late(seed: int) -> None:
    expected, _ = train(eager_if=1)
    found, step = train(sleeping(seed), prefetch=True)
    assert_same(expected, found)
    assert step.stats.replayed == STEPS - 6


@needs_cuda
def test_calls_on_changing_streams() -> None:
    """Each call on another stream, ordered after the one before as their user has to."""
    expected, _ = train(eager_if=1)
    streams = [torch.cuda.Stream() for _ in range(3)]
    home = torch.cuda.current_stream()

    def between(index: int, step: Any) -> None:
        before, after = torch.cuda.current_stream(), streams[index % 3]
        after.wait_stream(before)
        torch.cuda.set_stream(after)
        sleeping(index)(index, step)

    try:
        found, step = train(between, prefetch=True)
    finally:
        torch.cuda.set_stream(home)
        # What is compared on this stream was computed on others.
        torch.cuda.synchronize()
    assert_same(expected, found)
    assert step.stats.replayed == STEPS - 6


@needs_cuda
def test_a_copy_does_not_wait_for_the_device() -> None:
    """While the device is busy the next input is already there."""
    _, step = train(prefetch=True)
    (program,) = step.machine.programs.all()
    x, weight, done = pinned(0), torch.tensor(1.0), torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    step(x, weight)
    done.record()
    program.inputs._staging._stream.synchronize()
    assert not done.query()
    torch.cuda.synchronize()


@needs_cuda
def test_what_is_not_staged() -> None:
    """Small inputs, inputs that are not pinned, and inputs on the device go the straight way."""
    expected, _ = train(eager_if=1, size=2**16)
    found, step = train(prefetch=True, size=2**16)
    assert_same(expected, found)
    assert step.machine.programs.all()[0].inputs._staging is None

    expected, _ = train(eager_if=1)
    for make in (lambda index, size: pinned(index, size).clone(), lambda index, size: pinned(index, size).to(DEVICE)):
        found, step = train(prefetch=True, make=make)
        assert_same(expected, found)
        assert not step.machine.programs.all()[0].inputs._staging._is_taken


@needs_cuda
def test_a_call_that_was_broken_off() -> None:
    """After an interrupt between the copies, the next call waits for all that may still read the buffers."""
    expected, _ = train(eager_if=1)
    broken: list[int] = []

    def between(index: int, step: Any) -> None:
        if index == STEPS - 4:
            program = step.machine.programs.all()[0]
            program.inputs._staging.fetch([*map(pinned, (99,)), torch.tensor(1.0)])
            assert program.inputs._staging._is_taken
            broken.append(index)

    found, step = train(between, prefetch=True)
    assert broken
    assert_same(expected, found)
    assert not step.machine.programs.all()[0].inputs._staging._is_taken


@needs_cuda
def test_a_fit_whose_batches_are_prefetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a Trainer, with a loader that pins: the eager fit."""
    pytest.importorskip("lightning")
    pytest.importorskip("sklearn")
    from lightning.pytorch import Callback

    from graphplan import GraphPlanCallback
    from tests.lightning import parts

    stock = parts.loaders

    def pinning(batch: int = parts.BATCH) -> Any:
        first, second = stock(batch)
        first.pin_memory = True
        return first, second

    monkeypatch.setattr(parts.Observer, "on_train_batch_end", Callback.on_train_batch_end)
    monkeypatch.setattr(parts, "loaders", pinning)
    monkeypatch.setattr(inputs, "_LARGE", 1)
    staged: list[int] = []
    fetch = inputs._Staging.fetch

    def noting(self: Any, sources: Any) -> Any:
        found = fetch(self, sources)
        staged.append(self._is_taken)
        return found

    monkeypatch.setattr(inputs._Staging, "fetch", noting)
    options: dict[str, Any] = {"accelerator": "gpu", "devices": 1}
    expected = parts.fit(parts.LitDigits, tmp_path / "eager", **options)
    callback = GraphPlanCallback(prefetch=True)
    found = parts.fit(parts.LitDigits, tmp_path / "graphed", callback, **options)
    parts.assert_same_fits(expected, found)
    assert sum(staged) >= callback.stats.replayed - callback.stats.verified > 0, callback.report()
