"""The rooms of the package and the one direction of their imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "graphplan"

# A room is a folder of the package's modules. In this order, each imports from those before it; inside a room the
# modules may import each other.
ROOMS = (
    "errors", "environment", "tensors", "specs", "compare", "owners", "feed", "observe", "trace", "backends",
    "optimizers", "effects", "plan", "program", "verify", "report", "step", "inference", "callback", "check",
)  # fmt: skip
LAYERS = {room: number for number, room in enumerate(ROOMS)}
# Rooms that not every higher layer may import: a report is for those who show it to people.
READERS = {"report": {"__init__", "callback", "check", "inference", "step"}}
# Files beside the rooms: the public names, and ``python -m graphplan``. They import from all rooms, and none from them.
ABOVE = {"__init__", "__main__"}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(file: Path) -> str:
    """The room that ``file`` belongs to; its own name where it lies beside the rooms."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(file: Path) -> list[tuple[int, str]]:
    """(line, module) of every import in ``file``, those inside functions too; a relative one keeps its dots."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from graphplan import plan` names a room in its second half.
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "graphplan" else [module]
            found += [(node.lineno, name) for name in names]
    return found


def imported_rooms(file: Path) -> list[tuple[int, str]]:
    """(line, room) of every import of the package's own modules in ``file``."""
    modules = [(line, name.split(".")) for line, name in imported_modules(file)]
    return [(line, parts[1] if len(parts) > 1 else "__init__") for line, parts in modules if parts[0] == "graphplan"]


def may_import(room: str, other: str) -> bool:
    """Whether ``room`` may import from ``other``."""
    if room == other:
        return True
    if other not in LAYERS or room not in READERS.get(other, {room}):
        return False
    return room in ABOVE or LAYERS[other] < LAYERS[room]


def test_every_module_is_in_the_table() -> None:
    assert FILES
    assert {room_of(file) for file in FILES} == set(LAYERS) | ABOVE
    assert len(LAYERS) <= 20


def test_nothing_lies_beside_the_rooms() -> None:
    names = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert names == {*ROOMS, *(f"{name}.py" for name in ABOVE), "py.typed"}


def test_imports_point_down() -> None:
    upward = [
        f"{file.relative_to(PACKAGE)}:{line} imports {other}"
        for file in FILES
        for line, other in imported_rooms(file)
        if not may_import(room_of(file), other)
    ]
    assert upward == []


def test_imports_are_absolute() -> None:
    relative = [
        f"{file.relative_to(PACKAGE)}:{line} imports {name}"
        for file in FILES
        for line, name in imported_modules(file)
        if name.startswith(".")
    ]
    assert relative == []


def test_only_the_callback_and_the_check_of_a_fit_import_lightning() -> None:
    frameworks = {"lightning", "pytorch_lightning", "hydra", "omegaconf", "recipes", "tests"}
    found = {
        room_of(file): name for file in FILES for _, name in imported_modules(file) if name.split(".")[0] in frameworks
    }
    assert set(found) <= {"callback", "check"}


def test_only_one_file_imports_another_training_loop() -> None:
    loops = {"transformers", "accelerate", "peft"}
    found = {file for file in FILES for _, name in imported_modules(file) if name.split(".")[0] in loops}
    assert found == {PACKAGE / "callback/transformers_trainer.py"}


@pytest.mark.parametrize(
    ("room", "other", "allowed"),
    [
        ("plan", "effects", True),
        ("plan", "program", False),
        ("effects", "plan", False),
        ("program", "program", True),
        ("program", "report", False),
        ("step", "report", True),
        ("report", "program", True),
        ("step", "__init__", False),
        ("__init__", "callback", True),
        ("step", "nowhere", False),
    ],
)
def test_the_rule(room: str, other: str, allowed: bool) -> None:
    assert may_import(room, other) is allowed


def test_imports_are_found_wherever_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text("import graphplan.backends\ndef f():\n    from graphplan import plan\n    from . import roles\n")
    assert imported_rooms(file) == [(1, "backends"), (3, "plan")]
    assert imported_modules(file)[-1] == (4, ".")


def test_importing_the_package_imports_no_framework() -> None:
    frameworks = {"lightning", "pytorch_lightning", "hydra", "omegaconf", "transformers", "accelerate"}
    code = f"import sys, graphplan; print(sorted({frameworks} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


@pytest.mark.parametrize(
    ("hidden", "error", "message"),
    [
        (("lightning", "pytorch_lightning"), ImportError, 'is not installed: pip install "graphplan[lightning]"'),
        (("torchmetrics",), ModuleNotFoundError, "torchmetrics"),
    ],
)
def test_the_callback_without_lightning(hidden: tuple[str, ...], error: type[Exception], message: str) -> None:
    """It says what to install; where something that Lightning needs is missing, it says that instead."""
    code = f"import sys; sys.modules.update(dict.fromkeys({hidden})); from graphplan import GraphPlanCallback"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert re.match(rf"{error.__name__}: .*{re.escape(message)}", last), done.stderr


def test_only_backends_use_cuda_by_name() -> None:
    """Another accelerator is another backend. torch's own switches are named after CUDA, which is no call."""
    uses = [
        f"{file}:{node.lineno}"
        for file in FILES
        if room_of(file) != "backends"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "cuda" and getattr(node.value, "id", "") == "torch"
    ]
    assert uses == []


def test_operators_of_tests_have_names_of_their_own() -> None:
    """Of two with one name, torch frees the first one, which the other test then calls."""
    files = Path(__file__).parent.rglob("*.py")
    names = [name for file in files for name in re.findall(r'custom_op\("(\w+::\w+)"', file.read_text())]
    assert len(names) == len(set(names)) > 3
