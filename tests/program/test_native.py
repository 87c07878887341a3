"""The guards in C++ say what those in Python say."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from time import sleep
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import BackendError, graph_step
from graphplan.compare import building, comparing
from graphplan.compare import building as native
from graphplan.compare.tensors import TorchTensors
from graphplan.step import graphed_step as told
from graphplan.trace.changes import same_value

ROOT = Path(__file__).parents[2]
built = native.load()
needs_build = pytest.mark.skipif(built is None, reason="not built: python -m graphplan.compare says why")
IMPLEMENTATIONS = [pytest.param(built, id="C++", marks=needs_build), pytest.param(None, id="Python")]
Facts = tuple[list[Any], ...]


def _checks(module: Any, name: str, facts: Facts) -> Any:
    return (module.Checks if module is not None else comparing._Checks)([(name, *facts)])


def _holds(module: Any, name: str, facts: Facts) -> bool:
    answer = _checks(module, name, facts).hold()
    assert type(answer) is bool
    return answer


def _items() -> Facts:
    big, kept = 10**9, [1]
    spaces: list[Any] = [{"a": big}, [kept], MappingProxyType({"b": kept}), defaultdict(list, c=kept), (big,)]
    return spaces, ["a", 0, "b", "c", 0], [big, kept, kept, kept, big]


class Kind:
    """A class with a method."""

    def method(self) -> None:
        """Nothing."""


def _attributes() -> Facts:
    kind = type("Other", (Kind,), {})
    return [kind, Tensor], ["method", "square"], [Kind.method, Tensor.square]


def _values() -> Facts:
    held = object()
    return [{"a": held}, {}, OrderedDict(b=None), defaultdict(list)], ["a", "x", "b", "y"], [held, None, None, None]


def _absent() -> Facts:
    return [{"a": 1}, {}, defaultdict(list)], ["b", "a", "c"]


def _types() -> Facts:
    layer = nn.Linear(1, 1)
    return [layer, 1, True, "x"], [nn.Linear, int, bool, str]


def _lengths() -> Facts:
    return [[1, 2], {}, nn.Sequential(nn.ReLU()), [], OrderedDict(), nn.Sequential()], [2, 0, 1, 0, 0, 0]


def _dicts() -> Facts:
    state: defaultdict[Any, Any] = defaultdict(dict, {torch.zeros(2): 1})
    ((_, *parts), _, _) = comparing.contents_of([{"a": torch.ones(1), "b": None}, {}, {"c": 1}, state])
    return tuple(parts)


def _odd_dicts() -> Facts:
    class Own(dict[Any, Any]):
        """A dictionary of the user's."""

    (_, (_, *parts), _) = comparing.contents_of([OrderedDict(a=torch.ones(1), b=None), Own(), Own(c=1), Own(d=2)])
    return tuple(parts)


def _lists() -> Facts:
    (*_, (_, *parts)) = comparing.contents_of([[torch.ones(1), 2], [], [3]])
    return tuple(parts)


class TypeCalls:
    """Says the same each time that it is asked, until somebody sets another answer."""

    answer: Any = 2.0

    def __call__(self) -> Any:
        return self.answer


def _results() -> Facts:
    return [TypeCalls(), TypeCalls()], [2, 2.0]


def _equal() -> Facts:
    return [{"a": 10**9}, [0.5], {"b": (1, "x")}], ["a", 0, "b"], [10**9, 0.5, (1, "x")], same_value


