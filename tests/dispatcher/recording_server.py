"""A server whose peers are the test: messages to peers are recorded instead of sent."""

import os

from gt.core.messages import Answer, Command, Hello, Refused, SessionEnded, Waiting, Welcome
from gt.dispatcher.server import Server
from gt.version import __version__
from gt.wire.codec import Decoder, encode
from gt.wire.process_identity import this_host

EVERYTHING = Decoder(Command | Answer | Welcome | Refused | SessionEnded | Waiting)


class RecordingServer(Server):
    """`sent` are the messages to each peer."""

    def __init__(self):
        super().__init__("tcp://127.0.0.1:*")
        self.sent = []
        self.delivery._router = self

    def send(self, identity, frames):
        """In place of the router: record what a peer would receive."""
        messages, _ = EVERYTHING.decode(frames)
        self.sent += [(identity, message) for message in messages]

    def hear(self, identity, *messages, payloads=()):
        """Receive messages of a peer; returns the messages to that peer."""
        self.sent.clear()
        self.receive_frames(identity, encode(messages, payloads))
        return [message for to, message in self.sent if to == identity]

    def receive_frames(self, identity, frames):
        self._receive(identity, frames)
        self.client_messages.proceed()

    def lose_peer(self, identity):
        self.departures.reap(self.peers.by_identity[identity])


def hello(role, pid=0, **fields):
    return Hello(__version__, role, this_host(), pid or os.getpid(), **fields)
