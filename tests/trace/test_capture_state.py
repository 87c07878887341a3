"""One answer to "is this being captured?" in all forms of a step, and the real one everywhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.cuda import is_current_stream_capturing
from torch.utils.checkpoint import checkpoint

from graphplan import capture, compile_plan, graph_step, graphed
from graphplan.observe.capture_state import presenting_capture, presents_capture
from tests.twins import by_chance

BEFORE = is_current_stream_capturing.__globals__["_cuda_isCurrentStreamCapturing"]


def asks() -> bool:
    """What user code hears; a build without CUDA cannot answer by itself."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        return False


def answer(ask: Callable[[], Any] = asks) -> Any:
    """What code hears that does something with it. An assertion alone would be told the truth."""
    heard: list[Any] = []
    heard.append(ask())
    return heard[0]


ASKS: list[Callable[[], Any]] = [
    asks,
    lambda: torch.cuda.is_current_stream_capturing(),
    lambda: torch.cuda.graphs.is_current_stream_capturing(),
    lambda: torch.xpu.is_current_stream_capturing(),
    lambda: torch._C._cuda_isCurrentStreamCapturing(),
    is_current_stream_capturing,
]


@contextmanager
def restored() -> Iterator[None]:
    """Fail unless torch's own function is back in its places afterwards."""
    yield
    assert is_current_stream_capturing.__globals__["_cuda_isCurrentStreamCapturing"] is BEFORE
    assert torch._C._cuda_isCurrentStreamCapturing is BEFORE
    assert not presents_capture()
    assert not answer()


@pytest.mark.parametrize("ask", ASKS)
def test_python_hears_yes_within(ask: Callable[[], Any]) -> None:
    with restored(), presenting_capture():
        assert answer(ask) is True
        with presenting_capture():
            assert answer(ask) is True
        assert answer(ask) is True


def test_an_error_restores_the_answer() -> None:
    with restored(), pytest.raises(KeyError, match="culprit"), presenting_capture():
        raise KeyError("culprit")


def in_file(name: str) -> bool:
    """What code hears that comes from the file."""
    space = {"torch": torch, "asks": None}
    code = "def ask():\n    try:\n        return torch.cuda.is_current_stream_capturing()\n    except RuntimeError:\n"
    exec(compile(f"{code}        return False\n", name, "exec"), space)
    ask: Any = space["ask"]
    return bool(answer(ask))


def test_code_that_manages_captures_hears_the_truth() -> None:
    """torch's optimizers and graphplan ask whether a capture is really going on; torch's layers compute."""
    home, ours = Path(torch.__file__).parent, Path(graph_step.__code__.co_filename).parent
    with restored(), presenting_capture():
        assert not in_file(str(home / "optim" / "optimizer.py"))
        assert not in_file(str(home / "cuda" / "memory.py"))
        assert not in_file(str(ours / "cudagraph.py"))
        assert in_file(str(home / "nn" / "modules" / "_functions.py"))
        assert in_file("model.py")


class Careful(torch.optim.SGD):
    """An optimizer that refuses captures, as many do that are not torch's own."""

    def step(self, closure: Any = None) -> Any:
        if asked_by(self):
            raise RuntimeError("cannot be captured")
        return super().step(closure)


def asked_by(optimizer: Any) -> bool:
    return asks()


def forbids() -> None:
    if asks():
        raise RuntimeError("cannot be captured")


def forbids_for(parameters: list[nn.Parameter]) -> None:
    if asks() and len(parameters) == 1:
        raise RuntimeError("only forbids")


def test_code_that_only_forbids_captures_hears_the_truth() -> None:
    """Otherwise warm-up would raise what no eager step raises."""
    parameter = nn.Parameter(torch.ones(2))
    with restored(), presenting_capture():
        forbids()
        assert answer()
        Careful([parameter], lr=0.1).step()
        forbids_for([parameter])
        answers: list[bool] = []
        # What keeps the answer does more with it.
        answers.append(asks())
        assert answers == [True]


def test_other_threads_hear_the_truth() -> None:
    heard: list[bool] = []
    with restored(), presenting_capture():
        thread = threading.Thread(target=lambda: heard.append(asks()))
        thread.start()
        thread.join()
        assert answer()
    assert heard == [False]


