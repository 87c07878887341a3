"""Further shapes of a step that has a plan: one eager step, two traces, one capture, one check; and eager's numbers."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from graphplan import graph_step, graphed
from graphplan.errors import HostEffectError, SkipReason
from graphplan.step import programs
from graphplan.step.managed import Managed
from graphplan.step.reasons import Reasons
from tests.models import Box, training_rig
from tests.twins import BEFORE_REPLAY, FURTHER, Rig, assert_same_as_eager, assert_same_runs, build, drive, managed

E, T, C, R, V = "eager", "traced", "captured", "replayed", "verified"
FIRST = [E, E, E, T, T, C, V]
"""What becomes of the first calls of the first shape, and of those of a further one, with its first replay."""
MORE = [E, T, T, C, V]


def kinds_of(step: Any, calls: Sequence[tuple[Any, ...]]) -> list[str]:
    """What became of each call."""
    kinds = []
    for args in calls:
        step(*args)
        kinds.append(step.stats.last_kind)
    return kinds


class Net(nn.Module):
    """Normalises over the batch and draws dropout masks; ``extra`` is for tests."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.extra = nn.Linear(3, 3)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


LossOf = Callable[[Net, Tensor], Tensor]


def rig_of(loss_of: LossOf, sizes: Sequence[int]) -> Rig:
    """Trains on batches of those sizes."""
    model = Net()
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss

    return Rig(train_step, {"model": model, "optimizer": optimizer}, [(torch.randn(size, 6),) for size in sizes])


def plain(model: Net, x: Tensor) -> Tensor:
    """A loss in which nothing but the model is fed."""
    return model(x).square().mean()


def run(loss_of: LossOf, sizes: Sequence[int], **options: Any) -> tuple[Any, list[str]]:
    """The graphed step after calls of those sizes, which left what eager ones leave, and what became of each."""
    rig = build(partial(rig_of, loss_of, sizes))
    expected = drive(rig, rig.step)
    rig = build(partial(rig_of, loss_of, sizes))
    step = managed(rig, **options)
    kinds: list[str] = []

    def call(x: Tensor) -> Tensor:
        result: Tensor = step(x)
        kinds.append(step.stats.last_kind)
        return result

    assert_same_runs(expected, drive(rig, call))
    return step, kinds


@pytest.mark.twice
def test_one_shape_after_the_other() -> None:
    """The first one takes six calls, each further one four, and its first replay is checked."""
    step, kinds = run(plain, [8] * 9 + [5] * 7 + [3] * 7 + [8, 5, 3])
    assert kinds == [*FIRST, V, R, *MORE, R, R, *MORE, R, R, V, R, R]
    assert (step.stats.captured, step.stats.recaptured) == (3, 0)
    assert len(FIRST) - 1 == BEFORE_REPLAY
    assert len(MORE) - 1 == FURTHER


@pytest.mark.frugal
@pytest.mark.parametrize("measured", [{"eager": 1e-3, "replayed": 1e-4}, {}], ids=["steps", "calls"])
def test_a_further_shape_waits_until_replays_have_paid_for_the_first_one(measured: dict[str, float]) -> None:
    """Starting takes a bounded time longer than training without graphplan. Where no steps are timed from end to end,
    calls are compared with calls.
    """
    rig = build(partial(rig_of, plain, [8] * 8 + [5] * 14))
    step = managed(rig, verify="off")
    first, further = rig.calls[:8], rig.calls[8:]
    assert kinds_of(step, first) == [*FIRST[:-1], R, R]
    step.stats.measured = measured
    step.stats.phases["trace"] += 10.0
    assert kinds_of(step, further[:6]) == [E] * 6
    step.stats.replayed += 100_000
    # Each of them has taken no time at all.
    step.stats.phase_counts["steady"] += 10**9
    assert kinds_of(step, further[6:])[-2:] == [R, R]
    assert step.stats.captured == 2
    assert "a new signature is traced once replays have saved the time of earlier traces" in step.report()


@pytest.mark.frugal
@pytest.mark.parametrize("goes_on", [True, False], ids=["soon", "late"])
def test_a_further_shape_starts_where_replays_go_on_to_pay(monkeypatch: pytest.MonkeyPatch, goes_on: bool) -> None:
    """What replays save is expected of those that follow, too, but of no more than the first calls, and a shape has to
    have come a few times.
    """
    rig = build(partial(rig_of, plain, [8] * 8 + [5] * 14))
    step = managed(rig, verify="off")
    kinds_of(step, rig.calls[:8])
    monkeypatch.setattr(programs, "_HORIZON", 500 if goes_on else 8)
    stats = step.stats
    # Two replays have saved 180 ms, and starting took 5 s: there may be some hundreds more.
    stats.measured = {"eager": 0.1, "replayed": 0.01}
    stats.phases["trace"] += 5.0
    kinds = kinds_of(step, rig.calls[8:])
    assert kinds[0] == E
    assert kinds[-2:] == ([R, R] if goes_on else [E, E])


