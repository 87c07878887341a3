"""Steps whose control flow alternates: a static key for each way that they can go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule

from graphplan.errors import OptionError

VariantOf = Callable[[Any, int], Any] | str | None


class Variant:
    """Which program a batch belongs to, as the user has it.

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
        if self._given is None:
            return None
        if isinstance(self._given, str):
            method = getattr(module, self._given, None)
            if not callable(method):
                raise OptionError(
                    f"variant is {self._given!r}, and {type(module).__name__} has no such method; expected one that "
                    "takes (batch, batch_idx)"
                )
            return method(batch, batch_idx)
        return self._given(batch, batch_idx)
