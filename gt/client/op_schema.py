"""`OpSchema`: the facts about an op overload that its dispatch needs, read from its schema once."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from gt.client.storage import REINTERPRETING
from gt.client.torch_patches.dispatch import (
    Argument,
    DispatchKey,
    FunctionSchema,
    OpOverload,
    has_kernel,
    kernel_of,
    overriding_kernel,
    packet_name,
    schema_of,
)


class ArgumentKind(Enum):
    """How an argument takes part in a call and in its cache key."""

    TENSOR = "tensor"
    TENSORS = "tensors"
    TARGET = "target"  # a tensor that the op writes to
    TARGETS = "targets"
    TARGETS_OR_COPIES = "targets or copies"  # TARGETS whose plain tensors are copied, and the copies are written
    SCALAR = "scalar"  # the shapes do not depend on its value
    SCALARS = "scalars"
    CONSTANT = "constant"
    GENERATOR = "generator"
    DEVICE = "device"
    IGNORED = "ignored"


_KINDS = {
    "Tensor": ArgumentKind.TENSOR,
    "Optional[Tensor]": ArgumentKind.TENSOR,
    "List[Tensor]": ArgumentKind.TENSORS,
    "List[Optional[Tensor]]": ArgumentKind.TENSORS,
    "Optional[List[Tensor]]": ArgumentKind.TENSORS,
    "Optional[List[Optional[Tensor]]]": ArgumentKind.TENSORS,
    "number": ArgumentKind.SCALAR,
    "Optional[number]": ArgumentKind.SCALAR,
    "float": ArgumentKind.SCALAR,
    "Optional[float]": ArgumentKind.SCALAR,
    "List[number]": ArgumentKind.SCALARS,
    "Optional[Generator]": ArgumentKind.GENERATOR,
    "Generator": ArgumentKind.GENERATOR,
    "Device": ArgumentKind.DEVICE,
    "Optional[Device]": ArgumentKind.DEVICE,
}

# Ops whose output shape, validity or sharding rule depends on the value of a scalar, which is then part of the key.
_VALUE_MATTERS = {
    "aten::arange", "aten::range", "aten::pow", "aten::pow_", "aten::float_power", "aten::_foreach_pow",
    "aten::linalg_vector_norm", "aten::norm", "aten::dist",  # the order decides how shards are put together
    "aten::histc",  # equal ends of its bins mean those of all elements
}  # fmt: skip

# Arguments that switch off the random numbers of an op, by a probability of 0 or by False.
_RANDOM_SWITCHES = ("dropout_p", "train", "training")

# Arguments that ops write to although their schema does not declare it.
_UNDECLARED_WRITES = {"aten::native_batch_norm": ("running_mean", "running_var")}

# Lists that ops do not write to although their schema declares it. They may hold plain tensors, such as the step
# counts of an optimizer.
_FALSE_WRITES = {"aten::_fused_adagrad_": ("state_steps",)}

# Ops whose results differ by device in dtype or shape (the statistics of a norm, for example), while torch's shape
# functions do not know the device of the workers: the first call is a query.
_DEVICE_DEPENDENT = {
    "aten::native_layer_norm", "aten::native_group_norm", "aten::native_batch_norm", "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit_no_training", "aten::_batch_norm_with_update", "aten::_batch_norm_no_update",
    "aten::_embedding_bag", "aten::_embedding_bag_forward_only", "aten::mkldnn_rnn_layer",
}  # fmt: skip

# Of these, ops that differ in half precision only: in the dtype of statistics.
_DEVICE_DEPENDENT_IN_HALF = {"aten::native_layer_norm", "aten::native_group_norm", "aten::_batch_norm_with_update"}
# Of these, ops that differ in evaluation mode too: some devices give no statistics.
_DEVICE_DEPENDENT_IN_EVALUATION = {"aten::native_batch_norm", "aten::_native_batch_norm_legit"}

# Ops on lists that are split if there are several workers: results of other shapes than the tensors, or written tensors
# that need no value before, each of which may be without one.
_SPLIT_LISTS = {
    "aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum", "aten::_foreach_mm", "aten::_foreach_zero_",
    "aten::_foreach_copy_",
}  # fmt: skip

# Ops that write every element of their target and read none of it.
_WRITES_ALL = {
    "aten::zero_", "aten::fill_", "aten::copy_", "aten::normal_", "aten::uniform_", "aten::random_", "aten::bernoulli_",
    "aten::exponential_", "aten::log_normal_", "aten::cauchy_", "aten::geometric_", "aten::_foreach_zero_",
    "aten::_foreach_copy_",
}  # fmt: skip


# Ops that torch's tracer does not record: it records what their kernels call.
_UNTRACED = {"aten::convolution"}


class OpSchema:
    """One aten overload.

    - `aliases`: its results are views of its first argument
    - `returns_python`: it returns Python values, which only a worker knows
    - `needs_worker_shape`: its results differ by device, so that a worker must report their geometries. Float32 and
      float64 need no report if it `differs_only_in_half`, and none in training if it `differs_in_evaluation`
    - `is_special`: a function of special_ops.py or a decomposition runs it
    - `functional`: the op that computes the same without writing, for an op that writes, or ""
    - `is_untraced`: torch's tracer records another op in place of it, and it is special inside a trace only
    - `leading`: how many of its first arguments are tensors that it only reads
    - `random`: it may take random numbers; `draws` tells whether a call does
    - `mask`: the position of the argument that selects which results are computed, or -1
    - `writes_all`: it writes every element of its target and reads none of it
    - `reshapes`: it changes the shape of its first argument in place
    - `returned`: for each result, the name of the written argument that it is, or None
    - `split`: its implementation one tensor at a time, for an op on lists of tensors; `joins` if it is one instruction
      with any number of workers
    """

    __slots__ = (
        "_random_switch",
        "aliases",
        "decomposition",
        "differs_in_evaluation",
        "differs_only_in_half",
        "func",
        "functional",
        "is_special",
        "is_untraced",
        "joins",
        "kinds",
        "kwarg_kinds",
        "leading",
        "mask",
        "name",
        "needs_worker_shape",
        "random",
        "reinterprets",
        "reshapes",
        "returned",
        "returns_list",
        "returns_python",
        "split",
        "writes",
        "writes_all",
    )  # fmt: skip

    def __init__(self, func: OpOverload, special: bool) -> None:
        schema = schema_of(func)
        undeclared = _UNDECLARED_WRITES.get(schema.name, ())
        self.func = func
        self.name = str(func)
        self.kwarg_kinds = {a.name: _kind(a, schema.name, a.name in undeclared) for a in schema.arguments}
        self.kinds = tuple(self.kwarg_kinds.values())
        others = [position for position, kind in enumerate(self.kinds) if kind is not ArgumentKind.TENSOR]
        self.leading = min(others, default=len(self.kinds))
        self.mask = _mask(schema)
        self.writes = any(kind in (ArgumentKind.TARGET, ArgumentKind.TARGETS) for kind in self.kinds)
        self.writes_all = schema.name in _WRITES_ALL
        self.aliases = not self.writes and any(r.alias_info is not None for r in schema.returns)
        self.reshapes = torch.Tag.inplace_view in func.tags
        self.needs_worker_shape = schema.name in _DEVICE_DEPENDENT
        self.differs_only_in_half = schema.name in _DEVICE_DEPENDENT_IN_HALF
        self.differs_in_evaluation = schema.name in _DEVICE_DEPENDENT_IN_EVALUATION
        self.reinterprets = self.name in REINTERPRETING
        is_assertion = not schema.returns and not self.writes  # it must raise on the user's line
        self.returns_python = is_assertion or any("Tensor" not in str(r.type) for r in schema.returns)
        self.returns_list = len(schema.returns) == 1 and str(schema.returns[0].type).startswith("List")
        self.returned = tuple(_returned_argument(schema, r) for r in schema.returns)
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self._random_switch = _random_switch(schema) if self.random else None
        self.functional = _functional(func) if self.writes else ""
        self.decomposition = _decomposition(func)
        self.split = _explicit_kernel(func) if self.name.startswith("aten._foreach_") else None
        self.joins = self.split is not None and schema.name not in _SPLIT_LISTS
        self.is_untraced = schema.name in _UNTRACED
        self.is_special = special or self.reshapes or self.decomposition is not None or self.split is not None

    def draws(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments takes random numbers: attention without dropout takes none, and must
        leave torch's generator as it was."""
        if self._random_switch is None:
            return self.random
        position, argument = self._random_switch
        given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        return given is None or bool(given)


