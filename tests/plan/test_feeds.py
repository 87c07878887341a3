"""What a step may be fed: pytrees, literals, views, mutated and reused tensors; never broadcast, cast or kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from graphplan import SkipReason, graph_step
from graphplan.feed import signature
from graphplan.feed.signature import alignment, alignment_unit
from tests.facts import assert_same, flatten
from tests.models import CALLS, Mlp, float_batches
from tests.twins import BEFORE_REPLAY, CAPTURED, TRACED, WARMUP, Rig, assert_equals_eager, build, managed


def rig_of(forward: Callable[..., Tensor], calls: list[tuple[Any, ...]], width: int = 8) -> Rig:
    """A training step on ``forward(model, *args)`` with a frozen-size linear model."""
    model = nn.Linear(width, 4)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.5, fused=True)

    def train_step(*args: Any) -> Tensor:
        optimizer.zero_grad()
        loss = forward(model, *args)
        loss.backward()
        optimizer.step()
        return loss

    return Rig(train_step, {"model": model, "optimizer": optimizer}, calls)


def _plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def _of_dict(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["targets"][0]) * batch["weight"]


def test_nested_feeds() -> None:
    """Dicts, lists, literals and None are fed as they are to an eager step."""
    calls = [({"x": x, "targets": [y, None], "weight": 2.0},) for x, y in float_batches(CALLS)]
    step = assert_equals_eager(partial(rig_of, _of_dict, calls))
    assert {external.name for external in step.plan.inputs} == {"args[0]['x']", "args[0]['targets'][0]"}


def test_keyword_arguments() -> None:
    """Keyword feeds have names of their own."""
    rigs = []
    for graphed in (False, True):
        rig = build(lambda: rig_of(_plain, []))
        model = rig.owners["model"]
        inner = rig.step

        def step_of(x: Tensor, *, mask: Tensor, inner: Callable[..., Tensor] = inner) -> Tensor:
            return inner(x * mask, mask[:, 0].long())

        step = graph_step(step_of, owners=rig.owners, backend="tape") if graphed else step_of
        losses = [step(x, mask=(x > 0).float()) for x, _ in float_batches(CALLS)]
        rigs.append(flatten(model=model, losses=[loss.detach() for loss in losses]))
    assert_same(*rigs)
    assert {external.name for external in step.plan.inputs} == {"args[0]", "kwargs['mask']"}


@pytest.mark.twice
def test_a_literal_is_part_of_the_signature() -> None:
    """Two values of a literal get two programs; -0.0, 0.0, 0 and False are four values."""

    def scaled(model: nn.Module, x: Tensor, y: Tensor, scale: float) -> Tensor:
        # What is written needs the value.
        return F.cross_entropy(model(x), y) + torch.copysign(x.abs().mean(), torch.full((), float(str(scale))))

    values = [1.5, -2.0, 0.0, -0.0]
    batches = float_batches(40)
    make = partial(rig_of, scaled, [(*batch, values[i % 4]) for i, batch in enumerate(batches)])
    # At the third value it is tried, in a trace, whether the step can do with another one each time.
    assert_equals_eager(make, captured=4, replayed=40 - 4 * 6 - 4)


def test_a_feed_s_key_without_its_tensors_geometry() -> None:
    """A device that is fed itself is a value like others."""

    def key(device: str, *others: Any) -> Any:
        return signature.without_geometry(signature.flatten((torch.empty(2, 3, device=device), *others), {}).key)

    assert key("cpu", 1, 2j) == key("meta", 1, 2j) != key("meta", 1, 3j)
    assert key("cpu", torch.device("cpu")) != key("cpu", torch.device("meta"))
    assert signature.without_geometry(signature.flatten((torch.empty(3, 2, device="meta").t(),), {}).key) == key("meta")
    assert signature.without_geometry(signature.flatten((torch.empty(2, 3).int(),), {}).key) != key("cpu")
    assert signature.flatten((torch.empty(2),), {}).key != signature.flatten((torch.empty(2, device="meta"),), {}).key


def test_a_batch_may_be_the_same_tensor_every_time() -> None:
    """Feed leaves are inputs whatever their identity does: a constant batch, then another one."""
    x, y = float_batches(1)[0]
    fresh = float_batches(3)
    step = assert_equals_eager(partial(rig_of, _plain, [(x, y)] * 12 + list(fresh)))
    assert len(step.plan.inputs) == 2


def test_one_tensor_fed_twice() -> None:
    """``step(x, x)`` does not tie the two arguments together for later calls, nor the other way round."""

    def two(model: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        return (model(a) - 2 * model(b)).square().mean()

    tensors = [x for x, _ in float_batches(CALLS)]
    tied = [(x, x) for x in tensors]
    loose = list(pairwise(tensors))
    assert_equals_eager(partial(rig_of, two, tied[:10] + loose[:8]))
    assert_equals_eager(partial(rig_of, two, loose[:10] + tied[:8]))


def test_the_model_s_own_tensor_as_feed() -> None:
    """A buffer that the step only reads stays an input where it is fed."""

    def pull(model: nn.Module, target: Tensor) -> Tensor:
        return (model.weight - 0.5 * target).square().sum()

    def make() -> Rig:
        rig = rig_of(pull, [])
        rig.owners["model"].register_buffer("target", torch.ones_like(rig.owners["model"].weight))
        rig.calls = [(rig.owners["model"].target,)] * CALLS
        return rig

    assert_equals_eager(make)


def test_an_owner_s_tensor_in_the_place_of_a_batch() -> None:
    """The step writes to it before it reads its batch, which is the same memory in that one call only."""

    def make() -> Rig:
        model = nn.Linear(8, 4)
        model.register_buffer("total", torch.zeros(6, 8))
        optimizer = SGD(model.parameters(), lr=0.05, fused=True)

        def train_step(x: Tensor, y: Tensor) -> Tensor:
            model.total.add_(1.0)  # type: ignore[operator]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        calls = list(float_batches(CALLS))
        calls[15] = (model.total, calls[15][1])
        return Rig(train_step, {"model": model, "optimizer": optimizer}, calls)

    step = assert_equals_eager(make, replayed=CALLS - BEFORE_REPLAY - 1)
    assert step.stats.skipped[SkipReason.FEED] == 1


LAYOUTS: dict[str, Callable[[int], Tensor]] = {
    "transposed": lambda index: torch.randn(8, 6).T,
    "sliced": lambda index: torch.randn(12, 16)[::2, ::2],
    "a column of many": lambda index: torch.randn(6, 8, 9)[..., 2],
    "expanded": lambda index: torch.randn(1, 8).expand(6, 8),
    "a sliding window": lambda index: torch.randn(13).unfold(0, 8, 1),
    "offset": lambda index: torch.randn(9, 8)[index % 2 : index % 2 + 6],
    "misaligned": lambda index: torch.randn(60)[1 + index % 2 :].as_strided((6, 8), (8, 1)),
    "alternating": lambda index: torch.randn(8, 6).T if index % 2 else torch.randn(6, 8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_feeds_that_are_not_contiguous(layout: str) -> None:
    """A program is captured for each geometry, alignment included, and gives the bits that eager has there."""
    calls = [(LAYOUTS[layout](index), torch.randint(4, (6,))) for index in range(CALLS)]
    shapes = len({(x.stride(), alignment(x)) for x, _ in calls})
    make = partial(rig_of, _plain, calls)
    # They warm up together.
    assert_equals_eager(make, captured=shapes, replayed=CALLS - WARMUP - shapes * (TRACED + CAPTURED))


def test_rows_sliced_from_one_tensor() -> None:
    """Slices begin anywhere, and a matrix product of a misaligned batch has other last bits than that of a copy."""
    make, places = sliced_rig()
    assert places == 2
    assert_equals_eager(make, captured=2, replayed=60 - WARMUP - 2 * (TRACED + CAPTURED), verify="off")


def test_where_other_addresses_give_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU whose kernels load by 64 bytes, rows begin at eight kinds of addresses."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "equal", lambda one, other: False)
        patch.setattr(signature, "_are_alike", lru_cache(signature._are_alike.__wrapped__))
        assert alignment_unit(torch.empty(1)) == 64
    monkeypatch.setattr(signature, "_are_alike", lambda: False)
    make, places = sliced_rig()
    assert places == 8
    assert_equals_eager(make, captured=8, replayed=60 - 4 * 8, verify="off")


def test_arrays_of_numpy_begin_at_multiples_of_16_bytes() -> None:
    """One program serves all of them."""
    memory = torch.randn(64 + 60 * 20)
    start = next(at for at in range(16) if memory[at].data_ptr() % 64 == 0)
    rows = (memory[start + 4 * index :][:60].view(6, 10) for index in (0, 1, 2, 3, 5, 8, 10, 15) * 3)
    calls = [(x, torch.randint(4, (6,))) for x in rows]

    def make() -> Rig:
        return rig_of(_plain, list(calls), width=10)

    assert len({x.data_ptr() % 64 for x, _ in calls}) == 4
    assert_equals_eager(make, captured=1, replayed=24 - BEFORE_REPLAY)


def sliced_rig() -> tuple[Callable[[], Rig], int]:
    """A step on rows that are sliced from one tensor, and at how many kinds of addresses they begin."""
    rows = torch.randn(5 * 60, 10)
    start = [5 * index for index in range(60)]
    calls = [(rows[i : i + 5], torch.randint(4, (5,))) for i in start]

    def make() -> Rig:
        model = nn.Linear(10, 4)
        optimizer = SGD(model.parameters(), lr=0.05, fused=True)

        def train_step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return Rig(train_step, {"model": model, "optimizer": optimizer}, list(calls))

    return make, len({(alignment(x), alignment(y)) for x, y in calls})


def test_a_mutated_input_is_written_back() -> None:
    """A step that writes into its batch does so to the user's tensor, on every replay."""

    def mutating(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(0.5).clamp_(-1, 1)
        return F.cross_entropy(model(x), y)

    def make() -> Rig:
        return rig_of(mutating, list(float_batches(CALLS)))

    step = assert_equals_eager(make)
    assert [e.name for e in step.plan.inputs if e.mutated] == ["args[0]"]


@pytest.mark.twice
def test_a_read_input_is_left_alone() -> None:
    """The caller's batch is never adopted: it keeps its bits and its address, and later writes to it do not matter."""
    rig = build(partial(rig_of, _plain, list(float_batches(CALLS))))
    step = managed(rig)
    before = [(x.clone(), x.data_ptr()) for x, _ in rig.calls]
    for x, y in rig.calls:
        step(x, y)
    for (x, _), (copy, address) in zip(rig.calls, before, strict=True):
        assert torch.equal(x, copy) and x.data_ptr() == address
    assert step.stats.replayed == CALLS - 6


def test_a_batch_overwritten_in_place_between_calls() -> None:
    """A loader that reuses one tensor for all batches is fed by value."""

    def make() -> Rig:
        pool = [x for x, _ in float_batches(CALLS)]
        x, y = pool[0].clone(), torch.tensor([0, 1, 2, 3, 0, 1])
        rig = rig_of(_plain, [(x, y)] * CALLS)
        rig.after = lambda index: x.copy_(pool[(index + 1) % CALLS])
        return rig

    assert_equals_eager(make)


def test_gradients_with_respect_to_the_input() -> None:
    """A gradient penalty: double backward through the batch."""

    def penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        return F.cross_entropy(model(x), y) + (slope.norm(dim=1) - 1).square().mean()

    assert_equals_eager(partial(rig_of, penalty, list(float_batches(CALLS))))


def test_a_feed_that_requires_grad() -> None:
    """A leaf that asks for gradients gets them on every call, in a new tensor."""

    def make() -> Rig:
        calls = [(x.clone().requires_grad_(), y) for x, y in float_batches(CALLS)]
        return rig_of(_plain, calls)

    assert_equals_eager(make)


def test_a_constant_from_the_closure() -> None:
    """Class weights that nobody owns are kept by the plan and listed as a parameter-like external."""
    forward = partial(_weighted, torch.tensor([0.1, 0.2, 0.3, 0.4]))
    step = assert_equals_eager(partial(rig_of, forward, list(float_batches(CALLS))))
    owned = {"model.weight", "model.bias"}
    (constant,) = [external for external in step.plan.params if external.name not in owned]
    assert constant.spec.shape == (4,) and not constant.mutated


def _weighted(weights: Tensor, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=weights)


@pytest.mark.twice
def test_inference() -> None:
    """An evaluation step under the inference policy: no state, eager's numbers, and training in between is seen."""
    model = Mlp().eval()
    batches = [x for x, _ in float_batches(CALLS)]

    def predict(x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"logits": model(x), "best": model(x).argmax(1)}

    step = graph_step(predict, owners={"model": model}, mode="inference", backend="tape")
    for index, x in enumerate(batches):
        if index == 12:
            with torch.no_grad():
                model[0].weight.mul_(0.5)
        found = step(x)
        assert_same(flatten(out=predict(x)), flatten(out=found))
    assert step.stats.replayed == CALLS - 6
    assert step.plan.state == ()
