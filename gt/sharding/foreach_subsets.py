"""Foreach ops, which take lists of tensors, restricted to some positions of their lists.

The tensors at different positions may be on different workers, which then run the op on subsets of the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gt.core.signatures import Arg, Input, ListArg, Scalar, Signature


class ForeachSubset(NamedTuple):
    """A foreach op on some positions of its lists. `inputs`, `outputs` and `scalars` are those that the subset uses, as
    positions among those of the whole call; the outputs are new tensors, then new versions."""

    signature: Signature
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scalars: tuple[int, ...]


def is_foreach(signature: Signature) -> bool:
    """Whether an op takes lists of tensors and computes each position of the lists independently of the others."""
    return signature.op.startswith("aten._foreach_")


def is_one_by_one(signature: Signature) -> bool:
    """Whether an op computes each position of its lists by itself: foreach ops, and fused optimizers, some of whose
    lists may be empty."""
    return is_foreach(signature) or signature.op.startswith("aten._fused_")


def first_list_inputs(signature: Signature) -> tuple[int, ...]:
    """The inputs in the first list of tensors, one for each position; an op that writes, writes to these. Empty if the
    lists differ in length, apart from empty ones, or if there is not one result for each position."""
    arguments = (*signature.args, *signature.kwargs.values())
    lists = [arg.values for arg in arguments if isinstance(arg, ListArg) and arg.values]
    found = [[value.index for value in values if isinstance(value, Input)] for values in lists]
    first = next(filter(None, found), [])
    is_regular = {len(values) for values in lists} == {len(first)} and len(signature.outputs) in (0, len(first))
    is_known = all(0 <= index < len(signature.paths) for indices in found for index in indices)
    return tuple(first) if is_regular and is_known else ()


def subset_of(signature: Signature, chosen: Sequence[int]) -> ForeachSubset:
    """A call on the chosen positions of its lists."""
    args = [_chosen(arg, chosen) for arg in signature.args]
    kwargs = {name: _chosen(arg, chosen) for name, arg in signature.kwargs.items()}
    leaves = [
        leaf for arg in (*args, *kwargs.values()) for leaf in (arg.values if isinstance(arg, ListArg) else (arg,))
    ]
    inputs = [leaf.index for leaf in leaves if isinstance(leaf, Input)]
    scalars = [leaf.index for leaf in leaves if isinstance(leaf, Scalar)]
    numbers = ({old: new for new, old in enumerate(inputs)}, {old: new for new, old in enumerate(scalars)})
    written = [number for number, position in enumerate(signature.writes) if position in numbers[0]]
    made = list(chosen) if signature.outputs else []
    restricted = Signature(
        signature.op,
        tuple([_renumbered(arg, *numbers) for arg in args]),
        {name: _renumbered(arg, *numbers) for name, arg in kwargs.items()},
        tuple([signature.paths[position] for position in inputs]),
        tuple([numbers[0][signature.writes[number]] for number in written]),
        tuple([signature.outputs[position] for position in made]),
        tuple(range(len(made))),
        signature.random,
        signature.default_dtype,
        signature.functional,
        signature.layout,
        tuple([signature.fully_written[number] for number in written]) if signature.fully_written else (),
    )
    versions = [len(signature.outputs) + number for number in written]
    return ForeachSubset(restricted, tuple(inputs), (*made, *versions), tuple(scalars))


def _chosen(arg: Arg, positions: Sequence[int]) -> Arg:
    is_list = isinstance(arg, ListArg) and arg.values
    return ListArg(tuple([arg.values[position] for position in positions])) if is_list else arg  # type: ignore[union-attr]


def _renumbered(arg: Arg, inputs: dict[int, int], scalars: dict[int, int]) -> Arg:
    if isinstance(arg, ListArg):
        return ListArg(tuple([_renumbered(value, inputs, scalars) for value in arg.values]))
    if isinstance(arg, Input):
        return Input(inputs[arg.index])
    return Scalar(scalars[arg.index]) if isinstance(arg, Scalar) else arg
