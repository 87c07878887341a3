"""Capture sizes: ladders that fit, padding and cutting, masks, checks against the call as it came, prewarming."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import Graphed, OptionError, PaddingError, SkipReason, StaleError, buckets, graphed
from graphplan.step.buckets import Ladders
from tests.inference.helpers import Layer


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def padded_elements(lengths: list[int], sizes: tuple[int, ...]) -> int:
    return sum(min(size for size in sizes if size >= length) for length in lengths)


def test_the_ladder_is_the_best_there_is() -> None:
    """Against every other ladder, of random lengths."""
    rng = random.Random(0)
    for _ in range(40):
        lengths = [rng.randint(1, 12) for _ in range(rng.randint(1, 9))]
        count = rng.randint(1, 5)
        found = buckets.fit(lengths, count)
        known = sorted(set(lengths))
        best = min(
            padded_elements(lengths, (*chosen, known[-1]))
            for number in range(count)
            for chosen in combinations(known[:-1], min(number, len(known) - 1))
        )
        assert len(found.sizes) <= count
        assert found.padded == padded_elements(lengths, found.sizes) == best
        assert found.unpadded == sum(lengths)


def test_a_ladder_of_many_lengths_and_of_a_histogram() -> None:
    rng = random.Random(1)
    lengths = [min(4096, int(rng.lognormvariate(5, 1)) + 1) for _ in range(20000)]
    found = buckets.fit(lengths, 8)
    assert len(found.sizes) == 8 and found.sizes[-1] == max(lengths)
    assert found.waste < 0.25
    histogram = {length: lengths.count(length) for length in set(lengths[:50])}
    assert buckets.fit(histogram, 3) == buckets.fit([n for n, k in histogram.items() for _ in range(k)], 3)
    aligned = buckets.fit(lengths, 8, multiple_of=64)
    assert all(size % 64 == 0 for size in aligned.sizes)
    assert str(buckets.fit([1, 1, 4], 1)) == "1 sizes [4]: 50.0 % of the elements are padding"


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ([], {}, "there are no lengths to fit"),
        ([0], {}, "length 0 comes 1 times; expected lengths and counts from 1 on"),
        ([-3], {}, "length -3 comes"),
        ({3: 0}, {}, "length 3 comes 0 times"),
        (["a"], {}, "length 'a' comes"),
        ([3], {"max_graphs": 0}, "max_graphs is 0; expected an int >= 1"),
        ([3], {"multiple_of": 1.5}, "multiple_of is 1.5"),
    ],
)
def test_lengths_that_make_no_sense(arguments: Any, options: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        buckets.fit(arguments, **options)


def test_rounding() -> None:
    ladders = Ladders({0: [4, 1, 2, 2], 1: buckets.fit([16, 64], 2)})
    assert ladders.dims == (0, 1)
    assert [ladders.round_up(0, size) for size in (0, 1, 2, 3, 4, 5)] == [None, 1, 2, 4, 4, None]
    assert ladders.sizes(1) == (16, 64)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "shapes='bucket' needs capture sizes"),
        ({"buckets": []}, "buckets has no sizes"),
        ({"buckets": {}}, "buckets has no dimensions"),
        ({"buckets": 8}, "buckets is 8; expected capture sizes"),
        ({"buckets": "8"}, "buckets is '8'; expected capture sizes"),
        ({"buckets": [0, 4]}, "buckets has the size 0; expected integers from 1 on"),
        ({"buckets": [-4]}, "buckets has the size -4"),
        ({"buckets": [2.0]}, "buckets has the size 2.0"),
        ({"buckets": {1: [True]}}, r"buckets\[1\] has the size True"),
        ({"buckets": {-1: [4]}}, "buckets has the dimension -1"),
        ({"buckets": [4], "pad": "0"}, "pad is '0'; expected a number, or numbers by name"),
        ({"buckets": [4], "mask": "attention"}, "mask names 'attention'; expected one of: x, mask, causal"),
    ],
)
def test_options_that_make_no_sense(options: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        graphed(Layer(), shapes="bucket", **options)


def bucketed(fn: Any, sizes: Any, **options: Any) -> Graphed:
    return graphed(fn, **{"backend": "tape", "shapes": "bucket", "buckets": sizes, **options})


def twice(fast: Graphed, *args: Any) -> Any:
    """The first call is made as it came."""
    fast(*args)
    return fast(*args)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def test_batches_of_one_to_eight_have_four_graphs_with_padding_and_eight_without() -> None:
    model = network()
    exact = graphed(model, backend="tape", verify="off")
    fast = bucketed(model, [1, 2, 4, 8], verify="off")
    for _ in range(6):
        for size in range(8, 0, -1):
            x = torch.randn(size, 8)
            torch.testing.assert_close(fast(x), model(x))
            assert torch.equal(exact(x), model(x))
    assert (exact.num_graphs, fast.num_graphs) == (8, 4)
    assert (len(fast.shapes.shapes), len(fast.shapes.capture_sizes)) == (8, 4)
    assert fast.shapes.unpadded_elements == (6 * 36 - 8) * 8
    assert fast.shapes.padded_elements == (6 * (1 + 2 + 4 + 4 + 4 * 8) - 8) * 8
    assert fast.shapes.padding == pytest.approx(43 / 36, abs=0.06)
    assert "8 shapes on 4 capture sizes" in fast.report()


def test_five_and_seven_reuse_the_program_of_eight() -> None:
    model = network()
    fast = bucketed(model, [1, 2, 4, 8])
    fast.prewarm([8], example=(torch.randn(3, 8),))
    assert (fast.num_graphs, fast.stats.captured) == (1, 1)
    replayed = fast.stats.replayed
    for size in (5, 7, 8, 6):
        x = torch.randn(size, 8)
        found = fast(x)
        assert found.shape == (size, 4)
        torch.testing.assert_close(found, model(x))
    assert fast.stats.replayed == replayed + 4 and fast.num_graphs == 1


def test_padding_lies_in_the_programs_own_input() -> None:
    """What is padded is written where the program reads it: nothing is copied a second time."""
    fast = bucketed(network(), [4, 8], verify="off")
    fast.prewarm(example=(torch.randn(3, 8),))
    assert all(program.inputs._of_callers for program in fast.programs)
    addresses = {program.inputs.by_leaf[0].data_ptr() for program in fast.programs}
    assert len(addresses) == 1, "one allocation for all sizes"


def test_two_dimensions_and_a_mask() -> None:
    """Attention over padded lengths is right because the function is told what is real."""
    width = 8

    def attend(tokens: Tensor, mask: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        keys = mask[:, None, :].expand(-1, mask.shape[1], -1)
        out = F.scaled_dot_product_attention(tokens * scale, tokens, tokens, attn_mask=keys)
        mean = (out * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return {"out": out, "mean": mean, "width": torch.arange(width)}

    fast = bucketed(attend, {0: [2, 4], 1: [4, 8, 16]}, mask="mask", dynamic={"tokens": (0, 1)})
    rng = random.Random(0)
    for _ in range(60):
        batch, length = rng.randint(1, 4), rng.randint(1, 16)
        x = torch.randn(batch, length, width)
        found = fast(x)
        wanted = attend(x, torch.ones(batch, length, dtype=torch.bool))
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor)
    assert fast.num_graphs <= 6 and fast.stats.replayed > 20


def test_a_mask_of_the_callers_is_padded_like_any_input() -> None:
    def total(x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask[:, None]).sum()

    fast = bucketed(total, [4, 8], mask="mask", pad={"x": 3.0})
    for size in (3, 4, 5, 6, 7) * 6:
        x, mask = torch.ones(size, 8), torch.arange(size) % 2 == 0
        assert float(fast(x, mask)) == float(total(x, mask))
    assert fast.stats.replayed > 10


def test_results_whose_size_is_the_capture_size_by_chance() -> None:
    """Four classes are four classes, also where the batch is padded to four."""
    model = network()
    fast = bucketed(lambda x: (model(x), model(x).T, model.state_dict()["2.bias"] * 2), [4])
    for size in (4, 4, 3, 2, 4, 1, 3, 3, 4, 2):
        x = torch.randn(size, 8)
        scores, turned, bias = fast(x)
        assert scores.shape == (size, 4) and turned.shape == (4, size) and bias.shape == (4,)
        torch.testing.assert_close(turned, model(x).T)


def test_which_of_two_equal_dimensions_a_result_follows_is_found_out() -> None:
    fast = bucketed(lambda x: (x.amax(-1), x.sum(-1).amax(0)), {0: [4], 1: [4]}, pad=-9.0, verify="off")
    for batch, length in ((2, 2), (2, 2), (3, 2), (2, 3), (4, 1), (1, 4), (3, 3)):
        x = torch.rand(batch, length, 5)
        first, second = fast(x)
        assert first.shape == (batch, length) and second.shape == (length,)
        torch.testing.assert_close(second, x.sum(-1).amax(0))
    assert 0 < fast.shapes.checked < 7


def test_padding_values_by_argument() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.amax(0), y.amin(0)

    fast = bucketed(fn, [4], pad={"x": float("-inf"), "y": float("inf")})
    for size in (3, 2, 4, 1) * 3:
        x, y = torch.randn(size, 3), torch.randn(size, 2)
        for found, wanted in zip(fast(x, y), fn(x, y), strict=True):
            assert torch.equal(found, wanted)


def test_padding_that_changes_the_outcome_is_refused_by_name() -> None:
    def mean(x: Tensor) -> Tensor:
        return x.mean(0)

    x = torch.ones(3, 8)
    with pytest.raises(
        PaddingError, match=r"padding from 3 to 4 changes the outcome of the step: result: 8 of 8 elements"
    ):
        twice(bucketed(mean, [4]), x)
    fast = bucketed(mean, [4], on_failure="eager")
    with pytest.warns(UserWarning, match="no longer pads this step's batches: padding from 3 to 4 changes the outcome"):
        assert torch.equal(twice(fast, x), mean(x))
    for _ in range(5):
        assert torch.equal(fast(x), mean(x))
    assert fast.stats.skipped[SkipReason.PADDING] == 6


def test_a_result_that_follows_no_dimension_is_refused_by_name() -> None:
    with pytest.raises(PaddingError, match=r"result is torch.float32\[6\] without padding and torch.float32\[8\] with"):
        twice(bucketed(lambda x: torch.cat([x[:, 0], x[:, 0]]), [4]), torch.ones(3, 8))
    with pytest.raises(PaddingError, match=r"result is 3 without padding and 4 with it"):
        twice(bucketed(lambda x: len(x), [4]), torch.ones(3, 8))
    with pytest.raises(PaddingError, match="the results' structure is"):
        twice(bucketed(lambda x: [x[0]] * len(x), [4]), torch.ones(3, 8))


def test_a_step_that_pads_badly_only_later_is_demoted() -> None:
    """Values decide: found at a later check, with a warning and the right outcome."""
    fast = bucketed(lambda x: x.amax(0), [4], verify=1)
    for _ in range(8):
        fast(torch.rand(3, 8))
    assert fast.stats.replayed > 2
    with pytest.warns(UserWarning, match="changes the outcome of the step: result: 8 of 8 elements differ"):
        assert torch.equal(fast(torch.full((3, 8), -1.0)), torch.full((8,), -1.0))


def test_what_is_changed_in_place_is_written_back_at_its_own_size() -> None:
    def grow(x: Tensor) -> Tensor:
        x += 1
        return x

    fast = bucketed(grow, [4, 8])
    for size in (3, 4, 5, 3, 7, 3, 6, 3, 2, 5, 5, 8):
        x = torch.randn(size, 2)
        wanted = x + 1
        found = fast(x)
        assert found is x and torch.equal(x, wanted)
    assert fast.stats.replayed > 2


def test_views_of_the_input_do_not_change_with_the_next_call() -> None:
    fast = bucketed(lambda x: x[:, 1:], [4])
    kept = []
    for index in range(7):
        x = torch.full((3, 4), float(index))
        kept.append((fast(x), x[:, 1:].clone()))
    assert all(torch.equal(found, wanted) for found, wanted in kept)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: torch.randn(9, 8),
            r"dimension 0 of args\[0\] has 9 elements, which is beyond the largest capture size 8",
        ),
        (lambda: torch.randn(0, 8), r"dimension 0 of args\[0\] has 0 elements, which is empty"),
        (lambda: torch.tensor(3.0), "no argument has a dimension with capture sizes"),
    ],
)
def test_calls_that_fit_no_size_are_eager_with_the_reason(make: Any, text: str) -> None:
    fast = bucketed(lambda x: x * 2, [4, 8])
    x = make()
    assert torch.equal(fast(x), x * 2)
    assert fast.stats.skipped[SkipReason.BUCKET] == 1
    assert any(re.search(text, reason) for reason in fast.stats.reasons)


@pytest.mark.parametrize(
    "make",
    [
        lambda size: torch.randn(8, size).t(),
        lambda size: torch.randn(1, 8).expand(size, 8),
        lambda size: torch.randn(40).as_strided((size, 8), (2, 1)),
        lambda size: torch.randn(size + 2, 8)[1 : size + 1],
    ],
    ids=["transposed", "expanded", "overlapping", "offset"],
)
def test_inputs_of_any_geometry(make: Any) -> None:
    fast = bucketed(lambda x: (x * 2 + 1).sum(1), [4, 8])
    for size in (3, 5, 8, 4, 6) * 3:
        x = make(size)
        torch.testing.assert_close(fast(x), (x * 2 + 1).sum(1))
    assert fast.stats.replayed > 4


def test_gradients_flow_through_an_eager_call() -> None:
    layer = Layer()
    fast = bucketed(layer, [4])
    with torch.enable_grad():
        for _ in range(4):
            fast(torch.randn(3, 8)).sum().backward()
    assert layer.scale.grad is not None
    assert fast.stats.skipped[SkipReason.GRADIENT] == 4


def test_static_results_are_cut_and_still_know_their_replay() -> None:
    fast = bucketed(lambda x: x * 2, [4], outputs="static", verify="off")
    fast.prewarm(example=(torch.randn(3, 8),))
    x = torch.randn(3, 8)
    fast(x)
    found = fast(x)
    assert found.shape == (3, 8) and torch.equal(found + 0, x * 2)
    fast(x)
    with pytest.raises(StaleError, match="used after a later replay"):
        found.sum()


def test_a_ladder_that_nothing_is_padded_by_is_refused() -> None:
    with pytest.raises(
        OptionError, match=r"sizes for dimension 1, but no argument .* as a dynamic dimension; .*dynamic={'argument'"
    ):
        bucketed(network(), {0: [4], 1: [8]})(torch.randn(3, 8))


@pytest.mark.parametrize("options", [{"pad": {"y": 0}}, {"dynamic": {"y": 0}}])
def test_names_that_nothing_has(options: Any) -> None:
    """A container that is fed may have more names than there are parameters, so the first call tells."""
    fast = bucketed(Layer(), [4], **options)
    with pytest.raises(OptionError, match="names 'y'; expected one of: x, mask, causal"):
        fast(torch.randn(3, 8))


def test_names_within_containers() -> None:
    """A key, an attribute or a path; the closest one counts."""
    seen: list[list[float]] = []

    def double(batch: dict[str, Any], pair: list[Tensor]) -> Tensor:
        seen.append([float(leaf[-1]) for leaf in (batch["inner"]["a"], batch["b"], *pair)])
        return pair[0] * 2

    def call(fast: Any) -> None:
        assert fast({"inner": {"a": torch.ones(3)}, "b": torch.ones(3)}, [torch.ones(3), torch.ones(3)]).shape == (3,)

    pad = {"batch": -1.0, "a": -2.0, "pair[1]": -3.0, "pair": -4.0, "batch['b']": -5.0}
    fast = bucketed(double, [4], pad=pad, allow=("seen",))
    call(fast)
    call(fast)
    assert seen == [[1.0] * 4, [-2.0, -5.0, -4.0, -3.0]]
    with pytest.raises(OptionError, match=r"pad names 'c'; expected one of: batch, pair, inner, batch\['inner'\], a,"):
        call(bucketed(double, [4], pad={"c": 0}))


def test_prewarming_takes_the_largest_first() -> None:
    fast = bucketed(network(), {0: [1, 4], 1: [8]}, dynamic={"input": (0, 1)})
    assert fast.prewarm(example=(torch.randn(2, 8),)) == 2 == fast.num_graphs
    assert [program.plan.inputs[0].spec.shape for program in fast.programs] == [(4, 8), (1, 8)]


def test_prewarming_exact_shapes() -> None:
    fast = graphed(Layer(), backend="tape")
    assert fast.prewarm([2, {0: 3}], example=(torch.randn(1, 8),)) == 2
    shapes = [program.plan.inputs[0].spec.shape for program in fast.programs]
    assert shapes == [(3, 8), (2, 8)]
    assert fast.prewarm([3, 2], example=(torch.randn(1, 8),)) == 0
    assert fast.num_graphs == 2


@pytest.mark.parametrize(
    ("sizes", "options", "text"),
    [
        ([0], {"example": (torch.ones(2, 8),)}, "prewarm has the size 0 in dimension 0"),
        ([-1], {"example": (torch.ones(2, 8),)}, "prewarm has the size -1"),
        ([], {"example": (torch.ones(2, 8),)}, "prewarm has no sizes; expected some"),
        (None, {"example": (torch.ones(2, 8),)}, "prewarm has no sizes; expected some"),
    ],
)
def test_prewarming_that_makes_no_sense(sizes: Any, options: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        graphed(Layer(), backend="tape").prewarm(sizes, **options)


def test_prewarming_where_nothing_is_captured() -> None:
    with (
        torch.enable_grad(),
        pytest.raises(OptionError, match=r"the call needs gradients: call it under torch\.no_grad"),
    ):
        graphed(Layer(), backend="tape").prewarm([4], example=(torch.ones(2, 8),))
    with pytest.raises(OptionError, match=r"nothing is captured for the size \{0: 9\}: no capture size fits"):
        bucketed(Layer(), [4]).prewarm([9], example=(torch.ones(2, 8),))


class Cached(nn.Module):
    """Keeps what it was given in slots, of which the last is for padding; counts its calls."""

    def __init__(self, *, careful: bool = True) -> None:
        super().__init__()
        self.register_buffer("slots", torch.zeros(5, 3))
        self.register_buffer("total", torch.zeros(3))
        self.careful = careful
        self.calls = 0

    def forward(self, x: Tensor, where: Tensor) -> Tensor:
        self.calls += 1
        self.slots[where] = 0.5 * self.slots[where] + x
        if not self.careful:
            self.total += x.sum(0) + (where == 4).sum()
        return self.slots[where] * 2


def test_state_is_what_the_calls_leave_as_they_came() -> None:
    """Checks undo what padding did: decayed slots are decayed once, and calls are counted once."""
    model, twin = Cached(), Cached()
    options = {"static_roles": ("input", "param", "state"), "pad": {"where": 4}, "allow": ("model.slots",)}
    fast = bucketed(model, [2, 4], **options)
    rng = random.Random(0)
    for _ in range(40):
        where = torch.tensor(rng.sample(range(4), rng.randint(1, 4)))
        x = torch.randn(len(where), 3)
        torch.testing.assert_close(fast(x, where), twin(x, where))
        torch.testing.assert_close(model.slots[:4], twin.slots[:4])
    assert model.calls == twin.calls == 40
    assert fast.stats.replayed > 20 and fast.shapes.checked > 4


def test_state_that_takes_in_padding_is_refused_by_name() -> None:
    options = {"static_roles": ("input", "param", "state"), "pad": {"where": 4}}
    x, where = torch.randn(3, 3), torch.arange(3)
    model = Cached(careful=False)
    with pytest.raises(PaddingError, match=r"changes the outcome of the step: model\.total: 3 of 3 elements differ"):
        twice(bucketed(model, [4], **options), x, where)
    twin = Cached(careful=False)
    twin(x, where)
    assert torch.equal(model.slots, twin.slots) and torch.equal(model.total, twin.total) and model.calls == 1


def test_without_room_for_a_check_calls_stay_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are padded once there is room to compare them."""
    fast = bucketed(network(), [4], verify=1)
    free: list[int | None] = [0]
    monkeypatch.setattr("graphplan.step.memory_budget.free_bytes", lambda device: free[0])
    for _ in range(3):
        assert fast(torch.randn(3, 8)).shape == (3, 4)
    assert fast.stats.skipped[SkipReason.CHECK] == 2 and fast.shapes.checked == 0
    assert any("neither cpu nor the host has that much free" in reason for reason in fast.stats.reasons)
    free[0] = None
    fast(torch.randn(3, 8))
    assert fast.shapes.checked == 1
    free[0] = 0
    assert fast(torch.randn(2, 8)).shape == (2, 4)
    assert fast.shapes.checked == 1


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number among the arguments that never comes back makes a capture size of its own each time."""
    monkeypatch.setattr("graphplan.step.padding._MOST_SIZES", 3)
    monkeypatch.setattr("graphplan.step.padding._MOST_SHAPES", 5)
    monkeypatch.setattr("graphplan.step.padding._MOST_KINDS", 4)
    fast = bucketed(lambda x, scale: x * scale, [4], on_failure="eager")
    for index in range(8):
        x = torch.randn(3, 8)
        assert torch.equal(fast(x, float(index)), x * float(index))
    assert fast._padded is not None
    kinds = fast._padded.padding
    assert kinds._sizes.cache_info().currsize == 3 and len(fast.shapes.shapes) == 5 and len(kinds._kinds) == 4