def _kind(argument: Argument, op: str, undeclared_write: bool) -> ArgumentKind:
    """The kind of an argument, by its type and by the exceptions listed above."""
    kind = _KINDS.get(str(argument.type), ArgumentKind.CONSTANT)
    if kind is ArgumentKind.SCALAR and (op in _VALUE_MATTERS or argument.name in _RANDOM_SWITCHES):
        return ArgumentKind.CONSTANT
    if argument.name in ("pin_memory", "non_blocking"):
        return ArgumentKind.IGNORED
    written = undeclared_write or (argument.alias_info is not None and argument.alias_info.is_write)
    if written and argument.name in _FALSE_WRITES.get(op, ()):
        return ArgumentKind.TARGETS_OR_COPIES
    if written and kind is ArgumentKind.TENSOR:
        return ArgumentKind.TARGET
    if written and kind is ArgumentKind.TENSORS:
        return ArgumentKind.TARGETS
    return kind


def _random_switch(schema: FunctionSchema) -> tuple[int, Argument] | None:
    """The argument that can switch off the random numbers of an op, and its position."""
    arguments = enumerate(schema.arguments)
    return next(((n, argument) for n, argument in arguments if argument.name in _RANDOM_SWITCHES), None)


def _mask(schema: FunctionSchema) -> int:
    """The position of a backward op's argument that has a bool for each result (`output_mask`)."""
    masks = [
        position
        for position, argument in enumerate(schema.arguments)
        if argument.name.endswith("mask") and str(argument.type) == "List[bool]" and len(schema.returns) == argument.N  # type: ignore[attr-defined]
    ]
    return masks[0] if masks else -1


