"""A run whose every replay is checked equals one without checks, and both equal eager: a check leaves no trace."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphplan import HostSyncError, graph_step
from graphplan.owners.generators import HostGenerators
from tests.effects.test_carries import CARRIES, functional_rig, recurrent_rig
from tests.effects.test_host_effects import HOST_EFFECTS
from tests.facts import assert_same, flatten
from tests.failure_modes.naive import changing_rig, loss_of, seeded, stay
from tests.failure_modes.test_rows_23_29 import accumulating_rig
from tests.models import CALLS, MODELS, OPTIMIZERS, Box, float_batches, training_rig, updating_rig
from tests.optimizers.test_gradient_scaler import MAKERS, prepared, scaled_rig
from tests.plan.test_accounting import ledger_rig
from tests.plan.test_feeds import rig_of
from tests.step.test_step_forms import OUTPUTS, mlp_rig, two_models_rig
from tests.step.test_step_forms import accumulating_rig as stepping_outside_rig
from tests.twins import BEFORE_REPLAY, Record, Rig, assert_same_as_eager, assert_same_runs, build, drive, managed

pytestmark = pytest.mark.usefixtures("room")

EIGHTS = (8,) * 20


def _mutating(model: Any, x: Tensor, y: Tensor) -> Tensor:
    x.mul_(0.5).clamp_(-1, 1)
    return loss_of(model, x, y)


def reused_batch_rig() -> Rig:
    """One batch that every call writes into, so that what a check leaves in it shows in the next call."""
    x, y = float_batches(1)[0]
    return rig_of(_mutating, [(x.clone(), y)] * CALLS)


def leaf_rig() -> Rig:
    """Inputs that get gradients."""
    return rig_of(loss_of, [(x.clone().requires_grad_(), y) for x, y in float_batches(CALLS)])


def private_generator_rig() -> Rig:
    """Noise from a generator of the step's own."""
    noise = torch.Generator().manual_seed(3)
    states: list[Tensor] = []

    def noisy(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(model, x + torch.randn(x.shape, generator=noise), y)

    rig = rig_of(noisy, list(float_batches(CALLS)))
    rig.after = lambda index: states.append(noise.get_state())
    rig.extra["states"] = states
    return rig


def host_draws_rig() -> Rig:
    """Host code draws from Python's and NumPy's generators between the calls."""
    drawn: list[float] = []
    return changing_rig(
        lambda m, o: None,
        prepare=lambda model: setattr(model, "drawn", drawn),
        each=lambda m, o, i: drawn.extend([random.random(), np.random.rand()]),
    )


MEMORY = Box(None)
"""Where :func:`tally` counts."""


@torch.library.custom_op("graphplan_tests::tally", mutates_args=())
def tally(x: Tensor) -> Tensor:
    """An operator that also writes memory which its schema does not name."""
    MEMORY.item += 1.0
    return x + torch.from_numpy(MEMORY.item)


def undeclared_write_rig() -> Rig:
    """Replays run such an operator too, so what it wrote has to be put back before the eager half."""
    total = torch.zeros(8)
    MEMORY.item = total.numpy()
    rig = rig_of(lambda model, x, y: loss_of(model, tally(x), y) + 0 * total.sum(), list(float_batches(CALLS)))
    rig.extra["total"] = total
    return rig


def changing_on_the_host_rig() -> Rig:
    """Validation in another mode, a loaded checkpoint, a new learning rate, dropped gradients: between the calls."""
    saved: list[Any] = []

    def each(model: Any, optimizer: Any, index: int) -> None:
        model.train(index % 7 != 6)
        if index == 9:
            saved[:] = [{k: v.clone() for k, v in model.state_dict().items()}]
        if index == 14:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + index)
        if index % 5 == 4:
            optimizer.zero_grad()

    return changing_rig(lambda m, o: None, each=each, calls=float_batches(30))


