"""Random numbers that are drawn on the host, and compared with what they always, or never, are."""

from __future__ import annotations

import gc
import importlib
import math
import operator
import random
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from graphplan import HostSyncError, graph_step
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.signature import flatten
from graphplan.observe import host_draws
from graphplan.owners.generators import HostGenerators
from graphplan.owners.snapshot import Snapshot
from graphplan.owners.walk import walk_owners
from graphplan.trace.operands import Operands
from graphplan.trace.operator_schemas import OperatorCall, schema_of
from graphplan.trace.records import Trace
from graphplan.trace.run import trace

BOUNDS = [-math.inf, -1, -1e-50, -0.0, 0, 1e-50, 0.3, 1 - 2**-24, 1 - 2**-30, 1, True, 1.5, math.inf, math.nan]
LEAST_AND_MOST = {torch.float32: (0.0, 1 - 2**-24), torch.float64: (0.0, 1 - 2**-53)}
"""Of what is drawn."""


def _is_certain(name: str, drawn: Tensor, bound: Any) -> bool:
    operands = Operands(None)
    operands.add(drawn)
    operands.note_draw("aten.rand.default", drawn)
    schema = schema_of(getattr(torch.ops.aten, name).Scalar)
    made = getattr(torch, name)(drawn, bound)
    operands.add(made)
    return operands.is_certain(OperatorCall(schema, (drawn, bound), {}), [operands.internal(drawn)], [made])


@given(
    st.sampled_from(["lt", "ge", "gt", "eq"]),
    st.floats() | st.integers(-(2**60), 2**60) | st.sampled_from(BOUNDS),
    st.sampled_from(list(LEAST_AND_MOST)),
    st.floats(0, 1, exclude_max=True),
)
def test_what_is_certain_is_so_for_all_numbers(name: str, bound: Any, dtype: torch.dtype, other: float) -> None:
    """The least, the most and any number that may be drawn."""
    least, most = LEAST_AND_MOST[dtype]
    drawn = torch.tensor([least, most, min(other, most)], dtype=dtype)
    truths = set(getattr(operator, name)(drawn, bound).tolist())
    assert len(truths) == 1 or not _is_certain(name, drawn, bound)


@pytest.mark.parametrize("name", ["lt", "ge"])
def test_bounds_outside_are_certain(name: str) -> None:
    for bound in (-1, -0.5, 0, 0.0, 0.5, 1, 1.0, 2):
        assert _is_certain(name, torch.rand(3), bound) == (bound <= 0 or bound >= 1), bound


class Layers(nn.Module):
    """Leaves out layers by chance."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.dropout = nn.Dropout(0.5)
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            to_drop = False
            if self.training:
                drawn = torch.rand([])
                if drawn < self.share:
                    to_drop = True
            skips = True if self.training and (torch.rand(1)[0] < self.share) else False  # noqa: SIM210
            if not to_drop and not skips:
                x = self.dropout(layer(x)).relu()
        return x


def training(share: float, device: torch.device | str = "cpu", generator: torch.Generator | None = None) -> Any:
    """A step over :class:`Layers`, and its model."""
    torch.manual_seed(0)
    model = Layers(share).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if torch.rand(2, 2, generator=generator, dtype=torch.float64).ge(1.0).any():
            raise AssertionError
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("share", [0.0, -1])
def test_certain_comparisons_are_replayed(share: float) -> None:
    """With eager's numbers, and generators end where eager steps leave them."""
    fast = trained(share)
    assert fast.stats.replayed == 8 and fast.stats.verified > 0
    assert not fast.plan.branches


def test_draws_of_which_the_first_is_followed() -> None:
    """After dropout nothing is known of them: all that are compared at one place are left to replays."""

    def step(x: Tensor, model: nn.Linear) -> Tensor:
        for _ in range(3):
            x = model(x) if torch.rand([]) < 0.05 else functional.dropout(model(x) * 2)
        return x

    model, found = nn.Linear(4, 4), []
    fast = graph_step(step, owners={"model": model}, backend="tape")
    for run in (step, fast):
        torch.manual_seed(0)
        found.append([run(torch.ones(3, 4), model).tolist() for _ in range(24)])
    assert found[0] == found[1]
    assert fast.plan.branches and fast.stats.replayed > 0


