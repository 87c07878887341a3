"""``Trainer(callbacks=[GraphPlanCallback()])``: every steady training step becomes one replay."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from graphplan.callback.automatic import AutomaticSeam
from graphplan.callback.gates import closed_gate
from graphplan.callback.manual import ManualSeam
from graphplan.callback.seam import Seam
from graphplan.callback.variants import Variant, VariantOf
from graphplan.errors import NotCapturedError, PolicyError
from graphplan.plan import Plan
from graphplan.policy import MODES, Policy
from graphplan.report import describe, summary
from graphplan.stats import Stats
from graphplan.step import Options

_LIGHTNINGS_OWN = ("log", "log_dict")
"""Methods of the module that Lightning sets on every callback."""


class GraphPlanCallback(Callback):
    """Replays a Trainer's training steps, optimizer included, with the numbers of the same run without it.

    Example:
        >>> trainer = Trainer(callbacks=[GraphPlanCallback()])

    Args:
        mode: ``"auto"`` or ``"train"``: which policy training uses.
        backend: ``"auto"`` (a CUDA graph on CUDA, the tape on the CPU), ``"cudagraph"``, ``"tape"`` or ``"eager"``.
        policies: policy by mode name, or its two role lists:
            ``{"train": {"static_roles": [...], "copy_roles": [...]}}``.
        warmup_steps: eager steps per batch signature before it is traced; at least 1.
        on_failure: ``"raise"``: a step that cannot be captured raises, unless a replay has already succeeded;
            ``"eager"``: it runs eagerly, with one warning.
        allow: paths of Python effects that replays may leave out, such as ``"model.calls"``.
        eager_if: ``(batch, batch_idx) -> bool``, or n for every n-th batch of an epoch: these steps run as Python.
        prepare_optimizers: whether the optimizer may be made capturable; what was changed is in the report, is put back
            after the fit, and is not in checkpoints.
        verify: which replays of a program are checked against the eager step: ``"geometric"`` (1, 2, 4, 8, … and then
            every 1000th), n for every n-th, or ``"off"``. A checked batch is also trained on eagerly, from the same
            state, and eager's outcome stands; that needs room for copies of parameters and state meanwhile.
        max_graphs: how many programs are kept.
        max_recaptures: how many captures in a row may come to fewer than 16 replays each before the step is refused.
        debug: wait for the device after each capture and each first replay, and name the program in its errors; where
            torch can, also check before each replay that the memory that the recording reads was not freed.
        debug_eager: train eagerly where a program would be replayed, on the program's own inputs: tells a fault of the
            recording from one of everything around it. Nothing is replayed, and so nothing is checked.
        variant: for a step whose control flow alternates (a critic's batch, a generator's batch): a function of
            ``(batch, batch_idx)``, or the name of such a method of the module, whose answer, a literal or a tuple of
            literals, says which way the step goes. Each answer has a program of its own.

    Raises:
        OptionError, PolicyError, BackendError: for arguments that make no sense.
    """

    def __init__(
        self,
        mode: str = "auto",
        backend: str = "auto",
        policies: Mapping[str, Any] | None = None,
        warmup_steps: int = 3,
        on_failure: str = "raise",
        allow: Sequence[str] = (),
        eager_if: Callable[[Any, int], bool] | int | None = None,
        prepare_optimizers: bool = True,
        verify: str | int | None = "geometric",
        max_graphs: int = 16,
        max_recaptures: int = 16,
        debug: bool = False,
        debug_eager: bool = False,
        variant: VariantOf = None,
    ) -> None:
        super().__init__()
        if mode not in ("auto", "train"):
            raise PolicyError(f"mode is {mode!r}; expected 'auto' or 'train'")
        unknown = sorted(set(policies or {}) - set(MODES))
        if unknown:
            raise PolicyError(f"policies has the mode {unknown[0]!r}; choose from: {', '.join(MODES)}")
        parsed = {name: Policy.parse(name, value) for name, value in (policies or {}).items()}
        self.options = Options(
            policy=parsed.get("train"),
            backend=backend,
            warmup_steps=warmup_steps,
            on_failure=on_failure,
            allow=allow,
            eager_if=eager_if,
            prepare_optimizers=prepare_optimizers,
            verify=verify,
            max_graphs=max_graphs,
            max_recaptures=max_recaptures,
            debug=debug,
            debug_eager=debug_eager,
        )
        self.variant = Variant(variant)
        self._seam: Seam | None = None
        self._stats = Stats()
        self._plans = 0
        self._notes: list[str] = []
        self._plan: Plan | None = None

    @property
    def stats(self) -> Stats:
        """Counts of the current fit, or of the last one."""
        return self._seam.stats if self._seam is not None else self._stats

    @property
    def plan(self) -> Plan | None:
        """The latest plan of the current fit, or of the last one."""
        return self._seam.plan if self._seam is not None else self._plan

    def report(self) -> str:
        """What happened to the fit's steps, as text."""
        plans = self._seam.plans if self._seam is not None else self._plans
        notes = self._seam.report_notes() if self._seam is not None else self._notes
        return describe(self.stats, plans=plans, notes=notes)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the seam: the first hook at which restored optimizer state is in place."""
        self._stats, self._plans, self._notes = Stats(), 0, []
        reason = closed_gate(trainer, pl_module) if self.options.backend != "eager" else None
        if reason is not None:
            self._refuse(reason)
            return
        kind = AutomaticSeam if pl_module.automatic_optimization else ManualSeam
        self._seam = kind(trainer, pl_module, self.options, self.variant)
        self._seam.install()

    def _refuse(self, reason: str) -> None:
        text = f"no step of this fit can be captured: {reason}"
        if self.options.on_failure == "raise":
            raise NotCapturedError(f"{text}, or pass on_failure='eager'")
        self._notes.append(text)
        warnings.warn(f"graphplan runs this fit eagerly: {text}", UserWarning, stacklevel=2)

    def _remove(self) -> None:
        """Take the seam off and keep its figures."""
        seam, self._seam = self._seam, None
        if seam is not None:
            seam.remove()
            vars(self).update(_figures(seam), _plan=seam.plan)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the seam and say in one line what it did."""
        had_seam = self._seam is not None
        self._remove()
        if had_seam:
            rank_zero_info(self._last_line())

    def _last_line(self) -> str:
        stats = self._stats
        if self.options.backend == "eager":
            return f"graphplan: {stats.eager} steps, all eager: backend='eager'"
        if stats.captured == 0:
            return (
                f"graphplan: no step was captured in {stats.calls} steps; the first capture comes with step "
                f"{self.options.warmup_steps + 3} of one batch signature"
            )
        return summary(stats, plans=self._plans)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the seam: Lightning calls nothing else after a failure."""
        self._remove()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the seam if nothing else did."""
        self._remove()

    def __getstate__(self) -> dict[str, Any]:
        """With the figures of a running fit, but without the seam and what else leads to the Trainer or the module."""
        state = {name: value for name, value in vars(self).items() if name not in _LIGHTNINGS_OWN}
        figures = _figures(self._seam) if self._seam is not None else {}
        return {**state, **figures, "_seam": None, "_plan": None}


def _figures(seam: Seam) -> dict[str, Any]:
    """What a callback keeps of a seam."""
    return {"_stats": seam.stats, "_plans": seam.plans, "_notes": seam.report_notes()}
