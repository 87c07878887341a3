"""Arguments, feeds and calls that make no sense: each is an error of its own class that says what to do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphplan
from graphplan import (
    BackendError,
    DeviceError,
    FeedError,
    GraphPlanError,
    NotCapturedError,
    OptionError,
    OwnersError,
    Policy,
    PolicyError,
    SkipReason,
    capture,
    compile_plan,
    graph_step,
    graphed,
)
from graphplan.backends.backend import resolve_backend
from graphplan.feed.signature import check_feed, flatten
from tests.facts import assert_same
from tests.models import Box, float_batches, training_rig
from tests.twins import (
    BEFORE_REPLAY,
    WARMUP,
    Rig,
    assert_equals_eager,
    assert_falls_back,
    assert_refused,
    build,
    managed,
    state_of,
)

make_rig = partial(training_rig, "mlp", "adamw", sizes=(8,) * 12)


def _identity(x: Tensor) -> Tensor:
    return x * 2


OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "backend": ({"backend": "cuda-graph"}, BackendError, r"cuda-graph.*cudagraph, tape, eager"),
    "mode": ({"mode": "training"}, PolicyError, r"training.*train, inference"),
    "on_failure": ({"on_failure": "ignore"}, ValueError, r"on_failure.*ignore.*raise.*eager"),
    "warmup_steps=0": ({"warmup_steps": 0}, ValueError, "warmup_steps is 0; expected an int >= 1"),
    "warmup_steps=-1": ({"warmup_steps": -1}, ValueError, "warmup_steps is -1; expected an int >= 1"),
    "eager_if": ({"eager_if": "always"}, ValueError, "eager_if is 'always'; expected a predicate, or n >= 1"),
    "eager_if=0": ({"eager_if": 0}, ValueError, "eager_if is 0; expected a predicate, or n >= 1"),
    "policy": ({"policy": "train"}, PolicyError, r"policy is 'train'; expected a Policy, such as Policy\.train\(\)"),
    "owners": ({"owners": 3}, OwnersError, r"owners.*int.*mapping.*sequence"),
    "owners with dots": (
        {"owners": {"a": nn.Linear(1, 1), "a.b": nn.Linear(1, 1)}},
        OwnersError,
        r"the owners 'a' and 'a\.b' may hold values of the same path",
    ),
    "warmup_steps='3'": (
        {"warmup_steps": "3"},
        ValueError,
        "warmup_steps is '3'; expected an int >= 1: an opt",
    ),
    "max_recaptures=True": (
        {"max_recaptures": True},
        ValueError,
        "max_recaptures is True; expected an int >= 0",
    ),
    "debug": ({"debug": "yes"}, ValueError, "debug is 'yes'; expected True or False"),
    "prefetch": ({"prefetch": "auto"}, ValueError, "prefetch is 'auto'; expected True or False"),
    "memory_budget": ({"memory_budget": 0}, ValueError, "memory_budget is 0; expected bytes, an int >= 1, or None"),
    "prepare_optimizers": (
        {"prepare_optimizers": None},
        ValueError,
        "prepare_optimizers is None; expected True",
    ),
    "device": ({"device": "gpu"}, ValueError, r"device is 'gpu'; expected a torch\.device or its name, such as 'cuda'"),
    "device=()": ({"device": ()}, ValueError, r"device is \(\); expected a torch\.device or its name, such as 'cuda'"),
    "allow=None": (
        {"allow": None},
        ValueError,
        r"allow is None; expected a sequence of paths, such as \('model",
    ),
    "allow=[3]": (
        {"allow": [3]},
        ValueError,
        r"allow is \[3\]; expected a sequence of paths, such as \('model",
    ),
    "allow": ({"allow": "model.calls"}, ValueError, r"allow is 'model\.calls'; expected a sequence of paths"),
    "max_graphs": ({"max_graphs": 0}, ValueError, "max_graphs is 0; expected an int >= 1"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_do_not_exist(name: str) -> None:
    """Said when the step is made, not when it is called; the message has the value and the choices."""
    options, error, pattern = OPTIONS[name]
    with pytest.raises(error, match=pattern) as caught:
        graph_step(_identity, **options)
    assert isinstance(caught.value, GraphPlanError)


def test_what_is_not_callable() -> None:
    """A step has to be callable."""
    with pytest.raises(ValueError, match="the step is a int; expected a function or another callable"):
        graph_step(3)  # type: ignore[arg-type]


async def _awaited(x: Tensor) -> Tensor:
    return x * 2


def _yielding(x: Tensor) -> Iterator[Tensor]:
    yield x * 2


async def _streaming(x: Tensor) -> AsyncIterator[Tensor]:
    yield x * 2


class _Awaited:
    async def __call__(self, x: Tensor) -> Tensor:
        return x * 2


class _Yielding(nn.Module):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        """One by one."""
        yield x * 2


BEGUN: list[tuple[Any, str]] = [
    (
        _awaited,
        r"_awaited is a coroutine or generator function .*: a call computes nothing yet, .* and await",
    ),
    (partial(partial(_awaited)), "_awaited is a coroutine or generator"),
    (_Awaited(), "_Awaited is a coroutine or generator"),
    (_yielding, r"_yielding is a coroutine or generator"),
    (_Yielding(), "_Yielding is a coroutine or generator"),
    (_Yielding().forward, "forward is a coroutine or generator"),
    (torch.no_grad()(_yielding), "_yielding is a coroutine or generator"),
    (_streaming, "_streaming is a coroutine or generator"),
]


@pytest.mark.parametrize(("fn", "pattern"), BEGUN)
@pytest.mark.parametrize("make", [graph_step, graphed, lambda fn: compile_plan(fn, torch.ones(2))])
def test_functions_that_only_begin_something(make: Any, fn: Any, pattern: str) -> None:
    """Said when the step is made: its result would be another object in each call, and had not run in a trace."""
    with pytest.raises(OptionError, match=pattern):
        make(fn)


def test_a_backend_that_these_tensors_cannot_use() -> None:
    """CUDA graphs need CUDA tensors: found at the first call, which did not happen."""
    rig = build(make_rig)
    before = state_of(rig)
    step = managed(rig, backend="cudagraph")
    with pytest.raises(BackendError, match=r"cudagraph.*CUDA.*cpu"):
        step(*rig.calls[0])
    assert_same(before, state_of(rig))


def test_a_device_that_has_no_backend() -> None:
    """``auto`` means nothing where there are neither CUDA nor CPU tensors."""
    with pytest.raises(BackendError, match=r"'auto' is for CUDA and CPU tensors, found mps:0; pass backend='eager'"):
        resolve_backend("auto", torch.device("mps", 0))


def test_capturing_for_the_eager_backend() -> None:
    """It records nothing, so there is no program to get."""
    rig = build(make_rig)
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    with pytest.raises(BackendError, match="'eager' records nothing; choose from: auto, cudagraph, tape"):
        capture(plan, feed=rig.calls[0], backend="eager")


def test_a_name_that_the_package_lacks() -> None:
    """The package looks names up itself, and says what Python would say."""
    with pytest.raises(AttributeError, match="module 'graphplan' has no attribute 'GraphPlan'"):
        graphplan.GraphPlan  # noqa: B018


ROLES: dict[str, tuple[str | tuple[str, ...], tuple[str, ...], str]] = {
    "an unknown role": (("inputs", "param"), ("input",), r"'inputs'.*input, param, state"),
    "an unknown copied role": (("input", "param"), ("weights",), r"'weights'.*input, param, state"),
    "copied but not static": (("input", "param"), ("input", "state"), r"copy_roles.*state.*static_roles"),
    "one role as a string": ("input", ("input",), r"static_roles must be a list.*string 'input'; write \['input'\]"),
}


@pytest.mark.parametrize("name", ROLES)
def test_policies_that_contradict_themselves(name: str) -> None:
    """The message names the roles that there are."""
    static, copied, pattern = ROLES[name]
    with pytest.raises(PolicyError, match=pattern):
        Policy("train", static_roles=static, copy_roles=copied)


CONFIGURED: dict[str, tuple[Any, str]] = {
    "a list": (["input"], r"policy of mode 'train': expected a Policy or its role lists, found \['input'\]"),
    "an unknown key": (
        {"static_roles": ["input"], "copied": []},
        r"keys \['copied', 'static_roles'\]; expected static",
    ),
    "a missing key": ({"copy_roles": []}, r"has the keys \['copy_roles'\]; expected static_roles and copy_roles"),
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_configured_policies_that_are_none(name: str) -> None:
    """A configuration file may hold anything: what was found and the two keys are named."""
    value, pattern = CONFIGURED[name]
    with pytest.raises(PolicyError, match=pattern):
        Policy.parse("train", value)


def test_a_policy_of_an_unknown_mode() -> None:
    """Modes are named too."""
    with pytest.raises(PolicyError, match=r"'fit'.*train, inference"):
        Policy("fit", static_roles=("input",), copy_roles=("input",))


def _other_shape(x: Tensor, y: Tensor) -> tuple[Any, ...]:
    return x[:3], y[:3]


def _other_dtype(x: Tensor, y: Tensor) -> tuple[Any, ...]:
    return x.double(), y


def _one_row(x: Tensor, y: Tensor) -> tuple[Any, ...]:
    return x[:1], y


OTHER_FEEDS = {
    "shape": (_other_shape, r"args\[0\].*\[3, 8\].*\[8, 8\]"),
    "dtype": (_other_dtype, r"args\[0\].*float64.*float32"),
    "a row that would broadcast": (_one_row, r"args\[0\].*\[1, 8\].*\[8, 8\]"),
    "an argument less": (lambda x, y: (x,), "there are 1 tensors and values, and there were 2 in the plan"),
    "an argument more": (lambda x, y: (x, y, y), "there are 3 tensors and values, and there were 2 in the plan"),
    "another structure": (
        lambda x, y: ({"x": x, "y": y},),
        r"structure is .*'x': \*, 'y': \*.*was \(\(\*, \*\), \{\}\)",
    ),
    "a literal": (lambda x, y: (x, 3), r"args\[1\] is the int 3, and was torch.int64 \[8\]"),
    "a grad_fn": (
        lambda x, y: (x.clone().requires_grad_() * 2, y),
        r"args\[0\] is .*requiring grad, and was torch.float32",
    ),
}


@pytest.mark.parametrize("name", OTHER_FEEDS)
def test_a_program_refuses_feeds_of_another_signature(name: str) -> None:
    """``program.replay`` names the leaf, what was expected and what was found, and nothing has run."""
    change, pattern = OTHER_FEEDS[name]
    rig = build(make_rig)
    rig.step(*rig.calls[0])
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    program = capture(plan, feed=rig.calls[0], policy=Policy.train(), backend="tape")
    before = state_of(rig)
    with pytest.raises(FeedError, match=pattern):
        program.replay(change(*rig.calls[1]))
    assert_same(before, state_of(rig))
    program.replay(rig.calls[1])


def any_dtype_rig() -> Rig:
    """A step that takes what it gets: batches of several shapes, dtypes and structures, in turn."""
    weight = nn.Parameter(torch.randn(8))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)

    def train_step(x: Any) -> Tensor:
        optimizer.zero_grad()
        values = sum(x.values()) if isinstance(x, dict) else x
        loss = (values.float() @ weight).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    calls: list[tuple[Any, ...]] = []
    for x, _ in float_batches(10):
        calls += [(x,), (x[:3],), (x.double(),), ({"a": x, "b": x},), (x[0],)]
    return Rig(train_step, {"optimizer": optimizer}, calls)


def test_a_step_takes_every_signature() -> None:
    """``graph_step`` has a program for each shape, dtype and structure; nothing is broadcast or cast. The three shapes
    warm up together.
    """
    shapes = 3 * (1 + 2 + 1)
    assert_equals_eager(any_dtype_rig, captured=5, replayed=10 * 5 - shapes - 2 * BEFORE_REPLAY)


def grad_fn_rig() -> Rig:
    """The feed was computed from something that requires gradients."""
    rig = make_rig()
    source = torch.ones((), requires_grad=True)
    rig.calls = [(x * source, y) for x, y in rig.calls]
    return rig


def test_a_feed_with_a_grad_fn() -> None:
    """Gradients cannot flow out of a program: refused at once, naming the leaf and the way out."""
    text = r"args\[0\] has a grad_fn \(MulBackward0\).*Expected a leaf; pass args\[0\]\.detach\(\)"
    assert_refused(grad_fn_rig, FeedError, text, done=0)
    assert_falls_back(grad_fn_rig, SkipReason.FEED, r"args\[0\]")


def test_a_sparse_feed() -> None:
    """A program has no buffer for sparse tensors."""

    def make() -> Rig:
        rig = make_rig()
        inner = rig.step
        rig.step = lambda x, y: inner(x.to_dense(), y)
        rig.calls = [(x.to_sparse(), y) for x, y in rig.calls]
        return rig

    text = r"args\[0\] has layout torch\.sparse_coo; expected a dense .*: pass args\[0\]\.to_dense\(\)"
    assert_refused(make, FeedError, text, done=0)


def test_a_feed_on_another_device() -> None:
    """Nothing is moved unasked: the leaf and both devices are named."""
    text = r"args\[0\] is on cpu, but the step computes on cuda:0; move it.*pass device='cuda:0'"
    with pytest.raises(DeviceError, match=text):
        check_feed(flatten((torch.ones(2),), {}), torch.device("cuda:0"))


def test_a_feed_without_values() -> None:
    rig = build(make_rig)
    step = managed(rig)
    x, y = rig.calls[0]
    with pytest.raises(
        FeedError, match=r"args\[0\] has no values \(it is on the meta device\).*remove it from the arguments"
    ):
        step(x.to("meta"), y)
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(
        FeedError, match=r"args\[0\] has no values \(its memory was freed\).*remove it from the arguments"
    ):
        step(freed, y)


def test_an_unhashable_literal() -> None:
    """A leaf that is neither tensor nor literal could change without being seen."""
    step = graph_step(lambda x, odd: x * len(odd), backend="tape")
    with pytest.raises(
        FeedError,
        match=r"an argument has the type bytearray, which is neither a tensor nor a literal.*register the type",
    ):
        for _ in range(WARMUP + 2):
            assert torch.equal(step(torch.ones(2), bytearray(b"ab")), torch.full((2,), 2.0))


def test_a_number_that_is_no_number_of_pythons() -> None:
    """NumPy's float64 is one, its float32 is not."""
    step = graph_step(lambda x, share: x * share, backend="tape")
    with pytest.raises(
        FeedError, match=r"an argument has the type float32.*: pass torch\.as_tensor\(array\), float\(number\) of a "
    ):
        for _ in range(WARMUP + 2):
            step(torch.ones(2), np.float32(0.5))


