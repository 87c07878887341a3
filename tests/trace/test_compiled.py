"""Steps that run code which ``torch.compile`` compiled: as it is in every real step, as it was written in traces."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

from graphplan import CaptureError, RefusalError, graph_step
from graphplan.backends.tape import _TapeMode
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.signature import flatten
from graphplan.observe.profile import Profile
from graphplan.observe.watching import is_kept_from_compiler
from graphplan.owners.walk import walk_owners
from graphplan.step.compiled import refuse_graphs_within, runs_compiled
from graphplan.trace.given_values import GivenValues
from graphplan.trace.mode import TraceMode
from graphplan.trace.records import Trace
from graphplan.trace.run import trace
from tests.crossing import pairs
from tests.twins import Rig, assert_equals_eager, assert_refused

# What torch says when it imports Inductor.
pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def whole(net: nn.Module, backend: Any) -> Any:
    return torch.compile(net, backend=backend, fullgraph=True)


def in_place(net: nn.Module, backend: Any) -> Any:
    net.compile(backend=backend, fullgraph=True)
    return net


def function(net: nn.Module, backend: Any) -> Any:
    return torch.compile(lambda x: net(x), backend=backend)


def rig(how: Callable[[nn.Module, Any], Any], backend: Any = "aot_eager", drops: float = 0.3) -> Rig:
    torch._dynamo.reset()
    net, losses = Net(), []
    net.layers[2].p = drops
    optimizer = AdamW(net.parameters(), lr=1e-2, fused=True)
    compiled = how(net, backend)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(compiled(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        return loss

    return Rig(step, {"net": net, "optimizer": optimizer, "losses": losses}, calls())


def calls() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(5, 6), torch.randint(0, 3, (5,))) for _ in range(14)]


@pytest.mark.parametrize(("how", "replayed"), [(whole, 4), (in_place, 7), (function, 6)])
def test_compiled_code_is_replayed(how: Callable[[nn.Module, Any], Any], replayed: int) -> None:
    """Dropout, running statistics and a list included: a trace is undone, and the step taken as it is.

    What compiled code names is seen in a trace for the first time, so that tracing, or the warm-up, begins anew.
    """
    assert_equals_eager(partial(rig, how), replayed=replayed)


def other_numbers(graph: Any, examples: Any) -> Any:
    """A compiler whose code comes to other bits than what it is made of."""
    return lambda *args: [out * 1.001 for out in graph(*args)]


def test_other_numbers_are_refused() -> None:
    text = r"torch\.compile compiled.*another result than the compiled code"
    assert_refused(partial(rig, whole, other_numbers), CaptureError, text)


def itself_rig(backend: Any) -> Rig:
    """Nothing but a compiled function, which updates running statistics and drops out."""
    torch._dynamo.reset()
    net = Net()
    return Rig(torch.compile(lambda x: net(x), backend=backend), {"net": net}, [args[:1] for args in calls()])


@pytest.mark.parametrize("reads", [False, True], ids=["number", "read"])
def test_what_is_refused_beside_compiled_code_alone(reads: bool) -> None:
    """A number that is counted up, and one of the device: other steps have these replayed."""

    def make(*, compiled: bool) -> Rig:
        torch.manual_seed(0)
        net: Any = Net()
        net.calls, net.shown = 0, 0.0
        part = torch.compile(net.layers, backend="aot_eager") if compiled else net.layers
        optimizer = SGD(net.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(part(x), y)
            if reads:
                net.shown = loss.item()
            elif net.calls >= 0:
                net.calls += 1
                loss = loss * (1 + 0.001 * net.calls)
            loss.backward()
            optimizer.step()
            return loss.detach()

        calls = [(torch.randn(5, 6), torch.randint(3, (5,))) for _ in range(10)]
        return Rig(step, {"net": net, "optimizer": optimizer}, calls)

    rig = make(compiled=True)
    step = graph_step(rig.step, owners=rig.owners, backend="tape")
    with pytest.raises(
        RefusalError, match=r"code that torch\.compile compiled: in such a step, graphplan neither follows numbers"
    ):
        for args in rig.calls:
            step(*args)
    rig = make(compiled=False)
    step = graph_step(rig.step, owners=rig.owners, backend="tape")
    for args in rig.calls:
        step(*args)
    assert step.stats.replayed >= 3


def test_a_step_that_is_compiled_itself() -> None:
    """It is compiled code like any other: taken as it is where the bits are the same, else refused."""
    assert_equals_eager(partial(itself_rig, "aot_eager"), replayed=6)
    text = r"torch\.compile compiled.*another result than the compiled code"
    assert_refused(partial(itself_rig, other_numbers), CaptureError, text)


GRAPHS_WITHIN: dict[str, tuple[dict[str, Any], bool]] = {
    "default": ({}, False),
    "default mode": ({"mode": "default"}, False),
    "reduce-overhead": ({"mode": "reduce-overhead"}, True),
    "max-autotune": ({"mode": "max-autotune"}, True),
    "max-autotune-no-cudagraphs": ({"mode": "max-autotune-no-cudagraphs"}, False),
    "option": ({"options": {"triton.cudagraphs": True}}, True),
    "other option": ({"options": {"triton.cudagraphs": False}}, False),
    "aot_eager": ({"backend": "aot_eager"}, False),
    "cudagraphs": ({"backend": "cudagraphs"}, True),
    "cudagraphs as a function": ({"backend": torch._dynamo.lookup_backend("cudagraphs")}, True),
}


def _placed(where: str, options: dict[str, Any]) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Owners, and a step, one of which has compiled code at the place of that name."""
    net = Net()
    if where == "in place":
        net.layers[0].compile(**options)
        return {"net": net}, lambda x: x
    compiled = torch.compile(net if where == "module" else net.forward if where == "method" else F.relu, **options)
    if where == "step":
        return {}, compiled
    return ({"net": compiled}, lambda x: x) if where == "module" else ({}, lambda x: compiled(x))


