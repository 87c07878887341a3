"""What a recorded step makes in host memory: made again before each replay, and copied to where that reads it."""

from __future__ import annotations

from graphplan.backends.backend import TracedValues
from graphplan.owners.slots import Walk


class HostInputs:
    """The host's part of one program; ``walk`` has the owners' tensors that it begins with."""

    def __init__(self, traced: TracedValues, walk: Walk) -> None:
        assert traced.host_program is not None
        self._program = traced.host_program
        self._transfers = [transfer for transfer in traced.transfers if not transfer.is_constant]
        self._tensors = {number: walk.slots[path].tensors()[0] for number, path in self._program.sources.items()}

    def load(self, *, is_recorded: bool) -> None:
        """Make it again; or copy what the recorded call has made, if that is the one which is to be finished."""
        if not is_recorded:
            self._program.run(self._tensors)
            return
        for transfer in self._transfers:
            transfer.load(transfer.value)
