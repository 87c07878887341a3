"""Steps whose Python effects, operators, generators or results differ from step to step: refused by name."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from graphplan import ControlFlowError, GeneratorSeekError, HostEffectError, HostScalarError, OutputError, SkipReason
from tests.models import attributes, updating_rig
from tests.twins import (
    LAST_TRACE,
    SECOND_TRACE,
    WARMUP,
    Rig,
    assert_equals_eager,
    assert_falls_back,
    assert_refused,
    assert_same_as_eager,
    line_of,
)


def doubling(model: Any, x: Tensor, loss: Tensor) -> None:
    model.weird *= 2


def irregular(model: Any, x: Tensor, loss: Tensor) -> None:
    model.weird[len(model.weird) ** 2] = "seen"


def appending_numbers(model: Any, x: Tensor, loss: Tensor) -> None:
    model.weird.append(7 * len(model.weird) ** 2)


def renaming(model: Any, x: Tensor, loss: Tensor) -> None:
    model.weird = model.weird + "x"


class Kept(NamedTuple):
    """Numbers by name, under a name."""

    name: str
    numbers: dict[str, Tensor]


def keeping(model: Any, x: Tensor, loss: Tensor) -> None:
    name = model.weird[0].name + "x" if model.weird else "x"
    model.weird = [Kept(name, {"drawn": x[:, :1] + 1, "size": torch.tensor(x.shape)})]


EFFECTS: dict[Callable[..., None], Any] = {
    doubling: 3,
    irregular: dict,
    appending_numbers: list,
    renaming: "x",
    keeping: None,
}


def putting_first(model: Any, x: Tensor, loss: Tensor) -> None:
    model.weird.insert(0, loss.detach())


@pytest.mark.parametrize("kind", [list, deque])
def test_what_is_put_first_is_not_taken_for_appended(kind: Callable[[], Any]) -> None:
    """By the number of items, it could be."""
    make = partial(updating_rig, putting_first, attributes(weird=kind))
    text = (
        r"adds items elsewhere than at the end of model\.weird, from \d to \d items, .*\. .* leave "
        r"it unchanged, pass allow="
    )
    # What moved is first taken for the work of somebody else between the steps, and traced again.
    assert_refused(make, HostEffectError, text, done=SECOND_TRACE + 2)


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda effect: effect.__name__)
@pytest.mark.twice
def test_irregular_host_effects_are_refused(effect: Callable[..., None]) -> None:
    """The message names the attribute's path, and the attribute is put back."""
    make = partial(updating_rig, effect, attributes(weird=EFFECTS[effect]))
    assert_refused(make, HostEffectError, r"model\.weird", "allow", done=SECOND_TRACE)
    assert_falls_back(make, SkipReason.HOST_EFFECT, r"model\.weird")


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda effect: effect.__name__)
def test_a_declared_host_effect_is_allowed(effect: Callable[..., None]) -> None:
    """``allow`` accepts that replays leave this one attribute alone; everything else is eager's."""

    def make() -> Rig:
        rig = updating_rig(effect, attributes(weird=EFFECTS[effect]))
        model = rig.owners["model"]
        rig.after = lambda index: setattr(model, "weird", None) if index == len(rig.calls) - 1 else None
        return rig

    assert_equals_eager(make, allow=("model.weird",))


