"""The base class of seams, which put graphed steps in place of methods of Lightning's loops."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from graphplan.callback.callback_options import CallbackOptions
from graphplan.callback.gates import needed_warmup
from graphplan.callback.logging.step_logs import StepLogs
from graphplan.callback.patches import Patches, Recover, recovering
from graphplan.callback.trainer_state import (
    ARGUMENTS,
    STEP_HOOKS,
    SYNC_FLAG,
    WRAPPER,
    Arguments,
    hooked_callbacks,
    optimizers_of,
    trainer_numbers,
    trainer_objects,
)
from graphplan.compare.comparing import Checks, contents_of
from graphplan.effects.allowed import is_allowed
from graphplan.errors import OptionError, RecaptureError, RefusalError, SkipReason
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.signature import with_new_containers
from graphplan.owners.slots import OwnerByAttribute
from graphplan.owners.views import CallNumbers
from graphplan.program.faults import lost, refusal_of
from graphplan.report.figures import Figures, describe_program
from graphplan.report.stats import Stats
from graphplan.step.compiled import CompiledModules
from graphplan.step.gate import Gate
from graphplan.step.graphed_step import GraphedStep
from graphplan.step.options import Options
from graphplan.step.peers import find_peers
from graphplan.step.runner import Backends
from graphplan.tensors.trees import Literals

NAME = "the training step"  # The name of the step in messages.
_PUT = "put into the batch"
"""The output key of values that a step puts into its batch. Error messages show it."""
_OWN_EFFECTS = ("model._current_fx_name", "model._metric_attributes", "model._param_requires_grad_state")
_literals: Callable[[tuple[Any, ...]], Literals] = lru_cache(64)(Literals)
"""Returns the same object for the same literals, so that a replay need not compare them again."""
_OPTIMIZERS_EFFECTS = ("_opt_called", "_step_count")
"""Like ``_OWN_EFFECTS``, bookkeeping of Lightning and torch that no step depends on."""


class Seam(ABC):
    """The seam of one loop. ``remove`` undoes ``install`` and all ``patches``, but keeps ``figures`` and ``notes``.

    ``options`` are the options of the steps, ``given`` those of the callback. ``stand_down`` removes the seam when all
    further steps are eager. ``gate`` has timed the steps so far. ``part`` names the replayed part of a step, and is
    empty for the whole step.
    """

    part = ""
    called: tuple[str, ...] = (
        *STEP_HOOKS, "training_step", "backward", "optimizer_step", "optimizer_zero_grad",
        "configure_gradient_clipping",
    )  # fmt: skip
    """Methods of the module that Lightning calls inside the step."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        options: Options,
        given: CallbackOptions,
        backends: Backends,
        stand_down: Callable[[SkipReason, str], None],
        recover: Recover,
        gate: Gate | None = None,
    ) -> None:
        self._trainer, self._module, self._backends = trainer, module, backends
        self._stand_down, self.recover, self._timed = stand_down, recover, gate
        trains = options.mode == "train"
        self._variant, model = given.variant if trains else None, trainer.strategy.model
        self._wrapper = model if isinstance(model, DistributedDataParallel) else None
        effects = [f"{name}.{effect}" for name in optimizers_of(trainer) for effect in _OPTIMIZERS_EFFECTS]
        self._given, self._wants_eager = given, False
        self._asks_eager = None if options.eager_if is None else options.asks_eager
        self._options = replace(
            options,
            warmup_steps=max(options.warmup_steps, needed_warmup(trainer.strategy)),
            allow=(*_OWN_EFFECTS, f"{WRAPPER}.{SYNC_FLAG}", *effects, *options.allow),
            eager_if=None if self._asks_eager is None else lambda *args: self._wants_eager,
        )
        may_read = self._asks_eager is not None or self._variant is not None
        names = ("batch_idx", f"{ARGUMENTS}.batch_idx")
        self._watches_index = not (may_read or any(is_allowed(name, options.allow) for name in names))
        self._arguments = Arguments(trainer)
        self.patches = Patches()
        # Sums are weighted by the batch's number of rows, which a program for padded batches does not know.
        self.logs = StepLogs(trainer, module, self.patches, sums_in_step=trains and not options.pads_rows)
        self._steps: list[GraphedStep] = []
        # Arguments of Lightning's loop that are not fed: the batch index, and all arguments after the batch.
        self._index, self._rest = 0, list[tuple[str, Any]]()
        self._optimizers = list(trainer.optimizers)
        self._note_hooks()
        self.notes: list[str] = []
        # Counts of calls of Lightning's own code in place of a graphed step.
        self._stock_stats = Stats()

    @abstractmethod
    def install(self) -> None:
        """Install the seam."""

    @abstractmethod
    def _stock(self, kwargs: OrderedDict[str, Any]) -> Any:
        """Run Lightning's own code, which the graphed step replaces, with the loop's arguments."""

    def _compile(self) -> None:
        """Under ``compile``, compile the module's children, and its ``forward`` unless a strategy wraps the module."""
        if self._options.compile is False:
            return
        parts: list[nn.Module] = [part for part in self._module.children() if any(True for _ in part.parameters())]
        if is_overridden("forward", self._module) and self._trainer.strategy.model is self._module:
            parts.append(self._module)
        compiled = CompiledModules(parts, self._options.compile)
        self.patches.callback(compiled.undo)
        self.notes += compiled.notes

    def remove(self) -> list[GraphedStep]:
        """Remove the seam, and close its steps, which restores the optimizers' flags. Return the steps that have stood
        down, which are still open: their optimizers keep their kernels until the end of the run.
        """
        self.patches.close()
        for step in self._steps:
            if not step.is_down:
                step.close()
        return [step for step in self._steps if step.is_down]

    def _owners(self, progress: dict[str, Any]) -> dict[str, Any]:
        """Return all owners of a step. ``progress`` are the counters of Lightning that the step advances."""
        wrapper = {} if self._wrapper is None else {WRAPPER: self._wrapper}
        owners: dict[str, Any] = {"model": self._module, **wrapper, **optimizers_of(self._trainer)}
        for name, part in progress.items():
            for count in ("total", "current"):
                owners[f"progress.{name}.{count}"] = OwnerByAttribute(getattr(part, count), "optim_progress")
        owners["logs"] = self.logs.totals
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            owners["scaler"] = scaler
        numbers = trainer_numbers(self._trainer, trains=self._options.mode == "train")
        if self._watches_index:
            numbers[ARGUMENTS] = CallNumbers(self._arguments, ("batch_idx", "epoch"))
        return owners | numbers | hooked_callbacks(self._trainer) | trainer_objects(self._trainer)

    def _make(self, owners: dict[str, Any], gate: Gate | None = None) -> GraphedStep:
        """Make a graphed step. ``gate``, or a copy of the gate that timed the fit's steps, times its replays."""
        if self._timed is not None:
            gate = self._timed.again()
        step = GraphedStep(self._body, owners, self._options, self._backends, find_peers(), gate=gate, is_alone=False)
        step.machine.refusals.escalates = self._escalates
        self._steps.append(step)
        return step

    @property
    def figures(self) -> Figures:
        """Counts of the fit so far, and notes for the report."""
        stats = Stats()
        for part in (*(step.stats for step in self._steps), self._stock_stats):
            stats.merge(part)
        facts = [fact for step in self._steps for fact in step.facts]
        return Figures(
            stats=stats,
            notes=[*dict.fromkeys((*facts, *self.notes))],
            plan=next((step.plan for step in reversed(self._steps) if step.plan is not None), None),
            part=self.part,
        )

    def describe_programs(self) -> list[dict[str, Any]]:
        """Return descriptions of the current programs."""
        return [describe_program(program) for step in self._steps for program in step.programs]

    def _escalates(self, error: RefusalError) -> bool:
        return self._options.on_failure == "raise" and not any(step.stats.replayed for step in self._steps)

    def _remove_if_down(self, step: GraphedStep) -> None:
        """After a call of ``step``, remove the seam if the step has stood down."""
        if step.down_because is not None:
            self._stand_down(*step.down_because)

    def _hooked(self) -> list[Any]:
        """Return the callbacks with hooks that Lightning calls inside the step."""
        return list(hooked_callbacks(self._trainer).values())

    def _note_hooks(self) -> None:
        """Note the hooks that Lightning calls inside the step, to find changes. The step's code does not name them."""
        callbacks, own = self._trainer.callbacks, vars(self._module)  # type: ignore[attr-defined]
        methods = [own.get(name) for name in self.called]
        self._hooks = [*self._hooked(), *methods]
        self._unchanged = Checks([
            ("same_attributes", [self._trainer], ["callbacks"], [callbacks]),
            ("same_values", [own] * len(methods), list(self.called), methods),
            *contents_of([callbacks]),
        ])  # fmt: skip

    def _replaced(self) -> str | None:
        """Return how the optimizers or hooks in the step changed, or None. Programs depend on the captured ones."""
        if self._trainer.optimizers != self._optimizers:
            return (
                "the Trainer got other optimizers in the middle of the run, but the programs use the captured ones. "
                "Keep the optimizer, and change its groups or load a state into it (optimizer.load_state_dict)"
            )
        if self._unchanged.hold():
            return None
        before = self._hooks
        self._note_hooks()
        has_begun = any(step.stats.traced for step in self._steps)
        if not has_begun or list(map(id, before)) == list(map(id, self._hooks)):
            return None
        return (
            "the hooks that Lightning calls inside the step changed in the middle of the run: a callback was added or "
            "removed, or a method of the module was replaced. Keep the hooks, and let them check a flag"
        )

    def _hooks_changed(self) -> bool:
        """Return True, and remove the seam, if the optimizers or hooks in the step are not those of the capture."""
        reason = self._replaced()
        if reason is None:
            return False
        error = RecaptureError(reason)
        if self._escalates(error):
            raise error
        warnings.warn(f"graphplan leaves the rest of the run to Lightning: {error}", UserWarning, stacklevel=4)
        self._stock_stats.count_stock(1, error.reason, str(error))
        self._stand_down(error.reason, str(error))
        return True

    def _on_device(self, kwargs: OrderedDict[str, Any]) -> OrderedDict[str, Any]:
        """Return the loop's arguments for Lightning's own code. Move the batch if graphed steps move it themselves."""
        if self._options.feed_device is not None:
            kwargs = OrderedDict(kwargs, batch=move_data_to_device(kwargs["batch"], self._options.feed_device))
        return kwargs

    @recovering(lambda self: False)
    def _start_logs(self) -> bool:
        self.logs.start()
        return True

    def _serve(self, step: GraphedStep, batch_idx: int, kwargs: OrderedDict[str, Any], *facts: Any) -> Any:
        """Run a batch through ``step``, and remove the seam if the step stands down."""
        result = self._through(step, batch_idx, kwargs, *facts)
        self._remove_if_down(step)
        return result

    def _through(self, step: GraphedStep, batch_idx: int, kwargs: OrderedDict[str, Any], *facts: Any) -> Any:
        """Run a batch through ``step``, and make its log calls. ``facts`` are literals that the step depends on."""
        self._index, self._rest = batch_idx, list(kwargs.items())[1:]
        self._arguments.batch_idx = batch_idx
        batch = kwargs["batch"]
        if self._asks_eager is not None:
            # ``eager_if`` gets the batch as the loop passes it, not as it is fed to the step.
            self._wants_eager = self._asks_eager(batch_idx + 1, (batch, batch_idx), {})
        if not self._start_logs():
            return self._stock(self._on_device(kwargs))
        known = _literals((*facts, getattr(self._wrapper, SYNC_FLAG, None)))
        if self._variant is not None:
            out = step(batch, known, self._variant_of(batch))
        else:
            out = step(batch, known)
        if out["keys"]:
            CallArguments((batch,), {}).watch().take((out[_PUT], out["keys"]))
        self._finish(out)
        return out["result"]

    def _variant_of(self, batch: Any) -> Any:
        """Return the user's ``variant`` of this batch, for steps whose control flow alternates."""
        given, module = self._variant, self._module
        found = getattr(module, given, None) if isinstance(given, str) else given
        if not callable(found):
            raise OptionError(
                f"variant is {given!r}, and {type(module).__name__} has no such method; expected one that takes "
                "(batch, batch_idx)"
            )
        return found(batch, self._index)

    def _finish(self, out: dict[str, Any]) -> None:
        """Finish a call, whether its Python ran or it was replayed: set DDP's flag, and make the log calls."""
        if out["note"] is not None:
            setattr(self._wrapper, SYNC_FLAG, out["note"])
        if out["logs"]:
            # No context manager, since this runs after each replay.
            try:
                self.logs.finish(out["logs"], out["grouped"], out["values"])
            except Exception as error:
                if refusal_of(error) is None:
                    raise
                raise lost(error, f"the step of {type(self._module).__name__}") from error

    def _body(self, batch: Any, *facts: Any) -> dict[str, Any]:
        """The function of a graphed step. Run Lightning's own code; return its result and its log calls."""
        # A replay cannot change the caller's containers. Changes of these copies are outputs, applied to the caller's.
        own = with_new_containers(batch)
        kwargs = OrderedDict([("batch", own), *self._rest])
        if "batch_idx" in kwargs:
            kwargs["batch_idx"] = self._arguments.batch_idx
        fed = CallArguments((own,), {}).watch()
        out = self.logs.around(lambda: self._stock(kwargs))
        put, keys = fed.changes()
        return {**out, _PUT: put, "keys": keys, "note": getattr(self._wrapper, SYNC_FLAG, None)}

    _body.__qualname__ = NAME
