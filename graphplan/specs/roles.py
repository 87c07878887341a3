"""The three roles of a step's externals, and the description of one external.

An *external* is a tensor that a step reads or writes and that existed before the step began. Its role says who changes
it between steps: the caller (``input``), the optimizer alone (``param``), or the step itself (``state``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

import torch
from torch import Tensor

_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


class Role(Enum):
    """Who changes an external between two steps.

    Examples:
        >>> from graphplan import Role
        >>> [str(role) for role in Role]
        ['input', 'param', 'state']
    """

    INPUT = "input"
    """An argument of the call, which may change with each call."""
    PARAM = "param"
    """A parameter, or a buffer or constant that the step only reads."""
    STATE = "state"
    """State that the step itself updates: optimizer moments, running statistics, gradients, a device learning rate."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that the operators of one step allocate on its device: ``peak`` at one time, ``total`` in the whole step.

    Workspaces, which kernels allocate and free internally, are not counted.
    """

    peak: int = 0
    total: int = 0

    def merge(self, other: Footprint) -> Footprint:
        """Return the maximum of two steps, for each number."""
        return Footprint(max(self.peak, other.peak), max(self.total, other.total))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Metadata of a tensor: ``shape`` and ``stride`` in elements, dtype, device, and ``requires_grad``.

    Examples:
        >>> import torch
        >>> from graphplan import TensorSpec
        >>> spec = TensorSpec.of(torch.zeros(8, 4))
        >>> print(spec, spec.nbytes)
        f32[8, 4] 128
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return the spec of ``tensor``."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """The bytes of a dense tensor of this shape and dtype."""
        return prod(self.shape) * self.dtype.itemsize

    def fits(self, other: TensorSpec) -> bool:
        """Return True if a tensor like ``other`` can be copied to one like this without cast, broadcast or transfer."""
        return self.shape == other.shape and self.dtype == other.dtype and self.device == other.device

    def __str__(self) -> str:
        dtype = _SHORT.get(self.dtype, str(self.dtype).removeprefix("torch."))
        device = "" if self.device.type == "cpu" else f" {self.device}"
        return f"{dtype}[{', '.join(map(str, self.shape))}]{device}"


@dataclass(frozen=True, slots=True, eq=False)
class External:
    """One external of a plan.

    ``leaf`` is the index of the feed leaf (None for params and state). ``path`` is the owner's slot that holds it. If
    no slot does (unowned constants, device learning rates), ``tensor`` is the tensor, which the plan keeps alive.

    Examples:
        >>> import torch
        >>> from graphplan import Role, compile_plan
        >>> model = torch.nn.Linear(4, 2)
        >>> with torch.no_grad():
        ...     plan = compile_plan(model, torch.randn(8, 4), owners={"model": model})
        >>> [external.path for external in plan.externals if external.role is Role.PARAM]
        ['model.weight', 'model.bias']
    """

    name: str
    role: Role
    spec: TensorSpec
    mutated: bool
    carried: bool = False
    leaf: int | None = None
    path: str | None = None
    tensor: Tensor | None = None
    where: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.role} {self.spec}"
