"""Scripted modules: what they are made of lies in C++, and their code reads it there."""

# Without annotations as strings, which the compiler of scripts cannot read.

from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from graphplan import HostScalarError, UnownedTensorError, graph_step
from tests.devices import BACKEND, on_device
from tests.models import CALLS, Box, float_batches
from tests.twins import BEFORE_REPLAY, SECOND_TRACE, Rig, assert_refused

X = torch.arange(8.0).reshape(2, 4) / 8


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_numbers_that_a_scripted_function_makes_tensors_of(equals_eager: Callable[..., Any]) -> None:
    """It makes them where no dispatcher sees it: they are constants, which must stay the same."""

    @torch.jit.script
    def root(x: Tensor, factor: int) -> Tensor:
        return torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * torch.tensor(factor, dtype=torch.float))

    def make(growth: int) -> Rig:
        model = nn.Linear(8, 4)
        optimizer = SGD(model.parameters(), lr=0.05, fused=True)
        factor = Box(3)

        def train_step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) / root(x, factor.item)).square().mean()
            loss.backward()
            optimizer.step()
            factor.item += growth
            return loss.detach()

        return Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(CALLS)))

    stats = equals_eager(partial(make, 0)).stats
    assert (stats.traced, stats.replayed) == (1, CALLS - BEFORE_REPLAY + 1)
    text = r"gets \d+ on one step and \d+ on the next, a value that compiled code computes from a number"
    growing = on_device(partial(make, 1))
    assert_refused(growing, HostScalarError, text, done=SECOND_TRACE, backend=BACKEND, verify="off")
    # The check of the first replay finds another loss than the replay's, and the step is traced twice.
    assert_refused(growing, HostScalarError, text, done=BEFORE_REPLAY + 1, backend=BACKEND)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_number_that_a_scripted_function_is_given() -> None:
    """Was not made in it: it is like any other tensor that nothing owns."""

    @torch.jit.script
    def times(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    given = SimpleQueue[Tensor]()
    step = graph_step(lambda x: times(x, given.get()), backend="tape")
    with pytest.raises(UnownedTensorError, match="neither an argument nor part of an owner reaches"):
        for _ in range(6):
            given.put(torch.tensor(2.0))
            step(X)


NUMBER, ROW = torch.tensor(2.0), torch.arange(4.0)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("function", [lambda x: x * 2 + 1, lambda x: x * NUMBER, lambda x: x + ROW])
def test_functions_that_torch_traced(function: Callable[[Tensor], Tensor]) -> None:
    """They have their constants as tensors."""
    traced, linear = torch.jit.trace(function, X), nn.Linear(4, 4)
    step = graph_step(lambda x: traced(linear(x)), owners={"linear": linear}, backend="tape", verify=1)
    for number in range(8):
        assert torch.equal(step(X + number), traced(linear(X + number)))
    assert step.stats.verified >= 2


class Holds(nn.Module):
    """Has a tensor that is neither a parameter nor a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("is_owner", [False, True])
def test_a_tensor_that_a_scripted_module_holds(is_owner: bool) -> None:
    """It is read where it lies; that another one is put in its place is left to the checks."""
    layer = torch.jit.script(Holds())
    step = graph_step(lambda x: layer(x), owners={"layer": layer} if is_owner else None, backend="tape", verify="off")
    for number in range(16):
        if number == 9:
            layer.scale.fill_(3)
        assert torch.equal(step(X), X * (2 if number < 9 else 3))
    assert step.stats.replayed >= 8
