"""What steps carry, count, append, accumulate and save on the device: as after eager steps."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from graphplan import CaptureError, graph_step
from graphplan.environment.devices import synchronize
from tests.devices import BACKEND, CUDA, DEVICE, assert_like_eager, needs_cuda, on_device
from tests.effects.test_carries import recurrent_rig
from tests.effects.test_emptied_containers import CHANGES
from tests.effects.test_emptied_containers import rig_of as emptied_rig
from tests.effects.test_moved_data import by_hand_rig, ema, in_one_memory, moved_gradients_rig, teacher_rig
from tests.effects.test_replaced_state import RESETS, best, best_part, reset_rig
from tests.facts import assert_same, flatten
from tests.models import CALLS, Mlp, float_batches, updating_rig
from tests.step.test_step_forms import accumulating_rig, mlp_rig, two_models_rig
from tests.twins import Rig, build, drive, managed

FORMS: dict[str, Callable[[], Rig]] = {
    "an optimizer outside, on accumulated gradients": accumulating_rig,
    "two models and two optimizers": two_models_rig,
    "gradients zeroed in place at the end": partial(mlp_rig, zero="end", set_to_none=False),
    "a frozen layer": partial(mlp_rig, frozen=True),
    "hidden states of an LSTM": recurrent_rig,
    "a teacher that is given other memory": partial(teacher_rig, ema),
    "a teacher that is given other memory first": partial(teacher_rig, ema, first=True),
    "a teacher that is given parts of one memory": partial(teacher_rig, in_one_memory, "buffers"),
    "parameters that are given other memory": by_hand_rig,
    "gradients that are given other memory": moved_gradients_rig,
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_a_step(name: str) -> None:
    """What the step does with its gradients and its memory does not matter."""
    assert_like_eager(on_device(FORMS[name]))


@pytest.mark.parametrize("reset", RESETS)
def test_what_a_state_is_reset_to_stays_what_it_is(reset: Callable[[Any], None]) -> None:
    """Replays write to memory of their own."""
    step, _ = assert_like_eager(on_device(partial(reset_rig, reset, 5, every=5)), captured=None)
    # What else has the memory of what is carried cannot lie where the program reads.
    assert (step.stats.captured == 1) is (reset not in (best, best_part))
    assert step.stats.replayed > 0


@pytest.mark.parametrize("name", CHANGES)
def test_containers_that_somebody_empties(name: str) -> None:
    """What a replay leaves is where the step puts it."""
    make = partial(emptied_rig, CHANGES[name], loads=True, device=str(DEVICE))
    step, rig = assert_like_eager(make, captured=None)
    assert step.stats.replayed > len(rig.calls) // 3


def micro_batch_rig() -> Rig:
    """Every fourth call updates; the other three only add to the gradients. A literal tells the two steps apart."""
    model = Mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)

    def train_step(x: Tensor, y: Tensor, update: bool) -> Tensor:
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        if update:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return loss

    calls = [(*batch, index % 4 == 3) for index, batch in enumerate(float_batches(60))]
    return Rig(train_step, {"model": model, "optimizer": optimizer}, list(calls))


def test_accumulated_gradients() -> None:
    """Accumulating and updating are two programs over the same gradients."""
    step, _ = assert_like_eager(on_device(micro_batch_rig), captured=2, replayed=60 - 12)
    assert step.stats.recaptured == 0


def stock_rig(make_optimizer: Callable[..., Optimizer], calls: int = CALLS) -> Rig:
    """A step with an optimizer as a user makes it."""
    model = Mlp()
    optimizer = make_optimizer(model.parameters())

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(calls)))


STOCK = {
    "adamw": partial(AdamW, lr=1e-2),
    "adamw fused": partial(AdamW, lr=1e-2, fused=True),
    "adam amsgrad": partial(Adam, lr=1e-2, amsgrad=True),
    "sgd": partial(SGD, lr=1e-2, momentum=0.9),
    "nadam": partial(NAdam, lr=1e-2),
}
NAMES = [pytest.param(name, marks=[needs_cuda] if name == "nadam" else []) for name in STOCK]


def _outline(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Flags, keys, dtypes and devices of an optimizer's state dict."""
    kinds = {
        f"{index}.{key}": (value.dtype, value.device.type) if isinstance(value, Tensor) else value
        for index, state in state_dict["state"].items()
        for key, value in state.items()
    }
    return {"groups": state_dict["param_groups"], "state": kinds}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.twice
def test_a_state_dict_is_that_of_an_eager_run(name: str) -> None:
    """A plain float lr, no flag of ours, tensors where a stock optimizer has them; an eager run goes on from it."""
    make = on_device(partial(stock_rig, STOCK[name]))
    rig = build(make)
    drive(rig, rig.step)
    expected = rig.owners["optimizer"].state_dict()
    rig = build(make)
    step = managed(rig, backend=BACKEND)
    drive(rig, step)
    saved = copy.deepcopy(rig.owners["optimizer"].state_dict())
    assert step.stats.replayed == CALLS - 6
    assert type(saved["param_groups"][0]["lr"]) is float
    assert not saved["param_groups"][0].get("capturable")
    assert_same(flatten(state=_outline(expected)), flatten(state=_outline(saved)))
    other = build(make)
    other.owners["optimizer"].load_state_dict(saved)
    losses = drive(other, other.step, 3).outputs
    assert all(loss.isfinite() for loss in losses)


