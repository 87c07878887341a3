"""``self.log`` inside a step: noted while the step runs, carried out after it.

Lightning's result collection rebinds its metric states on every log. So while a managed step runs, the collection only
notes the log calls. The logged tensors leave the step as outputs, and the real calls are made after it. If the step
reads the collection, a trace is refused. Any other step makes the calls noted so far at once, and undoes them at its
end. Repeated calls are grouped (:mod:`graphplan.callback.logging.epoch_sums`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from numbers import Real
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor

from graphplan.callback.lightning_code import is_known
from graphplan.callback.logging.epoch_sums import Group
from graphplan.callback.logging.late_copies import LOSS, LateCopies
from graphplan.callback.patches import Patches, calling_first
from graphplan.compare.moving import apart
from graphplan.errors import Faults, HostEffectError, HostSyncError
from graphplan.feed.call_arguments import hands_over
from graphplan.observe.source import Source, find_source
from graphplan.program.faults import refusal_of
from graphplan.tensors.attributes import PLAIN_KINDS
from graphplan.tensors.deferred import is_deferred
from graphplan.trace.mode import refuse_trace

_DTYPES = (torch.float32, torch.float64)  # Lightning casts values of other dtypes.
_LATEST = "_forward_cache"  # The attribute of a torchmetrics metric that holds the value of its latest step.
_NOWHERE = Source("", 0, "", "step")


@dataclass(frozen=True)
class LogCall:
    """A call of the result collection's ``log``, without its value, at ``source`` under the default dtype ``dtype``.

    ``size`` is the batch size that weights a grouped call in a mean, or None for a call that is made after the step.
    ``latest`` is the value of a torchmetrics metric at the call, if it has another value at the step's end.
    """

    fx: str
    name: str
    options: tuple[tuple[str, Any], ...]
    source: Source = field(compare=False)
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    size: int | None = None
    latest: tuple[Any] | None = field(default=None, compare=False)

    @cached_property
    def key(self) -> str:
        """Lightning's key for the call's metric in training, where batches come from one loader."""
        return f"{self.fx}.{self.name}"

    def __repr__(self) -> str:
        return f"self.log({self.name!r}) in {self.fx}"


Note = tuple[LogCall, Any]  # A log call and its value.


class _NotingResults(_ResultCollection):
    """The class of Lightning's result collection while a managed step runs."""

    note: Callable[..., None]
    log_now: Callable[[], None]

    def log(self, fx: str, name: str, value: Any, *args: Any, **options: Any) -> None:
        self.note(fx, name, value, *args, **options)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Do nothing: the real calls after the step make the resets."""


for _name in ("__contains__", "__getitem__", "__iter__", "__len__", "get", "items", "keys", "values"):
    setattr(_NotingResults, _name, calling_first("log_now", getattr(dict, _name)))


def _undo_of(results: _ResultCollection) -> Callable[[], None]:
    """Return a function that undoes log calls in ``results``. Metrics bind new values, so the old ones are intact."""
    own = {name: value for name, value in vars(results).items() if name not in ("note", "log_now")}
    metrics = {key: (metric, dict(vars(metric))) for key, metric in dict.items(results)}

    def undo() -> None:
        vars(results).update(own)
        dict.clear(results)
        for key, (metric, inner) in metrics.items():
            vars(metric).update(inner)
            dict.__setitem__(results, key, metric)

    return undo


Part = tuple[int, Sequence[int] | None, Sequence[int]]
"""A group's number, the positions of its metrics' calls among all calls (None: all in order), and the batch sizes."""


@dataclass(frozen=True)
class Grouped:
    """The grouped calls of a step by group, and whether all calls are grouped. Each replay returns it as a literal."""

    parts: tuple[Part, ...] = field(default=(), compare=False)
    are_all: bool = field(default=False, compare=False)


class StepLogs:
    """Notes the log calls of a step, and makes them after it. ``totals`` are the sums of each group's means; ``loop``
    is the loop of automatic optimization; ``faults`` keeps internal errors of graphplan until a step is over.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, patches: Patches, *, sums_in_step: bool) -> None:
        self._trainer = trainer
        self._connector: Any = trainer._logger_connector
        self.late = LateCopies(module)
        self.totals: dict[str, Tensor] = {}
        self.faults = Faults()
        self.loop: Any = None
        self._is_known = is_known("logs")
        self._sums_in_step = sums_in_step and self._is_known
        # Groups are patched late, but undone after all other patches that read metrics: hence a nested stack.
        self._patches = patches.enter_context(Patches())
        self._groups: list[Group] = []
        self._grouped: dict[str, tuple[LogCall, Any]] = {}  # Grouped calls, and their metrics, by Lightning's keys.
        self._metrics: dict[str, tuple[Any, torch.device]] = {}
        """By Lightning's keys, the options with which torchmetrics metrics were logged, and their values' devices."""
        self._dtypes: dict[str, torch.dtype] = {}
        self._kind: tuple[torch.dtype, torch.device] | None = None
        self._last_hook: str | None = None
        self._reset: set[str] = set()

    def around(self, body: Callable[[], Any]) -> dict[str, Any]:
        """Run ``body``; return its result and its log calls as one pytree."""
        parts: tuple[Part, ...] = ()
        with self._notes() as notes:
            result = body()
        with self._noting_faults():
            # If that fails, all calls are made after the step, and none is grouped.
            notes, result, parts = self._settled(notes, result)
        calls, values = [call for call, _ in notes], [value for _, value in notes]
        grouped = Grouped(parts, bool(parts) and all(call.size is not None for call in calls))
        return {"result": result, "logs": calls, "grouped": grouped, "values": values}

    @contextmanager
    def _notes(self) -> Iterator[list[Note]]:
        """Collect ``(call, value)`` pairs instead of logging."""
        results: Any = self._trainer._results
        notes: list[Note] = []
        if results is None:
            yield notes
            return
        taking_back, logged = Patches(), 0

        def note(fx: str, name: str, value: Any, **options: Any) -> None:
            source = _NOWHERE
            with self._noting_faults():
                value = self._in_known_dtype(f"{fx}.{name}", value)
                source = find_source()
            has_latest = not is_deferred(value) and _LATEST in getattr(value, "__dict__", ())
            latest = (vars(value)[_LATEST],) if has_latest else None
            notes.append((LogCall(fx, name, tuple(options.items()), source, latest=latest), value))

        def log_now() -> None:
            nonlocal logged
            refuse_trace(
                HostSyncError,
                f"the step reads logged metrics at {find_source()}; a replay would not read them again. Move that code "
                "to on_train_batch_end",
            )
            results.__class__ = _ResultCollection
            if not logged:
                taking_back.callback(_undo_of(results))
            try:
                self._carry_out(notes[logged:])
            finally:
                results.__class__ = _NotingResults
            logged = len(notes)

        with taking_back, Patches() as left:
            taking_back.callback(setattr, self, "_last_hook", self._last_hook)
            left.kind(results, _NotingResults, note=note, log_now=log_now)
            self.late.defer_logged(self._grouped.__contains__, left)
            self.late.defer_loss(self.loop, left)
            yield notes

    def _in_known_dtype(self, key: str, value: Any) -> Any:
        """Cast float64 to the key's first dtype: a learning rate is a number in eager steps, and float64 in a trace."""
        if isinstance(value, Tensor):
            dtype = self._dtypes.setdefault(key, value.dtype)
            value = value.to(dtype) if value.dtype is torch.float64 else value
        return value

    @contextmanager
    def _noting_faults(self) -> Iterator[None]:
        """Keep internal errors of graphplan until the step ends. Refusals and out-of-memory errors end it at once."""
        try:
            yield
        except Exception as error:
            if refusal_of(error) is None:
                raise
            self.faults.note(error)

    def start(self) -> None:
        """Before a step, make the resets that grouped calls would make, and bind their metrics to the sums."""
        self.faults.check()
        connector = self._connector
        self._last_hook = connector._current_fx
        if self._reset:
            self._reset = set()
        if self._grouped and connector._first_loop_iter is not False:
            results: Any = self._trainer._results
            for fx in dict.fromkeys(call.fx for call, _ in self._grouped.values()):
                if connector.should_reset_tensors(fx):
                    results.reset(metrics=False, fx=fx)
                    self._reset.add(fx)
        for group in self._groups:
            group.bind()

    def _settled(self, notes: list[Note], result: Any) -> tuple[list[Note], Any, tuple[Part, ...]]:
        """At the end of a step, copy the values of its grouped calls, and the loss, to one vector, and sum the means.
        Return the notes and ``result`` with those copies, and the grouped calls by group.
        """
        self.late.settle()
        notes = [(call if call.latest is None else _shown_by(call, value), value) for call, value in notes]
        places, parts = self._places(notes), list[Part]()
        values = [notes[place][1] for own in places.values() for place in own]
        loss: Any = None if self.loop is None else result.get("loss")
        if type(loss) in PLAIN_KINDS and values and not loss.ndim and _kind(loss) == _kind(values[0]):
            values.append(loss.detach())
        with torch.no_grad():
            vector = torch.stack(values) if values else None
        copies = [] if vector is None else list(apart(vector))
        if len(copies) > sum(map(len, places.values())):
            result = {**result, "loss": copies.pop()}
        elif isinstance(loss, Tensor) and self.late.may_wait(LOSS) and (notes or len(result) > 1):
            # Another output of the step may share the memory of the loss.
            result = {**result, "loss": loss.clone()}
        start = 0
        for group, own in places.items():
            sizes = [self._size(notes[place][0]) for place in own[: group.means]]
            if vector is not None and sizes:
                group.add(vector[start : start + group.means], sizes)
            sizes += [0] * (len(own) - group.means)
            for place, size, copy in zip(own, sizes, copies[start:], strict=False):
                notes[place] = (replace(notes[place][0], size=size), copy)
            parts.append((group.number, None if own == list(range(len(notes))) else own, sizes))
            start += len(own)
        for place, (call, value) in enumerate(notes):
            if call.size is None and self.late.may_wait(call.key):
                notes[place] = (call, value.clone())
        return notes, result, tuple(parts)

    def _places(self, notes: Sequence[Note]) -> dict[Group, list[int]]:
        """Return the positions in ``notes`` of each group's metrics, if the step logs the whole group exactly once."""
        grouped = [(call.key, place) for place, (call, value) in enumerate(notes) if self._is_grouped(call, value)]
        by_key, keys = dict(grouped), [key for key, _ in grouped]
        groups = dict.fromkeys(self._grouped[key][1].group for key in keys)
        whole = [group for group in groups if all(keys.count(key) == 1 for key in group.metrics)]
        return {group: [by_key[key] for key in group.metrics] for group in whole}

    def _size(self, call: LogCall) -> int:
        metric, given = self._grouped[call.key][1], dict(call.options).get("batch_size")
        return int(_ResultCollection._extract_batch_size(self._trainer._results, metric, given, metric.meta))  # type: ignore[arg-type]

    def _is_grouped(self, call: LogCall, value: Any) -> bool:
        known, size = self._grouped.get(call.key), dict(call.options).get("batch_size")
        if known is None or not (size is None or isinstance(size, int)):
            return False  # Lightning adds the value if the size is not an integer.
        if known[0].options != call.options or type(value) not in PLAIN_KINDS:
            return False
        # Bypass the property of a grouped metric, which would compute in the step.
        total = vars(known[1])["value"]
        return value.ndim == 0 and _kind(value) == self._kind == _kind(total)

    def finish(self, calls: list[LogCall], grouped: Grouped, values: list[Any]) -> None:
        """After a step, make its log calls, and decide which may be grouped from now on. No trace is running here."""
        for number, places, sizes in grouped.parts:
            self._groups[number].count(sizes, values if places is None else [values[place] for place in places])
        if grouped.are_all:
            self._connector._current_fx = self._last_hook = calls[-1].fx
            return
        notes = list(zip(calls, values, strict=True))
        if self._carry_out(notes) and self._sums_in_step:
            self._learn(notes)

    def _carry_out(self, notes: Sequence[Note]) -> bool:
        """Make the calls that are in no group, with Lightning's resets. Return True if Lightning's code made any."""
        by_lightning = False
        connector, results = self._connector, None
        connector._current_fx = self._last_hook
        for call, value in notes:
            if call.size is None:
                results = results if results is not None else self._trainer._results
                assert results is not None
                if call.fx not in self._reset and connector.should_reset_tensors(call.fx):
                    results.reset(metrics=False, fx=call.fx)
                if call.latest is not None or not self._is_metric_again(results, call, value):
                    by_lightning = True
                    with _as_in_step(call, value):
                        _log(results, call, self.late.as_logged(value, call.key, call.name))
            connector._current_fx = self._last_hook = call.fx
        return by_lightning

    def _is_metric_again(self, results: Any, call: LogCall, value: Any) -> bool:
        """Log a torchmetrics metric and return True, if only its latest value is new since the same call before.
        Lightning would move all of the metric's attributes to its device, which takes a third of a millisecond.
        """
        held = dict.get(results, call.key) if self._is_known else None
        if held is None or held.is_tensor:
            return False
        known, self._metrics[call.key] = self._metrics.get(call.key), (call.options, value.device)
        if known != self._metrics[call.key] or vars(held).get("value") is not value:
            return False
        held.update(value, 1)
        held.has_reset = False
        return True

    def _learn(self, notes: Sequence[Note]) -> None:
        """Group the step's calls that may be grouped from now on."""
        results = self._trainer._results
        assert results is not None
        hooks = [fx for fx, _ in groupby(notes, lambda note: note[0].fx)]
        if len(hooks) > len(set(hooks)):
            return  # In an epoch's first batch, Lightning resets a hook's metrics each time that logging returns to it.
        rates = list(_rates(self._trainer.optimizers))
        found: dict[str, Any] = {}
        for call, value in notes:
            metric = results.get(call.key)
            # Only the optimizer may use a learning rate in a step, so a logged one is not summed there.
            is_rate = isinstance(value, Tensor) and any(_is_rate(value, rate) for rate in rates)
            new = metric is not None and call.key not in self._grouped and not is_rate
            if new and type(value) in PLAIN_KINDS and self._may_be_grouped(metric, value):
                self._grouped[call.key], found[call.key] = (call, metric), metric
        if found:
            group = Group(len(self._groups), found, self._patches)
            self._groups.append(group)
            if group.means:
                self.totals[f"group {group.number}"] = group.totals

    def _may_be_grouped(self, metric: Any, value: Any) -> bool:
        """Return True for a mean of scalars with the dtype and device of the groups, which Lightning does not cast.
        Sums of a subclass's tensors would run its ``__torch_function__``.
        """
        meta = metric.meta
        if not metric.is_tensor or meta.enable_graph or meta.sync.should or metric.value.ndim:
            return False
        if type(metric.value) not in PLAIN_KINDS:
            return False
        kind = _kind(metric.value)
        if _kind(value) != kind or kind[0] not in _DTYPES or not meta.is_mean_reduction:
            return False  # Lightning casts the value, or does not take its mean.
        self._kind = self._kind or kind
        return kind == self._kind


