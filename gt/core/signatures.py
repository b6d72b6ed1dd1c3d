"""What an op call is, and what a worker does for it: the parts of messages that outlive a single call.

A *signature* is an op with everything but its tensors and changing numbers; it is sent once and then named by a code. A
*program* is what workers do for a signature on tensors that are cut, each deriving its own part from the layouts.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, Union

from msgspec import Meta, Struct

from gt.core.meta import TensorMeta

Name: TypeAlias = Annotated[str, Meta(max_length=512)]
Text: TypeAlias = Annotated[str, Meta(max_length=1 << 18)]
Number: TypeAlias = Union[bool, int, float]


# --- Layouts: which part of a tensor each worker of a mesh holds (gt.sharding.spec gives them meaning) ----------------

Axis: TypeAlias = Annotated[str, Meta(max_length=64)]
Interval: TypeAlias = tuple[int, int]


class MeshRecord(Struct, array_like=True, frozen=True):
    shape: Annotated[tuple[int, ...], Meta(max_length=16)]
    axis_names: tuple[Axis, ...]
    workers: Annotated[tuple[int, ...], Meta(max_length=1 << 16)]
    name: Axis = ""


class SpecRecord(Struct, array_like=True, frozen=True):
    mesh: MeshRecord
    dims: Annotated[tuple[tuple[Axis, ...], ...], Meta(max_length=64)]
    partial: tuple[Axis, ...] = ()
    kind: Axis = "sum"
    cuts: tuple[Union[None, tuple[Interval, ...]], ...] = ()


class PolicyRecord(Struct, array_like=True, frozen=True):
    """Where the ops of a scope run, and how their results are to be laid out (gt.signals.policy gives it meaning):
    `lead` are the axes that cut their first dims, `tail` their last ones; where `closed`, nothing else is cut. A scope
    that does not `ask` only says where. Where it does not `settle` tensors, another scope may put them elsewhere."""

    mesh: MeshRecord
    lead: Annotated[tuple[tuple[Axis, ...], ...], Meta(max_length=64)] = ()
    tail: Annotated[tuple[tuple[Axis, ...], ...], Meta(max_length=64)] = ()
    closed: bool = False
    asks: bool = True
    settles: bool = True


# --- Signatures: what an op call is, apart from its tensors and changing numbers --------------------------------------


class _Arg(Struct, tag=True, frozen=True):
    """Base of the non-literal arguments of a signature."""


class Input(_Arg, tag="in", frozen=True):
    """The n-th tensor of the instruction."""

    index: int


class Scalar(_Arg, tag="scalar", frozen=True):
    """The n-th number of the instruction: its value changes from call to call without changing the shapes."""

    index: int


class DType(_Arg, tag="dtype", frozen=True):
    name: Name


class TorchLayout(_Arg, tag="layout", frozen=True):
    name: Name


class MemoryFormat(_Arg, tag="format", frozen=True):
    name: Name


class Complex(_Arg, tag="complex", frozen=True):
    real: float
    imag: float


class WorkerDevice(_Arg, tag="here", frozen=True):
    """A device argument: whatever device the worker computes on."""


class ListArg(_Arg, tag="items", frozen=True):
    values: tuple[Arg, ...]


Arg: TypeAlias = Union[
    None, bool, int, float, Text, Input, Scalar, DType, TorchLayout, MemoryFormat, Complex, WorkerDevice, ListArg
]


class ViewStep(Struct, array_like=True, frozen=True):
    """One view op of the path from a storage's base to an alias of it: `args` follow the tensor; `pick` chooses an
    output where the op gives several (split, unbind). `strides` are those of the tensor it is applied to, where the
    op counts in them (as_strided). `results` are the tensors that the op gives, all of them."""

    op: Name
    args: tuple[Arg, ...]
    kwargs: dict[Name, Arg]
    pick: int | None = None
    strides: tuple[int, ...] | None = None
    results: tuple[TensorMeta, ...] = ()


Path: TypeAlias = Annotated[tuple[ViewStep, ...], Meta(max_length=4096)]


class Signature(Struct, array_like=True, frozen=True):
    """An op with everything but its tensors.

    `paths[i]` is the view through which input i is used. `writes` are the inputs whose storage the op overwrites: the
    id given for them is consumed, and the instruction names the id of the new version after those of the outputs.
    `outputs` is empty where only running the op tells (data-dependent shapes); `places` are their places among the new
    tensors that the op returns, some of which may be absent. A `random` op takes its key as its last scalar. `floating`
    is the dtype that numbers without one become. `functional` names the same op without its writes, where there is one.
    `layout` is how the outputs must be laid out, where the user has said so. `overwrites` are the metas of the written
    inputs, where the op writes every element of them and reads none: such an input needs no value before.
    """

    op: Name
    args: tuple[Arg, ...]
    kwargs: dict[Name, Arg]
    paths: tuple[Path, ...]
    writes: tuple[int, ...]
    outputs: tuple[TensorMeta, ...]
    places: tuple[int, ...]
    random: bool = False
    floating: Name = "float32"
    functional: Name = ""
    layout: SpecRecord | None = None
    overwrites: tuple[TensorMeta, ...] = ()


# --- Programs: what a worker does for an op on tensors that are cut ---------------------------------------------------


class _Step(Struct, tag=True, frozen=True, array_like=True):
    """Base of the steps of a program."""


class Compute(_Step, tag="compute", frozen=True):
    """An op on shards. `op`, `args`, `inputs_meta` and `outputs_meta` are those of the op on whole tensors; each worker
    derives its own part from `operands` and `results`. Results go to the registers `outputs`. Where `into` names a
    register, the result is written into what is there: by `in_place` (the op as the user called it, on the same inputs
    and then those written to) where the op itself can run on shards. `casts`: what the op computes becomes what its
    results say, as it would if it were written (a comparison, in place, of numbers). `places` are the places of the
    outputs among the results that the op returns; empty: all of them that are not None."""

    op: Name
    args: tuple[Arg, ...]
    kwargs: dict[Name, Arg]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    inputs_meta: tuple[TensorMeta, ...]
    outputs_meta: tuple[TensorMeta, ...]
    operands: tuple[SpecRecord, ...]
    results: tuple[SpecRecord, ...]
    into: tuple[int, ...] = ()
    in_place: Signature | None = None
    random: bool = False
    floating: Name = "float32"
    is_view: bool = False
    casts: bool = False
    places: tuple[int, ...] = ()


class Whole(_Step, tag="whole", frozen=True):
    """An op as it is, on tensors of which every worker has all."""

    signature: Signature
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Move(_Step, tag="move", frozen=True):
    """Lay a tensor out anew."""

    input: int
    output: int
    meta: TensorMeta
    source: SpecRecord
    target: SpecRecord


class Settle(_Step, tag="settle", frozen=True):
    """See that what was written to a view has reached the tensor that it is a view of. `steps` made the view: their
    numbers, and which result of each was meant."""

    base: int
    view: int
    steps: tuple[tuple[int, int], ...]


class Refuse(_Step, tag="refuse", frozen=True):
    """An op for which no plan could be made, because of a mistake in its rule: its results fail for that reason."""

    op: Name
    reason: Text
    outputs: tuple[int, ...]


Step: TypeAlias = Union[Compute, Whole, Move, Settle, Refuse]


class Program(Struct, array_like=True, frozen=True):
    """Steps over registers. `takes` are the registers of the command's inputs, `gives` those of its outputs; the inputs
    at the places `consumes` are gone afterwards; where it `overwrites`, these need no value before."""

    steps: Annotated[tuple[Step, ...], Meta(max_length=1 << 12)]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    consumes: tuple[int, ...] = ()
    overwrites: bool = False
