"""Real models with their own libraries, with and without graphplan.

    python -m recipes.zoo [--set core] [--json PATH]

Each entry is measured in its own process: in a Trainer without and with ``GraphPlanCallback(on_failure="eager")``, in a
plain loop without and with ``graph_step``, in inference without and with ``graphed`` if the entry predicts, and, for
core entries on CUDA, as a graph captured by hand (the floor). A time is that of a whole step with all host work: CPU
time on the CPU, wall time on CUDA, where timed steps have the device exclusively. Replayed runs are compared with eager
runs of the same steps: bit by bit, else within the spread of eager runs.

An entry that fails, crashes or times out gives a row with its error; an entry with a missing library names the library.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import torch

from recipes.progress import bar
from recipes.zoo.clock import BLOCK, Turns
from recipes.zoo.registry import Entry, load_entries
from recipes.zoo.table import Row, markdown, summary

ROOT = Path(__file__).parents[2]
WARM = {False: 25, True: 45}
TIMED = {False: 40, True: 30}
"""Steps on the CPU (False) and on CUDA (True). On CUDA graphplan times some steps first. The steps timed here are
replays 34 to 63, between two checks.
"""
STAGES = ("fit", "loop", "service", "floor")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m recipes.zoo", description=__doc__, formatter_class=form)
    parser.add_argument(
        "--set", choices=("cpu", "gpu", "core"), help="all on the CPU, all on CUDA, or the core (default: all, here)"
    )
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="PATTERN", help="names of entries, such as 'vision/*'"
    )
    parser.add_argument("--workers", type=int, default=1, help="entries at a time")
    parser.add_argument(
        "--steps",
        type=int,
        help=f"timed steps, a multiple of {3 * BLOCK} (default: {TIMED[False]}, on CUDA {TIMED[True]})",
    )
    parser.add_argument("--warm", type=int, help=f"steps before those (default: {WARM[False]}, on CUDA {WARM[True]})")
    parser.add_argument(
        "--stages",
        nargs="+",
        default=STAGES,
        choices=(*STAGES, "turns"),
        help="what is measured of each; turns: fits without and with the callback in turns, for small differences",
    )
    parser.add_argument(
        "--no-equality", dest="equality", action="store_false", help="leave out the eager runs to compare with"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one entry")
    parser.add_argument(
        "--budget", type=float, help="seconds for all: what is running then is ended, its stages so far kept"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the table, and a .md beside it")
    parser.add_argument("--merge", type=Path, metavar="PATH", help="keep the rows of an earlier table that are not new")
    parser.add_argument("--list", action="store_true", help="print the entries' names")
    parser.add_argument("--child", nargs=2, type=str, metavar=("NAME", "PATH"), help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.gpu = args.set == "gpu" or (args.set != "cpu" and torch.cuda.is_available())
    args.warm = args.warm or WARM[args.gpu]
    block = 3 * BLOCK if args.gpu else BLOCK
    args.steps = (args.steps or TIMED[args.gpu]) // block * block
    if not args.steps:
        parser.error(f"--steps is below {block}, the steps of one block of the clock")
    return args


def chosen(args: argparse.Namespace) -> list[Entry]:
    """Return the entries that the command line selects."""
    entries = [entry for entry in load_entries().values() if entry.core or args.set != "core"]
    return [entry for entry in entries if any(fnmatch(entry.name, pattern) for pattern in args.only)]


def child(args: argparse.Namespace) -> None:
    """Measure one entry in this process."""
    from recipes.zoo.measuring import measure
    from recipes.zoo.training import Run

    torch.set_num_threads(1)
    name, path = args.child
    run = Run(load_entries()[name], args.gpu, args.warm, args.steps, Turns(args.turns), args.stages, args.equality)
    measure(run, Path(path))


def run_child(entry: Entry, args: argparse.Namespace, folder: Path, timeout: float) -> Row:
    """Measure one entry in its own process; a failure of the process becomes an error in the row."""
    base: Row = {"name": entry.name, "core": entry.core, "justified": entry.refused}
    if entry.missing:
        return {**base, "missing": entry.missing}
    path = folder / f"{entry.name.replace('/', '_')}.json"
    command = [sys.executable, "-m", "recipes.zoo", "--child", entry.name, str(path)]
    command += ["--set", "gpu" if args.gpu else "cpu", "--warm", str(args.warm), "--steps", str(args.steps)]
    command += ["--stages", *args.stages, *(["--no-equality"] if not args.equality else [])]
    command += ["--turns", str(folder)] if args.gpu else []
    around = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **os.environ}
    said = run_process(command, around, Turns(folder if args.gpu else None), timeout)
    row = {**base, **(json.loads(path.read_text()) if path.exists() else {})}
    if said:
        row.setdefault("error", f"{said} (in {row.get('at', 'the beginning')})")
    return row


def run_process(command: Sequence[str], environment: Mapping[str, str], turns: Turns, timeout: float) -> str:
    """Run a child process; return an error message, or an empty string if it succeeded."""
    with turns.taken(alone=False):
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        turns.enroll(process.pid)
    try:
        _, stderr = process.communicate(timeout=timeout)
        return f"exit status {process.returncode}: {stderr[-1500:]}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"not finished after {timeout:.0f} s"
    finally:
        turns.dismiss(process.pid)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the chosen entries; return the exit status."""
    args = parse(argv)
    if args.child:
        child(args)
        return 0
    entries = chosen(args)
    if args.list:
        print(*(entry.name for entry in entries), sep="\n")
        return 0
    start = monotonic()

    def job(entry: Entry) -> Row:
        left = args.timeout if args.budget is None else min(args.timeout, args.budget - monotonic() + start)
        if left <= 0:
            return {"name": entry.name, "error": f"not started within {args.budget:.0f} s"}
        return run_child(entry, args, Path(folder), left)

    names = {entry.name for entry in entries}
    earlier = json.loads(args.merge.read_text())["rows"] if args.merge else []
    rows: list[Row] = [row for row in earlier if row["name"] not in names]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(args.workers) as pool, bar("zoo", len(entries)) as begin:
        for future in as_completed([pool.submit(job, entry) for entry in entries]):
            rows.append(future.result())
            print(summary(rows[-1]), flush=True)
            begin(f"{rows[-1]['name']} is done")
            if args.json is not None:
                write(args, _sorted(rows))
    print(markdown(_sorted(rows)))
    return 0


def _sorted(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: str(row["name"]))


def write(args: argparse.Namespace, rows: list[Row]) -> None:
    """Write the rows so far as JSON and as markdown."""
    facts = {"date": date.today().isoformat(), "torch": torch.__version__, "device": "cuda" if args.gpu else "cpu"}
    facts |= {"warm": args.warm, "steps": args.steps}
    args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    args.json.with_suffix(".md").write_text(markdown(rows))


if __name__ == "__main__":
    raise SystemExit(main())
