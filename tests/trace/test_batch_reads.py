"""Host reads of what a step is fed, and of owners' tensors that it only reads: made before a replay."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan import HostEffectError, HostSyncError, SkipReason, UnownedTensorError, graph_step, graphed
from graphplan.owners.slots import Slot
from graphplan.step import programs
from graphplan.step.programs import Programs
from graphplan.trace import batch_reads, batch_recorder, host_reads
from graphplan.trace.operator_schemas import POSITIONS
from tests.lightning.parts import assert_fit_equals_eager, tape, with_step
from tests.twins import (
    Rig,
    assert_falls_back,
    assert_refused,
    assert_same_as_eager,
    assert_same_runs,
    build,
    by_chance,
    drive,
    line_of,
    managed,
)

ROWS, CALLS = 6, 20
BEFORE = 7
"""Calls before the first replay: three eager, the trace that finds the reads, two traces with them, the capture."""
FURTHER = 3
"""Calls before the first replay of a further way, which is not warmed up for, and whose reads are those of another."""
BRANCH = FURTHER + 1
"""The same for a way with reads of its own, which another trace finds."""
Forward = Callable[..., Tensor]


class Model(nn.Module):
    """A layer, and what else a step may read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(8)
        self.register_buffer("kept", mask_of(0, 3))
        self.scale, self.flips = 2.0, False

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def mask_of(index: int, count: int) -> Tensor:
    """A mask of so many rows, and others in each call."""
    return (torch.arange(ROWS) < count).roll(index)


def batches(counts: Callable[[int], int] = lambda index: 4, calls: int = CALLS) -> list[tuple[Any, ...]]:
    """Rows and masks, of which each selects as many as ``counts`` says."""
    return [(torch.randn(ROWS, 8), mask_of(index, counts(index))) for index in range(calls)]


def rig_of(
    forward: Forward,
    calls: Callable[[], list[tuple[Any, ...]]] = batches,
    after: Callable[[Any, int], object] = lambda model, index: None,
) -> Rig:
    """A training step on the mean square of what ``forward(model, *batch)`` gives."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5, fused=True)

    def step(*batch: Any, **named: Any) -> Tensor:
        optimizer.zero_grad()
        loss = forward(model, *batch, **named).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Rig(step, {"model": model, "optimizer": optimizer}, calls(), after=partial(after, model))


def counts(step: Any) -> tuple[int, int]:
    """How many programs a step has captured, and how many calls it has replayed."""
    return step.stats.captured, step.stats.replayed


def in_loss(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x)[mask]


def by_branch(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x) * 2 if mask.any() else model(x)


def by_nonzero(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x[mask.nonzero().squeeze(1)])


def by_where(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    (rows,) = torch.where(mask)
    return model(x.index_select(0, rows))


def by_select(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x).masked_select(mask[:, None].expand(ROWS, 4).contiguous())


def by_put(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    out = model(x).clone()
    out[mask] = 0.5
    out[~mask] *= x[~mask, :4]
    return out


def by_put_of_parts(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(ROWS, 4).index_put((mask,), model(x[mask]), accumulate=True)


def by_unique(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    values, inverse, number = torch.unique(mask.long().sort().values.cumsum(0), return_inverse=True, return_counts=True)
    return model(x) * values[inverse, None] / number[inverse, None]


def by_repeats(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x).repeat_interleave(mask.long() + 1, dim=0)


def by_two_that_follow(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    rows = x[mask]
    positions = (rows.abs().sum(1) >= 0).nonzero()[:, 0]
    return model(rows[positions]) if len(positions) == rows.shape[0] and rows.isfinite().all() else model(x)


def by_slice(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x[: mask.sum()] * mask.sum().item())


def by_index_and_mask(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x)[mask, torch.tensor([1])]


def by_matrix(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x)[(mask[:, None] & torch.ones(4, dtype=torch.bool))]


def by_targets(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    out = model(x)
    target = torch.zeros_like(out)
    target[torch.arange(ROWS), 0] = mask.float()
    target[:, 1] = mask * torch.full_like(out[:, 1], 2.0)
    weight = out.new_ones(ROWS).masked_fill(mask, 3.0)
    return out[target[:, 0] == 1] * target[:, 1][weight == 3][:, None]


FORWARDS = [in_loss, by_branch, by_nonzero, by_where, by_select, by_put, by_put_of_parts, by_unique, by_repeats]
FORWARDS += [by_two_that_follow, by_slice, by_index_and_mask, by_matrix, by_targets]


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.twice
def test_reads_of_the_batch(forward: Forward) -> None:
    """One program for all batches in which as many rows are selected, whichever they are."""
    step = assert_same_as_eager(partial(rig_of, forward))
    assert counts(step) == (1, CALLS - BEFORE), step.report()
    assert "read before the step: the batch, first at test_batch_reads.py" in step.report()


@pytest.mark.parametrize("forward", FORWARDS)
def test_every_replay_is_checked(forward: Forward) -> None:
    step = assert_same_as_eager(partial(rig_of, forward), verify=1)
    assert step.stats.verified == step.stats.replayed > 0


def by_equal_masks(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x[mask.clone()])[:, :2] * x[mask.clone(), :2] + x[mask].sum()


def asking(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    """What is read comes to ask for gradients after it was read, as in adversarial training."""
    rows = x.clone().requires_grad_()
    return model(rows.masked_select(mask[:, None]).view(-1, 8))


def returning_read(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    model.rows = mask.nonzero()
    return model(x[model.rows.squeeze(1)])


def writing(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    rows = mask.nonzero().squeeze(1)
    rows.add_(0)
    return model(x[rows])


FOUND = [each for each in FORWARDS if each not in (by_slice, by_targets)] + [by_equal_masks, asking, writing]


@pytest.mark.parametrize("forward", FOUND)
def test_one_trace_finds_the_reads_and_makes_the_plan(forward: Forward) -> None:
    """It is taken for that of a call whose batch was read before."""
    step = assert_same_as_eager(partial(rig_of, forward))
    assert (step.stats.traced, *counts(step)) == (1, 1, CALLS - BEFORE + 2), step.report()


@pytest.mark.parametrize("forward", [by_nonzero, by_equal_masks, asking])
def test_one_trace_for_each_way(forward: Forward) -> None:
    make = partial(rig_of, forward, partial(batches, lambda index: 3 + index % 2, calls=40))
    step = assert_same_as_eager(make)
    assert (step.stats.traced, step.stats.captured) == (2, 2), step.report()


def test_what_is_read_and_kept_needs_another_trace() -> None:
    """Replays would be fed what the step keeps."""
    step = assert_same_as_eager(partial(rig_of, returning_read))
    assert step.stats.replayed > 5, step.report()


@pytest.mark.parametrize("turn", [lambda rows: rows.squeeze_(1), lambda rows: rows.t_()[0]])
def test_a_read_that_gets_another_shape_in_place(turn: Callable[[Tensor], Tensor]) -> None:
    """The program's own would have it from the capture on."""
    text = r"gives a tensor that it reads of its batch another shape or other strides in place \(squeeze_"
    make = partial(rig_of, lambda model, x, mask: model(x[turn(mask.nonzero())]))
    assert_refused(make, HostEffectError, text, done=5)


