"""A worker that its server refuses: it joins again where that helps, and ends with a reason where it does not."""

import contextlib
import os
from pathlib import Path

import msgspec
import pytest

from gt.core.errors import SettingsError
from gt.core.messages import Hello, Refused, Report, Synchronized, Welcome, WorkerSynchronize
from gt.version import __version__
from gt.wire.codec import Decoder, encode
from gt.wire.keys import find_keys, make_keys, write_keys
from gt.wire.links import Router, open_link
from gt.wire.liveness import this_host
from tests.subprocesses import finish, running, start

ANY = Decoder(Hello | Report)


class Door:
    """A server that is driven by hand, and a worker that joins it."""

    def __init__(self, directory):
        self.router = Router(f"ipc://{directory}/server", None, 20_000, 0)
        self.worker = start("-m", "gt.worker", "--connect", f"ipc://{directory}/server", "--threads", "1")

    def hear(self):
        name, frames = self.router.receive()
        return name, ANY.decode(frames)[0][0]

    def say(self, name, message):
        self.router.send(name, encode([message]))

    def welcome(self, ident):
        name, hello = self.hear()
        assert isinstance(hello, Hello)
        self.say(name, Welcome(__version__, ident, os.getpid(), this_host()))
        return name


@pytest.fixture
def door(tmp_path):
    door = Door(tmp_path)
    with running(door.worker), contextlib.closing(door.router):
        yield door


def test_a_worker_whose_old_name_is_refused_joins_again(door, fault):
    first = door.welcome(0)
    door.say(first, Refused("a message without a hello"))
    second = door.welcome(1)
    assert second != first
    door.say(second, WorkerSynchronize(7))
    assert door.hear() == (second, Synchronized(7))
    fault("a server refuses a message of a worker that it has given up", "the worker joins again with nothing")


def test_a_worker_that_is_refused_again_and_again_ends_with_the_reason(door):
    for ident in range(3):
        door.say(door.welcome(ident), Refused("a message that cannot be decoded"))
    code, _, err = finish(door.worker)
    assert code == 1 and "a message that cannot be decoded, 3 times within 60 s" in err.splitlines()[-1]


def test_a_worker_whose_hello_is_refused_ends_with_the_reason(door, fault):
    name, _ = door.hear()
    door.say(name, Refused("this side speaks protocol 1, the other side 2"))
    code, _, err = finish(door.worker)
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


def test_wrong_keys_are_told(wrong_keys):
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