def freezing_in_turns_rig() -> Rig:
    """A layer that is frozen and thawed again, while its gradient of before is there or is not."""

    def each(model: Any, optimizer: Any, index: int) -> None:
        if index % 12 == 11:
            model[0].weight.requires_grad_(not model[0].weight.requires_grad)

    return changing_rig(lambda m, o: None, each=each, calls=float_batches(60))


OF_OTHERS: dict[str, Callable[[], Rig]] = {
    **{f"carry: {name}": partial(updating_rig, *parts) for name, parts in CARRIES.items()},
    **{f"host effect: {name}": partial(updating_rig, *parts) for name, parts in HOST_EFFECTS.items()},
    **{f"model: {name}": partial(training_rig, name, "adamw", sizes=EIGHTS) for name in MODELS},
    **{f"optimizer: {name}": partial(training_rig, "mlp", name, sizes=EIGHTS) for name in OPTIMIZERS},
    **{f"output: {name}": partial(mlp_rig, result) for name, result in OUTPUTS.items()},
    **{f"scaler: {name}": partial(scaled_rig, prepared(make)) for name, make in MAKERS.items()},
}
"""Rigs that other tests run with fewer checks."""
OWN: dict[str, Callable[[], Rig]] = {
    "two batch sizes": partial(training_rig, "mlp", "adamw", sizes=[5 if i % 3 == 2 else 8 for i in range(48)]),
    "gradients zeroed in place": partial(mlp_rig, zero="end", set_to_none=False),
    "gradients dropped at the end": partial(mlp_rig, zero="end"),
    "gradients that accumulate": partial(mlp_rig, zero="never"),
    "micro-batches, zeroed in place": partial(accumulating_rig, set_to_none=False),
    "micro-batches, dropped": partial(accumulating_rig, set_to_none=True),
    "an optimizer outside": stepping_outside_rig,
    "two models": two_models_rig,
    "hidden states": partial(recurrent_rig, 5),
    "a functional optimizer": functional_rig,
    "a ledger": partial(ledger_rig, (8, 8, 5) * 10),
    "a batch that the step writes into": reused_batch_rig,
    "inputs that get gradients": leaf_rig,
    "a generator of the step's own": private_generator_rig,
    "an operator that writes unseen": undeclared_write_rig,
    "a layer that is frozen in turns": freezing_in_turns_rig,
    "host code that draws": host_draws_rig,
    "host code that changes things": changing_on_the_host_rig,
}


def run(make: Callable[[], Rig], **options: Any) -> tuple[Record, HostGenerators, Any]:
    """A rig's run, where the host's generators are after it, and the graphed step, or None without options."""
    seeded(None)
    rig = build(make)
    step = managed(rig, **options) if options else None
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        record = drive(rig, step or rig.step)
    return record, HostGenerators(), step


def run_checked(make: Callable[[], Rig]) -> Any:
    """The step, of which each replay is checked, and which leaves what eager leaves."""
    expected, drawn, _ = run(make)
    checked, drawn_checked, step = run(make, verify=1)
    assert_same_runs(expected, checked)
    assert drawn.other_than(drawn_checked) == []
    assert step.stats.verified == step.stats.replayed > 0
    return step


@pytest.mark.parametrize("name", OF_OTHERS)
@pytest.mark.crossed(3)
def test_checks_leave_no_trace(name: str) -> None:
    """Results, tensors, Python values, hyper-parameters and generators: with checks as in eager."""
    run_checked(OF_OTHERS[name])


@pytest.mark.parametrize("name", OWN)
@pytest.mark.crossed(2)
def test_checks_change_nothing(name: str) -> None:
    """With them, without, and in eager; the same programs."""
    checking = run_checked(OWN[name])
    expected, drawn, _ = run(OWN[name])
    unchecked, drawn_unchecked, step = run(OWN[name], verify="off")
    assert_same_runs(expected, unchecked)
    assert drawn.other_than(drawn_unchecked) == []
    assert step.stats.verified == 0 < step.stats.replayed
    # Without checks each shape is traced twice.
    assert checking.stats.replayed >= step.stats.replayed
    assert checking.stats.captured == step.stats.captured, checking.report()


