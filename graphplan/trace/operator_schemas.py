"""Properties of operators that follow from their schemas and arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from graphplan.tensors.attributes import PLAIN_KINDS
from graphplan.trace.collectives import is_collective, name_object, written_positions

HIDDEN_WRITES = ("running_mean", "running_var")
"""Arguments that batch-norm operators update although their schemas do not declare it."""
OWN_STATE = "dropout_state"
"""An argument with memory that torch keeps for an operator: cuDNN draws the dropout between an RNN's layers from a
state of its own, and advances it although the schema does not declare it. torch makes a new state after the device's
generator was seeded or its state was set.
"""
_TRAINING = ("training", "train", "use_input_stats")
"""Arguments that say whether operators update these, or draw."""
ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types of arguments that are no tensors and contain none."""
_UNTOLD = (torch.Generator, torch.UntypedStorage, torch.TypedStorage)
"""Types of arguments that are not compared: they differ from call to call although the step does the same."""
_IGNORED = ("profiler.", "prim.")
_ALLOCATIONS = ("aten.empty", "aten.new_empty", "aten._efficientzerotensor")
"""Operators that only allocate: the contents are undefined, so they need not run again."""
_KERNELS = ("CPU", "CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "BackendSelect")
"""Dispatch keys under which :mod:`torch.library` may have a Python kernel for one of torch's own operators."""
_INDEX_PUTS = ("aten.index_put_.default", "aten.index_put.default", "aten._index_put_impl_.default")
INDEXING = ("aten.index.Tensor", *_INDEX_PUTS)
PACKING = "aten._pack_padded_sequence.default"
TO_COPY = "aten._to_copy.default"
AS_ON_DEVICE = ContextVar("as_on_device", default=False)
"""Whether steps that compute on the CPU are checked as if they computed on a device."""


def _on_device(given: Sequence[Tensor]) -> bool:
    # On a CPU, the tape runs these operators again, with their reads.
    return given[0].device.type != "cpu" or AS_ON_DEVICE.get()


class HiddenRead(NamedTuple):
    """A host read that no tag of the operator declares: what it reads, the fix, and for which tensors it ``reads``."""

    what: str
    fix: str
    reads: Callable[[Sequence[Tensor]], bool] = lambda given: True


NESTED_FIX = (
    "Make it dense outside the step (torch.nested.to_padded_tensor, with a mask), or, if a transformer makes it, "
    "construct that with enable_nested_tensor=False"
)
_FILLED = HiddenRead(
    "reads the number that it fills in on the host", "Pass it as a Python number, or use torch.where",
    lambda given: given[-1].device.type != "cpu",
)  # fmt: skip
_SCALE = HiddenRead(
    "reads the scale of its quantised result on the host",
    "Quantise in floating point (torch.fake_quantize_per_tensor_affine), or pass scale and zero point as numbers",
)
_HOST_READS = {
    **{f"aten.{name}": _FILLED for name in ("masked_fill.Tensor", "masked_fill_.Tensor")},
    **{f"aten.{name}.int_Tensor": _FILLED for name in ("index_fill", "index_fill_")},
    **{f"aten.quantize_per_tensor.{name}": _SCALE for name in ("tensor_qparams", "tensors")},
    **{f"aten.quantize_per_{name}.default": _SCALE for name in ("tensor_dynamic", "channel")},
    "aten._make_per_channel_quantized_tensor.default": _SCALE,
    "aten._empty_per_channel_affine_quantized.default": _SCALE,
    "aten._nested_tensor_from_mask_left_aligned.default": HiddenRead("reads the mask on the host", NESTED_FIX),
    PACKING: HiddenRead(
        "reads the lengths of sequences on the host",
        "Keep the batch padded and use a mask, or pass the lengths as a list of numbers (each list gets its own "
        "program)",
    ),
    "aten._linalg_check_errors.default": HiddenRead(
        "checks on the host whether an operator succeeded",
        "Use the variant without this check (torch.linalg.cholesky_ex, inv_ex, solve_ex)", _on_device,
    ),
    "aten._grouped_mm.default": HiddenRead(
        "reads the sizes of its groups on the host if the dtype is not bfloat16",
        "Use the model in bfloat16, or another implementation of the grouped product "
        "(experts_implementation='batched_mm' in transformers)",
        lambda given: _on_device(given) and given[0].dtype != torch.bfloat16,
    ),
    "aten.masked_scatter_backward.default": HiddenRead(
        "reads on the host how many elements a mask selects",
        "Compute an index from the mask (its cumsum), index the source with it to get the mask's shape, and use "
        "torch.where", _on_device,
    ),
}  # fmt: skip
POSITIONS = "aten.nonzero_numpy.default"
"""The operator that finds the positions that a mask selects, a tensor for each dimension. torch decomposes it if code
calls it, so that a dispatched one always comes from a mask in an index (:meth:`OperatorCall.masks`).
"""
NONZERO = ("aten.nonzero.default", POSITIONS)
_EQUAL = "aten.equal.default"
_SELECT = "aten.masked_select.default"
_FROM_OUTSIDE = ("aten.from_file.default",)
"""Operators whose results do not depend on their arguments alone."""
_CASTS_WITHIN = ("aten._transformer_encoder_layer_fwd.", "aten._native_multi_head_attention.")
"""Fused operators of torch's modules for inference, whose kernels run others that go through autocast."""
_DERIVED_OTHERWISE = ("aten.prod.", "aten.cumprod.")
UNORDERED = tuple(
    f"aten.{name}" for name in (
        "scatter_add", "scatter_reduce", "index_add", "index_put", "index_reduce", "_index_put_impl_", "put",
        "_unsafe_index_put", "embedding_dense_backward", "_embedding_bag", "histc", "bincount", "cumsum",
        "grid_sampler_2d_backward", "grid_sampler_3d_backward", "upsample_", "_upsample_", "_adaptive_avg_pool",
        "adaptive_max_pool", "avg_pool3d_backward", "max_pool3d_with_indices_backward", "fractional_max_pool",
        "reflection_pad", "replication_pad", "_ctc_loss_backward", "nll_loss2d_forward", "segment_reduce",
        "_segment_reduce_backward",
    )
)  # fmt: skip
"""Prefixes of operators that add in any order on a device, from the list of torch.use_deterministic_algorithms."""
TRANSFERS = (TO_COPY, "aten.copy_.default")
"""Operators that may copy from one device to another."""
LIKE_OPERATORS = frozenset(
    f"aten.{name}.default" for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
)
"""Operators that use no values of their first argument, only its shape, strides, dtype and device."""
_ALIKE = frozenset(f"aten.{name}.Tensor" for name in ("mul", "mul_", "add", "add_", "sub", "sub_"))
"""Operators that round alike for a Python number and for a scalar tensor."""
_index: Any = torch.ops.aten.index.Tensor
_BY_ARGUMENTS: dict[str, Callable[[OperatorCall], bool]] = {
    **dict.fromkeys(INDEXING, lambda call: _has_mask(call.args[1]) and not call.fills()),
    POSITIONS: lambda call: True,
    "aten.repeat_interleave.Tensor": lambda call: call.kwargs.get("output_size") is None,
    "aten.one_hot.default": lambda call: call.given(1) in (None, -1),
    # The lengths are Python numbers, which the operator copies to the device.
    "aten._ctc_loss.default": lambda call: call.args[0].device.type != "cpu",
}
"""Operators whose arguments decide whether the shape of the result depends on values, and how."""


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in an operator's argument or result, lists included."""
    kind = type(value)
    # A trace calls this several times for each operator: for most values their type decides, without a further call.
    if kind in ATOMS:
        return []
    if kind in PLAIN_KINDS or isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    if isinstance(value, list | tuple):
        for item in value:
            kind = type(item)
            if kind in PLAIN_KINDS:
                found += (item,)
            elif kind not in ATOMS:
                found += tensors_in(item)
    return found


class Schema:
    """An operator, with the properties that all of its calls share. Nothing in it changes.

    Attributes:
        call: the operator's entry point in C++, which saves a Python frame.
        is_native: whether it is one of torch's own, and runs no Python code.
        written: positions of the arguments that it writes.
        hidden: positions of arguments that it updates undeclared, if none of the arguments at ``flags`` is False.
        own_state: position of a state of its own to draw from.
        is_ignored: whether it is no part of a step's computation.
        is_composite: whether torch decomposes it into other operators, on every device.
        casts_within: whether its kernel runs other operators, for which autocast casts as if code ran them.
        turns: whether it only gives a tensor another shape or memory in place (``squeeze_``, ``set_``).
        may_synchronize: whether the host may have to wait for values that it reads.
        is_certain: whether its results depend on its arguments alone. Those of collectives and of extensions may not.
        derives_otherwise: whether autograd, within a dispatch mode, uses a formula for its derivative that does not
            read on the host whether there are zeros.
    """

    def __init__(self, operator: Any) -> None:
        self.operator, self.name = operator, str(operator)
        name, tags, arguments = self.name, operator.tags, operator._schema.arguments
        self.call: Callable[..., Any] = operator._op if type(operator) is torch._ops.OpOverload else operator
        self.arguments: tuple[str, ...] = tuple(argument.name for argument in arguments)
        written = (at for at, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write)
        self.written = tuple(written) or written_positions(name)
        self.hidden = tuple(at for at, argument in enumerate(self.arguments) if argument in HIDDEN_WRITES)
        self.flags = tuple(at for at, argument in enumerate(self.arguments) if argument in _TRAINING)
        self.own_state = self.arguments.index(OWN_STATE) if OWN_STATE in self.arguments else None
        self.may_write = bool(self.written or self.hidden)
        self.is_native = name.startswith("aten.") and not _has_python_kernel(operator)
        self.is_inplace_view = torch.Tag.inplace_view in tags
        self.is_random = torch.Tag.nondeterministic_seeded in tags
        self.reads_values = torch.Tag.data_dependent_output in tags
        self.has_dynamic_shape = torch.Tag.dynamic_output_shape in tags
        # torch asks tensor subclasses for their sizes through operators without kernels.
        is_known = torch._C._dispatch_has_kernel(operator.name())
        self.is_ignored, self.allocates = name.startswith(_IGNORED) or not is_known, name.startswith(_ALLOCATIONS)
        self.communicates = is_collective(name)
        self.is_composite = is_known and _is_composite(operator.name())
        waits = self.reads_values or self.has_dynamic_shape
        self.may_synchronize = waits or name in (*_BY_ARGUMENTS, *TRANSFERS, *_HOST_READS)
        self.is_certain = self.is_native and not (self.is_random or self.communicates or name in _FROM_OUTSIDE)
        self.derives_otherwise = name.startswith(_DERIVED_OTHERWISE)
        self.casts_within = name.startswith(_CASTS_WITHIN)


_SCHEMAS: dict[int, Schema] = {}
"""By the id of the operator, which the schema keeps alive: the hash of an operator is computed in Python."""


def schema_of(func: Any) -> Schema:
    """Return the schema of an operator, from a cache: torch makes its own schema anew for each access."""
    known = _SCHEMAS.get(id(func))
    if known is None:
        known = _SCHEMAS[id(func)] = Schema(func)
    return known


def _is_composite(name: str) -> bool:
    # An operator may have both: torch does not decompose it on a device for which it has a kernel of its own.
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(name, "CompositeImplicitAutograd") and not (has_kernel(name, "CPU") or has_kernel(name, "CUDA"))


def _has_python_kernel(func: Any) -> bool:
    registered: Any = getattr(torch.library, "_impls", None)
    place = func.name().replace("::", "/")
    return registered is None or any(f"{place}/{key}" in registered for key in _KERNELS)


@dataclass(slots=True, eq=False)
class OperatorCall:
    """One call of an operator, as a dispatch mode receives it, or one that replaces the call ``asked``."""

    schema: Schema
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    asked: OperatorCall | None = None

    def given(self, position: int) -> Any:
        """Return the argument at ``position``; None if it has its default."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(self.schema.arguments[position])

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments, lists included."""
        return tensors_in([*self.args, *self.kwargs.values()] if self.kwargs else self.args)

    def tensors_and_others(self) -> tuple[list[Tensor], list[tuple[str, Any]]]:
        """Return the tensors among the arguments, lists included, and the other arguments by name."""
        tensors: list[Tensor] = []
        others: list[tuple[str, Any]] = []
        named = zip(self.schema.arguments, self.args, strict=False)
        for name, value in [*named, *self.kwargs.items()] if self.kwargs else named:
            kind = type(value)
            if kind in PLAIN_KINDS:
                tensors.append(value)
            elif kind in ATOMS:
                others.append((name, value))
            elif kind is list or kind is tuple:
                found = tensors_in(value)
                tensors += found
                if not found:
                    others.append((name, tuple(value)))
            elif isinstance(value, Tensor):
                tensors.append(value)
            elif isinstance(value, torch.ScriptObject):
                others.append((name, name_object(value)))
            elif not isinstance(value, _UNTOLD):
                others.append((name, value))
        return tensors, others

    def written(self) -> list[Tensor]:
        """Return the tensors that the operator writes, with running statistics, which schemas do not declare."""
        schema = self.schema
        positions = schema.written
        if schema.hidden and all(self.given(at) is not False for at in schema.flags):
            positions += schema.hidden
        return [tensor for at in positions for tensor in tensors_in(self.given(at))]

    def drawn_from(self) -> Tensor | None:
        """Return the state of its own that the operator draws from, or None. torch passes one even without a draw."""
        schema = self.schema
        if schema.own_state is None or any(self.given(at) is False for at in schema.flags):
            return None
        share = self.given(schema.arguments.index("dropout")) if "dropout" in schema.arguments else None
        state: Tensor | None = self.given(schema.own_state)
        return None if share == 0 else state

    def reads_values(self) -> bool:
        """Return True if the host gets a number or a truth value that depends on values."""
        if not self.schema.reads_values:
            return False
        # ``equal`` reads no values of tensors that differ in shape.
        return self.schema.name != _EQUAL or self.args[0].shape == self.args[1].shape

    def has_dynamic_shape(self) -> bool:
        """Return True if the shape of the operator's result depends on values."""
        if not self.schema.may_synchronize:
            # Most operators.
            return False
        decide = _BY_ARGUMENTS.get(self.schema.name)
        return self.schema.has_dynamic_shape if decide is None else decide(self)

    def fills(self) -> bool:
        """Return True if torch turns a mask with a one-element host value into masked_fill, which has a fixed shape."""
        return len(self.args) > 2 and self.args[2].numel() == 1 and self.args[2].device.type == "cpu"

    def masks(self) -> list[Tensor]:
        """Return the masks that decide the shape of the result, if their shapes fit the indexed tensor."""
        name, args = self.schema.name, self.args
        if name == _SELECT:
            return [args[1]] if args[0].shape == args[1].shape and args[1].dim() else []
        if name not in INDEXING or not _has_mask(args[1]) or self.fills():
            return []
        masks, dim = list[Tensor](), 0
        for index in args[1]:
            if is_mask(index):
                masks.append(index)
                if not index.dim() or index.shape != args[0].shape[dim : dim + index.dim()]:
                    return []
            dim += masks[-1].dim() if is_mask(index) else 1
        return masks

    def selects_all(self, out: Any) -> bool:
        """Return True if ``out`` are the positions that a mask selects, and these are all there are."""
        mask = self.args[0]
        is_found = self.schema.name in NONZERO and mask.dtype == torch.bool
        return is_found and 0 < mask.numel() == len(tensors_in(out)[0])

    def with_positions(self, positions: Sequence[Sequence[Tensor]]) -> OperatorCall:
        """Return the operator with the ``positions`` that each of its masks selects in place of the masks."""
        if self.schema.name == _SELECT:
            return OperatorCall(schema_of(_index), (self.args[0], list(*positions)), {})
        found = iter(positions)
        indices: list[Tensor | None] = []
        for index in self.args[1]:
            indices += next(found) if is_mask(index) else (index,)
        return OperatorCall(self.schema, (self.args[0], indices, *self.args[2:]), self.kwargs)

    def host_scalar(self) -> Tensor | None:
        """Return a host scalar with which the operator computes on a device, if one there would give the same bits."""
        one, other = self.args[:2] if self.schema.name in _ALIKE and not self.kwargs else (None, None)
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)) or one.dtype != other.dtype:
            return None
        one, other = (one, other) if one.device.type == "cpu" else (other, one)
        is_scalar = one.device.type == "cpu" and not one.dim() and other.device.type != "cpu"
        return one if is_scalar and one.dtype in (torch.float32, torch.float64) else None

    def host_operands(self) -> list[Tensor]:
        """Return the tensors in host memory that a transfer to a device, or an index of a tensor there, copies from."""
        name, args = self.schema.name, self.args
        if name == TO_COPY:
            target = self.kwargs.get("device")
            given, is_on_device = args[:1], target is not None and target.type != "cpu"
        elif name == "aten.copy_.default" or name in INDEXING:
            # A host value that is put at an index is copied; one that is put where a mask selects is a fill instead.
            is_put = name in _INDEX_PUTS and not _has_mask(args[1])
            given, is_on_device = args[1 : 3 if is_put else 2], args[0].device.type != "cpu"
        else:
            return []
        return [tensor for tensor in tensors_in(given) if tensor.device.type == "cpu"] if is_on_device else []


def hidden_read(name: str, given: Sequence[Tensor]) -> HiddenRead | None:
    """Return the undeclared host read of an operator that gets the tensors ``given``; None if there is none."""
    read = _HOST_READS.get(name)
    return read if read is not None and read.reads(given) else None


def is_mask(index: Tensor | None) -> TypeGuard[Tensor]:
    """Return True if an index selects the positions where its values are not zero."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(map(is_mask, indices))
