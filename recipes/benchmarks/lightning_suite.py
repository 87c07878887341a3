"""Lightning's own tests with the callback in every fit: ``make lightning-suite SOURCES=../pytorch-lightning``.

SOURCES is a checkout of Lightning's repository, of about the release that is installed. The tests of its loops and
callbacks are run twice, without and with the callback; what fails only with it is listed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any

FOLDERS = ("loops", "callbacks")
_WITH = "GRAPHPLAN_LIGHTNING_SUITE"
_ROOT = Path(__file__).parents[2]


def pytest_configure(config: Any) -> None:
    """As a plugin: have every fit bring the callback, on the tape, which goes on eagerly where it cannot capture."""
    from lightning.pytorch import Trainer

    from graphplan import GraphPlanCallback

    fit = Trainer.fit

    @wraps(fit)
    def with_callback(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Not from the start: some tests count a Trainer's callbacks.
        callback = GraphPlanCallback(backend="tape", on_failure="eager", min_speedup=0)
        self.callbacks.insert(0, callback)
        try:
            return fit(self, *args, **kwargs)
        finally:
            if callback in self.callbacks:
                self.callbacks.remove(callback)

    Trainer.fit = with_callback  # type: ignore[method-assign]
    # What the callback says about steps that it leaves eager is no fault of a test's.
    config.addinivalue_line("filterwarnings", "ignore:graphplan runs")


def run(sources: Path, options: Sequence[str], *, graphed: bool) -> tuple[dict[str, str], str]:
    """How each test ended that did not pass, by name, and pytest's summary."""
    tests = sources / "tests"
    plugin = ["-p", "recipes.benchmarks.lightning_suite"] if graphed else []
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *plugin, *options]
    command += [f"tests_pytorch/{folder}" for folder in FOLDERS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), str(tests)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest could not run in {tests}:\n{(done.stdout + done.stderr)[-4000:]}")
    found = re.findall(r"^(FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return {name: ended for ended, name in found}, done.stdout.strip().splitlines()[-1]


def main(argv: Sequence[str] | None = None) -> None:
    """Run both, print the counts, and list what fails only with the callback."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sources", type=Path, help="a checkout of Lightning's repository")
    parser.add_argument("options", nargs="*", help="options of pytest")
    arguments = parser.parse_args(argv)
    if not (arguments.sources / "tests" / "tests_pytorch").is_dir():
        parser.error(f"{arguments.sources} has no tests/tests_pytorch: expected a checkout of Lightning's repository")
    without, summary = run(arguments.sources, arguments.options, graphed=False)
    print(f"without the callback: {summary}", flush=True)
    graphed, summary = run(arguments.sources, arguments.options, graphed=True)
    print(f"with the callback:    {summary}", flush=True)
    new = [name for name in graphed if name not in without]
    for name in new:
        print(f"  only with it: {name}")
    sys.exit(bool(new))


if __name__ == "__main__":
    main()
