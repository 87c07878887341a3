"""Who wants to know of replays."""

from __future__ import annotations

from typing import Protocol

from graphplan.backends.backend import Recording
from graphplan.feed.call_arguments import hands_over


class Watcher(Protocol):
    """Is told of every replay in its thread, around it."""

    def replay(self, recording: Recording) -> None:
        """Run the recording's replay."""


WATCHERS: list[Watcher] = []
"""The innermost last."""


@hands_over
def replay(recording: Recording) -> None:
    """Replay, by way of the innermost watcher if there is one."""
    if WATCHERS:
        WATCHERS[-1].replay(recording)
    else:
        recording.replay()