@pytest.mark.frugal
@pytest.mark.twice
def test_calls_that_have_to_wait_are_looked_up_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find out what they are fed takes long beside a small step. Once replays have paid, their programs come."""
    looks: list[str] = []
    look = Reasons.of

    def counted(reasons: Reasons, call: Any) -> Any:
        looks.append(reasons._step.stats.last_kind)
        return look(reasons, call)

    monkeypatch.setattr(Reasons, "of", counted)
    monkeypatch.setattr(programs, "_LONGEST", 128)
    sizes = [8] * 9 + [*range(9, 21)] * 9
    _, kinds = run(plain, sizes + [8] * 400 + [9] * 60)
    assert kinds[: len(FIRST)] == FIRST
    assert E not in kinds[len(sizes) : len(sizes) + 400]
    assert kinds[-1] == R
    assert len(looks) < len(kinds) - kinds.count(R)


@pytest.mark.twice
def test_shapes_in_turns() -> None:
    """They warm up together."""
    sizes = [3, 4, 5, 6, 7, 8]
    _, kinds = run(plain, sizes * 9)
    rounds = [kinds[start : start + 6] for start in range(0, len(kinds), 6)]
    assert rounds[:5] == [[E] * 6, [T] * 6, [T] * 6, [C] * 6, [V] * 6]
    # The eighth replay is due, and that of the shape whose check is the longest ago: the thirteenth; then the 26th.
    assert rounds[5:] == [[R] * 6, [V, *[R] * 5], [R] * 6, [R, V, *[R] * 4]]


@pytest.mark.parametrize("model", ["mlp", "cnn", "lstm", "transformer"])
@pytest.mark.crossed(2)
@pytest.mark.twice
def test_mixed_shapes_are_eagers(model: str) -> None:
    """Batch normalisation, dropout, recurrence and attention, in no order, with clipping and a schedule."""
    order = torch.randint(5, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    make = partial(training_rig, model, "adamw", sizes=[(8, 5, 3, 2, 12)[number] for number in order])
    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig)
    assert_same_runs(expected, drive(rig, step))
    assert (step.stats.traced, step.stats.captured) == (2 * 5, 5)
    assert step.stats.replayed > 60


def counts_of(step: Any) -> tuple[int, int, int]:
    """Captures, recaptures, and calls that are eager for want of room."""
    return step.stats.captured, step.stats.recaptured, step.stats.skipped[SkipReason.MAX_GRAPHS]


@pytest.mark.parametrize("order", ["in turns", "at random"])
@pytest.mark.twice
def test_more_shapes_than_programs(order: str) -> None:
    """The programs that there are stay, and calls of other shapes are eager."""
    sizes = [3, 4, 5, 6, 7, 8] * 40
    if order == "at random":
        random.Random(5).shuffle(sizes)
    step, kinds = run(plain, sizes, max_graphs=3)
    captured, recaptured, eager = counts_of(step)
    assert (captured, recaptured) == (3, 0)
    # None is traced for which there is going to be no room.
    assert step.stats.traced == 2 * 3
    assert eager > 80
    assert "all 3 programs that max_graphs= allows are in use" in step.report()
    # Neither a trace nor a warm-up comes late.
    assert {kind for kind in kinds[80:] if kind not in (R, V)} == {E}
    assert kinds[80:].count(E) < eager


def test_a_program_that_is_no_longer_used_makes_room() -> None:
    """At once for a shape that is new; for one that has waited while it was used, after a number of calls."""
    first, waits = [8, 5] * 12, [8, 5, 3] * 6
    step, _ = run(plain, [*first, *waits], max_graphs=2)
    # Its first call is one on the way to a program.
    assert counts_of(step) == (2, 0, 5)
    step, kinds = run(plain, [*first, *waits, *[8, 3] * 40], max_graphs=2)
    assert step.stats.captured == 3
    assert set(kinds[-10:]) <= {R, V}
    step, kinds = run(plain, [*first, *[8, 4] * 6], max_graphs=2)
    assert counts_of(step) == (3, 0, 0)


def derived(model: Net, x: Tensor) -> Tensor:
    """Numbers, positions and constants that follow from the shape."""
    places = torch.arange(len(x))[:, None] / len(x)
    weight = torch.tensor([1.0 / len(x), float(len(x))])
    scores = model(x)[: len(x) - 1] + places[1:]
    return scores.sum() / x.shape[0] + (scores.mean() * weight).sum()


@pytest.mark.twice
def test_numbers_that_follow_from_the_shape() -> None:
    step, kinds = run(derived, [8] * 8 + [5] * 6 + [3] * 6 + [8, 5, 3] * 3)
    assert kinds[8:20] == [*MORE, R, *MORE, R]
    assert set(kinds[20:]) == {R, V}
    assert step.stats.traced == 2 * 3


def branching(model: Net, x: Tensor) -> Tensor:
    """Small batches take another path."""
    return plain(model, x) if len(x) > 4 else model.extra(model(x)).abs().mean()


@pytest.mark.twice
def test_shapes_that_take_another_path() -> None:
    _, kinds = run(branching, [8] * 7 + [4] * 6 + [3] * 6 + [6] * 5)
    assert kinds == [*FIRST, *MORE, V, *MORE, R, *MORE]


@pytest.mark.twice
def test_a_layer_that_only_a_further_shape_uses() -> None:
    """Nobody named it, and its eager step is not watched: the trace finds it."""
    head = nn.Linear(3, 3)

    def loss_of(model: Net, x: Tensor) -> Tensor:
        return plain(model, x) if len(x) > 4 else head(model(x)).abs().mean()

    step, kinds = run(loss_of, [8] * 7 + [4] * 8 + [3] * 5)
    assert step.stats.captured == 3
    assert kinds[-5:] == MORE


def schedule_of(hidden: Box) -> LossOf:
    """In small batches, a number that is another one in each step, and that nobody can see."""

    def loss_of(model: Net, x: Tensor) -> Tensor:
        hidden.item += len(x) < 5
        return plain(model, x) * (1.0 if len(x) > 4 else 1.0 / hidden.item)

    return loss_of


def decaying(model: Net, x: Tensor) -> Tensor:
    """Small batches change a Python value that they do not use."""
    if len(x) < 5:
        model.scale *= 0.5
    return plain(model, x)


REFUSED = {
    "a hidden number": (lambda: schedule_of(Box(0)), "gets other="),
    "an effect": (lambda: decaying, r"the step changes model\.scale in Python"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_two_traces_refuse_is_refused(name: str) -> None:
    """Calls of that shape stay eager, and the others are replayed."""
    loss_of, text = REFUSED[name]
    sizes = [8] * 7 + [4] * 16 + [8, 4] * 4

    rig = build(lambda: rig_of(loss_of(), sizes))
    expected = drive(rig, rig.step)
    rig = build(lambda: rig_of(loss_of(), sizes))
    step = managed(rig)
    kinds: list[str] = []

    def call(x: Tensor) -> Tensor:
        result: Tensor = step(x)
        kinds.append(step.stats.last_kind)
        return result

    with pytest.warns(UserWarning, match=text):
        found = drive(rig, call)
    assert_same_runs(expected, found)
    small = [kind for kind, size in zip(kinds, sizes, strict=True) if size == 4]
    assert kinds[-8::2].count(E) == 0
    assert small[-8:] == [E] * 8
    assert R not in small
    assert small.count(T) <= 6


def test_a_value_that_the_host_changes_from_some_call_on() -> None:
    """What changes after each trace is not traced once more for ever."""

    def make() -> Rig:
        rig = rig_of(lambda model, x: plain(model, x) * complex(model.scale).real, [8] * 7 + [4] * 20)
        model = rig.owners["model"]
        rig.after = lambda index: setattr(model, "scale", 1.0 if index < 7 else 1.0 + index)
        return rig

    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig, on_failure="eager")
    with pytest.warns(UserWarning, match=r"uses model\.scale at"):
        found = drive(rig, step)
    assert_same_runs(expected, found)
    assert step.stats.traced <= 8


class Busy(Net):
    """Holds what the effects below change."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.seen = self.last = 0
        self.losses: list[Tensor] = []
        self.masks: dict[int, Tensor] = {}
        self.generator = torch.Generator().manual_seed(3)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(()))


