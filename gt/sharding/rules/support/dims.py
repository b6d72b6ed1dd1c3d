"""Dims by number: names for them in the text of a rule, factors for them, and shapes after reducing or broadcasting."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from gt.sharding.boxes import Shape
from gt.sharding.factors import Dim, FactorRef, OpShardingRule, PartialPassthrough, RuleBuilder, bind
from gt.sharding.op_calls import Lowering, OpCall
from gt.sharding.rules.entry import Expand, OpEntry
from gt.sharding.spec import ShardingSpec


def wrap_dim(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def wrap_dims(dims: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """One dim or several as non-negative dims in order; none for a tensor without dims."""
    given = (dims,) if isinstance(dims, int) else dims
    return tuple(sorted({wrap_dim(dim, rank) for dim in given})) if rank else ()


def is_any_cut(spec: ShardingSpec, dims: Sequence[int]) -> bool:
    return any(spec.dims[dim] for dim in dims)


def reduced_shape(shape: Shape, dims: Sequence[int], keepdim: bool) -> Shape:
    if keepdim:
        return tuple([1 if dim in dims else size for dim, size in enumerate(shape)])
    return tuple([size for dim, size in enumerate(shape) if dim not in dims])


def broadcast_shape(shapes: Sequence[Shape]) -> Shape:
    rank = max(map(len, shapes))
    aligned = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple([next((size for size in sizes if size != 1), 1) for sizes in zip(*aligned, strict=True)])


def dim_factors(builder: RuleBuilder, shape: Shape, uncut: Container[int] = ()) -> list[Dim]:
    """A factor for every dim of a shape, named d0, d1, ...; none for the `uncut` dims."""
    return [(FactorRef(builder.factor(f"d{dim}", size)),) if dim not in uncut else () for dim, size in enumerate(shape)]


# --- The text of a rule -----------------------------------------------------------------------------------------------


def dim_names(rank: int, letter: str = "d") -> list[str]:
    return [f"{letter}{dim}" for dim in range(rank)]


def reduced_names(names: Sequence[str], dims: Sequence[int], keepdim: bool) -> list[str]:
    """The names of the dims of a tensor after reducing some of them."""
    kept = ["1" if dim in dims else name for dim, name in enumerate(names)]
    return kept if keepdim else [name for dim, name in enumerate(names) if dim not in dims]


def rule_text(
    operands: Sequence[Sequence[str]], results: Sequence[Sequence[str]], roles: Mapping[str, Sequence[str]]
) -> str:
    """The text of a rule from the names of the dims of its tensors. `roles` are those of factors, such as
    `{"whole": names}`."""
    sides = [", ".join([" ".join(names) or "..." for names in side]) for side in (operands, results)]
    tail = "; ".join([f"{label}: {' '.join(names)}" for label, names in roles.items() if names])
    return " -> ".join(sides) + (f" | {tail}" if tail else "")


def operand_names(call: OpCall, dims: Sequence[tuple[str, Sequence[str]]]) -> list[Sequence[str]]:
    """The names of the dims of each input. `dims` has the name and the dims of each argument by position; absent tensor
    arguments are skipped."""
    positions = [call.tensor(position, name) for position, (name, _) in enumerate(dims)]
    names_of = {input_: names for input_, (_, names) in zip(positions, dims, strict=True) if input_ is not None}
    return [names_of[position] for position in range(len(call.inputs))]


def whole_dim_rule(
    call: OpCall, dim: int, passthroughs: Sequence[PartialPassthrough] = (), lowering: Lowering | None = None
) -> OpShardingRule:
    """The rule of an op whose tensors all have the same dims, one of which is whole and may have another size in the
    results."""
    names = dim_names(len(call.inputs[0].shape))
    results = [name if position != dim else "result" for position, name in enumerate(names)]
    whole = [names[dim], "result"] if names else []
    text = rule_text([names] * len(call.inputs), [results] * len(call.outputs), {"whole": whole})
    return bind(text, call.shapes, call.result_shapes, passthroughs=passthroughs, lowering=lowering)


def dim_argument(call: OpCall, position: int) -> int:
    """The argument `dim`, by default the last dim of the first input."""
    return wrap_dim(call.arg(position, "dim", -1), len(call.inputs[0].shape))


def whole_dim_entry(position: int, expand: Expand | None = None) -> OpEntry:
    """An op that needs one dim whole; `position` is that of its argument `dim`."""
    return OpEntry(lambda call: whole_dim_rule(call, dim_argument(call, position)), expand)
