"""Numbers that a step reads with ``item()`` and only keeps, logs or returns: read after each replay."""

from __future__ import annotations

import copy
import json
import math
import operator
import pickle
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphplan import HostEffectError, HostScalarError, HostSyncError, OutputError, SkipReason, compile_plan, graphed
from graphplan.tensors.deferred import DeferredNumber, HostCopy, form_of, on_device, value_of
from tests.lightning.parts import assert_fit_equals_eager, with_step
from tests.lightning.rows_of_parts import Manual
from tests.models import keeping_rig
from tests.twins import (
    Rig,
    assert_falls_back,
    assert_refused,
    assert_same_as_eager,
    build,
    drive,
    line_of,
    managed,
    saved_traces,
)

CALLS = 16
BEFORE = 6
"""Calls before the first replay: three eager, two traced, one captured."""
Body = Callable[[Any, Tensor, Tensor], Any]


def rig_of(body: Body, after: Callable[[Any, int], object] = lambda model, index: None) -> Rig:
    """A training step that returns what ``body(model, loss, hits)`` does."""

    def hits(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Any:
        return body(model, loss, (scores.argmax(1) == y).float())

    kept: dict[str, Any] = {"total": 0.0, "seen": 0, "correct": 0, "last": 0.0, "stats": {"loss": 0.0}}
    return keeping_rig(hits, CALLS, after, history=[], recent=deque(maxlen=4), **kept)


def returns(model: Any, loss: Tensor, hits: Tensor) -> Any:
    return loss.item()


def returns_several(model: Any, loss: Tensor, hits: Tensor) -> Any:
    return {"loss": loss.item(), "hits": hits.sum().item(), "all": (hits[0].item(), [hits.long().sum().item(), 3])}


def computes(model: Any, loss: Tensor, hits: Tensor) -> Any:
    value, count = loss.item(), hits.long().sum().item()
    done = True
    return [
        count / 6, 100 * value, value**2, value**0.5, -value, +value, abs(value - 1), value // 0.1, value % 0.1,
        1 / value, round(value, 3), round(value), count + done, count * 2 - 1, count**2, 7 // (count + 1), done + value,
        2 - value, 10 % (count + 1), round(count, 1),
    ]  # fmt: skip


def computes_in_c(model: Any, loss: Tensor, hits: Tensor) -> Any:
    value, count = loss.item(), hits.long().sum().item()
    return [
        math.exp(value), math.sqrt(value + 1), math.log1p(count), math.ceil(value * 3), math.trunc(-value * 9),
        math.pow(value, 2), math.atan2(count, value), math.hypot(3, value), math.exp(value) / 2 + 1,
        round(math.exp(value), 1), math.exp(True + value),
    ]  # fmt: skip


def norm_of_gradients(model: Any, loss: Tensor, hits: Tensor) -> Any:
    total = 0.0
    for parameter in model.parameters():
        total += parameter.grad.detach().norm(2).item() ** 2
    return total ** (1.0 / 2)


def sums(model: Any, loss: Tensor, hits: Tensor) -> Any:
    model.total += loss.item() * 6
    model.correct += hits.sum().item()
    model.seen += 6


def keeps_the_last(model: Any, loss: Tensor, hits: Tensor) -> Any:
    model.last = loss.item()
    return loss


def appends(model: Any, loss: Tensor, hits: Tensor) -> Any:
    model.history.append((loss.item(), {"half": loss.item() / 2}, [hits.sum().item()]))
    model.recent.append(loss.item())


def reads_parameters(model: Any, loss: Tensor, hits: Tensor) -> Any:
    before = model.layer.bias[0].item()
    with torch.no_grad():
        model.layer.bias.mul_(0.5)
    return before, model.layer.bias[0].item()


def reads_between_changes(model: Any, loss: Tensor, hits: Tensor) -> Any:
    total, found = torch.zeros_like(loss), []
    for _ in range(3):
        total += loss.detach()
        found.append(total.item())
    return found


def passes_on(model: Any, loss: Tensor, hits: Tensor) -> Any:
    holder = SimpleNamespace(values=[loss.item()])
    holder.values.append(holder.values[0] + 1)
    return holder.values[0] + holder.values[1], isinstance(holder.values[1], float), holder.values[0] is None


def makes_lists(model: Any, loss: Tensor, hits: Tensor) -> Any:
    where = {"device": loss.device}
    pair = torch.tensor([loss.item(), 2], **where)
    return pair, torch.as_tensor((hits.sum().item(), 2**40), **where), torch.tensor([loss.item() / 3], **where)


def asserts_and_returns(model: Any, loss: Tensor, hits: Tensor) -> Any:
    value = loss.item()
    if not math.isfinite(value):
        raise ValueError("the loss is not finite")
    return value


def divides_where_code_catches_others(model: Any, loss: Tensor, hits: Tensor) -> Any:
    try:
        with suppress(StopIteration, KeyError):
            return loss.item() / (hits.sum().item() + 1)
    except (LookupError, AttributeError):
        return 0.0


ENGAGED: list[Body] = [
    returns, returns_several, computes, computes_in_c, norm_of_gradients, divides_where_code_catches_others, sums,
    keeps_the_last, appends,
    reads_parameters, reads_between_changes, passes_on, makes_lists, asserts_and_returns,
]  # fmt: skip


@pytest.mark.parametrize("body", ENGAGED, ids=lambda body: body.__name__)
def test_a_number_that_is_only_kept_is_read_after_the_replay(body: Body, equals_eager: Any) -> None:
    """Results, attributes and lists have eager's numbers, of eager's types, in each call."""
    step = equals_eager(partial(rig_of, body), exact=True)
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - BEFORE + saved_traces(step.stats))
    assert step.stats.verified > 0