def trained(share: float) -> Any:
    """Train eagerly and by replays, and compare. Returns the graphed step."""
    losses, states = [], []
    for replays in (False, True):
        generator = torch.Generator().manual_seed(3)
        step, owners = training(share, generator=generator)
        fast = graph_step(step, owners=owners, backend="tape", verify=3) if replays else step
        torch.manual_seed(1)
        losses.append([fast(torch.randn(5, 4)) for _ in range(14)])
        states.append([torch.get_rng_state(), generator.get_state(), *owners["model"].state_dict().values()])
    assert all(map(torch.equal, *losses))
    assert all(map(torch.equal, *states))
    return fast


@pytest.mark.parametrize("share", [0.02, 1e-9])
def test_chance_is_a_branch(share: float) -> None:
    """One in nine calls is eager, with the numbers that were drawn first."""
    fast = trained(share)
    assert fast.plan.branches
    assert fast.stats.replayed > 0


@pytest.mark.parametrize("share", [0.1, 0.2])
def test_branches_that_are_often_others_are_refused_at_once(share: float) -> None:
    """With 0.1, all of six draws go the most likely way in 53 % of the steps."""
    step, owners = training(share)
    fast = graph_step(step, owners=owners, backend="tape", on_failure="eager")
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="if drawn < self.share:.*The step draws this value at random"):
        _ = [fast(torch.randn(5, 4)) for _ in range(8)]
    assert fast.stats.traced <= 2
    assert fast.stats.captured == 0


UNCERTAIN = {
    "arithmetic": lambda x: torch.rand([]) * 2 < 0,
    "a write": lambda x: torch.rand([]).sub_(1) < 0,
    "another view": lambda x: torch.rand(2).view(torch.int32)[0] < 1,
    "another draw": lambda x: torch.randn([]) < -9,
    "a tensor": lambda x: torch.rand([]) < torch.rand([]),
    "a rounded draw": lambda x: torch.rand([], dtype=torch.bfloat16) < 0,
    "its negative": lambda x: torch._neg_view(torch.rand([])) < 0,
}


@pytest.mark.parametrize("condition", UNCERTAIN.values(), ids=UNCERTAIN)
def test_other_numbers_are_looked_at(condition: Any) -> None:
    """They are drawn ahead, unless they are for once, which is a way of its own."""

    def step(x: Tensor) -> Tensor:
        return x * (2 if condition(x) else 3)

    fast, found = graph_step(step, backend="tape"), []
    for run in (step, fast):
        torch.manual_seed(0)
        found.append([run(torch.ones(2)).tolist() for _ in range(24)])
    assert found[0] == found[1]
    assert not fast.plan.branches and fast.stats.replayed > 0
    assert "read before the step: a draw on the host, first at test_host_draws.py" in fast.report()


DRAWN = r"The step draws this value at random: draw it in the data loader"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (lambda x: torch.rand([]), DRAWN),
        (lambda x: torch.empty([]).uniform_(0, 3), DRAWN),
        (lambda x: (x * 2)[0].uniform_(), "Keep the value on the device"),
    ],
    ids=["a draw", "into memory of its own", "into a part of other memory"],
)
def test_a_number_that_was_drawn_is_refused(number: Any, text: str) -> None:
    fast = graph_step(lambda x: x * complex(number(x)).real, backend="tape")
    with pytest.raises(HostSyncError, match=rf"reads a tensor's value on the host .* {text}"):
        for _ in range(8):
            fast(torch.ones(2))


def draws_of(step: Any) -> Trace:
    """A trace of what the step would do while it computes on a device."""
    feed, record = flatten((torch.ones(2),), {}), Trace()
    trace(step, feed, CallArguments.of(feed).watch(), owners={}, device=torch.device("cuda"), record=record)
    return record