@pytest.mark.parametrize("turn", [lambda x: x.unsqueeze_(1), lambda x: x.t_().t()])
def test_a_fed_tensor_that_gets_another_shape_in_place(turn: Callable[[Tensor], Tensor]) -> None:
    text = r"gives its argument args\[0\] another shape or other strides in place \(squeeze_"
    assert_refused(partial(rig_of, lambda model, x, mask: model(turn(x))), HostEffectError, text)


@pytest.mark.parametrize("forward", [forward for forward in FORWARDS if forward is not by_branch])
@pytest.mark.twice
def test_batches_of_two_ways_take_turns(forward: Forward) -> None:
    """Two programs, and none is captured again."""
    make = partial(rig_of, forward, partial(batches, lambda index: 3 + index % 2, calls=30))
    step = assert_same_as_eager(make)
    assert counts(step) == (2, 30 - BEFORE - FURTHER), step.report()


@pytest.mark.twice
def test_a_branch_that_is_taken_or_not() -> None:
    make = partial(rig_of, by_branch, partial(batches, lambda index: 4 * (index // 10 % 2), calls=40))
    step = assert_same_as_eager(make)
    assert counts(step) == (2, 40 - BEFORE - BRANCH), step.report()


def by_threshold(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x)[mask] if int(mask.sum()) > 3 else model(x)[~mask] * mask.sum().item()


@pytest.mark.twice
def test_a_number_that_leads_to_other_reads() -> None:
    """The second way is expected to read what the first one does, once."""
    make = partial(rig_of, by_threshold, partial(batches, lambda index: 3 + index % 2, calls=40))
    step = assert_same_as_eager(make)
    assert counts(step) == (2, 40 - BEFORE - BRANCH - 1), step.report()


def test_a_mask_that_selects_nothing() -> None:
    def forward(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        return model(x).index_put((mask,), model(x)[mask] * 3)

    make = partial(rig_of, forward, partial(batches, lambda index: 4 * (index // 10 % 2), calls=40))
    captured, replayed = counts(assert_same_as_eager(make))
    assert (captured, replayed >= 40 - BEFORE - FURTHER) == (2, True)


@pytest.mark.twice
def test_equal_reads_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    find = batch_reads.BatchReads.find
    monkeypatch.setattr(batch_reads.BatchReads, "find", lambda self, leaves: found.append(self) or find(self, leaves))

    def forward(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        return model(x[mask])[:, :2] * x[mask, :2] + x[mask & True].sum()

    assert counts(assert_same_as_eager(partial(rig_of, forward))) == (1, CALLS - BEFORE)
    (reads,) = set(found)
    positions = [call for call in reads._calls if call.name == POSITIONS]
    assert (len(reads.reads), len(positions)) == (3, 2)


def lengths_of(index: int) -> Tensor:
    return torch.tensor([3, 5, 2] if index // 10 % 2 else [4, 1, 5])


def packed_rig(lengths: Callable[[Tensor], Tensor], calls: int = 40) -> Rig:
    model = nn.LSTM(8, 4, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)

    def step(x: Tensor, given: Tensor) -> Tensor:
        optimizer.zero_grad()
        packed = pack_padded_sequence(x, lengths(given), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(model(packed)[0], batch_first=True)
        loss = out.square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    data = [(torch.randn(3, 5, 8), lengths_of(index)) for index in range(calls)]
    return Rig(step, {"model": model, "optimizer": optimizer}, data)


def _written_constant(lengths: Tensor) -> Tensor:
    made = torch.tensor([0, 0, 0])
    made += lengths
    return made


@pytest.mark.parametrize(
    "lengths", [lambda lengths: lengths, _written_constant], ids=["given", "written to a constant"]
)
def test_lengths_of_packed_sequences(lengths: Callable[[Tensor], Tensor]) -> None:
    """One trace of each is enough: what follows from the lengths is a constant on the host."""
    step = assert_same_as_eager(partial(packed_rig, lengths))
    assert counts(step) == (2, 40 - (BEFORE - 1) - (FURTHER - 1)), step.report()


def of_buffer(model: Any, x: Tensor, *_: Any) -> Tensor:
    return model(x)[model.kept]


def moved(model: Any, index: int) -> None:
    model.kept.copy_(mask_of(index, 3))


def resized(model: Any, index: int) -> None:
    model.kept.copy_(mask_of(index, 3 + index // 10 % 2))


def rebound(model: Any, index: int) -> None:
    if index % 10 == 9:
        model.kept = mask_of(index, 3)


def loaded(model: Any, index: int) -> None:
    if index in (10, 18):
        values = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict({**values, "kept": mask_of(index, 3 if index == 10 else 5)}, assign=True)


CHANGES: dict[str, tuple[Callable[[Any, int], object], int]] = {
    "stays": (lambda model, index: None, 1),
    "moves": (moved, 1),
    "resized": (resized, 2),
    "rebound": (rebound, 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_owners_tensor_that_the_step_only_reads(name: str) -> None:
    """The mask that it has at the time of the step."""
    change, captured = CHANGES[name]
    step = assert_same_as_eager(partial(rig_of, of_buffer, partial(batches, calls=40), change), verify=3)
    assert step.stats.replayed > 10, step.report()
    assert step.stats.verified > 0
    if name != "rebound":
        assert counts(step) == (captured, 40 - BEFORE - FURTHER * (captured - 1)), step.report()


def test_a_state_that_is_assigned_in_the_middle() -> None:
    make = partial(rig_of, of_buffer, partial(batches, calls=44), loaded)
    step = assert_same_as_eager(make, verify=1)
    assert step.stats.replayed > 10, step.report()


def by_two_masks(model: Any, x: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return model(x)[one] + 10 * model(x)[other]


def once_alike(index: int) -> tuple[Tensor, Tensor, Tensor]:
    one = mask_of(index, 3)
    return torch.randn(ROWS, 8), one, one if index < 12 else mask_of(index + 2, 3)


@pytest.mark.filterwarnings("ignore:graphplan runs this step eagerly")
@pytest.mark.parametrize("is_alike_first", [True, False])
def test_one_tensor_in_two_places_and_later_two(is_alike_first: bool) -> None:
    """Nothing but its memory tells which of them is read."""

    def calls() -> list[tuple[Any, ...]]:
        made = [once_alike(index) for index in range(24)]
        return made if is_alike_first else made[12:] + made[:12]

    assert_same_as_eager(partial(rig_of, by_two_masks, calls), verify="off", on_failure="eager")


def test_an_owners_tensor_that_is_fed_and_later_another() -> None:
    found = []
    for is_graphed in (False, True):
        rig = build(partial(rig_of, lambda model, x, mask: by_two_masks(model, x, mask, model.kept)))
        model: Any = rig.owners["model"]
        step = managed(rig, verify="off", on_failure="eager") if is_graphed else rig.step
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="graphplan runs this step eagerly")
            found.append(
                [step(x, model.kept if index < 10 else mask_of(index, 3)) for index, (x, _) in enumerate(rig.calls)]
            )
    assert torch.equal(*map(torch.stack, found))


def test_reads_of_both_kinds_take_no_trace_more() -> None:
    """One trace finds what is read before the step (the mask), and what replays compare: the step changes it later."""

    def forward(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        factor = 2 if model.seen < 100 else 3
        model.seen += 1
        return model(x)[mask] * factor

    def rig() -> Rig:
        made = rig_of(forward)
        made.owners["model"].register_buffer("seen", torch.zeros(()))
        return made

    step = assert_same_as_eager(rig, verify=3)
    assert (step.stats.traced, *counts(step)) == (3, 1, CALLS - BEFORE), step.report()
    assert "read before the step: the batch" in step.report() and "which replays compare" in step.report()


def pick(tensor: Tensor, index: Tensor) -> Tensor:
    return tensor[index]


def test_another_read_where_replays_compare_one() -> None:
    """One helper is given a condition on what the step changes, and the mask of the batch."""

    def forward(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        out = pick(model(x), mask) if len(x) == ROWS else pick(model(x), model.seen < 100)
        model.seen += 1
        return out

    def rig() -> Rig:
        rows = [ROWS, 4]
        made = rig_of(forward, lambda: [(torch.randn(rows[i % 2], 8), mask_of(i, 3)[: rows[i % 2]]) for i in range(50)])
        made.owners["model"].register_buffer("seen", torch.zeros(()))
        return made

    step = assert_same_as_eager(rig, verify="off")
    assert step.stats.replayed > 30, step.report()


def turned_over(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    out = model(x).sum() * model.front
    model.front, model.back = model.back, model.front
    return model(x)[: int(model.front.sum()) + 2] + 0 * out.sum()  # culprit


def test_two_views_that_take_each_others_places() -> None:
    """The one that is read lies elsewhere before the step than when it is read."""

    def rig() -> Rig:
        made = rig_of(turned_over)
        model = made.owners["model"]
        model.front, model.back = torch.tensor([[1.0, 0.0], [1.0, 0.0]]).unbind(0)
        return made

    assert_refused(rig, HostSyncError, line_of(turned_over).replace("return", ".*return"), "would keep the first value")


def carried(model: Any, x: Tensor, *_: Any) -> Tensor:
    before = model.hidden
    out = model(x) * before
    model.hidden = out.detach() * 0 + 1
    return out[before[:, 0] > 0.5]


def asked_for_gradients(model: Any, x: Tensor, *_: Any) -> Tensor:
    out = model(x) * model.hidden
    model.hidden.requires_grad_(True)
    rows = int(model.hidden.detach().sum()) // 8
    model.hidden.requires_grad_(False)
    return out[:rows]


@pytest.mark.parametrize("forward", [carried, asked_for_gradients])
def test_a_buffer_that_is_another_one_by_the_time_it_is_read(forward: Forward) -> None:
    """It is known from the operator on that used it first."""

    def rig() -> Rig:
        made = rig_of(forward)
        made.owners["model"].register_buffer("hidden", torch.ones(ROWS, 4))
        return made

    step = assert_same_as_eager(rig, verify="off")
    assert counts(step) == (1, CALLS - BEFORE), step.report()


cached: Any = None
"""A cached function that gives a tensor which no owner has."""
cached_for: Any = None
"""Another, of names, of which only two are remembered."""


def of_cache(model: Any, x: Tensor, *_: Any) -> Tensor:
    return model(x)[cached()]  # culprit


def of_two(model: Any, x: Tensor, *_: Any) -> Tensor:
    return sum(model(x) * int(cached_for(name).sum()) for name in ("a", "bb"))  # type: ignore[return-value]


def cache_rig(forward: Forward, after: Callable[[int], object] = lambda index: None) -> Rig:
    """A step that reads a tensor which nothing leads to."""
    global cached, cached_for
    cached = cache(lambda: mask_of(0, 3))
    cached_for = lru_cache(maxsize=2)(lambda name: torch.tensor([len(name), 2]))
    return rig_of(forward, partial(batches, calls=40), lambda model, index: after(index))


def of_changed(model: Any, x: Tensor, *_: Any) -> Tensor:
    mask = cached().clone()
    mask[0] = False
    mask |= cached().roll(1)
    return model(x)[~mask]


def of_lengths(model: Any, x: Tensor, *_: Any) -> Tensor:
    packed = pack_padded_sequence(model(x)[:2, None].expand(2, 5, 4), cached_for("aaaaa"), batch_first=True)
    return packed.data


CACHED: dict[str, tuple[Forward, Callable[[int], object], int]] = {
    "stays": (of_cache, lambda index: None, 1),
    "moves": (of_cache, lambda index: cached().copy_(mask_of(index, 3)), 1),
    "resized": (of_cache, lambda index: cached().copy_(mask_of(index, 3 + index // 10 % 2)), 2),
    "two": (of_two, lambda index: None, 1),
    "changed": (of_changed, lambda index: None, 1),
    "lengths": (of_lengths, lambda index: None, 1),
}


@pytest.mark.parametrize("name", CACHED)
def test_a_tensor_in_a_cache(name: str) -> None:
    """It is read before each replay, and what is computed of it; the first trace only finds it."""
    forward, after, captured = CACHED[name]
    step = assert_same_as_eager(partial(cache_rig, forward, after), verify=3)
    assert counts(step) == (captured, 40 - BEFORE - 1 - FURTHER * (captured - 1)), step.report()
    assert "read before the step: a tensor in a cache, first at" in step.report()


def refill(index: int, at: tuple[int, ...]) -> None:
    """Another tensor with other numbers."""
    if index in at:
        cached.cache_clear()
        cached().copy_(mask_of(index, 3))


def crowd_out(index: int) -> None:
    if index == 20:
        [cached_for(f"{index}{name}") for name in "abc"]


@pytest.mark.parametrize(
    ("forward", "after"),
    [
        (of_cache, partial(refill, at=(3,))),
        (of_cache, partial(refill, at=(4, 20, 21))),
        (of_cache, lambda index: index == 20 and cached.cache_clear()),
        (of_two, crowd_out),
    ],
    ids=["in traces", "later", "cleared", "crowded out"],
)
def test_what_a_cache_forgets_is_not_read(forward: Forward, after: Callable[[int], object]) -> None:
    """Other calls may have filled it again."""
    step = assert_same_as_eager(partial(cache_rig, forward, after), verify="off")
    assert step.stats.replayed > 5, step.report()


def test_another_tensor_in_each_step() -> None:
    def after(index: int) -> None:
        refill(index, at=(index,))

    text = "belongs to no object that graphplan knows .*Make it a buffer or an attribute"
    assert_refused(partial(cache_rig, of_cache, after), HostSyncError, line_of(of_cache), text, done=7)


def test_a_tensor_in_a_cache_that_the_step_writes() -> None:
    def forward(model: Any, x: Tensor, *_: Any) -> Tensor:
        kept = cached()
        out = model(x[kept])
        kept.copy_(kept.roll(1))
        return out

    text = "changes a .* tensor that belongs to no owner"
    assert_refused(partial(cache_rig, forward), UnownedTensorError, text, done=6)


KEPT = SimpleQueue[Tensor]()


def of_queue(model: Any, x: Tensor, *_: Any) -> Tensor:
    kept = KEPT.get()
    KEPT.put(kept)
    return model(x)[kept]  # culprit


def test_a_tensor_that_no_owner_and_no_cache_has() -> None:
    """Whatever is done with it elsewhere would go unseen."""
    KEPT.put(mask_of(0, 3))
    text = "belongs to no object that graphplan knows .*Make it a buffer or an attribute"
    assert_refused(partial(rig_of, of_queue), HostSyncError, line_of(of_queue).replace("return", ".*return"), text)


ASKED = SimpleQueue[Tensor]()


def asking_queue(model: Any, x: Tensor, *_: Any) -> Tensor:
    kept = ASKED.get()
    ASKED.put(kept)
    return model(x) * (2.0 if kept.any() else 3.0)


def test_caches_are_looked_through_once_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes as long as several steps; the branch on what is in none is compared in replays."""
    found: list[Any] = []
    look = batch_recorder.find_cached
    monkeypatch.setattr(batch_recorder, "find_cached", lambda tensors: (found.append(look(tensors)), found[-1])[1])
    ASKED.put(mask_of(0, 3))
    step = assert_same_as_eager(partial(rig_of, asking_queue), verify="off", allow=("SimpleQueue.put",))
    assert (step.stats.traced, step.stats.replayed > 0) == (2, True)
    assert found == [{}]


class Mask(NamedTuple):
    """A mask and its name."""

    name: str
    rows: Tensor


@pytest.mark.parametrize("is_another", [False, True], ids=["stays", "another"])
def test_an_owners_tensor_in_a_tuple(is_another: bool) -> None:
    def after(model: Any, index: int) -> None:
        if is_another and index % 10 == 9:
            model.mask = Mask("rows", mask_of(index, 3 + index // 10 % 2))

    def make() -> Rig:
        rig = rig_of(lambda model, x, _: model(x)[model.mask.rows], partial(batches, calls=40), after)
        rig.owners["model"].mask = Mask("rows", mask_of(0, 3))
        return rig

    step = assert_same_as_eager(make, verify=3)
    assert step.stats.replayed > 10, step.report()
    assert "read before the step: model.mask" in step.report()


def full_batch_rig(after: Callable[[Any, int], object] = lambda model, index: None) -> Rig:
    """A step without arguments: training on all nodes of a graph, with a mask among them."""
    data = {"x": torch.randn(ROWS, 8), "mask": mask_of(0, 4), "y": torch.arange(ROWS) % 4}
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data["x"])[data["mask"]], data["y"][data["mask"]])
        loss.backward()
        optimizer.step()
        return loss.detach()

    owners = {"model": model, "optimizer": optimizer, "data": data}
    return Rig(step, owners, [()] * CALLS, after=partial(after, data))


def other_nodes(data: dict[str, Tensor], index: int) -> None:
    data["mask"].copy_(mask_of(index, 4))
    data["x"].add_(0.1)


@pytest.mark.parametrize("after", [lambda data, index: None, other_nodes], ids=["stays", "changes"])
@pytest.mark.twice
def test_a_step_without_arguments(after: Callable[[Any, int], object]) -> None:
    assert counts(assert_same_as_eager(partial(full_batch_rig, after))) == (1, CALLS - BEFORE)


def by_number(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x)[torch.arange(ROWS) < mask.sum() * model.scale / 2 - 1]


def flipped(model: Any, index: int, every: int) -> None:
    if index % every == every - 1:
        model.scale = 3.5 - model.scale


def test_an_owners_number_takes_part() -> None:
    """What is read follows from the number that it is at the time."""
    make = partial(rig_of, by_number, partial(batches, calls=40), partial(flipped, every=12))
    step = assert_same_as_eager(make, verify="off")
    assert step.stats.replayed > 10, step.report()


def test_an_owners_number_that_is_another_in_each_step() -> None:
    make = partial(rig_of, by_number, partial(batches, calls=40), partial(flipped, every=1))
    assert_falls_back(make, SkipReason.HOST_SYNC, "makes a tensor whose shape depends on values")


def in_record(model: Any, batch: Any) -> Tensor:
    return model(batch.x)[batch.mask]


@dataclass
class Fields:
    """A batch with names."""

    x: Tensor
    mask: Tensor


class Record(NamedTuple):
    """A batch with names and an order."""

    x: Tensor
    mask: Tensor


class Plain:
    """A batch of a class that nobody knows."""

    def __init__(self, x: Tensor, mask: Tensor) -> None:
        self.x, self.mask = x, mask


class Names(dict[str, Tensor]):
    """A batch by names, which are attributes too."""

    def __getattr__(self, name: str) -> Tensor:
        return self[name]


def named(x: Tensor, mask: Tensor) -> Names:
    return Names(x=x, mask=mask)


@pytest.mark.parametrize("kind", [Fields, Record, Plain, named])
@pytest.mark.twice
def test_batches_of_other_kinds(kind: Callable[..., Any]) -> None:
    def calls() -> list[tuple[Any, ...]]:
        return [(kind(*batch),) for batch in batches()]

    assert counts(assert_same_as_eager(partial(rig_of, in_record, calls))) == (1, CALLS - BEFORE)


def test_arguments_by_name() -> None:
    make = partial(rig_of, lambda model, x, batch, is_doubled: model(x)[batch["mask"]] * (2 if is_doubled else 1))
    found = []
    for is_graphed in (False, True):
        rig = build(make)
        step: Any = managed(rig) if is_graphed else rig.step
        data = enumerate(batches(calls=40))
        outs = [step(x, batch={"mask": mask}, is_doubled=index > 20) for index, (x, mask) in data]
        found.append(torch.stack(outs))
    assert torch.equal(*found)
    assert counts(step)[1] > 15, step.report()


def reads_trained(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x[model(x)[:, 0] > 0])  # culprit


def branches_on_trained(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x) * 2 if model.layer.weight.detach().sum() > 0 else model(x)  # culprit


def draws_after_dropout(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return F.dropout(model(x))[torch.rand(ROWS) < 0.5]  # culprit


def reads_what_is_drawn_too(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x)[by_chance(mask)]  # culprit


def reads_a_written_buffer(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    out = model(model.norm(x))
    return out * 2 if model.norm.num_batches_tracked % 2 == 0 else out  # culprit


def reads_after_it_is_written(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    model.kept &= True
    return model(x[model.kept])  # culprit


def writes_its_batch(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    mask.logical_not_()
    return model(x)[mask]  # culprit


def reads_trained_beside_the_batch(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    out = model(x[mask])
    return out * 2 if out.sum() > 0 else out  # culprit


REFUSED = [reads_trained, draws_after_dropout, reads_what_is_drawn_too, reads_after_it_is_written, writes_its_batch]
BRANCHES = [branches_on_trained, reads_trained_beside_the_batch, reads_a_written_buffer]


@pytest.mark.parametrize("forward", REFUSED)
def test_reads_of_anything_else_are_refused(forward: Forward) -> None:
    """With the line that reads, before any program."""
    assert_refused(partial(rig_of, forward), HostSyncError, line_of(forward), "a replay would keep the first value")


@pytest.mark.parametrize("forward", BRANCHES)
def test_branches_on_anything_else_are_none_of_the_batch(forward: Forward) -> None:
    """Replays compare them. One that is taken in each second call is refused."""
    if forward is reads_a_written_buffer:
        assert_refused(partial(rig_of, forward), HostSyncError, line_of(forward), done=6)
        return
    step = assert_same_as_eager(partial(rig_of, forward))
    assert step.stats.replayed > 0, step.report()
    assert any(line in step.plan.branches[0] for line in ("in branches_on_trained", "in reads_trained"))


def changing(index: int) -> int:
    """How many rows masks select: as many ways, of which six come in turns."""
    return index % ROWS + 1


def test_a_way_that_waits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not among those that are never met again, as long as others are replayed meanwhile."""
    waits = [False]
    monkeypatch.setattr(Programs, "has_spent", lambda *_: waits[0])

    def calls() -> list[tuple[Any, ...]]:
        # Of every second one, another number of rows is selected from some call on.
        sizes = [(6, 3) if index % 2 else (9, 3 if index < 20 else 5) for index in range(160)]
        return [(torch.randn(size, 8), torch.arange(size) < count) for size, count in sizes]

    rig = build(partial(rig_of, in_loss, calls))
    step = managed(rig, verify="off")
    for index, args in enumerate(rig.calls):
        waits[0] = 20 <= index < 120
        step(*args)
    assert step.stats.captured == 3, step.report()
    assert step.stats.last_kind == "replayed"


def test_more_ways_than_are_known() -> None:
    """Eight are captured, and batches that take no known one are eager."""
    wide = lambda: [(torch.randn(12, 8), torch.arange(12) < index % 11 + 1) for index in range(150)]  # noqa: E731
    step = assert_same_as_eager(partial(rig_of, in_loss, wide), verify="off")
    assert step.stats.captured == 8, step.report()
    assert step.stats.replayed > 50
    assert step.stats.skipped[SkipReason.SHAPE] > 10


def test_ways_that_come_in_turns() -> None:
    step = assert_same_as_eager(partial(rig_of, in_loss, partial(batches, changing, calls=60)), verify="off")
    assert counts(step) == (ROWS, 35), step.report()


def by_value(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x) ** int(x.sum().item())  # culprit


def test_values_that_never_come_back_are_refused() -> None:
    """After three traces and as many batches as it takes to be sure, 16 in a row."""
    make = partial(rig_of, by_value, partial(batches, calls=40))
    assert_refused(make, HostSyncError, line_of(by_value), r"\.item\(\)", done=19)
    assert_falls_back(make, SkipReason.HOST_SYNC, line_of(by_value))


def test_a_way_that_is_no_longer_taken() -> None:
    """Batches that come to differ in each step are eager in the end, as they are in eager."""
    make = partial(rig_of, by_value, lambda: [batches(calls=1)[0]] * 12 + batches(calls=60))
    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig)
    with pytest.warns(UserWarning, match="reads a tensor's value on the host"):
        found = drive(rig, step)
    assert_same_runs(expected, found)
    assert 0 < step.stats.captured <= 4
    assert step.stats.replayed > 0


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
}


@pytest.mark.parametrize("mode", MODES)
def test_inference(mode: str) -> None:
    torch.manual_seed(0)
    model = Model().eval()

    def predict(x: Tensor, mask: Tensor) -> Tensor:
        rows = model(x)[mask]
        return rows * 2 if (x @ x.T).diagonal()[mask].sum() > 0 else rows

    fast = graphed(predict, backend="tape", owners={"model": model})
    with torch.no_grad(), MODES[mode]():
        for x, mask in batches():
            found, expected = fast(x, mask), predict(x, mask)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
    assert (fast.stats.captured, fast.stats.replayed > 10) == (1, True), fast.report()


def _with_mask(self: Any, batch: Any, dataloader_idx: int) -> Any:
    if not self.trainer.training:
        return batch
    x, y = batch
    return {"x": x, "y": y, "mask": torch.arange(len(y)) % 4 != y[0] % 4}


def _masked(self: Any, batch: Any, batch_idx: int) -> Tensor:
    mask = batch["mask"]
    loss = F.cross_entropy(self(batch["x"])[mask], batch["y"][mask])
    self.log("train_loss", loss)
    return loss


def test_a_fit_whose_batches_have_masks(tmp_path: Path) -> None:
    module = with_step(_masked, on_after_batch_transfer=_with_mask)
    fit = assert_fit_equals_eager(module, tmp_path, replayed=15, callback=tape(verify=3))
    assert fit.callback.stats.verified > 0


def changes_what_it_found(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    ones, others = mask.nonzero().view(-1), mask.nonzero().view(-1)
    ones.add_(1)
    return model(x)[others] * ones[:, None]


def writes_between_reads(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    rows = mask.nonzero().view(-1)
    rows.sub_(mask[:1].long())
    return model(x)[rows.clamp(min=0)] * 2 if rows.max() >= 0 else model(x)


def makes_constants_of_two_types(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    large = mask.int().sum(dtype=torch.int32) * 500_000_000
    out = model(x)
    if (large * torch.tensor([3], dtype=torch.int32)).sum() < -(10**12):
        out = out * 2
    return out * 3 if (large * torch.tensor([3])).sum() > 5 * 10**9 else out


def sets_the_default_type(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    share = (mask.sum() + 16_777_213) / 1
    torch.set_default_dtype(torch.float32)
    return model(x) * 2 if share > 16_777_216 else model(x)


def fills_what_another_mask_selects(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    out = model(x).clone()
    first = out[mask].sum()
    out[x[:, 0] > 1] = 0.0
    return out + first


def selects_along_a_dimension(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x).masked_select(mask.unsqueeze(1))


def looks_at_the_gradient_before(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    before = model.layer.weight.grad
    scale = 1.0 if before is None or before.abs().sum() < 0.5 else 0.5
    return F.dropout(model(x), 0.5) * scale


def transposes_in_place(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    square = mask.view(2, 3)[:, :2].clone()
    turned = square.t()
    square.t_()
    return model(x) * 2 if square[0, 1] and turned.shape else model(x)


def looks_a_row_up(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    try:
        return model(x) * (2 if model.kept[mask.sum() * 2 - 4] else 3)
    except IndexError:
        return model(x)


UNLIKE = [changes_what_it_found, writes_between_reads, makes_constants_of_two_types, sets_the_default_type]
UNLIKE += [fills_what_another_mask_selects, selects_along_a_dimension, looks_at_the_gradient_before, looks_a_row_up]
UNLIKE += [transposes_in_place]


EAGERLY = pytest.mark.filterwarnings("ignore:graphplan runs this step eagerly")


@EAGERLY
@pytest.mark.parametrize("forward", UNLIKE)
@pytest.mark.parametrize("verify", ["off", "geometric"])
def test_reads_that_are_easily_confused(forward: Forward, verify: str) -> None:
    """Equal to eager, replayed or not: with checks, and without them to cover up."""
    calls = partial(batches, lambda index: 4 if index < 14 else 2 + index % 4, calls=40)
    assert_same_as_eager(partial(rig_of, forward, calls), verify=verify, on_failure="eager")


def columns(index: int) -> tuple[Tensor, Tensor]:
    """A tensor and a view of it, and later another tensor of that shape."""
    x = torch.randn(ROWS, 8)
    return x, (x if index < 16 else torch.randn(ROWS, 8))[:, 1:5]


@pytest.mark.parametrize("verify", ["off", "geometric"])
def test_a_view_that_is_fed_and_made_too(verify: str) -> None:
    """A leaf is told from a view that the step itself makes of another leaf, which lies there in some calls only."""

    def forward(model: Any, x: Tensor, view: Tensor) -> Tensor:
        out = model(x) + 0 * x[:, 1:5].sum()
        return out * 2 if view.sum() > 0 else out

    make = partial(rig_of, forward, lambda: [columns(index) for index in range(50)])
    assert assert_same_as_eager(make, verify=verify).stats.replayed > 10


def test_rows_of_one_memory() -> None:
    """Leaves that are told apart may lie as far from each other as they like."""

    def calls() -> list[tuple[Any, ...]]:
        rows = torch.zeros(10, 64, dtype=torch.bool)
        rows[:, :ROWS] = torch.stack([mask_of(index, 3) for index in range(10)])
        return [(torch.randn(ROWS, 8), rows[at % 10, :ROWS], rows[at * 3 % 10, :ROWS]) for at in range(1, 10)] * 3

    step = assert_same_as_eager(partial(rig_of, by_two_masks, calls))
    assert step.stats.replayed > 5, step.report()


def test_an_owners_value_that_changes_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new way through the step is traced, though further ones wait for replays to save more: none are made."""
    monkeypatch.setattr(programs, "_ALLOWANCE", -math.inf)
    monkeypatch.setattr(programs, "_LONGEST", 2)

    def by_flag(model: Any, x: Tensor) -> Tensor:
        return model(x).clamp(-1, 1) if model.flag[0] == 1 else model(x)

    def make() -> Rig:
        change = {BEFORE + 10: 0, BEFORE + 60: 1}
        rig = rig_of(
            by_flag,
            lambda: [(torch.randn(ROWS, 8),) for _ in range(90)],
            lambda model, index: model.flag.fill_(change.get(index, model.flag.item())),
        )
        rig.owners["model"].register_buffer("flag", torch.ones(1, dtype=torch.uint8))
        return rig

    step = assert_same_as_eager(make)
    assert step.stats.captured == 2
    assert step.stats.replayed > 60, step.report()


class Part(nn.Module):
    """What a step looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", mask_of(0, 3))


@pytest.mark.parametrize("verify", ["off", "geometric"])
@pytest.mark.parametrize("when", [BEFORE - 4, BEFORE - 3, BEFORE - 2, BEFORE + 3], ids=["0", "1", "2", "replays"])
def test_a_part_that_is_replaced(when: int, verify: str) -> None:
    """By one with the same values, which change later on: between traces, before the capture, and between replays."""

    def forward(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        return model(x) * 2 if model.part.kept.sum() > 3 else model(x)

    def replaced(model: Any, index: int) -> None:
        if index == when:
            model.part = Part()
        if index == when + 6:
            model.part.kept.copy_(mask_of(0, 5))

    def make() -> Rig:
        rig = rig_of(forward, partial(batches, calls=40), replaced)
        rig.owners["model"].part = Part()
        return rig

    assert assert_same_as_eager(make, verify=verify).stats.replayed > 10


def way_of(source: Any, found: int, *operators: tuple[Any, ...]) -> batch_reads.BatchReads:
    """What clones a source, runs ``operators`` on that in place, and finds a number then."""
    alone, place, aten = frozenset[int | None](), host_reads.CodePosition("", 0, "", ()), torch.ops.aten
    slots = [batch_reads.TensorSlot(number) for number in range(2)]
    steps = [(aten.clone.default, slots[0]), *((run, slots[1], *args) for run, *args in operators)]
    steps.append((aten._local_scalar_dense.default, slots[1]))
    calls = [
        batch_reads.Call(
            run, str(run), tuple(args), {}, (1,) if at < len(operators) + 1 else (), alone, alone, at > 0, None
        )
        for at, (run, *args) in enumerate(steps)
    ]
    read = batch_reads.Read(place, batch_reads.Kind.VALUE, found, None, len(calls) - 1)
    return batch_reads.BatchReads(calls, [read], {0: source}, [])


def test_one_path_in_two_places() -> None:
    """What ran on the tensor of a part that was replaced is not taken for what runs on the new one's."""
    old, new = (
        way_of(batch_reads.Owned(Slot({"n": torch.tensor(number)}, "n", path="model.part.n"), 0), 1)
        for number in (0, 1)
    )
    search = batch_reads.Search([])
    assert [reads.find(search) for reads in (old, new, old)] == [None, [], None]


def test_what_one_way_wrote_is_not_found_by_another() -> None:
    """Nor is it written twice."""
    add, multiply = torch.ops.aten.add_.Tensor, torch.ops.aten.mul_.Tensor
    more = way_of(0, 100, (add, torch.tensor(1)))
    ways = [way_of(0, 6, (multiply, torch.tensor(2))), way_of(0, 4, (add, torch.tensor(1)))]
    search = batch_reads.Search([torch.tensor(3)])
    assert [reads.find(search) for reads in (more, *ways, more, *reversed(ways))] == [None, [], [], None, [], []]


def selects_by_chance(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return F.dropout(model(x)[(torch.rand(ROWS) < 0.5) & mask])


def adds_noise_first(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    noisy = x + torch.randn_like(x)
    return model(noisy[mask] if torch.rand([]) < 0.4 else noisy * torch.rand(8))


@pytest.mark.parametrize("forward", [selects_by_chance, adds_noise_first])
def test_what_the_host_draws_before_anything_else(forward: Forward) -> None:
    """It is drawn ahead to choose the program, and again in that: the generator moves as in eager steps."""
    step = assert_same_as_eager(partial(rig_of, forward, partial(batches, calls=60)))
    assert step.stats.captured >= 2
    assert step.stats.replayed >= 30, step.report()


def turns_rows(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    out = model(x[model.kept])
    model.kept.copy_(model.kept.roll(1))
    return out


def enqueues(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Keeps rows of earlier batches, at a place that is an index."""
    out = model(x)
    at = int(model.at)
    with torch.no_grad():
        model.queue[at], model.queue[at + 1] = out[0], out[1]
        model.at[0] = (at + 2) % 6
    return out * model.queue.sum()


@pytest.mark.parametrize("forward", [turns_rows, enqueues])
def test_state_that_is_read_before_it_changes(forward: Forward) -> None:
    """It is what it will be in the step; a pointer that takes a few values has a program for each."""

    def make() -> Rig:
        rig = rig_of(forward, partial(batches, calls=60))
        rig.owners["model"].register_buffer("queue", torch.zeros(6, 4))
        rig.owners["model"].register_buffer("at", torch.zeros(1, dtype=torch.long))
        return rig

    step = assert_same_as_eager(make)
    assert step.stats.captured == (3 if forward is enqueues else 1)
    assert step.stats.replayed >= 40


def writes_to_what_it_found(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    rows = mask.nonzero().view(-1)
    rows.sub_(rows.min())
    return model(x)[rows] * rows[:, None]


def returns_what_it_wrote(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    model.found = mask.nonzero()
    model.found.add_(1)
    return model(x)[mask] * model.found


@pytest.mark.parametrize("forward", [writes_to_what_it_found, returns_what_it_wrote])
@pytest.mark.parametrize("verify", ["off", 1])
@pytest.mark.twice
def test_what_was_found_is_written_to(forward: Forward, verify: Any) -> None:
    """Checks do not take it for a change of what is fed: an eager step writes to tensors of its own."""
    step = assert_same_as_eager(partial(rig_of, forward), verify=verify)
    assert counts(step) == (1, CALLS - BEFORE), step.report()


def keeps_the_number(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    model.count = int(mask.sum())
    return model(x)[mask]


@EAGERLY
@pytest.mark.parametrize("verify", ["off", "geometric"])
def test_a_number_that_another_way_sets_too(verify: str) -> None:
    """In the traces of one way it was set to what it was. That is no reason to leave it alone in replays."""

    def make() -> Rig:
        seen: list[int] = []
        calls = partial(batches, lambda index: 4 if index < 14 else 3 + index // 2 % 2, calls=40)
        rig = rig_of(keeps_the_number, calls, lambda model, index: seen.append(model.count))
        rig.extra["seen"] = seen
        return rig

    assert_same_as_eager(make, verify=verify, on_failure="eager")


def in_another_order(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    total = mask.sum()
    again = mask.sum() if model.flips else None
    double, triple = total * 2, total * 3
    out = model(x)
    if (double if model.flips else triple) + 0 > 10:
        out = out * 2
    return out * 1.5 if again is not None and again * 5 > 0 and triple > 0 and double > 0 else out


@EAGERLY
def test_ways_that_begin_alike() -> None:
    """What ran for one way is not taken for another operator of the next one."""

    def flip(model: Any, index: int) -> None:
        model.flips = index // 9 % 2 == 1

    calls = partial(batches, lambda index: 3 + index % 3, calls=60)
    assert_same_as_eager(partial(rig_of, in_another_order, calls, flip), verify="off", on_failure="eager")


class Counting(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


def test_operators_of_several_ways_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a batch that takes none of these ways: else it would wait for all of them."""
    found: list[Any] = []
    find = batch_reads.BatchReads.find
    monkeypatch.setattr(batch_reads.BatchReads, "find", lambda self, search: found.append(self) or find(self, search))

    def forward(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        return model(x) * int((mask & mask.clone()).sum())

    make = partial(rig_of, forward, partial(batches, lambda index: 1 + index // 3 % 3, calls=40))
    step = assert_same_as_eager(make, verify="off")
    search = batch_reads.Search([torch.randn(ROWS, 8), mask_of(0, 5)])
    with Counting() as counting:
        assert [reads.find(search) for reads in set(found)] == [None] * step.stats.captured == [None] * 3
    assert len(counting.ran) == len(set(counting.ran)) == 4


@EAGERLY
def test_a_step_whose_ways_differ_too_much_stands_down() -> None:
    """Programs of the ways that were known are closed, and nothing is looked for any more."""

    def forward(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        # A quarter takes one way, and hardly any two of the others the same one.
        return model(x) * (1 + int(torch.randint(0, 4000, ()).clamp(min=1000)) % 2)

    step = assert_same_as_eager(partial(rig_of, forward, partial(batches, calls=300)), on_failure="eager", verify="off")
    assert step.stats.captured > 0
    assert not step.machine.programs.all()
    assert step.machine.timing.down_because is not None


def test_a_way_that_ends_before_the_read() -> None:
    """An owner's number decides whether the step comes to the reads of its batch at all, or to the second one."""

    def forward(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        model.calls += 1
        if model.calls % 5 == 3:
            return model(x) * 3
        out = model(x) if mask.sum() > 1000 else model(x) * 2
        if model.calls % 5 == 4:
            return out
        return out if (mask.sum() + 1) > 1000 else out * 2

    def make() -> Rig:
        rig = rig_of(forward, partial(batches, lambda index: 5, calls=60))
        rig.owners["model"].calls = 0
        return rig

    step = assert_same_as_eager(make, verify="off")
    assert step.stats.captured == 3
    assert step.stats.replayed >= 40


@pytest.mark.parametrize(
    "second", [lambda x, mask, model: mask[1], lambda x, mask, model: x, lambda x, mask, model: model.held]
)
def test_a_way_that_ends_before_another_tensor_is_read(second: Callable[..., Tensor]) -> None:
    def forward(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        model.calls += 1
        out = model(x) if mask[0].sum() > 1000 else model(x) * 2
        if model.calls % 2:
            return out
        return out if second(x, mask, model).float().abs().sum() > 1000 else out * 2

    def make() -> Rig:
        rig = rig_of(forward, partial(batches, lambda index: 5, calls=60))
        rig.owners["model"].calls = 0
        rig.owners["model"].register_buffer("held", torch.ones(3))
        return rig

    step = assert_same_as_eager(make, verify="off")
    assert step.stats.captured == 2
    assert step.stats.replayed >= 40


def by_a_draw(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x) * complex(torch.rand_like(x[:, 0]).sum() * 2).real


def by_a_used_draw(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x) * complex((torch.rand(ROWS) * model(x)[:, 0]).sum().detach()).real


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (by_a_draw, r"The step draws this value at random: draw it in the data loader"),
        (by_a_used_draw, r"Keep the value on the device"),
    ],
)
def test_the_way_out_fits_what_is_read(forward: Forward, text: str) -> None:
    assert_falls_back(partial(rig_of, forward, partial(batches, calls=40)), SkipReason.HOST_SYNC, text)


@pytest.mark.twice
def test_an_attribute_is_the_way_out_for_what_a_cache_holds() -> None:
    """As that refusal says."""

    def make() -> Rig:
        rig = rig_of(lambda model, x, mask: model(x) * int(model.kept[1]))
        rig.owners["model"].kept = torch.tensor([1, 2])
        return rig

    step = assert_same_as_eager(make)
    assert counts(step) == (1, CALLS - BEFORE), step.report()
    assert "read before the step: model.kept, first at test_batch_reads.py" in step.report()


def by_two_numbers(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    out = model(x) * int(torch.tensor(ROWS) + 0 * mask.sum())
    return out * int(mask.sum())  # culprit


def test_the_read_that_differs_is_named() -> None:
    """Not the first one, which never does."""

    def calls() -> list[tuple[Any, ...]]:
        return [(torch.randn(ROWS, 8), torch.arange(99) < index) for index in range(40)]

    text = (
        r"^graphplan .*: the values that the step reads of the batch .* differ too much .*: 16 .* "
        rf"{line_of(by_two_numbers)}"
    )
    assert_falls_back(partial(rig_of, by_two_numbers, calls), SkipReason.HOST_SYNC, text)


def test_signatures_that_do_not_come_again() -> None:
    """Each is traced for a read that finds the same in all of them."""
    step = graph_step(lambda x: x * int((x > 2).any()), backend="tape", on_failure="eager", verify="off")
    calls = [torch.ones(1 + number // 2) for number in range(60)]
    with pytest.warns(UserWarning, match=r"6 batch signatures were traced .* none was repeated. Pad the"):
        found = [step(x) for x in calls]
    assert all(torch.equal(one, x * 0) for one, x in zip(found, calls, strict=True))


def of_sum(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    return model(x) * int((mask.sum() * 1000 + x.shape[0]) % 97)


def with_sums(calls: int, sums: Callable[[int], int]) -> list[tuple[Any, ...]]:
    """Masks of 240 numbers, of which so many are true."""
    return [(torch.randn(ROWS, 8), (torch.arange(240) < sums(index)).view(ROWS, 40)) for index in range(calls)]


@EAGERLY
def test_batches_of_which_few_take_a_known_way() -> None:
    """To look for a way takes time: where two thirds of the batches take none, it ends, though some do now and then."""
    calls = partial(with_sums, 160, lambda index: 1 if index % 5 == 0 or index < 8 else 2 + index)
    step = assert_same_as_eager(partial(rig_of, of_sum, calls), verify="off", on_failure="eager")
    assert step.stats.replayed >= 8
    assert (
        "the values that the step reads of the batch on the host differ too much from call to call: "
        "most of them did not match"
    ) in step.report()


@EAGERLY
def test_batches_of_which_most_are_like_the_one_before() -> None:
    """They are replayed without a look; of those that are looked at, three of four take no known way."""
    calls = partial(with_sums, 240, lambda index: 1 if index % 10 > 2 or index < 8 else index % 239)
    step = assert_same_as_eager(partial(rig_of, of_sum, calls), verify="off", on_failure="eager")
    assert step.stats.replayed > 120 and "most of them" not in step.report(), step.report()
    assert (
        step.stats.reasons[
            "the step reads values of this batch on the host, and no program has been captured for these values"
        ]
        > 10
    )


@EAGERLY
@pytest.mark.parametrize(("room", "goes_on"), [(1, False), (8, True)], ids=["one", "eight"])
def test_ways_that_are_known_and_have_no_program(room: int, goes_on: bool) -> None:
    """Half of the batches take one of four known ways: to look for these ends where they are not replayed."""
    calls = partial(with_sums, 260, lambda index: 1 + index % 8 // 2 if index % 2 or index < 20 else 6 + index % 230)
    options = {"verify": "off", "on_failure": "eager", "max_graphs": room}
    step = assert_same_as_eager(partial(rig_of, of_sum, calls), **options)
    assert (step.stats.replayed > 90) is goes_on
    assert ("most of them did not match" in step.report()) is not goes_on


def by_half_the_model(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    out = x
    for _ in range(40):
        out = (out * 1.01).tanh()
    return model(x) * int((out > 0).sum())  # culprit


def test_reads_that_take_long_are_refused() -> None:
    """Operators that run before each replay must be few beside those of the step."""
    assert_refused(partial(rig_of, by_half_the_model), HostSyncError, line_of(by_half_the_model))