HELD: dict[str, Callable[[], Facts]] = {
    "same_items": _items,
    "equal_items": _equal,
    "same_dicts": _dicts,
    "same_lists": _lists,
    "same_results": _results,
    "same_attributes": _attributes,
    "same_values": _values,
    "none_there": _absent,
    "same_types": _types,
    "same_lengths": _lengths,
}
CHANGES: dict[str, list[Callable[[Facts], Any]]] = {
    "same_items": [
        lambda facts: facts[0][0].update(a=10**9 + 0 * len(facts)),
        lambda facts: facts[0][1].__setitem__(0, [1]),
        lambda facts: facts[0][3].update(c=[1]),
    ],
    "equal_items": [
        lambda facts: facts[0][0].update(a=10**9 + 1),
        lambda facts: facts[0][1].__setitem__(0, torch.ones(1)),
        lambda facts: facts[0][2].update(b=(True, "x")),
    ],
    "same_dicts": [
        lambda facts: facts[0][0].update(a=torch.ones(1)),
        lambda facts: facts[0][0].update(b=1),
        lambda facts: facts[0][1].update(b=facts[0][0].pop("b")),
        lambda facts: facts[0][0].update(c=facts[0][0].pop("b")),
        lambda facts: facts[0][2].clear(),
        lambda facts: facts[0][3]["other"],
        lambda facts: facts[0][3].update({torch.zeros(2): facts[0][3].popitem()[1]}),
        lambda facts: facts[0][2].update({2: facts[0][2].pop("c")}),
    ],
    "same_lists": [
        lambda facts: facts[0][0].__setitem__(0, torch.ones(1)),
        lambda facts: facts[0][0].reverse(),
        lambda facts: facts[0][1].append(facts[0][2].pop()),
        lambda facts: facts[0][1].append(1),
        lambda facts: facts[0][0].pop(),
    ],
    "same_results": [lambda facts: setattr(facts[0][0], "answer", 3), lambda facts: setattr(facts[0][1], "answer", "")],
    "same_attributes": [lambda facts: setattr(facts[0][0], "method", print)],
    "same_values": [
        lambda facts: facts[0][0].update(a=object()),
        lambda facts: facts[0][0].clear(),
        lambda facts: facts[0][1].update(x=0),
    ],
    "none_there": [lambda facts: facts[0][0].update(b=None), lambda facts: facts[0][2]["c"]],
    "same_types": [
        lambda facts: facts[0].__setitem__(1, True),
        lambda facts: facts[0].__setitem__(0, nn.Bilinear(1, 1, 1)),
    ],
    "same_lengths": [
        lambda facts: facts[0][0].append(1),
        lambda facts: facts[0][1].update(a=None),
        lambda facts: facts[0][2].append(nn.ReLU()),
        lambda facts: facts[0][3].append(0),
        lambda facts: facts[0][4].update(a=None),
        lambda facts: facts[0][5].append(nn.ReLU()),
    ],
}


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@pytest.mark.parametrize(("name", "number"), [(name, n) for name, found in CHANGES.items() for n in range(len(found))])
def test_what_changed_is_seen(name: str, number: int, module: Any) -> None:
    facts = HELD[name]()
    assert _holds(module, name, facts)
    assert _holds(module, name, tuple([] if isinstance(part, list) else part for part in facts))
    checks = _checks(module, name, facts)
    assert checks.hold()
    CHANGES[name][number](facts)
    assert not checks.hold()
    assert not _holds(module, name, facts)


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "change",
    [
        lambda dicts: dicts[0].update(a=torch.ones(1)),
        lambda dicts: dicts[0].update(a=dicts[0].pop("a")),
        lambda dicts: dicts[1].update(c=dicts[2].pop("c")),
        lambda dicts: dicts[2].update(e=dicts[2].pop("c")),
        lambda dicts: dicts[3].clear(),
    ],
)
def test_dictionaries_of_other_classes_are_compared(change: Callable[[list[Any]], Any], module: Any) -> None:
    facts = _odd_dicts()
    checks = _checks(module, "same_dicts", facts)
    assert checks.hold()
    change(facts[0])
    assert not checks.hold()


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_an_equal_value_takes_the_place_of_the_old_one(module: Any) -> None:
    facts = _equal()
    new = facts[0][0]["a"] = int("1000000000")
    assert facts[2][0] is not new
    assert _holds(module, "equal_items", facts)
    assert facts[2][0] is new


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_all_rows_are_asked(module: Any) -> None:
    """And lists that are written to afterwards count."""
    kind = module.Checks if module is not None else comparing._Checks
    facts = {name: make() for name, make in HELD.items()}
    checks = kind([(name, *parts) for name, parts in facts.items()])
    assert checks.hold()
    assert kind([]).hold()
    facts["same_types"][1][0] = int
    assert not checks.hold()


def test_single_comparisons_of_a_kind_are_one_row() -> None:
    singles = [("same_types", 1, int), ("same_values", {"a": 2}, "a", 2), ("same_types", "x", str)]
    rows = comparing.rows_of(singles)
    assert rows == [("same_types", [1, "x"], [int, str]), ("same_values", [{"a": 2}], ["a"], [2])]
    assert comparing.Checks(rows).hold()
    assert comparing.rows_of([]) == []


