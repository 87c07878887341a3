"""Python values that a step changes on its owners: understood ones are repeated after every replay."""

from __future__ import annotations

import copy
import gc
import logging
import re
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import graph_step
from tests.crossing import each, pairs
from tests.models import attributes, updating_rig
from tests.twins import assert_equals_eager, assert_same_runs, build, drive, managed


def _count(model: Any, x: Tensor, loss: Tensor) -> None:
    model.calls += 1


def _count_two(model: Any, x: Tensor, loss: Tensor) -> None:
    model.calls += 2
    model[0].calls -= 1
    model.counts["steps"] += 3


def _append(model: Any, x: Tensor, loss: Tensor) -> None:
    model.outs.append(loss.detach())


def _append_two(model: Any, x: Tensor, loss: Tensor) -> None:
    model.outs.append(loss.detach())
    model.outs.append(x.mean())
    model.means.append(x.mean(0))


def _append_dict(model: Any, x: Tensor, loss: Tensor) -> None:
    model.outs.append({"loss": loss.detach(), "pair": (x.mean(), None)})


def _append_six(model: Any, x: Tensor, loss: Tensor) -> None:
    loss = loss.detach()
    model.outs += [loss, None, loss + 1, loss + 2, loss + 3, x.mean()]


def _keep_two(model: Any, x: Tensor, loss: Tensor) -> None:
    model.outs.append(loss.detach())
    if len(model.outs) > 2:
        model.outs.popleft()


def _put_first(model: Any, x: Tensor, loss: Tensor) -> None:
    model.outs.appendleft(loss.detach())


def _constant_flag(model: Any, x: Tensor, loss: Tensor) -> None:
    model.stage = "trained"


def _mixed(model: Any, x: Tensor, loss: Tensor) -> None:
    model.calls += 1
    model.ema = 0.5 * model.ema + loss.detach()
    model.outs.append(model.ema.clone())


def _counters(model: nn.Module) -> None:
    model.calls, model[0].calls, model.counts = 0, 5, {"steps": 0}


HOST_EFFECTS: dict[str, tuple[Callable[..., Any], Callable[[nn.Module], object]]] = {
    "a counter": (_count, attributes(calls=0)),
    "three counters": (_count_two, _counters),
    "appended losses": (_append, attributes(outs=list)),
    "three appended tensors": (_append_two, attributes(outs=list, means=list)),
    "appended dictionaries": (_append_dict, attributes(outs=list)),
    "an attribute set to the same value": (_constant_flag, attributes(stage="new")),
    "losses in a deque": (_append, attributes(outs=deque)),
    "the last two losses": (_append, attributes(outs=partial(deque, maxlen=2))),
    "the last eight losses": (_append, attributes(outs=partial(deque, maxlen=8))),
    "the last five of six": (_append_six, attributes(outs=partial(deque, maxlen=5))),
    "the last seven of six each": (_append_six, attributes(outs=partial(deque, maxlen=7))),
    "the last four dictionaries": (_append_dict, attributes(outs=partial(deque, maxlen=4))),
    "a window that the step keeps short": (_keep_two, attributes(outs=deque)),
    "the latest loss first": (_put_first, attributes(outs=partial(deque, maxlen=2))),
    "counter, carry and list": (_mixed, attributes(calls=0, ema=lambda: torch.zeros(()), outs=list)),
}


@pytest.mark.parametrize("name", HOST_EFFECTS)
def test_understood_host_effects_are_repeated(name: str, equals_eager: Callable[..., Any]) -> None:
    """Counters grow and lists get their outputs on every replay, each entry with its own step's values."""
    update, prepare = HOST_EFFECTS[name]
    equals_eager(partial(updating_rig, update, prepare))


def _append_results(model: Any, x: Tensor, loss: Tensor) -> Any:
    pair = {"loss": loss.detach(), "mean": x.mean(0)}
    model.outs.append(pair["loss"])
    model.means += [x.sum(0), pair]
    return pair


def _clear(model: Any, index: int) -> None:
    if index % 5 == 4:
        model.outs.clear()
        model.means.clear()


@pairs(
    verify=["off", "geometric"],
    clear=[_clear, lambda model, index: None],
    kind=[list, deque, partial(deque, maxlen=3), partial(deque, maxlen=9)],
)
def test_results_that_are_appended_too(kind: Callable[[], Any], clear: Callable[..., None], verify: str) -> None:
    """What the step returns is this call's, wherever in the list it was when the step was traced."""
    make = partial(updating_rig, _append_results, attributes(outs=kind, means=kind), clear)
    assert_equals_eager(make, verify=verify)


