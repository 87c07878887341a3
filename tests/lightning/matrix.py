"""The features of a Lightning fit as data: one row each, run without the callback and with it, and compared.

``python -m tests.lightning.matrix [PART OF A NAME]`` prints a table; ``test_matrix.py`` runs each row as a test.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table

from tests.lightning.rows import Row, check
from tests.lightning.rows_of_callbacks import CALLBACKS
from tests.lightning.rows_of_logs import LOGS
from tests.lightning.rows_of_modules import BATCHES, HOOKS, STEPS
from tests.lightning.rows_of_optimizers import OPTIMIZERS
from tests.lightning.rows_of_parts import PARTS
from tests.lightning.rows_of_runs import RUNS
from tests.lightning.rows_of_trainers import TRAINERS

GROUPS: dict[str, dict[str, Row]] = {
    "step": STEPS,
    "logs": LOGS,
    "batch": BATCHES,
    "hook": HOOKS,
    "module": PARTS,
    "optimizer": OPTIMIZERS,
    "trainer": TRAINERS,
    "callback": CALLBACKS,
    "run": RUNS,
}
ROWS = {f"{group}: {name}": row for group, rows in GROUPS.items() for name, row in rows.items()}


def main(part: str = "") -> None:
    """Print a table of the rows whose names have ``part`` in them.

    Raises:
        SystemExit: always, with status 1 if a row failed, and with a sentence if no name has ``part`` in it.
    """
    if not any(part in name for name in ROWS):
        raise SystemExit(f"no row has {part!r} in its name; the names begin with: {', '.join(GROUPS)}")
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    table = Table("row", "steps", "replays", "eager/replayed", title="Lightning's features with the callback, tape")
    failed = 0
    for name, row in ROWS.items():
        if part not in name or any(find_spec(package) is None for package in row.needs):
            continue
        try:
            with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
                outcome = check(row, Path(folder))
        except Exception as error:  # noqa: BLE001
            failed += 1
            table.add_row(name, "", "", f"[red]{type(error).__name__}[/red]")
        else:
            table.add_row(name, str(outcome.steps), str(outcome.replayed), f"{outcome.ratio:.2f}")
    Console().print(table)
    sys.exit(failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m tests.lightning.matrix", description=__doc__)
    parser.add_argument("part", nargs="?", default="", help="only rows that have this in their names; default: all")
    main(parser.parse_args().part)
