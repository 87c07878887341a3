"""The rows of docs/failure-modes.md in which a CUDA graph can differ from the tape."""

from __future__ import annotations

import copy
import gc
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, AdamW, RMSprop

from graphplan import HostSyncError
from tests.devices import BACKEND, CUDA, DEVICE, assert_like_eager, is_healthy, needs_cuda, on_device, oracle
from tests.failure_modes.naive import PLAIN, WHEN, changing_rig, loss_of, stay
from tests.failure_modes.test_rows_05_08 import scaled_rig
from tests.failure_modes.test_rows_23_29 import accumulating_rig
from tests.models import Memory, float_batches
from tests.program.test_lost_memory import LOSSES, REPLAYED, losing_rig
from tests.twins import Rig, assert_same_runs, build, drive, managed


def on_gpu(*args: Any, **options: Any) -> Callable[[], Rig]:
    """A usual step on the device, with a change after call ``WHEN``."""
    return on_device(partial(changing_rig, *args, **options))


def assert_follows(make: Callable[[], Rig]) -> None:
    """Fail unless a run with a change equals its eager twin; a capture may be made anew."""
    expected = build(make)
    eager = drive(expected, oracle(expected))
    rig = build(make)
    step = managed(rig, backend=BACKEND)
    found = drive(rig, step)
    torch.testing.assert_close(found.outputs, eager.outputs, rtol=1e-5, atol=1e-6)
    assert step.stats.replayed >= WHEN - 5