def test_a_sum_goes_on_from_what_the_host_puts_there(equals_eager: Any) -> None:
    """Between steps the number is the host's: an epoch's sum begins anew."""

    def restart(model: Any, index: int) -> None:
        assert type(model.total) is float
        if index % 5 == 4:
            model.total = 0.0

    step = equals_eager(partial(rig_of, sums, restart), exact=True)
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - BEFORE + saved_traces(step.stats))


def test_a_sum_is_told_from_an_equal_factor() -> None:
    """Small numbers are one object each: what lies there is an operand of ``+=`` alone."""

    def adds(model: Any, loss: Tensor, hits: Tensor) -> Any:
        model.seen += 1 * model.stats["counted"].item()

    def begins(model: Any, index: int) -> None:
        model.stats["counted"].fill_(index >= BEFORE)
        if index <= BEFORE:
            model.seen = 1

    def make() -> Rig:
        rig = rig_of(adds, begins)
        rig.owners["model"].stats["counted"] = torch.zeros((), dtype=torch.int64)
        return rig

    assert assert_same_as_eager(make, verify="off").stats.replayed == CALLS - BEFORE


def test_numbers_survive_new_containers() -> None:
    """A list that is emptied, and an attribute's holder that is another one, are followed."""

    def empty(model: Any, index: int) -> None:
        if index == 10:
            model.history.clear()
            model.recent = deque(maxlen=4)

    assert assert_same_as_eager(partial(rig_of, appends, empty)).stats.replayed >= CALLS - BEFORE - 4


def test_the_plan_tells_of_them() -> None:
    """A plan lists what its replays read."""
    rig = build(partial(rig_of, sums))
    step = managed(rig)
    drive(rig, step)
    assert "computed: model.total" in str(step.plan)
    assert "counted: model.seen += 6" in str(step.plan)


def shows(model: Any, loss: Tensor, hits: Tensor) -> Any:
    return f"{loss.item():.3f}"  # culprit


def decides(model: Any, loss: Tensor, hits: Tensor) -> Any:
    if math.log1p(loss.item()) > 1.0:  # culprit
        return loss * 2
    return loss


def raises_to(model: Any, loss: Tensor, hits: Tensor) -> Any:
    return loss ** hits.sum().item()  # culprit


def rounds_in_c(model: Any, loss: Tensor, hits: Tensor) -> Any:
    return math.erf(loss.item())  # culprit


def counts_on(model: Any, loss: Tensor, hits: Tensor) -> Any:
    return len([0] * hits.long().sum().item())  # culprit


def catches(model: Any, loss: Tensor, hits: Tensor) -> Any:
    try:
        return loss.item() / hits.sum().item()  # culprit
    except ZeroDivisionError:
        return 0.0


def catches_what_c_raises(model: Any, loss: Tensor, hits: Tensor) -> Any:
    try:
        return math.exp(loss.item())  # culprit
    except OverflowError:
        return math.inf


def suppresses(model: Any, loss: Tensor, hits: Tensor) -> Any:
    with suppress(KeyError, ArithmeticError):
        return loss.item() / hits.sum().item()  # culprit
    return 0.0


