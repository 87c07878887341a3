"""Steps that change the containers that they are fed: as in eager code where Python runs, and refused by name else."""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from graphplan import FeedError, HostEffectError, SkipReason, VerifyError, compile_plan, graph_step, graphed, piecewise
from graphplan.feed.call_arguments import CallArguments
from tests.facts import assert_same, flatten
from tests.lightning.parts import fit, tape, with_step
from tests.models import CALLS, float_batches
from tests.twins import (
    WARMUP,
    Rig,
    assert_equals_eager,
    assert_falls_back,
    assert_refused,
    build,
    managed,
)


@dataclass
class Held:
    """A batch with room for what a step makes of it."""

    x: Tensor
    seen: Any = None

    def scaled(self) -> Tensor:
        return 0.5 * self.x


class Pair(NamedTuple):
    """A container that cannot change, around one that can."""

    x: Tensor
    notes: list[Any]


def rig_of(step_of: Callable[..., Tensor], make_calls: Callable[[], list[tuple[Any, ...]]]) -> Rig:
    """A training step on ``step_of(model, *args)``."""
    model = nn.Linear(8, 4)
    optimizer = SGD(model.parameters(), lr=0.05, fused=True)

    def train_step(*args: Any) -> Tensor:
        optimizer.zero_grad()
        loss = step_of(model, *args)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Rig(train_step, {"model": model, "optimizer": optimizer}, make_calls())


def _xs() -> list[Tensor]:
    return [x for x, _ in float_batches(CALLS)]


def _fresh(make: Callable[[Tensor], Any]) -> Callable[[], list[tuple[Any, ...]]]:
    """A container of its own for each call."""
    return lambda: [(make(x),) for x in _xs()]


def _kept(make: Callable[[], Any]) -> Callable[[], list[tuple[Any, ...]]]:
    """The same container for all calls."""

    def calls() -> list[tuple[Any, ...]]:
        kept = make()
        return [(x, kept) for x in _xs()]

    return calls


def appends(model: nn.Module, x: Tensor, history: list[Tensor]) -> Tensor:
    loss = model(x).square().mean()
    history.append(loss.detach())
    return loss


def carries(model: nn.Module, x: Tensor, memory: dict[str, Tensor]) -> Tensor:
    hidden = model(x) + memory.get("h", torch.zeros(()))
    memory["h"] = hidden.detach()
    return hidden.square().mean()


def counts(model: nn.Module, x: Tensor, metrics: dict[str, int]) -> Tensor:
    metrics["n"] += 1
    return model(x).square().mean()


