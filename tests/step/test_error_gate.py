"""Errors of graphplan's own, and of foreign classes that it looks at: a named refusal, and the step is done once."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

from graphplan import EffectError, FaultError, FeedError, GraphPlanError, capture, compile_plan, graph_step
from tests.clocks import Clock, set_clock
from tests.crossing import each, pairs
from tests.facts import assert_same
from tests.step.test_training_buckets import Training, batches, bucketed
from tests.twins import Rig, build, drive, managed, state_of

CALLS = 14


class Counts:
    """What a step changes in Python."""

    def __init__(self) -> None:
        self.steps = 0
        self.losses: list[Tensor] = []
        self.mean = torch.zeros(())


def _rig() -> Rig:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
    counts = Counts()

    def step(batch: dict[str, Any]) -> dict[str, Any]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        counts.steps += 1
        counts.losses.append(loss.detach())
        counts.mean = 0.9 * counts.mean + 0.1 * loss.detach()
        return {"loss": loss, "kind": "training"}

    batches = [
        ({"x": torch.randn(5, 4), "y": torch.randint(0, 3, (5,)), "file": f"{number}.png"},) for number in range(CALLS)
    ]
    return Rig(step, {"model": model, "optimizer": optimizer, "counts": counts}, batches)


class InjectedError(Exception):
    """What graphplan does not expect."""


BEFORE: dict[str, list[str]] = {
    "graphplan.owners.discovery": ["Discovery.unknown", "Discovery._saw_module", "Discovery.kept"],
    "graphplan.step.managed": [
        "walk_owners", "runs_compiled", "Managed.add_names", "Managed.refresh", "Managed.fingerprint",
        "Managed.next_fingerprint", "Managed.grad_presence", "Managed.rows", "trace",
    ],
    "graphplan.step.state_machine": ["no_collections"],
    "graphplan.step.reasons": ["flatten"],
    "graphplan.feed.unread": ["leaf_key"],
    "graphplan.step.lookup": ["Lookup.find", "Lookup._key", "Lookup.keep", "check_feed", "KnownCall.take",
                              "FastPath.remember"],
    "graphplan.step.programs": ["Programs.get", "Programs.count_capture", "Programs.check_due"],
    "graphplan.compare.fast_compare": ["Modes.now"],
    "graphplan.program.fingerprint": ["Fingerprint.values", "Fingerprint.__init__"],
    "graphplan.program.guards": ["Guards.hold"],
    "graphplan.program.program": ["Program.fits", "Program.misfit", "Program.run_recorded"],
    "graphplan.step.stages": ["Placeholders", "capture_program", "omissions", "check_threads"],
    "graphplan.step.planner": ["build_plan"],
    "graphplan.step.memory_budget": ["MemoryBudget.make", "MemoryBudget.settle", "Snapshot"],
    "graphplan.trace.mode": ["TraceMode.operate", "TraceMode.finish"],
    "graphplan.trace.operands": ["Operands.add"],
    "graphplan.trace.changes": ["Recorder.__init__", "Recorder.changes"],
    "graphplan.observe.profile": ["Profile._note_call", "Profile._note_c_call", "Profile.reads"],
    "graphplan.trace.rate_reads": ["RateWatch.finish"],
    "graphplan.observe.executed_code": ["ExecutedCode.note"],
    "graphplan.plan.build": ["classify", "check_difference"],
    "graphplan.backends.tape": ["_TapeMode._record", "TapeRecording.__init__"],
    "graphplan.program.bindings": ["Bindings.close_step", "Bindings.bind_back", "Bindings.settle_grads"],
    "graphplan.program.outputs": ["Outputs.__init__"],
    "graphplan.program.inputs": ["StaticInputs.load"],
    "graphplan.report.stats": ["Stats.count_replay", "Stats.end_call"],
    "graphplan.step.replays": ["Check", "find_room"],
    "graphplan.verify.check": ["Check.start", "Check.first_replay", "Check.compare", "collect_values"],
    "graphplan.verify.schedule": ["Timetable.end"],
    "graphplan.owners.snapshot": ["copy_all"],
    "graphplan.feed.call_arguments": ["CallArguments.watch", "CallArguments.change"],
    "graphplan.step.runner": ["Runner.settle_backend"],
    "graphplan.optimizers.preparation": [
        "Preparation._has_newcomers", "Preparation.enter", "Preparation.leave",
    ],
    "graphplan.optimizers.rates": ["DeviceRate.push", "DeviceRate.enter", "LearningRates.attach"],
}  # fmt: skip
"""Functions that run before the step, around it, in its middle or after it."""
PLACES = [f"{module}:{name}" for module, names in BEFORE.items() for name in names]
SHORT = {
    "graphplan.step.lookup:KnownCall.take", "graphplan.step.lookup:FastPath.remember",
    "graphplan.step.managed:Managed.rows",
}  # fmt: skip
"""Without these, calls go the long way."""


@contextmanager
def raising(place: str, when: Callable[[int], bool]) -> Iterator[list[int]]:
    """Have a function of graphplan's raise in those of its calls of which ``when(number)`` is true; their numbers."""
    name, _, path = place.partition(":")
    *kinds, attribute = path.split(".")
    owner: Any = importlib.import_module(name)
    for kind in kinds:
        owner = getattr(owner, kind)
    function, fired, calls = getattr(owner, attribute), [], 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if when(calls):
            fired.append(calls)
            raise InjectedError("not expected")
        return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, attribute, call)
        yield fired


