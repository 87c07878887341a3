"""What a step replaces, put there by the host from tensors that others have; and several names of one thing.

Checks are off in here: replays have to be right by themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import graphplan.plan.plan
import graphplan.step.managed
from graphplan import HostEffectError, SkipReason, graph_step
from graphplan.owners.walk import walk_owners
from graphplan.program.program import Program
from graphplan.step.replays import Replays
from tests.crossing import each
from tests.models import CALLS, float_batches
from tests.twins import (
    BEFORE_REPLAY,
    SECOND_TRACE,
    Rig,
    assert_equals_eager,
    assert_refused,
    assert_same_as_eager,
    build,
    managed,
)


class Recurrent(nn.Module):
    """Replaces a hidden state and a cell state in each step; others are read, or belong to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)
        self.register_buffer("zeros", torch.zeros(4, 8))
        self.register_buffer("ones", torch.ones(4, 8))
        self.h: Any = self.zeros
        self.c: Any = self.ones
        self.pair = (torch.zeros(4, 8), torch.zeros(4, 8))
        self.best = torch.zeros(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.h, self.c = (state.detach() for state in self.cell(x, (self.h, self.c)))
        first, second = self.pair
        self.pair = (second, first * 0.5 + second * 0.25 + self.h)
        return self.h.sum() + self.pair[1].mean() + self.best.mean()


def hidden(model: Any) -> None:
    """The buffer that a state begins with."""
    model.h = model.zeros


def both(model: Any) -> None:
    """One tensor in two places."""
    model.h = model.c = model.zeros


def both_new(model: Any) -> None:
    """One new tensor in two places."""
    model.h = model.c = torch.zeros_like(model.zeros)


def pair(model: Any) -> None:
    """One tensor twice in a tuple."""
    model.pair = (model.ones, model.ones)


def swapped(model: Any) -> None:
    """Each in the other's place."""
    model.h, model.c = model.c, model.h


def one_from_the_other(model: Any) -> None:
    """What is carried in one place, in another as well."""
    model.c = model.h


def best(model: Any) -> None:
    """What is carried, in a place that is only read."""
    model.best = model.h


def best_part(model: Any) -> None:
    """Another tensor on the memory of what is carried, in a place that is only read."""
    model.best = model.h.detach()


def best_and_reset(model: Any) -> None:
    """The old state goes on elsewhere."""
    model.best = model.h
    model.h = model.zeros


def one_row(model: Any) -> None:
    """A tensor whose rows are one memory."""
    model.h = torch.zeros_like(model.zeros[:1]).expand(4, 8)


def made_in_inference_mode(model: Any) -> None:
    """A tensor of which autograd may know nothing."""
    with torch.inference_mode():
        model.h = torch.zeros_like(model.zeros)


RESETS = [
    *(hidden, both, both_new, pair, swapped, one_from_the_other, best, best_part, best_and_reset),
    made_in_inference_mode,
]


def reset_rig(reset: Callable[[Any], None], first: int, every: int) -> Rig:
    """The host resets the model now and then."""
    model = Recurrent()

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)

    def after(index: int) -> None:
        if index >= first and (index - first) % every == 0:
            reset(model)

    return Rig(step, {"model": model}, [(x[:4],) for x, _ in float_batches(CALLS)], after)


@each(times=2, first=[BEFORE_REPLAY - 2, BEFORE_REPLAY - 1, BEFORE_REPLAY + 1], reset=RESETS)
def test_what_a_state_is_reset_to_stays_what_it_is(reset: Callable[[Any], None], first: int) -> None:
    """Before the captured call, and before replays."""
    step = assert_same_as_eager(lambda: reset_rig(reset, first, every=5), verify="off")
    # What else has the memory of, or is the same tensor as, cannot lie where the program reads: a step that is eager
    # makes another, or the step is captured anew.
    follows = (step.stats.captured, step.stats.skipped[SkipReason.GUARD]) == (1, 0)
    assert follows is (reset not in (best, best_part))