def test_an_error_of_the_step_itself() -> None:
    """The user's own exception passes through in every phase, and the step can be called again."""

    class Mine(Exception):
        """Raised by the step below."""

    for failing in range(WARMUP + 3):
        rig = build(make_rig)
        model, count = rig.owners["model"], Box(0)

        def fragile(x: Tensor, y: Tensor, rig: Rig = rig, count: Box = count, bad: int = failing) -> Tensor:
            count.item += 1
            if count.item == bad + 1:
                raise Mine("from the step")
            return rig.step(x, y)

        step = graph_step(fragile, owners=rig.owners, backend="tape")
        for index, args in enumerate(rig.calls):
            if index == failing:
                with pytest.raises(Mine, match="from the step"):
                    step(*args)
            else:
                assert torch.isfinite(step(*args))
        assert step.stats.replayed > 0
        assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_cpu_feed_that_is_no_batch() -> None:
    """A step without any tensor has nothing to replay and says so, or runs as eager does."""
    step = graph_step(lambda scale: F.relu(torch.ones(2)) * scale, backend="tape")
    for _ in range(8):
        assert torch.equal(step(2.0), torch.full((2,), 2.0))


NEVER_AGAIN: dict[str, tuple[Callable[[int], Any], str]] = {
    "a string": (
        lambda index: {"x": torch.ones(2), "path": [f"{index}.png", "end"]},
        r"args\[0\]\['path'\]\[0\] is the str '\d+\.png', and was the str '\d+\.png'\).*Do not pass "
        r"Python values that .*In the data loader's collate_fn, make tensors of numbers and tokenize strings",
    ),
    "a long string": (
        lambda index: {"x": torch.ones(2), "path": f"{index}" * 100},
        r"args\[0\]\['path'\] is the str '\d{110,120}\.\.\., and was the str '\d{110,120}\.\.\.\)",
    ),
    "a float": (
        lambda index: {"x": torch.ones(2), "path": index / 8},
        r"args\[0\]\['path'\] is the float 3\.\d+, and was the float [23]\.\d+\)",
    ),
    "a float of NumPy's": (
        lambda index: {"x": torch.ones(2), "path": np.float64(index / 8)},
        r"args\[0\]\['path'\] is the float64 3\.\d+, and was the float64 [23]\.\d+\)",
    ),
    "a size": (
        lambda index: {"x": torch.ones(2 + index)},
        r"args\[0\]\['x'\] is torch\.float32 \[26\] strides \(1,\) on cpu, and was torch\.float32 \[25\] strides",
    ),
    "strides": (
        lambda index: {"x": torch.ones(2, 2 + index)[:, :2]},
        r"and was torch\.float32 \[2, 2\] strides \(25, 1\) on cpu: only the strides differ, so pass "
        r"args\[0\]\['x'\]\.contiguous\(\)\)\. Expected",
    ),
    "strides of one row": (
        lambda index: {"x": torch.ones(1, 2 + index)[:, :2]},
        r"so pass args\[0\]\['x'\]\.clone\(memory_format=torch\.contiguous_format\)\)\. Expected",
    ),
    "strides and a dtype": (
        lambda index: {"x": torch.ones(2, 2 + index, dtype=(torch.float32, torch.float64)[index % 2])[:, :2]},
        r"\[2, 2\] strides \(25, 1\) on cpu\)\. Expected",
    ),
    "how many there are": (
        lambda index: {"x": torch.ones(2), "path": ["a"] * index},
        "so far; there are 25 tensors and values, and there were 24",
    ),
    "a key": (lambda index: {"x": torch.ones(2), f"key {index}": 1}, "so far; the structure is .*, and was "),
}


@pytest.mark.parametrize("name", NEVER_AGAIN)
def test_what_keeps_signatures_from_repeating_is_named(name: str) -> None:
    """The first thing that differs between the last two calls."""
    make, pattern = NEVER_AGAIN[name]
    step = graph_step(lambda batch: batch["x"] * (2 + (str(batch.get("path")) == "")))
    with pytest.raises(NotCapturedError, match=pattern):
        for index in range(40):
            step(make(index))


def test_what_changes_beside_the_signature_is_not_named_in_it() -> None:
    """The same batch, and other layers in training mode each time: nothing of the batch differs."""
    model = nn.Sequential(*(nn.Tanh() for _ in range(6)))
    step = graph_step(model)
    with pytest.raises(NotCapturedError, match=r"\(\d+ signatures so far\)"):
        for index in range(60):
            for number, layer in enumerate(model):
                layer.train(bool(index >> number & 1))
            step(torch.ones(2))
