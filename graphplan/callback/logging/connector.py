"""Lightning's logger connector, without host synchronization after every batch. Values for the progress bar stay
tensors until they are read. The dictionaries of metrics are filled when one of them is read.
"""

from __future__ import annotations

from sys import getrefcount
from typing import Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _METRICS
from torch import Tensor

from graphplan.callback.lightning_code import is_known
from graphplan.callback.logging.late_numbers import PendingRows
from graphplan.callback.patches import Patches, Recover, recovering, settled

_OWN_REFERENCES = 2  # Reference count of a dictionary that only the connector holds, as ``getrefcount`` returns it.


class LazyConnector(_LoggerConnector):
    """The class of a Trainer's logger connector while a seam is installed. ``rows`` are rows that loggers get late."""

    recover: Recover
    rows: PendingRows

    def postpone(self, results: Any) -> None:
        """Fill the dictionaries when one of them is read, or now if other code holds one."""
        inner = vars(self)
        inner["_owed"] = results
        if (
            getrefcount(inner["_progress_bar_metrics"]) > _OWN_REFERENCES
            or getrefcount(inner["_callback_metrics"]) > _OWN_REFERENCES
            or getrefcount(inner["_logged_metrics"]) > _OWN_REFERENCES
        ):
            self.settle()

    _progress_bar_metrics = settled("_progress_bar_metrics")
    _callback_metrics = settled("_callback_metrics")
    _logged_metrics = settled("_logged_metrics")

    @recovering(_LoggerConnector.on_batch_end)
    def settle(self) -> None:
        """Fill the dictionaries, if :meth:`postpone` has postponed that."""
        owed = vars(self).pop("_owed", None)
        if owed is not None:
            found, inner = self._found(owed, on_step=True), vars(self)
            inner["_progress_bar_metrics"].update(found["pbar"])
            inner["_callback_metrics"].update(found["callback"])
            inner["_logged_metrics"].update(found["log"])

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Log metrics as Lightning does, but write a step's row later if possible."""
        if self._take_row(metrics, step):
            self.look()
            self._logged_metrics.update(metrics)
        else:
            _LoggerConnector.log_metrics(self, metrics, step)

    @recovering(lambda self, metrics, step: False)
    def _take_row(self, metrics: Any, step: int | None) -> bool:
        """Return True if the row is written later; otherwise write the pending rows first."""
        if self._first_loop_iter is not None and step is None and self.rows.take(metrics):
            return True
        self.rows.settle()
        return False

    @recovering(lambda self: None)
    def look(self) -> None:
        """Write the rows whose numbers have arrived."""
        self.rows.look()

    def epoch_end_reached(self) -> None:
        """Fill in the values of the last batch before those of the epoch."""
        self.settle()
        self.rows.settle()
        super().epoch_end_reached()

    def reset_results(self) -> None:
        """Fill in the values of the last batch before they are reset."""
        self.settle()
        super().reset_results()

    @property
    def metrics(self) -> _METRICS:
        """Lightning's metrics. Values for the progress bar stay tensors unless other code holds their dictionary."""
        return self._found(self.trainer._results, on_step=self._first_loop_iter is not None)

    def _found(self, results: Any, *, on_step: bool) -> _METRICS:
        """Return the same as Lightning's ``metrics``, with tensors for the progress bar."""
        found: Any = _METRICS(callback={}, log={}, pbar={})
        for _, metric in results.valid_items():
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
        if getrefcount(vars(self)["_progress_bar_metrics"]) > _OWN_REFERENCES:
            # Code that holds the dictionary reads it without the property, which would convert the tensors.
            found["pbar"] = convert_tensors_to_scalars(found["pbar"])
        return found

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The metrics of the progress bar as numbers, read from the device now."""
        values: dict[str, Any] = super().progress_bar_metrics
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = value.item()
        return values

    def end(self) -> None:
        """Write the pending rows, fill the dictionaries, and convert the progress bar's tensors to numbers."""
        self.rows.end()
        self.settle()
        self._progress_bar_metrics = convert_tensors_to_scalars(self._progress_bar_metrics)


def defer_numbers(trainer: Trainer, recover: Recover, patches: Patches) -> None:
    """Make a Trainer's connector lazy, if its class is Lightning's own and Lightning's logging code is known."""
    connector: Any = trainer._logger_connector
    kind: type = type(connector)
    if kind is _LoggerConnector and is_known("logs"):
        patches.kind(connector, LazyConnector, recover=recover, rows=PendingRows(trainer, patches))
        patches.callback(connector.end)