def catches_what_is_in_a_variable(model: Any, loss: Tensor, hits: Tensor) -> Any:
    kind = ZeroDivisionError
    try:
        return loss.item() / hits.sum().item()  # culprit
    except (KeyError, kind):
        return 0.0


def catches_another_one_in_its_place(model: Any, loss: Tensor, hits: Tensor) -> Any:
    try:
        return _ratio(loss, hits)
    except KeyError:
        return 0.0


def _ratio(loss: Tensor, hits: Tensor) -> float:
    try:
        return loss.item() / hits.sum().item()  # culprit
    except ZeroDivisionError as error:
        raise KeyError("no hits") from error


NEEDED: list[Body] = [
    shows, decides, raises_to, rounds_in_c, counts_on, catches, catches_what_c_raises, suppresses,
    catches_what_is_in_a_variable, catches_another_one_in_its_place,
]  # fmt: skip


@pytest.mark.parametrize("body", NEEDED, ids=lambda body: body.__name__)
def test_a_number_whose_value_is_needed_refuses(body: Body) -> None:
    """The error names the line at which it is."""
    assert_refused(partial(rig_of, body), HostSyncError, r"_local_scalar_dense.*a replay would keep", line_of(body))
    assert_falls_back(partial(rig_of, body), SkipReason.HOST_SYNC, line_of(body))


def compares_with(function: Callable[[Any, Any], bool], other: Any) -> Body:
    def body(model: Any, loss: Tensor, hits: Tensor) -> Any:
        total, mean = hits.sum().item(), loss.item() * 2
        return loss * 2 if function(mean, other) or function(other, total) or function(total, mean) else loss * 3

    return body


COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


@pytest.mark.crossed(3)
@pytest.mark.parametrize("other", [1.0, 3, True, 1e300, 2**60, math.nan], ids=str)
@pytest.mark.parametrize("function", COMPARISONS, ids=lambda function: function.__name__)
def test_comparisons_are_branches(function: Callable[[Any, Any], bool], other: Any) -> None:
    """As Python compares a float with an integer: the step goes the way that it goes without replays."""
    make = partial(rig_of, compares_with(function, other))
    if other == 2**60:
        assert_refused(make, HostSyncError, r"_local_scalar_dense")
        return
    step = assert_same_as_eager(make, on_failure="eager")
    assert step.plan is None or step.plan.branches
    assert step.stats.replayed > 0 or step.stats.skipped[SkipReason.HOST_SYNC] > 0


LATEST: ContextVar[Any] = ContextVar("LATEST")


def hides(model: Any, loss: Tensor, hits: Tensor) -> Any:
    LATEST.set(loss.item())  # culprit
    return loss


def writes_json(model: Any, loss: Tensor, hits: Tensor) -> Any:
    return json.dumps({"loss": loss.item()})  # culprit


def asks_for_the_class(model: Any, loss: Tensor, hits: Tensor) -> Any:
    return type(loss.item()) is float, loss.item()  # culprit


MISUSED: list[Body] = [hides, writes_json, asks_for_the_class]


@pytest.mark.parametrize("body", MISUSED, ids=lambda body: body.__name__)
def test_a_number_that_cannot_be_followed_is_read_at_once(body: Body) -> None:
    """Code that needs a real number, or keeps one out of sight, gets it: the call is undone, and run again."""
    assert_falls_back(partial(rig_of, body), SkipReason.HOST_SYNC, line_of(body))


def summed(model: Any, loss: Tensor, hits: Tensor) -> Any:
    return sum([loss.item(), hits.sum().item(), loss.item() / 3])  # culprit