@pytest.mark.parametrize("kind", ["same_values", "same_attributes", "same_types", "same_lengths"])
def test_a_column_is_read_and_compared(kind: str) -> None:
    """An empty one, too."""
    *places, values = HELD[kind]()
    names = list(map(str, range(len(values))))
    column = comparing.Column(kind, zip(names, *places, strict=True))
    assert column.paths == names
    assert list(column.read()) == values
    assert column.row() == (kind, *places, values)
    assert comparing.Checks([column.row(), comparing.Column(kind, []).row()]).hold()


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_checks_of_things_that_lead_back_to_them_are_collected(module: Any) -> None:
    kept = TypeCalls()
    kept.checks = (module.Checks if module is not None else comparing._Checks)(
        [  # type: ignore[attr-defined]
            ("same_results", [kept], [2])
        ]
    )
    gone = weakref.ref(kept)
    del kept
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["same_items", "equal_items"])
def test_a_key_that_is_gone_is_an_error(name: str, module: Any) -> None:
    for space in ({}, MappingProxyType({})):
        more = (same_value,) if name == "equal_items" else ()
        with pytest.raises(KeyError, match="gone"):
            _holds(module, name, ([space], ["gone"], [None], *more))


@needs_build
def test_rows_that_cannot_be_compared() -> None:
    rows: dict[str, Any] = {
        "expected lists of one length for same_items": ("same_items", [{}], [], []),
        "expected lists of one length for same_lists": ("same_lists", [], [], ()),
        "expected 3 things for same_values": ("same_values", [], []),
        "'other' is no kind of check": ("other",),
        "expected tuples that begin with a name": [],
        "expected what was noted of the tensors": ("fit", [], None),
    }
    for message, row in rows.items():
        with pytest.raises(TypeError, match=message):
            built.Checks([row])  # type: ignore[union-attr]
    with pytest.raises(TypeError, match="only dense tensors"):
        built.Tensors([torch.eye(2).to_sparse()], True)  # type: ignore[union-attr]


class Named(Tensor):
    """A tensor of a class of one's own."""


MOVES: dict[str, Callable[[list[Tensor]], Any]] = {
    "other memory": lambda tensors: setattr(tensors[0], "data", tensors[0].data.clone()),
    "longer memory": lambda tensors: tensors[2].resize_(50),
    "a slice of it": lambda tensors: setattr(tensors[0], "data", tensors[0].data[:2]),
    "transposed": lambda tensors: setattr(tensors[0], "data", tensors[0].data.t()),
    "frozen": lambda tensors: tensors[0].requires_grad_(False),
    "another dtype": lambda tensors: setattr(tensors[2], "data", tensors[2].data.double()),
    "another class": lambda tensors: tensors.__setitem__(2, tensors[2].as_subclass(Named)),
    "conjugated": lambda tensors: tensors.__setitem__(3, tensors[3].conj()),
    "one less": lambda tensors: tensors.pop(),
    "sparse": lambda tensors: tensors.__setitem__(2, tensors[2].to_sparse()),
    "swapped": lambda tensors: tensors.__setitem__(slice(0, 2), tensors[1::-1]),
}
SAME_GEOMETRY = {"other memory", "swapped"}


def _tensors() -> list[Tensor]:
    twins = [nn.Parameter(torch.ones(3, 3)) for _ in range(2)]
    return [*twins, torch.ones(4), torch.ones(2, dtype=torch.complex64), torch.ones(0, 3), torch.tensor(1)]


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("move", MOVES)
def test_tensors_that_moved(move: str, placed: bool, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "Tensors", None if module is None else module.Tensors)
    tensors = _tensors()
    facts = comparing.facts_of(tensors, placed=placed)
    tensors[0].grad = torch.ones(3, 3)
    tensors[2].add_(1)
    assert facts.fit(tensors)
    assert facts.fit(list(tensors))
    checks = comparing.Checks([comparing.row_of(tensors, placed=placed)])
    assert checks.hold()
    MOVES[move](tensors)
    assert facts.fit(tensors) is (move in SAME_GEOMETRY and not placed)
    assert checks.hold() is (move in SAME_GEOMETRY and not placed)


@needs_build
@pytest.mark.parametrize("move", MOVES)
def test_tensors_of_which_only_the_place_matters(move: str) -> None:
    tensors = _tensors()
    facts = comparing.facts_of(tensors, placed=True, alone=True)
    tensors[0].grad = torch.ones(3, 3)
    assert facts.fit(tensors)
    MOVES[move](tensors)
    assert facts.fit(tensors) is (move in ("a slice of it", "transposed", "frozen"))
    assert not facts.fit([*tensors[1:], object()])


