"""Frames that are almost valid: messages of every kind with fields that are right, wrong or absurd, some of them with
bytes that were changed. Made of the declarations of the messages themselves, so that a new message is among them."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias, get_args

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from gt.core.ids import FIRST_DISPATCHER_ID, FIRST_QUERY_ID, SESSION_SHIFT
from gt.core.messages import (
    AckBytes,
    AckRead,
    CreateTensor,
    DefineOp,
    DefineProgram,
    DefineScope,
    FetchTensor,
    Instruction,
    PlaceTensor,
    QueryOp,
    Redistribute,
    Report,
    RunOp,
    RunProgram,
)
from gt.core.meta import TensorMeta
from gt.core.signatures import Input, ListArg, MeshRecord, PolicyRecord, Scalar, Signature, SpecRecord
from gt.wire.codec import PIECE, header_of
from tests.records import INLINE, SMALL, meta, own

Frames: TypeAlias = list[bytes]
MATRIX, EMPTY, HALF = meta(2, 2), meta(0), meta(4, dtype="float16")


def _signature(op: str, args: Sequence[Any], inputs: int, outputs: Sequence[TensorMeta], **fields: Any) -> Signature:
    places = tuple(range(len(outputs)))
    return Signature(op, tuple(args), {}, ((),) * inputs, fields.pop("writes", ()), tuple(outputs), places, **fields)


X, Y = Input(0), Input(1)
OPS: dict[int, Signature] = {  # by number: ops that a session defines first
    101: _signature("aten.zeros.default", [ListArg((4,))], 0, [SMALL]),
    102: _signature("aten.add.Tensor", [X, Y], 2, [SMALL]),
    103: _signature("aten.add_.Tensor", [X, Y], 2, [], writes=(0,), functional="aten.add.Tensor"),
    104: _signature("aten.nonzero.default", [X], 1, []),
    105: _signature("aten.cat.default", [ListArg((X, Y))], 2, [meta(8)]),
    106: _signature("aten.view.default", [X, ListArg((2, 2))], 1, [MATRIX]),
    107: _signature("aten.mul.Scalar", [X, Scalar(0)], 1, [SMALL]),
    108: _signature("aten.split.Tensor", [X, 2], 1, [meta(2), meta(2)]),
    109: _signature("aten.resize_as_.default", [X, Y], 2, [], writes=(0,)),
    110: _signature("aten.sum.default", [X], 1, [meta()]),
}
TENSORS = range(1, 5)  # that a session creates first


def prelude(session: int) -> list[Any]:
    """The instructions that make a session one in which others can be valid."""
    defined = [DefineOp(own(number, session), signature) for number, signature in OPS.items()]
    return [*defined, *[CreateTensor(own(number, session), SMALL, INLINE, None, 0) for number in TENSORS]]


# Values of a type, as msgpack's lists and maps

_FIRST_NEW, _ID_LIMIT = 202, 400  # numbers of new tensors, of all ids
_LIKELY = [0, 1, 2, 3, 4, *TENSORS, *OPS, 200, 201, 300]
_FAR = [FIRST_QUERY_ID, FIRST_QUERY_ID + 4096, FIRST_DISPATCHER_ID, (1 << SESSION_SHIFT) - 1, 1 << 31, (1 << 62) - 1]
_ABSURD = [-1, 1 << 62, 1 << 63, -(1 << 63), (1 << 64) - 1]
INTEGERS = st.sampled_from([*_LIKELY * 8, *_FAR, *_ABSURD])
NATURALS = st.sampled_from([*_LIKELY * 8, *_FAR])
_NAMES = ["", "x", "w", "dp", "sum", "max", "float32", "bool", "aten.add.Tensor", "aten.mm.default", "os.system", "cpu"]
_ODD = ["../../x", "a\0b", "gt-1-1-1-0123456789abcdef", "é\u2028", "y" * 600, "strided", "127.0.0.1", "here"]
TEXTS = st.sampled_from([*_NAMES * 5, *_ODD])
FLOATS = st.sampled_from([0.0, 1.5, -1.0, float("nan"), float("inf"), 1e308])
JUNK = st.recursive(
    st.none() | st.booleans() | INTEGERS | FLOATS | TEXTS | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=6,
)

METAS = st.sampled_from([SMALL, MATRIX, EMPTY, HALF, meta(), meta(1 << 24, 1 << 24), meta(3, 5), meta(2)])
MESHES = st.sampled_from(
    [MeshRecord((1,), ("x",), (0,)), MeshRecord((2,), ("x",), (0, 1)), MeshRecord((2,), ("x",), (0, 0)),
     MeshRecord((2, 1), ("x", "y"), (1, 0)), MeshRecord((3,), ("x",), (0, 1, 2)), MeshRecord((1,), ("x",), (9,)),
     MeshRecord((0,), ("x",), ()), MeshRecord((-1,), ("x",), (0,)), MeshRecord((2,), (), (0, 1))]
)  # fmt: skip
AXES = st.sampled_from([(), (), ("x",), ("y",), ("x", "y"), ("x", "x")])
CUTS = st.sampled_from([(), (), (None,), (((0, 1), (1, 4)),), (((0, 9),),), (((3, 1), (1, 1 << 62)),)])
SPECS = st.builds(
    SpecRecord, MESHES, st.lists(AXES, max_size=3).map(tuple), st.sampled_from([(), ("x",)]),
    st.sampled_from(["sum", "max", "no"]), CUTS,
)  # fmt: skip
POLICIES = st.builds(PolicyRecord, MESHES, st.lists(AXES, max_size=2).map(tuple))
OP_NAMES = st.sampled_from(
    ["x", "", ".", "aten", "aten.", "..", ".add.Tensor", "aten..Tensor", "a b.c", "aten.add.Tensor.out"]
)
SIGNATURES = st.one_of(
    *[st.sampled_from(list(OPS.values()))] * 4,
    st.builds(lambda op, name: msgspec.structs.replace(op, op=name), st.sampled_from(list(OPS.values())), OP_NAMES),
    st.builds(lambda op, name: msgspec.structs.replace(op, functional=name), st.just(OPS[103]), OP_NAMES),
)
KNOWN: dict[type, st.SearchStrategy[Any]] = {
    TensorMeta: METAS.map(msgspec.to_builtins),
    MeshRecord: MESHES.map(msgspec.to_builtins),
    SpecRecord: SPECS.map(msgspec.to_builtins),
    PolicyRecord: POLICIES.map(msgspec.to_builtins),
    Signature: SIGNATURES.map(msgspec.to_builtins),
}


@cache
def values(of: type) -> st.SearchStrategy[Any]:
    """The values of a record in msgpack, most of them of the right type."""
    return _values(inspect.type_info(of), ())


def _values(info: Any, outer: tuple[type, ...]) -> st.SearchStrategy[Any]:
    match info:
        case inspect.IntType(ge=low):
            return INTEGERS if low is None else NATURALS
        case inspect.FloatType():
            return FLOATS
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.StrType():
            return TEXTS
        case inspect.UnionType(types):
            return st.one_of(*[_values(each, outer) for each in types])
        case inspect.VarTupleType(item) | inspect.ListType(item):
            return st.lists(_values(item, outer), max_size=3)
        case inspect.TupleType(items):
            return st.tuples(*[_values(each, outer) for each in items])
        case inspect.DictType(key, value):
            return st.dictionaries(_values(key, outer), _values(value, outer), max_size=2)
        case inspect.StructType(cls):
            return _struct(info, (*outer, cls))
        case _:
            return JUNK


def _struct(info: Any, outer: tuple[type, ...]) -> st.SearchStrategy[Any]:
    if outer.count(info.cls) > 2:  # records in records of their own kind
        return JUNK
    fields = {each.encode_name: _values(each.type, outer) for each in info.fields}
    if info.array_like:
        tag = () if info.tag is None else (st.just(info.tag),)
        made: st.SearchStrategy[Any] = st.tuples(*tag, *fields.values()).map(list)
    else:
        made = st.fixed_dictionaries({"type": st.just(info.tag), **fields} if info.tag is not None else fields)
    known = KNOWN.get(info.cls, TEMPLATES.get(info.cls) if len(outer) == 1 else None)
    return made if known is None else known | known | known | made


# Records that fit the session of `prelude`

INPUTS = st.sampled_from([1, 2, 3, 4, 4, 201])
NEW = st.integers(_FIRST_NEW, 390)
_VALID = {number: (len(op.paths), len(op.outputs) + len(op.writes)) for number, op in OPS.items()}


@st.composite
def _op_runs(draw: Callable[[Any], Any]) -> list[Any]:
    number = draw(st.sampled_from([*OPS]))
    inputs, outputs = _VALID[number]
    taken, made = [draw(INPUTS) for _ in range(inputs)], [draw(NEW) for _ in range(outputs)]
    return ["RunOp", number, taken, made, [2.0] if number == 107 else [], draw(st.sampled_from([0, 0, 0, 1])), 0]


@st.composite
def _queries(draw: Callable[[Any], Any]) -> list[Any]:
    number = draw(st.sampled_from([104, 104, 109, 102]))
    inputs, _ = _VALID[number]
    written = [draw(NEW) for _ in OPS[number].writes]
    first = FIRST_QUERY_ID + 4096 * draw(st.integers(0, 9))
    return ["QueryOp", draw(NEW), number, [draw(INPUTS) for _ in range(inputs)], written, first, [], 0, 0]


_STEPS = [["RunOp", 102, [0, 1], [3], [], 0, 0], ["NoteGradient", 3, 0, 0], ["RunOp", 107, [3], [4], [2], 0, 0]]
PROGRAM = ["DefineProgram", 150, 2, 1, _STEPS]
_PLAIN = msgspec.to_builtins
_DEAD = st.sampled_from([[], [3], [0, 4], [9]])
TEMPLATES: dict[type, st.SearchStrategy[Any]] = {
    RunOp: _op_runs(),
    QueryOp: _queries(),
    DefineProgram: st.just(PROGRAM),
    RunProgram: st.builds(
        lambda first, x, y, dead: ["RunProgram", 150, first, [x, y], [2.0], dead], NEW, INPUTS, INPUTS, _DEAD
    ),
    CreateTensor: st.builds(lambda new: ["CreateTensor", new, _PLAIN(SMALL), ["", 16, 0], None, 0], NEW),
    FetchTensor: st.builds(lambda request, of: ["FetchTensor", request, of], NEW, INPUTS),
    DefineScope: st.builds(lambda policy: ["DefineScope", 1, "forward", _PLAIN(policy)], POLICIES),
    DefineOp: st.builds(lambda new, op: ["DefineOp", new, _PLAIN(op)], NEW, SIGNATURES),
    Redistribute: st.builds(lambda of, new, spec: ["Redistribute", of, new, _PLAIN(spec), 0], INPUTS, NEW, SPECS),
    PlaceTensor: st.builds(lambda of, spec: ["PlaceTensor", of, _PLAIN(spec), 0], INPUTS, SPECS),
}

# Messages

_FREQUENT = [RunOp] * 8 + [QueryOp, RunProgram, CreateTensor, FetchTensor, Redistribute, PlaceTensor] * 3
CLIENT_KINDS = [*get_args(Instruction), AckRead, AckBytes, *_FREQUENT, DefineProgram]
WORKER_KINDS = list(get_args(Report))


def localized(value: Any, sessions: Sequence[int], chance: random.Random) -> Any:
    """Small numbers become ids of the first session mostly, of another one sometimes."""
    if isinstance(value, list | tuple):
        return [localized(each, sessions, chance) for each in value]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if is_number and FIRST_QUERY_ID <= value < 2 * FIRST_QUERY_ID:
        return own(value, sessions[0])
    if is_number and 0 < value < _ID_LIMIT and chance.random() < 0.98:
        if value >= _FIRST_NEW and chance.random() < 0.8:
            value = chance.randrange(_ID_LIMIT, 1 << 20)  # most new ids are new
        session = sessions[0] if chance.random() < 0.98 else chance.choice(sessions)
        return own(value, session)
    return value


def _id_fields(record: list[Any], kind: type, sessions: Sequence[int], chance: random.Random) -> list[Any]:
    """A record whose id fields name ids of sessions."""
    hints = kind.__annotations__
    names = kind.__struct_fields__  # type: ignore[attr-defined]
    ids = [str(hints.get(name, "")) for name in names]
    parts = [
        localized(value, sessions, chance) if "Id" in hint and hint not in ("SiteId", "ScopeId") else value
        for hint, value in zip(ids, record[1:], strict=False)
    ]
    return [record[0], *parts]


def changed_record(record: list[Any], junk: Any, chance: random.Random) -> list[Any]:
    """A field more, a field less, another value in place of one, or the record as it is."""
    what, place = chance.random(), chance.randrange(len(record))
    if what < 0.85:
        return record
    if what < 0.92:
        return [*record[:place], junk, *record[place + 1 :]]
    if what < 0.96:
        return [*record[:place], *record[place + 1 :]]
    return [*record, junk]


def changed_bytes(frame: bytes, chance: random.Random) -> bytes:
    """A frame that was cut, or has other bits, another length or more bytes; or the frame as it is."""
    what = chance.random()
    if what < 0.90:
        return frame
    if what < 0.92:
        return frame[: chance.randrange(len(frame) + 1)]
    if what < 0.96:
        data = bytearray(frame)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        return bytes(data)
    if what < 0.98:
        size = chance.choice([0, 1, len(frame), 1 << 16, PIECE, PIECE + 1, 1 << 26, 1 << 31, (1 << 32) - 1])
        return frame[:4] + struct.pack("<I", size) + frame[8:]
    return frame + chance.randbytes(chance.randint(1, 40))


@st.composite
def messages(draw: Callable[[Any], Any], kinds: Sequence[type], largest: int = 3) -> tuple[Any, ...]:
    """The records of a message, junk for them, and the seed of what is done to them: `frames_of` makes frames of it."""
    drawn = [
        (kind, draw(values(kind))) for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=largest))
    ]
    return drawn, draw(JUNK), draw(st.integers(0, 1 << 30))


def frames_of(message: tuple[Any, ...], sessions: Sequence[int]) -> Frames:
    """The frames of a message, from a peer of the first of some sessions."""
    drawn, junk, seed = message
    chance = random.Random(seed)
    records = [_id_fields(record, kind, sessions, chance) for kind, record in drawn]
    try:
        body = msgspec.msgpack.encode([changed_record(record, junk, chance) for record in records])
    except (OverflowError, ValueError):  # a number that msgpack has not
        body = msgspec.msgpack.encode([junk if isinstance(junk, str) else None])
    tail = bytes(sum(_announced(record) for record in records)) if chance.random() < 0.97 else b"\1" * 16
    frame = changed_bytes(header_of(body) + body + tail, chance)
    return [frame] if chance.random() < 0.97 else [frame, chance.randbytes(3)]


def _announced(record: list[Any]) -> int:
    """The bytes that a record says will follow, if they are few."""
    ranges = [each for each in record if isinstance(each, list) and len(each) == 3 and each[0] == ""]
    return sum(each[1] for each in ranges if isinstance(each[1], int) and 0 < each[1] < 1 << 12)
