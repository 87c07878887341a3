"""What counts as a difference between a replay and the eager step, and what is a kernel's own spread."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphplan import graph_step
from graphplan.verify.compare import Run, describe, differing, differing_values, unexplained
from tests.failure_modes.naive import changing_rig, loss_of, stay
from tests.models import Box, descent
from tests.twins import BEFORE_REPLAY, build, drive, managed

NAN, INF = math.nan, math.inf
Tensors = dict[str, Tensor]


def beyond_spread(paths: list[str], old: Tensors, one: Tensors, again: list[Tensors], eager: Tensors) -> list[str]:
    runs = [Run.of(one, left) for left in again]
    noisy = any(run.differs for run in runs)
    found = unexplained(paths, one, runs, Run.of(one, eager), noisy=noisy)
    return [f"{path}: {text}" for path, text in describe(found, old, one, eager).items()]


def test_no_number_is_explained_by_no_number() -> None:
    """Rounded parameters that give NaN somewhere say nothing of a NaN that the eager step gives elsewhere."""
    one, *others = ({"a": torch.tensor(values)} for values in ([1.0, 1.0], [1.0, 1.0], [1.0, NAN], [NAN, 1.0]))
    again, eager, nudged = (Run.of(one, left) for left in others)
    assert (again.differs, eager.differs, nudged.differs) == (False, True, True)
    assert unexplained(["a"], one, [again], eager, nudged, noisy=True) == {"a": 0.0}


SAME: dict[str, Callable[[], Tensor]] = {
    "floats": lambda: torch.tensor([1.0, -0.0, INF, -INF, NAN]),
    "bfloat16": lambda: torch.tensor([1.0, NAN, -0.0], dtype=torch.bfloat16),
    "float8": lambda: torch.tensor([1.0, NAN, -0.0]).to(torch.float8_e4m3fn),
    "doubles": lambda: torch.tensor([1.0, NAN], dtype=torch.float64),
    "booleans": lambda: torch.tensor([True, False]),
    "integers": lambda: torch.tensor([1, -(2**62)]),
    "small integers": lambda: torch.tensor([1, 255], dtype=torch.uint8),
    "unsigned integers": lambda: torch.tensor([1, 65535], dtype=torch.uint16),
    "complex numbers": lambda: torch.tensor([1 + 2j, complex(NAN, -0.0)]),
    "conjugates": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negated parts": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "a number": lambda: torch.tensor(1.0),
    "nothing": lambda: torch.zeros(0, 3),
    "strided": lambda: torch.arange(12.0).view(3, 4).T,
    "asking for gradients": lambda: torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("kind", SAME)
def test_the_same_bits(kind: str) -> None:
    """NaN equals NaN; views that are only marked as conjugated or negated equal their values."""
    assert differing({"a": SAME[kind]()}, {"a": SAME[kind]()}) == []
    resolved = SAME[kind]().resolve_conj().resolve_neg()
    assert differing({"a": resolved}, {"a": SAME[kind]()}) == []


OTHER: dict[str, tuple[Tensor, Tensor]] = {
    "the sign of zero": (torch.tensor(0.0), torch.tensor(-0.0)),
    "the last bit": (torch.tensor(1.0), torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))),
    "the last bit of bfloat16": (torch.tensor(1.0).bfloat16(), torch.tensor(1.0078125).bfloat16()),
    "NaN and a number": (torch.tensor([1.0, NAN]), torch.tensor([1.0, 2.0])),
    "booleans": (torch.tensor([True, False]), torch.tensor([True, True])),
    "large integers": (torch.tensor(2**62), torch.tensor(2**62 + 1)),
    "an imaginary part": (torch.tensor(1 + 0j), torch.tensor(complex(1, -0.0))),
    "a conjugate": (torch.tensor(1 + 2j), torch.tensor(1 + 2j).conj()),
}


@pytest.mark.parametrize("kind", OTHER)
def test_other_bits(kind: str) -> None:
    """Whatever a user could tell apart is told apart, and described; two equal replays leave no room for it."""
    one, eager = OTHER[kind]
    assert differing({"a": one}, {"a": eager}) == ["a"]
    (found,) = beyond_spread(["a"], {"a": one}, {"a": one}, [{"a": one.clone()}], {"a": eager})
    assert found.startswith("a: ") and found.endswith("two replays differ by 0")


def test_order_and_lacking_tensors() -> None:
    """Differences come in the eager step's order; a tensor that only one of the two left is one, as is another kind."""
    one = {"a": torch.ones(2), "old": torch.ones(1), "shape": torch.ones(2), "dtype": torch.ones(2)}
    eager = {"dtype": torch.ones(2).double(), "new": torch.ones(1), "shape": torch.ones(1, 2), "a": torch.ones(2)}
    paths = differing(one, eager)
    assert paths == ["dtype", "new", "shape", "old"]
    found = beyond_spread(paths, one, one, [one], eager)
    assert found == [
        "dtype: f32[2] after the replay, f64[2] after the eager step",
        "new: a tensor after one of the two and none after the other",
        "shape: f32[2] after the replay, f32[1, 2] after the eager step",
        "old: a tensor after one of the two and none after the other",
    ]