@pytest.mark.parametrize("mode", GRAPHS_WITHIN)
@pytest.mark.parametrize(
    ("where", "name"),
    [("module", "Net"), ("in place", "Linear"), ("method", r"Net\.forward"), ("function", "relu"), ("step", "relu")],
)
def test_compiled_code_with_graphs_of_its_own(where: str, name: str, mode: str) -> None:
    """Refused on CUDA; on the CPU the same code captures nothing."""
    options, captures = GRAPHS_WITHIN[mode]
    owners, step = _placed(where, options)
    walk = walk_owners(owners)
    assert runs_compiled(walk, step)
    refuse_graphs_within(walk, step, torch.device("cpu"))
    text = rf"gave {name} CUDA graphs of its own .*mode='max-autotune-no-cudagraphs'"
    with pytest.raises(CaptureError, match=text) if captures else nullcontext():
        refuse_graphs_within(walk, step, torch.device("cuda", 0))


def test_what_is_exempt_from_compilation_is_not_compiled() -> None:
    """Traces of it are real steps."""
    step = assert_equals_eager(partial(rig, lambda net, backend: torch.compiler.disable(lambda x: net(x))))
    assert step.stats.traced == 1


def test_a_compiled_function_in_a_trace() -> None:
    """The compiler does not look at what watches the step."""
    graphs: list[Any] = []

    def compiler(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: (x * 2).sin(), backend=compiler)
    x, record = torch.randn(3), Trace()
    feed = flatten((x,), {})
    result, _ = trace(compiled, feed, CallArguments.of(feed).watch(), owners={}, device=x.device, record=record)
    assert torch.equal(result, (x * 2).sin())
    assert [operator.name for operator in record.operators] == ["aten.mul.Tensor", "aten.sin.default"]
    assert not graphs


@pytest.mark.parametrize("kind", [TraceMode, _TapeMode, GivenValues])
def test_calls_of_modes_are_not_guarded_against_the_compiler(kind: type) -> None:
    """torch wraps the method of a class that is exempted otherwise, which takes a tenth of a trace."""
    called: Any = kind.__torch_dispatch__  # type: ignore[attr-defined]
    assert called.__code__.co_name == "__torch_dispatch__"


def test_a_torch_that_cannot_be_told_to_keep_its_compiler_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It guards every call itself, as it does by default."""
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")
    assert not is_kept_from_compiler(calls.__code__)
    assert TraceMode._should_skip_dynamo()


class Counting:
    """A compiler that makes nothing faster, and counts what it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, examples: Any) -> Any:
        self.graphs += 1
        return graph.forward


