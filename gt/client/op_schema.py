"""What an aten overload's schema says about its arguments, read once per op."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from gt.client.storage import REINTERPRETING
from gt.client.torch_patches.op_registry import (
    Argument,
    DispatchKey,
    FunctionSchema,
    OpOverload,
    has_kernel,
    kernel_of,
    packet_name,
    schema_of,
)


class Kind(Enum):
    """How an argument takes part in the memo key."""

    TENSOR = "tensor"
    TENSORS = "tensors"
    TARGET = "target"  # a tensor that the op overwrites
    TARGETS = "targets"
    COPIES = "copies"  # targets, and plain tensors whose copies are overwritten in their position
    SCALAR = "scalar"  # the shapes do not depend on its value
    SCALARS = "scalars"
    CONSTANT = "constant"
    GENERATOR = "generator"
    DEVICE = "device"
    IGNORED = "ignored"


_KINDS = {
    "Tensor": Kind.TENSOR,
    "Optional[Tensor]": Kind.TENSOR,
    "List[Tensor]": Kind.TENSORS,
    "List[Optional[Tensor]]": Kind.TENSORS,
    "Optional[List[Tensor]]": Kind.TENSORS,
    "Optional[List[Optional[Tensor]]]": Kind.TENSORS,
    "number": Kind.SCALAR,
    "Optional[number]": Kind.SCALAR,
    "float": Kind.SCALAR,
    "Optional[float]": Kind.SCALAR,
    "List[number]": Kind.SCALARS,
    "Optional[Generator]": Kind.GENERATOR,
    "Generator": Kind.GENERATOR,
    "Device": Kind.DEVICE,
    "Optional[Device]": Kind.DEVICE,
}

# Their output shape, or whether they are allowed at all, depends on the value of a number.
_VALUE_MATTERS = {
    "aten::arange", "aten::range", "aten::pow", "aten::pow_", "aten::float_power", "aten::_foreach_pow",
    "aten::linalg_vector_norm", "aten::norm", "aten::dist",  # the order decides how shards are put together
    "aten::histc",  # equal ends of its bins mean those of all elements
}  # fmt: skip

# Arguments that these ops overwrite although their schema does not say so.
_UNDECLARED_WRITES = {"aten::native_batch_norm": ("running_mean", "running_var")}

# Lists that these ops do not overwrite although their schema says so. They may be of plain tensors, as the counts of
# steps of an optimizer are.
_UNTRUE_WRITES = {"aten::_fused_adagrad_": ("state_steps",)}

# Their results differ by device in dtype or shape (the statistics of a norm, for example), and torch's shape functions
# do not know which device the workers have: the first call asks.
_DEVICE_DEPENDENT = {
    "aten::native_layer_norm", "aten::native_group_norm", "aten::native_batch_norm", "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit_no_training", "aten::_batch_norm_with_update", "aten::_batch_norm_no_update",
    "aten::_embedding_bag", "aten::_embedding_bag_forward_only", "aten::mkldnn_rnn_layer",
}  # fmt: skip

# Of these, those that differ by device only in the dtype of statistics, and only in half precision; and those that do
# so in evaluation too, where some devices give no statistics.
_DEVICE_DEPENDENT_IN_HALF = {"aten::native_layer_norm", "aten::native_group_norm", "aten::_batch_norm_with_update"}
_DEVICE_DEPENDENT_IN_EVALUATION = {"aten::native_batch_norm", "aten::_native_batch_norm_legit"}

# They write every element of their target and read none of it.
_OVERWRITING = {
    "aten::zero_", "aten::fill_", "aten::copy_", "aten::normal_", "aten::uniform_", "aten::random_", "aten::bernoulli_",
    "aten::exponential_", "aten::log_normal_", "aten::cauchy_", "aten::geometric_", "aten::_foreach_zero_",
    "aten::_foreach_copy_",
}  # fmt: skip


class OpSchema:
    """One aten overload.

    - `aliases`: its results are views of its first argument
    - `returns_python`: it gives Python values, which only a worker knows
    - `needs_worker_shape`: its result must be learned from a worker, but in full precision where it
      `differs_only_in_half_precision`, and in training too where it `differs_only_in_evaluation`
    - `is_special`: it is not simply an instruction
    - `functional`: the same op without its writes, where it writes and there is one
    - `leading`: how many of its first arguments are tensors that it only reads
    - `mask`: the position of the argument that says which of its results are asked for, or -1
    - `overwrites`: it writes every element of its target and reads none of it
    - `reshapes`: it changes the shape of its first argument in position
    - `returned`: per result, the argument that it is
    - `split`: it does the same to each tensor of a list, and this does it one by one
    """

    __slots__ = (
        "aliases",
        "decomposition",
        "differs_only_in_evaluation",
        "differs_only_in_half_precision",
        "func",
        "functional",
        "is_special",
        "kinds",
        "kwarg_kinds",
        "leading",
        "mask",
        "name",
        "needs_worker_shape",
        "overwrites",
        "random",
        "reinterprets",
        "reshapes",
        "returned",
        "returns_list",
        "returns_python",
        "split",
        "writes",
    )  # fmt: skip

    def __init__(self, func: OpOverload, special: bool) -> None:
        schema = schema_of(func)
        undeclared = _UNDECLARED_WRITES.get(schema.name, ())
        self.func = func
        self.name = str(func)
        self.kwarg_kinds = {a.name: _kind(a, schema.name, a.name in undeclared) for a in schema.arguments}
        self.kinds = tuple(self.kwarg_kinds.values())
        others = [position for position, kind in enumerate(self.kinds) if kind is not Kind.TENSOR]
        self.leading = min(others, default=len(self.kinds))
        self.mask = _mask(schema)
        self.writes = any(kind in (Kind.TARGET, Kind.TARGETS) for kind in self.kinds)
        self.overwrites = schema.name in _OVERWRITING
        self.aliases = not self.writes and any(r.alias_info is not None for r in schema.returns)
        self.reshapes = torch.Tag.inplace_view in func.tags
        self.needs_worker_shape = schema.name in _DEVICE_DEPENDENT
        self.differs_only_in_half_precision = schema.name in _DEVICE_DEPENDENT_IN_HALF
        self.differs_only_in_evaluation = schema.name in _DEVICE_DEPENDENT_IN_EVALUATION
        self.reinterprets = self.name in REINTERPRETING
        checks = not schema.returns and not self.writes  # what it does is to raise, which must not come later
        self.returns_python = checks or any("Tensor" not in str(r.type) for r in schema.returns)
        self.returns_list = len(schema.returns) == 1 and str(schema.returns[0].type).startswith("List")
        self.returned = tuple(_returned_argument(schema, r) for r in schema.returns)
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.functional = _functional(func) if self.writes else ""
        self.decomposition = _decomposition(func)
        self.split = _explicit(func) if self.name.startswith("aten._foreach_") else None
        self.is_special = special or self.reshapes or self.decomposition is not None or self.split is not None


def _kind(argument: Argument, op: str, undeclared_write: bool) -> Kind:
    kind = _KINDS.get(str(argument.type), Kind.CONSTANT)
    if kind is Kind.SCALAR and op in _VALUE_MATTERS:
        return Kind.CONSTANT
    if argument.name in ("pin_memory", "non_blocking"):
        return Kind.IGNORED
    written = undeclared_write or (argument.alias_info is not None and argument.alias_info.is_write)
    if written and argument.name in _UNTRUE_WRITES.get(op, ()):
        return Kind.COPIES
    if written and kind is Kind.TENSOR:
        return Kind.TARGET
    if written and kind is Kind.TENSORS:
        return Kind.TARGETS
    return kind


def _mask(schema: FunctionSchema) -> int:
    """The position of the argument of a backward op that has a bool for each of its results (`output_mask`)."""
    masks = [
        position
        for position, argument in enumerate(schema.arguments)
        if argument.name.endswith("mask") and str(argument.type) == "List[bool]" and len(schema.returns) == argument.N  # type: ignore[attr-defined]
    ]
    return masks[0] if masks else -1


def _decomposition(func: OpOverload) -> Callable[..., Any] | None:
    """How to run an op that is made of others: torch's composites, and whatever is not aten, which a worker would not
    run, by its own implementation in terms of aten."""
    if has_kernel(func, DispatchKey.CompositeImplicitAutograd):
        return func.decompose
    return _explicit(func) if func.namespace != "aten" else None


def _explicit(func: OpOverload) -> Callable[..., Any] | None:
    """Torch's implementation of an op in terms of others, where it has one."""
    if not has_kernel(func, DispatchKey.CompositeExplicitAutograd):
        return None
    return kernel_of(func, DispatchKey.CompositeExplicitAutograd)


def _functional(func: OpOverload) -> str:
    """The overload that computes what this one writes: of the same op, with the same arguments but `out=`. Where an op
    writes to `out=` and to other arguments, none gives them in the order of the arguments."""
    schema = schema_of(func)
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not written:
        return str(func)
    outs = [a for a in schema.arguments if a.is_out]
    if outs and (len(outs) < len(written) or schema.name in _UNDECLARED_WRITES):
        return ""
    name = packet_name(func).removesuffix("_")
    wanted = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
    for packet in (getattr(torch.ops.aten, option, None) for option in (name, f"{name}_functional")):
        for overload in packet.overloads() if packet is not None else ():
            candidate = getattr(packet, overload)
            arguments = schema_of(candidate).arguments
            if [(a.name, str(a.type)) for a in arguments] == wanted and not any(a.alias_info for a in arguments):
                return str(candidate)
    return ""


def _returned_argument(schema: FunctionSchema, result: Argument) -> str | None:
    """The name of the written argument that a result is, or None for a new tensor."""
    if result.alias_info is None or not result.alias_info.is_write:
        return None
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.before_set == result.alias_info.before_set:
            return str(argument.name)
    return None
