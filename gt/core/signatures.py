"""Layouts, signatures and programs: the parts of messages that are sent once and then named by an id.

A *signature* is an op call without its tensors and scalars. A *program* is the list of steps that workers run
for a signature on sharded tensors; each worker derives its own part from the layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias, Union

from msgspec import Meta, Struct

from gt.core.meta import TensorMeta

MAX_NAME, MAX_TEXT = 512, 1 << 18  # characters
Name: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
"""A name, without control characters: names are shown on terminals and in logs."""
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
Number: TypeAlias = Union[bool, int, float]


def as_name(text: str) -> str:
    """A text that is only shown, as a Name: characters that a message cannot hold become "?", and the end is cut off.
    Paths with bytes that are not UTF-8 have such characters, and names of functions, programs and hosts may."""
    return "".join([character if character.isprintable() else "?" for character in text[:MAX_NAME]])


def as_text(text: str) -> str:
    """A text that is only shown, as a Text: characters that are not Unicode become "?", and the end is cut off."""
    return text[:MAX_TEXT].encode(errors="replace").decode()


# Layouts: the part of a tensor that each worker of a mesh holds (see gt.sharding.spec)

Axis: TypeAlias = Annotated[str, Meta(max_length=64)]


class MeshRecord(Struct, array_like=True, frozen=True):
    """A grid of workers: its size and name per axis, and the workers in row-major order. `hosts` numbers the machine of
    each worker; it is empty if all are on one."""

    shape: Annotated[tuple[int, ...], Meta(max_length=16)]
    axis_names: tuple[Axis, ...]
    workers: Annotated[tuple[int, ...], Meta(max_length=1 << 16)]
    name: Axis = ""
    hosts: Annotated[tuple[int, ...], Meta(max_length=1 << 16)] = ()


class SpecRecord(Struct, array_like=True, frozen=True):
    """The layout of a tensor: per dim the axes that cut it, and the axes along which its shards are partial, to be
    reduced by `kind`. `cuts` are the intervals of the shards of each dim, None for balanced shards."""

    mesh: MeshRecord
    dims: Annotated[tuple[tuple[Axis, ...], ...], Meta(max_length=64)]
    partial: tuple[Axis, ...] = ()
    kind: Axis = "sum"
    cuts: tuple[Union[None, tuple[tuple[int, int], ...]], ...] = ()


class PolicyRecord(Struct, array_like=True, frozen=True):
    """The mesh on which the ops of a scope run, and the layout of their results (see gt.signals.policy): `lead` are
    the axes that shard their first dims, `tail` the last ones; with `closed`, no other dim is sharded. With
    `constrains` False the policy gives only the mesh. With `places` False another scope may move the tensors that are
    created in this one. With `keeps_partial` a result that is partial along axes of the layout is left so, as the
    gradient of a weight is."""

    mesh: MeshRecord
    lead: Annotated[tuple[tuple[Axis, ...], ...], Meta(max_length=64)] = ()
    tail: Annotated[tuple[tuple[Axis, ...], ...], Meta(max_length=64)] = ()
    closed: bool = False
    constrains: bool = True
    places: bool = True
    keeps_partial: bool = False


# Signatures: op calls without their tensors and scalars


class _TaggedArg(Struct, tag=True, frozen=True):
    """Base of the arguments that are not literals."""


class Input(_TaggedArg, tag="in", frozen=True):
    """The input tensor at position `index` of the instruction."""

    index: int


class Scalar(_TaggedArg, tag="scalar", frozen=True):
    """The scalar at position `index` of the instruction. Its value does not change the shapes."""

    index: int


class DType(_TaggedArg, tag="dtype", frozen=True):
    name: Name


class TorchLayout(_TaggedArg, tag="layout", frozen=True):
    name: Name


class MemoryFormat(_TaggedArg, tag="format", frozen=True):
    name: Name


class Complex(_TaggedArg, tag="complex", frozen=True):
    real: float
    imag: float


class WorkerDevice(_TaggedArg, tag="here", frozen=True):
    """A device argument: the device of the worker that runs the op."""


class ListArg(_TaggedArg, tag="items", frozen=True):
    values: tuple[Arg, ...]


Arg: TypeAlias = Union[
    None, bool, int, float, Text, Input, Scalar, DType, TorchLayout, MemoryFormat, Complex, WorkerDevice, ListArg
]


class ViewStep(Struct, array_like=True, frozen=True):
    """One view op on the path from a storage's base to an alias of it. `args` follow the tensor. `pick` selects one
    output of an op with several (split, unbind). `strides` are those of the viewed tensor, for an op that depends on
    them (as_strided). `results` are the metas of all outputs."""

    op: Name
    args: tuple[Arg, ...]
    kwargs: dict[Name, Arg]
    pick: int | None = None
    strides: tuple[int, ...] | None = None
    results: tuple[TensorMeta, ...] = ()


ViewSteps: TypeAlias = Annotated[tuple[ViewStep, ...], Meta(max_length=4096)]


class AlgorithmRequest(Struct, array_like=True, frozen=True):
    """The algorithm by which an op is to run, by its name in the table of rules; "": the cheapest one. `panel`: the
    elements of a summed dim that it takes at a time; 0: as it chooses. `mesh`: where it runs; None: where most bytes of
    its inputs are."""

    name: Name
    panel: Annotated[int, Meta(ge=0)] = 0
    mesh: MeshRecord | None = None


class Signature(Struct, array_like=True, frozen=True):
    """An op call without its tensors and scalars.

    `paths[i]` is the view through which input i is used. `writes` are the positions of the inputs that the op
    writes to: their ids are consumed, and the instruction names the ids of the new versions after those of the
    outputs. `outputs` is empty if the shapes depend on data; `positions` are their positions among the new tensors that
    the op returns, some of which may be absent. A `random` op has a `random_key`. `default_dtype` is
    torch's default floating dtype at the call. `functional` names the same op without its writes, if there is one.
    `layout` is the layout of the outputs, if the user gave one. `fully_written` are the metas of the written inputs,
    if the op writes every element of them and reads none: such an input needs no value before. `algorithm` is the one
    that the user asked for, if any.
    """

    op: Name
    args: tuple[Arg, ...]
    kwargs: dict[Name, Arg]
    paths: tuple[ViewSteps, ...]
    writes: tuple[int, ...]
    outputs: tuple[TensorMeta, ...]
    positions: tuple[int, ...]
    random: bool = False
    default_dtype: Name = "float32"
    functional: Name = ""
    layout: SpecRecord | None = None
    fully_written: tuple[TensorMeta, ...] = ()
    algorithm: AlgorithmRequest | None = None


# Programs: the steps that workers run for an op on sharded tensors


def random_key(scalars: Sequence[Number]) -> int:
    """The key of a random op, which is the last of its scalars."""
    return int(scalars[-1])


def with_random_key(scalars: Sequence[Number], key: Number) -> tuple[Number, ...]:
    """The scalars of a random op, with another key."""
    return (*scalars[:-1], key)


class _Step(Struct, tag=True, frozen=True, array_like=True):
    """Base of the steps of a program."""


class Compute(_Step, tag="compute", frozen=True):
    """Run an op on shards.

    `op`, `args`, `inputs_meta` and `outputs_meta` are those of the op on whole tensors; each worker derives its own
    part from `operand_specs` and `result_specs`. Results go to the registers `outputs`. A result with a register in
    `into` (-1: none) is written into that register's tensor: by `in_place`, the user's in-place op, which is run with
    `inputs`; if that is None or cannot run on shards, the result is copied. `casts`: results are cast to their dtypes,
    as a write would (a comparison in place, for example). `positions` are those of the outputs among the results that
    the op returns; empty: all that are not None.
    """

    op: Name
    args: tuple[Arg, ...]
    kwargs: dict[Name, Arg]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    inputs_meta: tuple[TensorMeta, ...]
    outputs_meta: tuple[TensorMeta, ...]
    operand_specs: tuple[SpecRecord, ...]
    result_specs: tuple[SpecRecord, ...]
    into: tuple[int, ...] = ()
    in_place: Signature | None = None
    random: bool = False
    default_dtype: Name = "float32"
    is_view: bool = False
    casts: bool = False
    positions: tuple[int, ...] = ()


class Whole(_Step, tag="whole", frozen=True):
    """Run an op unchanged on whole tensors."""

    signature: Signature
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Move(_Step, tag="move", frozen=True):
    """Move a tensor to another layout."""

    input: int
    output: int
    meta: TensorMeta
    source: SpecRecord
    target: SpecRecord


class WriteBack(_Step, tag="write_back", frozen=True):
    """Copy a written view back into its base, if the view has its own memory. `steps` made the view: pairs of a
    step's number and the position of its result."""

    base: int
    view: int
    steps: tuple[tuple[int, int], ...]


class Refuse(_Step, tag="refuse", frozen=True):
    """Fail an op whose sharding rule raised an error; its outputs get no value."""

    op: Name
    reason: Text
    outputs: tuple[int, ...]


OpProgramStep: TypeAlias = Union[Compute, Whole, Move, WriteBack, Refuse]


class OpProgram(Struct, array_like=True, frozen=True):
    """Steps over registers. `takes` are the registers of the command's inputs, `gives` the registers of its outputs.
    The inputs at the positions `consumes` are removed afterwards; with `writes_all` they are fully written and not
    read, so they need no value before."""

    steps: Annotated[tuple[OpProgramStep, ...], Meta(max_length=1 << 12)]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    consumes: tuple[int, ...] = ()
    writes_all: bool = False