def test_sums_that_are_rounded_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on, ``sum()`` needs the values, and ``+`` does not."""
    monkeypatch.setattr("graphplan.trace.host_reads._SUMS_DIFFER", True)
    assert_falls_back(partial(rig_of, summed), SkipReason.HOST_SYNC, line_of(summed))
    stats = assert_same_as_eager(partial(rig_of, sums)).stats
    assert stats.replayed == CALLS - BEFORE + saved_traces(stats)


def compares_with_a_container(model: Any, loss: Tensor, hits: Tensor) -> Any:
    first = hits if type(hits) in (list, dict) else loss
    return first[0] if type(first) is tuple else first.item()


def compares_with_nothing(model: Any, loss: Tensor, hits: Tensor) -> Any:
    return None if isinstance(hits, type(None)) else loss.item()


def compares_with_a_layer(model: Any, loss: Tensor, hits: Tensor) -> Any:
    layers = list(model.children())
    return loss.item() if type(layers[0]) is not nn.Flatten or type(model.history) is float else None


def compares_with_a_tensor(model: Any, loss: Tensor, hits: Tensor) -> Any:
    value = loss.item()
    return value if type(hits.sum()) is Tensor else None


HARMLESS: list[Body] = [compares_with_a_container, compares_with_nothing, compares_with_a_layer, compares_with_a_tensor]


@pytest.mark.parametrize("body", HARMLESS, ids=lambda body: body.__name__)
def test_a_class_that_no_number_has(body: Body) -> None:
    """``type()`` is asked, but whatever is compared so, it is not taken for what stands for a number."""
    stats = assert_same_as_eager(partial(rig_of, body)).stats
    assert (stats.traced, stats.replayed) == (1, CALLS - BEFORE + 1)


def test_a_class_that_is_asserted() -> None:
    """After the call that was run again, the assertion is known."""

    def asserts(model: Any, loss: Tensor, hits: Tensor) -> Any:
        assert type(loss.item()) is float
        return loss

    step = assert_same_as_eager(partial(rig_of, asserts))
    assert step.stats.replayed >= CALLS - BEFORE - 3


def test_a_method_of_the_users_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has put another ``Tensor.item`` in place sees every read."""
    seen: list[int] = []
    plain = torch.Tensor.item
    mine = lambda self: (seen.append(1), plain(self))[1]  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "item", mine)
    assert_falls_back(partial(rig_of, returns), SkipReason.HOST_SYNC, "_local_scalar_dense")
    assert vars(torch.Tensor)["item"] is mine
    assert len(seen) == 2 * CALLS


def test_another_computation_in_each_call_is_refused() -> None:
    """A Python number that changes beside the one that is read would be frozen."""
    made: list[int] = []

    def scaled(model: Any, loss: Tensor, hits: Tensor) -> Any:
        made.append(1)
        return loss.item() * len(made)

    assert_refused(
        partial(rig_of, scaled), OutputError, r"computed from a value that the step reads from the device", done=4
    )


def test_one_result_that_is_a_number_in_one_call_only_is_refused() -> None:
    """A replay returns one structure."""
    counts = iter(range(100))

    def changes(model: Any, loss: Tensor, hits: Tensor) -> Any:
        return loss.item() * next(counts)

    with pytest.raises((OutputError, HostEffectError, HostScalarError), match=r"result|counts"):
        drive(rig := build(partial(rig_of, changes)), managed(rig))


@pytest.mark.parametrize("verify", ["geometric", "off"])
def test_an_attribute_that_is_averaged(verify: str) -> None:
    """Each replay goes on from the number that the one before has left."""

    def acts(model: Any, loss: Tensor, hits: Tensor) -> Any:
        model.total = model.total * 0.9 + loss.item() / (model.last + 2)
        model.last += 1
        return model.total * 2

    step = assert_same_as_eager(partial(rig_of, acts), verify=verify)
    assert step.stats.replayed == CALLS - BEFORE + saved_traces(step.stats)


def test_an_attribute_that_is_read_as_well_is_refused() -> None:
    """A replay would act on one value for ever."""

    def acts(model: Any, loss: Tensor, hits: Tensor) -> Any:
        shown = f"{model.total}"  # noqa: F841
        model.total = model.total * 0.9 + loss.item()

    pattern = r"the step's code uses model\.total at .*, which is \S+ before one step and \S+ before the next"
    assert_refused(partial(rig_of, acts), HostScalarError, pattern, done=4)


def test_an_attribute_that_is_read_in_some_calls_only_is_refused() -> None:
    """A replay does the same each time."""
    turns = iter([True, True, True, True, False] * 9)

    def sets(model: Any, loss: Tensor, hits: Tensor) -> Any:
        model.last = loss.item() if next(turns) else -loss.item()

    with pytest.raises((HostEffectError, HostScalarError), match=r"model\.last|turns"):
        drive(rig := build(partial(rig_of, sets)), managed(rig))


def test_an_attribute_that_each_step_makes_is_refused() -> None:
    """A replay puts the number where the one before lies."""

    def makes(model: Any, loss: Tensor, hits: Tensor) -> Any:
        model.made = loss.item()

    pattern = r"sets model\.made to .*, or model\.made does not exist before the step"
    assert_refused(
        partial(rig_of, makes, lambda model, index: delattr(model, "made")), HostEffectError, pattern, done=4
    )