def _decomposition(func: OpOverload) -> Callable[..., Any] | None:
    """The implementation in terms of other ops: of torch's composites, and of ops of other libraries, which a worker
    does not run. Composites with a CPU kernel (`silu_backward`) are not decomposed: the kernel computes in float32
    where the ops of the composite round each step to a half-precision dtype. In inference mode composites reach a
    tensor's class. The kernel that decomposes them otherwise does it there too: `func.decompose` prefers Python
    functions, which may give other strides, or a copy in place of an argument."""
    if has_kernel(func, DispatchKey.CompositeImplicitAutograd) and not has_kernel(func, DispatchKey.CPU):
        return overriding_kernel(func) or kernel_of(func, DispatchKey.CompositeImplicitAutograd)
    return _explicit_kernel(func) if func.namespace != "aten" else None


def _explicit_kernel(func: OpOverload) -> Callable[..., Any] | None:
    """Torch's implementation of an op in terms of others, if it has one."""
    if not has_kernel(func, DispatchKey.CompositeExplicitAutograd):
        return None
    return kernel_of(func, DispatchKey.CompositeExplicitAutograd)


def _functional(func: OpOverload) -> str:
    """The out-of-place overload of the same op, with the same arguments except `out=`; "" if there is none, or if the
    op writes to `out=` and to other arguments: no overload returns these in the same order."""
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
