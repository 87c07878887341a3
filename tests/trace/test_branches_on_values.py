"""Branches on values of the device: a replay reads the value where the step does, and is an eager step if it is another
one than in the traces.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from graphplan import (
    GuardError,
    HostSyncError,
    OutcomeError,
    Policy,
    SkipReason,
    capture,
    compile_plan,
    graph_step,
    graphed,
)
from tests.devices import on_device
from tests.facts import assert_same
from tests.models import Box
from tests.twins import (
    BEFORE_REPLAY,
    Rig,
    assert_refused,
    assert_same_as_eager,
    assert_same_runs,
    build,
    by_chance,
    drive,
    line_of,
    state_of,
)

CALLS = 16
Body = Callable[..., Any]


class Model(nn.Module):
    """A classifier with batch statistics and dropout, which counts what its steps do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(F.relu(self.norm(self.first(x)))))


def skips_large(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Skips the update of a batch with a large loss, after its statistics were taken in."""
    optimizer.zero_grad(set_to_none=False)
    loss = F.cross_entropy(model(x), y)
    model.seen += loss.detach()
    if loss > 50:  # culprit
        return loss.detach() * 0
    loss.backward()
    optimizer.step()
    return loss.detach()


def counts(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Counts its calls in Python."""
    model.steps += 1
    return skips_large(model, optimizer, x, y)


def skips_twice(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Branches before the update and after it."""
    loss = skips_large(model, optimizer, x, y)
    with torch.no_grad():
        if model.last.weight.abs().max() > 1e3:
            model.last.weight.clamp_(-1, 1)
    return loss


def checkpoints(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Saves the generator's state, and puts it back in the backward pass."""
    optimizer.zero_grad()
    loss = F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)
    if loss > 50:
        return loss.detach() * 0
    loss.backward()
    optimizer.step()
    return loss.detach() + model.dropout(torch.ones((), device=x.device))


def clips(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Looks at the gradients between the backward pass and the update."""
    optimizer.zero_grad(set_to_none=False)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
    if norm > 1e3:
        for param in model.parameters():
            param.grad.mul_(0)
    optimizer.step()
    return loss.detach(), norm


def skips_what_is_left(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Asks whether numbers are zero: one of ``.item()``, a tensor of one float, and a count."""
    optimizer.zero_grad(set_to_none=False)
    loss = F.cross_entropy(model(x), y)
    model.seen += loss.detach()
    excess = F.relu(loss - 50)
    if excess.item() or not model.seen + 1 or excess or loss.isnan().sum().item():  # culprit
        return loss.detach() * 0
    loss.backward()
    optimizer.step()
    return loss.detach()


def skips_what_differs(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Compares tensors with each other."""
    optimizer.zero_grad(set_to_none=False)
    loss = F.cross_entropy(model(x), y)
    model.seen += loss.detach()
    if not torch.equal(loss, loss.clamp(max=50)):  # culprit
        return loss.detach() * 0
    loss.backward()
    optimizer.step()
    return loss.detach()


def keeps_highest(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Keeps the highest loss so far, and compares the next ones with it."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if loss.item() > model.highest:
        model.highest = loss.item() + 1
    return loss.detach()


def compares_with_limit(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Leaves out the update of a loss above a limit that is another one in each step."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    model.steps += 1
    if 30 + 1 / model.steps < loss.item():
        return loss.detach()
    loss.backward()
    optimizer.step()
    return loss.detach()


def warms_up(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Looks at a counter, and counts it up afterwards: the look cannot be taken before the step."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if model.seen < 3:
        loss = loss * 0.5
    model.seen += 1
    loss.backward()
    optimizer.step()
    return loss.detach()


def rig_of(body: Body, odd: Sequence[int] = (), calls: int = CALLS) -> Callable[[], Rig]:
    """Makes a training step of ``body``, in which batches of the ``odd`` calls take the other branch."""

    def make() -> Rig:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)

        def step(*args: Any) -> Any:
            return body(model, optimizer, *args)

        with torch.no_grad():
            model.last.weight[0] = 40.0
        batches = [(torch.randn(12, 8), torch.zeros(12, dtype=torch.int64)) for _ in range(calls)]
        for number in odd:
            # Far from what its first row leads to.
            batches[number] = (batches[number][0], torch.ones(12, dtype=torch.int64))
        return Rig(step, {"model": model, "optimizer": optimizer}, batches)

    return make


def both(make: Callable[[], Rig], backend: str, **options: Any) -> Any:
    """Compare a rig with its eager twin on the device. Returns the graphed step."""
    make = on_device(make)
    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = graph_step(rig.step, owners=rig.owners, backend=backend, **options)
    assert_same_runs(expected, drive(rig, step))
    return step


@pytest.mark.parametrize("body", [skips_large, counts, skips_twice, checkpoints, clips])
def test_a_branch_is_replayed(body: Body, backend: str) -> None:
    step = both(rig_of(body), backend)
    assert step.stats.replayed == CALLS - BEFORE_REPLAY
    assert step.plan.branches


@pytest.mark.parametrize("body", [skips_large, counts, skips_twice, checkpoints])
@pytest.mark.parametrize("odd", [(10,), (6,), (7, 12), (5,), (5, 6)], ids=str)
def test_the_other_branch_is_eager(body: Body, odd: tuple[int, ...], backend: str) -> None:
    """Of call 5, which is captured; 6 and 7, which are checked; and of others."""
    step = both(rig_of(body, odd), backend)
    stats = step.stats
    # The next call of the other branch may be traced, where the first one was to be captured.
    assert stats.skipped[SkipReason.HOST_SYNC] >= len(odd) - (odd == (5, 6))
    assert (stats.captured, stats.recaptured) == (1, 0)
    # A plan from before another call does not know how far a count has come.
    assert stats.replayed >= CALLS - BEFORE_REPLAY - len(odd) - 3 * (body in (counts, checkpoints))
    detail = rf"at {line_of(skips_large)}.* is True, expected False as in the traced steps"
    if body is not checkpoints:
        assert any(re.search(detail, text) for text in stats.reasons), stats.reasons


def put_scores(losses: Tensor, valid: Tensor) -> Tensor:
    """As torchmetrics' R2Score divides: only by sums that are not zero."""
    scores = torch.ones_like(losses)
    scores[valid] = 1 - 0.1 / losses[valid]
    return scores.sum()


def add_to(losses: Tensor, valid: Tensor) -> Tensor:
    """Reads the tensor and writes it in one expression."""
    raised = losses.clamp(max=5)
    raised[valid] += losses[valid] * 0.5
    return raised.sum()


def change_positions(losses: Tensor, valid: Tensor) -> Tensor:
    """Code gets the positions themselves, and may change them."""
    places = torch.nonzero(valid)
    places += 1
    places %= len(losses)
    return (losses.clamp(max=5)[places[:, 0]] * torch.arange(len(places), device=losses.device)).sum()


SELECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean of the finite": lambda losses, valid: losses[valid].mean(),
    "puts": put_scores,
    "adds": add_to,
    "masked_select": lambda losses, valid: losses.masked_select(valid).sum(),
    "nonzero": change_positions,
    "argwhere": lambda losses, valid: losses.clamp(max=5)[torch.argwhere(valid)].sum(),
    "where": lambda losses, valid: losses[torch.where(valid)].sum(),
    "rows": lambda losses, valid: torch.stack([losses, losses * 2], dim=1)[valid].sum(),
    "columns": lambda losses, valid: torch.stack([losses, losses * 2])[:, valid].sum(),
    "two dimensions": lambda losses, valid: torch.outer(losses, losses)[torch.outer(valid, valid)].mean(),
    "again": lambda losses, valid: losses[valid].sum() + losses.square()[valid].mean(),
    "two masks": lambda losses, valid: torch.outer(losses, valid.float())[valid, valid.flip(0)].mean(),
}


def selects(model: Any, optimizer: Any, x: Tensor, y: Tensor, *, name: str) -> Any:
    """Leaves out large losses, between two branches."""
    optimizer.zero_grad(set_to_none=False)
    losses = F.cross_entropy(model(x), y.long() % 4, reduction="none") * y.clamp(min=1)
    model.seen += 1
    if losses.isnan().any():
        return losses.detach()
    loss = SELECTIONS[name](losses, losses < 1e3)
    model.seen += loss.detach().clamp(max=1)
    loss.backward()
    optimizer.step()
    return skips_large(model, optimizer, x, y.long() % 4), loss.detach()


def masked(name: str = "mean of the finite", odd: Sequence[int] = (), calls: int = CALLS) -> Callable[[], Rig]:
    """Makes a training step whose mask selects all losses but those of two rows in ``odd`` calls."""

    def make() -> Rig:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
        batches = [(torch.randn(12, 8), torch.arange(12.0) % 4) for _ in range(calls)]
        for number in odd:
            batches[number][1][3:5] = 1e6
        return Rig(partial(selects, model, optimizer, name=name), {"model": model, "optimizer": optimizer}, batches)

    return make


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_mask_that_selects_all(name: str, backend: str) -> None:
    """All but the tenth and the thirteenth call: these are undone, and eager."""
    step = both(masked(name, (9, 12)), backend)
    assert step.stats.skipped == {SkipReason.HOST_SYNC: 2}
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - BEFORE_REPLAY - 2)
    assert len(step.plan.branches) >= 3
    assert {"model.seen", "model.norm.running_mean"} <= step.plan.undone
    detail = r"the mask at test_branches_on_values\.py.* does not select all elements, as it did in the traced steps"
    assert any(re.search(detail, text) for text in step.stats.reasons), step.stats.reasons


@pytest.mark.parametrize("odd", [(6,), (7, 12), (5,), (5, 6)], ids=str)
def test_a_mask_that_once_leaves_rows_out(odd: tuple[int, ...], backend: str) -> None:
    """Call 5 is captured, 6 and 7 are checked."""
    step = both(masked(odd=odd), backend)
    assert step.stats.skipped == {SkipReason.HOST_SYNC: len(odd)}
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - BEFORE_REPLAY - len(odd)), step.report()


