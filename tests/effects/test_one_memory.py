"""One memory in several slots: carried where the slots always share it, and refused where they do not, and the next
step reads one, since replays give each a memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from graphplan import HostEffectError, SkipReason, compile_plan, graph_step
from tests.facts import assert_same, flatten
from tests.models import descent
from tests.twins import BEFORE_REPLAY


def two_names(state: Any, x: Tensor) -> None:
    state.a = state.a * 0.5 + x
    state.b = state.a


def detached(state: Any, x: Tensor) -> None:
    state.a = state.a * 0.5 + x
    state.b = state.a.detach()


def in_a_dictionary(state: Any, x: Tensor) -> None:
    state.a = state.a * 0.5 + x
    state.kept["a"] = state.a


def part(state: Any, x: Tensor) -> None:
    state.a = state.a * 0.5 + x
    state.b = state.a[1:3]


def read_by_both_names(state: Any, x: Tensor) -> None:
    state.a = state.b = state.a * 0.5 + state.b * 0.25 + x


def run(
    update: Callable[[Any, Tensor], None], *, replays: bool, apart: bool = False, **options: Any
) -> tuple[list[list[float]], Any]:
    """The state after each step, which the host writes to now and then; or after each step it sets tensors ``apart``
    that the step has bound to one memory.
    """
    state = SimpleNamespace(a=torch.zeros(4), b=torch.zeros(4), kept={"a": torch.zeros(4)})

    def step(x: Tensor) -> Tensor:
        update(state, x)
        return x.sum()

    call: Any = graph_step(step, owners={"state": state}, backend="tape", **options) if replays else step
    found = []
    for index in range(20):
        call(torch.full((4,), float(index)))
        found.append([*state.a.tolist(), *state.b.tolist(), *state.kept["a"].tolist()])
        if index % 6 == 5:
            state.b.zero_()
            state.kept["a"].zero_()
        if apart:
            state.b, state.kept["a"] = torch.zeros(4), torch.zeros(4)
    return found, call


@pytest.mark.parametrize("update", [two_names, in_a_dictionary, read_by_both_names])
def test_states_that_share_memory_from_step_to_step(update: Callable[[Any, Tensor], None]) -> None:
    """What the host writes to one of them shows in the other, too."""
    found, call = run(update, replays=True, verify=4)
    assert found == run(update, replays=False)[0]
    assert (call.stats.captured, call.stats.replayed) == (1, 20 - BEFORE_REPLAY)


@pytest.mark.parametrize(
    ("update", "apart"), [(two_names, True), (detached, False), (in_a_dictionary, True), (part, False)]
)
def test_a_state_that_shares_memory_otherwise_is_refused(update: Callable[[Any, Tensor], None], apart: bool) -> None:
    text = (
        r"the step assigns tensors that share memory to state\.a and state\.(b|kept\.a), and reads "
        r"state\.a .* Assign a copy: state\.\S+ ="
    )
    with pytest.raises(HostEffectError, match=text):
        run(update, replays=True, apart=apart)
    with pytest.warns(UserWarning, match=text):
        found, call = run(update, replays=True, apart=apart, on_failure="eager")
    assert found == run(update, replays=False, apart=apart)[0]
    assert call.stats.captured == 0


def only_left(state: Any, x: Tensor) -> None:
    state.a = state.b = x * 2
    state.kept["a"] = state.a


def parts_that_do_not_overlap(state: Any, x: Tensor) -> None:
    state.a, state.b = (torch.cat([state.a, state.b]) * 0.5 + x.repeat(2)).chunk(2)


@pytest.mark.parametrize("update", [only_left, parts_that_do_not_overlap])
def test_what_is_not_read_by_another_name_is_left_as_it_is(update: Callable[[Any, Tensor], None]) -> None:
    found, call = run(update, replays=True)
    expected = run(update, replays=False)[0]
    assert found == expected
    assert call.stats.replayed > 0


def test_the_plan_of_a_step_with_a_copy() -> None:
    state = SimpleNamespace(a=torch.zeros(4), b=torch.zeros(4))

    def step(x: Tensor) -> Tensor:
        state.a = state.a * 0.5 + x
        state.b = state.a.clone()
        return x.sum()

    assert compile_plan(step, torch.ones(4), owners={"state": state}).rebindings.paths == ("state.a", "state.b")


@pytest.mark.parametrize("update", [two_names, in_a_dictionary, read_by_both_names])
def test_states_that_come_apart_for_one_step(update: Callable[[Any, Tensor], None]) -> None:
    """That step is eager, and binds them to one memory again, for which the program is still there."""
    found: list[list[Tensor]] = []
    for replays in (False, True):
        state = SimpleNamespace(a=torch.zeros(4), b=torch.zeros(4), kept={"a": torch.zeros(4)})

        def step(x: Tensor, state: Any = state) -> Tensor:
            update(state, x)
            return x.sum()

        call: Any = graph_step(step, owners={"state": state}, backend="tape", verify=4) if replays else step
        for index in range(100):
            call(torch.full((4,), float(index)))
            found.append([state.a.clone(), state.b.clone(), state.kept["a"].clone()])
            if index in (30, 60, 61):
                state.b, state.kept["a"] = torch.full((4,), 7.0), torch.full((4,), 3.0)
    assert_same(flatten(states=found[:100]), flatten(states=found[100:]))
    assert call.stats.skipped[SkipReason.GUARD] == 2
    assert call.stats.recaptured == 1


def test_programs_in_turns_share_what_their_states_share() -> None:
    """Two shapes, and an eager step between them now and then."""
    found: list[list[Tensor]] = []
    for replays in (False, True):
        state = SimpleNamespace(a=torch.zeros(4), b=torch.zeros(4), kept={"a": torch.zeros(4)})

        def step(x: Tensor, state: Any = state) -> Tensor:
            read_by_both_names(state, x.mean(0))
            state.kept["a"] = state.b
            return x.sum()

        options: dict[str, Any] = {"eager_if": lambda x: float(x[0, 0]) % 7 == 3, "verify": 4, "backend": "tape"}
        call: Any = graph_step(step, owners={"state": state}, **options) if replays else step
        for index in range(60):
            call(torch.full((1 + index % 2, 4), float(index)))
            found.append([state.a.clone(), state.b.clone(), state.kept["a"].clone()])
            if index % 10 == 9:
                state.b.zero_()
    assert_same(flatten(states=found[:60]), flatten(states=found[60:]))
    assert (call.stats.captured, call.stats.replayed > 30) == (2, True)


def test_states_that_come_apart_before_the_capture() -> None:
    """They were one tensor in both traces."""
    state = SimpleNamespace(a=torch.zeros(4), b=torch.zeros(4))
    twin = SimpleNamespace(a=torch.zeros(4), b=torch.zeros(4))

    def update(state: Any, x: Tensor) -> Tensor:
        read_by_both_names(state, x)
        return x.sum()

    step = graph_step(lambda x: update(state, x), owners={"state": state}, backend="tape", verify="off")
    for index in range(30):
        for own, run in ((state, step), (twin, lambda x: update(twin, x))):
            run(torch.full((4,), float(index)))
            if index == BEFORE_REPLAY - 2:
                own.b = torch.full((4,), 3.0)
        assert torch.equal(state.a, twin.a)
        assert torch.equal(state.b, twin.b)
    assert "state.b and state.a were one tensor when the step was traced, and are not now" in step.report()
    assert step.stats.replayed > 15


@pytest.mark.parametrize("change", ["detach", "data", "conj"])
def test_one_tensor_that_becomes_another_view(change: str) -> None:
    """Of the same memory, in one of two slots, or in the only one: eager's numbers come out."""

    def put(state: Any) -> None:
        if change == "detach":
            state.b = state.b.detach()
        elif change == "data":
            state.a.data = torch.full((4,), 20.0)
        else:
            state.scale = state.scale.conj()

    found: list[list[Tensor]] = []
    for replays in (False, True):
        state = SimpleNamespace(a=torch.zeros(4), b=torch.zeros(4), scale=torch.tensor([1 + 2j]))

        def step(x: Tensor, state: Any = state) -> Tensor:
            read_by_both_names(state, x)
            return (x * state.scale).imag.sum()

        call: Any = graph_step(step, owners={"state": state}, backend="tape", verify=10) if replays else step
        for index in range(60):
            found.append([call(torch.full((4,), float(index))), state.a.clone(), state.b.clone()])
            if index in (21, 30, 44):
                put(state)
    assert_same(flatten(states=found[:60]), flatten(states=found[60:]))
    assert call.stats.replayed > 40


@pytest.mark.parametrize("reads_batch", [False, True])
def test_what_each_step_makes_anew(reads_batch: bool) -> None:
    """A distribution, of the batch's shape. Shapes take turns, and each replay leaves what an eager step would."""
    found: list[Any] = []
    for replays in (False, True):
        torch.manual_seed(0)
        model: Any = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
        model.kept = None

        def loss(x: Tensor, model: Any = model) -> Tensor:
            model.kept = Normal(model(x), torch.ones_like(x))
            rows = x[x[:, 0] > 0] if reads_batch else x
            return model.kept.log_prob(rows.sum(0)).mean()

        step: Any = descent(model, optimizer, loss)
        owners = {"model": model, "optimizer": optimizer}
        step = graph_step(step, owners=owners, backend="tape", verify=3) if replays else step
        for index in range(80):
            x = torch.ones(3 if index % 20 == 19 else 5, 4)
            x[index % 3] = -1.0
            out = step(x).detach().clone()
            found.append((out, model.weight.detach().clone(), model.kept.loc.detach().clone(), model.kept.batch_shape))
    assert_same(flatten(found=found[:80]), flatten(found=found[80:]))
    assert step.stats.recaptured == 0, step.report()
    assert step.stats.replayed > 60, step.report()
