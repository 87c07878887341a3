"""Lists and deques that a step appends to: replays go on with that, whatever way the code has to them, and a step that
also looks at what it makes longer is refused by name.

Checks are off in here, so that it is the refusal alone that keeps a length from being frozen.
"""

from __future__ import annotations

import sys
from collections import ChainMap, UserDict, defaultdict, deque
from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import HostScalarError, SkipReason, graph_step
from graphplan.observe.container_uses import container_uses
from tests.models import attributes, updating_rig
from tests.twins import SECOND_TRACE, Rig, assert_equals_eager, assert_refused, assert_same_as_eager, line_of

Update = Callable[[Any, Tensor, Tensor], Any]
MANY = 10
"""As many items as no list has before the first replay."""


class _Kept:
    """Has lists of its own, in a dictionary and in an object, and methods that append to them."""

    def __init__(self) -> None:
        self.hist: dict[str, list[Tensor]] = {"loss": [], "other": []}
        self.log = SimpleNamespace(losses=[])
        self.plain: list[Tensor] = []
        self.stage = "loss"

    def directly(self, x: Tensor, loss: Tensor) -> None:
        self.plain.append(loss)
        self.plain.extend([loss, x.mean()])
        self.plain += [x.sum()]

    def by_key(self, x: Tensor, loss: Tensor) -> None:
        for name, value in {"loss": loss, "sum": x.sum()}.items():
            if name not in self.hist:
                self.hist[name] = []
            self.hist[name].append(value)
        self.hist[f"{self.stage}" if self.stage else "none"].append(loss)
        self.hist["other"] += [loss]

    def by_default(self, x: Tensor, loss: Tensor) -> None:
        self.hist.setdefault("late", []).append(loss)

    def by_alias(self, x: Tensor, loss: Tensor) -> None:
        losses = self.hist["loss"]  # culprit
        losses.append(loss)

    def by_method(self, x: Tensor, loss: Tensor) -> None:
        add = self.plain.append
        add(loss)

    def by_object(self, x: Tensor, loss: Tensor) -> None:
        with torch.no_grad():
            try:
                self.log.losses.append(loss * 2)
            except ValueError:
                self.log.losses.clear()

    def first(self, x: Tensor, loss: Tensor) -> Tensor:
        self.plain.append(loss)
        return self.plain[0] + loss


def _by(name: str) -> tuple[Update, Callable[[nn.Module], object]]:
    def update(model: Any, x: Tensor, loss: Tensor) -> Any:
        return getattr(model.kept, name)(x, loss.detach())

    return update, attributes(kept=_Kept)


@pytest.mark.parametrize("name", ["directly", "by_key", "by_default", "by_method", "by_object", "first"])
def test_what_is_only_appended_to(name: str) -> None:
    """Each replay appends, whichever way the code came to the list."""
    assert_equals_eager(partial(updating_rig, *_by(name)), verify="off")


def test_a_list_that_gets_another_name() -> None:
    """Nothing follows a variable of the function's own to what is done with it."""
    text = rf"reads len\(model\.kept\.hist\.loss\), directly or indirectly, at {line_of(_Kept.by_alias)}"
    rig = partial(updating_rig, *_by("by_alias"))
    assert_refused(rig, HostScalarError, text, done=SECOND_TRACE + 2, verify="off")


@pytest.mark.parametrize("kind", [list, deque])
def test_a_list_that_a_variable_has(kind: Callable[[], Any]) -> None:
    """A variable of a function around the step, alone and within a dictionary."""

    def make() -> Rig:
        history, log = kind(), defaultdict(kind)

        def update(model: Any, x: Tensor, loss: Tensor) -> None:
            history.append(loss.detach())
            log["loss"].append(loss.detach())

        rig = updating_rig(update, attributes())
        rig.extra = {"history": history, "log": log}
        return rig

    assert_equals_eager(make, verify="off")


def _record() -> dict[str, Any]:
    """A list beside a value that the step reads, and one that has two keys."""
    twice: list[Tensor] = []
    return {"mean": torch.zeros(()), "loss": [], "twice": twice, "same": twice}


