"""`graphed`: on functions, methods and modules; gradients, weights, owners, structures, threads."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from time import sleep
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphplan import (
    BusyError,
    ClosedError,
    CopyError,
    FeedError,
    Graphed,
    HostSyncError,
    NotCapturedError,
    OptionError,
    PolicyError,
    Pool,
    SkipReason,
    UncoveredRoleError,
    graphed,
)
from graphplan.program import shared_buffers
from tests.facts import assert_same, flatten
from tests.inference.helpers import Layer, assert_replays
from tests.twins import by_chance


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def inputs(*sizes: int, width: int = 8) -> list[tuple[Tensor]]:
    return [(torch.randn(size, width),) for size in sizes]


@pytest.mark.twice
def test_a_function_with_arguments_and_without() -> None:
    layer = Layer()

    @graphed
    def bare(x: Tensor) -> Tensor:
        """Doc."""
        return layer(x)

    @graphed(backend="tape", verify="off")
    def tuned(x: Tensor) -> Tensor:
        return layer(x)

    for (x,) in inputs(*[4] * 7):
        assert torch.equal(bare(x), layer(x))
        assert torch.equal(tuned(x), layer(x))
    assert [bare.stats.replayed, tuned.stats.replayed] == [3, 3]
    assert (bare.__name__, bare.__doc__) == ("bare", "Doc.")
    assert bare.plan.name.endswith("bare")


@pytest.mark.twice
def test_a_module_and_its_hooks() -> None:
    layer = Layer()
    layer.register_forward_hook(lambda module, args, out: out + 1)
    fast = assert_replays(layer, inputs(*[4] * 8))
    assert fast.stats.replayed == 4
    assert fast.__wrapped__ is layer


class Decorated(Layer):
    """A layer whose forward is graphed on the class."""

    @graphed(backend="tape")
    def forward(self, x: Tensor, mask: Tensor | None = None, *, causal: bool = True) -> Tensor:
        return super().forward(x, mask, causal=causal)


@pytest.mark.twice
def test_two_layers_of_a_class_share_no_program() -> None:
    layers = [Decorated(), Decorated()]
    for (x,) in inputs(*[4] * 8):
        for layer in layers:
            assert torch.equal(layer(x), Layer.forward(layer, x))
    steps = [layer.forward for layer in layers]
    assert steps[0] is not steps[1] and steps[0].pool is steps[1].pool
    assert [(step.stats.captured, step.stats.replayed) for step in steps] == [(1, 4), (1, 4)]
    assert layers[0].forward is steps[0]
    assert isinstance(Decorated.forward, Graphed)


def test_a_decorated_layer_goes_the_short_way() -> None:
    """What stands in the place of the class's forward is no function, and is told apart all the same."""
    layer = Decorated()
    x = torch.randn(4, 8)
    found = []
    for _ in range(12):
        layer(x)
        found.append(layer.forward.machine.fast_path.find((x,)))
    assert any(call is not None for call in found)


def test_copies_of_an_instance_start_afresh() -> None:
    layer = Decorated()
    for (x,) in inputs(*[4] * 6):
        layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.forward is not layer.forward
        assert other.forward.stats.calls == 0
        assert torch.equal(other(x), layer(x))
    with pytest.raises(CopyError, match="cannot be copied or pickled"):
        copy.copy(layer.forward)


def test_an_instance_without_a_dictionary() -> None:
    class Slotted:
        __slots__ = ()

        @graphed
        def run(self, x: Tensor) -> Tensor:
            return x + 1

    with pytest.raises(OptionError, match="run is graphed on a Slotted, which has no __dict__"):
        Slotted().run(torch.ones(2))


class Scorer:
    """Class methods over graphed functions."""

    weight = torch.full((8,), 2.0)

    @classmethod
    @graphed(backend="tape")
    def score(cls, x: Tensor) -> Tensor:
        """Weighted by what the class has."""
        return x * cls.weight


