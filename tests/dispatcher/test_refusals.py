"""Everything that a server refuses is counted by its kind in /metrics, and a client beside does not notice."""

import contextlib
import os
import socket
import struct
import time

import msgspec
import psutil
import pytest
import zmq

from gt.core.errors import MEANINGS
from gt.core.messages import (
    AckRead,
    CreateTensor,
    DefineOp,
    DefineScope,
    FetchTensor,
    FreeTensors,
    Goodbye,
    Joined,
    Lost,
    Progress,
    QueryOp,
    ReadWorkers,
    Rejected,
    RunOp,
    Synchronize,
    Synchronized,
    Welcome,
    WorkersRead,
)
from gt.core.messages import ByteRange as Range
from gt.core.meta import TensorMeta
from gt.core.signatures import Input, ListArg, MeshRecord, SpecRecord
from gt.wire import shared_memory
from gt.wire.codec import MAX_FRAME, encode, header_of
from tests.hostile_peers import ANSWERS, Target, answer_to, greet, healthy_client, hello, member, target
from tests.records import INLINE, SMALL, ZEROS, own, signature
from tests.subprocesses import wait_until
from tests.wire.test_other_users import greeting

EMPTY = TensorMeta((0,), (1,), 0, "float32")
LONGEST = 5.0  # seconds that a read of the healthy client may take, on a machine that does other things


@pytest.fixture(scope="module")
def server():
    with target() as server, healthy_client(server.port, LONGEST):
        yield server


@contextlib.contextmanager
def counted(server: Target, kind: str, least: int = 1):
    """The body makes the server count refusals of a kind. It is given a function that waits for them."""
    before = server.refused()[kind]

    def wait():
        wait_until(lambda: server.refused()[kind] >= before + least, what=f"{least} refusals of kind {kind}")

    yield wait
    wait()


# Connections


def test_a_wrong_key_is_counted(server):
    with counted(server, "key") as wait, member(server.port, zmq.curve_keypair()) as stranger:
        stranger.send(b"x")
        wait()


def test_a_plaintext_peer_is_counted(server):
    with counted(server, "handshake") as wait, zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(server.endpoint)
        wait()


def test_the_key_of_another_server_is_counted(server):
    with counted(server, "handshake") as wait, member(server.port, server=zmq.curve_keypair()[0]) as stranger:
        stranger.send(b"x")
        wait()


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00", bytes(64)])
def test_bytes_that_are_no_frames_are_counted(server, noise):
    before = server.refused()
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(noise * 20)
        wait_until(lambda: _refused_connections(server.refused()) > _refused_connections(before), what="the refusal")


def _refused_connections(counts):
    return counts["frame"] + counts["handshake"]


def test_a_frame_over_the_limit_is_counted(server):
    with member(server.port) as client, counted(server, "frame"):
        greet(client)
        client.send(bytes(4 * MAX_FRAME))


def test_a_frame_over_the_limit_of_a_peer_that_leaves_is_counted(server):
    """Its header arrives, and then the end of the connection."""
    with counted(server, "frame"), member(server.port, LINGER=2000) as client:
        greet(client)
        client.send(bytes(4 * MAX_FRAME))
    with member(server.port) as other:
        assert isinstance(greet(other), Welcome)


def test_a_connection_that_ends_in_order_is_not_counted(server):
    before = _refused_connections(server.refused())
    for _ in range(5):
        with member(server.port, LINGER=2000) as client:
            greet(client)
            client.send_multipart(encode([Goodbye()]))
    with member(server.port) as client:
        greet(client)  # it is gone without a word
    time.sleep(0.5)
    assert _refused_connections(server.refused()) == before


def test_a_peer_that_names_its_connection_is_refused(server):
    with member(server.port, ROUTING_ID=b"mine") as client, counted(server, "name"):
        client.send_multipart(encode([hello()]))


