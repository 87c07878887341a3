"""What is logged for the progress bar, read from the device when somebody asks for it and not after every batch.

Lightning turns each value logged with ``prog_bar=True`` into a number at the end of every batch, bar or no bar, and
again whenever anybody asks for any of the run's metrics: the host waits for the device in every step. Here such values
stay tensors until ``progress_bar_metrics`` is read, which gives the same numbers.

A bar that asks for them after every batch shall not make the host wait either. It is shown the numbers that arrived
last, which lag behind by what the device has yet to do. A bar that graphplan has draw itself now and then does so when
its numbers have arrived. At an epoch's end, and where a bar asks now and then by itself, they are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from sys import getrefcount
from types import SimpleNamespace
from typing import Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _METRICS
from torch import Tensor

from graphplan.callback.instance_patch import InstancePatch, PatchedMethods, Recover
from graphplan.callback.logging.async_copies import LaggingNumbers
from graphplan.callback.logging.epoch_sums import Group
from graphplan.callback.logging.logger_rows import LateRows


def _settled(name: str) -> Any:
    """A property for one of the connector's dictionaries: up to date when somebody asks for it."""

    def read(self: LazyConnector) -> dict[str, Any]:
        self.settle()
        found: dict[str, Any] = vars(self)[name]
        return found

    def write(self: LazyConnector, value: dict[str, Any]) -> None:
        self.settle()
        vars(self)[name] = value

    return property(read, write)


_OWN_REFERENCES = 2
"""What refers to a dictionary that only the connector has, while they are counted."""


