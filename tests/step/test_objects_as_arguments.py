"""A model and its optimizer as arguments of the step, as in loops that are written as functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from graphplan import FeedError, graph_step
from tests.twins import Rig, build, managed, same_as_eager


def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def rig_of(pairs: int) -> Rig:
    """Trains so many models, each with an optimizer of its own, in blocks of 20 calls."""
    models = [nn.Linear(6, 4) for _ in range(pairs)]
    optimizers = [SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True) for model in models]

    def call(number: int) -> tuple[Any, ...]:
        which = number // 20 % pairs
        return models[which], optimizers[which], torch.randn(5, 6), torch.randint(4, (5,))

    def after(number: int) -> None:
        if number == 30:
            optimizers[0].param_groups[0]["momentum"] = 0.8

    extra = {f"model {number}": model for number, model in enumerate(models)}
    extra |= {f"optimizer {number}": optimizer for number, optimizer in enumerate(optimizers)}
    return Rig(train_step, {}, [call(number) for number in range(80)], after, extra=extra)


@pytest.mark.twice
def test_one_model(device: torch.device, backend: str) -> None:
    step = same_as_eager(lambda: rig_of(1), device, backend)
    assert (step.stats.captured, step.stats.replayed) == (2, 68)


def test_two_models(device: torch.device, backend: str) -> None:
    """Each has programs of its own."""
    step = same_as_eager(lambda: rig_of(2), device, backend)
    assert step.stats.replayed >= 50


def test_what_is_read_of_them_is_guarded() -> None:
    """Also where the step does not run them."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = 2.0

    module = Scale()
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=0.5)

    def step(module: Scale, optimizer: Optimizer, x: Tensor) -> Tensor:
        return x * module.own * optimizer.param_groups[0]["lr"]

    graphed = graph_step(step, backend="tape", mode="inference", verify="off")
    for index in range(40):
        if index == 15:
            module.own = 3.0
        if index == 25:
            optimizer.param_groups[0]["lr"] = 0.25
        assert torch.equal(graphed(module, optimizer, torch.ones(2)), step(module, optimizer, torch.ones(2)))
    assert graphed.stats.replayed >= 20


def test_a_scheduler_is_no_such_argument() -> None:
    """Only modules and optimizers become owners by what they do in the step."""
    model = nn.Linear(6, 4)
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    step = graph_step(lambda scheduler, x: model(x).sum() * scheduler.last_epoch, backend="tape", mode="inference")
    with pytest.raises(FeedError, match=r"an argument has the type StepLR, which is neither a tensor nor a literal"):
        for _ in range(8):
            step(scheduler, torch.randn(5, 6))


class Scaled:
    """A batch with the module that undoes its scaling."""

    def __init__(self, x: Tensor, scaler: nn.Module) -> None:
        self.x, self.by = x, {"y": scaler}


@pytest.mark.twice
def test_a_module_in_a_batch() -> None:
    """It is named, and may be fed beside the batch, as the refusal says."""
    scaler = nn.BatchNorm1d(6, affine=False)
    step = graph_step(lambda batch: batch.by["y"](batch.x), backend="tape")
    text = (
        r"args\[0\]: an argument of type Scaled holds a module at \.by\['y'\].*keep it on the model, or pass it beside"
    )
    with pytest.raises(FeedError, match=text):
        for _ in range(8):
            step(Scaled(torch.randn(5, 6), scaler))
    scaler.reset_running_stats()
    fast = graph_step(lambda batch: batch["by"](batch["x"]), backend="tape")
    twin = nn.BatchNorm1d(6, affine=False)
    for _ in range(20):
        x = torch.randn(5, 6)
        assert torch.equal(fast({"x": x, "by": scaler}), twin(x))
    assert torch.equal(scaler.running_var, twin.running_var)
    assert fast.stats.replayed == 14


def test_gradients_leave_memory_that_another_program_writes_to() -> None:
    """Programs of one step share memory on CUDA: what one has left at other parameters lies elsewhere before that."""
    rig = build(lambda: rig_of(2))
    step = managed(rig)
    places = []
    for number, args in enumerate(rig.calls):
        step(*args)
        if number == 50:
            # On the tape, each has memory of its own.
            for program in step.machine.programs.all():
                program.bindings.share_memory("one")
        if number >= 59:
            grads = [parameter.grad for parameter in rig.extra["model 0"].parameters()]
            places.append([(grad.data_ptr(), grad.clone()) for grad in grads])
    # Model 0 is trained up to call 59, and model 1 from there on.
    before, after, last = places[0], places[1], places[-1]
    assert step.stats.last_kind == "replayed"
    for (place, value), (other, moved), (_, kept) in zip(before, after, last, strict=True):
        assert other != place
        assert torch.equal(value, moved)
        assert torch.equal(value, kept)
