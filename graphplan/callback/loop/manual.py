"""Lightning's manual optimization: the whole ``training_step``, with all optimizers that it steps, is the step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import is_
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from graphplan.callback.hooks import members_of
from graphplan.callback.loop.seam import Run, Seam
from graphplan.compare.comparing import Checks
from graphplan.errors import HostEffectError
from graphplan.observe.source import find_source
from graphplan.observe.watching import Aside
from graphplan.owners.walk import walk_owners
from graphplan.trace.mode import is_traced, refuse_trace


class ManualSeam(Seam):
    """The seam of ``manual_optimization``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._epoch_loop: Any = run.trainer.fit_loop.epoch_loop
        self._loop: Any = self._epoch_loop.manual_optimization
        self._schedules = Schedules(run.trainer)

    @override
    def install(self) -> None:
        self._compile()
        self._put(self._loop, "run", self._run)
        self._begin()

    @override
    def _begin(self) -> None:
        self._are_same: Callable[[], bool] = Checks(members_of(self._trainer.strategy, "_optimizers")).hold
        self._whole = self._make(self._body, self._owners({"step": self._loop.optim_step_progress}))

    @override
    def _end(self) -> None:
        # Where no others are made, no optimizers are the same.
        self._are_same = bool
        del self._whole

    def _run(self, kwargs: OrderedDict[str, Any]) -> Any:
        """In place of ``manual_optimization.run``."""
        if "batch" not in kwargs:
            self._refuse_fetching()
            return self._stock_run(kwargs)
        if not self._are_same() and not self._renew():
            return self._stock_run(self._on_device(kwargs))
        self._enter(self._epoch_loop.batch_idx, kwargs)
        self._schedules.start()
        result = self._through(self._whole, lambda: self._stock_run(self._on_device(kwargs)), kwargs["batch"])
        self._look_at(self._whole)
        return result

    def _stock_run(self, kwargs: OrderedDict[str, Any]) -> Any:
        return type(self._loop).run(self._loop, kwargs)

    def _body(self, batch: Any, *facts: Any) -> dict[str, Any]:
        with self._schedules.noting() as stepped:
            out = self._in_step(self._stock_run, batch)
        return {**out, "scheduler steps": Stepped(stepped)}

    @override
    def _finish(self, out: dict[str, Any]) -> None:
        super()._finish(out)
        self._schedules.finish(out["scheduler steps"])


class Stepped(tuple[int, ...]):
    """Which schedulers a step stepped, in order, by their places in ``lr_schedulers()``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return " and ".join(f"lr_schedulers[{number}].step()" for number in self) or "no scheduler's step"


class Schedules:
    """The schedulers of a fit by manual optimization: real in steps that run as Python, made up for after replays.

    A scheduler works on Python numbers, so that its step is no part of a recording: before each replay the latest
    learning rates are put where the optimizer reads them. What a recording must not hold is anything that comes of the
    new numbers. So while a step's Python runs, a scheduler steps where it stands, and what it changed is put aside from
    the step's end until after the call: the step looks like one without schedulers, and after a replay of it they step.
    In a trace, any further use of a scheduler or learning rate that has moved on is refused.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._schedulers: list[Any] = []
        self._rates: dict[int, Any] = {}
        self._changes: list[_Change] | None = None
        self._watch = ExitStack()

    def start(self) -> None:
        """Before a call: which learning rates there are, as numbers."""
        self._schedulers = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        self._rates = {id(group): group["lr"] for scheduler in self._schedulers for group in _groups(scheduler)}
        self._changes = None

    @contextmanager
    def noting(self) -> Iterator[list[int]]:
        """While the step's Python runs: collect which schedulers step, and in the end put aside what they changed."""
        self._changes = []
        notes: list[int] = []
        with ExitStack() as left:
            for number, scheduler in enumerate(self._schedulers):
                if self._is_host_work(scheduler):
                    scheduler.step = partial(self._step, notes, number)
                    left.callback(vars(scheduler).pop, "step")
            left.callback(lambda: self._watch.close())
            yield notes
        for change in reversed(self._changes):
            change.undo()

    def _is_host_work(self, scheduler: Any) -> bool:
        """Not where it fills a tensor of the user's, or is stepped in a way of its own."""
        rates = [self._rates[id(group)] for group in _groups(scheduler) if id(group) in self._rates]
        return bool(rates) and not any(isinstance(rate, Tensor) for rate in rates) and "step" not in vars(scheduler)

    def _step(self, notes: list[int], number: int, *args: Any, **kwargs: Any) -> None:
        """In place of a scheduler's ``step``."""
        assert self._changes is not None
        if args or kwargs:
            _refuse(f"hands a value to lr_schedulers[{number}].step()")
        notes.append(number)
        self._watch.close()
        scheduler, groups = self._schedulers[number], _groups(self._schedulers[number])
        containers = [*walk_owners({"scheduler": scheduler}).containers, *groups]
        before = [(container, _copy(container)) for container in containers]
        for group in groups:
            if isinstance(group["lr"], Tensor):
                # It stands in for the number while the step is traced or captured.
                group["lr"] = self._rates[id(group)]
        with Aside():
            type(scheduler).step(scheduler, *args, **kwargs)
        self._changes += [_Change(container, old) for container, old in before]
        if is_traced():
            stepped = dict.fromkeys(self._schedulers[note] for note in notes)
            for optimizer in dict.fromkeys(one.optimizer for one in stepped):
                _watch_rates(optimizer, self._watch)
            for one in stepped:
                _watch_scheduler(one, self._watch)

    def finish(self, stepped: Stepped) -> None:
        """After a call: what its schedulers changed, or after a replay their steps."""
        if self._changes is None:
            for number in stepped:
                self._schedulers[number].step()
            return
        for change in self._changes:
            change.redo()
        self._changes = None


