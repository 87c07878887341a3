"""Graphed functions on the device: shapes, buckets, weights, static results, threads and streams, memory."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import Graphed, GraphedStep, Pool, StaleError, graphed, piecewise
from graphplan.step.options import Options
from tests.devices import BACKEND, CUDA, DEVICE, MIB, is_healthy, memory, needs_cuda
from tests.models import Transformer
from tests.twins import by_chance


@pytest.fixture(autouse=True)
def _predicting() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make_network(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4)).to(
        DEVICE
    )


def fast_of(fn: Callable[..., Any], **options: Any) -> Graphed:
    return graphed(fn, **{"backend": BACKEND, "min_speedup": 0.0, **options})


def batch(size: int, generator: torch.Generator | None = None) -> Tensor:
    return torch.randn(size, 16, generator=generator).to(DEVICE)


def test_shapes_in_turn_equal_eager() -> None:
    """Each shape has a program; all are in one pool, and none disturbs another's results."""
    model = make_network()
    fast = fast_of(model)
    kept = []
    for size in (8, 3, 5, 1) * 9:
        x = batch(size)
        kept.append((fast(x), model(x)))
    for found, wanted in kept:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert fast.num_graphs == 4
    assert fast.stats.verified > 4


def test_buckets_and_prewarming() -> None:
    model = make_network()
    fast = fast_of(model, shapes="bucket", buckets=[1, 2, 4, 8])
    assert fast.prewarm(example=(batch(3),)) == 4
    rng = random.Random(0)
    for _ in range(60):
        x = batch(rng.randint(1, 8))
        torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-4)
    assert fast.num_graphs == 4 and fast.stats.captured == 4
    assert all(program.inputs._of_callers for program in fast.programs), "padded where the programs read it"


def test_batches_from_the_host() -> None:
    """Moved by device=, padded or not."""
    model = make_network()
    for options in ({}, {"shapes": "bucket", "buckets": [4, 8]}):
        fast = fast_of(model, device=DEVICE, **options)
        for size in (3, 8) * 8:
            x = torch.randn(size, 16)
            torch.testing.assert_close(fast(x), model(x.to(DEVICE)), rtol=1e-3, atol=1e-4)
        assert fast.num_graphs == 2


def test_weights_from_the_feed() -> None:
    models = [make_network() for _ in range(3)]
    fast = fast_of(models[0], copy_roles=("input", "param"))
    for _ in range(3):
        x = batch(4)
        for model in models:
            torch.testing.assert_close(fast.replay((x,), params=model.state_dict()), model(x), rtol=0, atol=0)
    assert fast.stats.captured == 1


def test_static_results_are_chained_without_copies() -> None:
    first_layer, second_layer = make_network(), nn.Linear(4, 3).to(DEVICE)
    pool = Pool()
    first = fast_of(first_layer, outputs="static", verify="off", pool=pool)
    second = fast_of(second_layer, outputs="static", verify="off", pool=pool)
    for _ in range(12):
        x = batch(5)
        middle = first(x)
        found = second(middle) + 0
        torch.testing.assert_close(found, second_layer(first_layer(x)), rtol=0, atol=0)
    assert second.stats.replayed > 6
    first(batch(5))
    with pytest.raises(StaleError, match="used after a later replay"):
        middle.sum()
    with pytest.raises(StaleError, match="used after a later replay"):
        middle[1:].t().cpu()


def test_other_programs_of_the_pool_leave_static_results_alone() -> None:
    """Whatever is captured and replayed meanwhile, before or after: a result is good until its own program's next."""
    pool = Pool()
    layers = [make_network(width) for width in (32, 128, 64, 256)]
    steps = [fast_of(layer, outputs="static", verify="off", pool=pool) for layer in layers]
    for _ in range(8):
        x = batch(6)
        found = [(step(x), layer(x)) for step, layer in zip(steps, layers, strict=True)]
        for result, wanted in reversed(found):
            torch.testing.assert_close(result + 0, wanted, rtol=0, atol=0)


def test_what_a_program_changes_is_written_back() -> None:
    def fill(cache: Tensor, x: Tensor) -> Tensor:
        cache.mul_(0.5).add_(x)
        return cache.sum(0)

    fast = fast_of(fill)
    mine, twin = batch(4), batch(4)
    twin.copy_(mine)
    for _ in range(9):
        x = batch(4)
        torch.testing.assert_close(fast(mine, x), fill(twin, x), rtol=0, atol=0)
        torch.testing.assert_close(mine, twin, rtol=0, atol=0)