@pytest.mark.parametrize("reset", [both, both_new, pair, one_from_the_other])
def test_a_reset_between_traces(reset: Callable[[Any], None]) -> None:
    """Traces with and without say nothing of each other."""
    make = lambda: reset_rig(reset, SECOND_TRACE - 1, every=100)  # noqa: E731
    assert_equals_eager(make, replayed=CALLS - BEFORE_REPLAY - 2, verify="off")


@pytest.mark.parametrize(("first", "captured", "replayed"), [(BEFORE_REPLAY - 2, 1, 13), (BEFORE_REPLAY + 1, 2, 9)])
def test_rows_that_are_one_memory(first: int, captured: int, replayed: int) -> None:
    """A capture begins with rows of their own; kernels are chosen by strides, so that replays are not for others: after
    a few replays an eager step takes their place, else the step is captured anew.
    """
    make = lambda: reset_rig(one_row, first, every=10)  # noqa: E731
    assert_equals_eager(make, captured=captured, replayed=replayed, verify="off")


def meter_rig() -> Rig:
    """An epoch begins with one zero under all names."""
    meter = dict.fromkeys(("loss", "count"), torch.zeros(()))

    def step(x: Tensor) -> Tensor:
        meter["loss"] = meter["loss"] + x.sum()
        meter["count"] = meter["count"] + 1
        return meter["loss"] / meter["count"]

    def after(index: int) -> None:
        if index % 5 == 4:
            meter.update(dict.fromkeys(meter, torch.zeros(())))

    return Rig(step, {"meter": meter}, [(x,) for x, _ in float_batches(CALLS)], after)


def test_a_dictionary_of_one_zero() -> None:
    """As ``dict.fromkeys`` makes it."""
    assert_equals_eager(meter_rig, verify="off")


class Host:
    """What the host holds, under two names each."""

    def __init__(self) -> None:
        self.factors: Any = {"loss": 1.0, "offset": 0.5}
        self.offsets = self.factors
        self.terms: Any = [1.0, 0.5]
        self.shifts = self.terms
        self.mean = self.std = torch.ones(4)
        self.flat = self.std.detach()


def other_dictionary(host: Host) -> None:
    """Only one name leads elsewhere."""
    host.offsets = {**host.offsets, "offset": 3.0}


def other_dictionary_first(host: Host) -> None:
    """Likewise for the name that comes first."""
    host.factors = {**host.factors, "loss": 3.0}


def other_list(host: Host) -> None:
    """Likewise."""
    host.shifts = [1.0, 3.0]


def other_tensor(host: Host) -> None:
    """Likewise."""
    host.std = torch.full((4,), 4.0)


def other_tensor_first(host: Host) -> None:
    """Likewise."""
    host.mean = torch.full((4,), 4.0)


def other_view(host: Host) -> None:
    """Another tensor on the same memory was there."""
    host.flat = torch.full((4,), 4.0)


def named_rig(change: Callable[[Host], None]) -> Rig:
    """A step that reads everything under both names."""
    host, model = Host(), nn.Linear(8, 4)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = (model(x) - host.mean) / host.std * host.flat
            scaled = y * host.factors["loss"] + host.offsets["offset"]
            return scaled * host.terms[0] + host.shifts[1]

    after = lambda index: change(host) if index == BEFORE_REPLAY + 2 else None  # noqa: E731
    return Rig(step, {"model": model, "host": host}, [(x,) for x, _ in float_batches(CALLS)], after)


CHANGES = [other_dictionary, other_dictionary_first, other_list, other_tensor, other_tensor_first, other_view]


@pytest.mark.parametrize("change", CHANGES)
def test_one_of_two_names_leads_elsewhere(change: Callable[[Host], None]) -> None:
    """What the step finds there is not what the other name leads to any more."""
    assert_equals_eager(lambda: named_rig(change), captured=2, replayed=CALLS - BEFORE_REPLAY - 4, verify="off")


