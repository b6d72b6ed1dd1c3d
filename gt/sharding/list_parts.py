"""Ops on lists of tensors, as the same op on some positions of the lists: their tensors may be on different workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gt.core.signatures import Arg, Input, ListArg, Scalar, Signature


class ListPart(NamedTuple):
    """The same op on some positions of its lists. `inputs`, `outputs` and `scalars` are the positions of its own among
    those of the whole call; the outputs are new tensors, then new versions."""

    signature: Signature
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scalars: tuple[int, ...]


def is_on_lists(signature: Signature) -> bool:
    """Whether an op takes lists of tensors, and treats those of one position independently of the others."""
    return signature.op.startswith("aten._foreach_")


def leaders(signature: Signature) -> tuple[int, ...]:
    """The inputs of the first list of tensors, one for each position; the written ones of an op that writes. Empty if
    the call is not on lists of one length, with a result for each position."""
    lists = [arg.values for arg in (*signature.args, *signature.kwargs.values()) if isinstance(arg, ListArg)]
    found = [[value.index for value in values if isinstance(value, Input)] for values in lists]
    first = next(filter(None, found), [])
    is_regular = {len(values) for values in lists} == {len(first)} and len(signature.outputs) in (0, len(first))
    is_known = all(0 <= index < len(signature.paths) for indices in found for index in indices)
    return tuple(first) if is_regular and is_known else ()


def part_of(signature: Signature, chosen: Sequence[int]) -> ListPart:
    """The part of a call for the chosen positions of its lists."""
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
    part = Signature(
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
    return ListPart(part, tuple(inputs), (*made, *versions), tuple(scalars))


def _chosen(arg: Arg, positions: Sequence[int]) -> Arg:
    return ListArg(tuple([arg.values[position] for position in positions])) if isinstance(arg, ListArg) else arg


def _renumbered(arg: Arg, inputs: dict[int, int], scalars: dict[int, int]) -> Arg:
    if isinstance(arg, ListArg):
        return ListArg(tuple([_renumbered(value, inputs, scalars) for value in arg.values]))
    if isinstance(arg, Input):
        return Input(inputs[arg.index])
    return Scalar(scalars[arg.index]) if isinstance(arg, Scalar) else arg
