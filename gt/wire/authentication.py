"""Who may connect to a server: those that have its member key, and nobody else."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import zmq
from zmq.utils import z85

_ENDPOINT = "inproc://zeromq.zap.01"
_END = "inproc://gt-gatekeeper"


class Authenticator:
    """Answers ZeroMQ's questions about peers (its authentication protocol, RFC 27) in a thread of its own, until the
    handshake of a peer is done and before anything that it sends is seen."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], member: str) -> None:
        self._member = z85.decode(member.encode())
        self._questions = context.socket(zmq.REP)
        self._questions.setsockopt(zmq.LINGER, 0)
        self._questions.bind(_ENDPOINT)
        self._end, self._ending = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._ending.bind(_END)
        self._end.connect(_END)
        self._thread = threading.Thread(target=self._answer, name="gt-gatekeeper", daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        poller = zmq.Poller()
        poller.register(self._questions, zmq.POLLIN)
        poller.register(self._ending, zmq.POLLIN)
        while self._ending not in dict(poller.poll()):
            question = self._questions.recv_multipart()
            self._questions.send_multipart(answer_of(question, self._member))

    def close(self) -> None:
        self._end.send(b"")
        self._thread.join()
        for socket in (self._questions, self._end, self._ending):
            socket.close(linger=0)


def answer_of(question: Sequence[bytes], member: bytes) -> list[bytes]:
    """A question is: version, number, domain, address, identity, mechanism, credentials."""
    version, number = (*question[:2], b"", b"")[:2]
    accepted = tuple(question[5:]) == (b"CURVE", member)
    status = (b"200", b"OK", b"member") if accepted else (b"400", b"these are not the keys of this server", b"")
    return [version or b"1.0", number, *status, b""]
