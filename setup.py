"""Puts the compiled guards into a wheel that is built where torch and a C++ compiler are, for that torch and Python.

``pip wheel --no-build-isolation .`` does it. An isolated build has no torch: its wheel is for any platform, and the
guards are built after the first capture.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


def _building() -> Any:
    """What builds the guards, or None where they cannot be built."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        building: Any = importlib.import_module("graphplan.compare.building")
    except ImportError:
        return None
    finally:
        del sys.path[0]
    return building if building.can_build() else None


class _BuildGuards(build_py):
    def run(self) -> None:
        super().run()
        building = None if self.editable_mode else _building()
        if building is not None:
            try:
                building.build_into(Path(self.build_lib, "graphplan", "compare"))
            except building.BackendError as error:
                sys.stderr.write(f"the wheel goes without compiled guards: {error}\n")


class _PlatformWheel(bdist_wheel):
    def finalize_options(self) -> None:
        if _building() is not None:
            self.distribution.has_ext_modules = lambda: True
        super().finalize_options()


setup(cmdclass={"build_py": _BuildGuards, "bdist_wheel": _PlatformWheel})
