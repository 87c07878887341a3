"""Attributes that hang on tensors, and tensors of other classes: fed ones, and those of owners."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import FeedError, Policy, SkipReason, capture, compile_plan, graph_step, graphed
from tests.crossing import each
from tests.twins import Rig, assert_falls_back, assert_same_as_eager

X = torch.arange(1.0, 5.0)


class Scaled(Tensor):
    """Has a factor, and triples what is added to it."""

    factor = 1.0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As the class says."""
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 3 if func is Tensor.add else out


class Bare(Tensor):
    """Has a factor and no methods."""

    factor = 1.0


class Weight(nn.Parameter):
    """Has a factor."""

    factor = 1.0


@pytest.fixture(autouse=True)
def _factors() -> None:
    for kind in (Scaled, Bare, Weight):
        kind.factor = 1.0


def fed(value: Any = None, *, of: type[Tensor] = Tensor, name: str = "factor") -> Tensor:
    """A tensor like a loader's, each time a new one."""
    x = X.clone().as_subclass(of)
    if value is not None:
        setattr(x, name, value)
    return x


def by_name(x: Tensor) -> Tensor:
    """Asks for the attribute."""
    return x * getattr(x, "factor", 1.0)


def privately(x: Tensor) -> Tensor:
    """Asks for one that is nobody else's affair."""
    return x * getattr(x, "_factor", 1.0)


def by_a_computed_name(x: Tensor) -> Tensor:
    """Spells no name."""
    return x * getattr(x, "fac" + str(len(x.shape))[:0] + "tor", 1.0)


def directly(x: Any) -> Tensor:
    """Just reads it."""
    return (x.add(1) * x.factor).as_subclass(Tensor)


FED: dict[str, tuple[Any, Callable[[], Tensor], Callable[[], Tensor]]] = {
    "appears": (by_name, fed, lambda: fed(3.0)),
    "goes": (by_name, lambda: fed(3.0), fed),
    "changes": (by_name, lambda: fed(2.0), lambda: fed(3.0)),
    "changes, private": (privately, lambda: fed(2.0, name="_factor"), lambda: fed(3.0, name="_factor")),
    "changes, by a computed name": (by_a_computed_name, lambda: fed(2.0), lambda: fed(3.0)),
    "changes its sign": (by_name, lambda: fed(0.0), lambda: fed(-0.0)),
    "an item changes": (lambda x: x * x.factor[1], lambda: fed((1, 2.0)), lambda: fed((1, 3.0))),
    "another class": (by_name, fed, lambda: fed(of=Scaled)),
    "a class's own becomes an instance's": (directly, lambda: fed(of=Scaled), lambda: fed(3.0, of=Scaled)),
    "an instance's becomes another": (directly, lambda: fed(2.0, of=Scaled), lambda: fed(3.0, of=Scaled)),
    "a class's changes": (directly, lambda: fed(of=Scaled), lambda: setattr(Scaled, "factor", 5.0) or fed(of=Scaled)),
    "that of a class without methods": (
        directly,
        lambda: fed(of=Bare),
        lambda: setattr(Bare, "factor", 5.0) or fed(of=Bare),
    ),
}


@each(name=FED, serve=[False, True])
def test_what_hangs_on_fed_tensors(name: str, serve: bool) -> None:
    """A program for each value; where the same comes again, so does its program."""
    function, first, second = FED[name]
    if serve:
        call: Any = graphed(function, backend="tape", verify="off")
    else:
        call = graph_step(function, backend="tape", warmup_steps=1, verify="off")
    for number in range(24):
        x = first() if number < 8 else second()
        expected, found = function(x), call(x)
        assert torch.equal(found.as_subclass(Tensor), expected.as_subclass(Tensor))
        assert str(found) == str(expected), "also what kind of tensor, and which sign a zero has"
    assert call.stats.captured == 2
    assert call.stats.replayed > 12


def test_a_parameter_is_no_plain_tensor() -> None:
    """Code may ask; whoever is fed the one gets the program of the one."""

    @graphed(backend="tape")
    def told(x: Tensor) -> Tensor:
        return x * 2 if isinstance(x, nn.Parameter) else x * 3

    plain, parameter = torch.ones(3), nn.Parameter(torch.ones(3), requires_grad=False)
    with torch.no_grad():
        for _ in range(8):
            assert torch.equal(told(plain), plain * 3)
            assert torch.equal(told(parameter), plain * 2)
    assert told.stats.captured == 2
    assert told.stats.replayed > 6


def test_single_stages_compare_what_hangs_on_tensors() -> None:
    plan = compile_plan(by_name, fed(2.0))
    program = capture(plan, feed=(fed(2.0),), policy=Policy.inference(), backend="tape")
    assert torch.equal(program.replay((fed(2.0),)), X * 2)
    with pytest.raises(FeedError, match=r"args\[0\] is .*with factor = 0x1\.8.*, and was .*with factor = 0x1\.0"):
        program.replay((fed(3.0),))


