"""`piecewise`: chains of functions and models, of which not everything can be captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import HostSyncError, OptionError, Pool, SplitError, VerifyError, graphed, piecewise
from tests.inference.helpers import Layer
from tests.twins import by_chance


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def double(x: Tensor) -> Tensor:
    return x * 2


def shift(x: Tensor) -> Tensor:
    return x + 1


def top(x: Tensor) -> Tensor:
    """Reads a value on the host."""
    return x[: max(1, int(x.abs().sum().item()) % 3)].sum(0) + x


def pick(x: Tensor) -> Tensor:
    """Reads a value on the host that nothing but itself has made, which no graph can."""
    return top(by_chance(x))


def halve(x: Tensor) -> Tensor:
    return x / 2


def check(run: Any, calls: int, segments: Any = None, size: int = 4) -> None:
    for _ in range(calls):
        x = torch.randn(size, 8)
        wanted = x
        for segment in segments or []:
            wanted = segment(wanted)
        assert torch.equal(run(x), wanted)


def test_a_chain_that_can_be_captured_is_one_program() -> None:
    segments = [double, Layer(), shift]
    run = piecewise(segments, backend="tape")
    check(run, 8, segments)
    assert (run.scope, run.num_graphs, run.reasons) == ("full", 1, {})
    assert run.programs[0].stats.replayed >= 3


def test_what_cannot_be_captured_runs_eagerly_between_programs() -> None:
    """Found out by tracing: consecutive ones that can be captured share a program."""
    segments = [double, shift, pick, halve, Layer()]
    run = piecewise(segments, backend="tape")
    check(run, 14, segments)
    assert run.scope == "piecewise"
    assert list(run.reasons) == ["double + shift + pick + halve + Layer", "pick"]
    assert "item" in run.reasons["pick"]
    assert run.num_graphs == 2
    assert [step.__name__ for step in run.programs] == ["double + shift", "halve + Layer"]
    assert all(step.stats.replayed > 3 for step in run.programs)
    assert "scope piecewise, 2 graphs" in run.report() and "eager: pick: " in run.report()


def test_scopes() -> None:
    segments = [double, pick, shift]
    run = piecewise(segments, scope="none", backend="tape")
    check(run, 6, segments)
    assert (run.scope, run.num_graphs) == ("none", 0)
    with pytest.raises(HostSyncError, match="item"):
        check(piecewise(segments, scope="full", backend="tape"), 6, segments)
    run = piecewise(segments, scope="full", backend="tape", on_failure="eager")
    with pytest.warns(UserWarning, match="item"):
        check(run, 6, segments)
    assert run.num_graphs == 0
    run = piecewise([double, shift], scope="piecewise", backend="tape")
    check(run, 12, [double, shift])
    assert run.num_graphs == 1


def test_tuples_are_handed_on_as_arguments() -> None:
    def split(x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return x * scale, x + 1

    def join(a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {"sum": a + b, "rows": a[: int(by_chance(b).sum().item() > 0) + 1]}

    run = piecewise([split, join], backend="tape")
    for _ in range(12):
        x = torch.randn(4, 8)
        wanted, found = join(*split(x, scale=2.0)), run(x, scale=2.0)
        assert torch.equal(found["sum"], wanted["sum"]) and torch.equal(found["rows"], wanted["rows"])
        assert type(found["rows"]) is Tensor, "a view of the program's own memory is copied for the caller"
    assert run.num_graphs == 1


def test_control_flow_between_functions_of_one_pool_is_free() -> None:
    """Paths 1-2-4 and 1-3-4, in any order, over one pool; what is handed on is not copied where programs meet."""
    segments, pool = [double, shift, halve, Layer()], Pool()
    run = [graphed(segment, backend="tape", verify="off", outputs="static", pool=pool) for segment in segments]
    one, two, three, four = run
    for _ in range(5):
        two(one(torch.randn(4, 8)))
        three(one(torch.randn(4, 8)))
    for index in range(16):
        x = torch.randn(4, 8)
        left = index % 3 != 0
        middle = two(one(x)) if left else three(one(x))
        wanted = segments[3]((shift if left else halve)(double(x)))
        assert torch.equal(four(middle) + 0, wanted)
    assert all(step.num_graphs == 1 for step in run)
    adopted = four.programs[0].inputs.by_leaf[0].data_ptr()
    assert adopted in {step(x).data_ptr() for step in (two, three)}
    assert two.memory.input == 0


def test_threads_do_not_overwrite_what_is_handed_on() -> None:
    segments = [double, top, shift, Layer()]
    run = piecewise(segments, scope="piecewise", backend="tape", verify="off")

    def serve(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(20):
                x = torch.randn(4, 8, generator=generator)
                wanted = x
                for segment in segments:
                    wanted = segment(wanted)
                if not torch.equal(run(x), wanted):
                    return False
        return True

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(serve, range(6)))


class Attention(nn.Module):
    """Self-attention that looks at a value on the host."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scale = 1.0 if complex(by_chance(x).sum().detach()).real > 0 else 0.5
        return F.scaled_dot_product_attention(q, k, v) * scale