@pytest.mark.twice
def test_a_step_that_fails_in_a_check(tmp_path: Path) -> None:
    """The error of the eager half comes out, what the replay did is undone, and the next call goes on."""

    class Mine(Exception):
        pass

    def make() -> Rig:
        def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
            if (tmp_path / "fail").exists():
                raise Mine("from the step")
            return loss_of(model, x, y)

        return changing_rig(lambda m, o: None, loss)

    records = []
    for graphed in (False, True):
        rig = build(make)
        step = managed(rig, verify=1) if graphed else rig.step
        for index, args in enumerate(rig.calls):
            if index == BEFORE_REPLAY + 2:
                (tmp_path / "fail").touch()
                with pytest.raises(Mine, match="from the step"):
                    step(*args)
                (tmp_path / "fail").unlink()
            step(*args)
        records.append(flatten(**rig.owners, generator=torch.get_rng_state()))
    assert_same(*records)
    assert step.stats.verified == step.stats.replayed == len(rig.calls) - BEFORE_REPLAY


@pytest.mark.twice
def test_read_only_memory_is_left_alone(tmp_path: Path) -> None:
    """Batches in a file that is mapped for reading only: nobody may write into them, not even the same values."""
    shape = (CALLS, 6, 8)
    np.memmap(tmp_path / "data", np.float32, "w+", shape=shape)[:] = np.random.default_rng(0).standard_normal(shape)
    data = np.memmap(tmp_path / "data", np.float32, "r", shape=shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        calls = [(torch.from_numpy(batch), y) for batch, (_, y) in zip(data, float_batches(CALLS), strict=True)]
    make = partial(rig_of, loss_of, calls)
    expected, _, _ = run(make)
    found, _, step = run(make, verify=1)
    assert_same_runs(expected, found)
    assert step.stats.verified == CALLS - BEFORE_REPLAY
    # A refusal puts the batch back as well.
    rig = build(partial(rig_of, lambda model, x, y: model(x).sum() * complex(model(x).detach().sum()).real, calls))
    with pytest.raises(HostSyncError, match=r"\.item\(\)"):
        drive(rig, managed(rig))


@pytest.mark.twice
def test_allowed_differences_are_not_compared() -> None:
    """What replays may leave out by name may differ from what the eager step leaves."""

    def step(x: Tensor) -> Tensor:
        seen["calls"] = seen["calls"] * 2
        return x * 2

    seen = {"calls": 1}
    graphed = graph_step(step, owners={"seen": seen}, backend="tape", allow=["seen.*"], verify=1)
    for _ in range(10):
        graphed(torch.ones(2))
    assert graphed.stats.verified == 4
    # Six calls before the first replay, and the eager halves of four.
    assert seen["calls"] == 2**10


GIVEN_UP: dict[str, Callable[[Tensor], Any]] = {
    "without memory": lambda tensor: tensor.to("meta"),
    "of many lengths": lambda tensor: torch.nested.nested_tensor([tensor[0], tensor[1, :1]]),
    "sparse": lambda tensor: tensor.to_sparse(),
    "no tensor": lambda tensor: 3,
    "of another type": lambda tensor: tensor.double(),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", GIVEN_UP)
def test_tensors_that_the_eager_step_gives_up(kind: str) -> None:
    """The comparison begins with those that were there before the step, whatever has become of them; what counts are
    those that are there after it.
    """

    def make() -> Rig:
        count = Box(itertools.count())

        def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
            value = loss_of(model, x, y)
            model.bag["scale"].mul_(1.5)
            if next(count.item) >= BEFORE_REPLAY:
                old, model.bag = model.bag, {"scale": model.bag["scale"].clone()}
                old["scale"] = GIVEN_UP[kind](old["scale"])
            return value

        return changing_rig(stay, loss, prepare=lambda model: setattr(model, "bag", {"scale": torch.ones(2, 2)}))

    step = assert_same_as_eager(make, verify=1)
    assert step.stats.verified > 0, step.report()