def _groups(scheduler: Any) -> list[dict[str, Any]]:
    optimizer = scheduler.optimizer if isinstance(scheduler, LRScheduler) else None
    return optimizer.param_groups if isinstance(optimizer, Optimizer) else []


def _refuse(what: str) -> None:
    refuse_trace(
        HostEffectError,
        f"the step {what} at {find_source()}; after a replay its schedulers step with nothing handed to them, when all "
        "else is over. Step a scheduler last in training_step and without a value, or in on_train_batch_end or "
        "on_train_epoch_end",
    )


def _copy(container: Any) -> Any:
    """What a container holds, by key where it has keys."""
    if isinstance(container, MutableMapping):
        return dict(container)
    return set(container) if isinstance(container, set) else list(container)


class _Change:
    """What has changed in ``container`` since it was ``old``: keys of a mapping, or else all of it, under None."""

    def __init__(self, container: Any, old: Any) -> None:
        self._container, new = container, _copy(container)
        if isinstance(container, MutableMapping):
            pairs = [(key, old.get(key, _NOTHING), new.get(key, _NOTHING)) for key in dict.fromkeys((*old, *new))]
        else:
            pairs = [(None, old, new)]
        self._pairs = [(key, before, after) for key, before, after in pairs if not _same(before, after, container)]

    def undo(self) -> None:
        """Put the old state back, but for what the step has changed again."""
        now = _copy(self._container) if isinstance(self._container, MutableMapping) else {None: _copy(self._container)}
        self._pairs = [pair for pair in self._pairs if _same(now.get(pair[0], _NOTHING), pair[2], self._container)]
        for key, before, _ in self._pairs:
            self._put(key, before)

    def redo(self) -> None:
        """Put the new state back."""
        for key, _, after in self._pairs:
            self._put(key, after)

    def _put(self, key: Any, value: Any) -> None:
        container = self._container
        if not isinstance(container, MutableMapping):
            container.clear()
            (container.update if isinstance(container, set) else container.extend)(value)
        elif value is _NOTHING:
            del container[key]
        else:
            container[key] = value


_NOTHING = object()


def _same(one: Any, other: Any, container: Any) -> bool:
    """Whether two values of a mapping, or two contents of another container, are the same objects."""
    if isinstance(container, MutableMapping):
        return one is other
    return one == other if isinstance(container, set) else len(one) == len(other) and all(map(is_, one, other))


class _Watched:
    """Scheduler whose attributes are not to be read any more."""

    def __getattribute__(self, name: str) -> Any:
        if name not in ("step", "optimizer") and not name.startswith("__"):
            _refuse(f"reads {name!r} of a scheduler that it has stepped")
        return super().__getattribute__(name)


def _watch_scheduler(scheduler: Any, watch: ExitStack) -> None:
    kind = type(scheduler)
    scheduler.__class__ = type(kind.__name__, (_Watched, kind), {"__module__": kind.__module__})
    watch.callback(setattr, scheduler, "__class__", kind)


class _WatchedGroup(dict[str, Any]):
    """Group of an optimizer whose learning rate is not to be used any more."""


def _watching(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def method(self: _WatchedGroup, *args: Any) -> Any:
        if not args or args[0] != "params":
            _refuse("uses a learning rate of an optimizer whose scheduler it has stepped")
        return plain(self, *args)

    method.__name__ = name
    return method


for _name in ("__getitem__", "__setitem__", "get", "pop", "items", "values"):
    setattr(_WatchedGroup, _name, _watching(_name))


def _watch_rates(optimizer: Optimizer, watch: ExitStack) -> None:
    for index, group in enumerate(optimizer.param_groups):
        watched = optimizer.param_groups[index] = _WatchedGroup(group)
        watch.callback(_unwatch, optimizer.param_groups, index, group, watched)


def _unwatch(groups: list[dict[str, Any]], index: int, group: dict[str, Any], watched: _WatchedGroup) -> None:
    group.update(dict.items(watched))
    groups[index] = group
