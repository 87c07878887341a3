"""What Lightning's result collection is while a managed step runs: it notes what is logged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection


class DeferredResults(_ResultCollection):
    """The class of a result collection while a managed step runs."""

    note: Callable[..., None]
    log_now: Callable[[], None]

    def log(self, fx: str, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Note it."""
        self.note(fx, name, value, *args, **options)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Nothing: resets come with the calls that are made later."""


def _reading(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def method(self: DeferredResults, *args: Any) -> Any:
        self.log_now()
        return plain(self, *args)

    method.__name__ = name
    return method


for _name in ("__contains__", "__getitem__", "__iter__", "__len__", "get", "items", "keys", "values"):
    setattr(DeferredResults, _name, _reading(_name))