def test_a_list_cleared_between_calls() -> None:
    """An epoch's end clears the list of outputs; later replays append to the cleared or replaced list."""

    def clear(model: Any, index: int) -> None:
        if index % 5 == 4:
            model.outs.clear()
        if index == 12:
            model.outs = []

    assert_equals_eager(partial(updating_rig, _append, attributes(outs=list), clear))


def test_a_deque_replaced_between_calls() -> None:
    """The new one keeps as many as it is made for."""

    def replace(model: Any, index: int) -> None:
        if index in (7, 9):
            model.outs = deque(model.outs, maxlen=4 if index == 7 else 9)

    assert_equals_eager(partial(updating_rig, _append, attributes(outs=partial(deque, maxlen=4)), replace))


def _twice_when_full(model: Any, x: Tensor, loss: Tensor) -> None:
    model.mean = loss.detach() * (2 if len(model.outs) == model.outs.maxlen else 1)
    model.outs.append(loss.detach())


def test_a_step_that_asks_whether_its_deque_is_full() -> None:
    """It is captured anew once that is so."""
    prepare = attributes(outs=partial(deque, maxlen=10), mean=lambda: torch.zeros(()))
    assert_equals_eager(partial(updating_rig, _twice_when_full, prepare), captured=2, replayed=10)


def _mean_of_window(model: Any, x: Tensor, loss: Tensor) -> None:
    model.outs.append(loss.detach())
    model.mean = torch.stack(tuple(model.outs)).mean() + model.outs[0]


def _mean_in_dictionaries(model: Any, x: Tensor, loss: Tensor) -> None:
    model.mean = model.outs[0]["loss"] + model.outs[-1]["loss"]
    model.outs.append({"loss": loss.detach()})


def _zeros() -> deque[Tensor]:
    return deque([torch.zeros(()) for _ in range(3)], maxlen=3)


@pytest.mark.parametrize(
    ("update", "fill"),
    [(_mean_of_window, _zeros), (_mean_in_dictionaries, lambda: deque([{"loss": z} for z in _zeros()], maxlen=3))],
)
def test_a_step_that_reads_its_deque(update: Callable[..., None], fill: Callable[[], Any]) -> None:
    """Each replay finds the items where the one before left them."""
    make = partial(updating_rig, update, attributes(outs=fill, mean=lambda: torch.zeros(())))
    assert_equals_eager(make, verify="off")


def _oldest(model: Any, x: Tensor, loss: Tensor) -> None:
    model.mean = loss.detach() + (model.outs[0] if model.outs else 0)
    model.outs.append(loss.detach())


@each(maxlen=range(1, 9), verify=["off", "geometric"])
def test_a_deque_that_is_full_sooner_or_later(maxlen: int, verify: str) -> None:
    """Full from the captured call on, it drops an item there, and dropped none in the traces."""
    make = partial(updating_rig, _oldest, attributes(outs=partial(deque, maxlen=maxlen), mean=lambda: torch.zeros(())))
    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig, verify=verify)
    assert_same_runs(expected, drive(rig, step))
    assert step.stats.replayed >= len(rig.calls) - 12, step.stats


def test_a_counter_reset_between_calls() -> None:
    """A counter that the host sets goes on from there."""

    def reset(model: Any, index: int) -> None:
        if index % 6 == 5:
            model.calls = 100 * index

    assert_equals_eager(partial(updating_rig, _count, attributes(calls=0), reset))


def test_a_garbage_collection_is_no_part_of_the_step() -> None:
    """Collections come in the middle of a step, and whoever listens to them (a profiler, a test library) runs code."""
    heard = {"start": 0, "stop": 0}

    def listen(phase: str, facts: dict[str, int]) -> None:
        heard[phase] += len(facts)

    threshold = gc.get_threshold()
    gc.callbacks.append(listen)
    gc.set_threshold(1)
    try:
        assert_equals_eager(partial(updating_rig, _append, attributes(outs=list)))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(listen)
    assert heard["stop"]


def _prints(model: Any, x: Tensor, loss: Tensor) -> None:
    print("a step")  # noqa: T201


