"""Schedules in lists and arrays, in which a step looks up the number of the step or the epoch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphplan import HostScalarError, SkipReason, graph_step
from graphplan.tensors.tables import LookUp, Table, is_table
from tests.lightning.parts import LitDigits, assert_fit_equals_eager, with_step
from tests.twins import BEFORE_REPLAY, Rig, assert_same_as_eager, build, drive, managed, same_as_eager

CALLS, LENGTH = 24, 40
Use = Callable[[Any, Tensor], Any]
_RATES = [0.5 + place / LENGTH for place in range(LENGTH)]


class Model(nn.Module):
    """Weights, their average, and schedules for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.average = nn.Linear(4, 4), nn.Linear(4, 4)
        self.rates, self.pair, self.array = list(_RATES), tuple(_RATES), np.array(_RATES)
        self.sizes = list(range(LENGTH))
        self.options = SimpleNamespace(rates=list(_RATES))
        self.seen: Any = None
        self.steps = 0


def rig_of(use: Use, *, after: Callable[[Any], None] = lambda model: None) -> Rig:
    model = Model()
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.05)

    def averages(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        rate = use(model, x)
        loss = (model.layer(x) * rate).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for own, other in zip(model.average.parameters(), model.layer.parameters(), strict=True):
                own.mul_(rate).add_(other, alpha=1 - rate)
        model.steps += 1
        return loss.detach()

    calls = [(torch.randn(3, 4),) for _ in range(CALLS)]
    return Rig(averages, {"model": model, "optimizer": optimizer}, calls, after=lambda index: after(model))


def of_list(model: Any, x: Tensor) -> Any:
    return model.rates[model.steps]


def of_tuple(model: Any, x: Tensor) -> Any:
    return model.pair[-1 - model.steps]


def of_array(model: Any, x: Tensor) -> Any:
    return model.array[model.steps] * 0.5


def of_bound(model: Any, x: Tensor) -> Any:
    return model.rates[min(model.steps, len(model.rates) - 1)]


def of_whole_numbers(model: Any, x: Tensor) -> Any:
    return model.sizes[model.steps] / LENGTH


SCHEDULE = np.linspace(0.2, 0.9, LENGTH)


def of_global(model: Any, x: Tensor) -> Any:
    return SCHEDULE[model.steps]


def by_closure() -> Use:
    schedule = [rate / 2 for rate in _RATES]
    return lambda model, x: schedule[model.steps]


def of_class(model: Any, x: Tensor) -> Any:
    return Scheduled.rates[model.steps]


class Scheduled:
    """Has a schedule itself."""

    rates = tuple(_RATES)


@pytest.mark.parametrize(
    "use",
    [
        of_list, of_tuple, of_array, of_bound, of_whole_numbers, of_global, by_closure(), of_class,
    ],
    ids=lambda it: it.__qualname__,
)  # fmt: skip
def test_one_program_looks_up_all_numbers(use: Use, device: torch.device, backend: str) -> None:
    """Of lists, tuples and arrays, of the model and of an object that it has, of a module, a closure and a class."""
    step = same_as_eager(partial(rig_of, use), device, backend)
    assert (step.stats.captured, step.stats.recaptured) == (1, 0)
    assert step.stats.replayed >= CALLS - BEFORE_REPLAY - 3


def test_containers_stay_what_they_are() -> None:
    """The model has its own after each call."""
    rig = build(partial(rig_of, lambda model, x: model.rates[model.steps] * model.pair[model.steps]))
    step, model = managed(rig), rig.owners["model"]
    own = model.rates, model.pair, model.array
    drive(rig, step)
    assert (model.rates, model.pair) == (_RATES, tuple(_RATES))
    assert all(now is before for now, before in zip((model.rates, model.pair, model.array), own, strict=True))
    assert step.stats.replayed > CALLS // 2


def test_a_schedule_that_is_changed_between_steps() -> None:
    """Replays look up what is there now: an item, and another list."""

    def changes(model: Any) -> None:
        if model.steps == 15:
            model.rates[17] = 3.0
        elif model.steps == 19:
            model.rates = [rate / 2 for rate in model.rates]

    step = assert_same_as_eager(partial(rig_of, of_list, after=changes))
    assert not step.stats.skipped[SkipReason.HOST_SCALAR]
    assert step.stats.replayed > CALLS // 3


_OTHERS: dict[str, Use] = {
    "grows": lambda model, x: (model.rates.append(1.0), model.rates[model.steps])[1],
    "sets": lambda model, x: (model.rates.__setitem__(3, 0.75), model.rates[model.steps])[1],
    "keeps": lambda model, x: (setattr(model, "seen", model.rates), model.rates[model.steps])[1],
    "hands to C": lambda model, x: model.array[model.steps] * float(torch.from_numpy(model.array)[3]),
    "slices": lambda model, x: model.rates[model.steps : model.steps + 2][0],
    "texts": lambda model, x: len("abcde"[model.steps % 5]) * 1.0,
    "an object's": lambda model, x: model.options.rates[model.steps % 3],
    "a helper's": lambda model, x: _looked_up(model.rates, model.steps % 3),
    "compares": lambda model, x: model.rates[model.steps % 3] * (1.0 if model.rates == _RATES else 2.0),
    "compares another": lambda model, x: model.rates[model.steps % 3] * (1.0 if model.pair == tuple(_RATES) else 2.0),
    "asks its class": lambda model, x: model.rates[model.steps % 3] * (1.0 if type(model.rates) is list else 2.0),
    "asks whether it is the same": lambda model, x: model.rates[model.steps % 3] * (2.0 - (model.rates is model.rates)),
    "a key": lambda model, x: model.pair[model.steps % 3] * {model.pair: 1.0}[model.pair],
    "a text of it": lambda model, x: model.pair[model.steps % 3] * len(f"{model.pair}") / 1e3,
    "catches": lambda model, x: model.rates[model.steps % 3] * _caught(model),
    "by a computed name": lambda model, x: model.rates[model.steps % 3] * len(repr(getattr(model, "ra" + "tes"))) / 1e3,
    "by its name": lambda model, x: model.rates[model.steps % 3] * len(str(getattr(model, "rates"))) / 1e3,  # noqa: B009
    "two names": lambda model, x: (model.rates[model.steps % 3] * (1.0 if _is_alias(model) else 2.0)),
    "swaps": lambda model, x: _swap(model, model.steps % 3),
    "averages": lambda model, x: _average(model, model.steps % 2),
    "a constant place": lambda model, x: model.rates[0] * [1.0, 2.0, 3.0][model.steps % 3],
}  # fmt: skip


def _looked_up(rates: Any, place: Any) -> Any:
    return rates[place]


def _caught(model: Any) -> float:
    try:
        return float(len(model.rates + [1.0])) / LENGTH  # noqa: RUF005 - as users have it
    except TypeError:
        return 3.0


def _is_alias(model: Any) -> bool:
    alias = model.rates
    return alias == _RATES


def _swap(model: Any, place: int) -> Any:
    model.rates[0], model.rates[1] = model.rates[1], model.rates[0]
    return model.rates[place]


def _average(model: Any, place: int) -> Any:
    model.rates[place] = 0.9 * model.rates[place] + 0.1
    return model.rates[place]


@pytest.mark.filterwarnings("ignore:graphplan runs")
@pytest.mark.parametrize("use", _OTHERS.values(), ids=_OTHERS)
def test_other_uses_leave_what_eager_steps_do(use: Use) -> None:
    """A container that code does anything else with has no stand-in, nor one that it has no module for."""

    def make() -> Rig:
        rig = rig_of(use)
        rig.owners["model"].rates = list(_RATES)
        return rig

    assert_same_as_eager(make, on_failure="eager", verify="off")


@pytest.mark.filterwarnings("ignore:graphplan runs")
def test_code_that_runs_in_some_steps_alone() -> None:
    """It compares what others only look numbers up in: those steps are undone, and run with the container itself."""

    def uses(model: Any, x: Tensor) -> Any:
        rate = model.rates[model.steps % 20]
        if model.steps % 3 == 2 and model.steps > 6:
            rate *= _compared(model)
        return rate

    step = assert_same_as_eager(partial(rig_of, uses), on_failure="eager", verify="off")
    assert step.stats.traced


def _compared(model: Any) -> float:
    return 1.0 if model.rates == _RATES else 3.0


@pytest.mark.parametrize("decays", [False, True])
def test_items_that_change_are_followed_themselves(decays: bool) -> None:
    """By the user between steps, or by the step: the container is none of those."""

    def uses(model: Any, x: Tensor) -> Any:
        if not decays:
            model.rates[0] = model.rates[0] * 0.9
        return model.rates[0] * (1.0 + model.pair[model.steps % 2])

    def after(model: Any) -> None:
        if decays:
            model.rates[0] *= 0.9

    step = assert_same_as_eager(partial(rig_of, uses, after=after))
    assert step.stats.replayed >= CALLS // 2


@pytest.mark.filterwarnings("ignore:graphplan runs")
def test_a_list_that_the_step_keeps_elsewhere_is_the_models_own() -> None:
    """Not what stood for it in a trace."""
    rig = build(partial(rig_of, _OTHERS["keeps"]))
    step, model = managed(rig, on_failure="eager"), rig.owners["model"]
    for args in rig.calls:
        step(*args)
        assert type(model.seen) is list and model.seen is model.rates


def test_beyond_the_end_the_step_raises() -> None:
    """As an eager step does."""
    rig = build(partial(rig_of, of_list))
    step, model = managed(rig), rig.owners["model"]
    drive(rig, step, 12)
    assert step.stats.replayed
    model.steps = LENGTH
    with pytest.raises(IndexError):
        step(*rig.calls[0])
    model.steps = 3
    step(*rig.calls[0])
    assert model.steps == 4 and type(model.rates) is list


def test_what_is_no_table_needs_the_value() -> None:
    """A list of lists: the line is named."""
    rig = build(partial(rig_of, lambda model, x: model.nested[model.steps][0]))
    rig.owners["model"].nested = [[rate] for rate in _RATES]
    with pytest.raises(HostScalarError, match=r"model\.steps at test_tables.py"):
        drive(rig, managed(rig))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, 2.0], True), ((0.5,), True), (np.ones(3), True), ([], False), ([1, "a"], False), ([True], False),
        (np.ones((2, 2)), False), (np.ones(3, dtype=np.float32), False), (np.ones(3).view(np.recarray), False),
        ({0: 1.0}, False), ("12", False), (torch.ones(2), False), (range(4), False),
    ],
)  # fmt: skip
def test_what_a_table_is(value: Any, expected: bool) -> None:
    """Numbers that have stand-ins, in a container whose items code in C gives."""
    assert is_table(value) is expected


