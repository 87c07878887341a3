"""Return a replay's results to the caller: copies, so that the next replay cannot overwrite them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphplan.compare.moving import hand_out
from graphplan.errors import CaptureError, OutputError
from graphplan.feed.signature import marks_of
from graphplan.owners.slots import Walk
from graphplan.plan.plan import Plan
from graphplan.program.adopted_tensors import is_overwritten, may_overwrite
from graphplan.program.shared_buffers import SharedBuffer, StaticOutput
from graphplan.program.static_numbers import StaticNumbers
from graphplan.specs.roles import TensorSpec
from graphplan.tensors.attributes import PLAIN_KINDS
from graphplan.tensors.deferred import NumberForm, form_of, is_deferred
from graphplan.tensors.dtensors import is_sharded
from graphplan.tensors.storages import copier, has_wide_gaps, overlaps, place_of, storage_id
from graphplan.tensors.trees import flatten_result, map_result, names_of, rebuilder, text_of
from graphplan.trace.changes import same_value


def check_result(plan: Plan, result: Any) -> None:
    """Refuse the recorded step's result if it differs from that of the traced steps other than in tensor values."""
    leaves, structure = flatten_result(result)
    if structure != plan.output_structure:
        raise OutputError(
            f"the step returns {text_of(plan.output_structure)} in its traces and {text_of(structure)} in the capture; "
            "a replay returns one structure: return the same one each time"
        )
    for name, output, leaf in zip(names_of(structure, "result"), plan.outputs, leaves, strict=True):
        is_copied = output.kind == "read" and not isinstance(output.value, NumberForm)
        if is_copied or output.kind not in ("literal", "tensor", "read"):
            continue
        is_made = output.kind == "tensor" and isinstance(leaf, Tensor)
        planned = "a tensor" if output.kind == "tensor" else output.value
        found = form_of(leaf)[0] if is_deferred(leaf) else leaf
        expected, found = (output.marks, marks_of(leaf)) if is_made else (planned, found)
        if not same_value(expected, found):
            what = f"the attributes of {name}" if is_made else name
            raise OutputError(
                f"{what}, which the step returns, is {expected!r} in its traces and {found!r} in the capture; a "
                "replay would always return the first. Return a tensor, or compute it outside the step"
            )


class Outputs:
    """Static results of a recording, and copies of them for callers. The recording stacks scalars of one dtype, unless
    the step has done so, so that several losses cost one clone.
    """

    def __init__(
        self,
        plan: Plan,
        result: Any,
        read: StaticNumbers,
        *,
        overwritten: Collection[int | None],
        shared: Mapping[int, SharedBuffer],
    ) -> None:
        leaves = flatten_result(result)[0]
        self._template = [output.value for output in plan.outputs]
        each = list(enumerate(plan.outputs))
        self._fed = [(number, o.index) for number, o in each if o.kind == "input" and o.index is not None]
        self._owned = [(number, o.path) for number, o in each if o.kind == "owned" and o.path is not None]
        self._rebuild = rebuilder(plan.output_structure)
        self._static: dict[int, Tensor] = {}
        self._packs: list[tuple[Tensor, list[int]]] = []
        self._shared: list[tuple[int, int]] = []
        self._made: list[tuple[int, Callable[[], Any]]] = []
        """Result numbers with the functions that make these results after a run."""
        self._marks = [(number, dict(output.marks)) for number, output in enumerate(plan.outputs) if output.marks]
        places: dict[Any, int] = {}
        scalars: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, (output, leaf) in enumerate(zip(plan.outputs, leaves, strict=True)):
            if output.kind not in ("read", "tensor"):
                continue
            is_read = output.kind == "read"
            first = places.setdefault(id(leaf) if is_read or is_sharded(leaf) else place_of(leaf), number)
            if first != number:
                self._shared.append((number, first))
                continue
            if is_read:
                self._made.append((number, read.take(leaf).value))
                continue
            tensor = leaf.detach().resolve_conj().resolve_neg()
            if number in shared:
                _fill(shared[number], tensor)
                self._made.append((number, partial(StaticOutput.of, shared[number])))
                continue
            # A carry may overwrite this memory at the end of the step, but the caller needs the returned value.
            self._static[number] = copier(tensor)() if storage_id(tensor) in overwritten else tensor
            # Parts of a vector have no class and no attributes of their own.
            if tensor.ndim == 0 and type(tensor) in PLAIN_KINDS:
                scalars.setdefault((tensor.dtype, tensor.device), []).append(number)
        for numbers in scalars.values():
            self._pack(numbers)
        self._made += [(number, copier(tensor)) for number, tensor in self._static.items()]
        self.shared = list(shared.values())
        """The buffers of static outputs, which each replay overwrites."""
        is_lone = 0 in self._static and len(plan.outputs) == 1 and plan.output_structure is None and not self._marks
        self._lone = self._made[0][1] if is_lone else None

    def _pack(self, numbers: Sequence[int]) -> None:
        """Pack scalars of one dtype into the vector that they are already part of, or into a new one."""
        alone: list[int] = []
        for run in _runs({number: self._static[number] for number in numbers}):
            if len(run) == 1:
                alone += run
                continue
            self._packs.append((self._static[run[0]].as_strided((len(run),), (1,)), run))
            for number in run:
                del self._static[number]
        if len(alone) > 1:
            self._packs.append((torch.stack([self._static.pop(number) for number in alone]), alone))

    @property
    def shared_bytes(self) -> int:
        """Bytes of the buffers of static outputs."""
        return sum(buffer.tensor.nbytes for buffer in self.shared)

    def mark_overwritten(self) -> None:
        """Mark the results of the previous run as overwritten."""
        for buffer in self.shared:
            buffer.version += 1

    def build(self, leaves: Sequence[Any], walk: Walk) -> Any:
        """Return the step's result: clones of new tensors, and the caller's or owners' own tensors."""
        if self._lone is not None:
            return self._lone()
        built = self._template.copy()
        for number, make in self._made:
            built[number] = make()
        for pack, numbers in self._packs:
            for number, part in zip(numbers, hand_out(pack), strict=True):
                built[number] = part
        for number, first in self._shared:
            built[number] = built[first]
        for number, marks in self._marks:
            vars(built[number]).update(marks)
        for number, index in self._fed:
            built[number] = leaves[index]
        for number, path in self._owned:
            built[number] = _lasting(walk.slots[path].get())
        return self._rebuild(built)