def puts(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    batch["y"] = model(batch["x"]).detach()
    return F.mse_loss(model(batch["x"]), 0.5 * batch["y"])


def pops(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch.pop("labels"))


def puts_nothing(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    batch["parts"] = []
    return model(batch["x"]).square().mean()


def opens(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    batch["more"] = {name: batch["x"].mean() for name in "abcd"}
    return model(batch["x"]).square().mean()


def replaces(model: nn.Module, batch: list[Tensor]) -> Tensor:
    batch[0] = batch[0] / 2
    return model(batch[0]).square().mean()


def sets(model: nn.Module, batch: Held) -> Tensor:
    batch.seen = batch.x.mean()
    return model(batch.scaled()).square().mean()


def adds_attribute(model: nn.Module, batch: Held) -> Tensor:
    batch.new = 3  # type: ignore[attr-defined]
    return model(batch.x).square().mean()


def notes(model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
    batch[0]["inner"].notes.append(1)
    return model(batch[0]["inner"].x).square().mean()


def enqueues(model: nn.Module, x: Tensor, queue: deque[Tensor]) -> Tensor:
    queue.append(x)
    return model(x).square().mean()


def _labelled(x: Tensor) -> dict[str, Tensor]:
    return {"x": x, "labels": torch.ones(6, 4), "more": x}


CHANGES: list[tuple[Any, Any, str]] = [
    (appends, _kept(list), r"args\[1\]\[0\] was added"),
    (carries, _kept(lambda: {"h": torch.ones(6, 4)}), r"args\[1\]\['h'\] was replaced by another tensor"),
    (counts, _kept(lambda: {"n": 0}), r"args\[1\]\['n'\] was 0 and is now 1"),
    (puts, _fresh(lambda x: {"x": x}), r"args\[0\]\['y'\] was added"),
    (puts, _fresh(lambda x: OrderedDict(x=x)), r"args\[0\]\['y'\] was added"),
    (pops, _fresh(_labelled), r"args\[0\]\['labels'\] was removed"),
    (
        puts_nothing,
        _fresh(lambda x: {"x": x}),
        r"\(\(\{'x': \*\}\), .* became \(\(\{'x': \*, 'parts': \[\]\}\), .*",
    ),
    (
        opens,
        _fresh(lambda x: {"x": x, "more": None}),
        r"args\[0\]\['more'\] was None, and has \['a'\], \['b'\] and 2 more now",
    ),
    (replaces, _fresh(lambda x: [x, x]), r"args\[0\]\[0\] was replaced by another tensor"),
    (sets, _fresh(Held), r"args\[0\]\.seen was None and is now a Tensor"),
    (adds_attribute, _fresh(Held), r"args\[0\]\.new was added"),
    (
        notes,
        _fresh(lambda x: ({"inner": Pair(x, [])}, x)),
        r"args\[0\]\[0\]\['inner'\]\.notes\[0\] was added",
    ),
    (enqueues, _kept(lambda: deque(maxlen=50)), r"args\[1\]\[0\] was added"),
]
NAMES = [f"{step.__name__}-{number}" for number, (step, _, _) in enumerate(CHANGES)]


@pytest.mark.parametrize(("step", "calls", "text"), CHANGES, ids=NAMES)
def test_a_change_is_refused_by_name(step: Any, calls: Any, text: str) -> None:
    """The eager calls before are as eager code is, containers included, and the refused one has not happened."""
    make = partial(rig_of, step, calls)
    assert_refused(
        make, HostEffectError, rf"the step changes a container among its arguments: {text}\. .*on_failure='eager'"
    )


@pytest.mark.parametrize(("step", "calls", "text"), CHANGES, ids=NAMES)
def test_a_change_in_a_step_that_falls_back(step: Any, calls: Any, text: str) -> None:
    """Every call changes the caller's own containers, that of the refusal too."""
    assert_falls_back(partial(rig_of, step, calls), SkipReason.HOST_EFFECT, text)


@pytest.mark.parametrize("on_failure", ["raise", "eager"])
def test_what_a_trace_changes_is_put_back_or_stands(on_failure: str) -> None:
    """After one warm-up step, a trace is the first to know."""
    rigs = [build(lambda: rig_of(carries, _kept(lambda: {"h": torch.ones(6, 4)}))) for _ in range(2)]
    step = managed(rigs[0], on_failure=on_failure, warmup_steps=1)
    text = r"args\[1\]\['h'\] was replaced by another tensor"
    x, memory = rigs[0].calls[0]
    step(x, memory)
    after_one = memory["h"]
    if on_failure == "raise":
        with pytest.raises(HostEffectError, match=text):
            step(x, memory)
        assert memory["h"] is after_one
        return
    with pytest.warns(UserWarning, match=text):
        step(x, memory)
    step(x, memory)
    for _ in range(3):
        rigs[1].step(x, rigs[1].calls[0][1])
    assert_same(flatten(memory=rigs[1].calls[0][1]), flatten(memory=memory))
    assert step.stats.traced == 1


def test_state_that_the_first_call_makes() -> None:
    """The structure is another one only once: a trace comes one call later."""
    make = partial(rig_of, carries, _kept(dict))
    text = r"args\[1\]\['h'\] was replaced by another tensor"
    assert_refused(make, HostEffectError, text, done=WARMUP + 1)
    assert_falls_back(make, SkipReason.HOST_EFFECT, text)


def test_what_is_changed_in_every_call_of_another_signature() -> None:
    """No trace would ever come, since each call has one item more."""
    assert_refused(partial(rig_of, appends, _kept(list)), HostEffectError, "was added", done=2, warmup_steps=1)


def first_call_only(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if "mask" not in batch:
        batch["mask"] = (batch["x"] > 0).float()
    return model(batch["x"] * batch["mask"]).square().mean()


def pops_and_puts_back(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch.pop("x")
    loss = model(x).square().mean()
    batch["x"] = x
    return loss


def puts_what_is_there(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    batch["x"] = batch["x"].to("cpu")
    batch["n"] = batch["n"] - 1 + 1
    batch["parts"] = list(batch["parts"])
    return model(batch["x"]).square().mean()


def asks_its_batch(model: nn.Module, batch: Held) -> Tensor:
    return model(batch.scaled()).square().mean()


@pytest.mark.parametrize(
    ("step", "make"),
    [
        (pops_and_puts_back, lambda x: {"y": x, "x": x}),
        (puts_what_is_there, lambda x: {"x": x, "n": 1000, "parts": [x]}),
        (asks_its_batch, Held),
    ],
)
def test_containers_that_are_as_they_were(step: Any, make: Any) -> None:
    """Fresh ones, and one for all calls followed by others."""
    assert_equals_eager(partial(rig_of, step, _fresh(make)))

    def one_and_others() -> list[tuple[Any, ...]]:
        first, *others = map(make, _xs())
        return [(first,)] * (CALLS - 5) + [(other,) for other in others[:5]]

    assert_equals_eager(partial(rig_of, step, one_and_others))


def test_a_batch_with_methods_is_no_owner() -> None:
    """Though the same one turns up in each call: it is not kept."""
    rig = build(lambda: rig_of(asks_its_batch, list))
    step = managed(rig)
    batch = Held(_xs()[0])
    for _ in range(CALLS):
        step(batch)
    kept = weakref.ref(batch)
    del batch
    assert step.stats.replayed > 0
    assert kept() is None


def test_what_the_first_call_makes_is_there_for_the_others() -> None:
    """One eager step that changes its batch is no reason to refuse those that do not."""
    batch = {"x": torch.randn(6, 8)}
    rig = build(lambda: rig_of(first_call_only, lambda: [(batch,)] * CALLS))
    step = managed(rig)
    for args in rig.calls:
        step(*args)
    assert set(batch) == {"x", "mask"}
    assert step.stats.replayed > 8


def test_keyword_arguments() -> None:
    """The path is that of the keyword."""
    rig = build(lambda: rig_of(appends, list))

    def step_of(x: Tensor, *, history: list[Tensor]) -> Tensor:
        return rig.step(x, history)

    step = graph_step(step_of, owners=rig.owners, backend="tape")
    history: list[Tensor] = []
    for x in _xs()[:WARMUP]:
        step(x, history=history)
    with pytest.raises(HostEffectError, match=r"kwargs\['history'\]\[0\] was added"):
        step(_xs()[0], history=history)
    assert len(history) == WARMUP


@pytest.mark.parametrize("options", [{}, {"eager_if": lambda batch: True}, {"backend": "eager"}, {"mode": "inference"}])
@pytest.mark.parametrize("make", [lambda x: {"x": x}, lambda x: [x, 1], Held, lambda x: OrderedDict(x=x)])
def test_an_eager_call_gets_the_caller_s_own_container(options: Any, make: Any) -> None:
    """A step that hands its batch on hands on that very object."""
    step = graph_step(lambda batch: batch, **{"owners": {}, "backend": "tape", **options})
    batch = make(torch.randn(6, 8))
    assert step(batch) is batch


def test_calls_that_are_refused_or_surrounded_get_it_too() -> None:
    """Every way on which Python runs: what nobody can feed, a mode around, gradients that are wanted."""
    step = graph_step(lambda batch: batch if len(batch["x"]) else None, owners={}, backend="tape", on_failure="eager")
    odd = {"x": {1, 2}}
    with pytest.warns(UserWarning, match="an argument has the type set"):
        assert all(step(odd) is odd for _ in range(WARMUP + 2))
    batch = {"x": torch.randn(3)}
    with torch.autograd.forward_ad.dual_level():
        assert step(batch) is batch
    assert graphed(lambda batch: batch, backend="tape")(batch) is batch
    wanted = {"x": torch.randn(3, requires_grad=True)}
    assert graphed(lambda batch: batch, backend="tape")(wanted) is wanted


@pytest.mark.twice
def test_a_change_that_only_a_check_sees() -> None:
    """The eager step of the first check is the first that changes its container."""
    counter = iter(range(1000))

    def step_of(model: nn.Module, x: Tensor, history: dict[str, Any]) -> Tensor:
        # What an iterator has given lies where no guard looks.
        if next(counter) >= WARMUP + 3:
            history["seen"] = True
        return model(x).square().mean()

    rig = build(lambda: rig_of(step_of, _kept(lambda: {"seen": False})))
    step = managed(rig, allow=("*",))
    with pytest.raises(VerifyError, match=r"args\[1\]\['seen'\] was False and is now True") as caught:
        for args in rig.calls:
            step(*args)
    assert isinstance(caught.value.result, Tensor)
    assert rig.calls[0][1] == {"seen": True}


@pytest.mark.parametrize("on_failure", ["raise", "eager"])
@pytest.mark.twice
def test_a_change_that_only_the_capture_sees(on_failure: str) -> None:
    """What is recorded has containers of its own; the call is undone, or made eagerly on the caller's."""
    counter = iter(range(1000))

    def step_of(model: nn.Module, x: Tensor, history: list[Any]) -> Tensor:
        if next(counter) >= WARMUP + 2:
            history[0] = "seen"
        return model(x).square().mean()

    rig = build(lambda: rig_of(step_of, _kept(lambda: ["nothing"])))
    step = managed(rig, allow=("*",), on_failure=on_failure)
    for args in rig.calls[: WARMUP + 2]:
        step(*args)
    history = rig.calls[0][1]
    text = r"args\[1\]\[0\] was 'nothing' and is now 'seen'"
    if on_failure == "raise":
        with pytest.raises(HostEffectError, match=text):
            step(*rig.calls[0])
        assert history == ["nothing"]
    else:
        with pytest.warns(UserWarning, match=text):
            step(*rig.calls[0])
        assert history == ["seen"]
    assert step.stats.captured == 0


def test_pieces() -> None:
    """A chain whose first segment changes what it is fed goes on in pieces, that one eagerly."""

    def note(x: Tensor, seen: dict[str, Any]) -> Tensor:
        seen["sum"] = 2 * x.sum()
        return 2 * x

    def add_one(x: Tensor) -> Tensor:
        return x + 1

    chain = piecewise([note, add_one], backend="tape")
    seen = {"sum": torch.zeros(())}
    for number in range(12):
        x = torch.full((3,), float(number))
        assert torch.equal(chain(x, seen), 2 * x + 1)
        assert seen["sum"] == 6 * number
    assert "args[1]['sum'] was replaced by another tensor" in chain.reasons["note"]
    assert chain.num_graphs == 1


def test_a_plan_is_not_compiled_of_such_a_step() -> None:
    """And the container of the call is left alone."""
    history: list[Tensor] = []
    rig = build(lambda: rig_of(appends, list))
    with pytest.raises(HostEffectError, match=r"args\[1\]\[0\] was added"):
        compile_plan(rig.step, _xs()[0], history, owners=rig.owners)
    assert history == []


@pytest.mark.parametrize("options", [{"shapes": "exact"}, {"shapes": "bucket", "buckets": [4, 8]}])
def test_a_graphed_function(options: Any) -> None:
    """Calls as they came change the caller's own containers; others are refused."""
    model = nn.Linear(8, 4)

    def score(x: Tensor, found: dict[str, Any]) -> Tensor:
        found["best"] = model(x).max()
        return model(x)

    for on_failure in ("raise", "eager"):
        fast = graphed(score, owners={"model": model}, backend="tape", on_failure=on_failure, **options)
        found = {"best": torch.zeros(())}
        text = r"args\[1\]\['best'\] was replaced by another tensor"
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            fast(torch.ones(3, 8), found)
        assert torch.equal(found["best"], model(torch.ones(3, 8)).max())
        before = copy(found)
        with torch.no_grad():
            if on_failure == "raise":
                with pytest.raises(HostEffectError, match=text):
                    fast(torch.zeros(3, 8), found)
                assert found["best"] is before["best"]
                continue
            with pytest.warns(UserWarning, match=text):
                fast(torch.zeros(3, 8), found)
            for _ in range(3):
                fast(torch.rand(3, 8), found)
                assert found["best"] is not before["best"]
                before = copy(found)
        assert fast.num_graphs == 0


def test_a_padded_function_that_is_called_at_a_capture_size() -> None:
    """From the second call on, its container is a copy: the trace tells, and later calls get the caller's own."""

    def score(x: Tensor, found: dict[str, Any]) -> Tensor:
        found["best"] = x.max()
        return 2 * x

    fast = graphed(score, backend="tape", shapes="bucket", buckets=[4], on_failure="eager")
    found = {"best": torch.zeros(())}
    fast(torch.ones(4, 8), found)
    with pytest.warns(UserWarning, match=r"args\[1\]\['best'\] was replaced by another tensor"):
        fast(torch.ones(4, 8), found)
    for number in (1.0, 2.0, 3.0):
        fast(torch.full((4, 8), number), found)
        assert found["best"] == number
    fast = graphed(score, backend="tape", shapes="bucket", buckets=[4])
    fast(torch.ones(4, 8), found)
    with pytest.raises(HostEffectError, match=r"args\[1\]\['best'\] was replaced by another tensor"):
        fast(torch.ones(4, 8), found)


def _takes_out(self: Any, batch: Any, batch_idx: int) -> Tensor:
    y = batch.pop()
    loss: Tensor = self.loss_of((batch[0], y))
    return loss


def _halves(self: Any, batch: Any, batch_idx: int) -> Tensor:
    batch[0] = batch[0] / 2
    loss: Tensor = self.loss_of(batch)
    return loss


def _looks_at_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    self.__dict__.setdefault("at_end", []).append([len(batch), batch[0].sum()])


def _crops(self: Any, batch: Any, batch_idx: int) -> Tensor:
    batch.x, batch.y = batch.x[:4], batch.y[:4]
    loss: Tensor = self.loss_of((batch.x, batch.y))
    return loss


@dataclass
class Batch:
    """A batch of a loader's."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        return (self.x, self.y)[index]


@pytest.mark.parametrize("step", [_takes_out, _halves, _crops])
def test_a_training_step_that_changes_its_batch(step: Any, tmp_path: Path) -> None:
    """Training is the same, and later hooks get the batch as the step has left it, before replays and after them."""

    def as_class(self: Any, batch: Any, index: int) -> Any:
        return Batch(*batch) if step is _crops else batch

    callback = tape(warmup_steps=1)
    found, eager = (
        fit(with_step(step, on_train_batch_end=_looks_at_end, on_before_batch_transfer=as_class), folder, *given)
        for folder, given in ((tmp_path / "graphed", [callback]), (tmp_path / "eager", []))
    )
    assert callback.stats.replayed > 10
    assert_same(*(flatten(model=run.module.state_dict(), at_end=run.module.at_end) for run in (eager, found)))


def _puts_in(self: Any, batch: Any, batch_idx: int) -> Tensor:
    logits = self.net(batch["x"])
    batch["deep"][0]["logits"] = logits.detach()
    batch["deep"].append(batch_idx % 1)
    del batch["deep"][0]["gone"]
    loss: Tensor = F.cross_entropy(logits, batch["y"])
    return loss


def test_a_training_step_that_puts_results_into_its_batch(tmp_path: Path) -> None:
    """A callback that draws predictions finds them there, in the containers that it had before."""
    callback = tape(warmup_steps=1)

    def nested(self: Any, batch: Any, index: int) -> Any:
        return {"x": batch[0], "y": batch[1], "deep": [{"gone": 1}]} if self.trainer.training else batch

    def keep(self: Any, batch: Any, batch_idx: int) -> None:
        self.before = batch["deep"], batch["deep"][0]

    def compare(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert batch["deep"] is self.before[0]
        assert batch["deep"][0] is self.before[1]
        self.__dict__.setdefault("at_end", []).append([batch["deep"], sorted(batch)])

    hooks = {"on_before_batch_transfer": nested, "on_train_batch_start": keep, "on_train_batch_end": compare}
    found, eager = (
        fit(with_step(_puts_in, **hooks), folder, *given)
        for folder, given in ((tmp_path / "graphed", [callback]), (tmp_path / "eager", []))
    )
    assert callback.stats.replayed > 10
    assert_same(*(flatten(model=run.module.state_dict(), at_end=run.module.at_end) for run in (eager, found)))


class Registered:
    """A container that only pytree knows."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.cache: dict[str, Tensor] = {}


torch.utils._pytree.register_pytree_node(Registered, lambda held: ([held.x], None), lambda items, _: Registered(*items))


def test_a_registered_container() -> None:
    """What pytree finds in it counts; what else it keeps is only put back."""
    held = Registered(torch.zeros(2))
    fed = CallArguments((held,), {}).watch()
    held.cache["seen"] = held.x
    assert fed.change() is None
    old, held.x = held.x, torch.ones(2)
    assert "args[0][0] was replaced by another tensor" in str(fed.change())
    fed.restore()
    assert held.x is old
    assert held.cache == {}


class Cache:
    """What a model of a library keeps for its next call: an object without tensors at first."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []


def test_an_object_without_tensors_that_the_step_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the object itself was said to be gone."""
    monkeypatch.setattr(Cache, "__module__", yaml.__name__)
    monkeypatch.setattr(yaml, "Cache", Cache, raising=False)

    def fill(x: Tensor, cache: Cache) -> Tensor:
        cache.layers.append(2 * x)
        return cache.layers[0].sum()

    fast = graphed(fill, backend="tape")
    text = (
        r"among its arguments: kwargs\['cache'\] was a Cache without tensors, and has \.layers\[0\] "
        r"now\. .*on an object that"
    )
    with torch.no_grad(), pytest.raises(HostEffectError, match=text):
        for _ in range(8):
            fast(torch.ones(2), cache=Cache())


class Described:
    """A part of a batch without tensors."""

    scale = 2.0

    def __init__(self) -> None:
        self.name = "a"


@pytest.mark.parametrize(
    ("thing", "read", "text"),
    [
        (
            lambda: StepLR(SGD([nn.Parameter(torch.zeros(2))]), 5),
            lambda scheduler: scheduler.gamma,
            r"an argument has the type StepLR, .*: use it from the enclosing scope, and name it",
        ),
        (
            Described,
            lambda described: described.scale,
            r"an argument has the type Described, .*: make its class a dataclass, whose fields",
        ),
        (
            lambda: {1, 2},
            len,
            r"an argument has the type set, .*: pass tensors in dicts, tuples, lists, dataclasses or objects",
        ),
    ],
)
def test_advice_for_what_cannot_be_fed(thing: Any, read: Any, text: str) -> None:
    """Once a trace has shown that the step reads it."""
    step = graph_step(lambda x, other: x * read(other), owners={}, backend="tape")
    with pytest.raises(FeedError, match=text):
        for _ in range(WARMUP + 2):
            step(torch.zeros(2), thing())