@pytest.mark.parametrize("kind", [Bare, Scaled])
def test_scalars_of_another_class_are_returned_as_such(kind: type[Tensor]) -> None:
    """With their attributes, however many there are."""

    def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = x.sum().as_subclass(kind)
        total.unit = "cm"  # type: ignore[attr-defined]
        return total, total * 2, x.mean()

    call = graph_step(step, backend="tape", warmup_steps=1, verify="off")
    for number in range(8):
        for found, expected in zip(call(X + number), step(X + number), strict=True):
            assert type(found) is type(expected)
            assert vars(found) == vars(expected)
            assert torch.equal(found.as_subclass(Tensor), expected.as_subclass(Tensor))
    assert call.stats.replayed >= 4


LEAVE: dict[str, Callable[[Any, Tensor], object]] = {
    "attribute": lambda model, total: setattr(model, "last", total),
    "tuple": lambda model, total: setattr(model, "last", (total, 2.0)),
    "item": lambda model, total: model.rows.__setitem__(0, total),
    "append": lambda model, total: model.rows.append(total),
}


def _leaving(name: str, kind: type[Tensor], unit: Any) -> Rig:
    model: Any = nn.Linear(4, 1)
    model.rows, model.last = [X], X

    def step(x: Tensor) -> None:
        total = model(x).detach().sum().as_subclass(kind)
        total.unit = unit
        LEAVE[name](model, total)

    def after(index: int) -> None:
        leaves = (model.rows[-1] if name == "append" else model.rows[0], model.last)
        left = [leaf[0] if isinstance(leaf, tuple) else leaf for leaf in leaves]
        seen.append([(type(leaf), dict(vars(leaf))) for leaf in left])

    seen: list[Any] = []
    return Rig(step, {"model": model}, [(X + number,) for number in range(12)], after, {"seen": seen})


@each(name=LEAVE, kind=[Tensor, Bare])
def test_what_hangs_on_tensors_that_a_step_leaves(name: str, kind: type[Tensor]) -> None:
    """After the capture and after replays, which nothing checks, as after eager calls."""
    step = assert_same_as_eager(partial(_leaving, name, kind, "cm"), verify="off")
    assert step.stats.replayed > 0


@pytest.mark.parametrize("name", LEAVE)
def test_what_hangs_on_left_tensors_and_is_no_value_is_refused(name: str) -> None:
    make = partial(_leaving, name, Tensor, {"name": "cm"})
    assert_falls_back(make, SkipReason.HOST_EFFECT, r"leaves a tensor at model\.\w+.* attribute unit, a dict")


def test_what_is_not_read_may_be_anything() -> None:
    call = graph_step(lambda x: x * 2, backend="tape", warmup_steps=1, verify="off")
    for _ in range(8):
        assert torch.equal(call(fed({"rows": object()}, name="origin")), X * 2)
    assert call.stats.replayed == 4


class Wrapped(Tensor):
    """Decides itself what operators do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        """A tensor without memory."""
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """On what is inside."""
        return func(*(arg.inner if isinstance(arg, Wrapped) else arg for arg in args), **(kwargs or {}))


class Number(int):
    """Has a factor."""

    def __init__(self, value: int) -> None:
        self.factor = value


def _asking(x: Tensor) -> Tensor:
    (x * x.factor).sum().backward()  # type: ignore[attr-defined]
    return x.grad  # type: ignore[return-value]


def _leaf(value: float, of: type[Tensor] = Tensor) -> Tensor:
    x = X.clone().requires_grad_().as_subclass(of).detach().requires_grad_()
    x.factor = value  # type: ignore[attr-defined]
    return x


class Pair(namedtuple("Pair", "x")):
    """Has room for attributes beside its fields."""


def _ordered() -> Any:
    batch = OrderedDict(x=X.clone())
    batch.factor = 2.0  # type: ignore[attr-defined]
    return batch


def _named() -> Any:
    batch = Pair(X.clone())
    batch.factor = 2.0
    return batch


@pytest.mark.parametrize(
    ("function", "make", "message"),
    [
        (
            lambda x: x * x.factor["a"],
            lambda: fed({"a": 2.0}),
            r"reads args\[0\]\.factor, a dict that is an attribute of an argument",
        ),
        (
            lambda x: x * x.factor,
            lambda: fed(torch.ones(4)),
            r"args\[0\]\.factor, a Tensor .*Pass it as a separate argument",
        ),
        (_asking, lambda: _leaf(2.0), r"args\[0\]\.factor, an attribute of a tensor that requires gradients"),
        (_asking, lambda: _leaf(2.0, Bare), r"args\[0\] is a Bare that requires gradients.*as_subclass\(torch\.Tensor"),
        (
            lambda x: x[1] * x[0],
            lambda: [Number(2), X],
            r"of type Number has additional attributes \(factor\)",
        ),
        (
            lambda x: x["x"] * x.factor,
            _ordered,
            r"of type OrderedDict has additional attributes \(factor\)",
        ),
        (
            lambda x: x[0].x * x[0].factor,
            lambda: [_named()],
            r"of type Pair has additional attributes \(factor\)",
        ),
        (
            lambda batch: batch.x["x"] * batch.x.factor,
            lambda: Batch(_ordered()),
            r"of type OrderedDict has additional attributes \(factor\)",
        ),
        (lambda x: x * 2, lambda: Wrapped(X), r"args\[0\] is a Wrapped, whose __torch_dispatch__ changes"),
    ],
)
def test_what_a_copy_cannot_have_is_refused(function: Any, make: Callable[[], Tensor], message: str) -> None:
    call = graph_step(function, backend="tape", warmup_steps=1, verify="off")
    with pytest.raises(FeedError, match=message):
        for _ in range(8):
            call(make())


class Owner(nn.Module):
    """Has tensors on which something may hang."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Weight(torch.ones(4), requires_grad=False)
        self.weight.__class__ = Weight
        self.plain = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("mean", torch.ones(4))
        self.listed = [torch.ones(4)]


