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

from graphplan import HostScalarError, HostSyncError, UnownedTensorError, graph_step
from tests.devices import BACKEND, on_device
from tests.models import CALLS, Box, float_batches
from tests.twins import BEFORE_REPLAY, SECOND_TRACE, Rig, assert_refused

X = torch.arange(8.0).reshape(2, 4) / 8


class Scripted(nn.Module):
    """Is scripted: what it is made of lies in C++."""

    factor: float
    factors: list[float]

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.factors = 2.0, [1.0, 2.0]
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        """Scaled twice."""
        return self.norm(x) * self.factor * self.factors[1]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "factor", 3.0),
        lambda layer: setattr(layer, "factors", [1.0, 3.0]),
        lambda layer: layer.eval(),
    ],
)
@pytest.mark.parametrize("is_owner", [False, True])
def test_values_of_a_scripted_module(change: Callable[[Any], Any], is_owner: bool) -> None:
    def run(*, replays: bool) -> tuple[list[float], Any]:
        layer = torch.jit.script(Scripted())
        owners = {"layer": layer} if is_owner else None
        step = lambda x: layer(x).detach()  # noqa: E731
        call: Any = graph_step(step, owners=owners, backend="tape", warmup_steps=1, verify="off") if replays else step
        results = []
        for number in range(20):
            if number == 10:
                change(layer)
            results.append(call(X * (number + 1)).sum(1).tolist())
        return results, call

    (replayed, call), (eager, _) = run(replays=True), run(replays=False)
    assert replayed == eager
    assert call.stats.captured == 2
    assert call.stats.replayed > 8


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

    assert equals_eager(partial(make, 0)).stats.replayed == CALLS - BEFORE_REPLAY
    text = r"gets \d+ on one step and \d+ on the next, which compiled code makes of a number"
    assert_refused(on_device(partial(make, 1)), HostScalarError, text, done=SECOND_TRACE, backend=BACKEND)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_scripted_function_that_reads_a_list() -> None:
    """No operator shows it."""

    @torch.jit.script
    def scaled(x: Tensor, lengths: Tensor) -> Tensor:
        found: list[int] = lengths.tolist()
        return x / torch.tensor(float(found[0]))

    class Scales(nn.Module):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return scaled(x, lengths)

    for call in (scaled, torch.jit.script(Scales())):
        step = graph_step(lambda x, n, call=call: call(x, n), backend="tape")
        with pytest.raises(HostSyncError, match=r"tolist\(\) in the scripted \w+ reads a tensor's values on the host"):
            for number in range(6):
                step(X, torch.tensor([number + 1, 2]))
    before = torch._C.ScriptFunction.__call__
    graph_step(lambda x: x * 2, backend="tape")(X)
    assert torch._C.ScriptFunction.__call__ is before


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_number_that_a_scripted_function_is_given() -> None:
    """Was not made in it: it is like any other tensor that nothing owns."""

    @torch.jit.script
    def times(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    given = SimpleQueue[Tensor]()
    step = graph_step(lambda x: times(x, given.get()), backend="tape")
    with pytest.raises(UnownedTensorError, match="neither fed nor owned reaches"):
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
@pytest.mark.parametrize(
    "change", [lambda layer: setattr(layer, "scale", torch.tensor(3.0)), lambda layer: layer.scale.fill_(3)]
)
def test_a_tensor_that_a_scripted_module_holds(change: Callable[[Any], Any], is_owner: bool) -> None:
    layer = torch.jit.script(Holds())
    step = graph_step(lambda x: layer(x), owners={"layer": layer} if is_owner else None, backend="tape", verify="off")
    for number in range(16):
        if number == 9:
            change(layer)
        assert torch.equal(step(X), X * (2 if number < 9 else 3))
    assert step.stats.replayed >= 8
