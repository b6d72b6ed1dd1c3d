"""Rules for which dims are named by number: the text of a rule from lists of names, and shapes that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gt.sharding.factors import OpShardingRule, PartialPassthrough, bind
from gt.sharding.op_calls import Lowering, OpCall
from gt.sharding.spec import Shape, ShardingSpec


def wrap(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def wrap_all(dims: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """One dim or several, without negative ones; a tensor without dims has none."""
    given = (dims,) if isinstance(dims, int) else dims
    return tuple(sorted({wrap(dim, rank) for dim in given})) if rank else ()


def dims_cut(spec: ShardingSpec, dims: Sequence[int]) -> bool:
    return any(spec.dims[dim] for dim in dims)


def named(rank: int, letter: str = "d") -> list[str]:
    return [f"{letter}{dim}" for dim in range(rank)]


def rule_text(
    operands: Sequence[Sequence[str]], results: Sequence[Sequence[str]], classes: Mapping[str, Sequence[str]]
) -> str:
    """A rule from the names of the dims of its tensors: `{"whole": names}` are the classes of factors."""
    sides = [", ".join([" ".join(names) or "..." for names in side]) for side in (operands, results)]
    tail = "; ".join([f"{label}: {' '.join(names)}" for label, names in classes.items() if names])
    return " -> ".join(sides) + (f" | {tail}" if tail else "")


def without(names: Sequence[str], dims: Sequence[int], keepdim: bool) -> list[str]:
    """The names of what is left when dims are reduced."""
    kept = ["1" if dim in dims else name for dim, name in enumerate(names)]
    return kept if keepdim else [name for dim, name in enumerate(names) if dim not in dims]


def reduced_shape(shape: Shape, dims: Sequence[int], keepdim: bool) -> Shape:
    if keepdim:
        return tuple([1 if dim in dims else size for dim, size in enumerate(shape)])
    return tuple([size for dim, size in enumerate(shape) if dim not in dims])


def whole_along(
    call: OpCall, dim: int, passes: Sequence[PartialPassthrough] = (), lowering: Lowering | None = None
) -> OpShardingRule:
    """All tensors have the same dims, of which one is whole, and may have another size in the results."""
    names = named(len(call.inputs[0].shape))
    results = [name if place != dim else "result" for place, name in enumerate(names)]
    whole = [names[dim], "result"] if names else []
    text = rule_text([names] * len(call.inputs), [results] * len(call.outputs), {"whole": whole})
    return bind(text, call.shapes, call.result_shapes, passes=passes, lowering=lowering)


def operands_of(call: OpCall, dims: Sequence[tuple[str, Sequence[str]]]) -> list[Sequence[str]]:
    """The names of the dims of each input, from those of the arguments by place; absent tensors have none."""
    places = [call.tensor(place, name) for place, (name, _) in enumerate(dims)]
    named_dims = {place: names for place, (_, names) in zip(places, dims, strict=True) if place is not None}
    return [named_dims[place] for place in range(len(call.inputs))]