class Block(nn.Module):
    """A residual block with its own number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.feed = Attention(width), nn.Linear(width, width)
        self.gain = 0.5
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + F.gelu(self.feed(x)) * self.gain + self.bias


class Model(nn.Module):
    """Blocks between an embedding and a head, with options."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scaled: bool = False) -> dict[str, Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if mask is not None:
            x = x * mask
        return {"logits": self.last(x * 3 if scaled else x), "hidden": x}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_model_is_cut_at_modules_that_run_eagerly() -> None:
    model = Model().eval()
    run = piecewise(model, at=["blocks.*.attention"], backend="tape")
    for _ in range(9):
        x = torch.randn(2, 5, 8)
        found = run(x)
        assert same(found, model(x))
        assert all(type(tensor) is Tensor for tensor in found.values())
    assert run.scope == "piecewise" and run.num_graphs == 3
    assert run.reasons["blocks.0.attention"] == "named in at" and "float" in run.reasons["Model"]
    mask = torch.ones(2, 5, 1)
    for _ in range(6):
        assert same(run(x, mask), model(x, mask)) and same(run(x, scaled=True), model(x, scaled=True))
    assert run.num_graphs == 9, "other literals are other pieces"


def _train(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.5)


@pytest.mark.parametrize(
    "change",
    [
        _train,
        lambda model: setattr(model.blocks[1], "gain", 2.0),
        lambda model: setattr(model.blocks[0], "bias", nn.Parameter(torch.randn(8))),
        lambda model: setattr(model, "last", nn.Linear(8, 3)),
        lambda model: setattr(model.blocks[0].feed, "weight", nn.Parameter(torch.randn(8, 8))),
        lambda model: model.load_state_dict(Model().state_dict(), assign=True),
        lambda model: model.first.register_forward_hook(lambda module, args, out: out + 1),
    ],
    ids=["in place", "number", "parameter", "layer", "inner", "assign", "hook"],
)
def test_changes_of_the_model_are_seen(change: Callable[[Any], Any]) -> None:
    model = Model().eval()
    run = piecewise(model, at=["blocks.*.attention"], scope="piecewise", backend="tape", verify="off")
    for index in range(13):
        if index == 7:
            change(model)
        x = torch.randn(2, 5, 8)
        assert same(run(x), model(x))
    assert run.num_graphs == 3


def test_a_model_that_can_be_captured_is_one_program() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    run = piecewise(model, at=["1"], backend="tape")
    check(run, 7, [model])
    assert (run.scope, run.num_graphs, run.reasons) == ("full", 1, {})


class Branching(Model):
    """A model that torch.fx cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        if (x + 0 * torch.rand_like(x)).sum() > 0:
            x = x + 1
        return self.blocks[0].attention(x)


def test_a_model_that_cannot_be_taken_apart_is_eager_with_the_reason() -> None:
    model = Branching()
    run = piecewise(model, at=["blocks.0.attention"], backend="tape")
    for _ in range(5):
        x = torch.randn(2, 5, 8)
        assert torch.equal(run(x), model(x))
    assert run.scope == "none" and "torch.fx could not follow its code" in run.reasons["Branching"]
    with pytest.raises(SplitError, match=r"the Branching cannot be split: torch.fx could not follow its code"):
        piecewise(model, at=["blocks.0.attention"], scope="piecewise", backend="tape")(x)


class Scaled(nn.Module):
    """A model that computes with numbers in an object and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.settings = SimpleNamespace(scale=1.0)
        self.scales = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.settings.scale * self.scales[0]


def test_values_that_torch_fx_makes_constants_are_guarded() -> None:
    """Pieces are made anew when one changes, also if the list becomes empty and full again."""
    model = Scaled()
    run, x = piecewise(model, at=["layer"], scope="piecewise", backend="tape", verify="off"), torch.randn(4, 8)
    for change in (
        lambda: None,
        lambda: setattr(model.settings, "scale", 3.0),
        lambda: model.scales.__setitem__(0, 5.0),
        lambda: setattr(model, "scales", [7.0]),
    ):
        change()
        for _ in range(6):
            assert torch.equal(run(x), model(x))
    assert run.num_graphs == 1
    model.scales.clear()
    with pytest.raises(SplitError, match="list index out of range"):
        run(x)


FACTOR = 1.0


class Sneaky(nn.Module):
    """A model that does something else in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * FACTOR


def test_what_torch_fx_does_not_see_is_found_by_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """After that, the model itself is called."""
    model, x = Sneaky(), torch.randn(4, 8)
    run = piecewise(model, at=["layer"], scope="piecewise", backend="tape")
    run(x)
    monkeypatch.setattr(f"{__name__}.FACTOR", 3.0)
    text = "the pieces of Sneaky do not give the result of the model itself: result differs"
    with pytest.raises(VerifyError, match=text):
        run(x)
    assert all(torch.equal(run(x), model(x)) for _ in range(8))
    assert run.scope == "none"
    assert text in run.reasons["Sneaky"]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: piecewise([]), r"piecewise was given \[\]; expected functions or modules"),
        (lambda: piecewise([double, 3]), "expected functions or modules"),
        (lambda: piecewise([double], scope="some"), "scope is 'some'; expected one of: full, piecewise, auto, none"),
        (lambda: piecewise([double], at=["x"]), "at is given with a list of segments"),
        (lambda: piecewise(Model()), "piecewise was given a module without at="),
        (lambda: piecewise(Model(), at="blocks"), "at is 'blocks'; expected a list of names"),
        (lambda: piecewise(Model(), at=["nowhere.*"]), r"at names 'nowhere\.\*', and the Model has no such module"),
        (
            lambda: piecewise([double], shapes="bucket", buckets=[4]),
            "shapes is 'bucket', but pieces pass on their results",
        ),
    ],
)
def test_arguments_that_make_no_sense(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        make()


def test_after_closing_nothing_is_kept() -> None:
    run = piecewise([double, shift], backend="tape")
    check(run, 6, [double, shift])
    run.close()
    assert run.num_graphs == 0
