"""What does a step cost? Eager, compiled, by hand, with ``graph_step``, in Trainers with and without the callback.

    python -m recipes.benchmarks                      # on a CUDA device
    python -m recipes.benchmarks --cpu                # smaller workloads, the tape backend

Every contender runs in a process of its own, one after the other. Times are wall-clock time per step over blocks of
steps, each ended by a device synchronisation; the table has the median of the blocks, checks of replays against eager
steps included. On a CPU the eager loop and the tape share one process and take turns, since a CPU's noise would
otherwise be larger than the difference. A contender that fails becomes a row with its error, and the exit status is 1;
a library that is not installed becomes a row that says so.

The typical Trainer has a CSV logger, a progress bar, checkpoints, clipping, a cosine schedule, and five values logged.
A name ends in +compile if the model is compiled and in +fuse if the optimizer has torch's fused kernels: with
graph_step and the callback by compile= and fuse_optimizer=, anywhere else by hand. "/ floor" is the multiple of the
hand-written CUDA graph with the same compilation and kernels, "speed-up" is over the plain loop, the Trainer or the
typical Trainer.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

from recipes.benchmarks.bars import bars
from recipes.benchmarks.catalogue import CONTENDERS, CPU_SECONDS, PEER, SETS, WAYS, Contender
from recipes.benchmarks.tables import draw, markdown, show
from recipes.progress import bar

Row = dict[str, Any]
_SHARE = 5
"""Whoever launches each kernel from the host takes this many times fewer steps."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    sets = "; ".join(f"{name}: {chosen.minutes} minutes on an H200" for name, chosen in SETS.items())
    made = argparse.ArgumentParser(
        "python -m recipes.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--cpu", action="store_true", help="small workloads on the CPU, with the tape backend")
    made.add_argument(
        "--set", choices=list(SETS), default="core", help=f"what is measured, about ({sets}; default: core)"
    )
    made.add_argument("--workloads", default="", help="comma-separated; default: the set's")
    made.add_argument(
        "--contenders", default="",
        help=f"comma-separated, out of {', '.join(WAYS)}, with +compile or +fuse after most; default: the set's",
    )  # fmt: skip
    made.add_argument(
        "--peer", action="append", type=Path, default=[], metavar="PATH",
        help="one contender more: a Python file with make_step(train_step, model, optimizer, device), which returns a "
        "callable (x, y) that trains on one batch in (pinned) host memory; optimizer is a list if a step has several",
    )  # fmt: skip
    made.add_argument(
        "--steps", type=int, help="steps in a block (default: the workload's; a fifth for those without graphs)"
    )
    made.add_argument("--repeats", type=int, help="blocks, of which the median counts (default 3; on a CPU 11)")
    made.add_argument("--warmup", type=int, help="steps before the first block, at least 10 (default: likewise)")
    made.add_argument("--threads", type=int, default=0, help="CPU threads of torch (default: torch's own choice)")
    made.add_argument("--timeout", type=float, default=300, help="seconds that one contender may take")
    made.add_argument("--bars", action="store_true", help="print the bars too, each met or missed")
    made.add_argument(
        "--merge", action="append", type=Path, default=[], metavar="PATH",
        help="results of earlier runs (--json): what they have measured is shown, and not measured again",
    )  # fmt: skip
    made.add_argument("--json", type=Path, metavar="PATH", help="write the result as JSON, after each contender anew")
    made.add_argument("--markdown", type=Path, metavar="PATH", help="write the tables as markdown")
    made.add_argument("--chart", type=Path, metavar="PATH", help="write a bar chart")
    made.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return made


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    made = parser()
    args = made.parse_args(argv)
    if args.chart and importlib.util.find_spec("matplotlib") is None:
        made.error("--chart needs matplotlib")
    args.repeats = args.repeats or (11 if args.cpu else 3)
    return args


def child(args: argparse.Namespace) -> None:
    """Measure one contender in this process and print its rows as one line of JSON."""
    import torch

    from recipes.benchmarks.contenders import measure
    from recipes.benchmarks.measuring import Job
    from recipes.benchmarks.workloads import workloads

    if args.threads:
        torch.set_num_threads(args.threads)
    chosen = workloads(args.cpu)[args.workloads]
    # Replays are many, so that checks are as rare among them as in a long run. Without a GPU all take as many steps.
    share = 1 if args.cpu or Contender(args.contenders).replays else _SHARE
    steps, warmup = args.steps or chosen.steps // share, max(args.warmup or chosen.warmup // share, 10)
    print(json.dumps(measure(Job(chosen.name, args.contenders, args.cpu, steps, args.repeats, warmup))), flush=True)


def _names(text: str, known: Sequence[str], shown: Sequence[str], what: str) -> list[str]:
    """Split a comma-separated list of known names."""
    chosen = text.split(",")
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise SystemExit(f"no {what} is called {', '.join(unknown)}; choose from: {', '.join(shown)}")
    return chosen


