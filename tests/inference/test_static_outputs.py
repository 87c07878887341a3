"""`outputs="static"`: results are the program's own memory, and no other one's input needs a copy of them."""

from __future__ import annotations

import copy
import io
import operator
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import Graphed, StaleError, VerifyError, graphed
from tests.crossing import pairs
from tests.facts import assert_same, flatten
from tests.inference.helpers import TO_REPLAY, Layer
from tests.models import Box


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def ready(fn: Callable[..., Any], *args: Any, **options: Any) -> Graphed:
    """A graphed function that replays calls like this one."""
    fast: Graphed = graphed(fn, **{"backend": "tape", "verify": "off", "outputs": "static", **options})
    while fast.stats.replayed == 0:
        fast(*args)
    return fast


@pytest.mark.parametrize(
    "use",
    [
        lambda y: y + 1,
        lambda y: torch.ones(8) * y,
        lambda y: y.tolist(),
        lambda y: y.numpy(),
        lambda y: y[0],
        lambda y: y.add_(1),
        lambda y: y.clone(),
        lambda y: torch.cat([y, y]),
        lambda y: torch.zeros(4, 8).copy_(y),
        float,
        lambda y: y.data_ptr(),
        copy.deepcopy,
        pickle.dumps,
        lambda y: torch.save(y, io.BytesIO()),
        lambda y: list(y),
        operator.neg,
    ],
)
def test_use_after_the_next_replay_raises(use: Callable[[Tensor], Any]) -> None:
    fast = ready(lambda x: x * 2, torch.ones(1))
    x = torch.randn(1)
    old = fast(x)
    view = old.view(1, 1)[0]
    assert torch.equal(old, x * 2)
    fast(x)
    for stale in (old, view):
        with pytest.raises(StaleError, match=r"output 0 of .* of an earlier replay is used after a later replay"):
            use(stale)
    assert old.shape == (1,) and old.dtype == torch.float32 and old.ndim == 1 and old.numel() == 1
    assert "overwritten f32[1]" in repr(old)


def test_results_are_usable_until_then() -> None:
    layer = Layer()
    fast = ready(lambda x: {"y": layer(x), "sum": layer(x).sum(), "same": (3, None)}, torch.randn(4, 8))
    for _ in range(4):
        x = torch.randn(4, 8)
        found = fast(x)
        expected = {"y": layer(x), "sum": layer(x).sum(), "same": (3, None)}
        assert_same(flatten(r=expected), flatten(r={**found, "y": found["y"] + 0, "sum": found["sum"] + 0}))
        assert repr(found["y"]) == repr(layer(x))
        kept = found["y"].clone()
        assert type(kept) is Tensor
        assert type(found["y"][1:]) is type(found["y"]) and type(found["y"] + 1) is Tensor
        assert torch.equal(pickle.loads(pickle.dumps(found["y"])), kept)
        assert torch.equal(copy.deepcopy(found["y"]), kept)
    assert found["y"].untyped_storage().data_ptr() == fast(x)["y"].untyped_storage().data_ptr()
    assert torch.equal(kept, expected["y"])
    assert fast.memory.output == 4 * 8 * 4 + 4


def test_checked_replays_and_other_shapes_leave_results_alone() -> None:
    fast = graphed(lambda x: x * 2, backend="tape", outputs="static", verify=1)
    ones = torch.ones(3)
    for _ in range(8):
        assert torch.equal(fast(ones), ones * 2)
    assert fast.stats.verified > 2
    other = ready(lambda x: x * 2, ones)
    for _ in range(6):
        other(torch.ones(2))
    kept = other(torch.ones(2))
    other(ones)
    assert torch.equal(kept, torch.full((2,), 2.0)), "each program has memory of its own"


def test_a_result_that_is_fed_to_another_program_is_not_copied() -> None:
    first = ready(lambda x: x * 2, torch.ones(4, 8))
    second = ready(lambda y: y + 1, first(torch.ones(4, 8)))
    program = second.programs[0]
    assert program.inputs.by_leaf[0].data_ptr() == first(torch.ones(4, 8)).data_ptr()
    assert second.memory.input == 0
    for _ in range(3):
        x = torch.randn(4, 8)
        assert torch.equal(second(first(x)) + 0, x * 2 + 1)
    assert second.num_graphs == 1


