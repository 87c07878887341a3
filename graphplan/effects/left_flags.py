"""What a step leaves otherwise than it finds it, of all that a program is keyed by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from graphplan.effects.allowed import describe, is_allowed
from graphplan.errors import HostEffectError
from graphplan.owners.flags import is_assignable
from graphplan.trace.changes import ABSENT, same_value
from graphplan.trace.records import Trace


@dataclass(frozen=True, slots=True)
class LeftFlag:
    """A mode, flag, value in a parameter group or switch of torch's that the step leaves otherwise than it finds it.

    The calls that a program serves begin with the same ones, so that they end with the same ones: replays set them.
    """

    path: str
    value: Any

    @classmethod
    def find(cls, first: Trace, second: Trace, allow: Iterable[str]) -> tuple[LeftFlag, ...]:
        """Those that both traces leave alike.

        Raises:
            HostEffectError: for one that two steps leave otherwise, or that cannot be set after a replay.
        """
        left = []
        for path in {**first.changes.flags, **second.changes.flags}:
            if is_allowed(path, allow):
                continue
            one, two = first.changes.flags.get(path), second.changes.flags.get(path)
            if one is None or two is None or not same_value(one[1], two[1]):
                raise HostEffectError(
                    f"the step leaves {path} otherwise on one call ({describe(one)}) than on the next "
                    f"({describe(two)}), and a replay leaves one value. Set it outside the step, put it back within "
                    f"the step, or, if replays may leave it alone, pass allow=({path!r},)",
                    path=path,
                )
            if two[1] is ABSENT or not is_assignable(path, two[1]):
                raise HostEffectError(
                    f"the step leaves {path} changed ({describe(two)}), which cannot be set after a replay. Put it "
                    "back within the step, as a with statement does, or, if replays may leave it alone, pass "
                    f"allow=({path!r},)",
                    path=path,
                )
            left.append(cls(path, two[1]))
        return tuple(left)
