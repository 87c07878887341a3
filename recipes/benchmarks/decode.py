"""A step of a decoder as a server runs it: ``python -m recipes.benchmarks.decode [--cpu] [--json PATH]``.

Two questions. How near does ``graphed`` come to a CUDA graph that is written by hand (static inputs, ``copy_``,
``replay``) and to ``torch.compile(mode="reduce-overhead")``, for batches of 1 to 64? And what do 64 batch sizes cost
that share 8 capture sizes: captures, padding, memory beside that of the largest alone?

Contenders take turns in blocks of steps, so that a clock that drifts favours none; the device is waited for at the ends
of a block, as a server that generates does not wait for each step. Blocks begin when replays are checked once in 1,000
steps, as in a server's long run. Results are compared with eager's.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from graphplan import buckets, graphed
from graphplan.backends.cudapools import forget_workspaces
from recipes.benchmarks.devices import require_cuda
from recipes.benchmarks.tables import plain_table
from recipes.comparison import now
from recipes.datasets import VOCABULARY
from recipes.decoder import Decoder
from recipes.latencies import require_close

Step = Callable[..., Tensor]
Feed = tuple[Tensor, Tensor, Tensor]
Row = dict[str, Any]

NEAR, SHARED = 1.05, 1.3
"""Bars: multiples of the hand-written graph's time, and of the memory that the largest shape takes alone."""
FEEDS = 4
"""Different inputs that a block's steps go through."""
_SHARE = 5
HAND, COMPILED = "hand-written graph", "reduce-overhead"
COLUMNS = ("batch", "contender", "us/step", "/ hand-written", "speed-up")


def make_feed(batch: int, length: int, device: torch.device) -> Feed:
    """One character for each request, at some place of its text."""
    slots = torch.arange(batch, device=device)
    tokens = torch.randint(VOCABULARY, (batch, 1)).to(device)
    return tokens, slots, torch.randint(length, (batch, 1)).to(device)


def graphed_step(model: Decoder, device: torch.device, **options: Any) -> Any:
    """The model's calls as replays. What it keeps of a request is state; padding leaves something in the spare slot."""
    given = {
        "static_roles": ("input", "param", "state"),
        "allow": ("model.layers.*",),
        "backend": "tape" if device.type == "cpu" else "cudagraph",
        "min_speedup": 0.0,
    }
    return graphed(model, **{**given, **options})


def hand_written(model: Decoder, feed: Feed) -> Step:
    """What one would write oneself: static inputs, a capture, copies and a replay."""
    static = tuple(tensor.clone() for tensor in feed)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result: Tensor = model(*static)

    def call(*fed: Tensor) -> Tensor:
        for target, source in zip(static, fed, strict=True):
            target.copy_(source, non_blocking=True)
        graph.replay()
        return result

    return call


def contenders(model: Decoder, feed: Feed, *, compiles: str) -> tuple[dict[str, Step], dict[str, str]]:
    """The steps to time, and why others are not there; ``compiles`` is a reason not to compile."""
    device = feed[0].device
    steps: dict[str, Step] = {
        "eager": model,
        "graphed": graphed_step(model, device),
        "graphed, static results": graphed_step(model, device, outputs="static"),
    }
    missing = {}
    if device.type == "cuda":
        steps[HAND] = hand_written(model, feed)
    else:
        missing[HAND] = "CUDA graphs need a GPU"
    if not compiles:
        try:
            # A copy: what is compiled and graphed belongs to the compiler.
            compiled: Any = torch.compile(deepcopy(model), mode="reduce-overhead", dynamic=False)
            for _ in range(4):
                compiled(*feed)
            steps[COMPILED] = compiled
        except (RuntimeError, ImportError, OSError, AttributeError, TypeError) as error:
            # Whatever the compiler lacks here: the others are measured all the same.
            compiles = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    if compiles:
        missing[COMPILED] = compiles
    return steps, missing