class Wrapper(Tensor):
    """A tensor that has no memory of its own."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("nobody is to compute with it")


@needs_build
@pytest.mark.parametrize("placed", [True, False])
def test_what_has_no_memory_of_its_own_is_not_compared_in_cpp(placed: bool) -> None:
    for other in (Wrapper(torch.ones(2)), torch.eye(2).to_sparse()):
        with pytest.raises(TypeError, match="only dense tensors"):
            built.Tensors([torch.ones(2), other], placed)  # type: ignore[union-attr]
    facts = comparing.facts_of([torch.ones(2)], placed=placed)
    assert not facts.fit([Wrapper(torch.ones(2))])
    assert comparing.facts_of([torch.ones(2, device="meta")], placed=placed).fit([torch.ones(2, device="meta")])


def test_what_has_no_strides_is_never_the_same() -> None:
    sparse = [torch.ones(2), torch.eye(2).to_sparse()]
    assert not comparing.facts_of(sparse, placed=False).fit(sparse)


def test_where_other_modes_are_active_tensors_that_lie_still_are_compared_closely() -> None:
    """torch's guard compares what modes make of dispatch keys, and is made anew for the modes of the day."""
    tensors = _tensors()
    facts = TorchTensors(tensors, placed=True)
    with torch.inference_mode():
        assert facts.fit(tensors)
        assert facts.fit(tensors)
        tensors[0].requires_grad_(False)
        assert not facts.fit(tensors)
        tensors[0].requires_grad_(True)
        tensors[2].data = tensors[2].data.clone()
        assert not facts.fit(tensors)
    assert not facts.fit(tensors)


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_where_tensors_lie(module: Any) -> None:
    """Addresses count by what they leave when divided, and memory by its storage, views' too."""
    lie = comparing._lie if module is None else module.lie
    whole = torch.ones(64)
    start = whole.data_ptr() % 64
    tensors, units = [whole, whole[1:], torch.ones(0)], [64, 64, 1]
    rests, others = [start, (start + 4) % 64, 0], {torch.ones(1).untyped_storage()._cdata, None}
    assert lie(tensors, units, rests, others)
    assert lie([], [], [], others)
    assert not lie([whole[1:], *tensors[1:]], units, rests, others)
    assert not lie(tensors, units, [*rests[:1], start, 0], others)
    assert not lie([whole[1:]], [4], [0], {whole.untyped_storage()._cdata})


@needs_build
@pytest.mark.parametrize("wrong", [1, torch.eye(2).to_sparse()])
def test_what_lies_nowhere(wrong: Any) -> None:
    with pytest.raises(TypeError, match="only dense tensors"):
        built.lie([wrong], [1], [0], set())
    with pytest.raises(TypeError, match="lists of one length"):
        built.lie([torch.ones(1)], [1], [], set())


def test_they_are_not_loaded_where_nobody_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHPLAN_NATIVE", "0")
    assert native.load() is None


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where builds go, which are wanted and of which there is none yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("GRAPHPLAN_NATIVE", raising=False)
    assert native.find() is None
    assert native.load() is None
    return building._folder()


def test_a_file_that_is_no_library(folder: Path) -> None:
    folder.mkdir()
    (folder / "graphplan_guards.so").write_bytes(b"nothing")
    assert native.find() == folder / "graphplan_guards.so"
    with pytest.warns(RuntimeWarning, match=r"cannot be loaded: .*Its checks run in Python, slower; delete the file"):
        assert native.load() is None


def script(path: Path, text: str) -> str:
    """A program of the shell's."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


COMPILER = 'for last; do case "$before" in -o) echo made > "$last";; esac; before=$last; done'
"""Makes an empty library, in no time."""
FAILING = "echo 'no such header' >&2; echo more >&2; exit 1"


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> None:
    """Those who ask for a build are told; nobody else begins one."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        BackendError, match=r"could not be built: no C\+\+ compiler was found [\s\S]*Expected a C\+\+ comp"
    ):
        native.build()
    assert native.state() == "in Python, since there is no C++ compiler"
    (folder / "failed").unlink()
    native.build_later()
    assert native.find() is None and list(folder.iterdir()) == []


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> None:
    """Its first line is in reports, and no process tries again by itself."""
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", FAILING))
    with pytest.raises(BackendError, match="could not be built: no such header\nmore\n"):
        native.build()
    assert native.state() == "in Python: they have not been built in C++ (no such header)"
    native.build_later()
    assert [path.name for path in folder.iterdir()] == ["failed"]
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", COMPILER))
    assert native.build() == native.find() == folder / "graphplan_guards.so"
    assert [path.name for path in folder.iterdir()] == ["graphplan_guards.so"]