class Shifted(Scorer):
    """A class method over its base's, and an attribute of its own."""

    weight = torch.full((8,), 3.0)

    @classmethod
    @graphed(backend="tape")
    def score(cls, x: Tensor) -> Tensor:
        """Weighted and shifted."""
        return super().score(x) + 1


def test_a_class_method_has_programs_for_each_class() -> None:
    """Those that inherit it and those that call their bases' among them."""

    class Inheriting(Scorer):
        weight = torch.full((8,), 5.0)

    for number, (x,) in enumerate(inputs(*[4] * 12)):
        for kind, weight, shift in ((Scorer, 2.0, 0.0), (Shifted, 3.0, 1.0), (Inheriting, 5.0, 0.0)):
            assert torch.equal((kind if number % 2 else kind()).score(x), x * weight + shift)
    steps = [Scorer.score, Shifted.score, Inheriting.score]
    # From Python 3.13 on a class method calls what is under it with the class, which is part of the key then.
    if sys.version_info < (3, 13):
        assert all(step.stats.replayed >= 7 for step in steps)
        assert super(Shifted, Shifted).score.stats.replayed == 0, "it was part of the other"
    assert all(step.stats.replayed for step in steps)


def test_literals_and_missing_arguments_are_part_of_the_key() -> None:
    layer = Layer()
    fast = graphed(layer, backend="tape")
    x, mask = torch.randn(4, 8), torch.ones(4, 8)
    for _ in range(6):
        for kwargs in ({}, {"causal": False}, {"mask": mask}):
            assert torch.equal(fast(x, **kwargs), layer(x, **kwargs))
    assert fast.num_graphs == 3


@pytest.mark.twice
def test_gradients_flow_through_an_eager_call() -> None:
    """Where gradients are wanted, be it for an input or a parameter, the call is eager, and says so."""
    layer = Layer()
    fast = graphed(layer, backend="tape")
    with torch.enable_grad():
        for _ in range(6):
            fast(torch.randn(4, 8)).sum().backward()
        x = torch.randn(4, 8, requires_grad=True)
        fast(x * 2).sum().backward()
    assert layer.scale.grad is not None and x.grad is not None
    assert fast.stats.captured == 0
    assert fast.stats.skipped[SkipReason.GRADIENT] == 7
    layer.requires_grad_(False)
    with torch.enable_grad():
        for (x,) in inputs(*[4] * 6):
            assert torch.equal(fast(x), layer(x))
    assert fast.stats.replayed == 2


@pytest.mark.twice
def test_modes_are_part_of_the_key() -> None:
    layer = Layer()
    fast = graphed(layer, backend="tape")
    x = torch.randn(4, 8)
    for _ in range(6):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(fast(x), layer(x))
    assert fast.num_graphs == 2
    assert fast.stats.replayed == 4


def test_weights_that_are_trained_meanwhile_are_seen() -> None:
    """Steps of an optimizer and loaded states are seen by the same program, gradients or none."""
    layer = Layer()
    fast = graphed(layer, backend="tape", verify="off")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(4, 8)
    for index in range(12):
        if index > 5:
            with torch.enable_grad():
                layer(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=index % 2 == 0)
        if index == 9:
            layer.load_state_dict(Layer().state_dict())
        assert torch.equal(fast(x), layer(x))
    assert (fast.stats.captured, fast.stats.replayed) == (1, 8)


def test_replaced_weights_lead_to_another_capture() -> None:
    layer = Layer()
    fast = graphed(layer, backend="tape", verify="off")
    x = torch.randn(4, 8)
    for index in range(14):
        if index == 6:
            layer.linear = nn.Linear(8, 8)
        assert torch.equal(fast(x), layer(x))
    assert (fast.stats.captured, fast.stats.replayed) == (2, 6)


