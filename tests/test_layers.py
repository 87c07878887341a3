"""The rooms of the package and the one direction of their imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "graphplan"

# A room is a module, or a folder of modules, of the package. It may import from lower layers only; inside a folder the
# modules may import each other.
LAYERS = {
    "callback": 8,
    "inference": 8,
    "step": 7,
    "report": 6,
    "padding": 6,
    "verify": 6,
    "program": 5,
    "compiler": 4,
    "buffers": 4,
    "guards": 4,
    "fingerprint": 4,
    "optimizers": 4,
    "cudagraph": 4,
    "tape": 4,
    "tracer": 3,
    "plan": 3,
    "fed": 2,
    "unread": 3,
    "policy": 1,
    "signature": 1,
    "backend": 3,
    "cudanodes": 1,
    "nodes": 0,
    "branches": 0,
    "capture_state": 1,
    "rng": 2,
    "collector": 0,
    "idleness": 0,
    "pools": 0,
    "streams": 3,
    "unchanged": 3,
    "surroundings": 1,
    "switches": 0,
    "native": 1,
    "owners": 1,
    "containers": -1,
    "trees": 0,
    "dtensors": 0,
    "placeholders": 0,
    "marks": 0,
    "origin": -1,
    "roles": 0,
    "stats": 1,
    "errors": 0,
    "faults": 4,
}
# Rooms that not every higher layer may import: a report is for those who show it to people.
READERS = {"report": {"__init__", "callback", "inference", "step"}}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(file: Path) -> str:
    """The room that ``file`` belongs to; ``__init__`` for the public names."""
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
    return room == "__init__" or LAYERS[other] < LAYERS[room]


def test_every_module_is_in_the_table() -> None:
    assert FILES
    assert {room_of(file) for file in FILES} - {"__init__"} <= set(LAYERS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down(file: Path) -> None:
    room = room_of(file)
    upward = [
        f"line {line}: {room} imports {other}" for line, other in imported_rooms(file) if not may_import(room, other)
    ]
    assert upward == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_are_absolute(file: Path) -> None:
    assert [(line, name) for line, name in imported_modules(file) if name.startswith(".")] == []


def test_only_the_callback_imports_lightning() -> None:
    frameworks = {"lightning", "pytorch_lightning", "hydra", "omegaconf", "recipes", "tests"}
    found = {
        room_of(file): name for file in FILES for _, name in imported_modules(file) if name.split(".")[0] in frameworks
    }
    assert set(found) <= {"callback"}


@pytest.mark.parametrize(
    ("room", "other", "allowed"),
    [
        ("compiler", "plan", True),
        ("compiler", "guards", False),
        ("plan", "compiler", False),
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
    file.write_text("import graphplan.tape\ndef f():\n    from graphplan import plan\n    from . import roles\n")
    assert imported_rooms(file) == [(1, "tape"), (3, "plan")]
    assert imported_modules(file)[-1] == (4, ".")


def test_importing_the_package_imports_no_framework() -> None:
    frameworks = {"lightning", "pytorch_lightning", "hydra", "omegaconf"}
    code = f"import sys, graphplan; print(sorted({frameworks} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