def processes(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The (workload, contender) pairs that each get a process."""
    from recipes.benchmarks.workloads import workloads

    known = workloads(args.cpu)
    chosen = [name for name in SETS[args.set].workloads if name in known]
    if args.workloads:
        chosen = _names(args.workloads, list(known), list(known), "workload")
    contenders = [name for name in SETS[args.set].contenders if not (args.cpu and WAYS[Contender(name).way].cuda)]
    if args.contenders:
        contenders = _names(args.contenders, CONTENDERS, list(WAYS), "contender")
    contenders += [f"{PEER}{path.resolve()}" for path in args.peer]
    if args.cpu and {"eager", "graph_step"} <= set(contenders):
        contenders = ["interleaved", *(c for c in contenders if c not in ("eager", "graph_step"))]
    for workload in chosen:
        for contender in contenders:
            if known[workload].one_call or not Contender(contender).wraps_model:
                yield workload, contender
            else:
                why = "its step does more with the model than call it once and differentiate that once"
                print(f"{workload}: {Contender(contender).label} is left out: {why}", file=sys.stderr)


def _made(pair: tuple[str, str]) -> set[tuple[str, str]]:
    """The rows that the process of this pair makes."""
    workload, contender = pair
    return {(workload, name) for name in (("eager", "graph_step") if contender == "interleaved" else (contender,))}


def run_child(args: argparse.Namespace, workload: str, contender: str) -> list[Row]:
    """Measure one contender in a new process; its error is a row too."""
    command = [
        sys.executable,
        "-m",
        "recipes.benchmarks",
        "--child",
        "--workloads",
        workload,
        "--contenders",
        contender,
    ]
    for name in ("steps", "repeats", "warmup", "threads"):
        value = getattr(args, name)
        command += [f"--{name}", str(value)] if value else []
    command += ["--cpu"] if args.cpu else []
    failed: Row = {"workload": workload, "contender": contender}
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout, cwd=root, check=False)
    except subprocess.TimeoutExpired:
        return [{**failed, "error": f"no result after {args.timeout:.0f} s"}]
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        rows: list[Row] = json.loads(lines[-1])
        return rows
    said = done.stderr.strip().splitlines() or ["nothing on stderr"]
    return [{**failed, "error": f"exit status {done.returncode}: {said[-1]}", "stderr": said[-60:]}]


def compare(rows: list[Row]) -> None:
    """Add to each row what it means beside the others of its workload."""
    times = {(row["workload"], row["contender"]): row["us"] for row in rows if "us" in row}
    for row in rows:
        if "us" not in row:
            continue
        who = Contender(row["contender"])
        floor, base = (times.get((row["workload"], name)) for name in (who.floor, who.base))
        row["ratio_to_floor"] = row["us"] / floor if floor else None
        row["speedup"] = row.get("paired_speedup", base / row["us"] if base else None)


def summary(args: argparse.Namespace, argv: Sequence[str] | None, rows: list[Row]) -> Row:
    """The result so far."""
    compare(rows)
    places = [sorted({row[name] for row in rows if name in row}) for name in ("torch", "device")]
    return {
        "command": "python -m recipes.benchmarks " + " ".join(sys.argv[1:] if argv is None else argv),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": ", ".join(places[0]), "device": ", ".join(places[1]), "python": platform.python_version(),
        "repeats": args.repeats, "bars": bars(rows, cpu=args.cpu), "rows": rows,
    }  # fmt: skip


def earlier(paths: Sequence[Path]) -> list[Row]:
    """What earlier runs have measured; of two rows for the same, the later file's.

    Raises:
        SystemExit: if a file cannot be read, or is not what ``--json`` writes.
    """
    rows: dict[tuple[str, str], Row] = {}
    for path in paths:
        try:
            result = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise SystemExit(f"--merge {path}: cannot be read as JSON: {error}") from error
        measured = result.get("rows", ()) if isinstance(result, dict) else ()
        if not measured or not all(
            isinstance(row, dict) and {"workload", "contender"} <= row.keys() for row in measured
        ):
            expected = "expected what --json has written"
            raise SystemExit(f"--merge {path}: {expected}, found no rows of workloads and contenders")
        for row in measured:
            if "us" in row:
                rows[row["workload"], row["contender"]] = row
    return list(rows.values())


def in_order(rows: list[Row]) -> list[Row]:
    """Rows by workload, in the order in which these came, and then by contender."""
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    places = {name: index for index, name in enumerate(CONTENDERS)}
    last = len(places)
    return sorted(rows, key=lambda row: (workloads.index(row["workload"]), places.get(row["contender"], last)))


def expected_time(args: argparse.Namespace, count: int) -> str:
    """How long ``count`` processes take, in words."""
    said = f"{count} processes, one after the other"
    if args.cpu:
        return f"{said}: about {max(round(count * CPU_SECONDS / 60), 1)} min on two cores"
    return f"{said}; all of --set {args.set} takes about {SETS[args.set].minutes} min on an H200"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    from recipes.benchmarks.devices import require_cuda

    args = parse(argv)
    if args.child:
        child(args)
        return 0
    rows = in_order(earlier(args.merge))
    had = {(row["workload"], row["contender"]) for row in rows}
    left = [pair for pair in processes(args) if not _made(pair) <= had]
    if left:
        require_cuda(parser(), cpu=args.cpu)
        print(expected_time(args, len(left)), file=sys.stderr, flush=True)
    for path in filter(None, (args.json, args.markdown, args.chart)):
        path.parent.mkdir(parents=True, exist_ok=True)
    with bar("benchmark", len(left)) as begin:
        for workload, contender in left:
            start, label = perf_counter(), f"{workload}: {Contender(contender).label}"
            begin(label)
            rows = in_order(rows + run_child(args, workload, contender))
            print(f"{label}: {perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(summary(args, argv, rows), indent=1) + "\n")
    result = summary(args, argv, rows)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(markdown(result, with_bars=args.bars))
    if args.chart:
        draw(result, args.chart)
    show(result, with_bars=args.bars)
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
