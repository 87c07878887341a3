"""What other systems document of their graphs, and leave open: each is eager's result here, or told by name."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import CaptureError, FeedError, Graphed, OptionError, Pool, SkipReason, graphed
from tests.inference.helpers import assert_replays


@pytest.fixture(autouse=True)
def _predicting() -> Any:
    with torch.no_grad():
        yield


def bucketed(fn: Any, sizes: Any, **options: Any) -> Graphed:
    fast: Graphed = graphed(fn, shapes="bucket", buckets=sizes, **{"backend": "tape", **options})
    return fast


# Which dimensions may vary.


def test_buckets_pad_the_dimension_they_are_for() -> None:
    """Without dynamic=, sizes of dimension 0 leave the others as they are: another length is another program."""
    fast = bucketed(lambda x: x.cumsum(0), [4])
    for length in (6, 7, 6, 7) * 4:
        x = torch.randn(3, length)
        assert torch.equal(fast(x), x.cumsum(0))
    assert fast.num_graphs == 2


# Literals.


@pytest.mark.parametrize(
    ("one", "two"),
    [(-1, -2), (True, 1), (1, 1.0), (0.0, -0.0), ("0", 0), (None, False), (b"a", "a")],
    ids=repr,
)
def test_literals_that_hash_or_compare_alike_are_told_apart(one: Any, two: Any) -> None:
    """A key made of hashes would take the program of one for the other."""

    def fn(x: Tensor, flag: Any) -> Tensor:
        power = {repr(one): 2.0, repr(two): 3.0}[repr(flag)]
        return x * power

    fast = assert_replays(fn, [(torch.randn(3), flag) for flag in (one, two) * 7])
    assert fast.num_graphs == 2


# Sizes.


@pytest.mark.parametrize("shape", [(4, 0), (0, 0), (0,), (3, 0, 5), ()], ids=str)
@pytest.mark.parametrize("options", [{}, {"outputs": "static", "verify": "off"}], ids=str)
@pytest.mark.twice
def test_tensors_without_elements_and_without_dimensions(shape: tuple[int, ...], options: Any) -> None:
    fast = assert_replays(lambda x: (x * 2, x.sum()), [(torch.randn(shape),) for _ in range(7)], **options)
    assert fast.stats.replayed == 3


def test_a_dimension_without_elements_beside_a_padded_one() -> None:
    fast = bucketed(lambda x: torch.cat([x, x + 1], 1), [4])
    for size in (3, 2, 4) * 5:
        x = torch.randn(size, 0)
        assert fast(x).shape == (size, 0)
    assert fast.num_graphs == 1


# Inputs that share memory.


def test_leaves_that_share_memory() -> None:
    """The same tensor twice, and parts of it that overlap: replays take each for what it is."""
    fast = graphed(lambda x, y: x * 2 + y, backend="tape")
    for index in range(9):
        whole = torch.arange(10.0) + index
        for x, y in ((whole, whole), (whole[:6], whole[4:]), (whole[2:8], whole[:6])):
            assert torch.equal(fast(x, y), x * 2 + y)
    assert fast.stats.replayed > 9


def test_a_leaf_that_is_changed_and_shares_memory_with_another() -> None:
    """Where a replay would miss what eager does to the other one, the call is eager, and says so."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x + y

    fast = graphed(fn, backend="tape")
    for index in range(9):
        apart, other = torch.full((4,), float(index)), torch.ones(4)
        twin, twin_other = apart.clone(), other.clone()
        assert torch.equal(fast(apart, other), fn(twin, twin_other)) and torch.equal(apart, twin)
    whole, twin = torch.arange(4.0), torch.arange(4.0)
    assert torch.equal(fast(whole, whole), fn(twin, twin)) and torch.equal(whole, twin)
    assert fast.stats.skipped[SkipReason.FEED] == 1


