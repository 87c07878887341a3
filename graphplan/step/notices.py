"""Notices of events that torch tells of, so that a report can name the event and not only its symptom."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Notice:
    """A hook that notes ``text``. A copy of what it is registered on takes along a hook that does nothing."""

    def __init__(self, events: list[str], text: str) -> None:
        self._events = events
        self._text = text

    def __call__(self, *args: Any) -> None:
        """Note that it has happened."""
        if self._text not in self._events:
            self._events.append(self._text)

    def __reduce__(self) -> tuple[Any, ...]:
        return Notice, ([], self._text)

    def __deepcopy__(self, memo: Any) -> Notice:
        return Notice([], self._text)


class Notices:
    """Notices on the owners of one step."""

    def __init__(self) -> None:
        self._events: list[str] = []
        self._handles: dict[int, Any] = {}

    def register(self, name: str, owner: Any) -> None:
        """Note when a state is loaded into ``owner``, if it is a module or an optimizer; once."""
        # A scripted module takes no such hook.
        takes = isinstance(owner, nn.Module | torch.optim.Optimizer) and not isinstance(owner, torch.jit.ScriptModule)
        if takes and id(owner) not in self._handles:
            notice = Notice(self._events, f"{name}.load_state_dict")
            self._handles[id(owner)] = owner.register_load_state_dict_post_hook(notice)

    def take(self) -> str:
        """What has happened since the last time, as the end of a sentence; empty if nothing has."""
        text = f" (after {', '.join(self._events)})" if self._events else ""
        self._events.clear()
        return text

    def remove(self) -> None:
        """Take every hook off again."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