class Trainer:
    """A class of the user's own, which is no module and holds the compiled one. Replays need SGD's fused kernel."""

    def __init__(self, compiler: Any, *, fullgraph: bool = True, device: str = "cpu") -> None:
        self.net = Net().to(device)
        self.model = torch.compile(self.net, backend=compiler, fullgraph=fullgraph)
        self.optimizer = SGD(self.net.parameters(), lr=1e-2, momentum=0.9, fused=True)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class Outer(nn.Module):
    """Holds a module whose forward calls a compiled one that nothing else holds."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.forward = lambda x, y: inner.step(x, y)


def _helped(trainer: Trainer) -> Callable[..., Any]:
    def helper(x: Tensor, y: Tensor) -> Tensor:
        return trainer.step(x, y)

    return lambda x, y: helper(x, y)


HIDDEN: dict[str, tuple[Callable[[Trainer], Any], Callable[[Trainer], Any]]] = {
    "method": (lambda trainer: trainer.step, lambda trainer: None),
    "owners are inside": (lambda trainer: trainer.step, lambda trainer: [trainer.net]),
    "all owners": (lambda trainer: trainer.step, lambda trainer: [trainer.net, trainer.optimizer]),
    "helper": (_helped, lambda trainer: None),
    "outer module": (Outer, lambda trainer: None),
}


@pairs(sizes=[(5,), (5, 7)], fullgraph=[False, True], how=HIDDEN)
@pytest.mark.crossed(3)
def test_what_nobody_shows_is_compiled_as_without_graphplan(
    how: str, fullgraph: bool, sizes: tuple[int, ...], device: torch.device, backend: str
) -> None:
    """As many graphs, the bits of the compiled run, and replays: discovery stays out of the compiler's sight."""
    call_of, owners_of = HIDDEN[how]
    batches = [
        (torch.randn(size, 6, device=device), torch.randint(0, 3, (size,), device=device)) for size in (sizes * 24)[:24]
    ]
    found = []
    for graphed in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        compiler = Counting()
        trainer = Trainer(compiler, fullgraph=fullgraph, device=str(device))
        step = call_of(trainer)
        if graphed:
            step = graph_step(step, owners=owners_of(trainer), backend=backend, min_speedup=0)
        torch.manual_seed(1)
        losses = [step(*batch).clone() for batch in batches]
        found.append((compiler.graphs, torch.stack(losses), trainer.net.state_dict()))
    assert step.stats.captured == len(sizes) and step.stats.replayed >= 6, step.report()
    assert found[0][0] == found[1][0] >= len(sizes)
    torch.testing.assert_close(found[0][1:], found[1][1:], rtol=0, atol=0)


def test_compiled_code_that_captures_itself_is_found_where_it_runs() -> None:
    """Wherever it is held; only on CUDA does it capture."""
    torch._dynamo.reset()
    trainer = Trainer("aot_eager", fullgraph=False)
    trainer.model = torch.compile(trainer.net, backend="cudagraphs")
    with Profile() as profile:
        trainer.model(torch.randn(5, 6))
    walk = walk_owners({"net": trainer.net})
    assert not runs_compiled(walk, trainer.step)
    text = r"gave Net CUDA graphs of its own .*mode='max-autotune-no-cudagraphs'"
    with pytest.raises(CaptureError, match=text):
        refuse_graphs_within(walk, trainer.step, torch.device("cuda", 0), profile.executed.compiled)


class Around(torch.optim.Optimizer):
    """Steps another optimizer, and has no groups and hooks of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Around], ids=["plain", "wrapped"])
@pytest.mark.parametrize("how", [whole, in_place])
def test_all_steps_run_the_kernel_of_replays(how: Callable[[nn.Module, Any], Any], wrap: Callable[[Any], Any]) -> None:
    """The first ones, too, though their code is not looked at."""
    kernels: list[Any] = []

    def train(fused: bool | None) -> list[Tensor]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        net = Net()
        compiled, inner = how(net, "eager"), AdamW(net.parameters(), lr=1e-2, fused=fused)
        optimizer = wrap(inner)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = compiled(x).square().mean()
            loss.backward()
            kernels.append(inner.param_groups[0]["fused"])
            optimizer.step()
            return loss

        call = step if fused else graph_step(step, backend="tape")
        return [*(call(torch.randn(5, 6)) for _ in range(12)), *net.parameters()]

    expected = train(True)
    kernels.clear()
    found = train(None)
    assert all(map(torch.equal, expected, found))
    assert set(kernels) == {True}