@cache
def _twin(calls: int) -> dict[str, Any]:
    rig = build(_rig)
    return drive(rig, rig.step, calls).state


WHEN: dict[str, Callable[[int], bool]] = {
    "always": lambda number: True,
    "once": lambda number: number == 3,
    "later": lambda number: number > 20,
}


@each(when=WHEN, place=PLACES)
@pytest.mark.filterwarnings("ignore:graphplan runs")
@pytest.mark.crossed(2)
def test_an_error_of_graphplans_own_leaves_an_eager_step(place: str, when: str) -> None:
    expected = _twin(CALLS)
    rig = build(_rig)
    with raising(place, WHEN[when]) as fired:
        step = managed(rig, on_failure="eager")
        found = drive(rig, step)
        assert "graphplan" in step.report()
    assert_same(expected, found.state)
    assert fired or when != "always" or place in SHORT


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.filterwarnings("ignore:graphplan runs")
@pytest.mark.crossed(2, 1)
def test_an_error_of_graphplans_own_is_a_refusal(place: str) -> None:
    rig = build(_rig)
    done, errors = 0, []
    with raising(place, WHEN["always"]):
        try:
            step = managed(rig)
            for args in rig.calls:
                step(*args)
                done += 1
        except GraphPlanError as error:
            errors.append(error)
    assert_same(_twin(done), state_of(rig))
    assert errors or place in SHORT or "InjectedError" in step.report()
    for error in errors:
        assert isinstance(error, FaultError | FeedError)
        assert "InjectedError" in str(error)
        assert "not expected" in str(error)


@pytest.mark.parametrize("place", ["program.bindings:Bindings.repeat", "program.program:Program.collect"])
@pytest.mark.parametrize("on_failure", ["raise", "eager"])
def test_what_fails_after_a_replay_is_said_so(place: str, on_failure: str) -> None:
    """The step has run, and cannot run again: its tensors are those of the next step, which goes on from there."""
    rig = build(_rig)
    step = managed(rig, on_failure=on_failure, verify="off")
    drive(rig, step, 8)
    assert step.stats.replayed == 1
    with raising(f"graphplan.{place}", lambda number: number == 1):
        with pytest.raises(EffectError, match=r"InjectedError .*: not expected\. .*step has run: its tensors are"):
            step(*rig.calls[8])
        found = state_of(rig)
        expected = _twin(9)
        names = [name for name in expected if name.startswith(("model", "optimizer", "generator"))]
        assert_same({name: expected[name] for name in names}, {name: found[name] for name in names})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            step(*rig.calls[9])
    assert step.is_down


@pytest.mark.parametrize("on_failure", ["raise", "eager"])
def test_what_cannot_be_undone_is_said_so(on_failure: str) -> None:
    rig = build(_rig)
    step = managed(rig, on_failure=on_failure)
    with (
        raising("graphplan.owners.snapshot:copy_into", lambda number: True),
        pytest.raises(EffectError, match="InjectedError while a step was undone: not expected"),
    ):
        drive(rig, step)


def test_a_preparation_that_fails_leaves_the_groups_alone() -> None:
    model = nn.Linear(4, 4)
    optimizer = AdamW([{"params": [model.weight]}, {"params": [model.bias]}], foreach=True)
    before = [{**group} for group in optimizer.param_groups]
    with raising("graphplan.optimizers.preparation:_wanted_flags", lambda number: number == 2):
        step = graph_step(lambda x: model(x).sum(), owners={"model": model, "optimizer": optimizer})
    assert [{**group} for group in optimizer.param_groups] == before
    with pytest.raises(FaultError, match=r"InjectedError in graphplan/optimizers/\w+\.py at .*: not expected"):
        step(torch.randn(2, 4))


@pytest.mark.parametrize(
    ("place", "doing"),
    [
        ("plan.build:classify", r"in graphplan/plan/build\.py"),
        ("trace.mode:TraceMode.operate", r"in graphplan/trace/\w+\.py"),
        ("step.functional:find_device", r"in graphplan/step/functional\.py"),
    ],
)
def test_a_plan_is_not_compiled_after_an_error_of_graphplans_own(place: str, doing: str) -> None:
    rig = build(_rig)
    before = state_of(rig)
    with (
        raising(f"graphplan.{place}", lambda number: True),
        pytest.raises(FaultError, match=rf"InjectedError {doing} at .*: not expected"),
    ):
        compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    assert_same(before, state_of(rig))


def test_a_plan_is_not_captured_after_an_error_of_graphplans_own() -> None:
    rig = build(_rig)
    rig.step(*rig.calls[0])
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    with (
        raising("graphplan.step.functional:capture_program", lambda number: True),
        pytest.raises(FaultError, match=r"InjectedError .*: not expected"),
    ):
        capture(plan, feed=rig.calls[0])