def test_the_argument_that_no_program_takes_is_named_by_its_path() -> None:
    fast = graphed(lambda batch, scale=1: batch["x"] * scale, backend="tape")
    with pytest.raises(FeedError, match=r"args\[0\]\['x'\] has layout torch.sparse_coo; expected a dense"):
        fast({"x": torch.eye(3).to_sparse()})
    with pytest.raises(
        FeedError, match=r"kwargs\['scale'\] has layout torch.sparse_coo; feed|kwargs\['scale'\] has layout"
    ):
        fast({"x": torch.eye(3)}, scale=torch.eye(3).to_sparse())


# Padded calls.


def test_geometries_of_one_shape_share_a_capture_size() -> None:
    """Calls are told apart by strides too, and padded into the same memory."""
    layer = nn.Linear(8, 4)
    fast = bucketed(layer, [4])
    for index in range(12):
        x = torch.randn(3, 8) if index % 2 else torch.randn(8, 3).t()
        torch.testing.assert_close(fast(x), layer(x))
    assert len(fast.shapes.capture_sizes) == 1 and fast.stats.replayed > 0


def test_memory_that_had_to_grow_leaves_padded_calls_right() -> None:
    """A wider input comes, takes larger memory, and the narrow one is padded where its program reads."""
    fast = bucketed(lambda x: x.sin().sum(1), [4, 8])
    for width in (8, 64, 8, 256, 64, 8) * 4:
        x = torch.randn(3 + width % 5, width)
        torch.testing.assert_close(fast(x), x.sin().sum(1))
    assert fast.num_graphs >= 3


def test_what_an_earlier_call_left_in_the_padding_is_gone() -> None:
    """A long call, then a short one: the rest is padding again, for the inputs and for the mask."""

    def fn(x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask[:, None]).sum(0).expand(3, -1) + x.sum(0)

    def wanted(x: Tensor) -> Tensor:
        return fn(x, torch.ones(len(x)))

    fast = bucketed(fn, [8], mask="mask", dynamic={"x": 0}, verify="off")
    for size in (8, 2, 7, 1, 8, 3) * 4:
        x = torch.randn(size, 5)
        torch.testing.assert_close(fast(x), wanted(x))
    assert fast.stats.replayed > 12


def test_other_weights_are_not_for_padded_calls() -> None:
    fast = bucketed(nn.Linear(8, 4), [4], copy_roles=("input", "param"))
    with pytest.raises(
        OptionError,
        match=r"replay\(\) needs shapes='exact'; with shapes='bucket', call the function itself, which pads",
    ):
        fast.replay((torch.randn(3, 8),))


# Re-entry.


@pytest.mark.twice
def test_a_function_that_calls_itself_is_one_step() -> None:
    def halve(x: Tensor, times: int) -> Tensor:
        return x if not times else fast(x / 2, times - 1)  # type: ignore[no-any-return]

    fast = graphed(halve, backend="tape")
    for _ in range(6):
        x = torch.rand(3)
        assert torch.equal(fast(x, 2), x / 2 / 2)
    assert fast.stats.replayed == 2


# Several ways through a program, and what changes between replays.


def test_ways_through_a_function_are_programs_of_their_own() -> None:
    """A flag of the caller's, a training flag, an autocast: each way is captured once, and found again."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    fast = graphed(lambda x, twice: layer(layer(x) if twice else x), backend="tape", owners={"layer": layer})

    def both(x: Tensor, twice: bool) -> None:
        state = torch.get_rng_state()
        found = fast(x, twice)
        torch.set_rng_state(state)
        assert torch.equal(found, layer(layer(x) if twice else x))

    for _ in range(8):
        for twice in (False, True):
            for training in (False, True):
                layer.train(training)
                both(torch.randn(3, 8), twice)
                with torch.autocast("cpu", torch.bfloat16):
                    both(torch.randn(3, 8), twice)
    assert fast.num_graphs == 8 and fast.stats.captured == 8


def test_eager_calls_before_it_in_one_autocast_block() -> None:
    """Their casts of weights, which autocast keeps for the block, are no part of a later call."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    fast = graphed(layer, backend="tape", verify=1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(8):
            x = torch.randn(4, 8)
            assert torch.equal(layer(x), fast(x))
    assert fast.stats.replayed == fast.stats.verified > 0
    assert fast.stats.captured == 1