Effect = Callable[[Busy, Tensor, Tensor], Tensor]


def _count(model: Busy, x: Tensor, loss: Tensor) -> Tensor:
    model.calls += 1
    return loss


def _count_rows(model: Busy, x: Tensor, loss: Tensor) -> Tensor:
    model.seen += len(x)
    return loss


def _note_size(model: Busy, x: Tensor, loss: Tensor) -> Tensor:
    model.last = len(x)
    return loss


def _append(model: Busy, x: Tensor, loss: Tensor) -> Tensor:
    model.losses.append(loss.detach())
    return loss


def _average(model: Busy, x: Tensor, loss: Tensor) -> Tensor:
    model.mean = 0.9 * model.mean + 0.1 * loss.detach()
    return loss + model.mean


def _draw_own(model: Busy, x: Tensor, loss: Tensor) -> Tensor:
    return loss * torch.rand(len(x), generator=model.generator).mean()


def _seed_own(model: Busy, x: Tensor, loss: Tensor) -> Tensor:
    model.generator.manual_seed(len(x))
    return loss


def _draw(model: Busy, x: Tensor, loss: Tensor) -> Tensor:
    return loss + torch.randn_like(x).mean() * loss


def _keep_mask(model: Busy, x: Tensor, loss: Tensor) -> Tensor:
    if len(x) not in model.masks:
        model.masks[len(x)] = torch.ones(len(x)).cumsum(0)
    return loss * model.masks[len(x)].mean()