def _beside(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    mean = model.hist["mean"]
    model.hist["mean"] = 0.9 * model.hist.get("mean") + 0.1 * loss.detach()
    model.hist["loss"].append(loss.detach())
    return loss * mean


def _by_other_key(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    model.hist["twice"].append(loss.detach())
    return loss * 2 if len(model.hist["same"]) > MANY else loss * 1


def _by_any_key(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    model.hist["loss"].append(loss.detach())
    return loss * 2 if len(model.hist["lo" + "ss" * bool(model.hist)]) > MANY else loss * 1


def test_a_list_beside_what_the_step_reads() -> None:
    """What lies at another key of the dictionary tells nothing of the list."""
    assert_equals_eager(partial(updating_rig, _beside, attributes(hist=_record)), verify="off")


@pytest.mark.parametrize("look", [_by_other_key, _by_any_key], ids=lambda look: look.__name__)
def test_a_list_that_another_key_leads_to(look: Update) -> None:
    """One that is spelt otherwise, for the same list, and one that is not spelt."""
    make = partial(updating_rig, look, attributes(hist=_record))
    text = (
        r"reads len\(model\.hist\.(loss|twice|same)\), directly or indirectly, at .*, but the step "
        r"itself appends to that list"
    )
    assert_refused(make, HostScalarError, text, done=SECOND_TRACE + 2, verify="off")


_RARE: list[tuple[int, float]] = []
"""What a step logs now and then."""


def _logging_rig(history: list[Any], text: Callable[[int, Tensor], object], scale: Callable[[], int]) -> Rig:
    """A step that logs its loss in each fourth call, into a list of a variable around it and into a global one."""
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    history.clear()
    _RARE.clear()

    def step(x: Tensor, number: int) -> Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().mean() * scale()
        loss.backward()
        optimizer.step()
        if number % 4 == 0:
            history.append(text(number, loss))
            _RARE.append((number, loss.item()))
        return loss

    calls = [(torch.randn(2, 4), number) for number in range(60)]
    return Rig(step, {"layer": layer, "optimizer": optimizer}, calls, extra={"history": history, "rare": _RARE})


@pytest.mark.parametrize("text", [lambda _, loss: loss.item(), lambda _, loss: f"{loss:.3f}"], ids=["number", "text"])
@pytest.mark.filterwarnings("ignore:graphplan runs such calls eagerly")
def test_lists_that_another_way_through_the_code_appends_to(text: Callable[[int, Tensor], object]) -> None:
    """Ways that append nothing do not depend on how long the lists are."""
    step = assert_same_as_eager(lambda: _logging_rig([], text, lambda: 1), on_failure="eager", verify="off")
    assert step.stats.recaptured == 0
    assert step.stats.replayed >= 35
    assert SkipReason.GUARD not in step.stats.skipped


@pytest.mark.filterwarnings("ignore:graphplan runs such calls eagerly")
def test_a_list_that_another_way_appends_to_and_each_looks_at() -> None:
    """Its length is compared before each replay."""

    history: list[float] = []
    rig = partial(_logging_rig, history, lambda _, loss: loss.item(), lambda: 2 if len(history) > MANY else 1)
    step = assert_same_as_eager(rig, on_failure="eager", verify="off")
    assert "history had the length" in step.report()


_BOTH = (_RARE, 1)
_COUNT = partial(len, _RARE)
_LENGTH = _RARE.__len__
_CHAIN = ChainMap({"rare": _RARE})


@cache
def _cached() -> list[tuple[int, float]]:
    return _RARE


def _by_default(items: list[Any] = _RARE) -> int:
    return len(items)


def _by_keyword(*, items: list[Any] = _RARE) -> int:
    return len(items)


WAYS: dict[str, Callable[[], int]] = {
    "a default": _by_default,
    "a keyword's default": _by_keyword,
    "a partial": lambda: _COUNT(),
    "a tuple": lambda: len(_BOTH[0]),
    "a method": lambda: _LENGTH(),
    "a cache": lambda: len(_cached()),
    "an object of a library": lambda: len(_CHAIN["rare"]),
    "the namespace": lambda: len(globals()["_RARE"]),
    "a name that is spelt": lambda: len(getattr(sys.modules[__name__], "_RARE")),  # noqa: B009
    "a name that is computed": lambda: len(getattr(sys.modules[__name__], "_rare".upper())),
    "a getter": lambda: len(attrgetter("_RARE")(sys.modules[__name__])),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:graphplan runs")
def test_a_list_that_code_reads_by_another_name(way: str) -> None:
    """The list is made longer outside the step, once, and in a way through its code that is rarely taken."""
    _cached()

    def make() -> Rig:
        rig = _logging_rig([], lambda _, loss: loss.item(), lambda: 2 if WAYS[way]() > 3 * MANY else 1)
        rig.after = lambda index: _RARE.extend([(index, 0.0)] * 3 * MANY) if index == 25 else None
        return rig

    assert_same_as_eager(make, on_failure="eager", verify="off")


class _Private:
    """Has lists with names that the compiler changes, and looks at one of them."""

    def __init__(self) -> None:
        self.__all: list[Tensor] = []
        self.__seen: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        self.__all.append(loss)

    def add_and_look(self, loss: Tensor) -> bool:
        self.__seen += [loss]
        return len(self.__seen) > MANY


def _private(method: str) -> tuple[Update, Callable[[nn.Module], object]]:
    return lambda model, x, loss: x * (2 if getattr(model.log, method)(loss.detach()) else 1), attributes(log=_Private)


def test_lists_with_private_names() -> None:
    assert_equals_eager(partial(updating_rig, *_private("add")), verify="off")
    text = (
        r"reads len\(model\.log\._Private__seen\), directly or indirectly, at .*, but the step "
        r"itself appends to that list"
    )
    rig = partial(updating_rig, *_private("add_and_look"))
    assert_refused(rig, HostScalarError, text, done=SECOND_TRACE + 2, verify="off")


NO_SOURCE = """
def appends(model, x, loss):
    model.seen.append(loss.detach())

def looks(model, x, loss):
    model.seen.append(loss.detach())
    return loss * 2 if len(model.seen) > 10 else loss * 1
"""


def test_code_without_source() -> None:
    space: dict[str, Any] = {}
    exec(compile(NO_SOURCE, "<nowhere>", "exec"), space)
    prepare = attributes(seen=list)
    assert_equals_eager(partial(updating_rig, space["appends"], prepare), verify="off")
    text = r"reads len\(model\.seen\), directly or indirectly, at .*, but the step itself appends to that list"
    rig = partial(updating_rig, space["looks"], prepare)
    assert_refused(rig, HostScalarError, text, done=SECOND_TRACE + 2, verify="off")


class _Other:
    """Has a list that is called as the model's is, and looks at that."""

    def __init__(self) -> None:
        self.seen = [1.0, 2.0]

    def size(self) -> int:
        return len(self.seen)


def test_a_list_of_another_object_that_has_the_same_name() -> None:
    """What a method asks of its own object says nothing about the model's list."""

    def update(model: Any, x: Tensor, loss: Tensor) -> Tensor:
        model.seen.append(loss.detach())
        return x * model.other.size()

    assert_equals_eager(partial(updating_rig, update, attributes(seen=list, other=_Other)), verify="off")


def _alias(model: Any, x: Tensor, loss: Tensor) -> Any:
    losses = model.hist["loss"]  # culprit
    losses.append(loss.detach())
    return loss * 2 if len(losses) > MANY else loss * 1


def _held(model: Any, x: Tensor, loss: Tensor) -> Any:
    seen = model.seen  # culprit
    seen.append(loss.detach())
    return loss * 2 if len(seen) > MANY else loss * 1


def _by_key(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.hist["loss"].append(loss.detach())
    return loss * 2 if len(model.hist["loss"]) > MANY else loss * 1  # culprit


def _in_a_sum(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.hist["loss"].append(loss.detach())
    return loss * 2 if sum(len(v) for v in model.hist.values()) > MANY else loss * 1  # culprit


def _dunder(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.seen.append(loss.detach())
    return loss * 2 if model.seen.__len__() > MANY else loss * 1  # culprit


def _slice(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.seen.append(loss.detach())
    return loss * 2 if model.seen[MANY:] else loss * 1  # culprit


def _truth(model: Any, x: Tensor, loss: Tensor) -> Any:
    scale = 1 if model.seen else 2  # culprit
    model.seen.append(loss.detach())
    return loss * scale


def _enumerated(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.seen.append(loss.detach())
    return loss * 2 if max(i for i, _ in enumerate(model.seen)) > MANY else loss * 1  # culprit


def _counted(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.seen.append(loss.detach())
    return loss * 2 if sum(1 for _ in model.seen) > MANY else loss * 1  # culprit


def _looped(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.seen.append(loss.detach())
    count = 0
    for _ in model.seen:  # culprit
        count += 1
    return loss * 2 if count > MANY else loss * 1


def _joined(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.seen.append("a")
    return loss * 2 if "a" * MANY in "".join(model.seen) else loss * 1  # culprit


def _by_name(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.seen.append(loss.detach())
    return loss * 2 if len(getattr(model, "seen")) > MANY else loss * 1  # noqa: B009  # culprit


def _compared(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.seen.append(1)
    return loss * 2 if model.seen == [1] * MANY else loss * 1  # culprit


def _tail(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.seen.append(1.0)
    return loss * sum(model.seen[-MANY:])  # culprit


def _size_of(items: Any) -> int:
    return len(items)


def _passed_on(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.hist["loss"].append(loss.detach())
    return loss * 2 if _size_of(model.hist["loss"]) > MANY else loss * 1  # culprit


def _cut(model: Any, x: Tensor, loss: Tensor) -> None:
    model.seen.append(loss.detach())
    del model.seen[:-MANY]  # culprit


def _cut_by_assignment(model: Any, x: Tensor, loss: Tensor) -> None:
    model.seen.append(loss.detach())
    model.seen[:-MANY] = []  # culprit


def _cut_in_a_dictionary(model: Any, x: Tensor, loss: Tensor) -> None:
    model.hist["loss"].append(loss.detach())
    for values in model.hist.values():  # culprit
        del values[MANY:]


def _by_name_or_else(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.seen.append(loss.detach())
    return loss * 2 if len(getattr(model, "other", model.seen)) > MANY else loss * 1  # culprit


def _shadowed(model: Any, x: Tensor, loss: Tensor) -> Any:
    seen = [seen for seen in [model.seen]]  # noqa: C416  # culprit
    model.seen.append(loss.detach())
    return loss * 2 if len(seen[0]) > MANY else loss * 1


def _missed(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.seen.append(loss.detach())
    try:
        return loss * 2 if model.seen[MANY] is not None else loss  # culprit
    except IndexError:
        return loss * 1


LOOKS_IN_A_DICTIONARY: list[Update] = [_alias, _by_key, _in_a_sum, _passed_on, _cut_in_a_dictionary]
LOOKS: list[Update] = [_held, _dunder, _slice, _truth, _enumerated, _counted, _looped, _joined, _by_name, _compared]
LOOKS += [_cut, _cut_by_assignment, _missed, _by_name_or_else, _shadowed]


@pytest.mark.parametrize("look", [*LOOKS, *LOOKS_IN_A_DICTIONARY], ids=lambda look: look.__name__)
@pytest.mark.crossed(2)
def test_what_shows_how_long_a_list_is(look: Update) -> None:
    """However the code comes to know: list, line and what to do instead."""
    path = r"len\(model\.hist\.loss\)" if look in LOOKS_IN_A_DICTIONARY else r"len\(model\.seen\)"
    make = partial(updating_rig, look, attributes(seen=list, hist=lambda: {"loss": []}))
    text = rf"reads {path}, directly or indirectly, at {line_of(look)}.*, but the step itself appends to that list"
    fix = r"Count in a tensor, append after the step, or, .*, pass allow=\('len\(model\."
    # That there are more tensors is first taken for the work of somebody else between the steps, and traced again.
    done = SECOND_TRACE + (0 if look in (_joined, _compared) else 2)
    assert_refused(make, HostScalarError, text, fix, done=done, verify="off")


def test_the_last_numbers_of_a_list() -> None:
    """What an operator gets of them differs from step to step."""
    make = partial(updating_rig, _tail, attributes(seen=list))
    assert_refused(make, HostScalarError, r"test_grown_lists\.py", done=SECOND_TRACE, verify="off")


def _returns_it(model: Any, x: Tensor, loss: Tensor) -> None:
    _seen_of(model).append(loss.detach())


def _seen_of(model: Any) -> Any:
    return model.seen  # culprit


def test_a_list_that_is_allowed() -> None:
    """A function gives the list away, and nobody can tell what is done with it: its length is declared harmless."""
    make = partial(updating_rig, _returns_it, attributes(seen=list))
    text = rf"reads len\(model\.seen\), directly or indirectly, at {line_of(_seen_of)}"
    assert_refused(make, HostScalarError, text, done=SECOND_TRACE + 2, verify="off")
    assert_equals_eager(make, verify="off", allow=("len(model.seen)",))


def test_a_list_in_a_dictionary_that_two_owners_have() -> None:
    """Any of its names leads to it."""
    log: dict[str, list[Tensor]] = {"loss": []}
    x = torch.ones(3)

    def step(x: Tensor) -> Tensor:
        log["loss"].append(x * 2)
        return x * 2 if len(holder.log["loss"]) > MANY else x * 1

    holder = SimpleNamespace(log=log)
    call = graph_step(step, owners={"held": log}, backend="tape", warmup_steps=1, verify="off")
    with pytest.raises(
        HostScalarError,
        match=r"reads len\(\w+\.loss\), directly or indirectly, at .*, but the step itself appends to that list",
    ):
        for _ in range(8):
            call(x)


def _unusual(items: Any, other: Any) -> Any:
    first, *_ = items[0], other
    items["a"], items["b"] = other, other
    chosen = items if other else first
    with other as items["c"]:
        return {**other, "n": [*chosen]}


@pytest.mark.parametrize("code", [_unusual.__code__, _Kept.by_key.__code__, test_a_list_that_is_allowed.__code__])
def test_code_of_any_kind_is_read(code: Any) -> None:
    """Variables of the function's own are looked at by nobody."""
    assert not any(look.name in ("items", "other") for look in container_uses(code))


def _append_dict(model: Any, x: Tensor, loss: Tensor) -> None:
    pair = {"pair": (x.mean(), "a"), "sums": [x.sum()]}
    model.seen.append({"loss": loss.detach(), "size": len(x), "inner": pair})


def _append_tuple(model: Any, x: Tensor, loss: Tensor) -> None:
    model.seen.append((loss.detach(), {"size": len(x)}, [x.sum()]))


def _append_deep(model: Any, x: Tensor, loss: Tensor) -> None:
    model.hist["loss"].append({"loss": loss.detach(), "size": len(x)})


def _clear(model: Any, index: int) -> None:
    if index % 10 == 9:
        model.seen.clear()
        model.hist["loss"].clear()


@pytest.mark.parametrize("append", [_append_dict, _append_tuple, _append_deep])
def test_items_that_hold_more_are_cleared(append: Update) -> None:
    """An epoch's end clears the list: what lay in its items was never looked at, and is no reason to capture anew."""
    make = partial(updating_rig, append, attributes(seen=list, hist=lambda: {"loss": []}), _clear)
    assert_equals_eager(make, verify="off")


def _appends(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    model.seen.append(loss.detach())
    return x * model.settings["scale"]


def _looks_within(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    model.seen.append({"scale": 2.0})
    return x * model.seen[0]["scale"]


@pytest.mark.parametrize("update", [_appends, _looks_within])
def test_an_item_that_the_step_reads(update: Update) -> None:
    """There, or under another name: what lies in it is compared before each replay."""

    def prepare(model: Any) -> None:
        model.seen = [{"scale": 2.0}]
        if update is _appends:
            model.settings = model.seen[0]

    def change(model: Any, index: int) -> None:
        if index == 9:
            model.seen[0]["scale"] = 3.0

    assert_equals_eager(partial(updating_rig, update, prepare, change), verify="off", captured=2, replayed=10)


class _Shown(dict[str, Any]):
    """A dictionary that shows its keys as attributes."""

    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("kind", [_Shown, UserDict])
@pytest.mark.parametrize("looks", [True, False])
def test_a_list_in_what_stands_for_a_dictionary(kind: Callable[..., Any], looks: bool) -> None:
    """It is called as the dictionary is, or by its key."""

    def update(model: Any, x: Tensor, loss: Tensor) -> Tensor:
        model.hist["loss"].append(loss.detach())
        return loss * 2

    def looking(model: Any, x: Tensor, loss: Tensor) -> Tensor:
        model.hist["loss"].append(loss.detach())
        losses = model.hist.loss if kind is _Shown else model.hist["loss"]
        return loss * 2 if len(losses) > MANY else loss * 1

    make = partial(updating_rig, looking if looks else update, attributes(hist=lambda: kind(loss=[])))
    if not looks:
        assert_equals_eager(make, verify="off")
        return
    text = (
        r"reads len\(model\.hist(\.data)?\.loss\), directly or indirectly, at .*, but the step "
        r"itself appends to that list"
    )
    assert_refused(make, HostScalarError, text, done=SECOND_TRACE + 2, verify="off")