def test_draws_are_repeated_in_order() -> None:
    """Shape, type and generator: the same numbers once more, and the same state."""
    generator = torch.Generator()

    def step(x: Tensor) -> Tensor:
        for size in ([], [3], [2, 17]):
            for dtype in (torch.float32, torch.float64):
                assert not (torch.rand(size, dtype=dtype).view(-1) < 0).any()
        assert torch.rand(5, generator=generator).lt(1).all()
        torch.rand(7)
        return x * 2

    program = draws_of(step).host_program
    assert program is not None
    for gen in (generator, torch.default_generator):
        gen.manual_seed(4)
    step(torch.ones(2))
    expected = generator.get_state(), torch.get_rng_state()
    for gen in (generator, torch.default_generator):
        gen.manual_seed(4)
    program.run({})
    assert torch.equal(expected[0], generator.get_state())
    assert torch.equal(expected[1], torch.get_rng_state())


def test_numpys_generator_is_left_alone_while_another_thread_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(HostGenerators().states) == 2
    monkeypatch.setitem(sys.modules, "numpy.random", ModuleType("numpy.random"))
    assert len(HostGenerators().states) == 1
    Snapshot(walk_owners({})).restore()


def test_a_function_with_more_references_is_looked_for_in_all_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code may have imported it by its name. One that only its own module has is not looked for, nor one again that was
    found: that takes long.
    """
    searches: list[int] = []

    class _Modules(dict[str, ModuleType]):
        def values(self) -> Any:
            searches.append(len(self))
            return super().values()

    def found() -> list[ModuleType]:
        return [holder for holder, name, _ in host_draws._find_functions() if name == "vonmisesvariate"]

    modules = _Modules(sys.modules)
    monkeypatch.setattr(host_draws, "sys", SimpleNamespace(modules=modules))
    monkeypatch.setattr(host_draws, "_OF_PYTHON", ("vonmisesvariate",))
    monkeypatch.setattr(host_draws, "_OF_NUMPY", ())
    found()
    searches.clear()
    assert found() == [random]
    assert not searches
    for name in ("imports_by_name", "imports_it_instead"):
        module = modules[name] = ModuleType(name)
        module.vonmisesvariate = random.vonmisesvariate  # type: ignore[attr-defined]
        for _ in range(2):
            assert found() == [random, module]
        assert searches == [len(modules)]
        searches.clear()
        del module.vonmisesvariate
        assert found() == [random]
    # Something else than a module has it: all are gone through, once.
    held = [random.vonmisesvariate]
    assert found() == found() == [random]
    assert searches == [len(modules)]
    # A module that is imported then is found.
    module = modules["imports_it_later"] = ModuleType("imports_it_later")
    module.vonmisesvariate = held[0]  # type: ignore[attr-defined]
    assert found() == found() == [random, module]
    assert searches == [len(modules) - 1, len(modules)]


def test_modules_that_draw_are_not_kept_alive() -> None:
    """What code imported by its name is known as long as it is there."""
    module = ModuleType("goes_away")
    module.uniform = random.uniform  # type: ignore[attr-defined]
    sys.modules["goes_away"] = module
    holders = [holder for holder, name, _ in host_draws._find_functions() if name == "uniform"]
    assert module in holders
    del sys.modules["goes_away"], holders[:]
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    assert all(name != "goes_away" for name in (h.__name__ for h, _, _ in host_draws._find_functions()))


def test_a_module_that_was_imported_anew_draws_from_a_generator_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is not the one whose state is put back."""
    monkeypatch.delitem(sys.modules, "random")
    fresh = importlib.import_module("random")
    assert fresh is not random
    for held in ([], [random.uniform]):
        holders = [holder for holder, name, _ in host_draws._find_functions() if name == "uniform"]
        assert random in holders, held
        assert fresh not in holders