class Totals(nn.Module):
    """Adds to one tensor in place before it reads another one, which it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(8)
        self.mean = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.sum(0))
        self.mean = self.mean * 0.5 + x.mean(0)
        return self.mean + self.total


def mean_from_total(model: Totals) -> None:
    """What the step writes to first, where it then reads."""
    model.mean = model.total


def total_from_mean(model: Totals) -> None:
    """The other way round."""
    model.total = model.mean


def part_of_total(model: Totals) -> None:
    """Another tensor on that memory."""
    model.mean = model.total.view(8)


@pytest.mark.parametrize("first", [BEFORE_REPLAY - 2, BEFORE_REPLAY + 1])
@pytest.mark.parametrize("change", [mean_from_total, total_from_mean, part_of_total])
def test_what_the_step_writes_to_in_a_place_that_it_replaces(change: Callable[[Any], None], first: int) -> None:
    """In that step, what it writes is what it reads: it is captured anew, before the first program or after it."""

    def make() -> Rig:
        model = Totals()
        after = lambda index: change(model) if index == first else None  # noqa: E731
        return Rig(model.forward, {"model": model}, [(x,) for x, _ in float_batches(CALLS)], after)

    step = assert_same_as_eager(make, verify="off")
    assert step.stats.replayed >= CALLS - 2 * BEFORE_REPLAY


def both_apart(host: Host) -> None:
    """All names lead elsewhere, each to something else."""
    host.mean, host.std, host.flat = torch.full((4,), 2.0), torch.full((4,), 3.0), torch.full((4,), 4.0)


def rows(host: Host) -> None:
    """One memory, but other parts of it."""
    host.mean, host.std, host.flat = torch.arange(1.0, 13.0).view(3, 4)


def overlapping(host: Host) -> None:
    """Parts that have something in common."""
    memory = torch.arange(1.0, 9.0)
    host.mean, host.std, host.flat = memory[:4], memory[2:6], memory[4:]


@pytest.mark.parametrize("change", [both_apart, rows, overlapping])
def test_all_names_lead_to_different_things(change: Callable[[Host], None]) -> None:
    """What was one memory is several."""
    assert_equals_eager(lambda: named_rig(change), captured=2, replayed=CALLS - BEFORE_REPLAY - 4, verify="off")


class Learned(nn.Module):
    """A state that begins as parameters, as what the step writes to, or as a tensor with attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        self.first = nn.Parameter(torch.randn(4, 8))
        self.register_buffer("mean", torch.ones(4, 8))
        self.h: Any = torch.zeros(4, 8)
        self.asking = torch.ones(4, 8, requires_grad=True)
        self.tag: Any = torch.ones(4, 8)
        self.tag.note = "one"


def learned_rig(begin: Callable[[Any], Any], every: int, first: int) -> Rig:
    """A training step; the host begins anew now and then."""
    model = Learned()
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)

    def step(x: Tensor) -> Tensor:
        model.mean.mul_(0.9)
        optimizer.zero_grad()
        h = model.cell(x, model.h)
        loss = h.square().mean()
        loss.backward()
        optimizer.step()
        model.h = h.detach()
        return loss.detach()

    def after(index: int) -> None:
        if index >= first and (index - first) % every == 0:
            model.h = begin(model)

    owners = {"model": model, "optimizer": optimizer}
    return Rig(step, owners, [(x[:4],) for x, _ in float_batches(CALLS)], after)


BEGINNINGS: dict[str, Callable[[Any], Tensor]] = {
    "a tensor that asks for gradients": lambda model: model.asking,
    "a parameter's values": lambda model: model.first.detach(),
    "a part of a weight": lambda model: model.cell.weight_hh.data[:4],
    "what the step writes to": lambda model: model.mean,
    "a tensor with attributes": lambda model: model.tag,
}


@each(first=[BEFORE_REPLAY - 2, BEFORE_REPLAY + 1], name=BEGINNINGS)
def test_what_a_state_begins_as_is_not_written_to(name: str, first: int) -> None:
    """Neither at the capture nor by replays."""
    make = partial(learned_rig, BEGINNINGS[name], 100, first)
    step = assert_same_as_eager(make, verify="off")
    assert step.stats.replayed >= CALLS - 2 * BEFORE_REPLAY - 1