def time_steps(
    steps: dict[str, Step], feeds: Sequence[Feed], *, blocks: int, count: int, warmup: int, device: torch.device
) -> dict[str, float]:
    """Microseconds per step of each contender: the median of blocks that take turns."""
    for name, step in steps.items():
        for number in range(warmup if name.startswith("graphed") else 12):
            step(*feeds[number % len(feeds)])
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(blocks):
        for name, step in steps.items():
            own = max(count // _SHARE, 1) if name == "eager" else count
            start = now(device)
            for number in range(own):
                step(*feeds[number % len(feeds)])
            seconds[name].append((now(device) - start) / own)
    return {name: median(own) * 1e6 for name, own in seconds.items()}


def settled(step: Step, feeds: Sequence[Feed], layers: int) -> list[Tensor]:
    """The results once no layer's keys and values change any more: whoever ran before, they are then the same."""
    for _ in range(layers + 1):
        results = [step(*feed).clone() for feed in feeds]
    return results


def compare_batch(model: Decoder, batch: int, arguments: argparse.Namespace, *, compiles: str) -> list[Row]:
    """All contenders at one batch size."""
    device = next(model.parameters()).device
    feeds = [make_feed(batch, model.length, device) for _ in range(FEEDS)]
    steps, missing = contenders(model, feeds[0], compiles=compiles)
    expected = settled(model, feeds, len(model.layers))
    counts = {"blocks": arguments.blocks, "count": arguments.steps, "warmup": arguments.warmup}
    us = time_steps(steps, feeds, device=device, **counts)
    rows: list[Row] = []
    for name, step in steps.items():
        equal = require_close(expected, settled(step, feeds, len(model.layers)))
        row = {"batch": batch, "contender": name, "us": us[name], "equal": equal}
        row |= {"ratio": us[name] / us[HAND] if HAND in us else None, "speedup": us["eager"] / us[name]}
        rows.append(row)
    for step in steps.values():
        getattr(step, "close", lambda: None)()
    return rows + [{"batch": batch, "contender": name, "missing": reason} for name, reason in missing.items()]


def reserved(device: torch.device) -> int | None:
    """Memory that torch holds of the device, without what nobody uses and cuBLAS's workspaces; None on a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    forget_workspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def memory_of(model: Decoder, sizes: Sequence[int], device: torch.device) -> tuple[int | None, Any]:
    """What programs for these batch sizes take in all, and the step that has them."""
    before = reserved(device)
    step = graphed_step(model, device, shapes="bucket", buckets=sizes, pad={"slots": model.spare})
    step.prewarm(example=make_feed(1, model.length, device))
    after = reserved(device)
    return (None if before is None or after is None else after - before), step


def serve_shapes(model: Decoder, largest: int, count: int) -> Row:
    """Batches of all sizes, at ``count`` capture sizes."""
    device = next(model.parameters()).device
    alone, step = memory_of(model, [largest], device)
    step.close()
    del step
    ladder = buckets.fit(range(1, largest + 1), count)
    together, step = memory_of(model, ladder.sizes, device)
    sizes = [*range(1, largest + 1)] * 2
    random.Random(0).shuffle(sizes)
    expected, found = [], []
    for size in sizes:
        feed = make_feed(size, model.length, device)
        expected.append(model(*feed))
        found.append(step(*feed))
    shapes = step.shapes
    row = {
        "shapes": len(shapes.shapes), "capture_sizes": list(ladder.sizes), "captures": step.stats.captured,
        "padding": shapes.padding, "checked": shapes.checked, "pool_bytes": step.memory.pool,
        "reserved_bytes": together, "largest_alone_bytes": alone, "equal": require_close(expected, found),
    }  # fmt: skip
    row["memory_ratio"] = together / alone if alone and together is not None else None
    step.close()
    return row


def judge(rows: Sequence[Row], shapes: Row) -> list[Row]:
    """Each bar with what was measured; nothing where there is nothing to compare with."""
    most = len(shapes["capture_sizes"])
    bars = [{"bar": f"captures for {shapes['shapes']} shapes", "measured": shapes["captures"], "at_most": most}]
    if shapes["memory_ratio"] is not None:
        bars.append({"bar": "memory / largest alone", "measured": shapes["memory_ratio"], "at_most": SHARED})
    for row in rows:
        if row.get("ratio") is not None and row["contender"].startswith("graphed"):
            name = f"{row['contender']} / {HAND}, batch {row['batch']}"
            bars.append({"bar": name, "measured": row["ratio"], "at_most": NEAR})
    for bar in bars:
        bar["verdict"] = "met" if bar["measured"] <= bar["at_most"] else "missed"
    return bars


def show(rows: Sequence[Row], shapes: Row, bars: Sequence[Row]) -> None:
    """Print the table, what is not in it and why, how equal results are, and the bars."""
    timed = [row for row in rows if "us" in row]
    cells = [
        [
            str(row["batch"]), row["contender"], f"{row['us']:.1f}",
            "" if row["ratio"] is None else f"{row['ratio']:.3f}", f"{row['speedup']:.2f}x",
        ]
        for row in timed
    ]  # fmt: skip
    print(plain_table(COLUMNS, cells))
    missing = {(row["contender"], row["missing"]) for row in rows if "missing" in row}
    for name, reason in sorted(missing):
        sizes = [row["batch"] for row in rows if row.get("missing") == reason and row["contender"] == name]
        print(f"{name} is not there for batches of {', '.join(map(str, sizes))}: {reason}")
    for row in timed:
        if row["contender"] != "eager":
            print(f"batch {row['batch']}, {row['contender']}: {row['equal']}")
    print(
        f"{shapes['shapes']} shapes: {shapes['captures']} captures for sizes {shapes['capture_sizes']}, "
        f"{shapes['padding']:.2f} elements for each that was fed; {shapes['equal']}"
    )
    if shapes["memory_ratio"] is None:
        print("memory is not judged on a CPU: programs on the tape share none")
    else:
        mib = [shapes[name] / 2**20 for name in ("reserved_bytes", "largest_alone_bytes")]
        print(f"memory of all: {mib[0]:.1f} MiB, of the largest alone: {mib[1]:.1f} MiB")
    for bar in bars:
        print(f"{bar['bar']}: {bar['measured']:.3g}, at most {bar['at_most']}: {bar['verdict']}")


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cpu", action="store_true", help="a small model on the CPU, without CUDA graphs")
    parser.add_argument("--largest", type=int, help="the largest batch; by default 64, and 4 on the CPU")
    parser.add_argument("--blocks", type=int, default=3, help="blocks of each contender, of which the median counts")
    parser.add_argument("--steps", type=int, default=500, help="steps of a block; a fifth for eager")
    parser.add_argument("--warmup", type=int, default=530, help="steps of graphed before its first block")
    parser.add_argument("--compile-seconds", type=float, default=45.0, help="nothing more is compiled after this long")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args(argv)
    require_cuda(parser, cpu=arguments.cpu)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device("cpu" if arguments.cpu else "cuda")
    largest = arguments.largest or (4 if arguments.cpu else 64)
    size = {"layers": 2, "width": 64} if arguments.cpu else {"layers": 6, "width": 384, "heads": 6, "length": 256}
    model = Decoder(slots=largest, **size).to(device).eval()
    batches = [2**power for power in range(largest.bit_length()) if 2**power <= largest]
    compiled = {batches[0], batches[len(batches) // 2], batches[-1]}
    rows: list[Row] = []
    compiling = 0.0
    for batch in batches:
        reason = "" if batch in compiled else "compiled for three sizes only"
        reason = "its CUDA graphs need a GPU" if arguments.cpu else reason
        if compiling > arguments.compile_seconds:
            reason = reason or f"compiling had taken {compiling:.0f} s"
        start = perf_counter()
        rows += compare_batch(model, batch, arguments, compiles=reason)
        compiling += 0.0 if reason else perf_counter() - start
    shapes = serve_shapes(model, largest, min(8, largest))
    bars = judge(rows, shapes)
    show(rows, shapes, bars)
    if arguments.json is not None:
        name = "cpu" if arguments.cpu else torch.cuda.get_device_name()
        facts = {"torch": torch.__version__, "device": name, "date": date.today().isoformat()}
        command = f"python -m recipes.benchmarks.decode{' --cpu' if arguments.cpu else ''} --json {arguments.json}"
        figures = {**facts, "command": command, "rows": rows, "shapes": shapes, "bars": bars}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
