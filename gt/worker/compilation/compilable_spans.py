"""Finds spans of ops, which follow each other in a program and can be compiled together, and makes a unit of each.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gt.core.messages import RunOp
from gt.core.meta import TensorMeta
from gt.core.program import scalar_slots
from gt.core.signatures import Arg, ListArg, Number, Scalar, Signature
from gt.worker.bound_programs import BoundProgram
from gt.worker.compilation.compile_units import MAX_CALLS, CompileUnit, UnitCall
from gt.worker.compilation.dynamic_scalars import DYNAMIC_FORMS
from gt.worker.compilation.flattened_ops import CannotFlatten, FlattenedOp, flatten_op
from gt.worker.engines.cleared_memory import leaves_unwritten
from gt.worker.engines.torch_private import find_tags

# Compiled code would check indices inside of a loop over elements: an exception there ends the process if the loop runs
# in several threads, and may leave results half written.
_INDEXING = frozenset([
    "_embedding_bag", "_embedding_bag_forward_only", "_index_put_impl", "_segment_reduce_backward", "_unsafe_index",
    "_unsafe_index_put", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "bincount", "embedding",
    "embedding_dense_backward", "embedding_renorm", "gather", "index", "index_add", "index_copy", "index_fill",
    "index_put", "index_reduce", "index_select", "masked_scatter", "max_unpool2d", "max_unpool3d", "multi_margin_loss",
    "multi_margin_loss_backward", "multilabel_margin_loss_forward", "multilabel_margin_loss_backward", "one_hot", "put",
    "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward", "scatter", "scatter_add",
    "scatter_reduce", "segment_reduce", "take", "take_along_dim", "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
    "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward",
])  # fmt: skip

# Torch raises an error for a divisor of 0; compiled code ends the process.
_DIVIDING = frozenset(["div", "divide", "floor_divide", "remainder", "fmod", "gcd", "lcm", "pow"])

# Torch raises an error for a matrix that is singular.
_SOLVING = ("linalg_", "_linalg_", "cholesky", "lu_", "ormqr", "triangular_solve", "_ctc_loss", "_assert")

# Torch raises an error for values out of the domain.
_CHECKING = frozenset(["binary_cross_entropy"])

# Inductor's formula gives other results than torch's kernel: off by whole units, NaN in place of numbers or numbers in
# place of NaN. The slow test test_op_survey.py finds such ops.
_OTHER_FORMULA = frozenset([
    "acosh", "elu_backward", "erfinv", "floor_divide", "fmod", "hardswish_backward", "hardtanh_backward", "isin",
    "logit", "mvlgamma", "nextafter", "prod", "remainder", "smooth_l1_loss_backward", "soft_margin_loss_backward",
    "softshrink",
])  # fmt: skip
_OTHER_FORMULA_OVERLOADS = frozenset([
    "aten.div.Scalar_mode", "aten.div.Tensor_mode", "aten.div_.Scalar_mode", "aten.div_.Tensor_mode", "aten.pow.Scalar",
])  # fmt: skip
_OTHER_FORMULA_FOR_INTEGERS = frozenset(["mse_loss_backward", "threshold", "threshold_backward"])

# Inductor calls torch's kernel through an executor that AOTInductor does not give to workers.
_WITHOUT_CODE = frozenset(["_conj_physical", "hardshrink_backward", "median", "nanmedian", "softshrink_backward"])

_FUSED = frozenset(["_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"])


def reason_to_stay_eager(signature: Signature, inputs: Sequence[TensorMeta]) -> str | None:
    """Why an op on such tensors is not compiled; None if it may be."""
    name = signature.op.split(".")[1].removesuffix("_")
    has_floats = any(meta.dtype.startswith(("float", "bfloat")) for meta in inputs)
    if signature.random:
        return "it draws random numbers"
    if name in _INDEXING:
        return "it checks the values of indices"
    if name in _DIVIDING and not has_floats:
        return "it divides integers"
    is_other = name in _OTHER_FORMULA or signature.op in _OTHER_FORMULA_OVERLOADS or name.startswith("special_")
    if is_other or (name in _OTHER_FORMULA_FOR_INTEGERS and not has_floats):
        return "Inductor computes it by another formula"
    if name in _WITHOUT_CODE:
        return "Inductor has no code for it"
    if name in _CHECKING or name.startswith(_SOLVING):
        return "it checks values"
    if name in _FUSED:
        return "it is a fused kernel already"
    if leaves_unwritten(signature.op):
        return "it makes memory without writing it"
    if any(meta.dtype.startswith("complex") or meta.dtype.startswith("float8") for meta in inputs):
        return "it computes with numbers that Inductor has no code for"
    if not all(meta.elements for meta in inputs):
        return "a tensor is empty"
    tags = find_tags(signature.op) & {"data_dependent_output", "dynamic_output_shape", "nondeterministic_seeded"}
    return f"its result depends on values ({', '.join(sorted(tags))})" if tags else None


MIN_CALLS = 3  # calls of a unit that is worth compiling


class UncompiledOp(NamedTuple):
    """An op of a program that is not compiled, and why."""

    position: int
    op: str
    reason: str


class PlacedUnit(NamedTuple):
    """A compile unit and its place in a program. `ops` are the positions of its ops, `inputs` the slots of its inputs,
    and `scalars` those of its scalars. `outputs` has, for each slot that its ops
    make, the position among the live tensors of the unit, or None. `op_of_call` has, for each call of the
    unit, the position of its op."""

    ops: range
    unit: CompileUnit
    inputs: tuple[int, ...]
    scalars: tuple[int, ...]
    outputs: tuple[int | None, ...]
    op_of_call: tuple[int, ...]


def find_spans(
    program: BoundProgram,
    is_wanted: Callable[[RunOp], bool],
    metas: Mapping[int, TensorMeta],
    refused: Mapping[int, str],
) -> tuple[list[range], list[UncompiledOp]]:
    """Spans of ops that can be compiled, and the wanted ops that cannot; those in `refused` cannot either. A span ends
    where the scope changes. `metas` are those of the tensors in slots."""
    spans: list[range] = []
    uncompiled: list[UncompiledOp] = []
    start, calls = 0, 0

    def end_span(end: int) -> None:
        if calls >= MIN_CALLS:
            spans.append(range(start, end))

    for position, op in enumerate(program.ops):
        bound = program.bound[position]
        reason = refused.get(position) or _reason(program, op, position, metas) if is_wanted(op) else ""
        if reason:
            uncompiled.append(UncompiledOp(position, bound.op, reason))
        if reason is not None:
            end_span(position)
            start, calls = position + 1, 0
            continue
        added = len(flatten_op(bound, len(op.inputs)).calls)
        if calls and (op.scope != program.ops[start].scope or calls + added > MAX_CALLS):
            end_span(position)
            start, calls = position, 0
        calls += added
    end_span(len(program.ops))
    return spans, uncompiled


def _reason(program: BoundProgram, op: RunOp, position: int, metas: Mapping[int, TensorMeta]) -> str | None:
    """Why an op of a program cannot be compiled; None if it can."""
    try:
        flattened = flatten_op(program.bound[position], len(op.inputs))
    except CannotFlatten as error:
        return str(error)
    if any(slot not in metas for slot in op.inputs):
        return "an input has no value"
    inputs = [metas[slot] for slot in op.inputs]
    reasons = (reason_to_stay_eager(call.signature, inputs) for call in flattened.calls)
    return next((reason for reason in reasons if reason is not None), None)


def make_unit(
    program: BoundProgram,
    ops: range,
    metas: Mapping[int, TensorMeta],
    needed: frozenset[int],
    scalars: Sequence[Number],
    threads: int,
) -> PlacedUnit:
    """The compile unit of the ops at some positions. `needed` are the slots that are used after these ops, and
    `scalars` those with which the program runs."""
    flattened = [flatten_op(program.bound[position], len(program.ops[position].inputs)) for position in ops]
    made = {slot for position in ops for slot in program.ops[position].outputs}
    used = (slot for position in ops for slot in program.ops[position].inputs)
    inputs = tuple(dict.fromkeys(slot for slot in used if slot not in made))
    register_of = {slot: register for register, slot in enumerate(inputs)}
    chosen = [slot for position in ops for slot in scalar_slots(program.ops[position])]
    count = len(inputs)
    calls: list[UnitCall] = []
    op_of_call: list[int] = []
    for position, flat in zip(ops, flattened, strict=True):
        op = program.ops[position]
        places = tuple([slot - chosen[0] for slot in scalar_slots(op)])
        registers = {number: register_of[slot] for number, slot in enumerate(op.inputs)}
        for call in flat.calls:
            for number in call.outputs:
                if number >= 0:
                    registers[number], count = count, count + 1
            outputs = tuple(registers[number] if number >= 0 else -1 for number in call.outputs)
            taken = tuple(registers[number] for number in call.inputs)
            calls.append(UnitCall(call.signature, taken, places, outputs, call.strides))
            op_of_call.append(position)
        register_of |= {slot: registers[number] for slot, number in zip(op.outputs, flat.gives, strict=True)}
    slots = [slot for position in ops for slot in program.ops[position].outputs]
    live = [slot for slot in slots if slot in needed]
    first = program.program.inputs
    kept = _constants([scalars[slot - first] for slot in chosen], program, ops, flattened)
    unit = CompileUnit(
        tuple(calls), tuple(metas[slot] for slot in inputs), kept, tuple(register_of[slot] for slot in live), threads
    )
    outputs_of = tuple(live.index(slot) if slot in needed else None for slot in slots)
    return PlacedUnit(ops, unit, inputs, tuple(chosen), outputs_of, tuple(op_of_call))


def _constants(
    scalars: Sequence[Number], program: BoundProgram, ops: range, flattened: Sequence[FlattenedOp]
) -> tuple[Number | None, ...]:
    """The scalars that the code has as constants. None for a float that may change from call to call, because all calls
    that use it have dynamic forms."""
    kept: list[Number | None] = [None if type(scalar) is float else scalar for scalar in scalars]
    start = 0
    for position, flat in zip(ops, flattened, strict=True):
        for call in flat.calls:
            if call.signature.op not in DYNAMIC_FORMS:
                for index in _scalars_in((*call.signature.args, *call.signature.kwargs.values())):
                    kept[start + index] = scalars[start + index]
        start += len(program.ops[position].scalars)
    return tuple(kept)


def _scalars_in(args: Sequence[Arg]) -> list[int]:
    found: list[int] = []
    for arg in args:
        if isinstance(arg, Scalar):
            found.append(arg.index)
        elif isinstance(arg, ListArg):
            found += _scalars_in(arg.values)
    return found
