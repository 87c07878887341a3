"""Keep learning rates in device memory while optimizers step, and set the flags of prepared optimizers.

Other code sees Python numbers, except in a trace or a capture: there the rates are in device memory for the whole step,
so that a trace sees whether the step's own code uses one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from graphplan.compare.fast_compare import register_own
from graphplan.compare.moving import fill
from graphplan.errors import Faults
from graphplan.optimizers.preparation import Preparation, around_closure, device_of
from graphplan.optimizers.scaling import ScaledSteps
from graphplan.tensors.symbolic import SymbolicNumber


def device_rate_dtype(group: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype of a device learning rate for this group's kernel; None if it takes only Python floats. float64
    equals the Python float bitwise; the fused CUDA kernels take float32 only.
    """
    device = device_of(group).type
    if group.get("fused"):
        return torch.float64 if device == "cpu" else torch.float32
    return torch.float64 if group.get("capturable") and device != "cpu" else None


class DeviceRate:
    """A device tensor that replaces one group's Python learning rate while a step runs."""

    __slots__ = ("_computed", "_replaced", "_version", "group", "last", "optimizer", "tensor")

    def __init__(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], dtype: torch.dtype) -> None:
        self.optimizer = optimizer
        self.group = group
        self.last: Any = float(group["lr"])
        with torch.inference_mode(False):
            self.tensor = torch.tensor(self.last, dtype=dtype).to(device_of(group))
        self._version = 0
        self._replaced: Any = self.last
        self._computed: tuple[SymbolicNumber, Tensor] | None = None

    def push(self) -> None:
        """Copy the group's value to the device if it changed. A tensor, as from a checkpoint, is always copied."""
        value = self.group["lr"]
        if isinstance(value, Tensor):
            with torch.no_grad():
                self.tensor.copy_(value)
            self.last = None
        elif value != self.last:
            fill(self.tensor, value)
            self.last = value

    def enter(self) -> None:
        """Replace the number by the tensor, unless that is done: ``step`` may call ``step`` of its base class."""
        if self.group["lr"] is self.tensor:
            return
        self.push()
        self._version = self.tensor._version
        self._replaced = self.group["lr"]
        self.group["lr"] = self.tensor

    def leave(self) -> None:
        """Restore the number: the one from before, or the tensor's value if the step itself has written to it."""
        if self.group["lr"] is not self.tensor:
            return
        self.group["lr"] = self._replaced
        if self.tensor._version != self._version:
            self.group["lr"] = self.last = self.tensor.item()

    def enter_computed(self) -> None:
        """Replace a symbolic number, which the step has computed, by a tensor that replays fill."""
        number = self.group["lr"]
        if type(number) is SymbolicNumber:
            self._computed = number, number.as_tensor(self.tensor.dtype, self.tensor.device, is_operand=True)
            self.group["lr"] = self._computed[1]

    def leave_computed(self) -> None:
        """Restore the symbolic number."""
        if self._computed is not None and self.group["lr"] is self._computed[1]:
            self.group["lr"] = self._computed[0]
        self._computed = None