def test_a_state_that_begins_in_each_step_as_what_is_written_is_refused() -> None:
    """A replay would leave the new state there. The capture tells, after one trace and again after two."""
    make = partial(learned_rig, BEGINNINGS["what the step writes to"], 1, 0)
    text = (
        r"assigns a new tensor to model\.h, which starts as the same tensor as model\.mean: .* a "
        r"copy: model\.h = model\.mean\.detach"
    )
    assert_refused(make, HostEffectError, text, done=BEFORE_REPLAY + 1)
    assert_refused(make, HostEffectError, text, done=BEFORE_REPLAY - 1, verify="off")


def test_a_state_that_is_gone_at_the_capture_is_refused() -> None:
    """Two traces began with tensors there. After one, the step is traced anew, with none there."""
    make = partial(learned_rig, lambda model: None, 100, BEFORE_REPLAY - 2)
    text = r"the step found a tensor at model\.h in its traces, but there is none now"
    assert_refused(make, HostEffectError, text, done=BEFORE_REPLAY - 1, verify="off")
    step = assert_same_as_eager(partial(learned_rig, lambda model: None, 100, BEFORE_REPLAY - 3))
    assert (step.stats.traced, step.stats.captured) == (3, 1), step.report()


def test_a_state_that_is_fed_too() -> None:
    """The caller's tensor stays what it is."""

    def make() -> Rig:
        model = Learned()
        starts = [x[:4].clone() for x, _ in float_batches(CALLS)]

        def step(x: Tensor, start: Tensor) -> Tensor:
            model.h = model.h * 0.5 + x
            return (model.h + start).sum()

        def begin(index: int) -> None:
            model.h = starts[index % CALLS]

        begin(0)
        calls: list[tuple[Any, ...]] = [
            (x[:4], start) for (x, _), start in zip(float_batches(CALLS), starts, strict=True)
        ]
        return Rig(step, {"model": model}, calls, lambda index: begin(index + 1))

    step = assert_same_as_eager(make, verify="off")
    assert step.stats.captured == 1


def test_two_steps_of_one_state_take_turns_without_moving_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one step's programs write is where the other's look for it."""
    moves: list[Program] = []
    resync = Program.resync
    monkeypatch.setattr(Program, "resync", lambda self, *args: (moves.append(self), resync(self, *args))[1])
    rig = build(lambda: reset_rig(hidden, 1000, 1000))
    steps = [managed(replace(rig, step=step), verify="off") for step in (rig.step, lambda x: rig.step(x) * 2)]
    for args in rig.calls:
        for step in steps:
            step(*args)
    assert [step.stats.replayed for step in steps] == [CALLS - BEFORE_REPLAY] * 2
    assert len(moves) <= 2


class _Holding(nn.Module):
    """Makes an object anew in each forward, counts its steps, and branches on their number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.prior = torch.distributions.Normal(self.layer.bias, torch.ones(3), validate_args=False)
        return self.layer(x)