def test_threads_leave_in_any_order() -> None:
    """The answers of one thread outlive those of another."""
    entered, leave = threading.Event(), threading.Event()
    heard: list[bool] = []

    def other() -> None:
        with presenting_capture():
            entered.set()
            leave.wait(10)
            heard.append(asks())

    with restored():
        with presenting_capture():
            thread = threading.Thread(target=other)
            thread.start()
            assert entered.wait(10)
        assert not answer()
        leave.set()
        thread.join()
    assert heard == [True]


def test_what_others_put_there_stays() -> None:
    """A replacement by other code in the meantime is not taken away."""
    space: Any = is_current_stream_capturing.__globals__
    with presenting_capture():
        ours = space["_cuda_isCurrentStreamCapturing"]
        theirs = space["_cuda_isCurrentStreamCapturing"] = lambda: "theirs"
    assert space["_cuda_isCurrentStreamCapturing"] is theirs
    space["_cuda_isCurrentStreamCapturing"] = BEFORE
    assert ours is not theirs


class Forked(nn.Module):
    """Computes by another formula where it is captured, and keeps what it heard."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.heard: list[tuple[bool, bool, bool]] = []

    def block(self, x: Tensor) -> Tensor:
        HEARD.append((asks(), torch.compiler.is_compiling(), torch.jit._trace.is_tracing()))
        if asks():
            return torch.relu(self.linear(x)) * 2
        return torch.relu(self.linear(x)) + 1 if x.sum() > 0 else self.linear(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)


HEARD: list[tuple[bool, bool, bool]] = []


def training(**options: Any) -> tuple[Any, Forked]:
    """A step whose model asks, in its backward pass too."""
    torch.manual_seed(0)
    model = Forked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    HEARD.clear()
    return graph_step(step, owners={"model": model, "optimizer": optimizer}, backend="tape", **options), model


def test_all_forms_of_a_step_take_one_path() -> None:
    """Warm-up, traces, capture and checks hear the same, and eager under that answer is the oracle."""
    data = [torch.randn(3, 4) for _ in range(12)]
    with restored():
        step, model = training(verify=1)
        found = [step(x) for x in data]
        assert (step.stats.replayed, step.stats.verified) == (6, 6)
        assert set(HEARD) == {(True, False, False)}
        left = {name: value.clone() for name, value in model.state_dict().items()}
    twin, model = training()
    with presenting_capture():
        expected = [twin.machine.runner.fn(x) for x in data]
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert all(torch.equal(value, left[name]) for name, value in model.state_dict().items())


def test_a_step_that_is_refused_hears_the_truth() -> None:
    """Eager for good is stock eager."""
    heard: list[bool] = []

    def step(x: Tensor) -> float:
        heard.append(asks())
        return complex(by_chance(x).sum()).real

    fast = graph_step(step, backend="tape", on_failure="eager")
    with restored():
        for _ in range(3):
            fast(torch.ones(2))
        with pytest.warns(UserWarning, match="reads a tensor's value on the host"):
            fast(torch.ones(2))
        for _ in range(2):
            fast(torch.ones(2))
    assert heard == [True] * 4 + [False] * 2


def test_a_step_that_fails_restores_the_answer() -> None:
    def step(x: Tensor) -> Tensor:
        if answer():
            raise KeyError("culprit")
        return x

    fast = graph_step(step, backend="tape")
    with restored(), pytest.raises(KeyError, match="culprit"):
        fast(torch.ones(2))


def test_calls_through_which_gradients_flow_hear_the_truth() -> None:
    heard: list[bool] = []

    def ask(x: Tensor) -> Tensor:
        heard.append(asks())
        return x * 2

    fast = graphed(ask, backend="tape")
    with restored():
        fast(torch.ones(2, requires_grad=True))
        assert heard == [False]
        with torch.no_grad():
            for _ in range(5):
                fast(torch.ones(2))
    assert set(heard[1:]) == {True}


def test_plans_and_programs_made_by_hand() -> None:
    heard: list[bool] = []

    def step(x: Tensor) -> Tensor:
        heard.append(asks())
        return x * 2

    with restored():
        plan = compile_plan(step, torch.ones(2))
        program = capture(plan, feed=(torch.ones(2),), backend="tape")
        assert torch.equal(program.replay((torch.full((2,), 3.0),)), torch.full((2,), 6.0))
    assert set(heard) == {True}
