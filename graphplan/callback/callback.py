"""The Lightning callback: ``Trainer(callbacks=[GraphPlanCallback()])`` replays training steps."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from graphplan.callback.callback_options import CallbackOptions
from graphplan.callback.evaluation import EvaluationSeam
from graphplan.callback.fit_patches import LaggingSigterm, allow_fused_clipping
from graphplan.callback.gates import capture_obstacle, keeps_stock_transfer, loop_obstacle, training_obstacle
from graphplan.callback.logging.bars import ThrottledBar
from graphplan.callback.logging.connector import defer_numbers
from graphplan.callback.loop.optimization import AutomaticSeam, ManualSeam
from graphplan.callback.loop.seam import Seam
from graphplan.callback.loop.training_loop import LoopSeam
from graphplan.callback.patches import Patches
from graphplan.callback.stock_batches import StockBatches
from graphplan.environment.lightnings import blank_callback, callback_class, name_of
from graphplan.environment.origin import leave_out_own_frames
from graphplan.errors import FaultError, GraphPlanError, NotCapturedError, OptionError, SkipReason
from graphplan.plan.plan import Plan
from graphplan.program.faults import refusal_of, refusing
from graphplan.report.figures import CLOSED, Figures
from graphplan.report.rendering import check_format, report_of_runs
from graphplan.report.stats import Stats
from graphplan.specs.options import takes, with_arguments
from graphplan.step.gate import Gate
from graphplan.step.peers import find_peers
from graphplan.step.runner import Backends

_TRAINING, _EVALUATION = "training", "evaluation"
_RUN_OF = {_TRAINING: "fit", _EVALUATION: "evaluation"}  # What messages call a run of each part.
_STEP_ENDS = "on_train_batch_end"
_RUNS = 16  # Maximum number of earlier runs in a report.
_LIGHTNINGS_OWN = ("log", "log_dict")  # Lightning sets these methods of the module on every callback.


class GraphPlanCallback(Callback):
    """A callback that replays a Trainer's training steps, optimizer included, with the numbers of a run without it.

    Examples:
        >>> import torch
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from torch.utils.data import DataLoader
        >>> from graphplan import GraphPlanCallback
        >>> class Regression(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(4, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> callback = GraphPlanCallback()
        >>> trainer = Trainer(
        ...     max_epochs=1, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False,
        ...     enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> trainer.fit(Regression(), DataLoader(torch.randn(80, 4), batch_size=8))
        >>> callback.stats.eager, callback.stats.traced, callback.stats.captured, callback.stats.replayed
        (3, 1, 1, 5)

    Raises:
        OptionError: if an option has an invalid value, or if a Trainer has two of these callbacks.
        PolicyError: if a mode, role or policy does not exist.
        BackendError: if a backend does not exist.
    """

    is_graphplan = True
    """Identifies this class. Each of the two Lightning packages has its own ``GraphPlanCallback`` class."""

    @takes(CallbackOptions)
    def __init__(self, given: CallbackOptions) -> None:
        super().__init__()
        self._given, self.options = given, given.of_step()
        self._seams: dict[str, Seam] = {}
        self._figures: dict[str, Figures] = {}
        self._earlier: deque[tuple[str, Figures]] = deque(maxlen=_RUNS)
        self._backends = Backends()
        self._fit_patches = Patches()  # Undone at the end of a fit, even if its seam is removed earlier.
        self._stock = StockBatches()
        self._gate: Gate | None = None

    def _figures_of(self, part: str, *, describes: bool = False) -> Figures:
        """Return the figures of training or evaluation in the current or last run, with programs if ``describes``."""
        seam = self._seams.get(part)
        figures = seam.figures if seam is not None else self._figures.get(part, Figures())
        if seam is not None and describes:
            figures = replace(figures, programs=seam.describe_programs())
        return figures if part != _TRAINING else replace(figures, stats=self._stock.added_to(figures.stats))

    @property
    def stats(self) -> Stats:
        """Counts of the training steps of the current fit, or of the last one."""
        return self._figures_of(_TRAINING).stats

    @property
    def eval_stats(self) -> Stats:
        """Counts of the validation, test and prediction steps of the current run, or of the last one."""
        return self._figures_of(_EVALUATION).stats

    @property
    def plan(self) -> Plan | None:
        """The latest plan of a training step in the current fit, or in the last one."""
        return self._figures_of(_TRAINING).plan

    @property
    def notes(self) -> list[str]:
        """Notes of the report on the training steps of the current fit, or of the last one."""
        return list(self._figures_of(_TRAINING).notes)

    def report(self, format: str = "text") -> str:
        """Report on the steps of all fits and evaluations so far.

        Args:
            format: ``"text"``, ``"json"``, or ``"html"`` for a page that needs no other file.

        Raises:
            OptionError: for another format, or if a library that draws pages is not installed (``graphplan[plot]``).
        """
        check_format(format)
        training, evaluation = (self._figures_of(part, describes=format != "text") for part in (_TRAINING, _EVALUATION))
        runs = [*self._earlier, (_TRAINING, training)]
        return report_of_runs([*runs, (_EVALUATION, evaluation)] if evaluation.stats.calls else runs, format)

    def _begin_figures(self, part: str) -> None:
        """Keep the figures of the previous run for the report, and start new ones."""
        figures = self._figures_of(part)
        if figures.stats.calls:
            self._earlier.append((part, replace(figures, plan=None)))
        self._figures[part] = Figures()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a second GraphPlanCallback: both would replace the same loop.

        Raises:
            OptionError: if the Trainer has another GraphPlanCallback.
        """
        name = name_of(trainer)
        if type(self) is GraphPlanCallback and GraphPlanCallback is not callback_class(name):
            # The Trainer belongs to the other Lightning package, so this object takes that package's class.
            self.__class__ = callback_class(name)
            self.__init__(**vars(self._given))  # type: ignore[misc]
            self.setup(trainer, pl_module, stage)
            return
        callbacks: list[Any] = vars(trainer)["callbacks"]
        every = [index for index, each in enumerate(callbacks) if hasattr(type(each), "is_graphplan")]
        if len(every) > 1:
            names = " and ".join(f"callbacks[{index}]" for index in every)
            raise OptionError(
                f"the Trainer has {len(every)} GraphPlanCallbacks ({names}); expected one, which serves training, and "
                "with eval=True validation, test and prediction too. Leave out the others"
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the seam. This is the first hook after Lightning has restored optimizer state."""
        self._begin_figures(_TRAINING)
        with self._refusing(_TRAINING):
            self._start_training(trainer, pl_module)

    def _start_training(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stock = StockBatches(trainer)
        is_eager = self.options.backend == "eager"
        both = self._given.captures_optimizer
        reason = None if is_eager else training_obstacle(trainer, pl_module, captures_optimizer=both)
        if reason is not None:
            self._refuse(_TRAINING, reason)
            return
        LaggingSigterm(trainer, self._fit_patches)
        allow_fused_clipping(trainer, self._fit_patches)
        period = trainer.accumulate_grad_batches
        gate = Gate.of(self.options, trainer.strategy.root_device, period=period, peers=find_peers())
        if is_eager:
            self._stock.begin(SkipReason.BACKEND_EAGER)
        elif gate is not None:
            self._time_eager_steps(gate)
        else:
            self._install_training(trainer, pl_module)

    def _time_eager_steps(self, gate: Gate) -> None:
        """Time steps of Lightning's own loop. Only one hook of this callback runs in it."""
        self._gate = gate
        self._stock.begin(None)
        vars(self)[_STEP_ENDS] = self._end_eager_step

    def _end_eager_step(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        gate = self._gate
        assert gate is not None
        if not gate.end_eager():
            return
        assert gate.eager is not None
        del vars(self)[_STEP_ENDS]
        self._stock.end()
        self._figures[_TRAINING].stats.measured["eager"] = gate.eager
        if gate.is_busy and self.options.may_stay_eager:
            self._stock.begin(SkipReason.BUSY)
        else:
            with self._refusing(_TRAINING):
                self._install_training(trainer, pl_module, gate)

    def _install_training(self, trainer: Trainer, pl_module: LightningModule, gate: Gate | None = None) -> None:
        """Install the seam and all patches that belong to it."""
        given = self._given
        reason = loop_obstacle(trainer, pl_module) if given.loop == "auto" else "loop='stock'"
        # The step copies batches to the device itself, unless a hook, eager_if or variant needs them there earlier.
        asks = given.eager_if is not None or given.variant is not None
        may = reason is None and not asks and given.transfer == "auto"
        direct = may and keeps_stock_transfer(trainer, pl_module) is None
        options = replace(self.options, device=trainer.strategy.root_device) if direct else self.options
        kind = AutomaticSeam if pl_module.automatic_optimization else ManualSeam
        ways_out = partial(self._stand_down, _TRAINING), partial(self._recover, _TRAINING)
        seam = self._seams[_TRAINING] = kind(trainer, pl_module, options, given, self._backends, *ways_out, gate)
        defer_numbers(trainer, seam.recover, seam.patches)
        ThrottledBar(trainer, seam.patches)
        seam.install()
        if self.options.prefetch and not direct:
            seam.notes.append("prefetch has no effect: replays do not copy batches from host memory to a device")
        if reason is not None:
            seam.notes.append(f"Lightning's own loop: {reason}")
        else:
            LoopSeam(trainer, pl_module, seam.recover, seam.patches, direct=direct)

    def _recover(self, part: str, error: Exception) -> None:
        """Remove graphplan from the running fit after an internal error; the caller then runs Lightning's code.

        Raise the error if it is not graphplan's, and under ``on_failure="raise"``.
        """
        refusal = refusal_of(error)
        if refusal is None:
            raise error
        if self.options.on_failure == "raise":
            refusal.is_raised = True
            raise refusal
        self._stand_down(part, refusal.reason, str(refusal))
        warnings.warn(f"graphplan runs this {_RUN_OF[part]} eagerly: {refusal}", UserWarning, stacklevel=2)

    def _stand_down(self, part: str, reason: SkipReason, detail: str) -> None:
        """Remove graphplan from the running fit and keep the figures. The fit continues in Lightning's own loop."""
        if part in self._seams:
            self._remove_part(part)
            self._figures[part].notes.append(
                f"graphplan removed itself: the rest of the {_RUN_OF[part]} ran without it"
            )
            if part == _TRAINING:
                self._stock.begin(reason, detail)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the evaluation seam, unless it is installed."""
        if not self._given.eval or _EVALUATION in self._seams or self.options.backend == "eager":
            return
        self._begin_figures(_EVALUATION)
        with self._refusing(_EVALUATION):
            reason = capture_obstacle(trainer)
            if reason is not None:
                self._refuse(_EVALUATION, reason)
                return
            options = self._given.of_evaluation()
            ways_out = partial(self._stand_down, _EVALUATION), partial(self._recover, _EVALUATION)
            seam = EvaluationSeam(trainer, pl_module, options, self._given, self._backends, *ways_out)
            self._seams[_EVALUATION] = seam
            seam.install()

    on_test_start = on_predict_start = on_validation_start

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the seam at the end of a run that only evaluates. A fit keeps it for the next validation."""
        if trainer.state.fn != TrainerFn.FITTING and _EVALUATION in self._seams:
            self._remove()
            rank_zero_info(self._figures_of(_EVALUATION).headline())

    on_test_end = on_predict_end = on_validation_end

    @contextmanager
    def _refusing(self, part: str) -> Iterator[None]:
        """If the block fails, remove graphplan from the run and refuse it."""
        try:
            with refusing():
                yield
        except FaultError as refusal:
            self._remove()
            if self.options.on_failure == "raise":
                raise
            self._refuse(part, str(refusal))

    def _refuse(self, part: str, reason: str) -> None:
        text = f"{CLOSED}: {reason}"
        if self.options.on_failure == "raise":
            raise NotCapturedError(f"{text}, or pass on_failure='eager'")
        self._figures[part].notes.append(text)
        warnings.warn(f"graphplan runs this {_RUN_OF[part]} eagerly: {text}", UserWarning, stacklevel=2)

    def _remove(self) -> None:
        """Remove the seams and keep their figures."""
        self._remove_part(_TRAINING)
        self._remove_part(_EVALUATION)
        self._fit_patches.close()
        vars(self).pop(_STEP_ENDS, None)
        if self._gate is not None:
            self._gate.cancel()
        self._gate = None
        self._stock.end()
        self._backends = Backends()

    def _remove_part(self, part: str) -> None:
        """Remove one seam and its patches, and keep its figures."""
        seam = self._seams.pop(part, None)
        if seam is not None:
            programs = seam.describe_programs()
            for step in seam.remove():
                self._fit_patches.callback(step.close)
            self._figures[part] = replace(seam.figures, programs=programs)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the share of replayed steps, the recaptures and the time of a replayed step, if ``log`` is set."""
        if self._given.log:
            stats = self.stats
            values = {"replayed_share": stats.replayed / max(1, stats.calls), "recaptures": float(stats.recaptured)}
            replayed = stats.step_us("replayed")
            if replayed is not None:
                values["step_us"] = replayed
            for logger in trainer.loggers:
                named = {f"graphplan/{name}": value for name, value in values.items()}
                logger.log_metrics(named, step=trainer.global_step)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the seams and print a one-line summary."""
        trained = _TRAINING in self._seams or self._stock.count
        self._remove()
        if trained:
            rank_zero_info(self._figures_of(_TRAINING).headline())

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the seams: Lightning calls no other hook after a failure. Remove graphplan's frames from the error."""
        self._remove()
        leave_out_own_frames(exception.__traceback__, is_refusal=isinstance(exception, GraphPlanError))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the seams if no other hook has."""
        self._remove()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is not GraphPlanCallback:
            return super().__reduce_ex__(protocol)
        # Another process can import the class for ``pytorch_lightning`` only through this function.
        return blank_callback, (name_of(self),), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes and figures, without the seams and other references to the Trainer or the module."""
        state = {name: value for name, value in vars(self).items() if name not in (*_LIGHTNINGS_OWN, _STEP_ENDS)}
        figures = {part: replace(self._figures_of(part), plan=None) for part in (_TRAINING, _EVALUATION)}
        fresh = {"_seams": {}, "_backends": Backends(), "_fit_patches": Patches(), "_gate": None}
        return {**state, **fresh, "_figures": figures, "_stock": StockBatches()}


GraphPlanCallback.__doc__ = with_arguments(GraphPlanCallback.__doc__ or "", CallbackOptions)