@pytest.mark.parametrize("allow", [(), ("print",)])
def test_a_step_that_prints_says_so_once(allow: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """A replay runs no Python: the line is named, and nothing else is lost."""
    rig = build(partial(updating_rig, _prints, attributes()))
    expected = drive(rig, rig.step)
    rig = build(partial(updating_rig, _prints, attributes()))
    step = managed(rig, allow=allow)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same_runs(expected, drive(rig, step))
    texts = [str(warning.message) for warning in caught if "prints at" in str(warning.message)]
    where = r"the step prints at test_host_effects\.py:\d+ in _prints: "
    pattern = (
        rf"^graphplan leaves something out of replays: {where}.*so only eager calls print\. "
        r"Return the value and print it"
    )
    assert [bool(re.search(pattern, text)) for text in texts] == ([] if allow else [True])
    assert ("left out of replays: the step prints at" in step.report()) is not bool(allow)
    eager = step.stats.calls - step.stats.replayed + step.stats.verified
    assert capsys.readouterr().out.count("a step") == len(rig.calls) + eager


_LOGGER = logging.getLogger(__name__)


def _logs(model: Any, x: Tensor, loss: Tensor) -> None:
    model.calls += 1
    _LOGGER.debug("call %d: %s", model.calls, loss.item())


def test_a_record_that_no_handler_writes(equals_eager: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is never made, so nothing reads the numbers in it."""
    monkeypatch.setattr(_LOGGER, "level", logging.DEBUG)
    monkeypatch.setattr(_LOGGER, "propagate", False)
    monkeypatch.setattr(_LOGGER, "handlers", [logging.NullHandler()])
    step = equals_eager(partial(updating_rig, _logs, attributes(calls=0)), allow=("logging",))
    assert step.stats.replayed > 0


class _Keyed:
    """Works out a key of its own in each call, tuples within a tuple."""

    def __init__(self) -> None:
        self.size = 2
        self.found: Any = None

    def key(self) -> int:
        self.found = (self.size, (self.size, 3))
        return int(self.found[1][1])


def test_a_tuple_within_a_tuple_that_each_step_assigns() -> None:
    """A replay assigns the outermost one; nothing can be assigned within it."""
    keyed = _Keyed()
    call = graph_step(lambda x: x * keyed.key(), backend="tape", warmup_steps=1)
    for _ in range(12):
        assert torch.equal(call(torch.ones(2)), torch.full((2,), 3.0))
        assert keyed.found == (2, (2, 3))
    assert call.stats.replayed > 4


class _Classes(nn.Linear):
    """Keeps how many classes a batch has: a value that each batch decides, and that the next step replaces."""

    present: Any = 4

    def mean_over(self, x: Tensor, classes: Tensor) -> Tensor:
        self.present = len(torch.bincount(classes, minlength=4).nonzero())
        return self(x).sum() / self.present


def _replace(layer: _Classes, x: Tensor, classes: Tensor) -> Tensor:
    return layer.mean_over(x, classes)


def _compute_before(layer: _Classes, x: Tensor, classes: Tensor) -> Tensor:
    return x.sum() * layer.present + layer.mean_over(x, classes)


def _branch_before(layer: _Classes, x: Tensor, classes: Tensor) -> Tensor:
    return layer.mean_over(x, classes) if layer.present > 2 else -layer.mean_over(x, classes)


def _replace_from_outside(layer: _Classes, x: Tensor, classes: Tensor) -> Tensor:
    layer.present = len(torch.bincount(classes, minlength=4).nonzero())
    return layer(x).sum() / layer.present


@each(step=[_replace, _compute_before, _branch_before, _replace_from_outside], changed=[False, True])
def test_a_number_that_each_step_replaces(step: Callable[..., Tensor], changed: bool) -> None:
    """Each program leaves its own constant there, whatever was there before the step, and whoever has set that."""
    layer = _Classes(4, 2)
    call = graph_step(partial(step, layer), owners={"layer": layer}, backend="tape", warmup_steps=1, verify="off")
    twin = copy.deepcopy(layer)
    for number in range(60):
        x, classes = torch.randn(4, 4), torch.tensor([0, 1, 2, 1]) % (3 if number % 3 or number % 5 == 4 else 2)
        if changed and number % 7 == 6:
            layer.present = twin.present = number
        assert torch.equal(call(x, classes), step(twin, x, classes))
        assert layer.present == twin.present
    assert call.stats.replayed > 25
