"""Values that a capture gets from the traces, since it must neither copy from the host nor wait for the device.

``torch.tensor(values, device="cuda")`` and ``torch.arange(n).to("cuda")`` copy from temporary memory, which a graph
cannot hold, and the host would read a value that the step asserts. The traces have made the same constants and read
the same values. The modes are entered only for steps that need them: torch's modules leave their fast paths in a
``TorchFunctionMode``, and compiled code does not run compiled in a dispatch mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from graphplan.errors import CaptureError
from graphplan.observe.source import find_source
from graphplan.observe.watching import Unwatched
from graphplan.tensors.copying import same_bits
from graphplan.trace.batch_reads import BatchAnswers
from graphplan.trace.composites import OperatorMode
from graphplan.trace.host_reads import HostRead, KnownReads, find_place
from graphplan.trace.host_transfers import Transfer
from graphplan.trace.operator_schemas import NONZERO, TRANSFERS, OperatorCall

_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)
_SUBSCRIPTS = (Tensor.__getitem__, Tensor.__setitem__)


class DeviceConstants(TorchFunctionMode):
    """A mode that copies traced constants for tensors, and for lists in an index, that the step makes on the device."""

    def __init__(self, constants: Sequence[Tensor]) -> None:
        super().__init__()
        self._constants = [(constant, constant.cpu()) for constant in constants]

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SUBSCRIPTS:
            if args[0].device.type != "cpu":
                args = (args[0], self._without_lists(args[1]), *args[2:])
            return func(*args, **kwargs)
        make, given, options = func, args, kwargs
        if func is Tensor.new_tensor:
            make, given, options = _MAKERS[0], args[1:], {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
        if make not in _MAKERS or isinstance(given[0] if given else options.get("data"), Tensor):
            return func(*args, **kwargs)
        device = options.get("device")
        if (torch.get_default_device() if device is None else torch.device(device)).type == "cpu":
            return func(*args, **kwargs)
        return self._copy_of(make(*given, **{**options, "device": "cpu"}))

    def _without_lists(self, index: Any) -> Any:
        """Return ``index`` with tensors in place of its lists of numbers, as torch makes them."""
        if isinstance(index, tuple):
            return tuple(self._copy_of(_index_tensor(item)) if _is_numbers(item) else item for item in index)
        # torch treats a list of lists as a tuple of indices.
        is_flat = _is_numbers(index) and not any(isinstance(item, _LISTS) for item in index)
        return self._copy_of(_index_tensor(index)) if is_flat else index

    def _copy_of(self, wanted: Tensor) -> Tensor:
        for constant, value in self._constants:
            if same_bits(value, wanted):
                return constant.clone().requires_grad_(wanted.requires_grad)
        raise CaptureError(
            f"the captured step makes a device constant {wanted.tolist()} at {find_source()}, which the traced steps "
            "did not make; make the same constants in each step, or keep the value in a tensor of an owner"
        )


_LISTS = (list, tuple, range)


def _is_numbers(item: Any) -> bool:
    """Return True if ``item`` is a list of integers or bools, or of such lists."""
    return isinstance(item, _LISTS) and all(type(entry) in (int, bool) or _is_numbers(entry) for entry in item)


def _index_tensor(numbers: Any) -> Tensor:
    made = torch.tensor(numbers)
    return made if made.dtype == torch.bool else made.long()


class GivenValues(OperatorMode):
    """A dispatch mode that answers reads of the device as in the traces, and replaces copies from the host by those of
    the traces. ``on_expected(tensor, read)`` is called for reads that replays compare.
    """

    def __init__(
        self,
        reads: Sequence[HostRead] = (),
        transfers: Sequence[Transfer] = (),
        answers: BatchAnswers | None = None,
        on_expected: Callable[[Tensor, HostRead], None] | None = None,
    ) -> None:
        super().__init__(answers)
        self._on_expected = on_expected
        self._known = KnownReads(reads)
        self._constants = [transfer for transfer in transfers if transfer.is_constant]
        made_again = {transfer.place for transfer in transfers if not transfer.is_constant}
        self._next = {place: iter([each for each in transfers if each.place == place]) for place in made_again}
        """Transfers in order, by place, for places where some are not constant."""
        self._missing: CaptureError | None = None

    def check(self) -> None:
        """Raise CaptureError if the step copied host memory that the traced steps did not copy."""
        self.faults.check()
        if self._missing is not None:
            raise self._missing

    def operate(self, unwatched: Unwatched, call: OperatorCall) -> Any:
        """Run an operator, or return what it read in the traces."""
        schema = call.schema
        is_shape = call.has_dynamic_shape()
        if (call.reads_values() or is_shape) and (place := find_place()) in self._known:
            read = self._known.take(place)
            if read.expected and self._on_expected is not None:
                self._on_expected(call.args[0], read)
            # A read of host memory does not wait: it runs as in other steps.
            if read.waits and (read.asserted or not is_shape):
                return read.value
            if read.waits and schema.name in NONZERO:
                return tree_map_only(Tensor, Tensor.clone, read.value)
        args = call.args
        operands = call.host_operands() if self._constants or self._next else []
        if self._next and (scalar := call.host_scalar()) is not None:
            operands.append(scalar)
        copies = {id(tensor): self._copy_of(tensor, schema.name) for tensor in operands}
        if copies:
            args = tree_map_only(Tensor, lambda tensor: copies.get(id(tensor), tensor), args)
        return unwatched.run(schema.operator, args, call.kwargs)

    def _copy_of(self, tensor: Tensor, name: str) -> Tensor:
        at_place = self._next.get(find_place()) if self._next else None
        for transfer in self._constants if at_place is None else islice(at_place, 1):
            if transfer.takes(tensor):
                return transfer.copy
        if (name in TRANSFERS or at_place is not None) and self._missing is None:
            self._missing = CaptureError(
                f"the captured step copies values from host memory to the device at {find_source()} that the traced "
                "steps did not make there; make the same values in each step, or keep them in a tensor of an owner"
            )
        return tensor
