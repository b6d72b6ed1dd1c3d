"""Compile units: spans of ops between exchanges, as records that workers send to the compile server, and its answers.

A unit works on numbered registers: first its inputs, then the results of its calls. Equal units, such as the layers
of a transformer, have the same key on all workers of a host, and are compiled once.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, TypeAlias, Union

import msgspec
from msgspec import Meta, Struct

from gt.core.meta import TensorMeta
from gt.core.signatures import Name, Number, Signature, Text

MAX_CALLS = 1 << 10
Index: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 20)]
OptionalIndex: TypeAlias = Annotated[int, Meta(ge=-1, lt=1 << 20)]


class UnitCall(Struct, array_like=True, frozen=True):
    """A call of an op on registers. `scalars` are positions among the scalars of the unit, `outputs` the registers
    of its new tensors in order (-1: not needed). A result gets the `strides` at its position, if there are any."""

    signature: Signature
    inputs: tuple[Index, ...]
    scalars: tuple[Index, ...]
    outputs: tuple[OptionalIndex, ...]
    strides: tuple[Union[None, tuple[int, ...]], ...] = ()


class CompileUnit(Struct, array_like=True, frozen=True):
    """Ops that are compiled together. `inputs` are the metas of the first registers. A scalar is None if its value may
    differ from call to call, and otherwise the value that the code is compiled for. `live` are the registers whose
    tensors are needed afterwards; `threads` is the number of threads to compute with."""

    calls: Annotated[tuple[UnitCall, ...], Meta(max_length=MAX_CALLS)]
    inputs: tuple[TensorMeta, ...]
    scalars: tuple[Union[None, Number], ...]
    live: tuple[Index, ...]
    threads: Annotated[int, Meta(ge=1, le=1 << 12)] = 1

    @property
    def key(self) -> str:
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()


class Output(Struct, array_like=True, frozen=True):
    """How to get a live tensor from the tensors that compiled code takes and gives. `source` is a position among the
    inputs of the unit and then the results of the code; `view` is the shape, strides and offset of a view of that
    tensor, None for the tensor itself."""

    source: Index
    view: Union[None, tuple[tuple[int, ...], tuple[int, ...], int]] = None


class CompileRequest(Struct, array_like=True, frozen=True, tag=True):
    key: Name
    unit: CompileUnit


class Compiled(Struct, array_like=True, frozen=True, tag=True):
    """A unit was compiled: `path` is a shared library. The code takes one vector of the scalars that may differ, if
    there are any, and then the inputs at the positions `takes`. It writes to the inputs at the positions `writes`."""

    key: Name
    path: Text
    takes: tuple[Index, ...]
    writes: tuple[Index, ...]
    outputs: tuple[Output, ...]
    seconds: float


class CompileFailed(Struct, array_like=True, frozen=True, tag=True):
    """A unit cannot be compiled: because of the call at the position `call`, or as a whole (-1)."""

    key: Name
    reason: Text
    call: OptionalIndex = -1


CompileAnswer: TypeAlias = Union[Compiled, CompileFailed]