OWNED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "changes, private": (
        lambda o: o.plain._k, lambda o: setattr(o.plain, "_k", 2.0), lambda o: setattr(o.plain, "_k", 3.0),
    ),
    "goes": (
        lambda o: getattr(o.plain, "k", 1.0), lambda o: setattr(o.plain, "k", 2.0), lambda o: delattr(o.plain, "k"),
    ),
    "changes in a dictionary": (
        lambda o: o.plain.k["a"], lambda o: setattr(o.plain, "k", {"a": 2.0}), lambda o: o.plain.k.update(a=3.0),
    ),
    "another tensor": (
        lambda o: o.plain.k,
        lambda o: setattr(o.plain, "k", torch.ones(4)),
        lambda o: setattr(o.plain, "k", torch.ones(4) * 3),
    ),
    "a class's becomes an instance's": (
        lambda o: o.weight.factor, lambda o: None, lambda o: setattr(o.weight, "factor", 3.0),
    ),
    "a class's changes": (lambda o: o.weight.factor, lambda o: None, lambda o: setattr(Weight, "factor", 3.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", OWNED)
def test_what_hangs_on_owned_tensors(name: str) -> None:
    read, prepare, change = OWNED[name]
    owner = Owner()
    prepare(owner)

    def step(x: Tensor) -> Tensor:
        return x * read(owner) * owner.plain

    call = graph_step(step, owners={"owner": owner}, backend="tape", warmup_steps=1, verify="off")
    for _ in range(8):
        before = call(X)
        assert torch.equal(before, step(X))
    assert call.stats.replayed > 2
    change(owner)
    for _ in range(8):
        assert torch.equal(call(X), step(X))
    assert not torch.equal(before, step(X))
    assert call.stats.replayed > 5


def test_tensors_that_hang_on_each_other() -> None:
    owner = Owner()
    owner.plain.other, owner.mean.other = owner.mean, owner.plain  # type: ignore[attr-defined]
    call = graph_step(
        lambda x: x * owner.plain.other, owners={"owner": owner}, backend="tape", warmup_steps=1, verify="off"
    )
    for _ in range(8):
        assert torch.equal(call(X), X)
    owner.plain.other = torch.ones(4) * 3  # type: ignore[attr-defined]
    assert torch.equal(call(X), X * 3)


@dataclass
class Batch:
    """What a step is fed."""

    x: Tensor


def test_what_somebody_set_on_a_fed_dataclass() -> None:
    """It is fed too: plain values are part of the key, tensors are inputs."""

    @graphed(backend="tape")
    def scaled(batch: Batch) -> Tensor:
        return batch.x * getattr(batch, "scale", 1.0) + getattr(batch, "shift", 0.0)

    def fed(**extra: Any) -> Batch:
        batch = Batch(torch.ones(3))
        vars(batch).update(extra)
        return batch

    ones = torch.ones(3)
    with torch.no_grad():
        for number in range(8):
            assert torch.equal(scaled(fed()), ones)
            assert torch.equal(scaled(fed(scale=2.0)), ones * 2)
            assert torch.equal(scaled(fed(scale=2.0, shift=ones * number)), ones * (2 + number))
    assert scaled.stats.captured == 3
    assert scaled.stats.replayed > 9