def copy_overwritten(result: Any) -> Any:
    """Return an eager call's result with copies of tensors that replays overwrite, where eager steps bind new ones."""
    leaves = flatten_result(result)[0] if may_overwrite() else []
    is_any = any(isinstance(leaf, Tensor) and is_overwritten(leaf) for leaf in leaves)
    return map_result(_lasting, result) if is_any else result


def _lasting(tensor: Tensor) -> Tensor:
    if not is_overwritten(tensor):
        return tensor
    return copier(tensor.detach())().requires_grad_(tensor.requires_grad)


def _runs(scalars: Mapping[int, Tensor]) -> list[list[int]]:
    """Return the numbers of ``scalars`` in groups of adjacent elements of one storage."""
    places = sorted((storage_id(tensor) or 0, tensor.storage_offset(), number) for number, tensor in scalars.items())
    runs: list[list[int]] = []
    end: tuple[int, Any] | None = None
    for storage, offset, number in places:
        if (storage, offset) == end:
            runs[-1].append(number)
        else:
            runs.append([number])
        end = storage, offset + 1
    return runs


def share_outputs(plan: Plan) -> dict[int, SharedBuffer]:
    """Allocate buffers for the tensors that the step makes, outside the pool that other programs' replays write to."""
    shared = {}
    for number, output in enumerate(plan.outputs):
        spec = output.spec
        if output.kind == "tensor" and spec is not None and 0 not in spec.shape:
            with torch.inference_mode(False), torch.no_grad():
                like = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
                if has_wide_gaps(like) or overlaps(spec.shape, spec.stride):
                    memory = torch.empty_like(like, device=spec.device)
                else:
                    memory = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
            shared[number] = SharedBuffer(memory, f"output {number} of {plan.name}")
    return shared


def _fill(buffer: SharedBuffer, tensor: Tensor) -> None:
    """Copy, inside the recording, a result to its buffer."""
    memory = buffer.tensor
    if (memory.shape, memory.dtype, memory.device) != (tensor.shape, tensor.dtype, tensor.device):
        raise CaptureError(
            f"{buffer.name} is {TensorSpec.of(tensor)} in the capture and was {TensorSpec.of(memory)} in the traces; "
            "expected the same in both. Return the same shape, dtype and layout each time, or pass outputs='clone'"
        )
    memory.copy_(tensor)