@pytest.mark.parametrize("name", NAMES)
def test_a_closed_step_leaves_an_optimizer_that_steps(name: str) -> None:
    """After ``close`` the optimizer has its own flags again, and its eager step works on the state of the replays."""
    make = on_device(partial(stock_rig, STOCK[name]))
    rig = build(make)
    flags = copy.deepcopy(_outline(rig.owners["optimizer"].state_dict()))["groups"]
    step = managed(rig, backend=BACKEND)
    drive(rig, step)
    step.close()
    assert_same(flatten(groups=flags), flatten(groups=_outline(rig.owners["optimizer"].state_dict())["groups"]))
    before = rig.owners["model"][0].weight.detach().clone()
    loss = rig.step(*rig.calls[0])
    assert loss.isfinite() and not torch.equal(before, rig.owners["model"][0].weight)


def test_a_loaded_state_reaches_the_next_step() -> None:
    """``load_state_dict`` in the middle of a run moves every tensor of the optimizer: the run goes on from it."""

    def make() -> Rig:
        rig = stock_rig(STOCK["adamw fused"], calls=30)
        optimizer, saved = rig.owners["optimizer"], {}

        def after(index: int) -> None:
            if index == 4:
                saved.update(copy.deepcopy(optimizer.state_dict()))
            if index == 14:
                optimizer.load_state_dict(copy.deepcopy(saved))

        rig.after = after
        return rig

    rig = build(on_device(make))
    eager = drive(rig, rig.step)
    rig = build(on_device(make))
    step = managed(rig, backend=BACKEND)
    found = drive(rig, step)
    assert_same(flatten(losses=eager.outputs), flatten(losses=found.outputs))
    assert step.stats.replayed > 10


@needs_cuda
@pytest.mark.twice
def test_closing_gives_the_graph_s_memory_back() -> None:
    """Activations of a captured step are reserved for it until ``close``."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.Tanh(), nn.Linear(4096, 8)).to(DEVICE)
    optimizer = SGD(model.parameters(), lr=0.01, fused=True)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step = managed(Rig(train_step, {"model": model, "optimizer": optimizer}, []), backend=BACKEND)
    x = torch.randn(8192, 1024, device=DEVICE)
    for _ in range(10):
        step(x)
    assert step.stats.replayed == 4
    optimizer.zero_grad()
    held = _reserved()
    step.close()
    del step
    activations = 8192 * 4096 * 4
    assert _reserved() <= held - activations


def _reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_constants_made_in_the_step() -> None:
    """``torch.tensor(2.0, device=...)`` is the same number in every step, whatever way it takes to the device."""

    def weighted(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
        factor = torch.tensor(2.0, device=x.device) * x.new_tensor(0.5)
        table = torch.tensor([0.5, 1.5], device=x.device)
        return loss * factor + (torch.zeros(2, device=x.device) + table).sum() + torch.arange(3, device=x.device).sum()

    _, rig = assert_like_eager(on_device(partial(updating_rig, weighted, lambda model: None)))
    assert rig.calls[0][0].is_cuda == CUDA


def trained_after(stream: str, *, is_graphed: bool) -> tuple[Any, list[Tensor]]:
    """Train for three steps on another stream, keep what they return with its graph, and train on."""
    torch.manual_seed(3)
    model = Mlp().to(DEVICE)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

    def update(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    batches = [(torch.randn(8, 8, device=DEVICE), torch.randint(4, (8,), device=DEVICE)) for _ in range(16)]
    synchronize(DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()) if CUDA and stream == "other" else nullcontext():
        losses = [update(*batch) for batch in batches[:3]]
    synchronize(DEVICE)
    owners = {"model": model, "optimizer": optimizer}
    step = graph_step(update, owners=owners, backend=BACKEND) if is_graphed else update
    losses += [step(*batch) for batch in batches[3:]]
    return step, [loss.detach() for loss in losses] + list(model.state_dict().values())


_OF_STREAMS = "ignore:The AccumulateGrad node's stream does not match:UserWarning"
"""torch's own hint, which eager steps give, too."""


@pytest.mark.filterwarnings(_OF_STREAMS)
@pytest.mark.parametrize("stream", ["default", "other"])
def test_results_that_are_kept_with_their_graph(stream: str) -> None:
    """Their graphs keep alive what adds gradients up, which remembers its stream."""
    _, expected = trained_after(stream, is_graphed=False)
    step, found = trained_after(stream, is_graphed=True)
    assert all(map(torch.equal, expected, found))
    assert step.stats.replayed > 5, step.report()


@needs_cuda
@pytest.mark.filterwarnings(_OF_STREAMS)
def test_a_graph_that_is_kept_between_steps_is_refused() -> None:
    """Its nodes are of the stream of the code between the steps, for which a capture cannot wait."""
    model = nn.Linear(4, 4).to(DEVICE)
    kept = []

    def update(x: Tensor) -> Tensor:
        model.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    x = torch.randn(3, 4, device=DEVICE)
    step = graph_step(update, owners={"model": model}, backend=BACKEND)
    with pytest.raises(
        CaptureError, match="keeps a result of another stream with its autograd graph: detach the results"
    ):
        for _ in range(8):
            step(x)
            kept.append(model(x).sum())
