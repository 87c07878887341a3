"""Arguments of the callback that are its own, checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphplan.errors import OptionError, PolicyError
from graphplan.specs.policy import Policy, parse_policies
from graphplan.step.options import Options, TrainingOptions

_SIDES = ("forward_backward", "optimizer")
VariantOf = Callable[[Any, int], Any] | str | None


@dataclass(frozen=True)
class Components:
    """Which sides of a step are captured. ``falls_back``: forward and backward alone, if the optimizer cannot be."""

    optimizer: bool = True
    falls_back: bool = True

    @classmethod
    def parse(cls, value: str | Sequence[str]) -> Components:
        """From what the callback was given.

        Raises:
            OptionError: for other sides, or without forward and backward.
        """
        if isinstance(value, str) and value == "auto":
            return cls()
        sides = (value,) if isinstance(value, str) or not isinstance(value, Sequence) else tuple(value)
        if _SIDES[0] not in sides or any(side not in _SIDES for side in sides):
            raise OptionError(
                f"components is {value!r}; expected 'auto', or what is to be captured: ('forward_backward',) or "
                "('forward_backward', 'optimizer')"
            )
        return cls(_SIDES[1] in sides, falls_back=False)


@dataclass(frozen=True, kw_only=True)
class CallbackOptions(TrainingOptions):
    """What :class:`graphplan.GraphPlanCallback` takes.

    Args:
        mode: ``"auto"`` or ``"train"``: which policy training uses.
        policies: policy by mode name, or its two role lists:
            ``{"train": {"static_roles": [...], "copy_roles": [...]}}``.
        variant: for a step whose control flow alternates (a critic's batch, a generator's batch): a function of
            ``(batch, batch_idx)``, or the name of such a method of the module, whose answer, a literal or a tuple of
            literals, says which way the step goes. Each answer has a program of its own.
        eval: whether validation, test and prediction steps are replayed too, in a fit and in ``Trainer.validate``,
            ``test`` and ``predict``. They follow the inference policy, by default with state static as well, since
            metrics that a step updates are state.
        transfer: ``"auto"``: replays copy batches in from host memory where nothing else has them; ``"stock"``: never.
        loop: ``"auto"``: what Lightning does around each step is left out where it is not used; ``"stock"``: never.
        components: ``"auto"``: the whole step; forward and backward alone where the optimizer cannot be captured. Or
            what to capture, whatever could be: ``("forward_backward",)`` or ``("forward_backward", "optimizer")``.
        log: whether the share of steps that were replayed, the microseconds of a replayed step and the number of
            recaptures go to the Trainer's loggers at the end of each epoch, as ``graphplan/replayed_share``,
            ``graphplan/step_us`` and ``graphplan/recaptures``.

    Raises:
        OptionError, PolicyError, BackendError: for values that make no sense.
    """

    mode: str = "auto"
    policies: Mapping[str, Any] | None = None
    variant: VariantOf = None
    eval: bool = False
    transfer: str = "auto"
    loop: str = "auto"
    components: str | Sequence[str] = "auto"
    log: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "train"):
            raise PolicyError(f"mode is {self.mode!r}; expected 'auto' or 'train'")
        for name in ("eval", "log"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} is {getattr(self, name)!r}; expected True or False")
        if not (self.variant is None or callable(self.variant) or isinstance(self.variant, str)):
            raise OptionError(
                f"variant is {self.variant!r}; expected a function of (batch, batch_idx) or the name of a method of "
                "the module"
            )
        for name in ("loop", "transfer"):
            if getattr(self, name) not in ("auto", "stock"):
                raise OptionError(f"{name} is {getattr(self, name)!r}; expected 'auto' or 'stock'")
        Components.parse(self.components)

    @property
    def sides(self) -> Components:
        """What is captured of a step."""
        return Components.parse(self.components)

    def of_step(self) -> Options:
        """The options of a training step."""
        return Options(**{**self.shared(), "mode": "train", "policy": self.policy_of("train")})

    def policy_of(self, mode: str) -> Policy | None:
        """The policy that was given for a mode."""
        return parse_policies(self.policies or {}).get(mode)