def test_figures() -> None:
    """How many elements, how far, how long both updates were; a single number is given as it is."""
    before, one, eager = torch.zeros(4), torch.tensor([3.0, 4, 0, 0]), torch.tensor([3.0, 0, 0, 0])
    (found,) = beyond_spread(["a"], {"a": before}, {"a": one}, [{"a": one}], {"a": eager})
    assert found == (
        "a: 1 of 4 elements differ, by 4 (Euclidean); the replay's update is 5 long, the eager step's 3; "
        "two replays differ by 0"
    )
    one, eager = torch.tensor(0.5), torch.tensor(2.0)
    (found,) = beyond_spread(["a"], {}, {"a": one}, [{"a": one}], {"a": eager})
    assert found == "a: 0.5 by the replay, 2.0 by the eager step; two replays differ by 0"


ONE = torch.full((100,), 1.0)
SPREADS: dict[str, tuple[Tensor, Tensor, Tensor, bool]] = {
    "as far as the replays": (ONE, ONE + 1e-4, ONE - 1e-4, False),
    "far beyond": (ONE, ONE + 1e-4, ONE + 1e-2, True),
    "NaN in the eager step alone": (ONE, ONE + 1e-4, torch.full((100,), NAN), True),
    "NaN in the replay alone": (torch.full((100,), NAN), torch.full((100,), NAN), ONE, True),
    "NaN in all": (torch.full((100,), NAN), torch.full((100,), NAN), torch.full((100,), NAN), False),
    "infinite in one": (torch.full((100,), INF), torch.full((100,), INF), ONE, True),
    "complex": (ONE + 0j, ONE + 1e-4j, ONE - 1e-4j, False),
    "complex, far beyond": (ONE + 0j, ONE + 1e-4j, (ONE + 1e-2j).conj(), True),
    "bfloat16": (ONE.bfloat16(), ONE.bfloat16() * 1.01, ONE.bfloat16() * 0.99, False),
    "integers": (torch.tensor([5, 5]), torch.tensor([5, 6]), torch.tensor([5, 7]), False),
    "integers, far beyond": (torch.tensor([5, 5]), torch.tensor([5, 6]), torch.tensor([5, 17]), True),
    "booleans": (torch.tensor([True]), torch.tensor([True]), torch.tensor([False]), True),
}


@pytest.mark.parametrize("kind", SPREADS)
def test_the_spread_of_two_replays(kind: str) -> None:
    """What is no further from eager than replays are from each other is let pass; not a number is no distance."""
    one, two, eager, reported = SPREADS[kind]
    noise = {"noise": torch.zeros(1)}, {"noise": torch.ones(1)}
    found = beyond_spread(["a"], {}, {"a": one, **noise[0]}, [{"a": two, **noise[1]}], {"a": eager, **noise[0]})
    assert bool(found) is reported


@pytest.mark.parametrize("noisy", [True, False])
def test_rounding_is_let_pass_where_replays_differ(noisy: bool) -> None:
    """Two noisy replays may agree in one tensor by chance; two that agree in everything leave eager no rounding."""
    one, eager = ONE, torch.nextafter(ONE, ONE + 1)
    first, second = {"a": one, "b": torch.zeros(1)}, {"a": one, "b": torch.full((1,), 1e-7 * noisy)}
    assert bool(beyond_spread(["a"], {}, first, [second], {"a": eager, "b": torch.zeros(1)})) is not noisy
    # Infinite elements are no excuse for the others.
    holed = {"a": torch.cat([one, torch.tensor([INF])]), "b": torch.zeros(1)}
    other = {"a": torch.cat([one + 1, torch.tensor([INF])]), "b": torch.zeros(1)}
    assert beyond_spread(["a"], {}, holed, [{**holed, "b": second["b"]}], other)


def test_python_values() -> None:
    """By type and value; an array has no single answer and is compared by identity."""
    array = np.ones(2)
    one = {"a": 1, "b": 1.0, "nan": NAN, "same": array, "other": np.ones(2), "gone": "x"}
    eager = {"a": 1, "b": 1, "nan": NAN, "same": array, "other": np.ones(2), "new": None}
    found = [f"{path}: {text}" for path, text in differing_values(one, eager).items()]
    assert found[0] == "b: 1.0 after the replay, 1 after the eager step"
    assert found[1].startswith("other: array")
    assert found[2:] == [
        "new: nothing after the replay, None after the eager step",
        "gone: 'x' after the replay, nothing after the eager step",
    ]


