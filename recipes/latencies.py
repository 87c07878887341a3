"""What the recipes that serve have in common: the command line's end, a table of latencies, a comparison of results."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from statistics import quantiles

import torch
from torch import Tensor

_TOLERANCE = 1e-3
"""Kernels are chosen by size, and round otherwise: a padded call may differ by this part of its largest value."""


def device_of(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, torch.device]:
    """Add ``--backend`` and ``--device``, read the command line, and have torch use one thread and a fixed seed."""
    parser.add_argument("--backend", default="auto", choices=["auto", "cudagraph", "tape"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return args, torch.device(args.device)


def print_limits(device: torch.device, shows: str, costs: str) -> None:
    """On a CPU, say what the run shows (``shows``), and why replays are no faster (the tape, and ``costs``)."""
    if device.type == "cpu":
        print(f"on a CPU this shows {shows}.")
        print(f"It cannot show a gain: the tape replays operators one by one, and {costs}. Times need a CUDA device.")


def print_latencies(rows: Mapping[str, Sequence[float]]) -> None:
    """Median, 90th and 99th percentile in microseconds of each row's seconds."""
    print(f"{'µs per call':<24}{'p50':>10}{'p90':>10}{'p99':>10}{'calls':>8}")
    for name, seconds in rows.items():
        cuts = quantiles(seconds, n=100) if len(seconds) > 1 else [*seconds] * 99
        cells = "".join(f"{cuts[part - 1] * 1e6:>10.0f}" for part in (50, 90, 99))
        print(f"{name:<24}{cells}{len(seconds):>8}")


def require_close(expected: Sequence[Tensor], found: Sequence[Tensor], *, exact: bool = False) -> str:
    """One line that says how equal two lists of results are.

    Raises:
        SystemExit: if they are not, bit by bit with ``exact`` on a CPU, else within rounding.
    """
    different = [index for index, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)]
    if not different:
        return f"equal to eager: bitwise, all {len(expected)} results"
    worst = max(_distance(expected[index], found[index]) for index in different)
    if worst > _TOLERANCE or (exact and expected[0].device.type == "cpu"):
        raise SystemExit(
            f"not equal to eager: {len(different)} of {len(expected)} results differ, by up to {worst:.2e}"
        )
    return f"equal to eager: within rounding, {len(different)} of {len(expected)} results differ by at most {worst:.1e}"


def _distance(one: Tensor, two: Tensor) -> float:
    if one.shape != two.shape:
        return float("inf")
    return float((one.double() - two.double()).abs().max() / one.double().abs().max())
