"""Every record survives the wire unchanged, and invalid records are refused."""

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt.core.errors import ProtocolError
from gt.core.message_fields import PAYLOAD_RECORDS, byte_ranges_of, id_fields, owner_of
from gt.core.messages import (
    Command,
    CreateTensor,
    DefineOp,
    DefineSite,
    Fetched,
    FreeTensors,
    Goodbye,
    Instruction,
    QueryOp,
    Redistribute,
    RunOp,
    TensorRead,
    WorkerCreateTensor,
    WorkerDefineProgram,
)
from gt.core.meta import ITEM_BYTES, MAX_DIMS, MAX_ELEMENTS, TensorMeta
from gt.core.signatures import Arg, Complex, Input, ListArg, OpProgramStep, Scalar, SpecRecord
from gt.sharding.spec import spec_of
from gt.wire.codec import Decoder, encode, header_of
from tests.records import (
    ANSWERS,
    ARGS,
    COMMANDS,
    DIRECTIONS,
    INLINE,
    INSTRUCTIONS,
    PROGRAM,
    REPORTS,
    ROWS,
    SMALL,
    WHOLE,
    ZEROS,
    own,
)

RECORDS = [
    pytest.param(union, record, id=f"{name}-{type(record).__name__}")
    for name, (union, records) in DIRECTIONS.items()
    for record in records
]


def kinds_of(union):
    """The classes of a union, without the limits on their values."""
    return {typing.get_args(kind)[0] if typing.get_origin(kind) else kind for kind in typing.get_args(union)}


def round_trip(union, record):
    byte_ranges = byte_ranges_of(record) if type(record) in PAYLOAD_RECORDS else ()
    payloads = [[bytes(byte_range.nbytes)] if not byte_range.name else [] for byte_range in byte_ranges]
    (decoded, *more), content = Decoder(union).decode([bytes(frame) for frame in encode([record], payloads)])
    assert not more
    assert content == payloads
    return decoded


@pytest.mark.parametrize("name", DIRECTIONS)
def test_there_is_an_example_of_every_record(name):
    union, records = DIRECTIONS[name]
    assert {type(record) for record in records} == kinds_of(union)


def test_there_is_an_example_of_every_argument():
    assert {type(arg) for arg in ARGS} == kinds_of(Arg)


def test_there_is_an_example_of_every_step():
    assert {type(step) for step in PROGRAM.steps} == kinds_of(OpProgramStep)


@pytest.mark.parametrize(("union", "record"), RECORDS)
def test_a_record_comes_back_as_it_was_sent(union, record):
    decoded = round_trip(union, record)
    assert decoded == record
    assert repr(decoded) == repr(record)  # 1, 1.0 and True are equal, and must stay apart


@pytest.mark.parametrize("records", [INSTRUCTIONS, COMMANDS, REPORTS, ANSWERS], ids=list(DIRECTIONS))
def test_records_hash_by_value(records):
    with_dicts = ("signature", "program", "received", "stats")
    hashable = [record for record in records if not any(hasattr(record, name) for name in with_dicts)]
    assert {msgspec.structs.replace(record) for record in hashable} == set(hashable)


INTEGERS = st.integers(-(1 << 63), (1 << 64) - 1)
NUMBERS = st.one_of(st.booleans(), INTEGERS, st.floats())
NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=10)
LITERALS = st.one_of(st.none(), NUMBERS, st.text(max_size=20), st.sampled_from(ARGS))
COMPLEX = st.builds(Complex, st.floats(), st.floats())
ARGUMENTS = st.recursive(LITERALS | COMPLEX, lambda inner: st.lists(inner, max_size=4).map(tuple).map(ListArg))


@given(st.lists(ARGUMENTS, max_size=5).map(tuple), st.dictionaries(NAMES, ARGUMENTS, max_size=3))
def test_any_arguments_round_trip(args, kwargs):
    record = DefineOp(own(1), msgspec.structs.replace(ZEROS, args=args, kwargs=kwargs))
    assert repr(round_trip(Instruction, record)) == repr(record)


@given(st.lists(NUMBERS, max_size=8).map(tuple))
def test_numbers_keep_their_type(numbers):
    decoded = round_trip(Instruction, RunOp(own(1), (), (), numbers, 0, 0))
    assert list(map(type, decoded.scalars)) == list(map(type, numbers))
    assert repr(decoded.scalars) == repr(numbers)


