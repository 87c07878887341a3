"""``python -m graphplan``: check a step before a run, and print the facts that a bug report needs."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from graphplan.check.fit import check_fit
from graphplan.check.run import Result, check_step
from graphplan.compare import building
from graphplan.compare.comparing import Tensors
from graphplan.environment.devices import module_of
from graphplan.errors import OptionError

CHECK = """Train a few steps on the CPU, under CUDA's rules, and list what keeps a step from being one replay.

    graphplan check train.py:Module --data train.py:Data
    graphplan check "pkg.models:Net(width=64)" --batch "(torch.randn(8, 64), torch.zeros(8).long())"
    graphplan check train.py:step --batch "torch.randn(8, 64)"

The exit status is 0 if the whole step would be replayed, 1 if not, 2 for a wrong call.
"""
PACKAGES = (
    "graphplan", "torch", "lightning", "pytorch-lightning", "transformers", "hydra-core", "omegaconf", "torchmetrics",
    "numpy", "triton",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments``, by default those of the process. Return the exit status."""
    parser = argparse.ArgumentParser(prog="graphplan", description="Whole training steps as CUDA-graph replays.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "check", help="what keeps a step from being replayed", description=CHECK,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    check.add_argument("target", help="module:expression of a LightningModule or of a step")
    check.add_argument("--data", help="module:expression of a DataModule, a DataLoader or batches")
    check.add_argument("--batch", help="an expression for one batch, or for the arguments of a step, with torch in it")
    check.add_argument("--json", action="store_true", help="print the result, and the plan, as JSON")
    commands.add_parser("env", help="versions, devices and settings, for a report of a fault")
    options = parser.parse_args(arguments)
    try:
        if options.command == "env":
            text, status = "\n".join(f"{name}: {value}" for name, value in environment().items()), 0
        else:
            result = _result(options)
            text = json.dumps(result.data(), indent=2) if options.json else result.text()
            status = 1 if result.blockers or result.plan is None else 0
    except OptionError as error:
        sys.stderr.write(f"graphplan {options.command}: {error}\n")
        return 2
    sys.stdout.write(f"{text}\n")
    return status


def script() -> None:
    """Run the ``graphplan`` command."""
    sys.exit(main())


def _result(options: argparse.Namespace) -> Result:
    name = options.target
    make = load(name, what="the target")
    data = (lambda: None) if options.data is None else load(options.data, what="--data")
    batches = None if options.batch is None else _batches(options.batch)
    first = make()
    if hasattr(first, "training_step"):
        return check_fit(make, data if batches is None else lambda: batches, name=name)
    if not callable(first):
        raise OptionError(f"{name} is a {type(first).__name__}; expected a LightningModule, or a step to call")
    if batches is None:
        raise OptionError(f"{name} is a step and needs its arguments: pass --batch")
    calls = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
    return check_step(first, calls, name=name)


def load(target: str, *, what: str) -> Callable[[], Any]:
    """Return a function that makes the object that ``target`` names, ``pkg.module:expression`` or
    ``path/to/file.py:expression``. A class is called without arguments. ``what`` names the target in the OptionError
    that is raised if it cannot be found.
    """
    place, colon, expression = target.partition(":")
    if not colon or not expression:
        raise OptionError(
            f"{what} is {target!r}; expected a module and an expression in it, such as pkg.module:Module(width=64) or "
            "train.py:Module"
        )
    module = _imported(place, what)

    def make() -> Any:
        try:
            found = eval(expression, vars(module))
        except (NameError, AttributeError, SyntaxError) as error:
            raise OptionError(
                f"{what} is {target!r}, but {expression!r} cannot be evaluated in {place}: {error}"
            ) from error
        return found() if isinstance(found, type) else found

    return make


def _imported(place: str, what: str) -> ModuleType:
    # The module can then import its neighbors, as a script can.
    for folder in map(os.path.abspath, (os.path.dirname(place), os.curdir)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise OptionError(f"{what} is in {place!r}, which cannot be imported: {error}") from error


def _batches(expression: str) -> list[Any]:
    """Return one batch, repeated more often than a check has steps."""
    try:
        batch = eval(expression, {"torch": torch})
    except Exception as error:
        raise OptionError(f"--batch is {expression!r}, which cannot be evaluated: {error!r}") from error
    return [batch] * 64


def environment() -> dict[str, Any]:
    """Return the facts that a bug report needs: versions of Python and of packages, devices and settings."""
    facts: dict[str, Any] = {"python": sys.version.split()[0], "platform": platform.platform()}
    for name in PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            continue
    facts["CUDA of torch"] = torch.version.cuda or "none"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    facts["devices"] = "CPU"
    if accelerator is not None:
        module = module_of(accelerator)
        facts["devices"] = ", ".join(map(module.get_device_name, range(module.device_count())))
    facts["guards"] = building.state() if Tensors is None else "in C++"
    return facts
