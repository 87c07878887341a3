"""Validation, test and prediction steps, each a graphed step of its own under the inference policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from graphplan.callback.gates import members_of
from graphplan.callback.renewing import RenewingSeam
from graphplan.callback.variants import Variant
from graphplan.native.comparing import Checks
from graphplan.policy import Policy
from graphplan.roles import Role
from graphplan.step import Backends, GraphedStep, Options

_HOOKS = ("validation_step", "test_step", "predict_step")
_ARGUMENTS = ("batch", "batch_idx", "dataloader_idx")
METRICS_TOO = Policy("inference", static_roles=tuple(Role))
"""The inference policy, and state static as well: metrics that a step updates are state."""


class EvaluationSeam(RenewingSeam):
    """The seam of the strategy's evaluation steps. It stays for the whole of a run, from one validation to the next."""

    def __init__(self, trainer: Trainer, module: LightningModule, options: Options, backends: Backends) -> None:
        policy = options.policy or METRICS_TOO
        options = replace(options, mode="inference", policy=policy, eager_if=None, paced=False)
        super().__init__(trainer, module, options, Variant(None), backends)
        self._strategy: Any = trainer.strategy

    def install(self) -> None:
        """Put the seam in."""
        for hook in _HOOKS:
            self._put(self._strategy, hook, partial(self._run, hook))
        self._begin()

    @override
    def _begin(self) -> None:
        self._by_hook: dict[str, GraphedStep] = {}
        self._are_same: Callable[[], bool] = Checks(members_of(self._strategy, "_optimizers")).hold

    @override
    def _end(self) -> None:
        self._by_hook = {}

    def _run(self, hook: str, *args: Any) -> Any:
        """In place of the strategy's method of that name."""
        if not args or isinstance(args[0], Iterator):
            # The step takes batches from the loader itself.
            return self._stock(hook, *args)
        if not self._are_same():
            self._renew()
        kwargs = OrderedDict(zip(_ARGUMENTS, args, strict=False))
        self._context = (None, kwargs.get("batch_idx", 0), kwargs)
        if hook not in self._by_hook:
            step = self._by_hook[hook] = self._make(partial(self._body, hook), self._owners({}))
            step.decide_refusals(lambda error: self._must_raise())
        return self._through(self._by_hook[hook], (kwargs.get("dataloader_idx"), self._trainer.sanity_checking))

    def _stock(self, hook: str, *args: Any) -> Any:
        return getattr(type(self._strategy), hook)(self._strategy, *args)

    def _body(self, hook: str, batch: Any, *facts: Any) -> dict[str, Any]:
        return self._in_step(lambda kwargs: self._stock(hook, *kwargs.values()), batch)
