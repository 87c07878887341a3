"""The forms that a step may have: what it returns, what it is fed, and how it treats its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from tests.crossing import pairs
from tests.models import CALLS, CLASSES, Mlp, float_batches
from tests.twins import Rig, assert_equals_eager, build, drive, managed, saved_traces


class Result(NamedTuple):
    """A step's result with names."""

    loss: Tensor
    accuracy: Tensor


OUTPUTS: dict[str, Callable[[nn.Sequential, Tensor, Tensor, Tensor], Any]] = {
    "nothing": lambda model, x, logits, loss: None,
    "dict": lambda model, x, logits, loss: {"loss": loss, "logits": logits},
    "tuple": lambda model, x, logits, loss: (loss, logits.argmax(1)),
    "list": lambda model, x, logits, loss: [loss],
    "namedtuple": lambda model, x, logits, loss: Result(loss, logits.softmax(1).amax()),
    "nested with constants": lambda model, x, logits, loss: {"a": [loss, (None, "train", 3)], "b": {"scale": 0.5}},
    "nested deeper than Python reads": lambda model, x, logits, loss: reduce(lambda part, _: [part], range(250), loss),
    "several losses": lambda model, x, logits, loss: (loss, loss * 2, logits.square().mean()),
    "the input": lambda model, x, logits, loss: (loss, x),
    "a view of the input": lambda model, x, logits, loss: (loss, x[1:3].T),
    "a parameter": lambda model, x, logits, loss: (loss, model[0].weight),
    "a buffer": lambda model, x, logits, loss: (loss, model[1].running_mean, model[1].num_batches_tracked),
    "a gradient": lambda model, x, logits, loss: (loss, model[0].weight.grad),
    "the same tensor twice": lambda model, x, logits, loss: (loss, loss, logits, logits[0]),
}


def mlp_rig(
    result: Callable[..., Any] = OUTPUTS["tuple"],
    *,
    zero: str = "start",
    set_to_none: bool = True,
    frozen: bool = False,
) -> Rig:
    """A plain MLP step; ``zero`` says where gradients are zeroed, ``result`` what is returned."""
    model = Mlp()
    model[0].requires_grad_(not frozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = AdamW(trained, lr=1e-2, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Any:
        if zero == "start":
            optimizer.zero_grad(set_to_none)
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        returned = result(model, x, logits, loss)
        if zero == "end":
            optimizer.zero_grad(set_to_none)
        return returned

    return Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(CALLS)))


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_have_the_structure_that_eager_returns(name: str, equals_eager: Callable[..., Any]) -> None:
    """Structure, order, names and constants are eager's, and so is every value."""
    equals_eager(partial(mlp_rig, OUTPUTS[name]))


@pytest.mark.twice
def test_outputs_belong_to_the_caller() -> None:
    """Later replays do not change what an earlier call returned, and outputs are detached."""
    rig = build(mlp_rig)
    step = managed(rig)
    returned = [step(*batch) for batch in rig.calls]
    copies = [[leaf.clone() for leaf in pair] for pair in returned]
    step(*rig.calls[0])
    assert step.stats.replayed == CALLS + 1 - 6
    for pair, copied in zip(returned, copies, strict=True):
        assert all(map(torch.equal, pair, copied))
    assert all(not leaf.requires_grad for pair in returned[6:] for leaf in pair)


def test_results_can_be_written_to() -> None:
    """Each on its own, with something that asks for gradients too, though small ones come out of one copy."""
    rig = build(partial(mlp_rig, OUTPUTS["several losses"]))
    step = managed(rig)
    drive(rig, step, 8)
    first, second, third = step(*rig.calls[0])
    kept = second.clone(), third.clone()
    weight = nn.Parameter(torch.ones(()))
    first.add_(weight).backward()
    assert weight.grad == 1
    assert torch.equal(torch.stack([second, third]), torch.stack(kept))


@dataclass(frozen=True)
class Note:
    """What was noted, and maybe a tensor."""

    text: str
    value: Tensor | None = None


def test_a_record_without_tensors_is_the_same_object_each_time() -> None:
    """One with tensors in it has others each time; nothing is built anew for the other."""
    note = Note("a loss")
    make = partial(
        mlp_rig, lambda model, x, logits, loss: {"note": note, "notes": [(note, loss), Note("mean", logits.mean())]}
    )
    rig = build(make)
    step = managed(rig)
    results = [step(*call) for call in rig.calls]
    assert step.stats.replayed == CALLS - 6
    assert all(result["note"] is note and result["notes"][0][0] is note for result in results)
    rig = build(make)
    for call, found in zip(rig.calls, results, strict=True):
        expected = rig.step(*call)["notes"]
        assert torch.equal(expected[0][1], found["notes"][0][1])
        assert found["notes"][1].text == "mean"
        assert torch.equal(expected[1].value, found["notes"][1].value)


@pytest.mark.twice
def test_a_tensor_in_two_places_of_the_result() -> None:
    """Who writes to it in one place finds that in the other."""

    def returned(model: Any, x: Tensor, logits: Tensor, loss: Tensor) -> list[Tensor]:
        return [logits, logits, logits.detach(), logits + 1, loss, loss.detach()]

    rig = build(partial(mlp_rig, returned))
    step = managed(rig)
    for batch in rig.calls:
        result = step(*batch)
        with torch.no_grad():
            result[0].zero_()
            result[4].zero_()
        assert [bool(part.any()) for part in result] == [False, False, False, True, False, False]
    assert step.stats.replayed == CALLS - 6


