"""Random numbers that a step draws from Python's and NumPy's generators: replays draw again, in the same order."""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Callable
from random import betavariate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import standard_normal
from torch import Tensor, nn

from graphplan import GraphPlanError, HostScalarError, graph_step
from graphplan.observe import host_draws
from graphplan.observe.host_draws import Draw, LookAhead, peek
from graphplan.owners import walk
from graphplan.owners.generators import NUMPYS, PYTHONS, HostGenerators
from graphplan.trace.symbolic_numbers import SymbolicNumbers
from tests.devices import BACKEND

CALLS, REPLAYED = 30, 24


class Mixed(nn.Module):
    """Weights, and what a step keeps of what it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.kept: list[Any] = []
        self.share, self.total = 0.0, 0.0


def _mixup(model: Mixed, x: Tensor) -> Tensor:
    share = np.random.beta(0.4, 0.4)
    return share * x + (1 - share) * x[torch.arange(len(x) - 1, -1, -1, device=x.device)]


def _cutoff(model: Mixed, x: Tensor) -> Tensor:
    model.share = random.uniform(0.1, 0.9)
    return x * model.share


def _keeps(model: Mixed, x: Tensor) -> Tensor:
    drawn = random.gauss(0, 1)
    model.kept.append((drawn, np.random.randint(5), random.randrange(3, 9) / 2))
    model.total += drawn
    return x / (1.5 + drawn**2)


USES: dict[str, Callable[[Mixed, Tensor], Tensor]] = {
    "mixup": _mixup,
    "kept in an attribute": _cutoff,
    "appended and summed": _keeps,
    "several": lambda model, x: x * random.random() + np.random.rand() - random.betavariate(2, 3) * np.random.normal(),
    "beside torch's": lambda model, x: x * random.random() * torch.rand(8, device=x.device),
    "by their own names": lambda model, x: x * betavariate(2, 3) + standard_normal(),
    "in a tensor": lambda model, x: x * torch.tensor(random.random(), device=x.device),
    "in a list": lambda model, x: x * torch.tensor([random.random(), 2.0, np.random.rand()], device=x.device).sum(),
    "unused": lambda model, x: [random.random(), np.random.poisson(3.0), x][-1],
    "computed with": lambda model, x: x * np.sqrt(1 - np.random.uniform(low=0.2, high=0.8)),
    "mixed with an owner's": lambda model, x: x * (random.random() * len(model.kept) + 0.5),
}


@pytest.mark.parametrize("verify", ["off", 4])
@pytest.mark.parametrize("name", USES)
def test_replays_draw_again(name: str, verify: Any, device: torch.device) -> None:
    """With the numbers of eager steps, in which other code goes on drawing; all generators end in the same states."""
    runs = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = Mixed().to(device)

        def train(x: Tensor, model: Mixed = model) -> Tensor:
            loss = model.layer(USES[name](model, x)).square().mean()
            slopes = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for parameter, slope in zip(model.parameters(), slopes, strict=True):
                    parameter.sub_(slope, alpha=0.05)
            return loss.detach()

        step: Any = train
        if graphed:
            step = graph_step(train, owners={"model": model}, verify=verify, min_speedup=0)
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        out: list[Any] = []
        for _ in range(CALLS):
            out.append(step(torch.full((5, 8), random.random(), device=device) + np.random.rand()).item())
        kept = [model.kept, model.share, model.total, random.getstate(), np.random.get_state()[1].tolist()]
        runs.append([out, *kept, *(parameter.tolist() for parameter in model.parameters())])
    assert runs[0] == runs[1]
    assert (step.stats.captured, step.stats.replayed) == (1, REPLAYED), step.report()
    assert verify == "off" or step.stats.verified > 0


def test_nothing_stays_in_the_modules() -> None:
    before = random.random, random.uniform, np.random.beta, betavariate, standard_normal
    step = graph_step(lambda x: x * random.random())
    for _ in range(8):
        step(torch.ones(2))
    assert (random.random, random.uniform, np.random.beta, betavariate, standard_normal) == before
    assert not host_draws._FUNCTIONS.entered


def _nested(x: Tensor) -> Tensor:
    if random.random() < 0.6:
        share = random.uniform(1, 2)
        return x * share if share > 1.5 else x / share
    return x + np.random.normal()


def _coin() -> bool:
    return random.random() < 0.5


BRANCHES: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "a coin": (2, lambda x: x * 2 if _coin() else x),
    "NumPy's": (2, lambda x: x * 2 if np.random.rand() < 0.3 else x + 1),
    "one of three": (
        3,
        lambda x: [x.sin, x.cos, x.exp][0 if (n := random.randint(0, 2)) == 0 else 1 if n == 1 else 2](),
    ),
    "one after the other": (4, lambda x: (x * 2 if random.random() < 0.5 else x) + (1 if random.random() < 0.5 else 2)),
    "draws that depend on others": (3, _nested),
    "an index": (3, lambda x: [x.sin, x.cos, x.exp][random.randint(0, 2)]()),
    "an index of NumPy's": (3, lambda x: x * (2.0, 3.0, 5.0)[np.random.randint(1, 4) - 1]),
    "a choice": (3, lambda x: random.choice([torch.sin, torch.cos, torch.exp])(x)),
    "a size": (2, lambda x: torch.nn.functional.pad(x, (0, random.choice((1, 4))))),
    "choices and draws": (4, lambda x: x * random.choice((1, 2)) + random.random() * random.choice([2.0, 3.0])),
    "beside torch's": (
        2,
        lambda x: x + torch.rand(4, device=x.device) if random.random() < 0.5 else x * random.random(),
    ),
}


@pytest.mark.parametrize("verify", ["off", 4])
@pytest.mark.parametrize("name", BRANCHES)
def test_each_way_has_a_program(name: str, verify: Any, device: torch.device) -> None:
    """What would be drawn is looked at before a replay: it chooses the program."""
    ways, body = BRANCHES[name]
    runs = []
    for graphed in (False, True):
        step: Any = graph_step(body, verify=verify, min_speedup=0) if graphed else body
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        out: list[Any] = []
        for _ in range(80):
            out.append(step(torch.full((4,), random.random(), device=device)).tolist())
        runs.append([out, random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()])
    assert runs[0] == runs[1]
    assert step.stats.captured == ways, step.report()
    assert step.stats.replayed >= 60


def _caught(x: Tensor) -> Tensor:
    try:
        return x * math.log(random.gauss(0, 1))
    except ValueError:
        return x * 100 * random.random()


def _large(x: Tensor) -> Tensor:
    return x * 10 ** random.uniform(0, 45)


def _many(x: Tensor) -> Tensor:
    for _ in range(70):
        x = x * random.uniform(0.9, 1.1)
    return x


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "an exception that is caught": _caught,
    "too large for the tensor": _large,
    "many": _many,
    "is True": lambda x: x * 2 if math.isfinite(random.random()) is True else x * 3,
    "by a keyword": lambda x: x * 2 if math.isclose(1.0, 1.1, rel_tol=0.2) else x * random.random(),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_uses(name: str) -> None:
    """Each gives what it gives in eager steps, and leaves the generator where they do."""
    runs = []
    for graphed in (False, True):
        step: Any = graph_step(ODD[name], verify="off", on_failure="eager") if graphed else ODD[name]
        random.seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runs.append(([step(torch.ones(1)).tolist() for _ in range(40)], random.getstate()))
    assert runs[0] == runs[1]


def test_another_generator_of_numpys() -> None:
    """Its state has other parts."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        states = HostGenerators()
        assert states.moved() == []
        np.random.rand()
        assert states.moved() == [NUMPYS]
    finally:
        np.random.set_bit_generator(before)