def test_another_tensor_in_its_place_makes_the_result_stale() -> None:
    """The second program reads the first one's memory: what else is fed goes there."""
    first = ready(lambda x: x * 2, torch.ones(4))
    second = ready(lambda y: y + 1, first(torch.ones(4)))
    held = first(torch.ones(4))
    assert torch.equal(second(torch.full((4,), 5.0)) + 0, torch.full((4,), 6.0))
    with pytest.raises(StaleError, match="used after a later replay"):
        held.sum()
    assert torch.equal(second(first(torch.ones(4))) + 0, torch.full((4,), 3.0))


def test_the_program_that_lends_may_go() -> None:
    first = ready(lambda x: x * 2, torch.ones(4))
    second = ready(lambda y: y + 1, first(torch.ones(4)))
    first.close()
    again = ready(lambda x: x * 2, torch.ones(4))
    for _ in range(3):
        x = torch.randn(4)
        assert torch.equal(second(again(x)) + 0, x * 2 + 1)


def test_a_function_that_changes_what_it_is_fed_gets_a_copy() -> None:
    first = ready(lambda x: x * 2, torch.ones(4))
    second = ready(lambda y: y.add_(1) * 3, first(torch.ones(4)))
    for _ in range(3):
        x = torch.randn(4)
        held = first(x)
        assert torch.equal(second(held) + 0, (x * 2 + 1) * 3)
        assert torch.equal(held + 0, x * 2 + 1), "written back"


def test_a_result_that_is_fed_twice_is_copied() -> None:
    first = ready(lambda x: x * 2, torch.ones(4))
    y = first(torch.ones(4))
    second = ready(lambda a, b: a + b, y, y)
    y = first(torch.full((4,), 3.0))
    assert torch.equal(second(y, y) + 0, torch.full((4,), 12.0))
    assert torch.equal(second(y, torch.ones(4)) + 0, torch.full((4,), 7.0))


def test_a_result_of_ones_own_is_an_argument_like_any_other() -> None:
    step = ready(lambda x: x * 2 + 1, torch.ones(4))
    x, twin = torch.ones(4), torch.ones(4)
    for _ in range(6):
        x, twin = step(x), twin * 2 + 1
        assert torch.equal(x + 0, twin)
    stale = x
    step(x)
    with pytest.raises(StaleError, match="earlier replay"):
        step({"a": [stale]}["a"][0])
    with pytest.raises(StaleError, match="earlier replay"):
        ready(lambda d: d["a"] + 1, {"a": torch.ones(4)})({"a": stale})


def test_what_is_returned_as_it_was_fed_or_owned_is_no_result_of_the_program() -> None:
    layer = Layer()
    fast = ready(lambda x: (x, layer.scale, x * 2), torch.ones(8))
    x = torch.randn(8)
    same, scale, _ = fast(x)
    fast(x)
    assert same is x and scale is layer.scale


def test_a_result_that_the_caller_changes_is_fed_as_changed() -> None:
    first = ready(lambda x: x * 2, torch.ones(4))
    second = ready(lambda y: y + 1, first(torch.ones(4)))
    for _ in range(3):
        held = first(torch.full((4,), 3.0))
        held.mul_(10)
        assert torch.equal(second(held) + 0, torch.full((4,), 61.0))
    assert torch.equal(first(torch.ones(4)) + 0, torch.full((4,), 2.0))


WIDTH, CALLS = 8, 24