def test_two_sets_of_weights_through_one_program() -> None:
    layer = Layer()
    fast = graphed(layer, backend="tape", copy_roles=("input", "param"), verify="off")
    sets = {name: Layer() for name in "ab"}
    for (x,) in inputs(*[4] * 3):
        for other in sets.values():
            assert torch.equal(fast.replay((x,), params=other.state_dict()), other(x))
        assert torch.equal(fast.replay((x,)), layer(x))
        assert torch.equal(fast(x), layer(x))
    assert fast.stats.captured == 1
    with pytest.raises(FeedError, match=r"scale is missing"):
        fast.replay((x,), params={"linear.weight": torch.ones(8, 8), "linear.bias": torch.ones(8)})
    with pytest.raises(FeedError, match=r"param values are given .* but the policy does not copy that role"):
        graphed(layer, backend="tape").replay((x,), params=layer.state_dict())


def test_replay_without_a_program() -> None:
    fast = graphed(lambda x: x * complex(by_chance(x).sum()).real, backend="tape", on_failure="eager")
    with pytest.warns(UserWarning, match="item"), pytest.raises(NotCapturedError, match=r"has no program .*item"):
        fast.replay((torch.ones(3),))
    with pytest.raises(OptionError, match=r"replay\(\) needs shapes='exact'"):
        graphed(Layer(), shapes="bucket", buckets=[4]).replay((torch.ones(3, 8),))


@pytest.mark.twice
def test_an_input_that_the_function_changes_is_written_back() -> None:
    def fill(x: Tensor, cache: Tensor, index: int) -> Tensor:
        cache[index] = x.sum(0)
        return cache.sum() + x

    fast = graphed(fill, backend="tape")
    twins = [torch.zeros(3, 8), torch.zeros(3, 8)]
    for index in range(21):
        x = torch.randn(4, 8)
        assert torch.equal(fast(x, twins[0], index % 3), fill(x, twins[1], index % 3))
        assert torch.equal(*twins)
    # At the third index it was tried whether the function can do with another number each time.
    assert fast.stats.replayed == 7


@dataclass
class Scores:
    """A result with a name for each part."""

    logits: Tensor
    best: tuple[Tensor, str]


class Pair(NamedTuple):
    """Two results."""

    first: Tensor
    second: Any


class Registered:
    """A container that torch is told how to open."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Registered)


pytree.register_pytree_node(Registered, lambda r: (r.items, None), lambda items, _: Registered(list(items)))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: (x, [x + 1, {"k": x.sum()}]),
        lambda x: {"a": x, "b": None, "c": 3},
        lambda x: OrderedDict(a=x, b=x + 1),
        lambda x: Pair(x, Pair(x + 1, "text")),
        lambda x: Scores(x, (x.amax(1), "label")),
        lambda x: {"inner": [Scores(x + 1, (x, "a"))]},
        lambda x: Registered([x, x * 2]),
    ],
    ids=["tuple", "dict", "ordered", "named", "dataclass", "nested", "registered"],
)
@pytest.mark.twice
def test_results_of_any_structure_at_their_true_size(wrap: Any) -> None:
    def fn(x: Tensor) -> Any:
        return wrap(x * 2)

    fast = graphed(fn, backend="tape")
    for size in (5, 3) * 7:
        x = torch.randn(size, 4)
        expected, found = fn(x), fast(x)
        assert type(found) is type(expected)
        assert_same(flatten(r=_open(expected)), flatten(r=_open(found)))
    assert fast.stats.replayed == 6


def _open(value: Any) -> Any:
    return value.items if isinstance(value, Registered) else value


@pytest.mark.twice
def test_state_needs_a_role() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.sum()
            return x + self.seen

    with pytest.raises(UncoveredRoleError, match=r"leaves model\.seen: state"):
        for (x,) in inputs(*[4] * 6):
            graphed_counting(Counting(), x)
    fast = graphed(Counting(), backend="tape", static_roles=("input", "param", "state"))
    twin = Counting()
    for (x,) in inputs(*[4] * 8):
        assert torch.equal(fast(x), twin(x))
    assert fast.stats.replayed == 4


@pytest.mark.twice
def test_a_model_in_training_mode() -> None:
    """Regression: the refusal spoke of roles, and not of the mode that the model is in."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    text = (
        r"model\.1 \(BatchNorm1d\) is in training mode, in which each call changes model\.1\.num_batches_tracked: "
        r"state i64\[\], .*, and the inference policy has no storage for state; expected modules in evaluation mode: "
        r"call \.eval\(\) on the model first\. If calls are to change that state, add state to static_roles"
    )
    with torch.no_grad():
        with pytest.raises(UncoveredRoleError, match=text):
            graphed_counting(model, torch.randn(3, 8))
        fast = graphed(model.eval(), backend="tape")
        for (x,) in inputs(*[4] * 8):
            assert torch.equal(fast(x), model(x))
    assert fast.stats.replayed == 4


