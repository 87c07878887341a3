"""Rigs on the device, the eager oracle of a prepared step, and the comparison that allows eager's own spread.

Without a CUDA device everything here works on the CPU and the tape.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from graphplan.backends.cudapools import forget_workspaces
from graphplan.optimizers.preparation import Preparation
from tests.facts import assert_same, flatten
from tests.twins import Record, Rig, assert_same_runs, before_replays, build, drive, managed, saved_traces

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
BACKEND = "cudagraph" if CUDA else "tape"
MIB = 1 << 20
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


class Generators(Mapping[str, Tensor]):
    """The device's default generator as a record of its state."""

    def __getitem__(self, name: str) -> Tensor:
        return torch.cuda.get_rng_state(DEVICE) if CUDA else torch.get_rng_state()

    def __iter__(self) -> Iterator[str]:
        return iter(("device",))

    def __len__(self) -> int:
        return 1


def to_device(value: Any) -> Any:
    """Move the tensors of a pytree."""
    return tree_map(lambda leaf: leaf.to(DEVICE) if isinstance(leaf, Tensor) else leaf, value)


def on_device(make: Callable[[], Rig], *, feeds: bool = True) -> Callable[[], Rig]:
    """Move what ``make`` builds, before its first step: modules, their plain tensors and (``feeds``) the batches."""

    def moved() -> Rig:
        rig = make()
        for owner in rig.owners.values():
            for module in owner.to(DEVICE).modules() if isinstance(owner, nn.Module) else ():
                public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
                vars(module).update(to_device(public))
                if isinstance(module, nn.LSTM):
                    # cuDNN's dropout keeps random numbers of its own between runs, so that no two runs are alike.
                    module.dropout = 0.0
        calls = to_device(rig.calls) if feeds else rig.calls
        return replace(rig, calls=calls, extra={**rig.extra, "generators": Generators()})

    return moved


def oracle(rig: Rig) -> Callable[..., Any]:
    """The eager step of the same preparation: capturable optimizers, and a device lr while the step runs."""
    optimizers = [owner for owner in rig.owners.values() if isinstance(owner, Optimizer)]
    preparations = [Preparation(optimizer) for optimizer in optimizers]
    for preparation in preparations:
        preparation.leave()

    def step(*args: Any) -> Any:
        for preparation in preparations:
            preparation.enter()
        groups = [group for optimizer in optimizers for group in optimizer.param_groups if _takes_tensor(group)]
        numbers = [group["lr"] for group in groups]
        for group in groups:
            dtype = torch.float32 if CUDA and group.get("fused") else torch.float64
            group["lr"] = torch.tensor(group["lr"], dtype=dtype, device=DEVICE)
        try:
            return rig.step(*to_device(args))
        finally:
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number
            for preparation in preparations:
                preparation.leave()

    return step


def _takes_tensor(group: Mapping[str, Any]) -> bool:
    return bool(group.get("fused") or group.get("capturable"))


def settle_determinism(make: Callable[[], Rig]) -> None:
    """Allow other kernels for the rest of the test if torch has no deterministic one for some operator of the step."""
    rig = build(make)
    try:
        oracle(rig)(*rig.calls[0])
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        torch.use_deterministic_algorithms(False)


def assert_like_eager(
    make: Callable[[], Rig],
    *,
    captured: int | None = 1,
    further: int = 0,
    replayed: int | None = None,
    exact: bool = False,
    **options: Any,
) -> Any:
    """Check a rig against two eager twins: bitwise where those agree bitwise, else within their distance.

    Args:
        make: Builds the rig on the device; called once for each run.
        captured: How many captures are expected in all; None leaves them, and the replays, to the caller.
        further: How many of them are of further shapes.
        replayed: How many replays are expected, if each capture has two traces; by default all calls but those before
            the first replay.
        exact: Fail if the two eager runs do not agree bitwise.
        options: Passed to ``graph_step``.

    Returns:
        The graphed step and its rig.
    """
    settle_determinism(make)
    twins = []
    for _ in range(2):
        rig = build(make)
        twins.append(drive(rig, oracle(rig)))
    rig = build(make)
    step = managed(rig, **{"backend": BACKEND, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = drive(rig, step)
    if exact:
        assert_same_runs(*twins)
    assert_close_runs(*twins, found)
    stats = step.stats
    calls = len(rig.calls)
    if captured is not None:
        assert stats.captured == captured, str(step.report())
        expected_replays = calls - before_replays(captured, further) if replayed is None else replayed
        assert stats.replayed == expected_replays + saved_traces(stats), str(step.report())
    assert stats.eager + stats.traced + stats.captured + stats.replayed == calls
    return step, rig


def assert_close_runs(first: Record, second: Record, found: Record) -> None:
    """Hold what was found to the first run: bitwise, or within three times the distance of the two eager runs."""
    one, two, three = (flatten(outputs=run.outputs) | run.state for run in (first, second, found))
    try:
        assert_same(one, two)
    except AssertionError:
        assert one.keys() == three.keys()
        spread, distance = _distance(one, two), _distance(one, three)
        assert distance <= 3 * spread, f"{distance} from eager, which is {spread} from itself"
    else:
        assert_same(one, three)


def _distance(left: Mapping[str, Any], right: Mapping[str, Any]) -> float:
    """Largest difference of two records' floating-point values; everything else has to be equal."""
    largest = 0.0
    for path, value in left.items():
        other = right[path]
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            largest = max(largest, (value.double() - other.double()).abs().max().item())
        else:
            assert_same({path: value}, {path: other})
    return largest


def is_healthy() -> None:
    """Fail unless the device still computes and its generator still draws."""
    first, second = (torch.rand(64, device=DEVICE) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.ones(8, device=DEVICE).sum().item() == 8


@contextmanager
def drawing_nothing() -> Iterator[None]:
    """Put the device's generator back after the block."""
    state = torch.cuda.get_rng_state(DEVICE) if CUDA else torch.get_rng_state()
    yield
    torch.cuda.set_rng_state(state, DEVICE) if CUDA else torch.set_rng_state(state)


def assert_frees_cached_memory() -> None:
    """Fail unless the allocator still lets cached blocks go when memory gets tight: it must not while it captures."""
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(DEVICE)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(DEVICE) + 640 * MIB) / total, DEVICE)
    try:
        torch.empty(400 * MIB, dtype=torch.uint8, device=DEVICE)
        torch.empty(560 * MIB, dtype=torch.uint8, device=DEVICE)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
        torch.cuda.empty_cache()


def memory() -> tuple[int, int]:
    """Bytes that tensors have, and bytes that are reserved for them when nothing is cached, not even workspaces."""
    gc.collect()
    if not CUDA:
        return 0, 0
    torch.cuda.synchronize()
    # A capture gives back what some earlier test's eager products took: less would seem to be reserved than before it.
    forget_workspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(DEVICE), torch.cuda.memory_reserved(DEVICE)


def assert_memory_returned(before: tuple[int, int]) -> None:
    """Fail if more is kept than static inputs and generators, which have blocks of 512 bytes in a segment of 2 MiB."""
    allocated, reserved = memory()
    assert allocated <= before[0] + 16 * 512
    assert reserved <= before[1] + 2 * MIB
