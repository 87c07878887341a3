"""Constants that a capture must not copy from the host.

``torch.tensor(values, device="cuda")`` copies from a temporary, which a graph cannot hold, and so does
``torch.arange(n).to("cuda")``. Both traces made the same constants, so a capture can hand out copies of those instead.
The modes are entered only for steps whose traces have such constants: torch's modules leave their fast paths where a
``TorchFunctionMode`` is active, and compiled code is not run compiled within a dispatch mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from graphplan.errors import CaptureError
from graphplan.observe.source import find_source
from graphplan.observe.watching import Aside
from graphplan.tensors.copying import same_bits
from graphplan.trace.composites import OperatorMode
from graphplan.trace.operator_schemas import TRANSFERS, host_operands, schema_of
from graphplan.trace.records import HostConstant

_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)


class DeviceConstants(TorchFunctionMode):
    """Gives the traced constants, in their order, for what the step makes from Python values on the device."""

    def __init__(self, constants: Sequence[Tensor]) -> None:
        super().__init__()
        self._left = [(constant, constant.cpu()) for constant in constants]

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        make, given, options = func, args, kwargs
        if func is Tensor.new_tensor:
            make, given, options = torch.tensor, args[1:], {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
        device = options.get("device")
        from_python = make in _MAKERS and not isinstance(given[0] if given else options.get("data"), Tensor)
        if not from_python or device is None or torch.device(device).type == "cpu":
            return func(*args, **kwargs)
        return self._next(make(*given, **{**options, "device": "cpu"}))

    def _next(self, wanted: Tensor) -> Tensor:
        if not self._left:
            raise CaptureError(
                f"the captured step makes a device constant {wanted.tolist()} at {find_source()}, which the traced "
                "steps did not make; make the same ones in each step, or hold the value in a tensor that an owner has"
            )
        constant, value = self._left.pop(0)
        if not same_bits(value, wanted):
            raise CaptureError(
                f"the captured step makes a device constant {wanted.tolist()} at {find_source()}, the traced steps "
                f"made {value.tolist()}; hold the value in a tensor that an owner has"
            )
        return constant.clone().requires_grad_(wanted.requires_grad)


class HostConstants(OperatorMode):
    """Gives operators that copy from host memory to the device what the traced steps' constants are there."""

    def __init__(self, constants: Sequence[HostConstant]) -> None:
        super().__init__()
        self._constants = constants
        self._missing: CaptureError | None = None

    def check(self) -> None:
        """Raise CaptureError if the step has copied from host memory what the traced steps did not."""
        self.faults.check()
        if self._missing is not None:
            raise self._missing

    def operate(self, aside: Aside, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, on copies of constants if it is given any from host memory."""
        name = schema_of(func).name
        copies = {id(tensor): self._copy_of(tensor, name) for tensor in host_operands(name, args, kwargs)}
        if copies:
            args = tree_map_only(Tensor, lambda tensor: copies.get(id(tensor), tensor), args)
        return aside.run(func, args, kwargs)

    def _copy_of(self, tensor: Tensor, name: str) -> Tensor:
        for constant in self._constants:
            if same_bits(constant.value, tensor):
                return constant.copy
        if name in TRANSFERS and self._missing is None:
            self._missing = CaptureError(
                f"the captured step copies host memory to the device at {find_source()}, other values than the traced "
                "steps made there; make the same ones in each step, or hold the values in a tensor that an owner has"
            )
        return tensor