def test_eviction_frees_memory_and_leaves_the_rest() -> None:
    """Under a budget, programs share memory in groups that go one after the other."""

    def fn(x: Tensor) -> Tensor:
        return (x[:, :, None] * x[:, None, :]).sin().relu().sum((1, 2))

    probe = fast_of(fn, verify="off")
    probe.prewarm([4096], example=(batch(2),))
    budget = probe.memory.pool * 3 // 2
    probe.close()
    before = memory()[1]
    fast = fast_of(fn, verify="off", memory_budget=budget)
    fast.prewarm(range(4096, 4096 - 5, -1), example=(batch(2),))
    assert fast.stats.events["evicted: more bytes than memory_budget"] >= 1
    assert fast.memory.pool <= budget
    if CUDA:
        assert memory()[1] - before <= budget + 64 * MIB
    assert 0 < fast.num_graphs < 5
    x = batch(4092)
    torch.testing.assert_close(fast(x), fn(x))
    is_healthy() if CUDA else None


@needs_cuda
def test_many_shapes_take_little_more_memory_than_the_largest() -> None:
    model = Transformer(width=128, length=64).to(DEVICE).eval()

    def run(sizes: list[int]) -> int:
        before = memory()[1]
        fast = fast_of(model, verify="off")
        fast.prewarm(sizes, example=(torch.zeros(1, 64, dtype=torch.long, device=DEVICE),))
        used = memory()[1] - before
        fast.close()
        return used

    largest = run([256])
    assert run([256, 192, 128, 96, 64, 32, 16, 8]) <= 1.3 * largest + 8 * MIB