def recurrent(layer: nn.Linear, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """A cell with two states."""
    return layer(h).tanh() + c, c * 0.5 + h


def halving(layer: nn.Linear, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """A cell that changes one of its states in place."""
    c.mul_(0.5)
    return layer(h).tanh() + c, c + h


def same(h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The states as they come."""
    return h, c


def crossed(h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Each state in the other's place."""
    return c, h


def views(h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The same memory, by other tensors."""
    return h.view(1, WIDTH)[:], c[0].unsqueeze(0)


@pairs(verify=["off", "geometric", 1, 3], pass_on=[same, crossed, views], cell=[recurrent, halving])
@pytest.mark.twice
def test_states_that_are_fed_back(cell: Callable[..., Any], pass_on: Callable[..., Any], verify: Any) -> None:
    """What is fed lies where the results of the replay go: the eager step of a check gets what was fed."""
    layer = nn.Linear(WIDTH, WIDTH)
    fast = graphed(lambda h, c: cell(layer, h, c), backend="tape", outputs="static", verify=verify)
    states, twins = (torch.ones(1, WIDTH), torch.ones(1, WIDTH)), (torch.ones(1, WIDTH), torch.ones(1, WIDTH))
    for _ in range(CALLS):
        states, twins = pass_on(*fast(*states)), pass_on(*cell(layer, *twins))
        assert all(torch.equal(found + 0, expected) for found, expected in zip(states, twins, strict=True))
    assert fast.stats.replayed == CALLS - TO_REPLAY + 1
    assert (fast.stats.verified > 3) == (verify != "off")


@pairs(verify=["off", "geometric", 1, 3], rows=[3, 4], cell=[recurrent, halving])
@pytest.mark.twice
def test_states_that_are_fed_back_padded(cell: Callable[..., Any], rows: int, verify: Any) -> None:
    """The call without padding, which a padded replay is compared with, gets what was fed."""
    layer = nn.Linear(WIDTH, WIDTH)
    options = {"backend": "tape", "outputs": "static", "shapes": "bucket", "buckets": [4, 8]}
    fast = graphed(lambda h, c: cell(layer, h, c), verify=verify, **options)
    states, twins = (
        (torch.ones(rows, WIDTH), torch.ones(rows, WIDTH)),
        (torch.ones(rows, WIDTH), torch.ones(rows, WIDTH)),
    )
    for _ in range(CALLS):
        states, twins = fast(*states), cell(layer, *twins)
        for found, expected in zip(states, twins, strict=True):
            torch.testing.assert_close(found + 0, expected)
    assert fast.stats.replayed == CALLS - TO_REPLAY + (rows == 4)


@pytest.mark.twice
def test_a_difference_in_a_state_that_is_fed_back_is_found() -> None:
    layer, weight = nn.Linear(WIDTH, WIDTH), Box(1.0)
    fast = graphed(lambda h: layer(h).tanh() * weight.item, backend="tape", outputs="static", verify=1)
    state = torch.ones(1, WIDTH)
    for _ in range(TO_REPLAY - 1):
        state = fast(state)
    weight.item = 0.5
    expected = layer(state).tanh() * 0.5
    with pytest.raises(VerifyError, match=r"is not what the eager step does: result: 8 of 8 elements differ") as caught:
        fast(state)
    assert torch.equal(caught.value.result, expected), "the eager step got what was fed"


@pytest.mark.parametrize("verify", ["off", "geometric", 1])
@pytest.mark.twice
def test_results_that_an_owner_keeps(verify: Any) -> None:
    """Those that a later replay has overwritten may lie there as long as nobody uses them."""
    layer = Layer()
    layer.kept = []
    fast = graphed(layer, backend="tape", outputs="static", verify=verify)
    for _ in range(CALLS):
        x = torch.randn(4, WIDTH)
        found = fast(x)
        assert torch.equal(found + 0, layer(x))
        layer.kept = [*layer.kept[-2:], found]
    assert fast.stats.replayed == CALLS - TO_REPLAY + 1


def test_a_result_outlives_the_check_of_the_next_replay() -> None:
    """The eager step's outcome stands, which is in other memory."""
    fast = graphed(lambda x: x * 2, backend="tape", outputs="static", verify=2)
    for _ in range(TO_REPLAY):
        held = fast(torch.ones(3))
    verified = fast.stats.verified
    assert torch.equal(fast(torch.zeros(3)), torch.zeros(3)) and fast.stats.verified == verified + 1
    assert torch.equal(held, torch.full((3,), 2.0))
    fast(torch.zeros(3))
    with pytest.raises(StaleError, match="used after a later replay"):
        held.sum()