def _weigh(model: Busy, x: Tensor, loss: Tensor) -> Tensor:
    return loss * torch.tensor([1.0 / len(x), float(len(x))]).sum()


def _branch(model: Busy, x: Tensor, loss: Tensor) -> Tensor:
    return loss + model.extra(model(x)).abs().mean()


def _scale(model: Busy, x: Tensor, loss: Tensor) -> Tensor:
    return loss * model.scale


def _anneal(model: Busy, x: Tensor, loss: Tensor) -> Tensor:
    model.scale *= 0.5
    return loss


def _hide(box: Box) -> Effect:
    """A number that nobody can see, and that is another one each time."""

    def hide(model: Busy, x: Tensor, loss: Tensor) -> Tensor:
        box.item += 1
        return loss * (1.0 / box.item)

    return hide


EFFECTS: tuple[Effect, ...] = (
    _count, _count_rows, _note_size, _append, _average, _draw_own, _draw, _keep_mask, _weigh, _branch, _scale,
)  # fmt: skip
RARE: tuple[Effect | None, ...] = (_seed_own, _anneal, None)
"""What no replay can repeat; None stands for a hidden number."""
FEW = 10
EXAMPLES = int(os.environ.get("RANDOM_RUNS", "0")) or FEW

Chosen = list[tuple[Effect | None, bool]]


def busy_rig(chosen: Chosen, sizes: Sequence[int], changes: Sequence[int]) -> Rig:
    """Each effect has its turn in all batches, or in small ones. ``changes``: calls after which the host changes a
    value.
    """
    model = Busy()
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
    effects = [(effect or _hide(Box(0)), only_small) for effect, only_small in chosen]

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = plain(model, x)
        for effect, only_small in effects:
            if len(x) < 5 or not only_small:
                loss = effect(model, x, loss)
        loss.backward()
        optimizer.step()
        return loss

    rig = Rig(train_step, {"model": model, "optimizer": optimizer}, [(torch.randn(size, 6),) for size in sizes])
    rig.after = lambda index: setattr(model, "scale", model.scale + index) if index in changes else None
    return rig