def graphed_counting(module: nn.Module, x: Tensor) -> None:
    fast = graphed(module, backend="tape")
    for _ in range(6):
        fast(x)


def test_owners_by_name_and_found() -> None:
    table, layer = {"bias": torch.randn(8)}, Layer()

    @graphed(backend="tape", owners={"table": table}, verify="off")
    def fn(x: Tensor) -> Tensor:
        return layer(x) + table["bias"]

    for index, (x,) in enumerate(inputs(*[4] * 10)):
        if index == 7:
            table["bias"] = torch.randn(8)
        assert torch.equal(fn(x), layer(x) + table["bias"])
    assert fn.stats.replayed > 4
    assert {"table", "layer"} <= set(fn.machine.managed.owners)


def test_a_method_of_a_plain_object() -> None:
    class Model:
        def __init__(self) -> None:
            self.weight = torch.randn(8, 8)

        def run(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model = Model()
    for owners in (None, [model], {"mine": model}, {"other": Layer()}):
        fast = assert_replays(model.run, inputs(*[4] * 7), owners=owners)
        assert fast.stats.replayed >= 2


def test_one_allocation_serves_all_shapes_and_grows_by_leaps() -> None:
    """Lengths that creep up by one have a logarithmic number of allocations, and no program is captured again."""
    fast = graphed(lambda x: x.cumsum(0) * 2, backend="tape", verify="off")
    for size in range(1, 33):
        for (x,) in inputs(*[size] * 5):
            assert torch.equal(fast(x), x.cumsum(0) * 2)
    assert (fast.stats.captured, fast.stats.recaptured) == (32, 0)
    allocations = {program.inputs.by_leaf[0].untyped_storage().data_ptr() for program in fast.programs}
    assert 1 < len(allocations) <= 8
    assert fast.memory.input <= 4 * 33 * 8 * 4 + 64


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(8, 4).t(),
        lambda: torch.randn(1, 8).expand(4, 8),
        lambda: torch.randn(20).as_strided((4, 8), (2, 1)),
        lambda: torch.randn(4, 16)[:, ::2],
        lambda: torch.randn(0, 8),
        lambda: torch.randn(4, 2, 2, 2).contiguous(memory_format=torch.channels_last).flatten(1),
        lambda: torch.randn(6, 8)[1:5],
    ],
    ids=["transposed", "expanded", "overlapping", "strided", "empty", "channels last", "offset"],
)
@pytest.mark.twice
def test_inputs_of_any_geometry(make: Any) -> None:
    fast = assert_replays(lambda x: (x * 2 + 1).sum(0), [(make(),) for _ in range(7)])
    assert fast.stats.replayed == 3


