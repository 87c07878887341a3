"""Values of device tensors on their way to the host, for which nobody waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from graphplan.environment.devices import current_stream, is_accelerator, module_of

_MOST = 2
"""Copies under way at a time: what is shown is no older than what the device has yet to do."""


class HostCopy:
    """A copy of ``tensor`` in host memory, as it is when the device comes to it."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        if not is_accelerator(tensor.device):
            self._host = tensor.detach().to("cpu", copy=True)
            return
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._host.copy_(tensor.detach(), non_blocking=True)
        self._event = module_of(tensor.device).Event()
        self._event.record(current_stream(tensor.device))

    def has_arrived(self) -> bool:
        """Whether nobody would have to wait for it."""
        return self._event is None or self._event.query()

    def wait(self) -> Tensor:
        """The copy, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class Sent(Protocol):
    """Numbers on their way."""

    def has_arrived(self) -> bool:
        """Whether nobody would have to wait for them."""

    def numbers(self) -> dict[str, float]:
        """The numbers by name, once they are there."""


class SentNumbers:
    """One number of each tensor, on its way: one copy for all of a dtype and device."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, value in values.items():
            groups.setdefault((value.dtype, value.device), []).append(name)
        packs = [
            (names, torch.stack([values[name].detach().reshape(()) for name in names])) for names in groups.values()
        ]
        self._copies = [(names, HostCopy(pack)) for names, pack in packs]

    def has_arrived(self) -> bool:
        """Whether nobody would have to wait for them."""
        return all(copy.has_arrived() for _, copy in self._copies)

    def numbers(self) -> dict[str, float]:
        """The numbers by name, once they are there."""
        return {
            name: number
            for names, copy in self._copies
            for name, number in zip(names, copy.wait().tolist(), strict=True)
        }


class LaggingNumbers:
    """Numbers of tensors that somebody looks at again and again: those that arrived last, instead of waiting.

    ``send`` starts to copy.
    """

    def __init__(self, send: Callable[[Mapping[str, Tensor]], Sent] = SentNumbers) -> None:
        self._send = send
        self._sent: deque[Sent] = deque()
        self._arrived: dict[str, float] = {}
        self._awaited: Sent | None = None
        self._is_fresh = False

    def are_here(self, values: Mapping[str, Tensor]) -> bool:
        """Whether numbers have arrived that are no older than the first call which was answered with no. That call
        sends those of its ``values``.
        """
        if self._awaited is None:
            self._awaited = self._send(values)
            self._sent.append(self._awaited)
        self._take()
        if any(sent is self._awaited for sent in self._sent):
            return False
        self._awaited, self._is_fresh = None, True
        return True

    def read(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """The latest numbers of ``values`` that are there. Waits for those that never were."""
        self._take()
        is_new = not values.keys() <= self._arrived.keys()
        is_fresh, self._is_fresh = self._is_fresh, False
        if is_new or (len(self._sent) < _MOST and not is_fresh):
            self._sent.append(self._send(values))
            self._take(wait=is_new)
        return {name: self._arrived[name] for name in values}

    def _take(self, *, wait: bool = False) -> None:
        """Take in what has arrived, in the order in which it was sent."""
        while self._sent and (wait or self._sent[0].has_arrived()):
            self._arrived.update(self._sent.popleft().numbers())