def build_wheel(folder: Path, **environment: str) -> tuple[Path, str]:
    """Build a wheel where torch is installed, from a copy of what it is made of, and unpack it."""
    pytest.importorskip("setuptools", minversion="77")
    copy = folder / "copy"
    shutil.copytree(ROOT / "graphplan", copy / "graphplan", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "-w", str(folder), "."]
    done = subprocess.run(
        command, cwd=copy, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    (wheel,) = folder.glob("*.whl")
    shutil.unpack_archive(wheel, folder / "installed", "zip")
    return wheel, done.stdout + done.stderr


@needs_build
def test_a_wheel_that_is_built_where_torch_is_has_them(tmp_path: Path) -> None:
    wheel, _ = build_wheel(tmp_path)
    assert sys.implementation.cache_tag.replace("cpython-", "cp") in wheel.name
    elsewhere = {
        **os.environ,
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "none"),
        "PYTHONPATH": str(tmp_path / "installed"),
    }
    code = "from graphplan.compare import building; print(building.find()); building.load().Checks([])"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=elsewhere, capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()).parent == tmp_path / "installed/graphplan/compare"


@pytest.mark.soak
def test_a_wheel_goes_without_them_where_the_compiler_fails(tmp_path: Path, folder: Path) -> None:
    _, said = build_wheel(tmp_path / "wheel", CXX=script(tmp_path / "compiler", FAILING))
    assert "the wheel goes without compiled guards: the guards could not be built: no such header" in said
    installed = tmp_path / "wheel/installed/graphplan/compare"
    assert (installed / "guards.cpp").is_file() and not list(installed.glob("*.so"))


def wait_for(done: Callable[[], bool]) -> None:
    """Wait until it is ``done``, for as long as a test may hang."""
    for _ in range(6000):
        if done():
            return
        sleep(0.01)
    raise AssertionError("nothing came")


@pytest.mark.parametrize("text", [COMPILER, FAILING])
def test_a_build_that_another_process_does(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Begun once, by the first capture, without a word; what it comes to is for later processes."""
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", f"echo >> {tmp_path}/calls; {text}"))
    begun: list[Any] = []
    run = building._run
    monkeypatch.setattr(building, "_run", lambda command: (begun.append(command), run(command)))
    for _ in range(2):
        step = graph_step(lambda x: x * 2, backend="tape", mode="inference", verify="off")
        for _ in range(8):
            step(torch.ones(2))
        assert step.stats.captured == 1
    if text is FAILING:
        wait_for(lambda: "no such header" in (folder / "failed").read_text())
    else:
        wait_for((folder / "graphplan_guards.so").exists)
    assert len(begun) == 1
    assert (tmp_path / "calls").read_text() == "\n"
    assert (native.find() is not None) is (text is COMPILER)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(told, "Tensors", None)
    words = "they have not been built in C++ (no such header)" if text is FAILING else "in C++ in processes that start"
    assert words in step.report()


def test_when_nobody_begins_a_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> None:
    """Where it is not wanted, is there already, or another process is at it."""
    begun: list[Any] = []
    monkeypatch.setattr(building, "_run", begun.append)
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", COMPILER))
    for wanted in ("0", "found"):
        monkeypatch.setenv("GRAPHPLAN_NATIVE", wanted)
        native.build_later()
    assert native.state().startswith("in Python until")
    monkeypatch.setenv("GRAPHPLAN_NATIVE", "0")
    assert native.state() == "in Python, since GRAPHPLAN_NATIVE is 0"
    monkeypatch.delenv("GRAPHPLAN_NATIVE")
    assert begun == [] and not folder.exists()
    native.build_later()
    native.build_later()
    wait_for(lambda: len(begun) == 1)
    assert "(a build was begun, and has not ended)" in native.state()
    native.build()
    native.build_later()
    assert len(begun) == 1


def test_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> None:
    """A file lies where the folder would be: silence, or an error for those who ask for a build."""
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", COMPILER))
    folder.write_text("")
    native.build_later()
    with pytest.raises(BackendError, match=r"the guards could not be built: .*File exists"):
        native.build()
    assert native.find() is None


@pytest.mark.soak
def test_two_processes_that_build_at_once(tmp_path: Path, folder: Path) -> None:
    """Both come to an end, and one whole file is there."""
    slow = script(tmp_path / "compiler", f"sleep 0.2; {COMPILER}")
    command = [sys.executable, "-m", "graphplan.compare"]
    environment = {**os.environ, "CXX": slow, "TORCH_EXTENSIONS_DIR": str(folder.parent)}
    both = [subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == [f"built {folder / 'graphplan_guards.so'}\n"] * 2
    assert [process.returncode for process in both] == [0, 0]
    assert [path.name for path in folder.iterdir()] == ["graphplan_guards.so"]
    assert (folder / "graphplan_guards.so").read_text() == "made\n"


def test_the_same_without_them() -> None:
    """What guards see, they see in Python too."""
    files = ("tests/sources/test_unchanged.py", "tests/step/test_short_way.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "GRAPHPLAN_NATIVE": "0"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
