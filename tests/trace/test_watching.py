"""The interpreter is watched in two ways, and both see the same of what a step runs."""

from __future__ import annotations

import cProfile
import gc
import importlib
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from heapq import nlargest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from graphplan.errors import Faults
from graphplan.observe import profile, watching
from graphplan.observe.profile import Profile
from graphplan.observe.watching import Unwatched
from tests.crossing import each
from tests.failure_modes.naive import changing_rig, loss_of
from tests.twins import assert_same_as_eager

monitoring: Any = getattr(sys, "monitoring", None)
needs_monitoring = pytest.mark.skipif(monitoring is None, reason="since Python 3.12")
KINDS = [watching.Watcher, pytest.param(watching.Monitor, marks=needs_monitoring)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[watching.Watcher]:
    """Every profile is of this kind."""
    monkeypatch.setattr(profile, "new_watcher", request.param)
    found: type[watching.Watcher] = request.param
    return found


class Thing:
    """Code of the user's, of several kinds."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def read(self, x: Tensor) -> Any:
        return x * self.scale

    def numbers(self) -> Iterator[int]:
        try:
            yield from range(9)
        except ZeroDivisionError:
            yield self.thrown()

    def thrown(self) -> int:
        return -1


def names_of(watch: Profile) -> set[str]:
    """The code of this file that ran."""
    return {code.co_name for code in watch.executed.codes if code.co_filename == __file__}


@pytest.mark.usefixtures("kind")
def test_what_is_done_aside_is_not_watched() -> None:
    """Nothing of the work aside is noted, all that is run in it is."""
    x = torch.ones(2)
    read: list[str] = []
    with Profile(lambda name, tensor: read.append(name)):
        x.tolist()
        with Unwatched() as unwatched:
            x.numpy()
            with Unwatched():
                x.numpy()
            x.numpy()
            unwatched.run(x.tolist, (), {})
            x.numpy()
        x.tolist()
        with pytest.raises(ZeroDivisionError), Unwatched() as unwatched:
            unwatched.run(divmod, (1, 0), {})
        x.tolist()
    assert read == ["Tensor.tolist"] * 4
    assert sys.getprofile() is None


@pytest.mark.usefixtures("kind")
def test_traces_guard_the_same_values() -> None:
    """The values that a step's code reads are found, and guarded."""

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(model, x, y) * model.scale

    def change(model: Any, optimizer: Any) -> None:
        model.scale = 3.0

    make = partial(changing_rig, change, loss, prepare=lambda model: setattr(model, "scale", 2.0))
    step = assert_same_as_eager(make, verify="off")
    assert step.stats.captured == 2, step.report()


@pytest.mark.usefixtures("kind")
def test_reads_in_libraries_that_are_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    """In one place of a library's code, which may have called anything else there before."""
    x = torch.ones(2)
    read: list[str] = []
    printed: list[str] = []
    with Profile(lambda name, tensor: read.append(name), lambda: printed.append("print")):
        for function in (len, Tensor.dim, Tensor.tolist, print, Tensor.numpy, len, Tensor.tolist):
            with ExitStack() as stack:
                stack.callback(function, "text" if function is print else x)
    assert read == ["Tensor.tolist", "Tensor.numpy", "Tensor.tolist"]
    assert printed == ["print"]
    assert capsys.readouterr().out == "text\n"


@pytest.mark.usefixtures("kind")
def test_reads_in_libraries_that_know_the_name() -> None:
    """Where the code calls by name what it is also given to call, or the same name of another type."""
    rows = [torch.tensor([number]) for number in (2.0, 1.0, 3.0)]
    read: list[str] = []
    space: dict[str, Any] = {}
    with Profile(lambda name, tensor: read.append(name)):
        nlargest(2, [[1], [2, 3], []], key=len)
        nlargest(2, rows, key=Tensor.tolist)
        assert read == ["Tensor.tolist"] * 3
        # As a file of torch's would.
        exec(compile("def listed(t):\n    return t.tolist()", torch.__file__, "exec"), space)
        for thing in (np.ones(1), torch.ones(1)):
            space["listed"](thing)
    assert read == ["Tensor.tolist"] * 4


@pytest.mark.usefixtures("kind")
def test_generators_that_began_before() -> None:
    """What goes on in them is seen, and what an exception has them do."""
    with_numbers, thrown_into = Thing(1.0).numbers(), Thing(1.0).numbers()
    next(thrown_into), next(with_numbers)
    with Profile() as watch:
        next(with_numbers)
    assert names_of(watch) == {"numbers"}
    with Profile() as watch:
        assert thrown_into.throw(ZeroDivisionError) == -1
    assert names_of(watch) == {"numbers", "thrown"}


@pytest.mark.usefixtures("kind")
def test_whoever_asked_is_let_go_at_once() -> None:
    """Not when the collector comes: a trace has the step's inputs, which may be large."""
    thing = Thing(1.0)
    gone = weakref.ref(thing)
    gc.disable()
    try:
        with Profile(lambda name, tensor, held=thing: None) as watch:  # type: ignore[misc]
            thing.read(torch.ones(2))
        assert names_of(watch) == {"read"}
        del thing, watch
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("kind")
def test_every_profile_sees_all() -> None:
    """What an earlier one knew, what runs within another one, and after that."""
    x, things = torch.ones(2), [Thing(float(number)) for number in range(3)]

    def run(thing: Thing) -> None:
        thing.read(x)
        tree_map(thing.read, [x, x])

    for thing in things:
        with Profile() as watch:
            run(thing)
        assert names_of(watch) == {"run", "read"}
        assert id(thing) in watch.reads().methods_on
    with Profile() as around:
        with Profile() as within:
            run(things[0])
        for thing in things[1:]:
            run(thing)
    assert id(things[0]) in within.reads().methods_on
    seen = around.reads().methods_on
    assert [id(thing) in seen for thing in things] == [False, True, True]


@pytest.mark.usefixtures("kind")
def test_threads_are_watched_by_themselves() -> None:
    """Two at once see the same library code for the first time, and each only what its own thread runs."""
    x, turn = torch.ones(2), threading.Barrier(2)
    linears = [torch.nn.Linear(2, 2) for _ in range(2)]
    found: dict[int, Profile] = {}

    def run(number: int) -> None:
        turn.wait()
        with Profile() as found[number]:
            turn.wait()
            for _ in range(3):
                linears[number](x)
            turn.wait()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    with Profile() as mine:
        for thread in threads:
            thread.join()
    seen = [found[number].reads() for number in range(2)]
    assert [[id(linear) in reads.methods_on for linear in linears] for reads in seen] == [[True, False], [False, True]]
    assert not any(id(linear) in mine.reads().methods_on for linear in linears)


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_module_does_when_it_is_imported(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is no part of the step; what follows it is."""
    (tmp_path / "graphplan_imported.py").write_text(
        f"import torch\ndef made():\n    return torch.ones(1).tolist()\nmade()\n{'1 / 0' if fails else ''}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "graphplan_imported", raising=False)
    read: list[str] = []
    with Profile(lambda name, tensor: read.append(name)) as watch:
        try:
            importlib.import_module("graphplan_imported")
        except ZeroDivisionError:
            assert fails
        assert not read
        Thing(2.0).read(torch.ones(2)).tolist()
    sys.modules.pop("graphplan_imported", None)
    assert read == ["Tensor.tolist"]
    assert names_of(watch) == {"__init__", "read"}
    assert not any(code.co_name == "made" for code in watch.executed.codes)


@pytest.mark.usefixtures("kind")
def test_calls_that_fail_fail_as_they_would() -> None:
    x = torch.ones(2)
    calls: list[Callable[[], object]] = [
        lambda: Tensor.tolist(3),  # type: ignore[arg-type]
        lambda: Tensor.tolist(),  # type: ignore[call-arg]
        lambda: len(3),  # type: ignore[arg-type]
        lambda: x.view(7),
    ]
    for call in calls:
        with pytest.raises((TypeError, RuntimeError)) as expected:
            call()
        with Profile(), pytest.raises(type(expected.value)) as found:
            call()
        assert str(found.value) == str(expected.value)


@pytest.mark.usefixtures("kind")
def test_methods_in_c_that_are_told_their_class() -> None:
    """Such a descriptor that is bound without a class ends the process."""
    found: list[str | None] = []
    with Profile():
        match = re.compile("a").search("ba")
        found.append(match and match.group())
        found.append(re.Pattern.fullmatch(re.compile("b"), "b") and "b")
    assert found == ["a", "b"]


class Disguised:
    """Says that it is of another class, and notes that it was asked."""

    asked = 0

    @property
    def __class__(self) -> type:  # type: ignore[override]
        Disguised.asked += 1
        return Tensor

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise NotImplementedError


@pytest.mark.usefixtures("kind")
def test_nobody_asks_what_a_step_is_given() -> None:
    thing = Disguised()
    with Profile(), pytest.raises(TypeError):
        Tensor.dim(thing)  # type: ignore[arg-type]
    with Profile(), pytest.raises(TypeError, match="not callable"):
        thing()  # type: ignore[operator]
    assert Disguised.asked == 0


def test_another_profiler_goes_on() -> None:
    """One that the user has started still works after a step was watched, whichever way that was."""
    mine = cProfile.Profile()
    mine.enable()
    with Profile():
        Thing(1.0).read(torch.ones(2))
    Thing(1.0).thrown()
    mine.disable()
    assert "thrown" in {getattr(entry.code, "co_name", "") for entry in mine.getstats()}


def test_another_profile_function_is_put_back() -> None:
    def mine(*event: object) -> None: ...

    sys.setprofile(mine)
    try:
        with Profile():
            Thing(1.0).read(torch.ones(2))
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)


@needs_monitoring
def test_where_every_place_for_a_tool_is_taken() -> None:
    """A profile function does it, then and only then."""
    free = [number for number in range(6) if monitoring.get_tool(number) is None]
    for number in free:
        monitoring.use_tool_id(number, "somebody")
    try:
        with Profile() as watch:
            assert sys.getprofile() is not None
            Thing(1.0).read(torch.ones(2))
        assert names_of(watch) == {"__init__", "read"}
    finally:
        for number in free:
            monitoring.free_tool_id(number)
    with Profile():
        assert sys.getprofile() is None
        assert [number for number in free if monitoring.get_tool(number) is not None] == [4]
    assert [number for number in range(6) if monitoring.get_tool(number) is None] == free


@needs_monitoring
def test_whoever_has_our_place_next_hears_of_everything() -> None:
    place = watching.Monitor.place()
    heard: list[str] = []
    with Profile():
        torch.nn.functional.dropout(torch.ones(2))
    monitoring.use_tool_id(place, "somebody")
    try:
        monitoring.register_callback(place, monitoring.events.PY_START, lambda code, _: heard.append(code.co_name))
        monitoring.set_events(place, monitoring.events.PY_START)
        torch.nn.functional.dropout(torch.ones(2))
    finally:
        monitoring.set_events(place, 0)
        monitoring.register_callback(place, monitoring.events.PY_START, None)
        monitoring.free_tool_id(place)
    assert "dropout" in heard


@needs_monitoring
@each(name=["use_tool_id", "register_callback", "set_events", "restart_events", "free_tool_id"], call=[1, 2, 5])
def test_an_interrupt_while_one_begins_or_ends(name: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one works as if nothing had been, and leaves nothing."""
    real, calls = getattr(monitoring, name), 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(monitoring, name, interrupted)
        for _ in range(3):
            try:
                with Profile():
                    Thing(1.0)
            except KeyboardInterrupt:
                break
    assert watching._HERE.watcher is None
    read: list[str] = []
    with Profile(lambda name, tensor: read.append(name)) as watch:
        Thing(1.0).read(torch.ones(2)).tolist()
    assert read == ["Tensor.tolist"]
    assert names_of(watch) == {"__init__", "read"}


@needs_monitoring
def test_within_a_profile_function_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which hears alone what runs within."""
    read: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(watching.Monitor, "place", lambda: None)
        around = Profile(lambda name, tensor: read.append(name))
        around.__enter__()
    inner: list[str] = []
    with Profile(lambda name, tensor: inner.append(name)):
        torch.ones(1).tolist()
    torch.ones(1).numpy()
    around.__exit__()
    assert (read, inner) == (["Tensor.numpy"], ["Tensor.tolist"])


@needs_monitoring
def test_a_thread_that_ends_while_it_is_watched() -> None:
    """Whoever has its identifier next is not watched for that."""
    found: list[object] = []
    nothing: Any = (lambda frame, code: True, lambda frame, function: None, (), (), Faults())
    thread = threading.Thread(target=lambda: watching.Monitor(*nothing).start())
    thread.start()
    thread.join()
    gc.collect()
    thread = threading.Thread(target=lambda: found.append(watching._HERE.watcher))
    thread.start()
    thread.join()
    assert found == [None]
    with Profile():
        pass