NOISE = Box(np.random.default_rng(7))


@torch.library.custom_op("graphplan_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """``x`` with rounding noise from a generator that nobody knows, as atomic additions would make it."""
    return x + 1e-6 * torch.from_numpy(NOISE.item.standard_normal(x.shape, dtype=np.float32))


def noisy_rig(hidden: Box, begin: int) -> Any:
    """A step whose results differ a little each time it is run, and from call ``begin`` on by a factor."""

    def each(model: Any, optimizer: Any, index: int) -> None:
        hidden.item = 1.001 if index >= begin - 1 else 1.0

    return changing_rig(stay, lambda model, x, y: loss_of(model, noisy(x), y) * hidden.item, each=each)


@pytest.mark.twice
def test_an_operator_that_is_not_deterministic_is_no_fault() -> None:
    """Every replay differs from the eager step in its last digits, and is as good."""
    rig = build(lambda: noisy_rig(Box(1.0), begin=99))
    step = managed(rig, verify=1)
    drive(rig, step)
    assert step.stats.verified == step.stats.replayed == len(rig.calls) - BEFORE_REPLAY
    # The noise is there: one step from one state has two outcomes.
    x = torch.ones(3)
    assert not torch.equal(noisy(x), noisy(x))


@pytest.mark.twice
def test_a_fault_on_top_of_noise_is_found() -> None:
    """A thousandth too much in the loss is more than the noise explains; the message has both figures."""
    rig = build(lambda: noisy_rig(Box(1.0), begin=BEFORE_REPLAY + 4))
    step = managed(rig, verify=1)
    figures = r"1\.\d+ by the replay, 1\.\d+ by the eager step; two replays differ by (0|\d\S*e-0[678]) "
    match = f"replay 5 of .*result: {figures}"
    with pytest.warns(UserWarning, match=match):
        drive(rig, step)
    assert (step.stats.replayed, step.stats.verified) == (4, 4)


class Seldom:
    """Where the runs of a step round otherwise: ``script`` has two flags per run, for early and late in backward."""

    def __init__(self) -> None:
        self.script: list[tuple[bool, bool]] = []
        self.asked = 0

    def ask(self) -> bool:
        run, place = divmod(self.asked, 2)
        self.asked += 1
        return run < len(self.script) and self.script[run][place]


SELDOM = Box(Seldom())


@torch.library.custom_op("graphplan_tests::seldom", mutates_args=())
def seldom(x: Tensor) -> Tensor:
    """``x``, of which one element now and then is rounded up instead of down."""
    out = x.clone()
    if SELDOM.item.ask():
        out[0, 0] *= 1 + 2**-7
    return out


class SeldomBackward(torch.autograd.Function):
    """Gradients whose last bits depend on who comes first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return seldom(grads[0])


class Deep(nn.Module):
    """A few layers in bfloat16; the backward pass is not deterministic behind the last one and before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 32), nn.GELU())
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)))
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            hidden: Tensor = self.layers(SeldomBackward.apply(self.first(x)))
            out: Tensor = self.last(SeldomBackward.apply(hidden))
        return out.float()


@pytest.mark.parametrize("factor", [1.0, 1.2], ids=["noise", "a fault on top of it"])
def test_noise_that_few_replays_show(factor: float) -> None:
    """Where replays differ by next to nothing, and eager by an early change, what rounding does to the step decides."""
    torch.manual_seed(0)
    hidden = Box(1.0)
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    batches = [torch.randn(8, 32) for _ in range(12)]

    step: Any = descent(model, optimizer, lambda x: model(x).square().mean() * hidden.item)
    graphed = graph_step(step, owners=step.owners, backend="tape", verify=3, allow=("hidden.item", "seldom", "SELDOM"))
    for x in batches[:8]:
        graphed(x)
    assert graphed.stats.replayed == 2
    # The replay, the eager step with its early change, and a second replay with a late one.
    SELDOM.item = Seldom()
    SELDOM.item.script = [(False, False), (True, False), (False, True)]
    hidden.item = factor
    before = SELDOM.item.asked
    if factor == 1.0:
        graphed(batches[8])
        assert graphed.stats.verified == 1
        # A fourth run tells how much rounding matters, and its parameters are off meanwhile only.
        assert SELDOM.item.asked - before == 8
    else:
        with pytest.warns(UserWarning, match=r"replay 3 of .*result: .*two replays differ by 0 \(and \d+ more"):
            graphed(batches[8])