@pytest.mark.twice
def test_memory_format_is_kept() -> None:
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    images = [(torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),) for _ in range(7)]
    fast = assert_replays(convolution, images)
    assert fast.stats.replayed == 3
    assert fast(*images[0]).stride() == convolution(*images[0]).stride()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.eye(4).to_sparse(), r"args\[0\] has layout torch.sparse_coo; expected a dense"),
        (lambda: torch.eye(4).to_sparse_csr(), r"args\[0\] has layout torch.sparse_csr; expected a dense"),
        (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]), r"args\[0\] is a nested tensor"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged),
            r"args\[0\] has layout torch.jagged; expected a dense|args\[0\] is a nested tensor",
        ),
    ],
    ids=["coo", "csr", "nested", "jagged"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_sparse_and_nested_tensors_are_refused_by_name(make: Any, text: str) -> None:
    with pytest.raises(FeedError, match=text):
        graphed(lambda x: x * 2, backend="tape")(make())
    fast = graphed(lambda x: x * 2, backend="tape", on_failure="eager")
    with pytest.warns(UserWarning, match=text):
        fast(make())
    assert fast.stats.skipped[SkipReason.FEED] == 1


def test_a_refusal_raises_or_warns() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * complex(by_chance(x).sum()).real

    with pytest.raises(HostSyncError, match=r"item"):
        assert_replays(fn, inputs(*[4] * 6))
    with pytest.warns(UserWarning, match="runs this step eagerly.*item"):
        fast = assert_replays(fn, inputs(*[4] * 6), on_failure="eager")
    assert fast.stats.captured == 0


@pytest.mark.twice
def test_capture_after_counts_calls_of_a_shape() -> None:
    fast = graphed(Layer(), backend="tape", capture_after=3)
    for (x,) in inputs(4, 5, 4, 5, 4, 5):
        fast(x)
    assert fast.stats.eager == 6
    for (x,) in inputs(*[4] * 4):
        fast(x)
    assert (fast.stats.traced, fast.stats.captured, fast.stats.replayed) == (2, 1, 1)


def call_all(fast: Graphed, calls: list[tuple[Tensor]]) -> None:
    for (x,) in calls:
        assert torch.equal(fast(x), fast.__wrapped__(x))


def test_eviction_by_count_is_least_recently_used_first() -> None:
    fast = graphed(Layer(), backend="tape", max_graphs=2)
    call_all(fast, inputs(*[5] * 4, *[4] * 4, *[5] * 4, *[3] * 4))
    assert fast.stats.events["evicted: more programs than max_graphs"] == 1
    kept = sorted(program.plan.inputs[0].spec.shape[0] for program in fast.programs)
    assert kept == [3, 5], "4 was used least recently"
    call_all(fast, inputs(*[4] * 4))
    assert fast.num_graphs == 2


def test_eviction_by_bytes_frees_them() -> None:
    def fn(x: Tensor) -> Tensor:
        return (x * 2 + 1).sum(1)

    probe = graphed(fn, backend="tape")
    for (x,) in inputs(*[64] * 4):
        probe(x)
    budget = 2 * probe.memory.pool + 100
    fast = graphed(fn, backend="tape", memory_budget=budget)
    call_all(fast, inputs(*[64] * 5, *[63] * 5, *[62] * 5))
    assert fast.num_graphs == 2
    assert 0 < fast.memory.pool <= budget
    assert fast.stats.events["evicted: more bytes than memory_budget"] == 1


@pytest.mark.twice
def test_a_graphed_function_within_another_is_part_of_it() -> None:
    inner, layer = Decorated(), Layer()

    @graphed(backend="tape")
    def outer(x: Tensor) -> Tensor:
        return layer(inner(x)) * 2

    for (x,) in inputs(*[4] * 7):
        assert torch.equal(outer(x), layer(Layer.forward(inner, x)) * 2)
    assert outer.stats.replayed == 3
    assert inner.forward.stats.calls == 0


def test_a_function_is_closed_after_a_call_and_not_within_one() -> None:
    """Another thread waits for its turn, as calls do."""
    began, errors, ended = Event(), list[BusyError](), list[bool]()

    def double(x: Tensor) -> Tensor:
        began.set()
        sleep(0.2)
        try:
            fast.close()
        except BusyError as error:
            errors.append(error)
        ended.append(True)
        return 2 * x

    fast = graphed(double, backend="tape")
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(fast, torch.ones(3))
        began.wait()
        fast.invalidate("as a test")
        assert ended
        assert torch.equal(call.result(), 2 * torch.ones(3))
    assert "closed or invalidated from within a call of the same pool" in str(errors[0])
    fast.close()
    with pytest.raises(ClosedError):
        fast(torch.ones(3))


def test_threads_take_turns() -> None:
    """Eight threads, two functions of one pool, random shapes: each result is eager's."""
    pool = Pool()
    layers = [Layer(), Layer()]
    steps = [graphed(layer, backend="tape", pool=pool, verify="off") for layer in layers]

    def serve(seed: int) -> int:
        generator = torch.Generator().manual_seed(seed)
        right = 0
        with torch.inference_mode():
            for index in range(30):
                size = int(torch.randint(1, 5, (), generator=generator))
                x = torch.randn(size, 8, generator=generator)
                right += torch.equal(steps[index % 2](x), layers[index % 2](x))
        return right

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(serve, range(8))) == [30] * 8
    assert all(step.num_graphs == 4 for step in steps)
    assert sum(step.stats.calls for step in steps) == 240