def test_a_wrong_number_is_found_by_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are read are compared with eager's as the tensors that they come from are."""
    rig = build(partial(rig_of, sums))
    step = managed(rig, on_failure="eager", verify=1)
    for index, args in enumerate(rig.calls):
        if index == CALLS - 2:
            number = next(iter(step.programs[0].bindings._numbers.values()))
            monkeypatch.setattr(type(number), "value", lambda self, own=None: own + 1.0)
        if index == CALLS - 2:
            with pytest.warns(UserWarning, match=r"model\.total: .*by the replay"):
                step(*args)
            break
        step(*args)
    assert step.stats.verified > 0


def test_inference_returns_numbers() -> None:
    """A function of ``graphed`` may return numbers, too."""
    layer = nn.Linear(4, 2)
    fast = graphed(lambda x: (layer(x), layer(x).mean().item()))
    for _ in range(8):
        x = torch.randn(3, 4)
        with torch.no_grad():
            (found, mean), expected = fast(x), layer(x)
        assert torch.equal(found, expected)
        assert mean == expected.mean().item()
    assert fast.stats.replayed > 0


def test_a_plan_of_one_function_has_number_outputs() -> None:
    """``compile_plan`` says what is read."""
    plan = compile_plan(lambda x: x.sum().item(), torch.ones(3))
    assert [output.kind for output in plan.outputs] == ["read"]


def logs(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    hits = (self.net(batch[0]).argmax(1) == batch[1]).sum().item()
    self.log("loss", loss.item(), on_step=True, on_epoch=True)
    self.log_dict({"share": hits / len(batch[1]), "hits": hits, "scaled": 2 * loss.item() ** 2 - 1})
    self.log("root", (loss.item() + 1) ** 0.5, on_step=False, on_epoch=True, reduce_fx="max")
    self.log("rounded", abs(-loss.detach().double().item()))
    return loss


def logs_by_hand(self: Any, batch: Any, batch_idx: int) -> Any:
    self.log("perplexity", math.exp(logs(self, batch, batch_idx).item()))
    return Manual.training_step(self, batch, batch_idx)


@pytest.mark.parametrize("kind", [with_step(logs), with_step(logs_by_hand, Manual)], ids=["automatic", "manual"])
def test_logged_numbers_stay_on_the_device(kind: Any, tmp_path: Path) -> None:
    """``self.log`` of numbers: the rows, means and checkpoints of Lightning alone, with replays."""
    found = assert_fit_equals_eager(kind, tmp_path, replayed=4)
    assert (found.callback.stats.traced, found.callback.stats.captured) == (2, 2)


def test_a_norm_in_a_hook_is_logged(tmp_path: Path) -> None:
    """What a hook logs between backward and the optimizer's step."""

    def clip(self: Any, optimizer: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.log("norm", norm.item())

    kind = with_step(lambda self, batch, batch_idx: self.loss_of(batch), on_before_optimizer_step=clip)
    assert_fit_equals_eager(kind, tmp_path, replayed=4)


def test_a_result_beside_the_loss(tmp_path: Path) -> None:
    """Callbacks get the numbers that ``training_step`` returns."""

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        return {"loss": loss, "value": loss.item(), "half": loss.item() / 2}

    assert_fit_equals_eager(with_step(step), tmp_path, replayed=4)


# The class itself.


class Reading:
    """Reads at once whatever is needed."""

    def __init__(self, *, may_fail: bool = True) -> None:
        self.fails, self.computes = may_fail, False

    def read(self, tensor: Tensor, kind: type) -> Any:
        return tensor.item()

    def array_of(self, copy: HostCopy) -> Any:
        raise AssertionError

    def move(self, copy: HostCopy, function: Callable[[Tensor], Tensor], *, detaches: bool) -> Tensor:
        raise AssertionError

    def need(self, copy: HostCopy) -> None:
        raise AssertionError

    def tensor_of(
        self, number: DeferredNumber, dtype: torch.dtype, device: torch.device, *, is_operand: bool = False
    ) -> None:
        return None

    def may_fail(self) -> bool:
        return self.fails

    def is_summed(self) -> bool:
        return False


def number(value: Any, **options: Any) -> DeferredNumber:
    return DeferredNumber(type(value), Reading(**options), torch.tensor(value))


FUNCTIONS: list[Callable[[Any], Any]] = [
    bool, float, int, complex, hash, str, repr, math.trunc, math.floor, math.ceil, lambda n: f"{n:.2f}",
    lambda n: n < 3, lambda n: n <= 3, lambda n: n > 3, lambda n: n >= 3, lambda n: n == 3, lambda n: n != 3,
    lambda n: divmod(n, 2), lambda n: n.is_integer() if isinstance(n, float) else n.bit_length(), copy.copy,
    copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n)), lambda n: np.asarray([n, n]).tolist(),
    lambda n: float(np.float64(2.0) * n), lambda n: max(n, 2), lambda n: math.fsum([n, n]), lambda n: {n: 1},
    lambda n: 2**n, lambda n: n**-1, lambda n: (torch.ones(2) * n).tolist(), lambda n: torch.full((2,), n).tolist(),
    lambda n: torch.add(torch.ones(2), torch.ones(2), alpha=+n).tolist(), lambda n: (n * torch.ones(2)).tolist(),
]  # fmt: skip
WHOLE: list[Callable[[Any], Any]] = [
    operator.index, lambda n: n & 6, lambda n: n | 8, lambda n: n ^ 1, lambda n: n << 1, lambda n: n >> 1,
    lambda n: ~(n + 0), lambda n: list(range(n)), lambda n: [0, 1, 2, 3, 4, 5][n],
]  # fmt: skip


