"""Steps that no CUDA graph can contain: refused before or during capture, with the process and the state as before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from graphplan import (
    CaptureError,
    FeedError,
    GeneratorSeekError,
    HostScalarError,
    HostSyncError,
    SkipReason,
    TemporaryCopyError,
)
from tests.devices import BACKEND, DEVICE, assert_like_eager, is_healthy, needs_cuda, on_device
from tests.facts import assert_same
from tests.models import CALLS, attributes, updating_rig
from tests.twins import (
    BEFORE_REPLAY,
    LAST_TRACE,
    SECOND_TRACE,
    Record,
    Rig,
    assert_falls_back,
    assert_refused,
    assert_same_runs,
    build,
    by_chance,
    drive,
    line_of,
    managed,
    state_of,
)

CAPTURE = BEFORE_REPLAY - 1
"""The call that captures."""


def rig_of(update: Callable[..., Any], **values: Any) -> Callable[[], Rig]:
    """An MLP's training step (dropout, fused SGD) that calls ``update(model, x, loss)``, on the device."""
    return on_device(partial(updating_rig, update, attributes(**values)))


def captures_still_work() -> None:
    """Another step, dropout included, is captured and equals eager."""
    assert_like_eager(rig_of(lambda model, x, loss: loss * 2))


def read_item(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    str(loss.item())  # culprit


def read_cpu(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return loss.cpu() * 2  # culprit


def read_tolist(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    x[0].tolist()  # culprit


def read_mask(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    x[by_chance(x) > 0].sum()  # culprit


def read_filled(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return x.masked_fill(x > 0, loss.detach()).sum()  # culprit


def read_filled_rows(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return x.index_fill(0, torch.zeros_like(x[:1, 0], dtype=torch.long), loss.detach()).sum()  # culprit


ON_DEVICES = [pytest.param(read, marks=needs_cuda) for read in (read_cpu, read_filled, read_filled_rows)]
READS = [read_item, *ON_DEVICES, read_tolist, read_mask]


def draws_anew(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=torch.Generator(x.device).manual_seed(7), device=x.device)


def begins_again(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=model.generator.manual_seed(7), device=x.device)


@pytest.mark.parametrize("draw", [draws_anew, begins_again], ids=lambda draw: draw.__name__)
def test_a_generator_that_begins_again_is_refused(draw: Callable[..., Any]) -> None:
    """A replay would go on drawing."""
    make = rig_of(draw, generator=lambda: torch.Generator(DEVICE))
    assert_refused(make, GeneratorSeekError, "random operator at", done=SECOND_TRACE, backend=BACKEND)


@pytest.mark.parametrize("read", READS, ids=lambda read: getattr(read, "__name__", ""))
def test_reading_on_the_host_is_refused(read: Callable[..., Any]) -> None:
    """At the first trace, with the source line; afterwards the generator draws and other steps are captured."""
    assert_refused(rig_of(read), HostSyncError, line_of(read), backend=BACKEND)
    is_healthy()
    captures_still_work()


def test_reading_on_the_host_falls_back_to_eager() -> None:
    """One warning, eager's numbers."""
    assert_falls_back(rig_of(read_item), SkipReason.HOST_SYNC, line_of(read_item), backend=BACKEND)


ON_HOST = torch.ones(3)


def copy_from_host(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return loss + ON_HOST.to(x.device).sum()  # culprit


def copy_from_pinned(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return loss + ON_HOST.pin_memory().to(x.device, non_blocking=True).sum()  # culprit


def read_in_backward(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    h = (x.detach() * 2).requires_grad_()
    h.register_hook(lambda grad: grad[by_chance(grad) > 0].sum() + grad)  # culprit
    with torch.enable_grad():
        (h * h).sum().backward()
    return loss


def put_by_mask(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    row = torch.ones(x.shape[1], device=x.device, requires_grad=True)
    with torch.enable_grad():
        h = x.detach() * 2
        h[by_chance(x[:, 0]) > 0] = row  # culprit
        h.sum().backward()
    return loss


def scatter_by_mask(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    rows = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        torch.zeros_like(x).masked_scatter(by_chance(x) > 0, rows).sum().backward()  # culprit
    return loss


@needs_cuda
@pytest.mark.parametrize("read", [read_in_backward, put_by_mask, scatter_by_mask], ids=lambda read: read.__name__)
def test_reading_in_a_thread_of_autograds_is_refused(read: Callable[..., Any]) -> None:
    """By code of the step's in that thread; and where none runs there, and the forward pass has read before."""
    assert_refused(rig_of(read), HostSyncError, line_of(read), backend=BACKEND)
    captures_still_work()


@needs_cuda
@pytest.mark.parametrize("update", [copy_from_host, copy_from_pinned], ids=lambda update: update.__name__)
def test_copies_from_the_host_are_made_again(update: Callable[..., Any]) -> None:
    """Of a tensor that a name leads to."""
    assert_like_eager(rig_of(update))


def copy_trained(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return loss + TRAINED.to(x.device).sum().detach()  # culprit


TRAINED = nn.Parameter(torch.ones(3))


@needs_cuda
def test_copying_what_is_trained_on_the_host_is_refused() -> None:
    """Gradients would flow to it: refused at the first trace, with the source line."""
    assert_refused(rig_of(copy_trained), TemporaryCopyError, line_of(copy_trained), backend=BACKEND)
    assert_falls_back(rig_of(copy_trained), SkipReason.TEMPORARY_COPY, line_of(copy_trained), backend=BACKEND)
    captures_still_work()


def multiply_groups(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    rows = x.new_ones(16, 16, dtype=model.type)
    return loss * functional.grouped_mm(rows, rows.expand(2, 16, 16), offs=model.ends).sum()  # culprit


def _groups_rig(dtype: torch.dtype) -> Callable[[], Rig]:
    return rig_of(multiply_groups, type=dtype, ends=lambda: torch.tensor([8, 16], dtype=torch.int32, device=DEVICE))


@needs_cuda
@pytest.mark.skipif(not hasattr(functional, "grouped_mm"), reason="this torch multiplies no groups")
def test_groups_are_multiplied_in_bfloat16_only() -> None:
    """In other types torch reads on the host where they end."""
    words = [line_of(multiply_groups), "reads the sizes of its groups", "batched_mm"]
    assert_refused(_groups_rig(torch.float32), HostSyncError, *words, backend=BACKEND)
    if torch.cuda.get_device_capability(DEVICE) >= (9, 0):
        assert_like_eager(_groups_rig(torch.bfloat16))


def moving_constant(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return loss * torch.tensor([complex(model.temperature).real], device=x.device)  # culprit


def _halve(model: Any, index: int) -> None:
    model.temperature *= 0.5


def test_a_device_constant_that_changes_is_refused() -> None:
    """``torch.tensor(value, device=...)`` with another value in each step: both values and the line are named."""
    make = on_device(lambda: updating_rig(moving_constant, attributes(temperature=0.5), _halve))
    patterns = [line_of(moving_constant), r"0\.015625", r"0\.0078125"]
    assert_refused(make, HostScalarError, *patterns, done=LAST_TRACE, backend=BACKEND)


@needs_cuda
@pytest.mark.twice
def test_a_host_batch_without_device_is_refused() -> None:
    """A CPU tensor fed to a CUDA step: the argument, both devices and ``device=`` are named."""
    make = on_device(partial(updating_rig, lambda model, x, loss: None, attributes()))
    rig = build(make)
    step = managed(rig, backend=BACKEND)
    drive(rig, step)
    before = state_of(rig)
    x, y = rig.calls[0]
    with pytest.raises(FeedError, match=r"args\[0\].*cpu.*cuda.*device="):
        step(x.cpu(), y)
    assert_same(before, state_of(rig))
    step(x, y)
    assert step.stats.replayed == CALLS + 1 - BEFORE_REPLAY


class _Syncing(torch.autograd.Function):
    """The identity, whose backward waits for the stream where no dispatcher sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        torch.cuda.current_stream().synchronize()
        return grad


class Syncing(nn.Module):
    """A module with that function."""

    def forward(self, x: Tensor) -> Tensor:
        return _Syncing.apply(x)


def hidden_rig(where: str) -> Rig:
    """A step with a host sync that only the driver can refuse, in the backward or at the step's end."""

    def at_the_end(model: nn.Module, x: Tensor, loss: Tensor) -> None:
        if where == "end":
            torch.cuda.current_stream().synchronize()

    rig = updating_rig(at_the_end, attributes())
    if where == "backward":
        # Behind the dropout, so that the capture has drawn random numbers when it fails.
        model = rig.owners["model"]
        model[3] = nn.Sequential(model[3], Syncing())
    return rig


@needs_cuda
@pytest.mark.parametrize("where", ["backward", "end"])
@pytest.mark.twice
def test_a_capture_that_fails_leaves_everything_as_it_was(where: str) -> None:
    """CaptureError at the capturing call, state and generator untouched; eager training goes on from there bitwise."""
    make = on_device(partial(hidden_rig, where))
    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig, backend=BACKEND)
    begun = drive(rig, step, CAPTURE)
    text = r"failed while it was captured, at \w+\.py:\d+ in \w+: `.*`: .*on_failure='eager'"
    with pytest.raises(CaptureError, match=text):
        step(*rig.calls[CAPTURE])
    assert_same(begun.state, state_of(rig))
    rest = drive(replace(rig, calls=rig.calls[CAPTURE:]), rig.step)
    found = Record(begun.outputs + rest.outputs, state_of(rig))
    assert_same_runs(expected, found)
    assert (step.stats.captured, step.stats.replayed) == (0, 0)
    is_healthy()
    captures_still_work()


@needs_cuda
@pytest.mark.parametrize("where", ["backward", "end"])
def test_a_capture_that_fails_falls_back_to_eager(where: str) -> None:
    """One warning, and every batch is trained on once with eager's numbers."""
    assert_falls_back(on_device(partial(hidden_rig, where)), SkipReason.CAPTURE, "captur", backend=BACKEND)
    is_healthy()
    captures_still_work()


def leaves_a_stream_behind(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x * 2


@needs_cuda
@pytest.mark.twice
def test_a_capture_that_cuda_refuses_at_its_end() -> None:
    """Work on a stream that never comes back to the step's own: refused with what CUDA says, and undone."""
    rig = build(rig_of(leaves_a_stream_behind))
    step = managed(rig, backend=BACKEND)
    before = drive(rig, step, CAPTURE).state
    with pytest.raises(
        CaptureError, match=r"CUDA refused the captured step: .*Move that operation out of the step. Or pass on_fai"
    ):
        step(*rig.calls[CAPTURE])
    assert_same(before, state_of(rig))
    is_healthy()
    captures_still_work()


GRAPHS_WITHIN: list[dict[str, Any]] = [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"backend": "cudagraphs"}]


def compiled_rig(how: dict[str, Any]) -> Rig:
    """A training step whose model is compiled in that way."""
    rig = updating_rig(lambda model, x, loss: loss * 2, attributes())
    rig.owners["model"].compile(**how)
    return rig


@needs_cuda
@pytest.mark.parametrize("how", GRAPHS_WITHIN, ids=str)
def test_compiled_code_with_graphs_of_its_own_is_refused(how: dict[str, Any]) -> None:
    """Before anything is traced, and by name."""
    text = r"gave \w+ CUDA graphs of its own .*mode='max-autotune-no-cudagraphs'"
    rig = build(on_device(partial(compiled_rig, how)))
    step = managed(rig, backend=BACKEND)
    drive(rig, step, BEFORE_REPLAY - 3)
    with pytest.raises(CaptureError, match=text):
        step(*rig.calls[BEFORE_REPLAY - 3])
    assert (step.stats.eager, step.stats.traced) == (BEFORE_REPLAY - 3, 0)
    is_healthy()


@needs_cuda
def test_a_tensor_that_stays_on_the_host_is_refused() -> None:
    """A number in a CPU tensor, which kernels take as an argument: a sum or a product with it is made again, another
    operator is refused with both devices and the line.
    """

    def scaled(model: Any, x: Tensor, loss: Tensor) -> Tensor:
        return loss.detach() * model.box["scale"] + model.box["scale"]

    def raised(model: Any, x: Tensor, loss: Tensor) -> Tensor:
        return loss.detach().pow(model.box["scale"])  # culprit

    def make(update: Callable[..., Any]) -> Rig:
        rig = rig_of(update)()
        rig.owners["model"].box = {"scale": torch.tensor(2.0)}
        return rig

    assert_like_eager(partial(make, scaled))
    text = rf"computes on cuda:0 with a tensor in host memory at {line_of(raised)}.*Move it to the device"
    assert_refused(partial(make, raised), TemporaryCopyError, text, backend=BACKEND)


class Crash(Exception):
    """What a user's step raises."""


@pytest.mark.twice
def test_an_error_of_the_user_in_the_capturing_call() -> None:
    """The user's own exception comes out as it is, nothing of the call has happened, and the next call is captured."""
    armed = {"calls": 0}

    def crash(model: nn.Module, x: Tensor, loss: Tensor) -> None:
        armed["calls"] += 1
        if armed["calls"] == BEFORE_REPLAY:
            raise Crash("of the user")

    make = rig_of(crash)
    rig = build(make)
    step = managed(rig, backend=BACKEND, allow=("armed",))
    drive(rig, step, CAPTURE)
    before = state_of(rig)
    with pytest.raises((Crash, CaptureError), match="of the user"):
        step(*rig.calls[CAPTURE])
    assert_same(before, state_of(rig))
    is_healthy()
    captures_still_work()
