"""A worker whose server refuses it joins again, or ends with the reason where joining again does not help."""

import contextlib
import os
from pathlib import Path

import msgspec
import pytest

from gt.core.errors import SettingsError
from gt.core.messages import Hello, Refused, Report, Synchronize, Synchronized, Welcome
from gt.version import __version__
from gt.wire.codec import Decoder, encode
from gt.wire.connections import Router, open_link
from gt.wire.process_identity import this_host
from gt.wire.server_keys import find_keys, make_keys, write_keys
from tests.subprocesses import finish, running, start

ANY = Decoder(Hello | Report)


class FakeServer:
    """A server whose messages the test sends, and a worker that joins it."""

    def __init__(self, directory):
        self.router = Router(f"ipc://{directory}/server", None, 20_000, 0)
        self.worker = start("-m", "gt.worker", "--connect", f"ipc://{directory}/server", "--threads", "1")

    def receive(self):
        name, frames = self.router.receive()
        return name, ANY.decode(frames)[0][0]

    def send(self, name, message):
        self.router.send(name, encode([message]))

    def welcome(self, ident):
        name, hello = self.receive()
        assert isinstance(hello, Hello)
        self.send(name, Welcome(__version__, ident, os.getpid(), this_host()))
        return name


@pytest.fixture
def server(tmp_path):
    server = FakeServer(tmp_path)
    with running(server.worker), contextlib.closing(server.router):
        yield server


def test_a_worker_whose_old_name_is_refused_joins_again(server, fault):
    first = server.welcome(0)
    server.send(first, Refused("a message without a hello"))
    second = server.welcome(1)
    assert second != first
    server.send(second, Synchronize(7))
    assert server.receive() == (second, Synchronized(7))
    fault("a server refuses a message of a worker that it has given up", "the worker joins again with nothing")


def test_a_worker_that_is_refused_again_and_again_ends_with_the_reason(server):
    for ident in range(3):
        server.send(server.welcome(ident), Refused("a message that cannot be decoded"))
    code, _, err = finish(server.worker)
    assert code == 1 and "a message that cannot be decoded, 3 times within 60 s" in err.splitlines()[-1]


def test_a_worker_whose_hello_is_refused_ends_with_the_reason(server, fault):
    name, _ = server.receive()
    server.send(name, Refused("this side speaks protocol 1, the other side 2"))
    code, _, err = finish(server.worker)
    assert (code, err.splitlines()[-1]) == (1, "gt.worker: this side speaks protocol 1, the other side 2")
    fault("a server refuses the hello of a worker", "the worker ends with exit code 1 and the reason")


@pytest.fixture
def wrong_keys(tmp_path):
    """A server whose keys were replaced by others that it does not know."""
    secret, keys = make_keys()
    _, others = make_keys()
    wrong = msgspec.structs.replace(keys, public=others.public, secret=others.secret)
    router = Router("tcp://127.0.0.1:0", secret, 1000, 0)
    write_keys(tmp_path / "keys", router.endpoint, wrong)
    yield int(router.endpoint.rpartition(":")[2]), tmp_path / "keys"
    router.close()


def test_wrong_keys_are_reported(wrong_keys):
    port, directory = wrong_keys
    assert find_keys(directory, f"tcp://127.0.0.1:{port}") is not None
    with pytest.raises(
        SettingsError, match="refuses the keys that are kept for it; start the server again, or set GT_KEYS"
    ):
        open_link(f"tcp://127.0.0.1:{port}", Path(directory), 0, 0)


def test_a_worker_with_wrong_keys_ends(wrong_keys, fault):
    port, directory = wrong_keys
    code, _, err = finish(start("-m", "gt.worker", "-p", str(port), "--threads", "1", GT_KEYS=str(directory)))
    assert code == 1 and "refuses the keys" in err.splitlines()[-1]
    fault("a worker has keys that its server does not know", "it ends with exit code 1 and the reason")


LEAVES = """
import os, signal, sys
from gt.core.messages import Synchronize, Welcome
from gt.version import __version__
from gt.wire.codec import encode
from gt.wire.connections import Router
from gt.wire.process_identity import this_host
router = Router(f"ipc://{sys.argv[1]}/server", None, 60_000, 0)
name, _ = router.receive()
router.send(name, encode([Welcome(__version__, 0, os.getpid(), this_host())]))
router.send(name, encode([Synchronize(7)]))
router.receive()
router.close()
signal.pause()
"""


def test_a_worker_that_waits_for_its_server_ends_with_it(tmp_path):
    """A server may take long to end after its connections are closed."""
    server = start("-c", LEAVES, str(tmp_path))
    worker = start("-m", "gt.worker", "--connect", f"ipc://{tmp_path}/server", "--threads", "1")
    with running(server, worker):
        while "joins again without its tensors" not in (line := worker.stderr.readline()):
            assert line, "the worker has ended"
        server.kill()
        code, _, err = finish(worker, 30)
        assert (code, f"(pid {server.pid}) has ended" in err) == (1, True), err
