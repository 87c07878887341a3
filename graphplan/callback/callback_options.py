"""Arguments of the callback that are its own, checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule

from graphplan.errors import OptionError, PolicyError

_SIDES = ("forward_backward", "optimizer")
VariantOf = Callable[[Any, int], Any] | str | None


@dataclass(frozen=True)
class Components:
    """Which sides of a step are captured. ``falls_back``: one alone, where the other cannot be."""

    forward_backward: bool = True
    optimizer: bool = True
    falls_back: bool = True

    @classmethod
    def parse(cls, value: str | Sequence[str]) -> Components:
        """From what the callback was given.

        Raises:
            OptionError: for sides that there are not, or none at all.
        """
        if isinstance(value, str) and value == "auto":
            return cls()
        sides = (value,) if isinstance(value, str) or not isinstance(value, Sequence) else tuple(value)
        if not sides or any(side not in _SIDES for side in sides):
            raise OptionError(
                f"components is {value!r}; expected 'auto', or what is to be captured: ('forward_backward',), "
                "('optimizer',), or both"
            )
        return cls(_SIDES[0] in sides, _SIDES[1] in sides, falls_back=False)

    @property
    def both(self) -> bool:
        """Whether the whole step is captured to begin with."""
        return self.forward_backward and self.optimizer


class Variant:
    """Which program a batch belongs to, for steps whose control flow alternates: the user's own key.

    Args:
        given: ``(batch, batch_idx)`` to a literal (or a tuple of some), or the name of a method of the module that is
            called like that; None if there is one way only.

    Raises:
        OptionError: for anything else.
    """

    def __init__(self, given: VariantOf) -> None:
        if given is not None and not callable(given) and not isinstance(given, str):
            raise OptionError(
                f"variant is {given!r}; expected a function of (batch, batch_idx) or the name of a method of the module"
            )
        self._given = given
        self.is_given = given is not None
        """Whether there may be several ways."""

    def of(self, module: LightningModule, batch: Any, batch_idx: int) -> Any:
        """The key of this batch.

        Raises:
            OptionError: if the module has no such method.
        """
        found = getattr(module, self._given, None) if isinstance(self._given, str) else self._given
        if not callable(found):
            raise OptionError(
                f"variant is {self._given!r}, and {type(module).__name__} has no such method; expected one that takes "
                "(batch, batch_idx)"
            )
        return found(batch, batch_idx)


def check_choices(*, mode: str, flags: Mapping[str, bool], **choices: str) -> None:
    """Refuse values that make no sense; ``choices`` are ``"auto"`` or ``"stock"``.

    Raises:
        OptionError, PolicyError: naming the argument.
    """
    if mode not in ("auto", "train"):
        raise PolicyError(f"mode is {mode!r}; expected 'auto' or 'train'")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise OptionError(f"{name} is {flag!r}; expected True or False")
    for name, value in choices.items():
        if value not in ("auto", "stock"):
            raise OptionError(f"{name} is {value!r}; expected 'auto' or 'stock'")