def test_the_end_of_timed_eager_calls_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is done by then; the next call is told."""
    clock = set_clock(monkeypatch, Clock())
    expected = _twin(CALLS)
    rig = build(_rig)
    rig.after = lambda index: setattr(clock, "time", clock.time + 1.0)
    step = managed(rig, min_speedup=1.0, on_failure="eager")
    with (
        raising("graphplan.step.managed:Managed.prepare", lambda number: True),
        pytest.warns(UserWarning, match=r"InjectedError in graphplan/step/\w+\.py at .*: not expected"),
    ):
        found = drive(rig, step)
    assert_same(expected, found.state)
    assert step.is_down


class Stop(Exception):
    """What a step of the user's raises."""


def _stopping_rig(at: int, *, of_torch: bool = False) -> Rig:
    rig = _rig()
    inner, number = rig.step, 0

    def step(batch: dict[str, Any]) -> dict[str, Any]:
        nonlocal number
        number += 1
        if number == at + 1 and not of_torch:
            raise Stop("enough")
        if number == at + 1:
            torch.randn(2, 3) @ torch.randn(2, 3)
        return inner(batch)

    rig.step = step
    return rig


@pairs(at=range(6), of_torch=[False, True], on_failure=["raise", "eager"])
def test_errors_of_the_steps_own_come_out_as_they_are(at: int, of_torch: bool, on_failure: str) -> None:
    make = partial(_stopping_rig, at, of_torch=of_torch)
    rig = build(make)
    step = managed(rig, on_failure=on_failure, allow=("number",))
    drive(rig, step, at)
    before = state_of(rig)
    error, text = (RuntimeError, "cannot be multiplied") if of_torch else (Stop, "enough")
    with pytest.raises(error, match=text) as caught:
        step(*rig.calls[at])
    assert type(caught.value) is error
    after = state_of(rig)
    assert_same(
        {k: v for k, v in before.items() if k != "generator"}, {k: v for k, v in after.items() if k != "generator"}
    )


WRONG: dict[str, tuple[Any, ...]] = {
    "takes 1 positional argument but 2 were given": ({}, None),
    "missing 1 required positional argument: 'batch'": (),
}


@pairs(
    at=[*range(6), 12],
    text=WRONG,
    options=[{}, {"min_speedup": 1.0}, {"device": "cpu"}, {"backend": "eager"}],
    on_failure=["raise", "eager"],
)
def test_a_step_that_is_called_with_wrong_arguments(
    at: int, text: str, options: dict[str, Any], on_failure: str
) -> None:
    """It begins with calls that are timed, or not; it has programs, or not yet."""
    rig = build(_rig)
    step = managed(rig, on_failure=on_failure, **options)
    drive(rig, step, at)
    for _ in range(2):
        with pytest.raises(TypeError, match=text) as caught:
            step(*WRONG[text])
        assert type(caught.value) is TypeError
    assert not step.is_down
    assert_same(_twin(at), state_of(rig))


def test_errors_of_eager_if_come_out_as_they_are() -> None:
    def asks(batch: Any) -> bool:
        raise Stop("cannot say")

    rig = build(_rig)
    step = managed(rig, on_failure="eager", eager_if=asks)
    with pytest.raises(Stop, match="cannot say"):
        step(*rig.calls[0])


PADDED = [
    "step.padding:Padding.kind", "step.padded_batches:PaddedBatches._plain_feed",
    "step.padded_batches:PaddedBatches._compare",
    "step.padding:Padding._learn", "step.padding:Kind.pad", "step.capture_sizes:CaptureSize.meet",
    "step.capture_sizes:CaptureSize.cut", "step.padding:Kind.cut", "step.padded_batches:PaddingCheck.run",
    "step.managed:trace", "step.replays:Check",
]  # fmt: skip


@each(when=WHEN, place=PADDED)
@pytest.mark.filterwarnings("ignore:graphplan")
@pytest.mark.crossed(3)
def test_a_padded_step_goes_on_without_padding(place: str, when: str) -> None:
    """Each batch is trained on once, which comes to the same as eager steps but for rounding."""
    eager, found = (Training(optimizer=SGD) for _ in range(2))
    step = bucketed(found, on_failure="eager")
    with raising(f"graphplan.{place}", WHEN[when]) as fired:
        for batch in batches(30):
            torch.testing.assert_close(step(batch)[0], eager.step(batch)[0].detach(), rtol=1e-4, atol=1e-5)
        assert "graphplan" in step.report()
    assert fired or when != "always"
    for one, other in zip(found.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("place", PADDED)
@pytest.mark.filterwarnings("ignore:graphplan")
@pytest.mark.crossed(3, 1)
def test_an_error_around_a_padded_step_is_a_refusal(place: str) -> None:
    eager, found = (Training(optimizer=SGD) for _ in range(2))
    step = bucketed(found)
    with raising(f"graphplan.{place}", WHEN["always"]):
        for batch in batches(30):
            try:
                step(batch)
            except FaultError as error:
                refusal = str(error)
                break
            eager.step(batch)
        else:
            refusal = step.report()
    assert "InjectedError" in refusal
    for one, other in zip(found.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
