"""Rows 30 to 38 in a plain loop: hooks, streams and threads, caches, exceptions, endings, what is left set."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore

from graphplan import ClosedError, NotCapturedError, compile_cached
from graphplan.backends.tape import TapeRecording
from tests.facts import assert_same, flatten
from tests.failure_modes.naive import (
    PLAIN,
    assert_change_handled,
    assert_handled,
    changing_rig,
    loss_of,
    naive,
    run_eagerly,
    stay,
)
from tests.models import Memory, float_batches
from tests.twins import Rig, assert_same_runs, build, drive, managed


def _zero(optimizer: Any, args: Any, kwargs: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.zero_()


def _zero_one(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.zero_()


HOOKS: dict[str, Callable[[Any, Any], object]] = {
    "forward": lambda model, opt: model[0].register_forward_hook(lambda module, args, out: 2 * out),
    "forward pre": lambda model, opt: model[0].register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "tensor": lambda model, opt: model[4].weight.register_hook(lambda grad: 0 * grad),
    "accumulated": lambda model, opt: model[4].weight.register_post_accumulate_grad_hook(_zero_one),
    "optimizer": lambda model, opt: opt.register_step_pre_hook(_zero),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_row_30_hook_registered_after_the_capture(kind: str) -> None:
    """torch's own hooks run inside the step: a new one makes another step."""
    assert_change_handled(HOOKS[kind])


def listing_rig(owned: bool) -> Rig:
    """A step that appends its loss to a list, which an owner holds or not."""
    rig, history = changing_rig(stay), Memory(losses=[])
    inner = rig.step

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = inner(x, y)
        history.losses.append(loss.detach())
        return loss

    rig.step = train_step
    (rig.owners if owned else rig.extra)["history"] = history
    return rig


@pytest.mark.parametrize("owned", [True, False])
def test_row_30_host_code_that_stops(owned: bool) -> None:
    """A list that every step appends to goes on growing."""
    assert_handled(partial(listing_rig, owned))


@pytest.mark.twice
def test_row_31_a_batch_is_read_once_and_left_alone() -> None:
    """An iterator gives each batch once, in order; none is fetched ahead, held back or written to."""
    batches = float_batches(24)
    copies = [(x.clone(), y.clone()) for x, y in batches]
    rig = build(partial(changing_rig, stay, calls=batches))
    step, fetched = managed(rig), itertools.count()
    for number, (x, y) in enumerate(batches):
        assert next(fetched) == number
        step(x, y)
    assert step.stats.replayed == 18
    assert_same(flatten(batches=copies), flatten(batches=batches))


@pytest.mark.twice
def test_row_32_the_caller_reuses_its_batch() -> None:
    """The next batch is written into the same tensor as soon as the call returns (a loader with one buffer)."""
    expected = run_eagerly(PLAIN).outputs
    rig = build(PLAIN)
    step = managed(rig)
    x, y = (torch.empty_like(part) for part in rig.calls[0])
    for args, loss in zip(rig.calls, expected, strict=True):
        x.copy_(args[0])
        y.copy_(args[1])
        found = step(x, y)
        x.fill_(float("nan"))
        assert torch.equal(found.detach(), loss)
    assert step.stats.replayed == 18


def test_row_33_another_thread_computes_during_the_capture() -> None:
    """A loader's thread copies and pins while a step is traced and captured: nothing of it is recorded."""
    expected, stop = run_eagerly(PLAIN), threading.Event()
    buffer = torch.zeros(64)

    def work() -> None:
        while not stop.is_set():
            buffer.add_(torch.ones(64).numpy().mean().item())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        rig = build(PLAIN)
        step = managed(rig)
        assert_same_runs(expected, drive(rig, step))
    finally:
        stop.set()
        thread.join()
    assert step.stats.captured == 1
    assert not [e for e in step.plan.externals if e.spec.shape == (64,)]


def test_row_34_two_models_of_one_class() -> None:
    """One training function, two models: each has its own programs, and a cache by name would mix them up."""
    rigs = [build(PLAIN) for _ in range(4)]
    with torch.no_grad():
        for rig in rigs[1::2]:
            rig.owners["model"][0].weight.mul_(0.5)
    steps = [managed(rig) for rig in rigs[:2]]
    torch.manual_seed(0)
    found = [[step(*args) for step in steps] for args in rigs[0].calls]
    torch.manual_seed(0)
    expected = [[rig.step(*args).detach() for rig in rigs[2:]] for args in rigs[0].calls]
    assert_same(flatten(losses=expected), flatten(losses=[[loss.detach() for loss in pair] for pair in found]))
    by_name: dict[str, Any] = {}
    shared = [by_name.setdefault(type(rig.owners["model"]).__name__, naive(rig.step)) for rig in rigs[:2]]
    assert shared[0] is shared[1]