class _Trainable:
    """A network whose matrix products are split along what they sum over, which takes a workspace; and its training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4096, 32), nn.ReLU(), nn.Linear(32, 4096), nn.Linear(4096, 8)).to(DEVICE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.owners = {"model": self.model, "optimizer": self.optimizer}

    def train(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def _take_what_is_free(stream: Any) -> list[Tensor]:
    """Freed memory filled with something else, wherever torch would take it from."""
    taken = []
    for where in (None, stream) if CUDA else ():
        with torch.cuda.stream(where):
            taken += [torch.full((size << 18,), 7.0, device=DEVICE) for size in (1, 4, 16, 32, 64) for _ in range(4)]
    return taken


def retire(goes: str, *, empties: bool) -> None:
    """A training and an evaluation program on one stream and in one pool: one goes, the other stays right."""
    pool, mine, twin = Pool(), _Trainable(), _Trainable()
    scored = _Trainable().model.eval()
    options = Options(backend=BACKEND, verify="off", min_speedup=0.0)
    step: Any = GraphedStep(mine.train, mine.owners, options, pool.backends)
    fast: Any = fast_of(scored, verify="off", pool=pool)

    def both(trains: bool = True, scores: bool = True) -> None:
        x = torch.randn(16, 4096).to(DEVICE)
        if trains:
            torch.testing.assert_close(step(x), twin.train(x), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close([*mine.model.parameters()], [*twin.model.parameters()], rtol=1e-4, atol=1e-5)
        if scores:
            with torch.inference_mode():
                torch.testing.assert_close(fast(x), scored(x), rtol=1e-4, atol=1e-5)

    for _ in range(12):
        both()
    assert step.stats.replayed and fast.stats.replayed
    stream = step.machine.runner.backend.stream if CUDA else None
    (step if goes == "train" else fast).close()
    gc.collect()
    if CUDA:
        torch._C._cuda_clearCublasWorkspaces()
        if empties:
            torch.cuda.empty_cache()
    taken = _take_what_is_free(stream)
    for _ in range(6):
        both(trains=goes != "train", scores=goes != "eval")
    assert all(bool((tensor == 7.0).all()) for tensor in taken), "a replay wrote where others have their tensors"
    # A program that is captured now finds its place, too.
    again: Any = fast_of(scored, verify="off", pool=pool)
    with torch.inference_mode():
        for _ in range(8):
            x = torch.randn(16, 4096).to(DEVICE)
            torch.testing.assert_close(again(x), scored(x), rtol=1e-4, atol=1e-5)
    both(trains=goes != "train", scores=goes != "eval")
    assert all(bool((tensor == 7.0).all()) for tensor in taken)


@pytest.mark.parametrize("empties", [False, True], ids=["cached", "emptied"])
@pytest.mark.parametrize("goes", ["train", "eval"])
def test_a_program_outlives_another_of_its_stream(goes: str, empties: bool) -> None:
    """In a process of its own on CUDA, which a replay that reads freed memory would leave unusable."""
    if not CUDA:
        with torch.inference_mode(False):
            retire(goes, empties=empties)
        return
    code = f"from tests.gpu.test_inference import retire; retire({goes!r}, empties={empties})"
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, cwd=root, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_threads_and_streams() -> None:
    """Eight threads, each on a stream of its own, two functions in one pool, random shapes: eager's results."""
    pool = Pool()
    layers = [make_network(), make_network(96)]
    steps = [fast_of(layer, pool=pool, verify="off") for layer in layers]

    def serve(seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        worst = 0.0
        stream = torch.cuda.Stream() if CUDA else None
        with torch.cuda.stream(stream), torch.inference_mode():
            for index in range(40):
                size = int(torch.randint(1, 5, (), generator=generator))
                x = batch(size, generator)
                difference = steps[index % 2](x) - layers[index % 2](x)
                worst = max(worst, float(difference.abs().max()))
        return worst

    with ThreadPoolExecutor(8) as threads:
        assert max(threads.map(serve, range(8))) <= 1e-5
    assert all(step.num_graphs == 4 for step in steps)


@needs_cuda
def test_results_of_eager_calls_are_read_before_their_memory_is_used_again() -> None:
    """One stream still reads what a warm-up call gave it, when the next one, for another stream, needs memory."""
    slow, other = torch.cuda.Stream(), torch.cuda.Stream()
    given: list[Tensor] = []
    read: list[Tensor] = []

    def doubled(x: Tensor) -> Tensor:
        if given:
            # As another thread does in the middle of this call.
            with torch.cuda.stream(slow):
                torch.cuda._sleep(500_000_000)
                read.append(given.pop().clone())
        return x * 2

    fast = fast_of(doubled, verify="off", capture_after=9)
    x, y = torch.full((2**20,), 1.0, device=DEVICE), torch.full((2**20,), 5.0, device=DEVICE)
    torch.cuda.synchronize()
    with torch.inference_mode():
        with torch.cuda.stream(slow):
            first = fast(x)
        given.append(first)
        del first
        with torch.cuda.stream(other):
            second = fast(y)
    torch.cuda.synchronize()
    assert bool((second == 10).all())
    assert len(read) == 1
    assert bool((read[0] == 2).all())


@needs_cuda
def test_eager_calls_may_return_conjugates() -> None:
    """Views that are only marked as conjugated, or as negative, on their way to a program and from it."""

    def turned(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.conj(), x.mH, (x * 2).conj().imag

    fast = fast_of(turned)
    x = torch.view_as_complex(torch.randn(8, 8, 2, device=DEVICE))
    with torch.inference_mode():
        for _ in range(6):
            for found, wanted in zip(fast(x), turned(x), strict=True):
                assert torch.equal(found, wanted)


def _pick(x: Tensor) -> Tensor:
    """Reads a value on the host, which no graph can."""
    return x * (2 if complex(by_chance(x).sum()).real > 0 else 3)


def test_pieces_with_an_eager_call_between_programs() -> None:
    first, last = make_network(), nn.Linear(4, 3).to(DEVICE)
    run = piecewise([first, torch.sin, _pick, torch.cos, last], backend=BACKEND, min_speedup=0.0)
    for _ in range(14):
        x = batch(5)
        torch.testing.assert_close(run(x), last(torch.cos(_pick(torch.sin(first(x))))), rtol=0, atol=0)
    assert run.scope == "piecewise" and run.num_graphs == 2
    assert "_pick" in run.reasons


def test_reports() -> None:
    """What a program's step consists of."""
    model = make_network()
    fast = fast_of(model, verify="off")
    for size in (8, 4) * 6:
        fast(batch(size))
    programs = json.loads(fast.report("json"))["programs"]
    assert len(programs) == 2
    for program in programs:
        assert sum(program["operators"].values()) >= 5
