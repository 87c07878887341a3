"""The entries of the zoo, and the decorator that declares them."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Update = Callable[[nn.Module, list[Any], Any, Callable[[Tensor], Any]], Tensor]
"""A step with several optimizers, as in manual optimization: ``(model, optimizers, batch, backward) -> loss``."""

Parts = Callable[[Any], Sequence[nn.Module]]
"""A function that returns the modules that a model's optimizers train, one each."""


@dataclass(frozen=True)
class Case:
    """The model, batches and step of one entry.

    Args:
        model: An ``nn.Module``, which the zoo wraps, or a library's own ``LightningModule``, which it trains as it is.
        batches: Batches on the CPU; a run cycles through them.
        loss: ``(model, batch) -> loss``, for an ``nn.Module``.
        update: Instead of ``loss``, the step of manual optimization.
        parts: The modules that ``update``'s optimizers train, one each.
        predict: ``(model, batch) -> tensor``, measured as inference if it is given.
        options: Further arguments of the Trainer.
    """

    model: nn.Module
    batches: Sequence[Any]
    loss: Callable[[Any, Any], Tensor] | None = None
    update: Update | None = None
    parts: Parts = lambda model: [model]
    predict: Callable[[Any, Any], Tensor] | None = None
    clip: float | None = 1.0
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Scale:
    """The scale of sizes: for a GPU, where a step of realistic depth is launch-bound, or for a CPU."""

    gpu: bool

    def pick(self, cpu: Any, gpu: Any) -> Any:
        """Return ``gpu`` for a GPU, else ``cpu``."""
        return gpu if self.gpu else cpu


@dataclass(frozen=True)
class Entry:
    """A named case and its requirements.

    Args:
        name: ``field/model``.
        make: Builds the case anew.
        needs: Names of distributions, each with its module if the names differ: ``"opencv-python:cv2"``.
        core: Whether it is in ``--set core``.
        refused: Why it is right not to replay the step, or an empty string if it should be replayed.
    """

    name: str
    make: Callable[[Scale], Case]
    needs: tuple[str, ...] = ()
    core: bool = False
    refused: str = ""

    @property
    def missing(self) -> list[str]:
        """The names of distributions that are not installed."""
        pairs = [need.partition(":") for need in self.needs]
        return [pip for pip, _, module in pairs if importlib.util.find_spec(module or pip.replace("-", "_")) is None]


ENTRIES: dict[str, Entry] = {}


def entry(
    name: str, *needs: str, core: bool = False, refused: str = ""
) -> Callable[[Callable[[Scale], Case]], Callable[[Scale], Case]]:
    """Declare the decorated function as the entry ``name``.

    Raises:
        ValueError: if there is already an entry of that name.
    """

    def declare(make: Callable[[Scale], Case]) -> Callable[[Scale], Case]:
        if name in ENTRIES:
            raise ValueError(f"two entries are called {name!r}; expected names of their own")
        ENTRIES[name] = Entry(name, make, needs, core, refused)
        return make

    return declare


def load_entries() -> dict[str, Entry]:
    """Import every module of entries and return the entries. Their libraries are imported when a case is made."""
    package = importlib.import_module("recipes.zoo.entries")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return ENTRIES
