"""Steps and the life of their process: forks, exits, process groups."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch.distributed import HashStore

from tests.models import training_rig
from tests.twins import Record, assert_same_runs, build, drive, managed, state_of

ROOT = Path(__file__).parents[2]
MAKE = """
import multiprocessing
import sys
from dataclasses import replace
from functools import partial
import torch
from tests.health import FailAt
from tests.twins import Record, assert_same_runs, build, drive, managed, state_of
from tests.models import training_rig
torch.set_num_threads(1)
make = partial(training_rig, "mlp", "adamw", sizes=(6,) * 12)
rig = build(make)
step = managed(rig)
"""


def run(code: str, *, returns: int = 0) -> list[str]:
    """Run ``code`` after :data:`MAKE` in a process of its own, which must end by itself and write no errors."""
    command = [sys.executable, "-W", "ignore:.*fork.*:DeprecationWarning", "-c", MAKE + dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    assert (done.stderr, done.returncode) == ("", returns)
    return done.stdout.split()


@pytest.mark.soak
def test_a_forked_child_trains_on() -> None:
    """Before, while and after the step is captured; the child's work is not the parent's, and both are eager's."""
    out = run(
        """
        def train_on(begun):
            at = len(begun.outputs)
            rest = drive(replace(rig, calls=rig.calls[at:]), step)
            assert_same_runs(expected, Record(begun.outputs + rest.outputs, state_of(rig)))
            print(step.stats.replayed, flush=True)

        expected = drive(rig, rig.step)
        for at in (0, 4, 5, 8):
            rig = build(make)
            step = managed(rig)
            begun = drive(rig, step, at)
            child = multiprocessing.get_context("fork").Process(target=train_on, args=(begun,))
            child.start()
            child.join()
            assert child.exitcode == 0
            train_on(begun)
        """
    )
    assert out == ["6"] * 8


GROUP = "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)"
EXITS = {
    "in the end": "drive(rig, step)",
    "by sys.exit": "drive(rig, step); sys.exit(0)",
    "while a trace is under way": "drive(rig, step); step = managed(build(make)); drive(rig, step, 4)",
    "with reference cycles": "drive(rig, step); rig.owners['model'].step = step; rig.step.step = step",
    "with a process group": f"{GROUP}; drive(rig, step)",
    "after a process group": f"{GROUP}; drive(rig, step); "
    "torch.distributed.destroy_process_group(); step(*rig.calls[0]); assert step.stats.replayed == 8",
}


def test_the_interpreter_ends_with_live_programs() -> None:
    """Without a word, and with the right status: forked children that end as a process does, and the process itself."""
    out = run(
        f"""
        import os
        for how in {list(EXITS.values())}:
            if os.fork() == 0:
                exec(how)
                break
            print(os.wait()[1], flush=True)
        else:
            drive(rig, step)
            print(step.stats.replayed)
        """
    )
    assert out == ["0"] * len(EXITS) + ["7"]


@pytest.mark.soak
def test_an_exit_from_within_a_replay() -> None:
    """The process ends with the status that was asked for."""
    code = "drive(rig, step, 8)\nprint(step.stats.replayed)\nwith FailAt(5, SystemExit(3)):\n    step(*rig.calls[8])"
    assert run(code, returns=3) == ["3"]


def test_a_process_group_that_goes_before_the_programs() -> None:
    """Nobody waits for anybody, and the step replays on."""
    make = partial(training_rig, "mlp", "adamw", sizes=(6,) * 12)
    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig)
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        begun = drive(rig, step, 8)
    finally:
        torch.distributed.destroy_process_group()
    rest = drive(replace(rig, calls=rig.calls[8:]), step)
    assert_same_runs(expected, Record(begun.outputs + rest.outputs, state_of(rig)))
    assert step.stats.replayed == 7
