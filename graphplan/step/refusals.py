"""Whether a refusal raises, or the step goes on eagerly with one warning."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable

from graphplan.errors import DeviceError, FeedError, RefusalError
from graphplan.feed.call_arguments import hands_over
from graphplan.report.stats import Stats
from graphplan.step.peers import Peers


class Refusals:
    """What one step does about its refusals. ``escalates`` says which of them raise; the others warn."""

    def __init__(self, on_failure: str, stats: Stats, peers: Peers | None) -> None:
        self._peers = peers
        self._raises = on_failure == "raise"
        self._stats = stats
        self._warned: set[str] = set()
        self.escalates: Callable[[RefusalError], bool] = self._before_first_replay

    def _before_first_replay(self, error: RefusalError) -> bool:
        """A refusal is the caller's affair before the first good replay, if asked for."""
        return self._raises and self._stats.replayed == 0

    def refuse(self, error: RefusalError, consequence: str = "graphplan runs this step eagerly") -> None:
        """Raise if the refusal escalates, else warn once, of the ``consequence`` too. A refusal of the step's is told
        to the other ranks.
        """
        if self._peers is not None and not isinstance(error, FeedError):
            self._peers.refuse(error)
        is_always_raised = isinstance(error, DeviceError)
        if is_always_raised or self.escalates(error):
            error.is_raised = True
            if not is_always_raised:
                _tell_way_out(error)
            raise error
        _forget_frames(error)
        self.warn(f"{consequence}: {error}")

    @hands_over
    def warn(self, text: str) -> None:
        """Say something once. Where warnings are errors, it is the caller's wish to have it."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, UserWarning, stacklevel=6)


def _tell_way_out(error: RefusalError) -> None:
    """End what ``error`` says with the way out that refusals of a step have, unless it says so already."""
    text = str(error)
    if "on_failure=" not in text:
        error.args = (f"{text.rstrip('.')}. Or pass on_failure='eager' to go on without replays", *error.args[1:])


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames that an error came through hold: a refusal is kept for long, a batch must not be."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__
