"""Servers, workers and programs on several hosts, which share neither memory nor pids."""

import json
import signal
import subprocess

import pytest

from tests.cluster.clusters import PORT, cluster, read_until, wait_for_join
from tests.subprocesses import finish, start

pytestmark = pytest.mark.slow

TRAINING = """
import torch, gt
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
model.load_state_dict(plain.state_dict())
gt.connect("alpha:12345", min_workers=4)
mesh = gt.mesh((2, 2), ("dp", "tp"))
gt.to(model)
for parameter in model.parameters():
    spec = "tp, -" if parameter.dim() == 2 else "-"
    parameter.data = gt.distribute(parameter.detach().cpu(), mesh, spec)
optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]
for step in range(4):
    x, y = torch.randn(8, 12), torch.randn(8, 3)
    ours = gt.distribute(x, mesh, "dp, -"), gt.distribute(y, mesh, "dp, -")
    for net, (a, b), optimizer in zip((plain, model), ((x, y), ours), optimizers):
        optimizer.zero_grad()
        loss = (net(a) - b).pow(2).mean()
        loss.backward()
        optimizer.step()
for one, other in zip(plain.parameters(), model.parameters()):
    torch.testing.assert_close(other.detach().cpu(), one.detach(), rtol=1e-5, atol=1e-6)
ways = [stats.exchanges for _, stats in sorted(gt.debug.get_worker_stats().items())]
print(all(any("shared memory" in way for way in each) for each in ways))
print(all(any("gloo" in way for way in each) for each in ways))
"""

ALIVE = "import gt; print(gt.ones(3).sum().item())"
UPLOADS = """
import torch, gt
gt.connect("alpha:12345", min_workers=4)
x = torch.arange(1_000_003, dtype=torch.float32)
whole = [gt.to(x + n) for n in range(4)]
for n, each in enumerate(whole):
    assert torch.equal(each.cpu(), x + n)
cut = gt.distribute(x, gt.mesh(4, ("w",)), "w")
assert torch.equal(cut.cpu(), x)
assert torch.equal((cut * 2).cpu(), x * 2)
assert sum(cut[:5].tolist()) == 10
print("right")
"""


@pytest.fixture(scope="module")
def four_workers(tmp_path_factory):
    """A server on one host, with two workers there and two on another; programs run on a third."""
    with cluster(tmp_path_factory.mktemp("cluster"), "alpha", "beta", "gamma") as made:
        alpha, beta, _ = made.hosts
        made.server = made.start_server()
        made.start_workers(alpha, alpha, beta, beta)
        yield made


def test_training_on_two_hosts_equals_torch_with_memory_within_and_groups_between(four_workers):
    out = four_workers.run(four_workers.hosts[2], TRAINING)
    assert out == "True\nTrue\n"


@pytest.mark.parametrize("host", [0, 1, 2], ids=["of the server", "of workers only", "of nobody else"])
def test_a_program_on_any_host_uploads_and_reads(four_workers, host):
    assert four_workers.run(four_workers.hosts[host], UPLOADS) == "right\n"


def test_a_worker_with_a_key_that_is_not_let_in_ends_with_the_reason(four_workers, tmp_path):
    made, gamma = four_workers, four_workers.hosts[2]
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    made.run_keys(made.server_host, "client", "guest", "--out", str(mine / "client.key"))
    made.run_keys(made.server_host, "revoke", "guest")
    code, _, err = finish(made.start_worker(gamma, GT_KEYS=str(mine)), 30)
    assert code == 1
    assert "refuses the keys" in err and "Traceback" not in err
    said = read_until(made.server, "refused")
    assert gamma.address in said and "is not one that this server admits" in said
    assert four_workers.run(gamma, ALIVE) == "3.0\n"


REFUSED = f"""
import gt
try:
    gt.connect("alpha:{PORT}")
except gt.ServerLost as error:
    print(error)
"""


def test_a_peer_without_encryption_is_refused(four_workers):
    made, gamma = four_workers, four_workers.hosts[2]
    assert "refuses the handshake" in made.run(gamma, REFUSED, GT_INSECURE="1", GT_TIMEOUT="2")
    said = read_until(made.server, "refused")
    assert said == f"gt: refused {gamma.address}: it does not encrypt as this server does, or is no peer of GT\n"
    assert made.run(gamma, ALIVE) == "3.0\n"


