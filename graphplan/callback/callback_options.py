"""Arguments of the callback that are its own, checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphplan.errors import PolicyError
from graphplan.specs.options import Checks, check_values, is_bool
from graphplan.specs.policy import Policy, parse_policies
from graphplan.specs.roles import Role
from graphplan.step.options import Options, TrainingOptions

VariantOf = Callable[[Any, int], Any] | str | None
_SIDES = ("forward_backward", "optimizer")


def _sides_of(components: Any) -> tuple[Any, ...]:
    """The parts of a step that are captured, if they can be."""
    if isinstance(components, str):
        return _SIDES if components == "auto" else (components,)
    return tuple(components) if isinstance(components, Sequence) else (components,)


def _are_sides(components: Any) -> bool:
    sides = _sides_of(components)
    return _SIDES[0] in sides and all(side in _SIDES for side in sides)


_CHECKS: Checks = (
    *((name, is_bool, "True or False") for name in ("eval", "log")),
    ("variant", lambda value: value is None or callable(value) or isinstance(value, str),
     "a function of (batch, batch_idx) or the name of a method of the module"),
    *((name, lambda value: value in ("auto", "stock"), "'auto' or 'stock'") for name in ("loop", "transfer")),
    ("components", _are_sides,
     "'auto', or what is to be captured: ('forward_backward',) or ('forward_backward', 'optimizer')"),
)  # fmt: skip


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
        check_values(self, _CHECKS)

    @property
    def captures_optimizer(self) -> bool:
        """Whether the optimizer is captured with the rest of the step, if it can be."""
        return _SIDES[1] in _sides_of(self.components)

    def of_step(self) -> Options:
        """The options of a training step."""
        return Options(**{**self.shared(), "mode": "train", "policy": self.policy_of("train")})

    def of_evaluation(self) -> Options:
        """The options of validation, test and prediction steps."""
        # State is static as well: metrics that a step updates are state.
        policy = self.policy_of("inference") or Policy("inference", static_roles=tuple(Role))
        given = {**self.shared(), "mode": "inference", "policy": policy, "eager_if": None, "shapes": "exact"}
        return Options(**{**given, "buckets": None})

    def policy_of(self, mode: str) -> Policy | None:
        """The policy that was given for a mode."""
        return parse_policies(self.policies or {}).get(mode)