@pytest.mark.slow
def test_half_handshakes_are_ended(server):
    """Each connection says that it is one of ZeroMQ, and then nothing more."""
    process = psutil.Process(server.process.pid)
    before = process.num_fds()
    with contextlib.ExitStack() as stack:
        for number in range(300):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            slow.sendall(greeting(b"CURVE")[: 10 + number % 55])
        with member(server.port) as client:
            greet(client)
        wait_until(lambda: process.num_fds() <= before + 10, what="the end of half handshakes")


def test_frames_that_are_never_finished_cost_their_bytes(server):
    """A member announces frames of the allowed size, and sends a byte of each."""
    before = server.memory()
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            stranger.sendall(greeting(b"CURVE") + b"\x02" + struct.pack(">Q", MAX_FRAME)[:5])
        time.sleep(0.3)
        assert server.memory() - before < 50e6


# Messages


def body(records):
    data = msgspec.msgpack.encode(records)
    return [header_of(data) + data]


def nested(depth):
    value = Input(0)
    for _ in range(depth):
        value = ListArg((value,))
    return value


def deep_frames(session):
    """Arguments in arguments in arguments: built by hand, since the encoder does not go so deep."""
    (frame,) = encode([DefineOp(own(1, session), signature("aten.cat.default", 1))])
    inner = msgspec.msgpack.encode(Input(0))
    outer = (
        b"\x82" + msgspec.msgpack.encode("type") + msgspec.msgpack.encode("items") + msgspec.msgpack.encode("values")
    )
    data = bytes(frame[8:]).replace(inner, (outer + b"\x91") * 20_000 + inner, 1)
    return [header_of(data) + data]


def meta_with(**changes):
    fields = {"shape": [4], "stride": [1], "offset": 0, "dtype": "float32"} | changes
    return [fields["shape"], fields["stride"], fields["offset"], fields["dtype"]]


def create_with(session, **changes):
    return body([["CreateTensor", own(1, session), meta_with(**changes), ["", 16], None, 0]])


MALFORMED = {
    "noise": lambda session: [header_of(b"\xc1") + b"\xc1"],
    "no header": lambda session: [b"", b""],
    "a truncated header": lambda session: [header_of(b"")[:5]],
    "a body over the limit": lambda session: [
        struct.pack("<2sHI", b"GT", struct.unpack("<H", header_of(b"")[2:4])[0], 1 << 31)
    ],
    "a body that is cut": lambda session: [encode([Synchronize(own(1, session))])[0][:-1]],
    "nothing": lambda session: encode([]),
    "bytes that do not come": lambda session: encode([CreateTensor(own(1, session), SMALL, INLINE, None, 0)]),
    "bytes that nobody wants": lambda session: [*encode([Synchronize(own(1, session))]), b"more"],
    "a negative size": lambda session: create_with(session, shape=[-4]),
    "2**62 elements": lambda session: create_with(session, shape=[1 << 62]),
    "sizes that overflow": lambda session: create_with(session, shape=[1 << 40, 1 << 40], stride=[1, 1]),
    "a size that is not a number": lambda session: create_with(session, shape=[float("nan")]),
    "a text for a size": lambda session: create_with(session, shape=["4"]),
    "a thousand dims": lambda session: create_with(session, shape=[1] * 1000, stride=[1] * 1000),
    "an unknown dtype": lambda session: create_with(session, dtype="float31"),
    "arguments nested without end": deep_frames,
    "an op with a name of 100 KB": lambda session: body(
        [["DefineOp", own(1, session), ["x" * 100_000, [], {}, [], [], [], []]]]
    ),
    "a scope with a NUL in its name": lambda session: encode([DefineScope(1, "a\0b")]),
    "a scope that moves the cursor": lambda session: encode([DefineScope(1, "\x1b[2J")]),
    "bytes that were never sent": lambda session: body([["AckBytes", 1 << 40]]),
    "too few fields": lambda session: body([["RunOp", own(1, session)]]),
}


