"""What the seams share: a graphed step around one of Lightning's loops, and the batch that it is run on.

A seam stands on instances, never on classes, and is taken off again. What the step logs is noted and logged after it.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import is_not
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils import _pytree as pytree

from graphplan.callback.gates import OwnHooks, hooked_callbacks, needed_warmup
from graphplan.callback.instance_patch import InstancePatch, Recover
from graphplan.callback.logging.deferred_logs import LogNotes, with_logs
from graphplan.callback.logging.epoch_sums import Sums
from graphplan.callback.loop.variants import Variant
from graphplan.callback.numbers import WatchedIndex, reached_objects, trainer_numbers, unwatch
from graphplan.callback.wrapping import Wrapped
from graphplan.effects.finding import is_allowed
from graphplan.errors import HostScalarError, RefusalError, SkipReason
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.signature import with_new_containers
from graphplan.observe.source import find_source
from graphplan.owners.slots import Via
from graphplan.plan.plan import Plan
from graphplan.program.faults import lost, refusal_of
from graphplan.report.stats import Stats
from graphplan.step.compiled import CompiledModules
from graphplan.step.gate import Gate
from graphplan.step.graphed_step import GraphedStep
from graphplan.step.options import Options
from graphplan.step.peers import find_peers
from graphplan.step.runner import Backends
from graphplan.tensors.containers import Literals
from graphplan.trace.mode import is_traced, refuse_trace

_BATCH_CHANGED = (
    "training_step puts something else into the container of its batch, or takes something out. With graphplan a step "
    "gets a container of its own: hooks that come later, and the batch size that epoch means are weighted with, are "
    "those of the batch as it came. Change a new container (batch = dict(batch)) to see the same without graphplan"
)

_OWN_EFFECTS = ("model._current_fx_name", "model._metric_attributes", "model._param_requires_grad_state")
_OPTIMIZERS_EFFECTS = ("_opt_called", "_step_count")
"""Bookkeeping of Lightning's and torch's own that no step depends on."""


def _refuse_index() -> None:
    refuse_trace(
        HostScalarError,
        f"the step computes with batch_idx at {find_source()}, which differs for each batch; a replay would keep one "
        "value. Move that code to on_train_batch_end, pass eager_if= for the batches that are meant to run it, "
        "variant= for a program of its own for each of a few answers, or allow=('batch_idx',) if the step's results do "
        "not depend on it",
    )


@dataclass
class Figures:
    """What a seam did: counts, plans that were captured, notes for the report, the latest plan."""

    stats: Stats = field(default_factory=Stats)
    plans: int = 0
    notes: list[str] = field(default_factory=list)
    plan: Plan | None = None


class Seam(ABC):
    """One loop's seam. ``install`` and ``remove`` are inverse; ``figures`` outlive both."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        options: Options,
        variant: Variant,
        backends: Backends,
        gate: Gate | None = None,
    ) -> None:
        self._trainer = trainer
        self._gate = gate
        self._when_down: Callable[[SkipReason, str], object] | None = None
        self.recover: Recover = _raise
        self._backends = backends
        self._module = module
        self._eager_if = options.eager_if
        self._variant = variant
        effects = [f"{name}.{effect}" for name in optimizers_of(trainer) for effect in _OPTIMIZERS_EFFECTS]
        self._wrapped = Wrapped(trainer)
        self._own_hooks = OwnHooks(trainer, module)
        self._options = replace(
            options,
            warmup_steps=max(options.warmup_steps, needed_warmup(trainer.strategy)),
            allow=(*_OWN_EFFECTS, *self._wrapped.effects, *effects, *options.allow),
            eager_if=self._asks_eager if options.eager_if is not None else None,
        )
        reads_index = options.eager_if is not None or variant.is_given or is_allowed("batch_idx", options.allow)
        self._watches_index = not reads_index
        # How many rows a batch has is a number in those sums, and no program is for one number where rows are padded.
        self._may_sum = options.mode == "train" and not options.pads_rows
        self._logs = LogNotes(trainer, module, sums_in_step=self._may_sum)
        self._steps: list[GraphedStep] = []
        self._standins: list[InstancePatch] = []
        self._context: tuple[Any, int, OrderedDict[str, Any]] | None = None
        self._counters: list[Any] = []
        self._begun: list[dict[str, Any]] = []
        self._latest = Literals()
        self._facts: tuple[Any, ...] = ()
        self._notes: tuple[Any, ...] = ()
        self._changes = 0
        self._compiled = CompiledModules([], False)
        self.notes: list[str] = []

    @abstractmethod
    def install(self) -> None:
        """Put the seam in."""

    def _compile(self) -> None:
        """Compile the module's parts, if asked to, and its ``forward`` where nothing else goes through its call."""
        if self._options.compile is False or self._options.backend == "eager":
            return
        parts: list[nn.Module] = [part for part in self._module.children() if any(True for _ in part.parameters())]
        if is_overridden("forward", self._module) and self._trainer.strategy.model is self._module:
            parts.append(self._module)
        self._compiled = CompiledModules(parts, self._options.compile)
        self.notes += self._compiled.notes

    def _put(self, owner: Any, name: str, run: Callable[..., Any]) -> None:
        """Have ``run`` stand in for a method of one of Lightning's objects, until the seam is removed."""
        self._standins.append(InstancePatch(owner, name, run))
        self._standins[-1].put()

    def remove(self) -> None:
        """Take everything off again, and put the optimizers' flags back."""
        self.take_off()
        self.close()

    def close(self) -> None:
        """Close all steps."""
        for step in self._steps:
            step.close()

    def take_off(self) -> None:
        """Take everything off but what a step that stands down has left: kernels, where runs are to be repeatable."""
        for standin in self._standins:
            standin.take_off()
        for step in self._steps:
            if not step.is_down:
                step.close()
        self._compiled.undo()
        self._logs.sums.dissolve()

    def _owners(self, progress: dict[str, Any]) -> dict[str, Any]:
        """Whatever a step of the fit may use. ``progress`` are Lightning's counters that it moves."""
        owners: dict[str, Any] = {"model": self._module, **self._wrapped.owners, **optimizers_of(self._trainer)}
        for name, part in progress.items():
            for count in ("total", "current"):
                owners[f"progress.{name}.{count}"] = Via(getattr(part, count), "optim_progress")
                self._counters.append(getattr(part, count))
        owners["logs"] = self._logs.sums.tensors
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            owners["scaler"] = scaler
        trains = self._options.mode == "train"
        numbers = trainer_numbers(self._trainer, trains=trains)
        return owners | numbers | hooked_callbacks(self._trainer) | reached_objects(self._trainer)

    def _make(self, body: Callable[..., Any], owners: dict[str, Any], *, feeds: bool = True) -> GraphedStep:
        """A step of ``body``, which is given batches if it ``feeds``."""
        gate = None if self._gate is None else self._gate.with_same_eager_time()
        options = self._options if feeds else replace(self._options, shapes="exact", buckets=None, mask=None)
        step = GraphedStep(
            body, owners, options, self._backends, find_peers(), compiles=False, gate=gate, opens_gate=False
        )
        self._steps.append(step)
        return step

    def tell_when_down(self, call: Callable[[SkipReason, str], object]) -> None:
        """Have ``call`` told, after a step, that all those to come are eager, and why."""
        self._when_down = call

    def _look_at(self, step: GraphedStep) -> None:
        """After a call of ``step``: see whether it stands down."""
        if step.is_down:
            self._give_up(*step.down_because)

    def _give_up(self, reason: SkipReason, detail: str) -> None:
        call, self._when_down = self._when_down, None
        if call is not None:
            call(reason, detail)

    @property
    def sums(self) -> Sums:
        """Of the means that its steps log."""
        return self._logs.sums

    @property
    def figures(self) -> Figures:
        """Counts of the fit so far, and facts for the report: what was prepared, what runs on the host and why."""
        total = Stats()
        for step in self._steps:
            total.merge(step.stats)
        return Figures(
            stats=total,
            plans=sum(step.stats.captured - step.stats.recaptured for step in self._steps),
            notes=[*(fact for step in self._steps for fact in step.facts), *self.notes],
            plan=next((step.plan for step in reversed(self._steps) if step.plan is not None), None),
        )

    def _must_raise(self) -> bool:
        return self._options.on_failure == "raise" and all(step.stats.replayed == 0 for step in self._steps)

    def _asks_eager(self, *args: Any) -> bool:
        assert self._context is not None
        _, batch_idx, kwargs = self._context
        if callable(self._eager_if):
            return bool(self._eager_if(next(iter(kwargs.values())), batch_idx))
        assert self._eager_if is not None
        return batch_idx % self._eager_if == 0

    def _on_device(self, kwargs: OrderedDict[str, Any]) -> OrderedDict[str, Any]:
        """The loop's arguments for Lightning's own code, where a graphed step would have moved the batch itself."""
        if self._options.feed_device is not None and "batch" in kwargs:
            kwargs = OrderedDict(kwargs, batch=move_data_to_device(kwargs["batch"], self._options.feed_device))
        return kwargs

    def _through(
        self, step: GraphedStep, stock: Callable[[], Any], facts: tuple[Any, ...] = (), *, feeds: bool = True
    ) -> Any:
        """Run the current batch through ``step``, or the step alone; log what it logged. ``facts`` are literals that it
        depends on. ``stock`` is Lightning's own way, where graphplan fails before the step.
        """
        assert self._context is not None
        _, batch_idx, kwargs = self._context
        try:
            self._logs.start()
        except Exception as error:  # noqa: BLE001 - those that are not graphplan's are raised
            self.recover(error)
            return stock()
        batch = kwargs["batch"] if feeds else ()
        known = self._known(facts)
        self._begun = []
        try:
            if self._variant.is_given and feeds:
                out = step(batch, known, self._variant.of(self._module, batch, batch_idx))
            else:
                out = step(batch, known)
        except RefusalError:
            self._logs.take_back()
            raise
        except BaseException:
            # The state from before the batch is back; that the batch was begun shows in checkpoints all the same.
            for counter, values in zip(self._counters, self._begun, strict=False):
                vars(counter).update(values)
            raise
        self._finish(out)
        try:
            self._logs.faults.check()
        except Exception as error:  # noqa: BLE001 - those that are not graphplan's are raised
            self.recover(error)
        return out["result"]

    def _known(self, facts: tuple[Any, ...]) -> Literals:
        """``facts`` and what else a step depends on as one leaf: that of the step before if nothing has changed."""
        changes, notes = self._own_hooks.changes(), self._wrapped.notes()
        if facts is not self._facts or changes != self._changes or notes != self._notes:
            self._facts, self._changes, self._notes = facts, changes, notes
            all_facts = (*facts, changes, *notes)
            if len(all_facts) != len(self._latest) or any(map(is_not, all_facts, self._latest)):
                self._latest = Literals(all_facts)
        return self._latest

    def _finish(self, out: dict[str, Any]) -> None:
        """After a call, do what is done after each, whether its Python ran or it was a replay."""
        if out["notes"]:
            self._wrapped.note(out["notes"])
        if out["logs"]:
            # No context manager: this is asked after each replay.
            try:
                self._logs.finish(out["logs"], out["values"])
            except Exception as error:
                if refusal_of(error) is None:
                    raise
                raise lost(error, f"the step of {type(self._module).__name__}") from error

    def _in_step(self, body: Callable[[OrderedDict[str, Any]], Any], batch: Any) -> dict[str, Any]:
        """``body`` on the loop's arguments with ``batch`` among them, and what it logs."""
        assert self._context is not None
        kwargs = OrderedDict(self._context[2])
        # Replays would leave the loop's own containers alone, so that eager steps do.
        kwargs["batch"] = own = with_new_containers(batch)
        if "batch_idx" in kwargs:
            kwargs["batch_idx"] = self._watched(kwargs["batch_idx"])
        fed = CallArguments((own,), {}).watch() if is_traced() else None
        try:
            out = with_logs(self._logs, lambda: body(kwargs))
        except BaseException:
            self._begun = [dict(vars(counter)) for counter in self._counters]
            raise
        if fed is not None and fed.change() is not None:
            warnings.warn(_BATCH_CHANGED, UserWarning, stacklevel=2)
        unwatch(self._module)
        out["result"] = pytree.tree_map_only(WatchedIndex, WatchedIndex.plain, out["result"])
        return {**out, "notes": self._wrapped.notes()}

    def _watched(self, batch_idx: int) -> int:
        return WatchedIndex(batch_idx, _refuse_index) if self._watches_index else batch_idx


def _raise(error: Exception) -> None:
    raise error


def optimizers_of(trainer: Trainer) -> dict[str, Any]:
    """The optimizers by name."""
    if len(trainer.optimizers) == 1:
        return {"optimizer": trainer.optimizers[0]}
    return {f"optimizers[{index}]": optimizer for index, optimizer in enumerate(trainer.optimizers)}
