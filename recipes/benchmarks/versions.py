"""The core tests in other versions: ``make matrix``, a virtual environment for each combination.

Each combination is a Python, a release of PyTorch and one of Lightning, under both of Lightning's names. Its
environment is made in ``build/matrix``, and removed after its tests. What is not to be had (no such Python on the PATH,
no such release in the package index) is a row with the reason. The table is written after each combination; rows that
an earlier run wrote for other combinations stay in it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple
from xml.etree import ElementTree

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from recipes.benchmarks.tables import markdown_table

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "recipes" / "results" / "matrix.json"
FOLDER = ROOT / "build" / "matrix"
NEWEST = "newest"
COLUMNS = ("Python", "PyTorch", "Lightning", "loop over batches", "guards", "passed", "failed", "skipped", "")
_LIBRARIES = ("pytest", "pytest-xdist", "hypothesis", "jsonargparse", "numpy", "psutil", "rich", "scikit-learn")
_OTHERS_WARNINGS = (
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:pkg_resources is deprecated:UserWarning",
    "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning",
)
"""What releases say of each other: the tests' settings make errors of them for the releases that they name."""
_NEEDS_PKG_RESOURCES = ("2.2.", "2.3.")
_PERCENT = re.compile(r"\[\s*(\d+)%\]\s*$")
_FACTS = """
import json, torch
from graphplan.compare import building
found = {"torch": torch.__version__, "guards": building.load() is not None}
try:
    import lightning
    from graphplan import GraphPlanCallback
    from graphplan.callback.lightning_code import is_known
    found |= {"lightning": lightning.__version__, "loop": is_known("loop")}
except ImportError:
    pass
print(json.dumps(found))
"""
Row = dict[str, Any]
Told = Callable[[str, float], None]


class Combination(NamedTuple):
    """Releases to run the tests with; :data:`NEWEST` is what the package index gives, no Lightning is an empty text."""

    python: str
    torch: str
    lightning: str

    @property
    def name(self) -> str:
        """What its folder and its row are called."""
        return f"python{self.python}-torch{self.torch}-lightning{self.lightning or '-none'}"

    @property
    def requirements(self) -> list[str]:
        """What pip is asked for."""
        needed = [_pinned("torch", self.torch), *_LIBRARIES]
        if self.lightning:
            needed += [_pinned(name, self.lightning) for name in ("lightning", "pytorch-lightning")]
        if self.lightning.startswith(_NEEDS_PKG_RESOURCES):
            needed.append("setuptools<81")
        return needed


def _pinned(name: str, release: str) -> str:
    return name if release == NEWEST else f"{name}=={release}"


LIGHTNINGS = ("2.2.5", "2.3.3", "2.4.0", "2.5.6", "2.6.0", NEWEST)
COMBINATIONS = (
    *(Combination("3.11", "2.13.0", release) for release in ("", *LIGHTNINGS)),
    Combination("3.10", "2.8.0", "2.2.5"),
    Combination("3.12", "2.9.1", "2.5.6"),
    Combination("3.13", "2.10.0", NEWEST),
    Combination("3.12", "2.11.0", NEWEST),
    Combination("3.11", NEWEST, NEWEST),
    Combination("3.13", "2.15.0", NEWEST),
    Combination("3.14", NEWEST, NEWEST),
)
"""Each release of Lightning with one of PyTorch, each of PyTorch with one of Lightning, each Python at least once."""


class NotRunError(RuntimeError):
    """A combination cannot be had here; the text says why."""


def _interpreter(version: str) -> str:
    """The Python of that version on the PATH that can make environments.

    Raises:
        NotRunError: if there is none.
    """
    for folder in os.get_exec_path():
        found = shutil.which(f"python{version}", path=folder)
        if (
            found
            and subprocess.run([found, "-c", "import ensurepip"], capture_output=True, check=False).returncode == 0
        ):
            return found
    raise NotRunError(f"no python{version} with venv and ensurepip on the PATH")


def _called(command: Sequence[str], environment: dict[str, str], what: str) -> str:
    """What a command prints.

    Raises:
        NotRunError: with the command's last words, if it fails.
    """
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        # pip's first error says what, and then lists all releases; the others say that it failed.
        told = [line.partition(" (from versions")[0] for line in lines if line.startswith("ERROR")]
        limits = [line.strip() for line in lines if "(constraint)" in line]
        raise NotRunError(" ".join([f"{what}:", (told or lines[-1:] or ["no word"])[0], *limits]))
    return done.stdout


def _install(one: Combination, folder: Path, pip: Sequence[str]) -> Path:
    """Make the environment; its Python.

    Raises:
        NotRunError: if its Python or one of the releases is not to be had.
    """
    subprocess.run([_interpreter(one.python), "-m", "venv", "--clear", str(folder)], check=True, capture_output=True)
    python = folder / "bin" / "python"
    free = ("torch==", "lightning<", "pytorch-lightning<")
    limits = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith(free)]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(limits) + "\n")
    install = [str(python), "-m", "pip", "install", "--no-compile", "--disable-pip-version-check", *pip]
    # The project itself is among it: its own bounds hold.
    wanted = ["--constraint", str(constraints), *one.requirements, "--editable", str(ROOT)]
    _called([*install, *wanted], dict(os.environ), "pip install")
    return python