def test_results_are_the_callers_whatever_is_replayed_later() -> None:
    """Earlier results stay, may be fed again, and may be written to."""
    layer = nn.Linear(8, 8)
    fast = graphed(layer, backend="tape")
    kept: list[tuple[Tensor, Tensor]] = []
    x = torch.randn(4, 8)
    for _ in range(9):
        found, wanted = fast(x), layer(x)
        kept.append((found, wanted))
        x = found
        if len(kept) % 3 == 0:
            found.mul_(0.5)
            wanted.mul_(0.5)
    assert all(torch.equal(found, wanted) for found, wanted in kept)
    assert fast.num_graphs == 1


def test_weights_that_eager_code_changes_in_place_are_seen() -> None:
    layer = nn.BatchNorm1d(8).eval()
    fast = graphed(layer, backend="tape", verify="off")
    for index in range(9):
        layer.running_mean.add_(0.1 * index)  # type: ignore[union-attr, operator]
        layer.weight.mul_(0.9)
        x = torch.randn(4, 8)
        assert torch.equal(fast(x), layer(x))
    assert fast.stats.captured == 1 and fast.stats.replayed == 5


# A soak.


@pytest.mark.soak
def test_a_soak_of_threads_and_shapes_leaks_nothing() -> None:
    """Eight threads, exact and padded calls of one pool, random shapes and options: eager's results, and the programs,
    static memory and living tensors of the first half are those of the second.
    """
    pool, layer = Pool(), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    exact: Any = graphed(layer, backend="tape", pool=pool, verify=50)
    padded: Any = bucketed(layer, [2, 4, 8], pool=pool, verify=50)

    def serve(seed: int) -> float:
        generator, worst = torch.Generator().manual_seed(seed), 0.0
        with torch.no_grad():
            for index in range(60):
                size = int(torch.randint(1, 9, (), generator=generator))
                x = torch.randn(size, 8, generator=generator)
                x = x if index % 3 else torch.randn(8, size, generator=generator).t()
                found = (exact if index % 2 else padded)(x)
                worst = max(worst, float((found - layer(x)).abs().max()))
        return worst

    def run() -> tuple[int, int, int, int]:
        with ThreadPoolExecutor(8) as threads:
            assert max(threads.map(serve, range(8))) < 1e-5
        gc.collect()
        living = sum(isinstance(thing, Tensor) for thing in gc.get_objects())
        return exact.num_graphs, padded.num_graphs, exact.memory.pool + padded.memory.pool, living

    for _ in range(3):
        run()
    first, second = run(), run()
    assert first[1] == 6, "three capture sizes, of rows and of columns"
    assert first == second
    assert exact.stats.calls + padded.stats.calls >= 5 * 8 * 60


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_fast_path_under_an_autocast_of_the_host(is_fast: bool) -> None:
    """Its one operator runs others, which autocast casts for: calls are eager, and the error says what to turn off."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    fast = graphed(model, backend="tape")
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(is_fast)
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            for index, x in enumerate(torch.randn(8, 2, 5, 16)):
                refused = pytest.raises(
                    CaptureError, match=r"_transformer_encoder_layer_fwd.*set_fastpath_enabled\(False"
                )
                with refused if is_fast and index else nullcontext():
                    assert torch.equal(fast(x), model(x))
        assert bool(fast.stats.replayed) is not is_fast
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def test_a_size_that_is_returned() -> None:
    """Of the class that it has in eager calls, whose methods a tuple has not."""
    model = nn.Linear(4, 2)

    @graphed(owners=[model], backend="tape")
    def shaped(x: Tensor) -> Any:
        y = model(x)
        return y, {"shape": y.shape}

    for x in torch.randn(6, 3, 4):
        y, found = shaped(x)
        assert (type(found["shape"]), found["shape"].numel()) == (torch.Size, 6)
        assert torch.equal(y, model(x))
    assert shaped.stats.replayed > 2
