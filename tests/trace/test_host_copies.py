"""Copies to the host, ``tensor.cpu()``, that a step only keeps, logs or returns: made after each replay.

On the CPU, where they would copy nothing, the rules of a CUDA device apply to the traced code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphplan import HostSyncError, compile_plan, graphed
from graphplan.check.run import cuda_rules
from graphplan.tensors.deferred import HostCopy
from graphplan.trace.deferred_reads import DeferredReads
from graphplan.trace.operator_schemas import AS_ON_DEVICE
from tests.lightning.parts import assert_fit_equals_eager, with_step
from tests.models import keeping_rig
from tests.twins import Rig, assert_refused, build, drive, line_of, managed

CALLS = 14
Body = Callable[[Any, Tensor, Tensor], Any]
HIDDEN: list[Any] = []


@pytest.fixture(autouse=True)
def cuda(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have copies by name be copies between devices."""
    HIDDEN.clear()
    if request.config.getoption("--device") == "cuda":
        yield
        return
    with cuda_rules():
        yield


def rig_of(body: Body) -> Rig:
    """A training step that returns what ``body(model, loss, scores)`` does."""

    def scored(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Any:
        return body(model, loss, scores)

    return keeping_rig(
        scored, CALLS, history=[], recent=deque(maxlen=3), by_name={"scores": []}, last=torch.zeros(6, 3)
    )


def returns(model: Any, loss: Tensor, scores: Tensor) -> Any:
    return loss.detach().cpu()


def returns_several(model: Any, loss: Tensor, scores: Tensor) -> Any:
    guess = scores.argmax(1)
    return {"loss": loss.detach(), "n": loss.item(), "all": (guess.cpu(), [guess.to("cpu"), scores.detach().cpu()])}


def moves(model: Any, loss: Tensor, scores: Tensor) -> Any:
    kept = scores.detach().to(device="cpu", copy=True)
    return (
        kept.flatten(),
        kept.view(3, 6),
        kept.unsqueeze(0).squeeze(),
        kept.permute(1, 0),
        len(kept),
        kept.cpu().clone(),
    )


def asks(model: Any, loss: Tensor, scores: Tensor) -> Any:
    kept = scores.detach().cpu()
    return kept if kept.shape[0] == 6 and kept.device.type == "cpu" and kept.is_floating_point() else None


def detaches_last(model: Any, loss: Tensor, scores: Tensor) -> Any:
    model.history.append(scores.cpu().detach())
    return loss.cpu().detach().item()


def appends(model: Any, loss: Tensor, scores: Tensor) -> Any:
    model.history.append((loss.detach().cpu(), {"scores": scores.detach().cpu()}, 1))
    model.recent.append(scores.detach().argmax(1).cpu())
    model.by_name["scores"].append(scores.detach().cpu())


def appends_what_it_returns(model: Any, loss: Tensor, scores: Tensor) -> Any:
    kept = scores.detach().cpu()
    model.history.append(kept)
    return kept


def makes_arrays(model: Any, loss: Tensor, scores: Tensor) -> Any:
    model.history.append(scores.argmax(1).cpu().numpy())
    model.by_name["scores"].append({"scores": scores.detach().cpu().numpy(), "loss": loss.item()})
    return loss.detach().cpu().numpy(), scores.detach().cpu().flatten().numpy(force=True)


def asks_what_it_is(model: Any, loss: Tensor, scores: Tensor) -> Any:
    kept = scores.detach().cpu()
    return kept, kept.contiguous() is kept, kept.cpu() is kept


def writes_later(model: Any, loss: Tensor, scores: Tensor) -> Any:
    total = scores.detach().clone()
    before = total.to("cpu", copy=True)
    total += 1
    return before, total.cpu()


@pytest.mark.parametrize(
    "body",
    [
        returns,
        returns_several,
        moves,
        asks,
        detaches_last,
        appends,
        appends_what_it_returns,
        makes_arrays,
        asks_what_it_is,
        writes_later,
    ],
)
def test_copies_that_are_only_kept_are_made_after_replays(body: Body, equals_eager: Callable[..., Any]) -> None:
    """Everything that eager steps return and leave, of the same kinds."""
    step = equals_eager(partial(rig_of, body))
    assert step.plan.defers


def test_copies_lie_on_the_host(device: torch.device, backend: str) -> None:
    """As plain tensors, each call with memory of its own."""
    rig = build(partial(rig_of, appends_what_it_returns))
    rig.owners["model"].to(device)
    rig.calls = [tuple(leaf.to(device) for leaf in call) for call in rig.calls]
    step = managed(rig, backend=backend, min_speedup=0.0)
    found = [step(*call) for call in rig.calls]
    kept = rig.owners["model"].history
    assert step.stats.replayed == CALLS - 6
    assert {(type(each), each.device.type) for each in (*found, *kept)} == {(Tensor, "cpu")}
    assert len({each.data_ptr() for each in found}) == CALLS
    assert all(map(torch.equal, found, kept))


def test_predictions_are_copied_to_the_host(device: torch.device, backend: str) -> None:
    """``graphed``, with results of its own and with lent ones."""
    layer = nn.Linear(8, 3).to(device)
    for outputs in ("clone", "static"):
        fast = graphed(lambda x: (layer(x), layer(x).argmax(1).cpu()), backend=backend, outputs=outputs)
        for _ in range(8):
            x = torch.randn(6, 8, device=device)
            with torch.no_grad():
                (scores, guess), expected = fast(x), layer(x)
            assert guess.device.type == "cpu"
            assert torch.equal(guess, expected.argmax(1).cpu())
            assert torch.allclose(scores.clone(), expected)
        assert fast.stats.replayed > 0


def test_one_copy_in_several_places_is_one_tensor() -> None:
    """What the caller writes to one is in the other."""

    def body(model: Any, loss: Tensor, scores: Tensor) -> Any:
        kept, number = scores.detach().cpu(), loss.item()
        return kept, {"again": kept, "other": scores.detach().cpu()}, number, number

    rig = build(partial(rig_of, body))
    step = managed(rig)
    for call in rig.calls:
        kept, named, *numbers = step(*call)
        assert kept is named["again"]
        assert kept is not named["other"]
        assert numbers[0] == numbers[1]
    assert step.stats.replayed > 0


def computes(model: Any, loss: Tensor, scores: Tensor) -> Any:
    return scores.detach().cpu().sum()  # culprit


def decides(model: Any, loss: Tensor, scores: Tensor) -> Any:
    kept = loss.detach().cpu()
    return kept if kept > 0 else loss  # culprit


def needs_a_gradient(model: Any, loss: Tensor, scores: Tensor) -> Any:
    return scores.cpu().mean().detach()  # culprit


def makes_an_array(model: Any, loss: Tensor, scores: Tensor) -> Any:
    return torch.from_numpy(scores.detach().cpu().numpy())  # culprit


def computes_with_an_array(model: Any, loss: Tensor, scores: Tensor) -> Any:
    return torch.as_tensor(-scores.detach().cpu().numpy() + 1)  # culprit


def gives_it_to_numpy(model: Any, loss: Tensor, scores: Tensor) -> Any:
    return float(np.asarray(scores.detach().cpu()).sum())  # culprit


def writes_to_a_view(model: Any, loss: Tensor, scores: Tensor) -> Any:
    kept = scores.detach().cpu()
    flat = kept.view(-1)
    kept.add_(1)  # culprit
    return flat


def sets_an_attribute(model: Any, loss: Tensor, scores: Tensor) -> Any:
    model.last = scores.detach().cpu()  # culprit


def hides_it(model: Any, loss: Tensor, scores: Tensor) -> Any:
    holder = type("Holder", (), {"__slots__": ("value",)})()
    holder.value = scores.detach().cpu()  # culprit
    HIDDEN[:] = [holder]


def sets_data(model: Any, loss: Tensor, scores: Tensor) -> Any:
    model.last.data = scores.detach().cpu()  # culprit


def keeps_an_array(model: Any, loss: Tensor, scores: Tensor) -> Any:
    model.last = scores.detach().cpu().numpy()  # culprit


def has_no_array(model: Any, loss: Tensor, scores: Tensor) -> Any:
    try:
        return scores.detach().bfloat16().cpu().numpy()
    except TypeError:
        return scores.detach().cpu().sum()  # culprit


def has_another_dtype(model: Any, loss: Tensor, scores: Tensor) -> Any:
    return torch.as_tensor(loss.detach().cpu(), dtype=torch.float64)  # culprit


def is_trained_through(model: Any, loss: Tensor, scores: Tensor) -> Any:
    model.layer.bias.grad = None
    torch.autograd.backward(model.layer(torch.ones(2, 8)).sum().cpu())  # culprit
    return model.layer.bias.grad.clone()


def asks_for_its_graph(model: Any, loss: Tensor, scores: Tensor) -> Any:
    return loss.detach() if scores.cpu().requires_grad else None  # culprit


def gives_it_an_attribute(model: Any, loss: Tensor, scores: Tensor) -> Any:
    kept: Any = scores.detach().cpu()  # culprit
    kept.tag = "scores"
    return kept


def indexes_an_array(model: Any, loss: Tensor, scores: Tensor) -> Any:
    found = scores.detach().cpu().numpy()  # culprit
    try:
        return [len(found), float(found[0, 0]), *(float(row[0]) for row in found), found[0, 1] in found]
    except TypeError:
        return None


NEEDS = [
    computes, decides, needs_a_gradient, makes_an_array, computes_with_an_array, gives_it_to_numpy, writes_to_a_view,
    sets_an_attribute, keeps_an_array, has_no_array, has_another_dtype, is_trained_through, asks_for_its_graph,
    gives_it_an_attribute, indexes_an_array, sets_data,
]  # fmt: skip


UNDONE = [
    makes_an_array, computes_with_an_array, sets_an_attribute, keeps_an_array, has_another_dtype, is_trained_through,
    gives_it_an_attribute, indexes_an_array, sets_data,
]  # fmt: skip


@pytest.mark.parametrize("body", NEEDS)
def test_values_that_code_needs_are_refused(body: Body) -> None:
    """The step is refused where the value is needed, and its eager calls go on as they would."""
    # What is kept elsewhere, and arrays that code has had, undo the call: others are traced.
    done = 5 if body in UNDONE else 3
    assert_refused(partial(rig_of, body), HostSyncError, "host", line_of(body), done=done)


@pytest.mark.parametrize("body", [*NEEDS, hides_it])
def test_refused_calls_are_eager_ones(body: Body) -> None:
    """What a traced call has deferred is made good before anyone sees it."""
    rig = build(partial(rig_of, body))
    expected = drive(rig, rig.step)
    rig = build(partial(rig_of, body))
    step = managed(rig, on_failure="eager")
    with pytest.warns(UserWarning, match="host"):
        found = drive(rig, step)
    for old, new in zip(expected.outputs, found.outputs, strict=True):
        assert old is new is None or torch.equal(torch.as_tensor(old), torch.as_tensor(new))
    assert step.stats.replayed == 0
    kept = HIDDEN[0].value if HIDDEN else rig.owners["model"].last
    assert type(kept) is not HostCopy


def test_a_plan_of_one_function_has_copies() -> None:
    """``compile_plan`` says what is read."""
    plan = compile_plan(lambda x: (x + 1).cpu(), torch.ones(3))
    assert [output.kind for output in plan.outputs] == ["read"]


def logs(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    self.log("loss", loss.detach().cpu(), on_step=True, on_epoch=True)
    self.kept.append(self.net(batch[0]).argmax(1).detach().cpu())
    return {"loss": loss, "guess": loss.detach().cpu()}


def test_a_fit_keeps_and_logs_copies(tmp_path: Path) -> None:
    """``self.log`` of a copy, a list of predictions, and what a step returns beside its loss."""

    def starts(self: Any) -> None:
        self.kept = []

    def ends(self: Any) -> None:
        self.log("guesses", torch.cat(self.kept).float().mean())
        self.kept.clear()

    kind = with_step(logs, on_train_epoch_start=starts, on_train_epoch_end=ends)
    found = assert_fit_equals_eager(kind, tmp_path, replayed=4)
    assert found.callback.stats.captured == 1


def test_it_is_remembered_that_a_copy_was_deferred_until_code_needed_it() -> None:
    """A capture has to read where the traces did."""
    token = AS_ON_DEVICE.set(True)
    try:
        with DeferredReads() as reads:
            assert not reads
            assert torch.ones(3).cpu().sum() == 3
        assert reads
        assert reads.are_over()
    finally:
        AS_ON_DEVICE.reset(token)
