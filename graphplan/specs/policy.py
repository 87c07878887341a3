"""Policies: which roles have fixed addresses, and which of these are copied in from the feed, per mode.

| mode        | static_roles        | copy_roles |
|-------------|---------------------|------------|
| `inference` | input, param        | input      |
| `train`     | input, param, state | input      |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from graphplan.errors import PolicyError
from graphplan.specs.roles import Role

MODES = ("train", "inference")


def _parse_roles(roles: Iterable[Role | str], field: str) -> tuple[Role, ...]:
    if isinstance(roles, str):
        raise PolicyError(f"{field} must be a list of roles, found the string {roles!r}; write [{roles!r}]")
    names = [role.value if isinstance(role, Role) else role for role in roles]
    choices = [role.value for role in Role]
    for name in names:
        if name not in choices:
            raise PolicyError(f"no role is called {name!r}; choose from: {', '.join(choices)}")
    return tuple(role for role in Role if role.value in names)


def check_mode(mode: str) -> str:
    """Return ``mode``. Raises PolicyError if it is not one of :data:`MODES`."""
    if mode not in MODES:
        raise PolicyError(f"no mode is called {mode!r}; choose from: {', '.join(MODES)}")
    return mode


@dataclass(frozen=True, init=False)
class Policy:
    """Roles with fixed addresses (``static_roles``), and those of them that each replay copies in (``copy_roles``).

    If a static role is not copied, the program uses the tensors' own storages and guards their addresses: a fed tensor
    at another address than in the capture is not replayed. If it is copied, the program has buffers for it. An external
    whose role is in neither list is refused before capture.

    Examples:
        >>> from graphplan import Policy
        >>> Policy.inference() == Policy("inference", static_roles=["input", "param"])
        True
        >>> [str(role) for role in Policy.train().static_roles]
        ['input', 'param', 'state']

    Args:
        mode: ``"train"`` or ``"inference"``.
        static_roles: ``"input"``, ``"param"``, ``"state"``, or some of them.
        copy_roles: those of ``static_roles`` that are copied in.

    Raises:
        PolicyError: for an unknown mode or role, or a copied role that is not static.
    """

    mode: str
    static_roles: tuple[Role, ...]
    copy_roles: tuple[Role, ...]

    def __init__(
        self, mode: str, *, static_roles: Iterable[Role | str], copy_roles: Iterable[Role | str] = ("input",)
    ) -> None:
        static = _parse_roles(static_roles, "static_roles")
        copied = _parse_roles(copy_roles, "copy_roles")
        loose = [str(role) for role in copied if role not in static]
        if loose:
            raise PolicyError(
                f"copy_roles has {', '.join(loose)}, which static_roles lacks: a role is copied into a fixed buffer, "
                f"so add it to static_roles={[str(r) for r in static]}"
            )
        object.__setattr__(self, "mode", check_mode(mode))
        object.__setattr__(self, "static_roles", static)
        object.__setattr__(self, "copy_roles", copied)

    @classmethod
    def train(cls) -> Policy:
        """Return the policy for training: all roles are static, and only the batch is copied in."""
        return cls("train", static_roles=tuple(Role), copy_roles=(Role.INPUT,))

    @classmethod
    def inference(cls) -> Policy:
        """Return the policy for inference: inputs and parameters are static. Steps with state are refused."""
        return cls("inference", static_roles=(Role.INPUT, Role.PARAM), copy_roles=(Role.INPUT,))

    @classmethod
    def of_mode(cls, mode: str) -> Policy:
        """Return the default policy of ``mode``."""
        return cls.train() if check_mode(mode) == "train" else cls.inference()

    @classmethod
    def parse(cls, mode: str, value: Policy | Mapping[str, Any] | None) -> Policy:
        """Return the policy for a configuration value: None, a policy, or role lists. Raises PolicyError for others."""
        if value is None:
            return cls.of_mode(mode)
        if isinstance(value, Policy):
            return value
        if not isinstance(value, Mapping):
            raise PolicyError(f"policy of mode {mode!r}: expected a Policy or its role lists, found {value!r}")
        unknown = set(value) - {"static_roles", "copy_roles"}
        if unknown or "static_roles" not in value:
            raise PolicyError(
                f"policy of mode {mode!r} has the keys {sorted(value)}; expected static_roles and copy_roles"
            )
        return cls(mode, static_roles=value["static_roles"], copy_roles=value.get("copy_roles", ("input",)))


def parse_policies(policies: Mapping[str, Any]) -> dict[str, Policy]:
    """Return policies by mode, given as policies or role lists. Raises PolicyError for a bad mode or policy."""
    unknown = sorted(set(policies) - set(MODES))
    if unknown:
        raise PolicyError(f"policies has the mode {unknown[0]!r}; choose from: {', '.join(MODES)}")
    return {name: Policy.parse(name, value) for name, value in policies.items()}
