"""What the seams share: graphed steps around one of Lightning's loops.

A seam stands on instances, never on classes, and is taken off again. What a step logs is noted, and logged after it. A
program reads the optimizers that it was captured with; when the Trainer gets others in the middle of a fit, the steps
so far are closed, with their memory, and new ones are made; what was counted goes on.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils import _pytree as pytree

from graphplan.callback.callback_options import VariantOf
from graphplan.callback.gates import needed_warmup
from graphplan.callback.hooks import OwnHooks, hooked_callbacks
from graphplan.callback.logging.step_logs import StepLogs
from graphplan.callback.patches import InstancePatch, Recover, recovering
from graphplan.callback.trainer_state import (
    WatchedIndex,
    Wrapper,
    optimizers_of,
    reached_objects,
    refuse_index,
    trainer_numbers,
    unwatch,
)
from graphplan.effects.allowed import is_allowed
from graphplan.errors import OptionError, RecaptureError, RefusalError, SkipReason
from graphplan.feed.call_arguments import CallArguments, hands_over
from graphplan.feed.signature import with_new_containers
from graphplan.owners.slots import Via
from graphplan.program.faults import lost, refusal_of
from graphplan.report.figures import Figures, describe_program
from graphplan.report.stats import Stats
from graphplan.step.compiled import CompiledModules
from graphplan.step.gate import Gate
from graphplan.step.graphed_step import GraphedStep
from graphplan.step.options import Options
from graphplan.step.peers import find_peers
from graphplan.step.runner import Backends
from graphplan.tensors.containers import Literals
from graphplan.trace.mode import is_traced

_PAYS = 16
"""Replays after which optimizers have stayed for long enough: fewer count against ``max_recaptures``."""
_BATCH_CHANGED = (
    "training_step puts something else into the container of its batch, or takes something out. With graphplan a step "
    "gets a container of its own: hooks that come later, and the batch size that epoch means are weighted with, are "
    "those of the batch as it came. Change a new container (batch = dict(batch)) to see the same without graphplan"
)
_OWN_EFFECTS = ("model._current_fx_name", "model._metric_attributes", "model._param_requires_grad_state")
_OPTIMIZERS_EFFECTS = ("_opt_called", "_step_count")
"""Bookkeeping of Lightning's and torch's own that no step depends on."""


NO_BATCH = Literals()
"""What a step is fed that is given no batch."""


def _raise(error: Exception) -> None:
    raise error


@dataclass(frozen=True)
class Run:
    """The run that a seam is made for.

    Attributes:
        when_down: told after a step that all those to come are eager, and why.
        recover: see :data:`graphplan.callback.patches.Recover`.
    """

    trainer: Trainer
    module: LightningModule
    options: Options
    backends: Backends
    when_down: Callable[[SkipReason, str], object] = lambda reason, detail: None
    recover: Recover = _raise
    variant: VariantOf = None
    gate: Gate | None = None


class Seam(ABC):
    """One loop's seam. ``take_off`` and ``close`` undo ``install``; ``figures`` outlive them."""

    part = ""
    """What is replayed of a step, if not all of it."""

    def __init__(self, run: Run) -> None:
        self._made_for, self._trainer, self._module = run, run.trainer, run.module
        self.recover = run.recover
        self._variant, self._wrapper = run.variant, Wrapper(run.trainer)
        options, names = run.options, optimizers_of(run.trainer)
        effects = [f"{name}.{effect}" for name in names for effect in _OPTIMIZERS_EFFECTS]
        self._eager_if, self._wants_eager = options.eager_if, False
        self._options = replace(
            options,
            warmup_steps=max(options.warmup_steps, needed_warmup(run.trainer.strategy)),
            allow=(*_OWN_EFFECTS, self._wrapper.effect, *effects, *options.allow),
            eager_if=(lambda *args: self._wants_eager) if options.eager_if is not None else None,
        )
        asks = options.eager_if is not None or run.variant is not None
        reads_index = asks or is_allowed("batch_idx", options.allow)
        self._watches_index = not reads_index
        # How many rows a batch has is a number in those sums, and no program is for one number where rows are padded.
        self._may_sum = options.mode == "train" and not options.pads_rows
        self._logs = StepLogs(run.trainer, run.module, sums_in_step=self._may_sum)
        self._own_hooks = OwnHooks(run.trainer, run.module)
        self._steps: list[GraphedStep] = []
        self._patches: list[InstancePatch] = []
        self._counters: list[Any] = []
        self._begun: list[dict[str, Any]] = []
        # Of the loop's arguments, what is not fed: the batch's number, and what comes after the batch.
        self._index, self._rest = 0, list[tuple[str, Any]]()
        self._known_before: tuple[Any, ...] = ()
        self._leaf = Literals()
        self._compiled = CompiledModules([], False)
        self.notes: list[str] = []
        self._is_down = False
        self._past = Figures()
        self._unpaid = 0

    @abstractmethod
    def install(self) -> None:
        """Put the seam in."""

    @abstractmethod
    def _begin(self) -> None:
        """Make the steps, for the optimizers that the Trainer has now."""

    @abstractmethod
    def _end(self) -> None:
        """Forget the steps, and the optimizers that they are for."""

    def _compile(self) -> None:
        """Compile the module's parts, if asked to, and its ``forward`` where nothing else goes through its call."""
        if self._options.compile is False:
            return
        parts: list[nn.Module] = [part for part in self._module.children() if any(True for _ in part.parameters())]
        if is_overridden("forward", self._module) and self._trainer.strategy.model is self._module:
            parts.append(self._module)
        self._compiled = CompiledModules(parts, self._options.compile)
        self.notes += self._compiled.notes

    def _put(self, owner: Any, name: str, run: Callable[..., Any]) -> None:
        """Replace a method of one of Lightning's objects, until the seam is removed."""
        self._patches.append(InstancePatch(owner, name, run))
        self._patches[-1].install()

    def close(self) -> None:
        """Close all steps, and put the optimizers' flags back."""
        for step in self._steps:
            step.close()

    def take_off(self) -> None:
        """Take everything off but what a step that stands down has left: kernels, where runs are to be repeatable."""
        for patch in self._patches:
            patch.remove()
        for step in self._steps:
            if not step.is_down:
                step.close()
        self._compiled.undo()
        self._logs.sums.dissolve()

    def _owners(self, progress: dict[str, Any]) -> dict[str, Any]:
        """All that a step of the fit may use. ``progress`` are Lightning's counters that it moves."""
        owners: dict[str, Any] = {"model": self._module, **self._wrapper.owners, **optimizers_of(self._trainer)}
        for name, part in progress.items():
            for count in ("total", "current"):
                owners[f"progress.{name}.{count}"] = Via(getattr(part, count), "optim_progress")
                self._counters.append(getattr(part, count))
        owners["logs"] = self._logs.sums.tensors
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            owners["scaler"] = scaler
        numbers = trainer_numbers(self._trainer, trains=self._options.mode == "train")
        return owners | numbers | hooked_callbacks(self._trainer) | reached_objects(self._trainer)

    def _make(
        self,
        body: Callable[..., Any],
        owners: dict[str, Any],
        *,
        feeds: bool = True,
        escalates: Callable[[RefusalError], bool] | None = None,
    ) -> GraphedStep:
        """A step of ``body``, which is given batches if it ``feeds``. ``escalates`` says which refusals raise."""
        gate = None if self._made_for.gate is None else self._made_for.gate.with_same_eager_time()
        options = self._options if feeds else replace(self._options, shapes="exact", buckets=None, mask=None)
        backends, peers = self._made_for.backends, find_peers()
        step = GraphedStep(body, owners, options, backends, peers, compiles=False, gate=gate, opens_gate=False)
        step.machine.refusals.escalates = escalates or (lambda error: self._must_raise())
        self._steps.append(step)
        return step

    @property
    def sums(self) -> Any:
        """Of the means that its steps log."""
        return self._logs.sums

    @property
    def figures(self) -> Figures:
        """Counts of the fit so far, and facts for the report: what was prepared, what runs on the host and why."""
        stats, past = Stats(), self._past
        stats.merge(past.stats)
        stats.merge(self._current_stats())
        stats.bytes_verified = max(past.stats.bytes_verified, sum(step.stats.bytes_verified for step in self._steps))
        facts = [fact for step in self._steps for fact in step.facts]
        return Figures(
            stats=stats,
            plans=past.plans + sum(step.stats.captured - step.stats.recaptured for step in self._steps),
            notes=[*dict.fromkeys((*past.notes, *facts, *self.notes))],
            plan=next((step.plan for step in reversed(self._steps) if step.plan is not None), None),
            part=self.part,
        )

    def describe_programs(self) -> list[dict[str, Any]]:
        """Descriptions of the programs that there are."""
        return [describe_program(program) for step in self._steps for program in step.programs]

    def _current_stats(self) -> Stats:
        """Counts of the steps for the optimizers that the Trainer has now."""
        stats = Stats()
        for step in self._steps:
            stats.merge(step.stats)
        return stats

    def _must_raise(self) -> bool:
        replayed = self._past.stats.replayed or any(step.stats.replayed for step in self._steps)
        return self._options.on_failure == "raise" and not replayed

    def _look_at(self, step: GraphedStep) -> None:
        """After a call of ``step``: see whether it stands down."""
        if step.is_down:
            self._give_up(*step.down_because)

    def _give_up(self, reason: SkipReason, detail: str) -> None:
        if not self._is_down:
            self._is_down = True
            self._made_for.when_down(reason, detail)

    def _renew(self) -> bool:
        """Make steps for the optimizers that the Trainer has now; False if this one and all later ones are eager.

        Raises:
            RecaptureError: if that happens too often, and no step was ever replayed.
        """
        is_refused = self._is_churning()
        self._past = self.figures
        # A plan keeps tensors.
        self._past.plan, self._past.stats.bytes_static = None, 0
        self.close()
        self._steps, self._counters, self.notes = [], [], []
        self._end()
        if is_refused:
            self._refuse_churn()
            return False
        self._past.stats.note("another optimizer: the step is captured anew", "recaptures")
        self._begin()
        return True

    def _is_churning(self) -> bool:
        """Count optimizers that did not stay for long enough, where nothing else keeps training eager."""
        stats = self._current_stats()
        if self._options.mode != "train" or stats.skipped.keys() - {SkipReason.SHAPE}:
            return False
        self._unpaid = self._unpaid + 1 if stats.replayed < _PAYS else 0
        return self._unpaid >= self._options.max_recaptures

    def _refuse_churn(self) -> None:
        most = self._options.max_recaptures
        error = RecaptureError(
            f"the Trainer got another optimizer {most} times in a row after fewer than {_PAYS} replays each, and the "
            "step has to be captured anew each time. Expected an optimizer to stay for a while. Keep it, and change "
            "its groups or load a state into it (optimizer.load_state_dict), or raise max_recaptures "
            f"(now {most})"
        )
        if self._must_raise():
            raise error
        warnings.warn(f"graphplan runs this step eagerly: {error}", UserWarning, stacklevel=4)
        self._past.stats.count_stock(1)
        self._past.stats.skip(error.reason, str(error))
        self._give_up(error.reason, str(error))

    @hands_over
    def _ask_eager(self, batch: Any, index: int) -> bool:
        """What ``eager_if`` says of a batch as it came."""
        if callable(self._eager_if):
            return bool(self._eager_if(batch, index))
        return self._eager_if is not None and index % self._eager_if == 0

    def _on_device(self, kwargs: OrderedDict[str, Any]) -> OrderedDict[str, Any]:
        """The loop's arguments for Lightning's own code, where a graphed step would have moved the batch itself."""
        if self._options.feed_device is not None:
            kwargs = OrderedDict(kwargs, batch=move_data_to_device(kwargs["batch"], self._options.feed_device))
        return kwargs

    @recovering(lambda self: False)
    def _start_logs(self) -> bool:
        self._logs.start()
        return True

    @recovering(lambda self: None)
    def _check_logs(self) -> None:
        self._logs.has_faults = False
        self._logs.faults.check()

    def _enter(self, batch_idx: int, kwargs: OrderedDict[str, Any]) -> None:
        """A batch comes: note what a step is not fed of the loop's arguments, of which the batch is the first."""
        self._index, self._rest = batch_idx, list(kwargs.items())[1:]
        if self._eager_if is not None:
            self._wants_eager = self._ask_eager(kwargs["batch"], batch_idx)

    def _through(self, step: GraphedStep, stock: Callable[[], Any], batch: Any, facts: tuple[Any, ...] = ()) -> Any:
        """Run the batch that has come through ``step``, and log what it logged.

        Args:
            step: one of this seam's.
            stock: Lightning's own way, where graphplan fails before the step.
            batch: what the step is fed of it.
            facts: literals that the step depends on.
        """
        if not self._start_logs():
            return stock()
        self._begun = []
        known = self._known(facts)
        try:
            if self._variant is not None and batch is not NO_BATCH:
                out = step(batch, known, self._variant_of(batch))
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
        if self._logs.has_faults:
            self._check_logs()
        return out["result"]

    def _known(self, facts: tuple[Any, ...]) -> Literals:
        """``facts`` and what else a step depends on as one leaf: that of the step before if nothing has changed."""
        known = facts, self._own_hooks.changes(), self._wrapper.note()
        if known != self._known_before:
            self._known_before, self._leaf = known, Literals((*facts, *known[1:]))
        return self._leaf

    def _variant_of(self, batch: Any) -> Any:
        """The user's key of this batch, for steps whose control flow alternates.

        Raises:
            OptionError: if the module has no such method.
        """
        given, module = self._variant, self._module
        found = getattr(module, given, None) if isinstance(given, str) else given
        if not callable(found):
            raise OptionError(
                f"variant is {given!r}, and {type(module).__name__} has no such method; expected one that takes "
                "(batch, batch_idx)"
            )
        return found(batch, self._index)

    def _finish(self, out: dict[str, Any]) -> None:
        """After a call, do what is done after each, whether its Python ran or it was a replay."""
        if out["note"] is not None:
            self._wrapper.put(out["note"])
        if out["logs"]:
            # No context manager: this is asked after each replay.
            try:
                self._logs.finish(out["logs"], out["grouped"], out["values"])
            except Exception as error:
                if refusal_of(error) is None:
                    raise
                raise lost(error, f"the step of {type(self._module).__name__}") from error

    def _in_step(self, body: Callable[[OrderedDict[str, Any]], Any], batch: Any) -> dict[str, Any]:
        """``body`` on the loop's arguments with ``batch`` among them, and what it logs."""
        # Replays would leave the loop's own containers alone, so that eager steps do.
        own = with_new_containers(batch)
        kwargs = OrderedDict([("batch", own), *self._rest])
        if "batch_idx" in kwargs:
            kwargs["batch_idx"] = self._watched(kwargs["batch_idx"])
        fed = CallArguments((own,), {}).watch() if is_traced() else None
        try:
            out = self._logs.around(lambda: body(kwargs))
        except BaseException:
            self._begun = [dict(vars(counter)) for counter in self._counters]
            raise
        if fed is not None and fed.change() is not None:
            warnings.warn(_BATCH_CHANGED, UserWarning, stacklevel=2)
        unwatch(self._module)
        out["result"] = pytree.tree_map_only(WatchedIndex, WatchedIndex.plain, out["result"])
        return {**out, "note": self._wrapper.note()}

    def _watched(self, batch_idx: int) -> int:
        return WatchedIndex(batch_idx, refuse_index) if self._watches_index else batch_idx