def test_too_many_ways_by_chance() -> None:
    """A draw for each of many parts: each call takes another way, and is eager in the end."""
    body = lambda x: sum((x * number if random.random() < 0.5 else x for number in range(12)), x)  # noqa: E731
    step = graph_step(body, on_failure="eager")
    random.seed(1)
    text = "takes another path through its code in each call, depending on the values of draw 1, random"
    with pytest.warns(UserWarning, match=text):
        [step(torch.ones(4)) for _ in range(80)]
    assert step.stats.captured <= 2


REFUSED: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "an index": ("needs the value of a random number", lambda x: x * ([1.0] * 50)[random.randrange(50)]),
    "an index of nine": ("needs the value of a random number", lambda x: x * ([1.0] * 9)[random.randint(0, 8)]),
    "in a library": (
        r"that Python draws .* at test_drawn_numbers\.py:.*`.*np\.full.*` \(by \w+\.py:",
        lambda x: x * np.full(1, np.random.rand())[0],
    ),
    "a text": ("needs the value of a random number", lambda x: [f"{np.random.rand():.2f}", x * 2][1]),
    "an array": ("draws from NumPy's random generator", lambda x: [np.random.rand(3), x * 2][1]),
    "positions of a mask": (
        "draws from NumPy's random generator",
        lambda x: x.repeat(16)[torch.tensor(np.random.permutation(32) < 16)],
    ),
    "a choice": ("draws from Python's random generator", lambda x: [random.choice("ab"), x * 2][1]),
    "tensors that it chooses": (
        r"draws from Python's random generator at test_drawn_numbers\.py:\d+ .*`.*random\.sample",
        lambda x: (halves := [x + number for number in range(9)], torch.dot(*random.sample(halves, 2)))[1],
    ),
    "seeded": ("draws from Python's random generator", lambda x: [random.seed(1), x * random.random()][1]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_replays_cannot_draw_again_is_refused(name: str) -> None:
    text, body = REFUSED[name]
    step = graph_step(body, backend="tape")
    state = HostGenerators()
    with pytest.raises(HostScalarError, match=text):
        for _ in range(8):
            step(torch.ones(2))
    state.restore()


def test_several_ranks_take_one_way() -> None:
    """Others may draw other numbers, and take another way; what is only computed with differs in any case."""
    with SymbolicNumbers(follows=(PYTHONS,), is_shared=True) as numbers:
        assert random.random() >= 0
    text = r"branches on a random number .*at test_drawn_numbers\.py.*several ranks take one path"
    assert re.search(text, str(numbers.refusal))


def test_another_distribution_in_each_step_is_refused() -> None:
    """Replays have the arguments of the traces."""
    bounds = iter(range(1, 90))
    step = graph_step(lambda x: x * random.uniform(0, next(bounds)))
    with pytest.raises(GraphPlanError, match=r"does not make the same random draws on the host|bounds"):
        for _ in range(8):
            step(torch.ones(2))


def test_a_replay_that_ends_early_has_drawn_once() -> None:
    """What the eager step draws after it is what the replay had drawn."""
    runs = []
    for graphed in (False, True):
        owner = SimpleNamespace(kept=[])

        def body(x: Tensor, owner: Any = owner) -> Tensor:
            y = x * random.random()
            return y * 2 if x.sum() + torch.rand(()) < 7 else y * 3

        step: Any = graph_step(body, owners={"owner": owner}, verify="off", backend=BACKEND) if graphed else body
        random.seed(4)
        torch.manual_seed(4)
        runs.append([step(torch.full((3,), 9.0 if index == 12 else 1.0)).tolist() for index in range(20)])
    assert runs[0] == runs[1]
    assert step.stats.replayed > 0


def _draws(*shares: float) -> tuple[tuple[Draw, ...], list[float]]:
    """Draws of Python's and NumPy's generators in turns, and a list that notes each that is made."""
    made: list[float] = []
    draws = []
    for number, share in enumerate(shares):
        name, function = (NUMPYS, np.random.uniform) if number % 2 else (PYTHONS, random.uniform)

        def call(low: float, high: float, function: Callable[[float, float], float] = function) -> float:
            made.append(high)
            return function(low, high)

        draws.append(Draw(f"draw {number}", name, f"{share}", call, (0.0, share), {}))
    return tuple(draws), made


def test_a_look_ahead_makes_each_draw_once() -> None:
    """Longer and shorter rows of the same draws, and another row; then the generators are where they were."""
    draws, made = _draws(1.0, 2.0, 3.0)
    others, _ = _draws(1.0, 2.5)
    state = HostGenerators()
    expected = [function(0.0, share) for function, share in ((random.uniform, 1.0), (np.random.uniform, 2.0))]
    state.restore()
    with LookAhead():
        first = peek(draws[:2])
        assert list(first.values()) == expected
        assert peek(draws[:1]) == {"draw 0": expected[0]} and peek(draws[:2]) == first
        assert peek(draws).items() >= first.items() and made == [1.0, 2.0, 3.0]
        assert peek(others)["draw 0"] == expected[0] and peek(others)["draw 1"] != expected[1]
        assert peek(draws).items() >= first.items()
    assert not state.moved()
    assert peek(draws[:2]) == first and not state.moved()


def test_a_draw_that_fails_moves_no_generator() -> None:
    """It fails again when it is asked for again, and those before it are as they were."""
    (first,), _ = _draws(1.0)
    failing = Draw("draw 1", PYTHONS, "()", lambda: random.random() > 2 or [].pop(), (), {})
    state = HostGenerators()
    with LookAhead():
        known = peek([first])
        for _ in range(2):
            with pytest.raises(IndexError, match="pop from empty list"):
                peek([first, failing])
        assert peek([first]) == known
    assert not state.moved()


def test_a_value_that_is_one_of_too_many_walks_no_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls are eager in any case, also where it has come before."""
    model = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        if random.random() < 0.5:
            return model(x).sum()
        return model(x * x[random.randrange(8)] + x[random.randrange(8)]).sum()

    graphed = graph_step(step, backend="tape", verify="off", on_failure="eager")
    walks: list[int] = []
    start = walk._Walker.__init__
    monkeypatch.setattr(walk._Walker, "__init__", lambda self, owners: (walks.append(1), start(self, owners))[1])
    random.seed(0)
    with warnings.catch_warnings(record=True):
        for _ in range(600):
            graphed(torch.ones(8, 4))
        walks.clear()
        for _ in range(200):
            graphed(torch.ones(8, 4))
    assert graphed.stats.replayed > 200
    assert len(walks) <= 8
