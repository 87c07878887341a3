"""Lightning's code is known as Lightning's wherever it is installed, and nobody else's is for its name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import lightning
import lightning_utilities
import pytest
import torchmetrics

from graphplan.environment.origin import is_library

ROOT = Path(__file__).parents[2]
FIT = """
from pathlib import Path
import lightning
from tests.lightning.parts import LitDigits, fit, tape
found = fit(LitDigits, Path({folder!r}) / "run", tape())
print(lightning.__file__, found.callback.stats.replayed)
"""


def test_a_fit_with_packages_in_a_folder_of_their_own(tmp_path: Path) -> None:
    """As ``pip install --target`` or an editable installation leaves them: in no folder called site-packages."""
    for package in (lightning, lightning_utilities, torchmetrics):
        installed = Path(package.__file__).parent
        (tmp_path / installed.name).symlink_to(installed)
    there = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", FIT.format(folder=str(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=there, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == [str(tmp_path / "lightning" / "__init__.py"), "22"]


def test_a_package_of_the_users_with_a_librarys_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ModuleType("pytorch_lightning")
    own.__file__ = str(tmp_path / "pytorch_lightning" / "__init__.py")
    monkeypatch.setitem(sys.modules, own.__name__, own)
    assert not is_library(str(tmp_path / "pytorch_lightning" / "mine.py"))
    own.__dict__["__homepage__"] = lightning.__dict__["__homepage__"]
    assert is_library(str(tmp_path / "pytorch_lightning" / "theirs.py"))
