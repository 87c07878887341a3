"""The callback's own options, validated once."""

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
    """Return the parts of a step to capture, if possible."""
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
    """Options of :class:`graphplan.GraphPlanCallback`.

    Args:
        mode: the policy of training: ``"auto"`` or ``"train"``, which mean the same.
        policies: a policy for each mode name, or its two role lists:
            ``{"train": {"static_roles": [...], "copy_roles": [...]}}``.
        variant: for a step whose control flow alternates (a critic's batch, a generator's batch): a function of
            ``(batch, batch_idx)``, or the name of such a method of the module. It returns a literal or a tuple of
            literals that names the path of the step. Each returned value has its own program.
        eval: whether to replay validation, test and prediction steps too, in a fit and in ``Trainer.validate``,
            ``test`` and ``predict``. They use the inference policy. By default state is static as well, because
            metrics that a step updates are state.
        transfer: ``"auto"``: replays copy batches from host memory if only the step reads them; ``"stock"``: never.
        loop: ``"auto"``: skip the work around each step that the run does not use; ``"stock"``: run Lightning's loop.
        components: ``"auto"``: capture the whole step, or forward and backward alone if the optimizer cannot be
            captured. Or exactly these parts: ``("forward_backward",)`` or ``("forward_backward", "optimizer")``.
        log: whether the Trainer's loggers get the share of replayed steps, the microseconds of a replayed step and the
            number of recaptures at the end of each epoch, as ``graphplan/replayed_share``, ``graphplan/step_us`` and
            ``graphplan/recaptures``.

    Raises:
        OptionError, PolicyError, BackendError: for invalid values.
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
        """Whether to capture the optimizer with the rest of the step, if possible."""
        return _SIDES[1] in _sides_of(self.components)

    def of_step(self) -> Options:
        """Return the options of a training step."""
        return Options(**{**self.shared(), "mode": "train", "policy": self.policy_of("train")})

    def of_evaluation(self) -> Options:
        """Return the options of validation, test and prediction steps."""
        # Metrics that a step updates are state, so state is static as well.
        policy = self.policy_of("inference") or Policy("inference", static_roles=tuple(Role))
        given = {**self.shared(), "mode": "inference", "policy": policy, "eager_if": None, "shapes": "exact"}
        return Options(**{**given, "buckets": None})

    def policy_of(self, mode: str) -> Policy | None:
        """Return the policy that the user gave for a mode, or None."""
        return parse_policies(self.policies or {}).get(mode)