@pytest.mark.parametrize("frames", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_message_is_counted(server, frames):
    with counted(server, "malformed"), member(server.port) as client:
        welcome = greet(client)
        client.send_multipart(frames(welcome.ident))
        (refused,) = ANSWERS.decode(client.recv_multipart())[0]
        assert len(refused.reason) < 2000
        own_request = own(9, welcome.ident)
        assert answer_to(client, Synchronize(own_request)) == [Synchronized(own_request)]


UNKNOWN = {
    "an unknown message": lambda session: body([["Execute", "rm -rf /"]]),
    "a report of a worker": lambda session: encode([Synchronized(own(1, session))]),
    "the progress of a worker": lambda session: encode([Progress(1, 1)]),
    "a command to a worker": lambda session: body([["WorkerEndSession", 1]]),
    "an answer to a client": lambda session: body([["Rejected", 0, "no"]]),
    "a second hello": lambda session: encode([hello()]),
    "a hello as a worker": lambda session: encode([hello("worker", device="cpu")]),
}


@pytest.mark.parametrize("frames", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_a_message_that_a_client_may_not_send_is_counted(server, frames):
    with counted(server, "unknown"), member(server.port) as client:
        welcome = greet(client)
        client.send_multipart(frames(welcome.ident))
        client.recv_multipart()


def test_a_client_that_says_no_hello_is_refused(server):
    with counted(server, "unknown"), member(server.port) as client:
        client.send_multipart(encode([Synchronize(own(1))]))
        client.recv_multipart()


FOREIGN = {
    "a tensor": lambda other: [FetchTensor(1, own(1, other))],
    "a tensor to free": lambda other: [FreeTensors((own(1, other),))],
    "a request": lambda other: [Synchronize(own(1, other))],
    "an answer to take": lambda other: [AckRead(own(1, other))],
    "an op": lambda other: [QueryOp(1, own(1, other), (), (), 0, (), 0, 0)],
    "an id of the server's own": lambda other: [FetchTensor(1, 1 << 39)],
}


@pytest.mark.parametrize("instructions", FOREIGN.values(), ids=FOREIGN.keys())
def test_ids_of_others_are_counted(server, instructions):
    with counted(server, "foreign"), member(server.port) as client, member(server.port) as victim:
        greet(client)
        other = greet(victim).ident
        answer_to(
            victim,
            CreateTensor(own(1, other), SMALL, INLINE, None, 0),
            Synchronize(own(2, other)),
            payloads=[[b"\1" * 16]],
        )
        answer_to(client, *instructions(other))
        (read,) = answer_to(victim, FetchTensor(own(3, other), own(1, other)))
        assert read.request == own(3, other)


def test_a_shared_buffer_of_another_session_is_counted(server):
    with counted(server, "foreign"), member(server.port) as client, member(server.port) as victim:
        session, secret = greet(client).ident, greet(victim).session_secret
        name, _ = shared_memory.create(16, session_secret=secret)
        try:
            answer_to(client, CreateTensor(own(1, session), SMALL, Range(name, 16), None, 0))
        finally:
            os.unlink(shared_memory.path_of(name))


PATHS = ["../../etc/passwd", "/etc/passwd", "gt-1-1-1-0123456789abcdef/../x", "..", "gt-1-1-1-0123456789abcdeg", "~/x"]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_where_a_name_belongs_is_counted(server, path):
    with counted(server, "name", 2), member(server.port) as client, member(server.port) as worker:
        session = greet(client).ident
        answer_to(client, CreateTensor(own(1, session), SMALL, Range(path, 16), None, 0))
        worker.send_multipart(encode([hello("worker", device="cpu", progress=path)]))
        worker.recv_multipart()


def test_a_worker_that_poses_as_one_of_another_process_is_counted(server):
    with counted(server, "foreign"), member(server.port) as worker:
        worker.send_multipart(encode([hello("worker", device="cpu", progress="gt-1-1-1-0123456789abcdef")]))
        worker.recv_multipart()


# Ops


OPS = [
    "aten.no_such.default",
    "aten.from_file.default",
    "os.system",
    "builtins.eval",
    "aten",
    "",
    "prims.add.default",
    "aten..",
    "../aten.add.Tensor",
]


@pytest.mark.parametrize("op", OPS)
def test_an_op_that_is_not_allowed_is_counted(server, op):
    with counted(server, "op"), member(server.port) as client:
        session = greet(client).ident
        batch = [
            DefineOp(own(1, session), signature(op, 0, (SMALL,))),
            RunOp(own(1, session), (), (own(2, session),), (), 0, 0),
            Synchronize(own(3, session)),
        ]
        answer_to(client, *batch)


INSTRUCTIONS = {
    "an op that was not defined": lambda s: [RunOp(own(1, s), (), (), (), 0, 0)],
    "a tensor that does not exist": lambda s: [FetchTensor(own(9, s), own(1, s))],
    "too many inputs": lambda s: [DefineOp(own(1, s), ZEROS), RunOp(own(1, s), (own(5, s),), (own(2, s),), (), 0, 0)],
    "too few outputs": lambda s: [DefineOp(own(1, s), ZEROS), RunOp(own(1, s), (), (), (), 0, 0)],
    "an op that is defined twice": lambda s: [DefineOp(own(1, s), ZEROS), DefineOp(own(1, s), ZEROS)],
    "a scope that does not exist": lambda s: [
        DefineOp(own(1, s), ZEROS),
        RunOp(own(1, s), (), (own(2, s),), (), 77, 0),
    ],
    "a mesh of 2**30 workers, none of them named": lambda s: [
        CreateTensor(own(1, s), EMPTY, Range("", 0), SpecRecord(MeshRecord((1 << 30,), ("x",), ()), ((),)), 0)
    ],
    "a size that is not that of the bytes": lambda s: [
        CreateTensor(own(1, s), TensorMeta((1 << 40,), (1,), 0, "float32"), Range("", 0), None, 0)
    ],
}


@pytest.mark.parametrize("batch", INSTRUCTIONS.values(), ids=INSTRUCTIONS.keys())
def test_an_instruction_that_cannot_be_carried_out_is_counted(server, batch):
    with counted(server, "instruction"), member(server.port) as client:
        session = greet(client).ident
        answers = answer_to(client, *batch(session))
        assert any(isinstance(answer, Rejected) for answer in answers)


def test_a_report_that_nobody_asked_for_is_counted():
    """The worker that sends it is dismissed, so that it is the only one of a server of its own."""
    with target(workers=1) as server, member(server.port) as worker:
        with counted(server, "report"):
            greet(worker, hello("worker", host="elsewhere", device="cpu"))
            worker.send_multipart(encode([Synchronized(own(1, 999))]))
        with member(server.port) as second, counted(server, "unknown"):
            greet(second, hello("worker", host="elsewhere", device="cpu"))
            second.send_multipart(encode([Synchronize(own(1))]))


def test_workers_may_come_and_go_while_they_are_listed():
    """A connection ends between two checks of the server; its worker is known until the next one."""
    with target() as server, member(server.port) as client, contextlib.ExitStack() as stack:
        session = greet(client).ident
        waiting, longest = [], 0
        for number in range(150):
            worker = contextlib.ExitStack()
            dealer = worker.enter_context(member(server.port))
            dealer.send_multipart(encode([hello("worker", host="elsewhere", device="cpu", address="127.0.0.1")]))
            waiting.append(stack.enter_context(worker))
            if len(waiting) > 20:
                waiting.pop(0).close()
            answers = answer_to(client, ReadWorkers(own(number + 1, session)))
            while all(isinstance(answer, Joined | Lost) for answer in answers):
                answers = ANSWERS.decode(client.recv_multipart())[0]
            (answer,) = [answer for answer in answers if not isinstance(answer, Joined | Lost)]
            assert isinstance(answer, WorkersRead), answer
            longest = max(longest, len(answer.workers))
        assert longest > 10


def test_every_kind_is_shown_from_the_beginning(server):
    assert server.refused().keys() == MEANINGS.keys()