@pytest.mark.parametrize("odd", [range(8, 40), range(8, 40, 2)], ids=["from then on", "often"])
def test_a_mask_that_leaves_rows_out_later_is_given_up(odd: Sequence[int], backend: str) -> None:
    """In the first case, the next trace is refused."""
    with pytest.warns(UserWarning, match="graphplan runs this step eagerly: a mask makes a tensor whose shape"):
        step = both(masked(odd=odd, calls=40), backend)
    assert (step.stats.captured, step.stats.recaptured) == (1, 0)
    assert step.is_down


@pytest.mark.parametrize("first", [3, 4])
def test_a_mask_that_leaves_rows_out_in_a_trace_is_refused(first: int, backend: str) -> None:
    refusal = "a mask makes a tensor whose shape depends on values at .*losses"
    assert_refused(on_device(masked(odd=[first])), HostSyncError, refusal, done=first, backend=backend)


def of_a_part(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Branches on elements that the mask does not reach, in memory of the mask's size."""
    valid = model(x)[0, :4] + y[:4] * 100 < 50
    kept = x[:4][valid[:1].expand(4)]
    return kept.sum() * (2.0 if valid[1:].all() else 3.0)


@pytest.mark.parametrize("odd", [(), (10,)], ids=str)
def test_a_mask_that_selects_all_by_one_element(odd: tuple[int, ...], backend: str) -> None:
    """Only that element is known then."""

    def make() -> Rig:
        model = Model().eval()
        batches = [(torch.randn(12, 8), torch.zeros(12)) for _ in range(CALLS)]
        for number in odd:
            batches[number][1][2] = 1
        return Rig(lambda x, y: of_a_part(model, None, x, y), {"model": model}, batches)

    step = both(make, backend, verify="off")
    assert step.stats.captured == 1
    assert step.stats.skipped == ({SkipReason.HOST_SYNC: len(odd)} if odd else {})
    assert len(step.plan.branches) == 2


def test_a_mask_without_elements_is_refused() -> None:
    """It selects all, and nothing."""

    def body(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        losses = model(x)[:0]
        return losses[losses < 1e3]  # culprit

    assert_refused(rig_of(body), HostSyncError, rf"a mask makes a tensor .* at {line_of(body)}")


@pytest.mark.parametrize("odd", [(10,), (8, 9, 14)], ids=str)
def test_what_is_compared_with_a_number_that_changes(odd: tuple[int, ...], backend: str) -> None:
    """Replays compare with the number as it is, on the device."""
    step = both(rig_of(compares_with_limit, odd=odd), backend)
    assert (step.stats.captured, step.stats.recaptured) == (1, 0)
    assert step.stats.skipped == {SkipReason.HOST_SYNC: len(odd)}
    assert step.stats.replayed == CALLS - BEFORE_REPLAY - len(odd)


def test_what_is_compared_with_a_number_that_the_other_branch_sets(backend: str) -> None:
    """A step that sets it is eager. Once it was seen to change, replays compare with what it is."""

    def make() -> Rig:
        rig = rig_of(keeps_highest, odd=(10, 20, 30), calls=40)()
        model = rig.owners["model"]
        model.highest, kept = 1.0, list[float]()
        rig.extra["highest"] = kept

        def after(index: int) -> None:
            kept.append(model.highest)
            if index == 19:
                model.highest = 1.5

        return replace(rig, after=after)

    step = both(make, backend, on_failure="eager")
    assert (step.stats.captured, step.stats.recaptured) == (2, 1), step.report()
    assert 2 <= step.stats.skipped[SkipReason.HOST_SYNC] <= 3
    assert step.stats.replayed >= 40 - 2 * BEFORE_REPLAY - 3


@pytest.mark.parametrize("body", [skips_what_is_left, skips_what_differs])
def test_what_is_asked_on_the_host_is_a_branch(body: Body, backend: str) -> None:
    """``if loss.item():`` and ``if loss:`` ask what ``!= 0`` asks, and ``torch.equal`` what ``(a == b).all()`` does."""
    step = both(rig_of(body, (7, 12)), backend)
    assert (step.stats.captured, step.stats.skipped[SkipReason.HOST_SYNC]) == (1, 2)
    assert step.stats.replayed == CALLS - BEFORE_REPLAY - 2
    found, expected = (False, True) if body is skips_what_differs else (True, False)
    detail = rf"at {line_of(body)}.* is {found}, expected {expected} as in the traced steps"
    assert any(re.search(detail, text) for text in step.stats.reasons), step.stats.reasons


@pytest.mark.twice
def test_tensors_of_other_shapes_are_compared_without_a_look_at_values(backend: str) -> None:
    """As a kernel of a Gaussian process asks whether two sets of points are one."""

    def body(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        logits = model(x)
        return skips_large(model, optimizer, x, y) if logits.equal(logits[:4]) or torch.equal(logits, y) else logits * 2

    step = both(rig_of(body), backend)
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - BEFORE_REPLAY)
    assert not step.plan.host_reads


def test_what_is_read_before_it_is_changed(backend: str) -> None:
    """That is found out in a trace, and those that follow leave it to replays."""
    step = both(rig_of(warms_up), backend)
    assert (step.stats.traced, step.stats.captured, step.stats.replayed) == (3, 1, CALLS - 7)


def turns(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Branches on a counter that passes its bound once, as a warm-up does."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if model.seen > 8:
        loss = loss * 0.5
    model.seen += 1
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_a_branch_that_turns_is_captured_anew(backend: str) -> None:
    """After eight replays in a row that came to the other branch."""
    step = both(rig_of(turns, calls=40), backend)
    assert (step.stats.captured, step.stats.recaptured) == (2, 1)
    assert step.stats.replayed >= 18


def alternates(model: Any, optimizer: Any, x: Tensor, y: Tensor, *, often: int = 2) -> Any:
    """From the eleventh call on, one of two branches goes the other way, the first one in one of so many calls."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    is_late, is_first = model.seen >= 10, model.seen % often == 1
    if is_late & is_first:
        loss = loss * 0.5
    if is_late & ~is_first:
        loss = loss * 0.25
    model.seen += 1
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_branches_that_turn_by_turns_are_not_traced_anew(backend: str) -> None:
    """Two traces of such a step do not go the same way: it is given up, as one that goes the other way often is."""
    with pytest.warns(UserWarning, match="graphplan runs this step eagerly: .* reads a tensor's value on the host"):
        step = both(rig_of(alternates, calls=40), backend)
    # A trace tells that the counter is read before it is changed.
    assert (step.stats.traced, step.stats.captured, step.stats.recaptured) == (3, 1, 0)
    assert step.stats.replayed == 10 - BEFORE_REPLAY - 1
    assert step.is_down


def test_a_branch_that_turns_beside_another_one_is_captured_anew(backend: str) -> None:
    """Most of the latest calls have gone the same other way."""
    step = both(rig_of(partial(alternates, often=7), calls=60), backend)
    assert (step.stats.captured, step.stats.recaptured) == (2, 1)
    assert step.stats.replayed >= 25


def test_an_error_in_calls_that_are_captured() -> None:
    """The tape executes what it records, and undoes that. The state before leads to the error again: an eager step
    gets beyond it. (A capture on a device takes the value for the expected one, as replays do.)
    """
    rig = build(rig_of(raises, calls=20))
    step = graph_step(rig.step, owners=rig.owners, backend="tape")
    failed = []
    for number, args in enumerate(rig.calls):
        try:
            step(*args)
        except ArithmeticError:
            failed.append(number)
    assert failed == [4, 5]
    assert not any("IndexError" in event for event in step.stats.events)
    assert rig.owners["model"].seen == 19
    assert step.stats.replayed >= 8


def raises(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    """Raises an error once, after its update."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    model.seen += 1
    if model.seen == BEFORE_REPLAY - 1:
        raise ArithmeticError("the fifth step")
    return loss.detach()


def test_what_was_changed_before_is_put_back(backend: str) -> None:
    """Statistics, counts of batches and random numbers are drawn once."""
    step = both(rig_of(skips_large, (9, 13)), backend)
    assert {"model.seen", "model.norm.running_mean", "model.norm.num_batches_tracked"} <= step.plan.undone
    assert "model.first.weight" not in step.plan.undone


def test_a_branch_after_the_update_puts_that_back(backend: str) -> None:
    step = both(rig_of(skips_twice, (9,)), backend)
    assert {"model.first.weight", "optimizer.state[model.first.weight].momentum_buffer"} <= step.plan.undone


def test_branches_that_change_often_are_given_up(backend: str) -> None:
    """Half of the batches after the first ones take the other branch."""
    odd = range(8, 40, 2)
    with pytest.warns(UserWarning, match=rf"graphplan runs this step eagerly: .* at {line_of(skips_large)}"):
        step = both(rig_of(skips_large, odd, 40), backend)
    assert step.stats.skipped[SkipReason.HOST_SYNC] > 8
    assert step.is_down


def test_branches_that_differ_in_the_traces_are_refused() -> None:
    """Two pairs of traces are made anew."""
    assert_refused(
        rig_of(skips_large, (4, 6)),
        HostSyncError,
        rf"reads a tensor's value on the host .* at {line_of(skips_large)}",
        "a replay would keep the first value",
        done=6,
    )


def test_one_trace_of_the_other_branch_is_no_matter(backend: str) -> None:
    step = both(rig_of(skips_large, (4,)), backend)
    assert (step.stats.traced, step.stats.captured) == (4, 1)
    assert "traced anew: the value that is read on the host" in step.report()


def test_captures_that_come_to_the_other_branch_are_given_up(backend: str) -> None:
    """Three calls in a row that would be captured are eager."""
    with pytest.warns(UserWarning, match="graphplan runs this step eagerly: aten._local_scalar_dense.default reads"):
        step = both(rig_of(skips_large, range(5, 16)), backend, on_failure="eager")
    assert step.stats.captured == step.stats.replayed == 0


def test_numbers_are_refused_as_before() -> None:
    """That a number is the same in two traces says little."""

    def multiplies(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        loss = skips_large(model, optimizer, x, y)
        return loss * int((model.seen > -1).sum())

    assert_refused(rig_of(multiplies), HostSyncError, r"reads a tensor's value on the host")


def test_a_program_says_that_the_branch_is_another_one(device: torch.device, backend: str) -> None:
    rig = build(on_device(rig_of(skips_large, (3,))))
    x, y = rig.calls[0]
    rig.step(x, y)
    plan = compile_plan(rig.step, x, y, owners=rig.owners)
    assert f"note: branches on a tensor's value, which replays compare, at {plan.branches[0]}" in str(plan)
    program = capture(plan, feed=(x, y), policy=Policy.train(), backend=backend)
    program.replay(rig.calls[1])
    before = state_of(rig)
    with pytest.raises(OutcomeError, match=r"is True, expected False as in the traced steps") as caught:
        program.replay(rig.calls[3])
    assert isinstance(caught.value, GuardError)
    assert_same(before, state_of(rig))
    program.replay(rig.calls[2])
    program.close()


@pytest.mark.parametrize("odd", [(5,), (6,), (13,)], ids=["captured", "first replay", "in a row"])
def test_the_other_branch_is_as_in_an_eager_call(odd: tuple[int, ...], backend: str) -> None:
    """It changes what the caller has passed, prints once, and sees no error of ours."""

    class Printed(list[str]):
        write = list.append

    def make() -> Rig:
        printed = Printed()

        def body(model: Any, optimizer: Any, x: Tensor, y: Tensor, notes: list[str]) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if loss > 50:
                notes.append(str(sys.exc_info()[1]))
                x.zero_()
                print("skipped", file=printed)
                return loss.detach()
            loss.backward()
            optimizer.step()
            return loss.detach()

        rig = rig_of(body, odd)()
        rig.calls = [(*call, []) for call in rig.calls]
        rig.extra = {"printed": printed}
        return rig

    step = both(make, backend, verify="off")
    assert step.stats.skipped[SkipReason.HOST_SYNC] == 1
    assert step.stats.replayed > 2


@pytest.mark.parametrize("odd", [(5,), (6,), (13,)], ids=["captured", "first replay", "in a row"])
def test_an_error_of_the_other_branch_is_the_users_own(odd: tuple[int, ...], backend: str) -> None:
    """It comes out of a function, so that the value is not only asserted."""

    def make() -> Rig:
        errors: list[Any] = []

        def fails(model: Any) -> None:
            model.seen += 1
            model.steps += 1
            raise ArithmeticError("a large loss")

        def body(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            model.seen += loss.detach()
            if loss > 50:
                fails(model)
            loss.backward()
            optimizer.step()
            return loss.detach()

        rig = rig_of(body, odd)()
        rig.extra = {"errors": errors}
        return rig

    def catching(rig: Rig, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            try:
                return call(*args)
            except ArithmeticError as error:
                rig.extra["errors"].append(f"{error} in the context of {error.__context__}")
                return None

        return run

    make = on_device(make)
    rig = build(make)
    expected = drive(rig, catching(rig, rig.step))
    rig = build(make)
    step = graph_step(rig.step, owners=rig.owners, backend=backend, verify="off")
    assert_same_runs(expected, drive(rig, catching(rig, step)))
    assert step.stats.replayed >= CALLS - BEFORE_REPLAY - 3


def test_views_that_cannot_be_written_to_are_put_back_with_their_memory(backend: str) -> None:
    def scales(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        model.scale.mul_(0.99)
        loss = skips_large(model, optimizer, x * model.scales, y)
        return loss + model.scales.sum()

    def make() -> Rig:
        rig = rig_of(scales, (9,))()
        model = rig.owners["model"]
        model.scale = torch.ones(1)
        model.scales = model.scale.expand(8)
        return rig

    step = assert_same_as_eager(make, verify="off")
    assert step.stats.skipped[SkipReason.HOST_SYNC] == 1
    assert "model.scale" in step.plan.undone


def test_gradients_that_the_other_branch_keeps_are_the_old_ones(backend: str) -> None:
    """A replay makes new ones where they lie, before it comes to the branch."""

    def body(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        params = list(model.parameters())
        grads = torch.autograd.grad(loss + model.first.weight.square().sum(), params)
        if loss > 50:
            return loss.detach()
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        return loss.detach()

    step = both(rig_of(body, (6, 13, 15)), backend, verify="off")
    assert step.stats.replayed >= CALLS - BEFORE_REPLAY - 5


def test_inputs_that_are_changed_in_place_are_put_back(device: torch.device, backend: str) -> None:
    """Under a policy that copies none."""
    net = nn.Linear(4, 4, device=device)

    def scale(x: Tensor) -> Tensor:
        x.mul_(2)
        y = net(x)
        return y * 0 if y.abs().max() > 1e3 else y

    x = torch.ones(4, device=device)
    policy = Policy("inference", static_roles=("input", "param", "state"), copy_roles=())
    fast = graph_step(scale, owners=[net], backend=backend, policy=policy, mode="inference", verify="off")
    for number in range(16):
        fed = torch.full((4,), 1e5 if number in (9, 12, 15) else 1.0, device=device)
        with torch.no_grad():
            x.copy_(fed)
            assert torch.equal(fast(x), scale(fed))
        assert torch.equal(x, fed)
    assert fast.stats.replayed > 4
    assert fast.stats.skipped[SkipReason.HOST_SYNC] == 3


def test_checks_repeat_no_step_that_goes_another_way() -> None:
    """Where replays are noisy, a check makes one from parameters with other last bits."""
    noise = Box(np.random.default_rng(1))

    @torch.library.custom_op("graphplan_tests::noisy_gate", mutates_args=())
    def noisy(x: Tensor) -> Tensor:
        return x * (1 + 1e-6 * float(noise.item.standard_normal()))

    gate, seen = nn.Parameter(torch.tensor(3.0)), [torch.zeros(())]

    def step(x: Tensor) -> Tensor:
        seen[0] += 1
        return x * 0 if gate != 3 else noisy(x)

    fast = graph_step(step, owners={"gate": gate, "seen": seen}, backend="tape", verify=1, allow=("graphplan_tests",))
    for number in range(12):
        fast(torch.ones(3))
        assert seen[0] == number + 1
    assert fast.stats.verified > 2


def test_inference_branches(device: torch.device, backend: str) -> None:
    """On what the model computes: a mask that is looked at."""
    model = nn.Linear(8, 8).to(device)

    @graphed(backend=backend, min_speedup=0)
    def serve(x: Tensor) -> Tensor:
        y = model(x)
        return y.clamp(-1, 1) if (y.abs() > 1e3).any() else y

    x = torch.randn(4, 8, device=device)
    for number in range(12):
        fed = x * 1e6 if number == 9 else x
        with torch.no_grad():
            wanted = model(fed).clamp(-1, 1) if number == 9 else model(fed)
            assert torch.equal(serve(fed), wanted)
    assert serve.stats.replayed > 4
    assert serve.stats.skipped[SkipReason.HOST_SYNC] == 1


def test_a_branch_beside_collectives_is_refused(tmp_path: Path) -> None:
    """One rank would end its replay, and the others wait for it."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:

        def reduces(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
            loss = skips_large(model, optimizer, x, y)
            torch.distributed.all_reduce(loss)
            return loss

        assert_refused(rig_of(reduces), HostSyncError, rf"at {line_of(skips_large)}", done=4)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("minlength", [1, 5, 7])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_bincount_with_a_bound(device: torch.device, backend: str, minlength: int, dtype: torch.dtype) -> None:
    """Numbers beyond the bound make more counts, which is another branch; so no program is for them."""

    def count(x: Tensor) -> Tensor:
        return torch.bincount(by_chance(x).to(dtype), minlength=minlength) * 2

    fast = graph_step(count, backend=backend, min_speedup=0)
    torch.use_deterministic_algorithms(False)
    for number in range(12):
        x = torch.randint(minlength, (32,), device=device)
        x = x + minlength if number == 10 else x
        assert torch.equal(fast(x), count(x))
    assert (fast.stats.replayed, fast.stats.skipped[SkipReason.HOST_SYNC]) == (5, 1)


def test_bincount_of_an_unknown_number_is_refused() -> None:
    def count(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        return torch.bincount(model(x).argmax(1))  # culprit

    assert_refused(rig_of(count), HostSyncError, rf"aten.bincount.default makes a tensor .* at {line_of(count)}")