def _shown_by(call: LogCall, metric: Any) -> LogCall:
    """Return ``call``, without ``latest`` if the metric still has that value. Refuse a trace if it does not."""
    if call.latest is None or vars(metric)[_LATEST] is call.latest[0]:
        return replace(call, latest=None)
    refuse_trace(
        HostEffectError,
        f"{call} at {call.source} gets a metric that the step updates or resets later. Lightning logs its value at "
        "the call, but a replay would log its value at the end of the step. Log it after its last change in the step, "
        "or reset it in a hook",
    )
    return call


@contextmanager
def _as_in_step(call: LogCall, value: Any) -> Iterator[None]:
    """Restore the call's default dtype and the metric's value for the block. Add the call's place to errors."""
    dtype, now = torch.get_default_dtype(), None
    if call.latest is not None:
        now, vars(value)[_LATEST] = vars(value)[_LATEST], call.latest[0]
    torch.set_default_dtype(call.dtype)
    try:
        yield
    except Exception as error:
        # Python 3.10 has no notes.
        getattr(error, "add_note", lambda text: None)(f"{call}, called at {call.source}")
        raise
    finally:
        torch.set_default_dtype(dtype)
        if call.latest is not None:
            vars(value)[_LATEST] = now


@hands_over
def _log(results: Any, call: LogCall, value: Any) -> None:
    results.log(call.fx, call.name, value, **dict(call.options))


def _rates(optimizers: Sequence[Any]) -> Iterator[Any]:
    """Yield the learning rates of parameter groups. Groups of an optimizer with its own schedule may have none."""
    for optimizer in optimizers:
        found = (group.get("lr") for group in optimizer.param_groups)
        yield from (rate for rate in found if isinstance(rate, Real | Tensor))


def _is_rate(value: Tensor, rate: Any) -> bool:
    """Return True if the logged value is one number, and equals this learning rate in its dtype."""
    return value.numel() == 1 and bool((value == torch.as_tensor(rate, dtype=value.dtype, device=value.device)).any())


def _kind(value: Tensor) -> tuple[torch.dtype, torch.device]:
    return value.dtype, value.device