@pairs(zero=["start", "end"], set_to_none=[True, False], frozen=[False, True])
def test_zeroing_gradients_in_the_step(zero: str, set_to_none: bool, frozen: bool) -> None:
    """Gradients are zeroed before or after the step, by None or by zeros, with a frozen first layer too."""
    assert_equals_eager(partial(mlp_rig, zero=zero, set_to_none=set_to_none, frozen=frozen))


def test_gradients_that_accumulate_over_calls() -> None:
    """The user zeroes in place every fourth step, outside: gradients outlive the step that made them."""

    def make() -> Rig:
        rig = mlp_rig(zero="never")
        optimizer = rig.owners["optimizer"]
        rig.after = lambda index: optimizer.zero_grad(set_to_none=False) if index % 4 == 3 else None
        return rig

    assert_equals_eager(make)


def test_gradients_that_are_dropped_between_calls() -> None:
    """``zero_grad()`` outside sets gradients to None every fourth step: a program for each of the two cases."""

    def make() -> Rig:
        rig = mlp_rig(zero="never")
        rig.calls = list(float_batches(60))
        optimizer = rig.owners["optimizer"]
        rig.after = lambda index: optimizer.zero_grad() if index % 4 == 3 else None
        return rig

    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig)
    found = drive(rig, step)
    assert found.outputs[-1][0].equal(expected.outputs[-1][0])
    assert step.stats.replayed > 0
    assert_equals_eager(make, captured=step.stats.captured, replayed=step.stats.replayed - saved_traces(step.stats))


def accumulating_rig() -> Rig:
    """Only forward and backward are under graphplan; the optimizer steps outside, on every fourth call."""
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)

    def accumulate(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        return loss

    def after(index: int) -> None:
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    return Rig(accumulate, {"model": model}, list(float_batches(CALLS)), after, extra={"optimizer": optimizer})


def test_gradients_that_are_kept_stay_what_they_were() -> None:
    """Each of them, also after somebody has looked at another one for a while; whoever keeps none costs nothing."""
    rig = build(mlp_rig)
    step = managed(rig, verify="off")
    drive(rig, step, 8)
    params = list(rig.owners["model"].parameters())
    for number, param in enumerate(params):
        looked_at = [params[number - 1].grad]
        step(*rig.calls[number % CALLS])
        looked_at.clear()
        step(*rig.calls[0])
        kept = param.grad
        assert kept is not None
        value = kept.clone()
        step(*rig.calls[1])
        assert torch.equal(kept, value), f"parameter {number}"
        assert param.grad is not kept
        del kept
    assert step.stats.replayed == 2 + 3 * len(params)


def test_an_optimizer_outside_the_step() -> None:
    """An eager optimizer steps between replays, on gradients that replays accumulate into."""
    assert_equals_eager(accumulating_rig)


def two_models_rig() -> Rig:
    """A small GAN step: two models, two optimizers, the generator trained through the discriminator."""
    generator, critic = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 6), nn.LeakyReLU(), nn.Linear(6, 1))
    first = Adam(critic.parameters(), lr=1e-2, fused=True)
    second = AdamW(generator.parameters(), lr=2e-2, fused=True)

    def train_step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        fake = generator(torch.randn_like(x))
        critic_loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(x)).mean()
        first.zero_grad()
        critic_loss.backward()
        first.step()
        generator_loss = F.softplus(-critic(fake)).mean()
        second.zero_grad()
        generator_loss.backward()
        second.step()
        return critic_loss, generator_loss

    owners = {"generator": generator, "critic": critic, "first": first, "second": second}
    return Rig(train_step, owners, list(float_batches(CALLS)))


def test_two_models_and_two_optimizers() -> None:
    """Noise is drawn in the step; the critic's gradients accumulate from the generator's pass and are zeroed."""
    assert_equals_eager(two_models_rig)


def test_two_optimizers_on_one_model() -> None:
    """Each optimizer has its own part of the parameters and its own schedule."""

    def make() -> Rig:
        rig = mlp_rig()
        model = rig.owners["model"]
        late = SGD([torch.nn.Parameter(torch.ones(CLASSES))], lr=0.5, fused=True)
        (scale,) = late.param_groups[0]["params"]
        early = rig.owners["optimizer"]

        def train_step(x: Tensor, y: Tensor) -> Tensor:
            early.zero_grad()
            late.zero_grad()
            loss = F.cross_entropy(model(x) * scale, y)
            loss.backward()
            early.step()
            late.step()
            return loss

        def after(index: int) -> None:
            late.param_groups[0]["lr"] = 0.5 / (index + 2)

        return Rig(train_step, {**rig.owners, "late": late}, rig.calls, after, extra={"scale": scale})

    assert_equals_eager(make)


def test_shared_weights() -> None:
    """One parameter under two names is one external."""

    def make() -> Rig:
        encode, decode = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        decode.weight = encode.weight
        model = nn.Sequential(encode, decode)
        optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)

        def train_step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
            loss.backward()
            optimizer.step()
            return loss

        calls = [(torch.randint(12, (3, 4)),) for _ in range(CALLS)]
        return Rig(train_step, {"model": model, "optimizer": optimizer}, calls)

    step = assert_equals_eager(make)
    assert len(step.plan.params) == 1


def test_several_parameter_groups() -> None:
    """Every group's lr follows its own schedule; options that stay are part of the program."""

    def make() -> Rig:
        rig = mlp_rig()
        optimizer = rig.owners["optimizer"]
        head = optimizer.param_groups[0]["params"][-2:]
        optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:-2]
        optimizer.add_param_group({"params": head, "lr": 0.1, "weight_decay": 0.0})

        def after(index: int) -> None:
            for number, group in enumerate(optimizer.param_groups):
                group["lr"] *= 0.9 + 0.05 * number

        rig.after = after
        return rig

    assert_equals_eager(make)
