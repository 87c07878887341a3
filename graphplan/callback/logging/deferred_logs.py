"""``self.log`` inside a step: noted while the step runs, carried out after it.

Lightning's result collection rebinds its metric states on every log, which a replay could not repeat on the host. So
while a managed step runs, the collection only notes what is logged; the logged tensors leave the step as outputs, and
after it (eager, captured or replayed alike) each call is made for real. Where the step itself reads the collection, the
calls noted so far are made at once, so that it reads what it has logged, and a trace is refused.

A call that was made for real once, and comes again with the same options, needs little more than its value: it is
*plain*. The values of plain calls and the loss become elements of one vector at the step's end, which also serves to
sum means over the epoch inside the step (:mod:`graphplan.callback.logging.epoch_sums`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor

from graphplan.callback.logging.deferred_results import DeferredResults
from graphplan.callback.logging.epoch_sums import Sums, Usual
from graphplan.callback.logging.late_copies import LOSS, LateCopies
from graphplan.callback.logging.log_calls import NOWHERE, LogCall, as_in_step
from graphplan.compare.moving import apart
from graphplan.errors import Faults, HostSyncError
from graphplan.feed.call_arguments import hands_over
from graphplan.observe.source import find_source
from graphplan.program.faults import refusal_of
from graphplan.trace.mode import refuse_trace

_DTYPES = (torch.float32, torch.float64)
"""Lightning casts values of others."""


_KINDS = 8
"""Steps that log differently, of which it is remembered what is to be done for each."""
_NONE: frozenset[str] = frozenset()


class _Before:
    """A result collection before a step logs for real. Metrics bind new values, so that references to the old do."""

    def __init__(self, results: _ResultCollection, last_hook: str | None) -> None:
        self._results = results
        self._own = {name: value for name, value in vars(results).items() if name not in ("note", "log_now")}
        self._metrics = {key: (metric, dict(vars(metric))) for key, metric in dict.items(results)}
        self._last_hook = last_hook

    def put_back(self, trainer: Trainer) -> str | None:
        """Restore it. Returns the hook that had logged last."""
        vars(self._results).update(self._own)
        dict.clear(self._results)
        for key, (metric, inner) in self._metrics.items():
            vars(metric).update(inner)
            dict.__setitem__(self._results, key, metric)
        connector: Any = trainer._logger_connector
        connector._current_fx = self._last_hook
        return self._last_hook


class LogNotes:
    """Notes the log calls of one step, and carries out a step's notes."""

    def __init__(self, trainer: Trainer, module: LightningModule, *, sums_in_step: bool) -> None:
        self._trainer = trainer
        self.late = LateCopies(module)
        self.faults = Faults()
        """Of graphplan's own in the middle of the step."""
        self.takes_loss = False
        """Whether the step's result is a dictionary whose loss is a copy of its own."""
        self.sums_in_step = sums_in_step
        self._plain: dict[str, LogCall] = {}
        self._metrics: dict[str, Any] = {}
        self._shows: dict[str, tuple[dict[str, Any], bool]] = {}
        self._known: dict[tuple[str, int | None], LogCall] = {}
        self._usual: list[Usual] = []
        self.sums = Sums()
        self._dtypes: dict[str, torch.dtype] = {}
        self._kind: tuple[torch.dtype, torch.device] | None = None
        self._before: _Before | None = None

    @contextmanager
    def noting(self) -> Iterator[list[tuple[LogCall, Any]]]:
        """Collect ``(call, value)`` pairs instead of logging."""
        # A step that runs a second time in one call was undone the first time.
        self.take_back()
        results: Any = self._trainer._results
        notes: list[tuple[LogCall, Any]] = []
        if results is None:
            yield notes
            return

        def note(fx: str, name: str, value: Any, **options: Any) -> None:
            source = NOWHERE
            with self._noting():
                value = self._in_known_dtype(f"{fx}.{name}", value)
                source = find_source()
            notes.append((LogCall(fx, name, tuple(options.items()), source), value))

        def log_now() -> None:
            refuse_trace(
                HostSyncError,
                f"the step reads logged metrics at {find_source()}; a replay would not read them again. Move that code "
                "to on_train_batch_end",
            )
            results.__class__ = _ResultCollection
            if self._before is None:
                self._before = _Before(results, self._last_hook)
            try:
                self._carry_out(notes)
            finally:
                results.__class__ = DeferredResults
            notes.clear()

        results.note, results.log_now = note, log_now
        results.__class__ = DeferredResults
        try:
            with self.late.of_logs(self._plain.__contains__):
                yield notes
        finally:
            results.__class__ = _ResultCollection
            del results.note, results.log_now

    def _in_known_dtype(self, key: str, value: Any) -> Any:
        """A learning rate is a number in eager steps, the first among them, and in a trace a float64 tensor."""
        if isinstance(value, Tensor):
            dtype = self._dtypes.setdefault(key, value.dtype)
            value = value.to(dtype) if value.dtype is torch.float64 else value
        return value

    def start(self) -> None:
        """Before a step: keep Lightning's note of the hook that logged last, which decides whether an epoch's first log
        resets; make the resets that plain calls would make, and have their metrics hold the sums.
        """
        connector: Any = self._trainer._logger_connector
        self._last_hook: str | None = connector._current_fx
        self._before = None
        self._reset = _NONE
        if self._plain and connector._first_loop_iter is not False:
            results: Any = self._trainer._results
            for fx in dict.fromkeys(call.fx for call in self._plain.values()):
                if connector.should_reset_tensors(fx):
                    results.reset(metrics=False, fx=fx)
                    self._reset |= {fx}
        self.sums.bind()

    def take_back(self) -> None:
        """Undo what was logged for real in the middle of a step that is undone itself."""
        if self._before is not None:
            self._last_hook = self._before.put_back(self._trainer)
            self._before = None

    def settle(self, notes: list[tuple[LogCall, Any]], result: Any) -> Any:
        """At the end of a step: copy what its plain calls log, and the loss, to one vector, and sum its means. Where
        that fails, they stay calls to be made for real.

        Returns:
            ``result``, in which the loss is that copy.
        """
        settled = list(notes)
        with self._noting():
            result = self._settled(settled, result)
            notes[:] = settled
        return result

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Keep graphplan's own errors until the step is over. Refusals and want of memory end the step at once."""
        try:
            yield
        except Exception as error:
            if refusal_of(error) is None:
                raise
            self.faults.note(error)

    def _settled(self, notes: list[tuple[LogCall, Any]], result: Any) -> Any:
        self.late.settle()
        plain = [number for number, (call, value) in enumerate(notes) if self._is_plain(call, value)]
        means = [number for number in plain if self._metrics[notes[number][0].key].meta.on_epoch]
        group = self.sums.group_of(tuple(notes[number][0].key for number in means)) if self.sums_in_step else None
        if group is None:
            plain, means = [number for number in plain if number not in means], []
        order = [*means, *(number for number in plain if number not in means)]
        order = [number for number in order if _kind(notes[number][1]) == _kind(notes[order[0]][1])]
        values = [notes[number][1] for number in order]
        loss = result.get("loss") if self.takes_loss else None
        if isinstance(loss, Tensor) and values and not loss.ndim and _kind(loss) == _kind(values[0]):
            values.append(loss.detach())
        with torch.no_grad():
            vector = torch.stack(values) if values else None
        copies = () if vector is None else apart(vector)
        sizes = {number: self._size(notes[number][0]) for number in means}
        if group is not None and vector is not None:
            group.add(vector[: len(means)], list(sizes.values()))
        for number, (call, value) in enumerate(notes):
            if number in order:
                plain_call = replace(call, is_plain=True, size=sizes.get(number))
                known = self._known.setdefault((call.key, plain_call.size), plain_call)
                notes[number] = (known if known == plain_call else plain_call, copies[order.index(number)])
            elif self.late.may_wait(call.key):
                notes[number] = (call, value.clone())
        if len(values) > len(order):
            return {**result, "loss": copies[-1]}
        if isinstance(loss, Tensor) and self.late.may_wait(LOSS) and (notes or len(result) > 1):
            # Something else that the step returns may be the same memory.
            return {**result, "loss": loss.clone()}
        return result

    def _size(self, call: LogCall) -> int:
        metric, given = self._metrics[call.key], dict(call.options).get("batch_size")
        return int(_ResultCollection._extract_batch_size(self._trainer._results, metric, given, metric.meta))  # type: ignore[arg-type]

    def _is_plain(self, call: LogCall, value: Any) -> bool:
        known = self._plain.get(call.key)
        size = dict(call.options).get("batch_size")
        if known is None or not (size is None or isinstance(size, int)):
            return False  # A size that is no integer is Lightning's to add.
        if known.options != call.options or not isinstance(value, Tensor):
            return False
        held = self._metrics[call.key].value
        return value.ndim == 0 and (value.dtype, value.device) == (held.dtype, held.device)

    def finish(self, calls: list[LogCall], values: list[Any]) -> None:
        """After a step: log what it noted. What may be plain from now on is asked here, where no trace is looking."""
        for usual in self._usual:
            # Plain calls that are alike are the same objects: this compares addresses.
            if usual.calls == calls:
                self.sums.count(usual, values)
                for inner, on_step, number in usual.shown:
                    _show(inner, on_step, values[number])
                self._trainer._logger_connector._current_fx = self._last_hook = calls[-1].fx
                return
        usual = self._usual_of(calls)
        self.sums.count(usual, values)
        self._carry_out(list(zip(calls, values, strict=True)))
        if all(call.is_plain for call in calls):
            self._usual = [usual, *self._usual][:_KINDS]
        elif self.sums_in_step:
            self._learn(list(zip(calls, values, strict=True)))

    def _usual_of(self, calls: list[LogCall]) -> Usual:
        means = [number for number, call in enumerate(calls) if call.size is not None]
        shown = [(*self._shows[call.key], n) for n, call in enumerate(calls) if call.is_plain and call.size is None]
        group = self.sums.group_of(tuple(calls[number].key for number in means))
        return Usual(calls, group, means, [calls[number].size for number in means], shown)

    def _carry_out(self, notes: list[tuple[LogCall, Any]]) -> None:
        """Log for real, with the resets that ``LightningModule.log`` would have made."""
        connector: Any = self._trainer._logger_connector
        results: Any = None
        connector._current_fx = self._last_hook
        for call, value in notes:
            if call.is_plain and call.size is None:
                _show(*self._shows[call.key], value)
            elif not call.is_plain:
                results = results if results is not None else self._trainer._results
                if call.fx not in self._reset and connector.should_reset_tensors(call.fx):
                    results.reset(metrics=False, fx=call.fx)
                with as_in_step(call):
                    _log(results, call, value)
            connector._current_fx = self._last_hook = call.fx

    def _learn(self, notes: list[tuple[LogCall, Any]]) -> None:
        """Which of a step's calls may be plain from now on."""
        calls, results = [call for call, _ in notes], self._trainer._results
        assert results is not None
        hooks = [fx for fx, _ in groupby(calls, lambda call: call.fx)]
        if len(hooks) > len(set(hooks)):
            return  # In an epoch's first batch, Lightning resets a hook's metrics each time that it is the hook's turn.
        rates = [group["lr"] for optimizer in self._trainer.optimizers for group in optimizer.param_groups]
        for call, value in notes:
            metric = results.get(call.key)
            # Nobody but the optimizer computes with a learning rate, not even to sum what is logged of it.
            is_rate = isinstance(value, Tensor) and any(_is_rate(value, rate) for rate in rates)
            if metric is not None and call.key not in self._plain and not is_rate and self._may_be_plain(metric, value):
                self._plain[call.key], self._metrics[call.key] = call, metric
                self._shows[call.key] = (vars(metric), metric.meta.on_step)
        means = [call.key for call in calls if call.key in self._plain and self._metrics[call.key].meta.on_epoch]
        self.sums.form(dict.fromkeys(means), self._metrics)

    def _may_be_plain(self, metric: Any, value: Any) -> bool:
        """Whether it holds one number that Lightning takes as it is, and if one of the epoch, a mean of one kind with
        the others.
        """
        meta = metric.meta
        if not metric.is_tensor or meta.enable_graph or meta.sync.should or metric.value.ndim:
            return False
        if _kind(value) != _kind(metric.value):
            return False  # Lightning casts it; in a group of means it would keep all of them from being summed.
        if not meta.on_epoch:
            return True
        kind = (metric.value.dtype, metric.value.device)
        self._kind = self._kind or kind
        return meta.is_mean_reduction and kind == self._kind and kind[0] in _DTYPES


@hands_over
def _log(results: Any, call: LogCall, value: Any) -> None:
    results.log(call.fx, call.name, value, **dict(call.options))


def _is_rate(value: Tensor, rate: Any) -> bool:
    """Whether one number was logged, and it is this learning rate in the dtype that it was logged in."""
    return value.numel() == 1 and bool(value == torch.as_tensor(rate, dtype=value.dtype, device=value.device))


def _show(inner: dict[str, Any], on_step: bool, value: Tensor) -> None:
    """What ``update`` of the metric with these attributes does, which is none of an epoch."""
    if on_step:
        inner["_forward_cache"] = inner["value"] = value
    inner["has_reset"], inner["_computed"] = False, None
    inner["_update_count"] += 1


def _kind(value: Tensor) -> tuple[torch.dtype, torch.device]:
    return value.dtype, value.device


def with_logs(notes: LogNotes, body: Callable[[], Any]) -> dict[str, Any]:
    """``body``'s result and what it logged, as one pytree."""
    with notes.noting() as noted:
        result = body()
    result = notes.settle(noted, result)
    return {"result": result, "logs": [call for call, _ in noted], "values": [value for _, value in noted]}