@pytest.mark.parametrize("reads", [False, True], ids=["batch-alone", "reads-of-the-batch"])
def test_an_object_that_eager_code_replaces_costs_no_walk(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation makes the object anew. Replays put the program's own object there, as steps put a new one."""
    torch.manual_seed(0)
    walks: list[int] = []
    for place in (graphplan.step.managed, graphplan.plan.plan):
        monkeypatch.setattr(place, "walk_owners", lambda owners: (walks.append(1), walk_owners(owners))[1])
    model = _Holding()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

    def train_step(x: Tensor, label: Tensor) -> Tensor:
        optimizer.zero_grad()
        out = model(x)
        loss = out.square().mean() - model.prior.log_prob(x).mean() * (0.1 if model.calls < 5 else 0.2)
        if reads:
            loss = loss + out[label == 1].sum()
        loss.backward()
        optimizer.step()
        model.calls += 1
        return loss

    def run(step: Callable[..., Tensor]) -> tuple[list[float], list[int]]:
        torch.manual_seed(1)
        losses, counts = list[float](), list[int]()
        for index in range(40):
            walks.clear()
            losses.append(step(torch.randn(4, 3), torch.tensor([1, 1, 0, 0])).item())
            counts.append(len(walks))
            if index % 4 == 3:
                with torch.no_grad():
                    model(torch.ones(4, 3))
        return losses, counts

    start = copy.deepcopy(model.state_dict())
    expected, _ = run(train_step)
    model.load_state_dict(start)
    model.calls = 0
    step = graph_step(train_step, owners={"model": model, "optimizer": optimizer}, verify="off")
    found, counts = run(step)
    assert found == expected and step.stats.replayed >= 25, step.report()
    assert max(counts[20:]) == 0
    assert model.prior.scale.requires_grad is False and torch.equal(model.prior.loc, model.layer.bias)


def exhaust(*args: Any) -> None:
    """As if memory ran out."""
    raise torch.OutOfMemoryError("CUDA out of memory")


def _around(mean: Tensor) -> torch.distributions.Normal:
    return torch.distributions.Normal(mean, torch.ones(()), validate_args=False)


@pytest.mark.parametrize(("verify", "fails"), [("off", False), (1, False), (1, True)])
def test_an_object_that_eager_code_replaces_is_there_for_another_branch(
    verify: Any, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most steps make it anew unread. A step that branches otherwise is eager, and reads what was there before it."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    kept: Any = model

    def step(x: Tensor) -> Tensor:
        total = model(x).sum()
        if total.detach() > 1000:
            return total + kept.last.loc
        kept.last = _around(total.detach() * 2)
        return total

    def run(call: Callable[[Tensor], Tensor]) -> list[float]:
        torch.manual_seed(1)
        kept.last, results = _around(torch.zeros(())), []
        for index in range(24):
            if fails or index % 4 == 3:
                kept.last = _around(torch.tensor(float(index)))
            odd = index in (15, 19)
            results.append(
                call(torch.full((2, 3), 1e4) * model.weight.detach().sign() if odd else torch.randn(2, 3)).item()
            )
            results.append(kept.last.loc.item())
        return results

    expected = run(step)
    if fails:
        # No memory for the eager half of the first check: the call is a replay.
        monkeypatch.setattr(Replays, "_eager", exhaust)
    graphed = graph_step(step, owners={"model": model}, backend="tape", verify=verify)
    assert run(graphed) == expected
    assert graphed.stats.replayed >= 14, graphed.report()
    assert graphed.stats.skipped[SkipReason.HOST_SYNC] == 2


def test_what_was_put_in_a_place_before_is_not_looked_at_any_more() -> None:
    """First a part of something that the host goes on writing to, then what the step carries."""

    def make() -> Rig:
        model = Recurrent()
        kept = torch.ones(2, 4, 8)

        def step(x: Tensor) -> Tensor:
            with torch.no_grad():
                return model(x)

        def after(index: int) -> None:
            if index == BEFORE_REPLAY:
                model.best = kept[1]
            if index == BEFORE_REPLAY + 2:
                model.best = model.h
            if index > BEFORE_REPLAY:
                kept.add_(1.0)

        return Rig(step, {"model": model}, [(x[:4],) for x, _ in float_batches(CALLS)], after)

    assert_same_as_eager(make, verify="off")


def test_a_tuple_with_a_list_in_it() -> None:
    """The tensors of the tuple are one state, and those of the list another; a new list is another one to guards."""

    def make() -> Rig:
        model = Recurrent()
        model.state = (torch.zeros(()), [torch.zeros(())])

        def step(x: Tensor) -> Tensor:
            count, (total,) = model.state
            with torch.no_grad():
                model.state = (count + 1, [total + x.mean()])
                return model(x) * total

        return Rig(step, {"model": model}, [(x[:4],) for x, _ in float_batches(CALLS)])

    step = assert_same_as_eager(make, verify="off", on_failure="eager")
    assert step.stats.replayed > 0