@given(st.data())
def test_a_meta_round_trips(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 1000), max_size=4)))
    stride = tuple(data.draw(st.lists(st.integers(0, 1 << 30), min_size=len(shape), max_size=len(shape))))
    meta = TensorMeta(shape, stride, data.draw(st.integers(0, 1 << 40)), data.draw(st.sampled_from(list(ITEM_BYTES))))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(meta), type=TensorMeta) == meta


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ([[2], [1], 0, "float33"], "unknown dtype"),
        ([[1] * (MAX_DIMS + 1), [1] * (MAX_DIMS + 1), 0, "float32"], "at most 64 dims"),
        ([[2, 2], [1], 0, "float32"], "a stride for each"),
        ([[-1], [1], 0, "float32"], "negative size"),
        ([[2], [1], -1, "float32"], "negative size or offset"),
        ([[2], [-1], 0, "float32"], "are negative"),
        ([[2], [1 << 48], 0, "float32"], "reach over more than 2\\^48 elements"),
        ([[MAX_ELEMENTS + 1], [1], 0, "float32"], "more than"),
        ([[1 << 25, 1 << 25], [1, 1], 0, "int8"], "more than"),
        ([[2.0], [1], 0, "float32"], "Expected `int`"),
        ([[True], [1], 0, "float32"], "Expected `int`"),
        ([["2"], [1], 0, "float32"], "Expected `int`"),
        ([[2], [1], 0, None], "Expected `str`"),
        ([[2], [1], 0], "length 4"),
        (None, "Expected `array`"),
    ],
)
def test_an_invalid_meta_is_refused(meta, reason):
    body = msgspec.msgpack.encode([["CreateTensor", own(1), meta, ["", 0], 0, 0]])
    with pytest.raises(ProtocolError, match=reason):
        Decoder(Instruction).decode([header_of(body) + body])


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (["FetchTensor", -1, 1], ">= 0"),
        (["FetchTensor", 1 << 62, 1], "<= "),
        (["FetchTensor", 1.0, 1], "Expected `int`, got `float`"),
        (["FetchTensor", True, 1], "Expected `int`, got `bool`"),
        (["FetchTensor", 1], "length 3"),
        (["FreeTensors", [1] * ((1 << 20) + 1)], "length <= 1048576"),
        (["FreeTensors", [None]], "Expected `int`, got `None`"),
        (["DefineScope", 1, "n" * 513], "length <= 512"),
        (["DefineSite", 1, "f" * ((1 << 18) + 1), 1, "main"], "length <= 262144"),
        (["RunOp", 1, [], [], ["1"], 0, 0], "got `str`"),
        (["Redistribute", 1, 2, [[[2], ["dp"], [0]]], 0], "length 2"),
        (["Redistribute", 1, 2, [[[2.0], ["dp"], [0, 1]], []], 0], "Expected `int`"),
        (["Redistribute", 1, 2, [[[2], ["a" * 65], [0, 1]], []], 0], "length <= 64"),
        (["Redistribute", 1, 2, [[[1] * 17, [], [0]], []], 0], "length <= 16"),
        (["Redistribute", 1, 2, [[[2], ["dp"], [0, 1]], [[]] * 65], 0], "length <= 64"),
        (["ReadTraffic", 1, 1], "Expected `bool`"),
        (["ReadTimeline", 1, -1], ">= 0"),
        (["ReadTimeline", 1, (1 << 20) + 1], "<= 1048576"),
        (["CreateTensor", 1, [[], [], 0, "int8"], ["", -1], 0, 0], ">= 0"),
        (["CreateTensor", 1, [[], [], 0, "int8"], ["", 1 << 52], 0, 0], "<= "),
        (["DefineOp", 1, ["op", [{"type": "no such"}], {}, [], [], [], []]], "Invalid value 'no such'"),
        (["DefineOp", 1, ["op", [[1, 2]], {}, [], [], [], []]], "got `array`"),
    ],
    ids=lambda value: f"{value!s:.40}",
)
def test_a_field_out_of_its_limits_is_refused(record, reason):
    body = msgspec.msgpack.encode([record])
    with pytest.raises(ProtocolError, match=reason):
        Decoder(Instruction).decode([header_of(body) + body])


def test_a_scalar_is_not_an_input():
    first, second = (DefineOp(own(1), msgspec.structs.replace(ZEROS, args=(arg,))) for arg in (Scalar(0), Input(0)))
    assert round_trip(Instruction, first) != round_trip(Instruction, second)


@pytest.mark.parametrize("record", [ROWS, WHOLE], ids=["rows", "whole"])
def test_a_layout_survives_the_wire_as_the_same_spec(record):
    spec = spec_of(record)
    assert spec_of(msgspec.msgpack.decode(msgspec.msgpack.encode(spec.record()), type=SpecRecord)) is spec


def test_a_program_keeps_the_types_of_its_numbers():
    record = WorkerDefineProgram(own(16), "aten.x.default", PROGRAM)
    assert repr(round_trip(Command, record).program) == repr(PROGRAM)


def test_the_records_with_payloads_are_those_with_byte_ranges():
    assert {CreateTensor, WorkerCreateTensor, Fetched, TensorRead} == PAYLOAD_RECORDS


def test_commands_for_workers_alone_are_not_instructions():
    """`Worker...` in the name of a command says that no client may send it."""
    named = {kind for kind in kinds_of(Command) if kind.__name__.startswith("Worker")}
    assert kinds_of(Command) - kinds_of(Instruction) == named


@pytest.mark.parametrize(
    ("record", "ids", "new"),
    [
        (RunOp(own(1), (own(2), own(3)), (own(4),), (5,), 6, 7), [1, 2, 3, 4], [4]),
        (QueryOp(own(1), own(2), (own(3),), (own(4),), own(5), (), 6, 7), [1, 2, 5, 3, 4], [4]),
        (CreateTensor(own(1), SMALL, INLINE, None, 3), [1], [1]),
        (Redistribute(own(1), own(2), ROWS, 3), [1, 2], [2]),
        (FreeTensors((own(1), own(2))), [1, 2], []),
        (DefineSite(3, "train.py", 12, "step"), [], []),
        (Goodbye(), [], []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_ids_of_a_record_are_those_of_its_declared_fields(record, ids, new):
    fields = id_fields(type(record))
    assert list(fields.all(record)) == list(map(own, ids))
    assert list(fields.new(record)) == list(map(own, new))
    assert owner_of(record) == (1 if ids else 0)


def test_every_command_says_how_a_timeline_names_it():
    assert {kind for kind in kinds_of(Command) if not hasattr(kind, "timeline_name")} == set()