class LazyConnector(_LoggerConnector):
    """The class of a Trainer's logger connector while a fit goes through graphplan."""

    _owed: Any = None
    recover: Recover

    def postpone(self, results: Any, whole: tuple[Group, Sequence[Tensor]] | None) -> None:
        """A batch has ended: what it logged goes into the dictionaries when somebody asks for one of them, or at once
        where somebody has kept one. ``whole`` is the group that all metrics belong to, and what they show, if they do.
        """
        inner = vars(self)
        # The next batch may log other values, and then never end.
        inner["_owed"] = results, whole or [(metric, metric._forward_cache) for _, metric in results.valid_items()]
        if (
            getrefcount(inner["_progress_bar_metrics"]) > _OWN_REFERENCES
            or getrefcount(inner["_callback_metrics"]) > _OWN_REFERENCES
            or getrefcount(inner["_logged_metrics"]) > _OWN_REFERENCES
        ):
            self.settle()

    def settle(self) -> None:
        """Make good for :meth:`postpone`; where that fails, by Lightning's own code."""
        if self._owed is not None:
            try:
                self._settle()
            except Exception as error:  # noqa: BLE001 - those that are not graphplan's are raised
                vars(self).pop("_owed", None)
                self.recover(error)
                _LoggerConnector.on_batch_end(self)

    def _settle(self) -> None:
        if self._owed is not None:
            inner = vars(self)
            results, logged = inner["_owed"]
            if isinstance(logged, tuple):
                group, values = logged
                logged = group.shown(results, values)
            metrics = (SimpleNamespace(meta=metric.meta, _forward_cache=cache) for metric, cache in logged)
            found = self._found(results, metrics, on_step=True)
            del inner["_owed"]
            inner["_progress_bar_metrics"].update(found["pbar"])
            inner["_callback_metrics"].update(found["callback"])
            inner["_logged_metrics"].update(found["log"])

    _progress_bar_metrics = _settled("_progress_bar_metrics")
    _callback_metrics = _settled("_callback_metrics")
    _logged_metrics = _settled("_logged_metrics")

    rows: LateRows | None = None
    """What writes the rows of steps, where they may come late."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """As Lightning's, but that a step's row is written when its numbers are there."""
        if self.rows is not None:
            try:
                is_taken = self._first_loop_iter is not None and step is None and self.rows.take(metrics)
                if not is_taken:
                    self.rows.settle()
            except Exception as error:  # noqa: BLE001 - those that are not graphplan's are raised
                is_taken = False
                self.recover(error)
            if is_taken:
                self.look()
                self._logged_metrics.update(metrics)
                return
        _LoggerConnector.log_metrics(self, metrics, step)

    def look(self) -> None:
        """Write the rows that have arrived."""
        if self.rows is not None:
            try:
                self.rows.look()
            except Exception as error:  # noqa: BLE001 - those that are not graphplan's are raised
                self.recover(error)

    def epoch_end_reached(self) -> None:
        """Values of the last batch, before those of the epoch come."""
        self.settle()
        if self.rows is not None:
            self.rows.settle()
        super().epoch_end_reached()

    def reset_results(self) -> None:
        """Values of the last batch, before they are gone."""
        self.settle()
        super().reset_results()

    @property
    def metrics(self) -> _METRICS:
        """As Lightning's, but that values for the bar are tensors while nobody has them."""
        results: Any = self.trainer._results
        metrics = (metric for _, metric in results.valid_items())
        return self._found(results, metrics, on_step=self._first_loop_iter is not None)

    def _found(self, results: Any, metrics: Iterable[Any], *, on_step: bool) -> _METRICS:
        found = _metrics_of(results, metrics, on_step=on_step)
        if getrefcount(vars(self)["_progress_bar_metrics"]) > _OWN_REFERENCES:
            # Whoever has kept it does not ask again.
            found["pbar"] = convert_tensors_to_scalars(found["pbar"])
        return found

    lagging: LaggingNumbers | None = None
    """What reads the numbers for a bar that is asking."""

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Numbers, read from the device now, or for a bar those that arrived last."""
        values: dict[str, Any] = super().progress_bar_metrics
        if self.lagging is not None:
            tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
            try:
                return {**values, **self.lagging.read(tensors)}
            except Exception as error:  # noqa: BLE001 - those that are not graphplan's are raised
                self.recover(error)
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = value.item()
        return values


def _metrics_of(results: Any, metrics: Iterable[Any], *, on_step: bool) -> _METRICS:
    found: Any = _METRICS(callback={}, log={}, pbar={})
    for metric in metrics:
        value = results._get_cache(metric, on_step)
        if not isinstance(value, Tensor):
            continue
        name, forked_name = results._forked_name(metric, on_step)
        if metric.meta.logger:
            found["log"][forked_name] = value
        if results.training or (metric.meta.on_epoch and not on_step):
            found["callback"][name] = found["callback"][forked_name] = value
        if metric.meta.prog_bar:
            found["pbar"][forked_name] = value if value.numel() == 1 else convert_tensors_to_scalars(value)
    return found


class LazyNumbers(PatchedMethods):
    """Makes a Trainer's connector a lazy one, unless it has a class of the user's own, and tells it when a bar asks."""

    def __init__(self, trainer: Trainer, recover: Recover) -> None:
        self._trainer, self._recover = trainer, recover
        self._connector: Any = trainer._logger_connector
        self._numbers = LaggingNumbers()
        self._asked = -1
        self._is_picture = False
        bars = [callback for callback in getattr(trainer, "callbacks", []) if isinstance(callback, ProgressBar)]
        bars = [bar for bar in bars if "get_metrics" not in vars(bar)]
        super().__init__(*(InstancePatch(bar, "get_metrics", partial(self._ask, bar)) for bar in bars))

    def install(self) -> None:
        """Put it in."""
        if type(self._connector) is _LoggerConnector:
            self._connector.__class__ = LazyConnector
            vars(self._connector)["recover"] = self._recover
            super().install()

    def remove(self) -> None:
        """Read what nobody has asked for yet, and take it off."""
        super().remove()
        if isinstance(self._connector, LazyConnector):
            self._connector.settle()
            self._connector._progress_bar_metrics = convert_tensors_to_scalars(self._connector._progress_bar_metrics)
            del vars(self._connector)["recover"]
            self._connector.__class__ = _LoggerConnector  # type: ignore[assignment]

    def are_here(self) -> bool:
        """Whether a bar that draws itself now can show numbers without waiting for them."""
        values: dict[str, Any] = {}
        if isinstance(self._connector, LazyConnector):
            values |= self._connector.metrics["pbar"]
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        try:
            self._is_picture = bool(tensors) and self._numbers.are_here(tensors)
        except Exception as error:  # noqa: BLE001 - those that are not graphplan's are raised
            self._recover(error)
            return True
        return self._is_picture or not tensors

    def _ask(self, bar: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of a bar's ``get_metrics``."""
        is_picture, self._is_picture = self._is_picture, False
        batch = self._trainer.fit_loop.epoch_loop.total_batch_idx
        asks_always = batch - self._asked <= 1 and self._connector._first_loop_iter is not None
        self._asked = batch
        if not asks_always and not is_picture:
            return type(bar).get_metrics(bar, *args, **kwargs)
        self._connector.lagging = self._numbers
        try:
            return type(bar).get_metrics(bar, *args, **kwargs)
        finally:
            vars(self._connector).pop("lagging", None)
