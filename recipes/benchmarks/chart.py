"""README's chart: what the callback gains in a typical Trainer, from the results of the benchmark.

    python -m recipes.benchmarks.chart   # writes docs/assets/speedup.svg from recipes/results/h200.json

The file is the same for the same results: its text is text, and it carries no date.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "mlp": "MLP, batch 256",
    "mlp_large": "MLP, batch 16,384",
    "pinn": "physics-informed network, 4096 points",
    "pinn_large": "physics-informed network, 65,536 points",
    "sac": "soft actor-critic, batch 256",
    "sac_large": "soft actor-critic, batch 8192",
    "gpt": "character GPT, batch 16 x 256",
    "gpt_large": "character GPT, batch 64 x 256",
    "resnet": "ResNet-18, batch 64",
    "resnet_large": "ResNet-18, batch 512",
    "gpt2_small": "GPT-2, batch 1 x 1024",
    "gpt2": "GPT-2, batch 8 x 1024",
}
"""The workloads of the chart, and what a reader calls them."""


def bars(result: dict[str, Any]) -> list[tuple[str, float, str]]:
    """One bar for each workload, largest first: its name, the speed-up, and the times that this is the quotient of."""
    times = {(row["workload"], row["contender"]): row["us"] for row in result["rows"] if "us" in row}
    found = []
    for workload, name in NAMES.items():
        before, after = times[workload, "typical"], times[workload, "typical_callback"]
        label = f"{before / after:.1f}x  ({before / 1e3:.2f} → {after / 1e3:.2f} ms)"
        found.append((name, before / after, label))
    return sorted(found, key=lambda bar: -bar[1])


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the chart as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, values, labels = zip(*reversed(bars(result)), strict=True)
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "graphplan", "font.size": 9}):
        figure, axis = pyplot.subplots(figsize=(8, 4.2))
        drawn = axis.barh(names, values, color="tab:blue")
        axis.bar_label(drawn, labels=labels, padding=4, fontsize=8)
        axis.axvline(1, color="tab:gray", linewidth=1)
        axis.set(xlabel="speed-up of a step in a Lightning Trainer by GraphPlanCallback", xlim=(0, 1.35 * max(values)))
        axis.set_title(f"{result['device']}, torch {result['torch']}", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(path, format="svg", metadata={"Date": None})
        pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser("python -m recipes.benchmarks.chart", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "recipes/results/h200.json")
    parser.add_argument("--to", type=Path, default=ROOT / "docs/assets/speedup.svg")
    args = parser.parse_args(argv)
    draw(json.loads(args.results.read_text()), args.to)


if __name__ == "__main__":
    main()
