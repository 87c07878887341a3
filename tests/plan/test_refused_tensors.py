"""Tensors that are neither fed nor owned, carries that do not fit, and roles without storage: refused by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD, AdamW

from graphplan import (
    CaptureError,
    CarryError,
    Policy,
    SkipReason,
    TemporaryCopyError,
    UncoveredRoleError,
    UnownedTensorError,
)
from tests.models import Box, Memory, Mlp, attributes, float_batches, training_rig, updating_rig
from tests.twins import (
    SECOND_TRACE,
    TRACED,
    WARMUP,
    Rig,
    assert_equals_eager,
    assert_falls_back,
    assert_refused,
    assert_same_runs,
    build,
    drive,
    line_of,
    managed,
)

PLANNED = WARMUP + TRACED
"""Calls before the one that captures."""


def closure_rig(kind: str, holder: Any = Box) -> Rig:
    """A step that reads or writes a tensor through its closure, which no owner holds."""
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.05, fused=True)
    noise, total = (
        holder(item=[torch.tensor(0.0)] if kind == "passing" else torch.randn(4)),
        holder(item=torch.zeros(())),
    )

    def step_of(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits = model(x)
        if kind in ("fresh", "number"):
            logits = logits + noise.item
        if kind == "passing":
            logits = logits * noise.item.pop()
        if kind == "like":
            logits = logits + torch.zeros_like(noise.item)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        if kind == "mutated":
            total.item.add_(loss.detach())
        if kind == "chained":
            loss = loss + total.item
            total.item = loss.detach()
        optimizer.step()
        return loss

    def after(index: int) -> None:
        noise.item = {"number": torch.tensor(2.0), "passing": [torch.tensor(float(index))]}.get(kind, torch.randn(4))

    extra = {"noise": [noise.item], "total": [total.item]} if kind == "mutated" else {}
    return Rig(step_of, {"model": model, "optimizer": optimizer}, list(float_batches(12)), after, extra)


def test_a_number_on_the_host_that_nothing_owns_is_refused() -> None:
    """It is like other tensors, whether something holds it after the step or only before."""
    for kind in ("number", "passing"):
        make = partial(closure_rig, kind)
        assert_refused(
            make,
            UnownedTensorError,
            r"f32\[\] tensor that is neither an argument nor part of an owner",
            done=SECOND_TRACE,
        )


def test_what_a_graph_from_outside_holds_is_refused_by_the_name_of_its_tensor() -> None:
    """As an actor's losses are, which it has kept while it played."""

    def make() -> Rig:
        model = Mlp()
        optimizer, losses = SGD(model.parameters(), lr=0.05, fused=True), list[Tensor]()

        def after(index: int) -> None:
            losses[:] = [model[0](torch.randn(4, 8)).sum()]

        def step_of(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + losses[0]
            loss.backward()
            optimizer.step()
            return loss

        after(0)
        return Rig(step_of, {"model": model, "optimizer": optimizer, "losses": losses}, list(float_batches(12)), after)

    what = r"neither an argument nor part of an owner reaches .* in step_of"
    told = r"The autograd graph of losses\[0\] was made before the step and may hold it: compute both in the step"
    assert_refused(make, UnownedTensorError, what, told, done=SECOND_TRACE + 2)


@pytest.mark.parametrize("kind", ["fresh", "mutated"])
def test_unowned_tensors_are_refused(kind: str) -> None:
    """One that is new in each call, one that is written: operator and line are named, and nothing has changed."""
    make = partial(closure_rig, kind)
    told = (
        r"is neither an argument nor part of an owner reaches aten\.add\b"
        if kind == "fresh"
        else r"aten\.add_\S* at .* changes a .* tensor that belongs to no owner"
    )
    patterns = [
        told,
        r"at test_refused_tensors\.py:\d+ in step_of",
        "owners=.*pass it as an argument" if kind != "fresh" else "owners=",
    ]
    assert_refused(make, UnownedTensorError, *patterns, done=SECOND_TRACE)
    assert_falls_back(make, SkipReason.UNOWNED_TENSOR, *patterns)


def test_a_tensor_of_which_only_the_shape_counts() -> None:
    """It is another one in each call, and nothing of it is read: ``zeros_like``."""
    assert_equals_eager(partial(closure_rig, "like"))


@pytest.mark.parametrize("kind", ["fresh", "mutated", "chained"])
def test_tensors_that_the_code_names_are_owned(kind: str) -> None:
    """The same, on objects that graphplan can look into: found through the closure, guarded, and part of the state."""
    step = assert_equals_eager(partial(closure_rig, kind, Memory))
    (name,) = [e.name for e in step.plan.externals if e.name in ("noise.item", "total.item")]
    assert name == ("noise.item" if kind == "fresh" else "total.item")


def test_a_chain_of_unowned_tensors_is_refused() -> None:
    """A tensor that the step passes on to the next step through a dictionary that no owner holds."""
    rig = build(partial(closure_rig, "chained"))
    step = managed(rig)
    for args in rig.calls[:SECOND_TRACE]:
        step(*args)
    with pytest.raises(UnownedTensorError, match=r"aten\.add.*test_refused_tensors\.py.*owners"):
        step(*rig.calls[SECOND_TRACE])


def _growing(model: Any, x: Tensor, loss: Tensor) -> None:
    model.cache = torch.cat([model.cache, x.mean(0, keepdim=True)])


def _shrinking(model: Any, x: Tensor, loss: Tensor) -> None:
    model.queue = model.queue[1:]


def test_a_carry_that_grows_is_refused() -> None:
    """A cache that is one row longer after each step: the path and both shapes are named."""
    make = partial(updating_rig, _growing, attributes(cache=partial(torch.zeros, 1, 8)))
    assert_refused(make, CarryError, r"model\.cache", r"\[5, 8\]", r"\[6, 8\]", done=SECOND_TRACE)
    assert_falls_back(make, SkipReason.CARRY, r"model\.cache")


def test_a_carry_that_shrinks_is_refused() -> None:
    """A queue that is rebound to a shorter view of itself, without any operator that launches."""
    make = partial(updating_rig, _shrinking, attributes(queue=partial(torch.zeros, 40)))
    assert_refused(make, CarryError, r"model\.queue", r"\[36\]", r"\[35\]", done=SECOND_TRACE)


ROLES_LEFT_OUT = {
    "state": (("input", "param"), r"model\.1\.running_mean"),
    "param": (("input", "state"), r"model\.0\.weight"),
}


@pytest.mark.parametrize("role", ROLES_LEFT_OUT)
@pytest.mark.twice
def test_a_role_without_storage_is_refused(role: str) -> None:
    """A policy that leaves a role out is refused before capture, naming externals of that role and the policy."""
    static, name = ROLES_LEFT_OUT[role]
    make = partial(training_rig, "mlp", "adamw", sizes=(8,) * 10)
    policy = Policy("train", static_roles=static, copy_roles=("input",))
    assert_refused(make, UncoveredRoleError, name, "static_roles", role, done=PLANNED, policy=policy)


@pytest.mark.twice
def test_inference_refuses_a_step_that_trains() -> None:
    """The inference policy has no storage for state: running statistics and moments are named."""
    make = partial(training_rig, "mlp", "adamw", sizes=(8,) * 10)
    assert_refused(make, UncoveredRoleError, r"running_mean|exp_avg", "state", done=PLANNED, mode="inference")


@pytest.mark.filterwarnings("ignore:graphplan")
def test_parameters_replaced_between_calls() -> None:
    """A parameter that is another object in every step: eager's numbers, replayed or not."""

    def make() -> Rig:
        rig = updating_rig(lambda model, x, loss: None, attributes())
        model = rig.owners["model"]
        rig.after = lambda index: setattr(model[0], "bias", torch.nn.Parameter(model[0].bias.detach().clone()))
        return rig

    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    assert_same_runs(expected, drive(rig, managed(rig, on_failure="eager")))


def summing_rig(box: Box) -> Rig:
    """A step that sums its losses in the tensor in ``box``, where nobody can look."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight], lr=0.1, fused=True)

    def step_of(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (weight * x).sum().square()
        loss.backward()
        optimizer.step()
        box.item.add_(loss.detach())
        return loss

    return Rig(step_of, {"optimizer": optimizer}, [(torch.ones(3) * index,) for index in range(10)])


def test_an_owner_makes_an_unowned_tensor_state() -> None:
    """What the message advises works: naming the tensor's holder makes it state."""
    assert_refused(lambda: summing_rig(Box(torch.zeros(()))), UnownedTensorError, "owners", done=SECOND_TRACE)

    def owned() -> Rig:
        box = Box(torch.zeros(()))
        rig = summing_rig(box)
        rig.owners["sums"] = [box.item]
        return rig

    step = assert_equals_eager(owned)
    assert [e.name for e in step.plan.state if "sums" in e.name] == ["sums[0]"]


def sparse_product(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return x.to_sparse() @ x.T  # culprit


def copied_away(model: Any, x: Tensor, loss: Tensor) -> None:
    x.to("meta")  # culprit


def test_a_sparse_tensor_in_the_step_is_refused() -> None:
    """No recording has storage for it: the operator, its layout, the line and the way out."""
    make = partial(updating_rig, sparse_product, attributes())
    text = rf"aten\.\w+\S* gets a torch\.sparse_coo tensor at {line_of(sparse_product)}.*\.to_dense\(\).*sparse=False"
    assert_refused(make, CaptureError, text)


def test_a_copy_from_the_host_is_refused() -> None:
    """Host memory copied to another device: a graph would copy from the same address for ever."""
    make = partial(updating_rig, copied_away, attributes())
    text = rf"aten\._to_copy\S* copies host memory to meta at {line_of(copied_away)}.*Pass the tensor.*on the device"
    assert_refused(make, TemporaryCopyError, text)


def gathering_rig(where: str) -> Rig:
    """A step that gathers weights into memory which it gives back at its end, as FSDP does."""
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.05, fused=True)
    held = Box(item=torch.zeros(4))
    held.item.untyped_storage().resize_(0)

    def step_of(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits = model(x)
        gathered = held.item if where == "outside" else torch.empty(4)
        gathered.untyped_storage().resize_(16)
        with torch.no_grad():
            gathered.copy_(logits[0])
        loss = F.cross_entropy(logits + gathered.clone(), y)
        loss.backward()
        optimizer.step()
        gathered.untyped_storage().resize_(0)
        return loss

    return Rig(step_of, {"model": model, "optimizer": optimizer}, list(float_batches(12)))


def test_memory_that_the_step_gives_back_is_refused() -> None:
    """A replay would write where nothing is any more, and undoing the trace must not either."""
    make = partial(gathering_rig, "outside")
    text = r"the memory of a f32\[4\] tensor that reaches aten\.copy_.* in step_of.*is freed before the step ends"
    assert_refused(make, UnownedTensorError, text, done=SECOND_TRACE)
    assert_falls_back(make, SkipReason.UNOWNED_TENSOR, text)


def test_memory_that_the_step_takes_and_gives_back_is_there_in_replays() -> None:
    assert_equals_eager(partial(gathering_rig, "inside"))