def test_a_peer_with_the_key_of_another_server_is_refused(four_workers, tmp_path):
    made, beta = four_workers, four_workers.hosts[1]
    other = {"GT_KEYS": str(tmp_path / "other")}
    for command in (["server"], ["client", "me", "--out", str(tmp_path / "me.key")]):
        assert finish(start("-m", "gt.keys", *command, **other))[0] == 0
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (tmp_path / "me.key").rename(mine / "client.key")
    assert "client.key may be for another server" in made.run(beta, REFUSED, GT_KEYS=str(mine), GT_TIMEOUT="2")
    assert made.run(beta, ALIVE) == "3.0\n"


def test_strangers_that_are_no_peers_do_no_harm(four_workers):
    made, (_, beta, gamma) = four_workers, four_workers.hosts
    program = f"""
import os, socket
for data in (b"GET / HTTP/1.1\\r\\n\\r\\n", os.urandom(4096), b"\\xff" + bytes(8) + b"\\x7f" + os.urandom(100)):
    with socket.create_connection(("alpha", {PORT}), 10) as stranger:
        stranger.sendall(data)
        stranger.settimeout(15)
        try:
            while stranger.recv(4096):
                pass
        except ConnectionError:
            pass
"""
    beta.run(program)
    assert made.run(gamma, ALIVE) == "3.0\n"


HOSTILE = f"""
import os, sys
from gt.core.messages import Hello
from gt.version import __version__
from gt.wire.codec import MAX_FRAME, Decoder, encode, header_of
from gt.wire.connections import open_link
from gt.wire.process_identity import this_host
from gt.core.messages import Refused, Welcome
from pathlib import Path

def link():
    return open_link("tcp://alpha:{PORT}", Path(os.environ["GT_KEYS"]), 5000, 0)

def ask(frames):
    peer = link()
    peer.send(frames)
    answer = peer.receive()
    found = None if answer is None else Decoder(Welcome | Refused).decode(answer)[0][0]
    lost = peer.is_lost()
    peer.close()
    return found, lost

print(type(ask([header_of(b"--") + b"\\xff"])[0]).__name__)
print(type(ask([os.urandom(100)])[0]).__name__)
print(ask([bytes(2 * MAX_FRAME)]))
welcome = ask(encode([Hello(__version__, "client", this_host(), 1, wants_workers=0)]))[0]
print(ask(encode([Hello(__version__, "worker", welcome.host, 1)]))[0].reason)
print(ask(encode([Hello(__version__, "worker", this_host(), 1, "cpu", address="elsewhere")]))[0].reason)
print(ask(encode([Hello(__version__, "king", this_host(), 1)]))[0].reason)
"""


def test_malformed_messages_of_a_peer_with_a_key_are_refused_and_others_do_not_notice(four_workers):
    made, gamma = four_workers, four_workers.hosts[2]
    said = made.run(gamma, HOSTILE).splitlines()
    assert said[:3] == ["Refused", "Refused", "(None, True)"]
    assert said[3].startswith(f"a worker at {gamma.address} says that it is a process of this machine")
    assert said[4].startswith("'elsewhere' is not an address")
    assert said[5].startswith("'king' is not a role")
    assert made.run(gamma, ALIVE) == "3.0\n"


@pytest.mark.parametrize("what", ["worker", "program"])
def test_a_name_that_does_not_resolve_is_said(four_workers, what):
    made, gamma = four_workers, four_workers.hosts[2]
    if what == "worker":
        code, _, err = finish(made.start_worker(gamma, server="delta"), 30)
    else:
        code, _, err = finish(made.start(gamma, "-c", f"import gt; gt.connect('delta:{PORT}')"), 30)
    assert code == 1
    assert "there is no host 'delta'" in err


def test_a_program_is_told_for_whom_it_waits(four_workers):
    made, gamma = four_workers, four_workers.hosts[2]
    program = f"import gt; gt.connect('alpha:{PORT}', min_workers=5)"
    code, _, err = finish(made.start(gamma, "-c", program, GT_TIMEOUT="3"), 30)
    assert code == 1
    assert f"4 of 5 workers have joined the server; start more with: python -m gt.worker --host alpha -p {PORT}" in err


def test_a_server_that_comes_after_its_workers_and_programs(tmp_path):
    with cluster(tmp_path, "alpha", "beta") as made:
        alpha, beta = made.hosts
        workers = [made.start_worker(beta), made.start_worker(alpha, server="localhost")]
        program = made.start(
            beta, "-c", f"import gt; gt.connect('alpha:{PORT}', min_workers=2); print((gt.ones(4, 4).sum()).item())"
        )
        server = made.start_server("--log", str(tmp_path / "server.log"))
        assert sorted(map(wait_for_join, workers)) == [0, 1]
        code, out, err = finish(program)
        assert (code, out) == (0, "16.0\n"), err
        server.terminate()
        assert finish(server, 20)[0] == 0
        assert [finish(worker, 20)[0] for worker in workers] == [0, 0]
        log = (tmp_path / "server.log").read_text()
        assert "worker 1 joined" in log and "on beta" in log


