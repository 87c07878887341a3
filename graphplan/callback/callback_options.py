"""Arguments of the callback that are its own, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphplan.errors import OptionError, PolicyError

_SIDES = ("forward_backward", "optimizer")


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


def check_choices(*, mode: str, eval: bool, **choices: str) -> None:
    """Refuse values that make no sense; ``choices`` are ``"auto"`` or ``"stock"``.

    Raises:
        OptionError, PolicyError: naming the argument.
    """
    if mode not in ("auto", "train"):
        raise PolicyError(f"mode is {mode!r}; expected 'auto' or 'train'")
    if not isinstance(eval, bool):
        raise OptionError(f"eval is {eval!r}; expected True or False")
    for name, value in choices.items():
        if value not in ("auto", "stock"):
            raise OptionError(f"{name} is {value!r}; expected 'auto' or 'stock'")