def _around() -> dict[str, str]:
    """The environment variables of what runs in a combination. Guards are built once for each Python and PyTorch."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(FOLDER / "extensions")}
    return {**os.environ, **own}


def _test(python: Path, folder: Path, tests: Sequence[str], told: Told) -> Row:
    """Run the tests; their counts and the names of those that failed."""
    report = folder / "report.xml"
    ignored = [word for warning in _OTHERS_WARNINGS for word in ("-W", warning)]
    command = [str(python), "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", f"--junitxml={report}", *ignored]
    last: list[str] = []
    with subprocess.Popen(
        [*command, *tests], cwd=ROOT, env=_around(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            last = [*last[-20:], line]
            percent = _PERCENT.search(line)
            if percent is not None:
                told("tests", int(percent[1]))
    if process.returncode not in (0, 1) or not report.exists():
        raise NotRunError("pytest: " + "".join(last).strip()[-500:])
    return _counts(ElementTree.parse(report))


def _chosen(one: Combination, tests: Sequence[str]) -> list[str]:
    """The tests of a combination. Those without Lightning are run once for each Python and PyTorch."""
    first = next((other for other in COMBINATIONS if other[:2] == one[:2]), one)
    return [test for test in tests if (one.lightning if "lightning" in test else one == first)]


def _counts(report: Any) -> Row:
    cases = list(report.iter("testcase"))
    ended = {kind: [case for case in cases if case.find(kind) is not None] for kind in ("failure", "error", "skipped")}
    failed = sorted({f"{case.get('classname')}::{case.get('name')}" for case in (*ended["failure"], *ended["error"])})
    skipped = len(ended["skipped"])
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}


def run(one: Combination, tests: Sequence[str], pip: Sequence[str], told: Told, *, keep: bool = False) -> Row:
    """Make a combination's environment, run the tests in it, and say how they ended, or why they were not run."""
    row: Row = {**one._asdict(), "date": date.today().isoformat()}
    folder, start = FOLDER / one.name, monotonic()
    try:
        told("installs", 0)
        python = _install(one, folder, pip)
        told("builds the guards", 0)
        # Without a compiler the guards are Python.
        code = "from graphplan.compare.building import build, find; find() or build()"
        subprocess.run([str(python), "-c", code], cwd=ROOT, env=_around(), capture_output=True, check=False)
        facts = json.loads(_called([str(python), "-W", "ignore", "-c", _FACTS], _around(), "import graphplan"))
        row["found"] = facts
        told("tests", 0)
        row |= _test(python, folder, _chosen(one, tests), told)
    except NotRunError as error:
        row["reason"] = str(error)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return {**row, "seconds": round(monotonic() - start)}


def cells(row: Row) -> list[str]:
    """A row as the table shows it."""
    found = row.get("found", {})
    names = [row["python"], found.get("torch", row["torch"]), found.get("lightning", row["lightning"]) or "none"]
    if "passed" not in row:
        return [*names, "", "", "", "", "", f"not run: {row['reason']}".replace("|", "/")]
    loop = {True: "loop seam", False: "Lightning's own", None: ""}[found.get("loop")]
    counts = [str(row["passed"]), str(len(row["failed"])), str(row["skipped"])]
    return [*names, loop, "C++" if found["guards"] else "Python", *counts, ", ".join(row["failed"])]


def write(rows: Iterable[Row], path: Path) -> None:
    """Write the rows as JSON and, beside it, as a table in Markdown."""
    kept = list(rows)
    path.write_text(json.dumps({"rows": kept}, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown_table(COLUMNS, [cells(row) for row in kept], left=5))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen combinations; 1 if a test failed in one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tests", nargs="+", required=True, help="files and folders of tests")
    parser.add_argument("--only", nargs="*", default=[], help="parts of combinations' names, as of torch2.8.0")
    parser.add_argument("--pip", default="", help="further arguments of pip install")
    parser.add_argument("--json", type=Path, default=RESULT, help="the result; its table lies beside it")
    parser.add_argument("--keep", action="store_true", help="keep the environments in build/matrix")
    parser.add_argument("--list", action="store_true", help="only name the combinations")
    args = parser.parse_args(argv)
    chosen = [one for one in COMBINATIONS if all(part in one.name for part in args.only)]
    if not chosen:
        parser.error(f"no combination has {args.only} in its name: --list names them")
    console = Console()
    if args.list:
        console.print(*(one.name for one in chosen), sep="\n", highlight=False)
        return 0
    earlier = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
    rows = {Combination(row["python"], row["torch"], row["lightning"]): row for row in earlier}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        everything, inner = bars.add_task("combinations", total=len(chosen)), bars.add_task("", total=100)
        for one in chosen:
            told = partial(_tell, bars, inner, one.name)
            rows[one] = row = run(one, args.tests, args.pip.split(), told, keep=args.keep)
            console.print("  ".join(filter(None, cells(row))), highlight=False, markup=False)
            write((rows[other] for other in sorted(rows, key=_place)), args.json)
            bars.advance(everything)
    return int(any(rows[one].get("failed") for one in chosen))


def _tell(bars: Progress, task: Any, name: str, stage: str, percent: float) -> None:
    bars.update(task, description=f"{name}: {stage}", completed=percent)


def _place(one: Combination) -> tuple[int, Combination]:
    """The order of the table: that of :data:`COMBINATIONS`, then what was once in it."""
    return (COMBINATIONS.index(one) if one in COMBINATIONS else len(COMBINATIONS), one)


if __name__ == "__main__":
    sys.exit(main())