def test_sigterm_lets_a_program_have_its_answer(tmp_path):
    reading = f"""
import threading, gt
gt.connect("alpha:{PORT}")
x = gt.randn(1500, 1500)
gt.synchronize()
for _ in range(60):
    x = x @ x / 50
threading.Timer(1, lambda: print("asked", flush=True)).start()  # while this thread waits for the answer
print(x.shape[0], x.sum().item() is not None)
"""
    with cluster(tmp_path, "alpha", "beta") as made:
        server = made.start_server()
        (worker,) = made.start_workers(made.hosts[1])
        program = made.start(made.hosts[1], "-c", reading)
        assert program.stdout.readline() == "asked\n", program.communicate()
        server.terminate()
        code, out, err = finish(program)
        assert (code, out) == (0, "1500 True\n"), err
        assert finish(server, 40)[0] == 0
        assert finish(worker, 20)[0] == 0


LISTED = f"""
import gt
gt.connect("alpha:{PORT}", min_workers=4)
x = gt.ones(1000)
print([(each.worker, each.host, each.device, each.state) for each in gt.workers()])
print(sum(each.held for each in gt.workers()), min(each.memory for each in gt.workers()) > 0)
"""


def test_the_workers_of_a_server_are_listed(four_workers):
    made, (alpha, _, gamma) = four_workers, four_workers.hosts
    names = ["alpha", "alpha", "beta", "beta"]
    out = made.run(gamma, LISTED).splitlines()
    assert out == [str([(ident, name, "cpu", "ready") for ident, name in enumerate(names)]), "4000 True"]
    for host in (alpha, gamma):
        server = ("--server", f"alpha:{PORT}")
        code, out, err = finish(made.start(host, "-m", "gt.scripts.workers", "--json", *server))
        assert code == 0, err
        assert [json.loads(line)["host"] for line in out.splitlines()] == names
    _, table, _ = finish(made.start(gamma, "-m", "gt.scripts.workers", *server))
    assert table.splitlines()[0].split() == ["id", "host", "pid", "device", "memory", "held", "state"]


def test_a_worker_that_gets_sigterm_says_goodbye(tmp_path):
    with cluster(tmp_path, "alpha", "beta") as made:
        server = made.start_server()
        (worker,) = made.start_workers(made.hosts[1])
        worker.send_signal(signal.SIGTERM)
        assert finish(worker, 20)[0] == 0
        listed = f"import gt\ntry: gt.connect('alpha:{PORT}')\nexcept gt.ServerLost as error: print(error)"
        assert "0 of 1 workers" in made.run(made.hosts[1], listed, GT_TIMEOUT="2")
        server.terminate()
        assert finish(server, 20)[0] == 0


def test_a_second_sigterm_ends_a_server_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("GT_HEARTBEAT_TIMEOUT", "60")  # else the stopped worker is given up, and nobody waits
    waiting = f"""
import threading, gt
gt.connect("alpha:{PORT}")
threading.Timer(1, lambda: print("asked", flush=True)).start()  # while this thread waits for the answer
print(gt.ones(3).sum().item())
"""
    with cluster(tmp_path, "alpha", "beta") as made:
        server = made.start_server()
        (worker,) = made.start_workers(made.hosts[1])
        worker.send_signal(signal.SIGSTOP)  # the answer does not come
        program = made.start(made.hosts[1], "-c", waiting)
        assert program.stdout.readline() == "asked\n"
        server.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(2)
        server.terminate()
        assert finish(server, 5)[0] == 0
        assert "ServerLost" in finish(program, 20)[2]
        worker.send_signal(signal.SIGCONT)


def test_a_server_tells_machines_where_it_is(tmp_path):
    with cluster(tmp_path, "alpha") as made:
        arguments = ("-m", "gt.server", "--host", "0.0.0.0", "-p", str(PORT), "--json")
        server = made.start(made.hosts[0], *arguments)
        found = json.loads(server.stdout.readline())
        assert found["host"] == "alpha" and found["encrypted"]
        assert found["worker"] == f"python -m gt.worker --host alpha -p {PORT}"