def branch_on_a_counter(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    model.count += 1
    if model.count % 2:
        return x.sin()
    return x.cosh()


def test_a_branch_on_a_counter() -> None:
    """Each side has a program, made of one trace; an eager step shows that it comes again."""
    step = assert_same_as_eager(partial(updating_rig, branch_on_a_counter, attributes(count=0)))
    assert (step.stats.traced, step.stats.captured, step.stats.recaptured) == (2, 2, 0)
    text = "the step's code has several paths, and each is captured once it has been taken again"
    assert (step.stats.skipped, step.stats.reasons) == ({SkipReason.SHAPE: 2}, {text: 2})


UNSEEN = ctypes.c_int(0)
"""A number where no guard looks, and no stand-in can be put."""


def branch_unseen(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    UNSEEN.value += 1
    return x.sin() if UNSEEN.value % 2 else x.cosh()


def test_a_branch_that_nothing_explains_is_refused() -> None:
    """Two traces that run different operators: both are named."""
    make = partial(updating_rig, branch_unseen, attributes())
    assert_refused(make, ControlFlowError, "sin", "cosh", r"test_refused_effects\.py", done=SECOND_TRACE)
    assert_falls_back(make, SkipReason.CONTROL_FLOW, "sin", "cosh")


def one_more_operator(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    UNSEEN.value += 1
    for _ in range(UNSEEN.value):
        x = x.tanh()
    return x


def test_a_loop_that_grows_is_refused() -> None:
    """One trace has an operator more than the other."""
    UNSEEN.value = 0
    text = (
        r"one step runs \d+ operators and the next \d+; the first extra one is operator \d+, aten\.tanh\S* at test_re"
    )
    assert_refused(partial(updating_rig, one_more_operator, attributes()), ControlFlowError, text, done=SECOND_TRACE)


def one_more_turn(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    model.count += 1
    for _ in range(model.count):
        x = x.tanh()
    return x


def test_a_loop_whose_length_a_counter_tells_is_refused() -> None:
    """The number is named, and the line that needs its value."""
    make = partial(updating_rig, one_more_turn, attributes(count=0))
    text = r"uses model\.count at test_refused_effects\.py:\d+ in one_more_turn: `for _ in range.*which is 3 before one"
    assert_refused(make, HostScalarError, text, done=SECOND_TRACE)


def seeks_with_seed(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    torch.manual_seed(3)  # culprit
    return torch.rand_like(x)


def test_seeding_is_refused() -> None:
    """A step that sets the generator's state would draw other numbers than its replays."""
    make = partial(updating_rig, seeks_with_seed, attributes())
    place = r"before the random operator at test_refused_effects\.py:\d+"
    assert_refused(make, GeneratorSeekError, rf"the cpu generator's state was set {place}.*Seed outside the step")


def draws_anew(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(7))


def draws_from_a_copy(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=model.generator.clone_state())


def draws_in_turns(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    UNSEEN.value += 1
    return torch.rand(x.shape, generator=model.generators[UNSEEN.value % 2])


def begins_again(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=model.generator.manual_seed(3))


def begins_again_midway(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    noise = torch.rand(x.shape, generator=model.generator)
    return noise + torch.rand(x.shape, generator=model.generator.manual_seed(3))


def begins_again_last(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    noise = torch.rand(x.shape, generator=model.generator)
    model.generator.manual_seed(3)
    return noise


OWN = attributes(
    count=0, generator=torch.Generator, generators=lambda: [torch.Generator().manual_seed(seed) for seed in (1, 2)]
)


@pytest.mark.parametrize("draw", [draws_anew, draws_from_a_copy, draws_in_turns], ids=lambda draw: draw.__name__)
def test_another_generator_in_each_step_is_refused(draw: Callable[..., Any]) -> None:
    """A replay would go on drawing where the recorded one left off: other numbers, also in the check's eager step."""
    text = r"the random operator at test_refused_effects\.py:\d+ .* draws from another cpu torch\.Generator than in the"
    make = partial(updating_rig, draw, OWN)
    assert_refused(make, GeneratorSeekError, text, "Create the generator once, outside the step", done=SECOND_TRACE)
    assert_falls_back(make, SkipReason.GENERATOR_SEEK, text)


@pytest.mark.parametrize(
    ("draw", "done"),
    [(begins_again, SECOND_TRACE), (begins_again_midway, WARMUP), (begins_again_last, WARMUP)],
    ids=lambda draw: getattr(draw, "__name__", None),
)
def test_a_seek_of_the_steps_own_generator_is_refused(draw: Callable[..., Any], done: int) -> None:
    """Before its first draw only the second trace can tell, which knows what the first one drew from."""
    text = "the cpu generator's state was set .*manual_seed.*Seed outside the step"
    assert_refused(partial(updating_rig, draw, OWN), GeneratorSeekError, text, done=done, verify="off")


def test_a_generator_that_is_seeded_between_steps_is_followed() -> None:
    """Replays draw from the generator itself, whatever somebody has set it to."""

    def make() -> Rig:
        rig = updating_rig(lambda model, x, loss: torch.rand(x.shape, generator=model.generator), OWN)
        rig.after = lambda index: rig.owners["model"].generator.manual_seed(index % 3)
        return rig

    assert_equals_eager(make)


def test_a_python_value_that_changes_in_the_result_is_refused() -> None:
    """Constants may be returned, and numbers that are computed; what nothing explains may not."""

    def halve(model: Any, index: int) -> None:
        model.share *= 0.5

    make = partial(updating_rig, lambda model, x, loss: {"share": model.share + 1}, attributes(share=0.5), halve)
    assert_equals_eager(make, verify="off")

    def unseen(model: Any, x: Tensor, loss: Tensor) -> Any:
        UNSEEN.value += 1
        return {"share": UNSEEN.value}

    UNSEEN.value = 0
    make = partial(updating_rig, unseen, attributes())
    assert_refused(make, OutputError, "share", "4", "5", done=SECOND_TRACE, allow=("UNSEEN[:]",))


@pytest.mark.parametrize("kind", [list, deque])
@pytest.mark.parametrize("where", ["attribute", "variable"])
def test_the_length_of_what_the_step_makes_longer(where: str, kind: Callable[[], Any]) -> None:
    """A replay appends, but would see the length of the capture for ever."""

    def make() -> Rig:
        held = kind()

        def through_the_model(model: Any, x: Tensor, loss: Tensor) -> Tensor:
            model.seen.append(loss.detach())
            return loss * 2 if len(model.seen) > 10 else loss * 1

        def through_a_variable(model: Any, x: Tensor, loss: Tensor) -> Tensor:
            held.append(loss.detach())
            return loss * 2 if len(held) > 10 else loss * 1

        update = through_the_model if where == "attribute" else through_a_variable
        return updating_rig(update, attributes(seen=kind))

    name = r"len\(.*seen\)" if where == "attribute" else r"len\(.*held\)"
    text = (
        rf"the step's code reads {name}, directly or indirectly, at .*, but the step itself appends "
        r"to that list.*Count in a tensor"
    )
    # That it is longer is first taken for the work of somebody else between the steps, and traced again.
    assert_refused(make, HostScalarError, text, done=SECOND_TRACE + 2)


@pytest.mark.twice
def test_a_result_whose_structure_changes_is_refused() -> None:
    """One more key in every other call: both structures are in the message."""

    def returned(model: Any, x: Tensor, loss: Tensor) -> dict[str, Tensor]:
        return {"mean": x.mean(), "loss": loss} if model.often else {"mean": x.mean()}

    def toggle(model: Any, index: int) -> None:
        model.often = not model.often

    make = partial(updating_rig, returned, attributes(often=False), toggle)
    patterns = [r"returns .*'mean'.*'loss'.* on one call and .*\{'mean': \*\}.* on the next.*the same one each time"]
    assert_refused(make, OutputError, *patterns, done=SECOND_TRACE, allow=("model.often",))


def draws_from_python(model: Any, x: Tensor, loss: Tensor) -> None:
    if random.choice(range(2)) > 2:
        raise AssertionError


def draws_from_numpy(model: Any, x: Tensor, loss: Tensor) -> None:
    if np.random.rand(1)[0] > 2:
        raise AssertionError


@pytest.mark.parametrize(("draw", "library"), [(draws_from_python, "Python"), (draws_from_numpy, "NumPy")])
def test_host_draws_that_no_operator_gets_are_refused(draw: Callable[..., None], library: str) -> None:
    """A decision by chance would be taken once: the generator is named, and the way to allow it."""
    make = partial(updating_rig, draw, attributes())
    patterns = [
        rf"draws from {library}'s random generator",
        "draw with torch on the step's device",
        rf"allow=\(\"{library}'s",
    ]
    assert_refused(make, HostScalarError, *patterns, done=SECOND_TRACE)


def shortens(model: Any, x: Tensor, loss: Tensor) -> None:
    model.queue.pop()


def test_a_list_that_shrinks_is_refused() -> None:
    """A work list that the step takes from: path, both lengths, and what to do."""
    make = partial(updating_rig, shortens, attributes(queue=lambda: list(range(40))))
    text = r"shortens model\.queue, from 3\d to 3\d items.*step, or, if replays may leave it unchanged, pass allow="
    assert_refused(make, HostEffectError, text, done=SECOND_TRACE)


def rebinds_now_and_then(model: Any, x: Tensor, loss: Tensor) -> None:
    model.count += 1
    loss = loss.detach()
    if model.count % 2:
        model.best = loss


@pytest.mark.twice
def test_a_tensor_that_is_rebound_now_and_then_is_refused() -> None:
    """Rebound in every other call, with the same operators: the slot is named."""
    make = partial(updating_rig, rebinds_now_and_then, attributes(count=0, best=partial(torch.zeros, ())))
    text = r"rebinds model\.best on one call and not on the next.*rebind it on every call"
    assert_refused(make, HostEffectError, text, done=SECOND_TRACE, allow=("model.count",))


def chooses_an_owned_tensor(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return (model.first, model.second)[model.turn()] * 2  # culprit


def chooses_a_new_tensor(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return (x + 1, x + 2)[model.turn()] * 2  # culprit


def chooses_a_view(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return model.halves[model.turn()] * 2  # culprit


def _halves() -> tuple[Tensor, Tensor]:
    flat = torch.arange(6.0)
    return flat[:3], flat[3:]


TENSORS = {"halves": _halves, "first": partial(torch.ones, 3), "second": partial(torch.zeros, 3)}
CHOICES = {
    chooses_an_owned_tensor: r"model\.second then model\.first",
    chooses_a_new_tensor: r"internal \d+ then internal",
    chooses_a_view: r"external \d+ at \d then external \d+ at \d",
}


@pytest.mark.parametrize("choose", CHOICES, ids=lambda choose: choose.__name__)
@pytest.mark.twice
def test_a_choice_between_tensors_is_refused(choose: Callable[..., Tensor]) -> None:
    """The same operators on other tensors, in turn: the operator, its line and both tensors are named."""
    make = partial(updating_rig, choose, attributes(turn=lambda: cycle((0, 1)).__next__, **TENSORS))
    patterns = [r"aten\.mul", line_of(choose), CHOICES[choose], "chooses between tensors", r"torch\.where"]
    assert_refused(make, ControlFlowError, *patterns, done=SECOND_TRACE)


def reads_quietly(model: Any, x: Tensor, loss: Tensor) -> None:
    if complex(model.limit).real > 1e9:
        raise AssertionError


def test_a_value_that_only_decides_and_changes_is_refused() -> None:
    """No operator gets the number, but the code does more than to compare it: path, both values, what to do."""

    def raise_it(model: Any, index: int) -> None:
        model.limit += 1

    make = partial(updating_rig, reads_quietly, attributes(limit=0), raise_it)
    text = r"code uses model\.limit at .*, which is 5 before one step and 6 before the next.*Keep it in a.*allow="
    assert_refused(make, HostScalarError, text, done=LAST_TRACE)