def test_after_closing() -> None:
    fast = assert_replays(Layer(), inputs(*[4] * 6))
    fast.invalidate("because")
    assert fast.num_graphs == 0
    fast.close()
    with pytest.raises(ClosedError, match="this step was closed"):
        fast(torch.ones(4, 8))


@pytest.mark.twice
def test_the_report_lists_the_cache() -> None:
    fast = assert_replays(Layer(), inputs(*[4] * 6, *[2] * 6))
    text = fast.report()
    assert "program: args[0] f32[4, 8]: 2 replays, 3 operators" in text
    assert "the pool of 2 programs" in text
    assert fast.memory.param == 4 * (64 + 8 + 8)
    assert fast.memory.state == fast.memory.output == 0


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"shapes": "all"}, OptionError, "shapes is 'all'; expected one of: exact, bucket"),
        ({"outputs": "copy"}, OptionError, "outputs is 'copy'; expected 'clone' or 'static'"),
        ({"capture_after": 0}, OptionError, "capture_after is 0; expected an int >= 1"),
        ({"max_graphs": 0}, OptionError, "max_graphs is 0"),
        ({"memory_budget": -1}, OptionError, "memory_budget is -1; expected bytes"),
        ({"pool": 3}, OptionError, "pool is 3; expected a Pool"),
        ({"copy_roles": ("state",)}, PolicyError, "copy_roles has state, which static_roles lacks"),
        ({"dynamic": 0}, OptionError, "dynamic is 0; expected dimensions by the name"),
        ({"dynamic": {"x": "0"}}, OptionError, r"dynamic\['x'\] is '0'; expected a dimension"),
        ({"dynamic": {"x": -1}}, OptionError, r"dynamic\['x'\] is -1; expected a dimension"),
        ({"mask": "mask"}, OptionError, "mask is given with shapes='exact'"),
        ({"buckets": [1]}, OptionError, "buckets is given with shapes='exact'"),
    ],
)
def test_options_that_make_no_sense(options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        graphed(Layer(), **options)


def test_what_cannot_be_called() -> None:
    with pytest.raises(OptionError, match="graphed was given a int; expected a function, a method or a module"):
        graphed(3)  # type: ignore[arg-type]


def test_backend_eager_is_the_function_and_nothing_else() -> None:
    fast = assert_replays(Layer(), inputs(*[4] * 6), backend="eager")
    assert fast.stats.skipped == {SkipReason.BACKEND_EAGER: 6}


@pytest.mark.twice
def test_a_container_without_keys_is_fed() -> None:
    """Leaves of a type that tells torch no keys go by their numbers."""
    fast = graphed(lambda box, k: box.items[0] * k, backend="tape")
    for (x,) in inputs(*[4] * 6):
        assert torch.equal(fast(Registered([x, 1]), k=2), x * 2)
    assert fast.stats.replayed == 2
    with pytest.raises(FeedError, match=r"args\[0\]\[0\] has layout"):
        graphed(fast.__wrapped__, backend="tape")(Registered([torch.eye(3).to_sparse(), 1]), k=2)


@pytest.mark.parametrize("verify", ["geometric", "off"])
@pytest.mark.parametrize("shape", [(1, 4, 8), (1, 7, 8), (3, 4, 8)])
@pytest.mark.twice
def test_attention_of_a_tensor_to_itself(shape: tuple[int, ...], verify: str) -> None:
    """Torch's fused kernel asks whether query, key and value are one tensor, and computes otherwise if they are."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with torch.inference_mode():
        fast = assert_replays(
            lambda h: attention(h, h, h, need_weights=False)[0],
            [(torch.randn(shape),) for _ in range(8)],
            owners={"attention": attention},
            verify=verify,
        )
    assert fast.stats.replayed == 4


@pytest.mark.twice
def test_a_module_that_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        layer = Layer()
        fast = assert_replays(layer, inputs(*[4] * 6))
    assert fast.stats.replayed == 2


class Derived(Decorated):
    """A graphed method over a graphed one of its base."""

    @graphed(backend="tape")
    def forward(self, x: Tensor, mask: Tensor | None = None, *, causal: bool = True) -> Tensor:
        return super().forward(x, mask, causal=causal) * 2


def test_a_method_that_calls_its_bases() -> None:
    layer = Derived()
    for (x,) in inputs(*[4] * 7):
        assert torch.equal(layer(x), Layer.forward(layer, x) * 2)
    assert layer.forward.stats.replayed >= 2
    assert super(Derived, layer).forward is not layer.forward


def test_what_is_no_function_is_not_bound() -> None:
    class Holder:
        layer = graphed(Layer(), backend="tape")
        method = graphed(Layer().forward, backend="tape")

    assert Holder().layer is Holder.layer and Holder().method is Holder.method


@pytest.mark.parametrize("options", [{}, {"shapes": "bucket", "buckets": [4]}])
def test_what_no_program_takes_is_refused_whatever_the_shapes(options: Any) -> None:
    bads = [(torch.eye(3).to_sparse(), r"args\[0\] has layout"), (object(), "an argument has the type object")]
    # An object has no dimension to be padded: such calls are eager.
    for bad, text in bads[: 1 if "buckets" in options else 2]:
        # Whether the function reads an object, only a trace shows.
        calls = 5
        fast = graphed(lambda x: (repr(x), x)[1], backend="tape", **options)
        with pytest.raises(FeedError, match=text):
            all(fast(bad) is bad for _ in range(calls))
        fast = graphed(lambda x: (repr(x), x)[1], backend="tape", on_failure="eager", **options)
        with pytest.warns(UserWarning, match=text):
            assert all(fast(bad) is bad for _ in range(calls))


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_compiled_modules() -> None:
    """Compiled before the first call, called as they are written after closing."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval()
    twin = copy.deepcopy(model)
    fast = graphed(model, backend="tape", compile={"backend": "aot_eager"})
    for (x,) in inputs(*[4] * 7):
        assert torch.equal(fast(x), twin(x))
    assert fast.stats.replayed >= 2
    assert "compiled: Sequential" in fast.report()
    fast.close()
    assert model._compiled_call_impl is None
    with pytest.raises(OptionError, match="compile= is given without a module to compile"):
        graphed(lambda x: x, compile=True)


@pytest.mark.parametrize("options", [{}, {"outputs": "static"}, {"shapes": "bucket", "buckets": [4, 8]}])
@pytest.mark.twice
def test_nothing_is_kept_alive(options: Any) -> None:
    """Neither batches nor results are; nor is a model, its programs and their memory, once nobody has it any more."""
    # Those of other tests' functions, which a module may hold.
    before = set(shared_buffers._SHARED)
    layer = Layer()
    fast = graphed(layer, backend="tape", **options)
    fed = []
    for (x,) in inputs(*[4] * 9, *[3] * 9):
        fed += [weakref.ref(x), weakref.ref(fast(x))]
    del x
    gc.collect()
    assert [ref() for ref in fed] == [None] * len(fed)
    held = [weakref.ref(layer), weakref.ref(fast), *map(weakref.ref, fast.programs)]
    del layer, fast
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    assert set(shared_buffers._SHARED) <= before


def test_an_instance_and_its_graphed_method_go_together() -> None:
    layer = Decorated()
    for (x,) in inputs(*[4] * 6):
        layer(x)
    held = [weakref.ref(layer), *map(weakref.ref, layer.forward.programs)]
    del layer
    gc.collect()
    assert [ref() for ref in held] == [None] * 2