class LearningRates:
    """The device learning rates of parameter groups, the preparations, and ``scaled``, a context entered around each
    managed step.
    """

    def __init__(self, scaled: ScaledSteps) -> None:
        self._scaled = scaled
        self._device_rates: dict[tuple[int, int], DeviceRate] = {}
        self._preparations: list[Preparation] = []
        self._exits: ExitStack | None = None
        """The callbacks that run at exit; None while not entered."""
        self._is_lent = False
        """Whether device rates replace the numbers only within the optimizers' own ``step``."""
        self._hooked: set[int] = set()
        self._faults = Faults()

    def keep(self, preparation: Preparation) -> None:
        """Set an optimizer's flags, which are set now, only while a managed step runs."""
        self._preparations.append(preparation)
        if self._exits is None:
            preparation.leave()
        else:
            self._exits.callback(preparation.leave)

    def stay(self) -> None:
        """Keep the flags set after a managed step, until the next one."""
        for preparation in self._preparations:
            preparation.enter()

    def release(self) -> None:
        """Undo all preparations and drop the device learning rates, which stock kernels may not accept."""
        for preparation in self._preparations:
            preparation.undo()
        self._preparations = []
        self._device_rates = {}

    def attach(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Make device rates for the groups whose kernels can read them; renew those of replaced groups."""
        # The dtype depends on the group's flags, which are set only within `kernels`.
        with self.kernels() if self._exits is None else nullcontext():
            for optimizer in optimizers:
                for index, group in enumerate(optimizer.param_groups):
                    key, dtype = (id(optimizer), index), device_rate_dtype(group)
                    if key in self._device_rates:
                        self._device_rates[key].group = group
                    elif dtype is not None and isinstance(group.get("lr"), Real):
                        device_rate = self._device_rates[key] = DeviceRate(optimizer, group, dtype)
                        if self._exits is not None:
                            self._put_in(device_rate, self._exits)

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Set the flags of managed steps, but leave learning rates numbers."""
        with ExitStack() as exits:
            self._enter_preparations(exits)
            yield

    def _enter_preparations(self, exits: ExitStack) -> None:
        for preparation in self._preparations:
            exits.callback(preparation.leave)
            preparation.enter()

    def _put_in(self, device_rate: DeviceRate, exits: ExitStack) -> None:
        """Put a device rate in its group until exit, or (``_is_lent``) only while the optimizer's ``step`` runs, but
        not its closure. In the first case the step's code may set another rate, which is replaced before the optimizer
        runs.
        """
        exits.callback(device_rate.leave)
        optimizer, is_lent = device_rate.optimizer, self._is_lent
        if is_lent:
            device_rate.push()
        else:
            device_rate.enter()
        if id(optimizer) in self._hooked:
            return
        self._hooked.add(id(optimizer))

        def lend() -> None:
            self._each(optimizer, DeviceRate.enter if is_lent else DeviceRate.enter_computed)

        def take_back(*args: Any) -> None:
            self._each(optimizer, DeviceRate.leave if is_lent else DeviceRate.leave_computed)

        def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            lend()
            return around_closure(args, kwargs, take_back, lend)

        exits.callback(register_own(optimizer.register_step_pre_hook, before).remove)
        last = register_own(optimizer.register_step_post_hook, take_back)
        exits.callback(last.remove)
        # The user's hooks must see numbers, so they run before this pre-hook and after this post-hook.
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(last.id, last=False)

    def _each(self, optimizer: torch.optim.Optimizer, act: Callable[[DeviceRate], None]) -> None:
        with self._faults.noting():
            for device_rate in self._device_rates.values():
                if device_rate.optimizer is optimizer:
                    act(device_rate)

    @property
    def on_device(self) -> set[tuple[int, str]]:
        """Entries of groups that have a device rate: (identity of the group, key)."""
        return {(id(device_rate.group), "lr") for device_rate in self._device_rates.values()}

    @property
    def counted(self) -> Iterator[tuple[torch.optim.Optimizer, int, str]]:
        """Integers that optimizers' own steps change: optimizer, index of the group, key."""
        for preparation in self._preparations:
            for index, key in sorted(preparation.counted):
                yield preparation.optimizer, index, key

    @property
    def stepped_newcomers(self) -> bool:
        """Whether stock kernels stepped newly unfrozen parameters in the last managed step."""
        return any(preparation.stepped_newcomers for preparation in self._preparations)

    @property
    def storages(self) -> frozenset[int]:
        """Storages of the device rates."""
        return frozenset(device_rate.tensor.untyped_storage()._cdata for device_rate in self._device_rates.values())

    def push(self) -> None:
        """Update every device rate from its group's Python value (before a replay)."""
        for device_rate in self._device_rates.values():
            if device_rate.group["lr"] is not device_rate.last:
                device_rate.push()

    @contextmanager
    def within_optimizers(self) -> Iterator[None]:
        """Enter, but show learning rates as numbers to all code outside ``optimizer.step``, as in an eager step."""
        self._is_lent = True
        with self:
            yield

    def __enter__(self) -> LearningRates:
        with ExitStack() as exits:
            exits.callback(self._end)
            exits.enter_context(self._scaled)
            self._exits = exits
            self._enter_preparations(exits)
            for device_rate in self._device_rates.values():
                self._put_in(device_rate, exits)
            self._exits = exits.pop_all()
        return self

    def _end(self) -> None:
        self._exits, self._is_lent = None, False
        self._hooked.clear()

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        assert self._exits is not None
        self._exits.close()
        if kind is None:
            for faults in (self._faults, *(preparation.faults for preparation in self._preparations)):
                faults.check()
