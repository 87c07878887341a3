"""What does a step cost? Eager, by hand, with ``graph_step`` and with ``GraphPlanCallback``: one command, one table.

    python -m recipes.benchmark                      # on a CUDA device
    python -m recipes.benchmark --cpu                # smaller workloads, the tape backend

Every contender runs in a process of its own, one after the other. Times are wall-clock time per step over blocks of
steps, each ended by a device synchronisation; the table has the median of the blocks. On a CPU the eager loop and the
tape share one process and take turns, since a CPU's noise would otherwise be larger than the difference. A contender
that fails becomes a row with its error, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from recipes.tables import LABELS, draw, markdown_table, show

BASELINES = {"floor": "eager", "graph_step": "eager", "trainer_callback": "trainer"}
BARS = {"mlp2": 1.5, "transformer4": 1.0}
"""Least speed-up of the tape over the eager loop, by CPU workload."""
Row = dict[str, Any]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; numbers that are not given depend on the device."""
    parser = argparse.ArgumentParser("python -m recipes.benchmark", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="small workloads on the CPU, with the tape backend")
    parser.add_argument("--workloads", default="", help="comma-separated; default: all of the device's")
    parser.add_argument("--contenders", default="", help=f"comma-separated, out of {', '.join(LABELS)}; default: all")
    parser.add_argument("--optimizer-impl", choices=("stock", "fused"), default="fused", help="the optimizer's kernels")
    parser.add_argument("--steps", type=int, help="steps in a block (default 300; on a CPU 50)")
    parser.add_argument("--repeats", type=int, help="blocks (default 3; on a CPU 11)")
    parser.add_argument("--warmup", type=int, default=30, help="steps before the first block; at least 10")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of torch (default: torch's own choice)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that one contender may take")
    for name in ("json", "markdown", "chart"):
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", help=f"write the result as {name}")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.chart and importlib.util.find_spec("matplotlib") is None:
        parser.error("--chart needs matplotlib")
    args.steps = args.steps or (50 if args.cpu else 300)
    args.repeats = args.repeats or (11 if args.cpu else 3)
    args.warmup = max(args.warmup, 10)
    return args


def child(args: argparse.Namespace) -> None:
    """Measure one contender in this process and print its rows as one line of JSON."""
    import torch

    from recipes.contenders import measure
    from recipes.measuring import Job

    if args.threads:
        torch.set_num_threads(args.threads)
    job = Job(args.workloads, args.contenders, args.optimizer_impl, args.cpu, args.steps, args.repeats, args.warmup)
    print(json.dumps(measure(job)), flush=True)


def names(text: str, known: Sequence[str], what: str) -> list[str]:
    """Split a comma-separated list of known names; all of them if it is empty."""
    chosen = text.split(",") if text else list(known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise SystemExit(f"no {what} is called {', '.join(unknown)}; choose from: {', '.join(known)}")
    return chosen


def processes(args: argparse.Namespace) -> list[tuple[str, str]]:
    """The (workload, contender) pairs that each get a process."""
    from recipes.workloads import workloads

    default = [name for name in LABELS if not (args.cpu and name == "floor")]
    contenders = names(args.contenders, list(LABELS), "contender") if args.contenders else default
    if args.cpu and {"eager", "graph_step"} <= set(contenders):
        contenders = ["interleaved", *(c for c in contenders if c not in ("eager", "graph_step"))]
    chosen = names(args.workloads, list(workloads(args.cpu)), "workload")
    return [(workload, contender) for workload in chosen for contender in contenders]


def run_child(args: argparse.Namespace, workload: str, contender: str) -> list[Row]:
    """Measure one contender in a new process; its error is a row too."""
    command = [sys.executable, "-m", "recipes.benchmark", "--child", "--workloads", workload, "--contenders", contender]
    for name in ("optimizer_impl", "steps", "repeats", "warmup", "threads"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command += ["--cpu"] if args.cpu else []
    failed: Row = {"workload": workload, "contender": contender, "implementation": args.optimizer_impl}
    root = Path(__file__).resolve().parents[1]
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
        floor = times.get((row["workload"], "floor"))
        base = times.get((row["workload"], BASELINES.get(row["contender"], "")))
        if "us" not in row:
            continue
        row["ratio_to_floor"] = row["us"] / floor if floor else None
        row.setdefault("speedup", base / row["us"] if base else None)


def bars(rows: list[Row]) -> list[Row]:
    """Hold the tape to its least speed-ups."""
    held = [row for row in rows if row["contender"] == "graph_step" and row["workload"] in BARS and "us" in row]
    return [
        {"workload": row["workload"], "speedup": row["speedup"], "least": BARS[row["workload"]],
         "met": bool(row["speedup"] and row["speedup"] >= BARS[row["workload"]])}
        for row in held
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    args = parse(argv)
    if args.child:
        child(args)
        return 0
    rows: list[Row] = []
    for workload, contender in processes(args):
        print(f"{workload}: {LABELS.get(contender, contender)} ...", file=sys.stderr, flush=True)
        rows += run_child(args, workload, contender)
    compare(rows)
    known = next((row for row in rows if "torch" in row), {})
    result: Row = {
        "command": "python -m recipes.benchmark " + " ".join(sys.argv[1:] if argv is None else argv),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": known.get("torch"), "device": known.get("device"), "python": platform.python_version(),
        "optimizer_impl": args.optimizer_impl, "steps": args.steps, "repeats": args.repeats, "warmup": args.warmup,
        "bars": bars(rows), "rows": rows,
    }  # fmt: skip
    for path in filter(None, (args.json, args.markdown, args.chart)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(markdown_table(rows))
    if args.chart:
        draw(result, args.chart)
    show(result)
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