def test_random_steps_on_random_sizes_are_eagers() -> None:
    """With effects that are the same for all shapes, follow from them, or belong to some; also with what is refused."""
    found: list[bool] = []

    @settings(
        max_examples=EXAMPLES, derandomize=EXAMPLES == FEW, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(
        st.lists(
            st.tuples(st.sampled_from([*EFFECTS * 2, *RARE]), st.booleans()), max_size=3, unique_by=lambda c: c[0]
        ),
        st.lists(st.sampled_from([8, 6, 4, 3]), min_size=24, max_size=48),
        st.frozensets(st.integers(4, 40), max_size=2),
    )
    def check(chosen: Chosen, sizes: list[int], changes: frozenset[int]) -> None:
        make = partial(busy_rig, chosen, [8] * 3 + sizes, sorted(changes))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = assert_same_as_eager(make, on_failure="eager")
        found.append(step.stats.replayed > 5)

    check()
    assert sum(found) > len(found) / 2


@pytest.mark.twice
def test_what_comes_seldom_is_worth_less() -> None:
    """Once or twice: no capture. Seldom: three eager steps first, as for the first shape."""
    rare = [5, *[8] * 40]
    _, kinds = run(plain, [8] * 7 + rare * 6 + [5])
    assert [kind for kind, x in zip(kinds, [*[8] * 7, *rare * 6, 5], strict=True) if x == 5] == [E, E, E, T, T, C, V]
    step, _ = run(plain, [8] * 7 + [7, 6, 5, 4, 3] * 2)
    assert step.stats.captured == 1


@pytest.mark.twice
def test_shapes_that_never_come_again_are_left_alone() -> None:
    step, kinds = run(plain, [8] * 7 + list(range(9, 40)))
    assert kinds[7:] == [E] * 31
    assert (step.stats.traced, step.stats.captured) == (2, 1)


@pytest.mark.twice
def test_a_program_that_is_captured_anew_is_checked_again() -> None:
    rig = build(partial(rig_of, plain, [8] * 7 + [5] * 5))
    step = managed(rig)
    assert kinds_of(step, rig.calls) == [*FIRST, *MORE]
    model = rig.owners["model"]
    model.body[0].weight = nn.Parameter(model.body[0].weight.detach().clone())
    rig.owners["optimizer"].add_param_group({"params": [model.body[0].weight]})
    kinds = kinds_of(step, rig.calls[7:] * 3)
    assert kinds.count(V) >= 1
    assert kinds[-1] == R


@pytest.mark.twice
def test_predictions_of_further_shapes() -> None:
    """How often a shape is called before that is the caller's to say."""
    fast = graphed(nn.Linear(6, 2), backend="tape", capture_after=2)
    with torch.inference_mode():
        for size in (4, 5):
            for _ in range(7):
                fast(torch.ones(size, 6))
    stats = fast.stats
    assert (stats.eager, stats.traced, stats.captured, stats.verified) == (2 + 2, 2 + 2, 2, 2 + 1)


@pytest.mark.twice
def test_outputs_that_follow_from_the_shape() -> None:
    """A number that the step returns is the shape's own."""

    def step_of(x: Tensor) -> tuple[Tensor, int]:
        return F.relu(x).sum(), x.shape[0]

    step = graph_step(step_of, backend="tape")
    for size in (8, 5, 3):
        for _ in range(8):
            assert step(torch.ones(size, 2))[1] == size
    assert (step.stats.captured, step.stats.traced) == (3, 6)


def test_warm_up_steps_of_ever_new_shapes_are_not_all_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """To watch a step takes several times as long as a small one, and the first steps have told what there is."""
    watched: list[None] = []
    discover = Managed.discover
    monkeypatch.setattr(Managed, "discover", lambda *args, **kwargs: watched.append(None) or discover(*args, **kwargs))
    rig = build(partial(rig_of, plain, tuple(range(4, 24))))
    step = managed(rig, on_failure="eager")
    assert kinds_of(step, rig.calls) == [E] * 20
    assert len(watched) <= 6


@pytest.mark.parametrize(("late", "times"), [(False, 2), (True, 3)])
def test_the_last_warm_up_call_is_watched_if_the_one_before_showed_something(
    monkeypatch: pytest.MonkeyPatch, late: bool, times: int
) -> None:
    """A model that is used from the second call on is owned then, and what it uses is looked at once more."""
    watched: list[None] = []
    discover = Managed.discover
    monkeypatch.setattr(Managed, "discover", lambda *args, **kwargs: watched.append(None) or discover(*args, **kwargs))
    models = [nn.Linear(2, 2), *[nn.Linear(2, 2)] * (not late)]

    def step(x: Tensor) -> Tensor:
        return torch.stack([model(x) for model in models]).sum(0)

    fast = graph_step(step, backend="tape", mode="inference")
    for call in range(12):
        if late and call == 1:
            models.append(nn.Linear(2, 2))
        x = torch.randn(3, 2)
        assert torch.equal(fast(x), step(x))
    assert fast.stats.replayed and len(watched) == times


def test_a_module_that_one_step_made_is_no_matter_for_other_shapes() -> None:
    """What the last step that was watched left says nothing of those that are not."""
    model, made = nn.Linear(4, 4), [0]
    model.extra = None  # type: ignore[assignment]

    def step(x: Tensor) -> Tensor:
        if len(x) == 7:
            made[0] += 1
            if made[0] == 4:
                model.extra = nn.Linear(4, 4)
        model.zero_grad()
        out = model(x)
        out.sum().backward()
        return out.detach()

    fast = graph_step(step, owners={"model": model}, backend="tape")
    for size in [1, 2, 3, 4, 5, 6, *[7] * 3]:
        fast(torch.randn(size, 4))
    with pytest.raises(HostEffectError, match=r"the step creates model\.extra \(Linear"):
        fast(torch.randn(7, 4))
    for size in [8, 9, 10, 11, *[8] * 14]:
        fast(torch.randn(size, 4))
    assert fast.stats.replayed == 11
