"""The hosts that tests make are hosts: they differ in all that tells machines apart, and nothing of them is left."""

import json

import psutil
import pytest

from gt.wire.process_identity import this_host
from tests.hosts import hosts, require_hosts
from tests.subprocesses import finish

IDENTITY = """
import json, os, socket
from gt.wire.process_identity import this_host
print(json.dumps([this_host(), socket.gethostname(), socket.gethostbyname("beta"), len(os.listdir("/dev/shm"))]))
"""
SERVE = """
import socket
with socket.create_server(("10.99.0.1", 4000)) as listening:
    print("listening", flush=True)
    connection, (address, _) = listening.accept()
    print(address)
"""


@pytest.fixture
def pair():
    require_hosts()
    with hosts("alpha", "beta") as made:
        yield made


def test_hosts_have_their_own_identity_name_and_shared_memory(pair):
    alpha, beta = pair
    alpha.run("open('/dev/shm/mine', 'w').close()")
    found = [json.loads(host.run(IDENTITY)) for host in pair]
    assert len({this_host(), found[0][0], found[1][0]}) == 3
    assert [name for _, name, *_ in found] == ["alpha", "beta"]
    assert [(address, files) for *_, address, files in found] == [(beta.address, 1), (beta.address, 0)]


def test_hosts_reach_each_other_and_nobody_else(pair):
    alpha, beta = pair
    server = alpha.start("-c", SERVE)
    assert server.stdout.readline() == "listening\n"
    beta.run("import socket; socket.create_connection(('alpha', 4000), 10).close()")
    code, out, err = finish(server)
    assert (code, out) == (0, f"{beta.address}\n"), err
    beta.run("import socket\ntry: socket.create_connection(('192.0.2.1', 1), 1)\nexcept OSError: pass\nelse: 1 / 0")


def test_programs_end_with_their_signal_and_with_their_host():
    require_hosts()
    with hosts("alpha") as (alpha,):
        killed = alpha.start("-c", "import time; time.sleep(60)")
        killed.kill()
        assert finish(killed, 10)[0] == -9
        left = alpha.start("-c", "import time; time.sleep(60)")
        process = psutil.Process(left.pid)
    assert finish(left, 10)[0] == -9
    assert not process.is_running()