@pytest.mark.parametrize("value", [4, 2.5, True, -3])
def test_what_needs_a_value_gets_it(value: Any) -> None:
    """Every use of a deferred number gives what the number gives, or the same error."""
    functions = FUNCTIONS + (WHOLE if isinstance(value, int) and value > 0 else [])
    for function in functions:
        assert value_of(function(number(value))) == function(value)
        assert type(value_of(function(number(value)))) is type(function(value))


@pytest.mark.parametrize("value", [4, 2.5, True])
@pytest.mark.parametrize("other", [3, 0.75, False, number(1.5), number(2)], ids=str)
def test_arithmetic_is_pythons(value: Any, other: Any) -> None:
    """Sums and quotients have Python's values and classes, and errors come from what computes them."""
    for function in (operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod):
        for one, two in ((number(value), other), (other, number(value))):
            try:
                expected = function(value_of(one), value_of(two))
            except ZeroDivisionError:
                with pytest.raises(ZeroDivisionError, match=r"zero|modulo"):
                    value_of(function(one, two))
                continue
            found = function(one, two)
            assert isinstance(found, type(expected)) or type(expected) is bool
            assert value_of(found) == expected
            assert type(value_of(found)) is type(expected)


@pytest.mark.parametrize("value", [0.1, 7, -3.7e-5])
def test_values_on_the_device_are_pythons(value: Any) -> None:
    """What is logged is computed in float64 and rounded once, as Lightning rounds Python's number."""
    computations: list[Callable[[Any], Any]] = [
        lambda n: n, lambda n: n / 3, lambda n: 1 / n, lambda n: n * 0.1 + 2, lambda n: 5 - n, lambda n: abs(-n),
        lambda n: (n * n) ** 0.5, lambda n: (n * 1.0) ** 2, lambda n: (n + 1) // 2, lambda n: round(n, 2),
    ]  # fmt: skip
    for compute in computations:
        found = compute(number(value))
        source = value if isinstance(value, int) else torch.tensor(value).item()
        expected = compute(source)
        assert torch.equal(on_device(found, torch.float32), torch.tensor(expected, dtype=torch.float32))


def test_a_division_by_zero_is_no_infinity() -> None:
    """A logged quotient of two numbers that are read is Python's, with its exception."""
    with pytest.raises(ZeroDivisionError, match=r"division by zero"):
        on_device(number(1.0) / number(0.0), torch.float32)


def test_what_may_fail_is_computed_at_once_where_code_catches_that() -> None:
    """Otherwise the exception would come where no handler is."""
    for fail in (lambda n: 1 / n, lambda n: 1 // n, lambda n: n % n, lambda n: n / 0, lambda n: (n + 1e200) ** 9):
        assert type(fail(number(0.0))) is DeferredNumber
        with pytest.raises(ArithmeticError, match=r"zero|modulo|out of range"):
            fail(number(0.0, may_fail=False))
    assert round(number(1.25, may_fail=False), 1) == 1.2
    assert type(number(1.0, may_fail=False) / 2) is DeferredNumber


def test_long_sums_are_no_recursion() -> None:
    """The norm of ten thousand gradients is one number."""
    total: Any = 0.0
    for _ in range(10_000):
        total = total + number(0.5)
    assert value_of(total) == 5000.0
    form, read = form_of(total)
    assert form.compute([0.25] * len(read)) == 2500.0
    assert repr(form) == "a number that is read from the device"