class Scorer:
    """Something with a method, of which many instances come and go."""

    def __init__(self, weight: float) -> None:
        self.layer = nn.Linear(2, 1, bias=False)
        nn.init.constant_(self.layer.weight, weight)

    def score(self, x: Tensor) -> Tensor:
        """The layer's output."""
        return self.layer(x)


def test_row_34_identities_that_are_reused() -> None:
    """A plan is found by the living object, not by its ``id``: none outlives its owner, none is shared."""
    plans = []
    for number in range(20):
        scorer = Scorer(float(number))
        plan = compile_cached(scorer.score, torch.ones(1, 2), owners={"layer": scorer.layer})
        assert compile_cached(scorer.score, torch.ones(1, 2), owners={"layer": scorer.layer}) is plan
        assert all(plan is not other for other in plans)
        plans.append(plan)
        del scorer
        gc.collect()


class Mine(Exception):
    """Raised by a step in here."""


@pytest.mark.parametrize("at", [1, 3, 4, 5])
def test_row_35_exception_in_the_step(at: int) -> None:
    """In warm-up, trace or capture: it comes out, nothing stays patched, and the run goes on as eager's would."""
    now: list[int] = []

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        if now and now[-1] == at:
            raise Mine("from the step")
        return loss_of(model, x, y)

    records = []
    for wrap in (lambda rig: rig.step, partial(managed, allow=("now",))):
        rig = build(partial(changing_rig, stay, loss))
        step, outputs = wrap(rig), []
        for index, args in enumerate(rig.calls):
            now[:] = [index]
            if index == at:
                with pytest.raises(Mine, match="from the step"):
                    step(*args)
                continue
            outputs.append(step(*args).detach().clone())
        assert gc.isenabled()
        records.append((outputs, rig))
    assert len(records[0][0]) == len(records[1][0]) == 23
    assert records[1][0][-1].isfinite()
    assert_same(flatten(losses=records[0][0]), flatten(losses=records[1][0]))


@pytest.mark.twice
def test_row_36_recordings_go_before_the_process_group() -> None:
    """``close`` gives up every recording, so that none is alive when the process group is destroyed."""
    before = {id(thing) for thing in gc.get_objects() if type(thing) is TapeRecording}
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        rig = build(PLAIN)
        step = managed(rig)
        drive(rig, step)
        assert step.stats.replayed == 18
        recordings = [thing for thing in gc.get_objects() if type(thing) is TapeRecording and thing._runs]
        recordings = [thing for thing in recordings if id(thing) not in before]
        assert recordings
        step.close()
        assert not [recording for recording in recordings if recording._runs is not None]
        with pytest.raises(ClosedError, match="was closed"):
            step(*rig.calls[0])
    finally:
        torch.distributed.destroy_process_group()


def test_row_37_capture_never_engaged() -> None:
    """A batch of another length each time never repeats a signature: after a while that is an error."""
    calls = [(torch.randn(2 + index, 8), torch.zeros(2 + index, dtype=torch.long)) for index in range(120)]
    rig = build(partial(changing_rig, stay, calls=calls))
    step = managed(rig)
    with pytest.raises(NotCapturedError, match="shape"):
        drive(rig, step)


def test_row_37_what_was_replayed_is_counted() -> None:
    """The report says what was replayed; ``eager_if`` for every call is seen there too."""
    rig = build(PLAIN)
    step = managed(rig, eager_if=1)
    drive(rig, step)
    assert (step.stats.eager, step.stats.replayed) == (24, 0)
    assert sum(step.stats.skipped.values()) == 24


def _evaluate(model: Any, optimizer: Any, index: int) -> None:
    model(torch.ones(2, 8))
    model.eval()


def test_row_38_what_the_step_sets_is_left() -> None:
    """The step trains, and leaves the model so, whoever evaluates in between."""

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        model.train()
        return loss_of(model, x, y)

    step = assert_handled(partial(changing_rig, stay, loss, each=_evaluate), control=partial(changing_rig, stay, loss))
    assert set(step.plan.left) == {"model.training", *(f"model.{number}.training" for number in range(5))}