def test_look_ups_are_equal_for_one_container_alone() -> None:
    """Programs are told apart by them."""
    one, other = [1.0, 2.0], [1.0, 2.0]
    assert LookUp(one) == LookUp(one) and hash(LookUp(one)) == hash(LookUp(one))
    assert LookUp(one) != LookUp(other) and LookUp(one)(1) == 2.0
    assert len(Table(one)) == 2 and Table(one)[-1] == 2.0 and Table(one)[:1] == [1.0]


def test_schedules_in_a_trainer(tmp_path: Path) -> None:
    """By the step's number and by the epoch's, and a learning rate."""

    def looks_up(module: Any, batch: Any, index: int) -> Any:
        rate = module.rates[module.global_step]
        module.log("rate", rate)
        for group in module.optimizers().param_groups:
            group["lr"] = 0.01 * module.rates[module.global_step]
        loss = LitDigits.training_step(module, batch, index)
        return loss * rate + module.temperatures[module.current_epoch]

    def make() -> Any:
        module = with_step(looks_up)()
        module.rates, module.temperatures = np.array(_RATES), [0.1 * epoch for epoch in range(LENGTH)]
        return module

    found = assert_fit_equals_eager(make, tmp_path, replayed=25, max_epochs=4)
    assert found.callback.stats.recaptured == 0


def test_each_call_of_a_function_without_owners() -> None:
    """A step that is given the place looks it up in a list that it has no attribute for: each value has a program."""
    rates = [0.5, 0.25]

    def scales(x: Tensor, place: int) -> Tensor:
        return x * rates[place]

    step = graph_step(scales, owners={})
    for number in range(30):
        assert torch.equal(step(torch.ones(2), number % 2), torch.ones(2) * rates[number % 2])
    assert step.stats.replayed > 10
