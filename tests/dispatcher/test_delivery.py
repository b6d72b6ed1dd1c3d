"""What each peer receives: its own messages, in the order of the dispatcher, with the bytes beside them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt.core.messages import Command, FreeTensors, Synchronize, WorkerCreateTensor
from gt.dispatcher.message_queue import ToWorkers
from gt.wire.codec import Decoder, join
from tests.dispatcher.recording_server import RecordingServer, hello
from tests.records import INLINE, SMALL, own

WORKERS = (b"zero", b"one", b"two")


@pytest.fixture(scope="module")
def server():
    server = RecordingServer()
    for identity in WORKERS:
        server.hear(identity, hello("worker", device="cpu"))
    yield server
    server.close()


def to_workers(number, workers, kind):
    if kind == "upload":
        return ToWorkers(workers, WorkerCreateTensor(own(number), SMALL, INLINE, 0), [bytes([number % 256]) * 16])
    return ToWorkers(workers, FreeTensors((own(number),)) if kind == "free" else Synchronize(own(number)))


SUBSETS = st.sampled_from([(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
OUTGOING = st.lists(st.tuples(SUBSETS, st.sampled_from(["free", "upload", "synchronize"])), max_size=40)


@given(OUTGOING)
def test_each_worker_gets_its_commands_in_order_with_their_bytes(server, drawn):
    outgoing = [to_workers(number, workers, kind) for number, (workers, kind) in enumerate(drawn)]
    sent = {identity: [] for identity in WORKERS}
    server.send = lambda identity, frames: sent[identity].append(Decoder(Command).decode(frames))
    server.delivery.send(outgoing)
    for worker, identity in enumerate(WORKERS):
        own_part = [out for out in outgoing if worker in out.workers]
        assert [message for messages, _ in sent[identity] for message in messages] == [out.command for out in own_part]
        payloads = [bytes(join(payload)) for _, payloads in sent[identity] for payload in payloads]
        assert payloads == [bytes(join(out.buffer)) for out in own_part if out.buffer is not None]
        assert len(sent[identity]) == bool(own_part), "one message for each worker"


def test_a_message_that_several_workers_get_is_encoded_once(server):
    sent = []
    server.send = lambda identity, frames: sent.append(frames)
    server.delivery.send([to_workers(number, (0, 1, 2), "free") for number in range(5)])
    assert len(sent) == 3 and sent[0] is sent[1] is sent[2]


def test_a_worker_that_has_left_gets_nothing(server):
    sent = []
    server.send = lambda identity, frames: sent.append(identity)
    server.delivery.send([to_workers(1, (0, 7), "free")])
    assert sent == [b"zero"]