def _loaded(model: Any, optimizer: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for moments in state["state"].values():
        moments["exp_avg"].mul_(0.1)
    state["param_groups"][0].update(lr=0.1, weight_decay=0.5)
    optimizer.load_state_dict(state)


def _lr(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.1


def _data(model: Any, optimizer: Any) -> None:
    model[0].weight.data = model[0].weight.data * 0.5


def _assign(model: Any, optimizer: Any) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def _freeze(model: Any, optimizer: Any) -> None:
    model[0].weight.requires_grad_(False)


CHANGES = {
    "test_row_01": _loaded,
    "test_row_04": _lr,
    "test_row_15 data": _data,
    "test_row_15 assign": _assign,
    "test_row_16": _freeze,
}


@pytest.mark.parametrize("name", CHANGES)
def test_row_01_to_16_changes_between_calls(name: str) -> None:
    """Addresses that a graph holds are followed, copied into, or captured anew."""
    assert_follows(on_gpu(CHANGES[name]))


@pytest.mark.parametrize("name", LOSSES)
def test_row_25_memory_that_was_given_back(name: str) -> None:
    """A graph would read and write where something else lies by now."""
    step, _ = assert_like_eager(on_device(partial(losing_rig, name)), captured=2, replayed=REPLAYED)
    (event,) = [event for event in step.stats.events if "recapture" in event]
    assert re.search(LOSSES[name][1], event)


OPTIMIZERS = {
    "adamw": partial(AdamW, lr=1e-2),
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "rmsprop": partial(RMSprop, lr=1e-3),
    "adagrad": partial(Adagrad, lr=1e-2, fused=None),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_row_03_float_lr(name: str) -> None:
    """A device learning rate where the kernel takes one, a new capture where not."""
    if name == "adagrad" and CUDA:
        pytest.skip("torch keeps Adagrad's step counter on the host: refused, see tests/gpu/test_refusals.py")
    assert_follows(on_gpu(_lr, make_optimizer=OPTIMIZERS[name]))


def test_row_06_optimizer_state_is_made_before_the_trace() -> None:
    """One eager step is enough."""
    assert_like_eager(on_gpu(stay), warmup_steps=1, replayed=24 - 4)


def test_row_07_the_whole_scaled_step() -> None:
    """Unscale, clip, step and update inside; the overflowing batch is skipped on the device."""
    assert_like_eager(on_device(partial(scaled_rig, device=DEVICE.type)))


@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.twice
def test_row_09_smaller_last_batch(size: int) -> None:
    """Never broadcast, never padded: eager until it has a program."""
    calls = [(x[:size], y[:size]) if index > 21 else (x, y) for index, (x, y) in enumerate(float_batches(24))]
    assert_like_eager(on_gpu(stay, calls=calls), replayed=16)


def test_row_20_random_numbers_of_warm_up_and_capture() -> None:
    """The device's generator is where eager leaves it, replay by replay."""
    assert_like_eager(on_gpu(stay))


def _reads(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(model, x, y)
    return loss * 2 if complex(loss.detach()).real > 100 else loss


def _stages(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(model, x * torch.rand(8).to(x.device), y)


def test_row_23_host_memory_in_the_step() -> None:
    """Refused by line before any capture, and the device is none the worse."""
    rig = build(on_gpu(stay, _reads))
    with pytest.raises(HostSyncError, match=r"test_failure_modes\.py:\d+.*eager_if"):
        drive(rig, managed(rig, backend=BACKEND))
    is_healthy()


def test_row_24_a_temporary_tensor_on_the_host() -> None:
    """Drawn again, and copied, before each replay."""
    assert_like_eager(on_gpu(stay, _stages))


def test_row_25_external_tensor_is_kept_alive() -> None:
    """What only the graph still needs is not handed to another tensor."""

    def make() -> Rig:
        rig = PLAIN()
        inner, box = rig.step, Memory(scale=torch.full((8,), 1.5, device=DEVICE))
        scale = box.scale
        rig.step = lambda x, y: inner(x * scale, y)
        return rig

    def forgetful() -> Rig:
        rig = on_device(make)()
        rig.after = lambda index: _churn()
        return rig

    assert_like_eager(forgetful)


def _churn() -> None:
    gc.collect()
    for size in (8, 16, 64):
        torch.full((size,), float("nan"), device=DEVICE)


def test_row_26_gradients_set_to_none() -> None:
    """Dropped between two calls, there again after the next one."""
    drop = lambda model, optimizer, index: optimizer.zero_grad() if index % 4 == 3 else None  # noqa: E731
    assert_follows(on_gpu(stay, each=drop))


def test_row_27_and_28_accumulated_micro_batches() -> None:
    """Two programs over the same gradients; none is lost and none counted twice."""
    assert_like_eager(on_device(partial(accumulating_rig, set_to_none=False)), captured=2, replayed=48)


def test_row_29_results_are_the_callers() -> None:
    """Losses kept from earlier calls stay what they were."""
    rig = build(on_gpu(stay))
    expected = [loss.item() for loss in drive(rig, oracle(rig)).outputs]
    rig = build(on_gpu(stay))
    step = managed(rig, backend=BACKEND)
    kept = [step(*args).detach() for args in rig.calls]
    assert [loss.item() for loss in kept] == pytest.approx(expected, rel=1e-5)


def test_row_32_the_caller_reuses_its_batch() -> None:
    """The caller overwrites its tensor right after the call: copies and replays are ordered on its stream."""
    rig = build(on_gpu(stay))
    expected = drive(rig, oracle(rig)).outputs
    rig = build(on_gpu(stay))
    step = managed(rig, backend=BACKEND)
    x, y = (torch.empty_like(part) for part in rig.calls[0])
    found = []
    for args in rig.calls:
        x.copy_(args[0])
        y.copy_(args[1])
        found.append(step(x, y).detach())
        x.fill_(float("nan"))
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-5, atol=1e-6)


def _while_another_thread(work: Callable[[], object], body: Callable[[], object]) -> list[RuntimeError]:
    """Run ``body`` while another thread repeats ``work`` until that fails; how it failed."""
    stop, errors = threading.Event(), list[RuntimeError]()

    def repeat() -> None:
        try:
            while not stop.is_set():
                work()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        body()
    finally:
        stop.set()
        thread.join()
    return errors


@needs_cuda
def test_row_33_another_thread_pins_and_copies_during_the_capture() -> None:
    """Pinning allocates through the driver, which a capture in global mode would not survive."""

    def work() -> None:
        torch.empty(1 << 16).pin_memory().to(DEVICE, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    assert not _while_another_thread(work, lambda: assert_like_eager(on_gpu(stay)))


@needs_cuda
@pytest.mark.filterwarnings("ignore:graphplan runs this step eagerly")
def test_row_33_another_thread_waits_for_the_whole_device() -> None:
    """CUDA forbids that during a capture, and gives the capture up: refused, and the run goes on eagerly."""
    twin = build(on_gpu(stay))
    expected = drive(twin, oracle(twin))
    rig = build(on_gpu(stay))
    step = managed(rig, backend=BACKEND, on_failure="eager")
    _while_another_thread(torch.cuda.synchronize, lambda: assert_same_runs(expected, drive(rig, step)))
    is_healthy()


@needs_cuda
@pytest.mark.twice
def test_row_36_graphs_go_before_the_process_group(tmp_path: Any) -> None:
    """NCCL waits for graphs that hold its kernels: ``close`` comes first, and the group goes without hanging."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        rig = build(on_gpu(stay))
        step = managed(rig, backend=BACKEND)
        drive(rig, step)
        assert step.stats.replayed == 18
        step.close()
    finally:
        torch.distributed.destroy_process_group()
    is_healthy()
