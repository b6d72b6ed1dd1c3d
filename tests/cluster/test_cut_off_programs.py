"""Programs on other hosts whose network fails: they go on with their sessions, until their leases are over."""

import re

import pytest

from tests.cluster.clusters import PORT, cluster, read_until
from tests.subprocesses import finish

pytestmark = pytest.mark.slow

SECOND = {"GT_HEARTBEAT_TIMEOUT": "1"}
TRAINING = f"""
import time, torch, gt
gt.connect("alpha:{PORT}")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
gt.to(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(30):
    batch = gt.to(torch.randn(500, 8)) + gt.randn(500, 8)
    loss = (model(batch) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item(), gt.to(torch.randn(200_000)).cpu().sum().item(), flush=True)
    time.sleep(0.05)
"""
HOLDING = f"""
import sys, time, gt
gt.connect("alpha:{PORT}")
x = gt.ones(250_000)
print(x.sum().item(), flush=True)
time.sleep(float(sys.argv[1]))
try:
    print(x.sum().item())
except gt.ServerLost as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def made(tmp_path):
    """A server with a worker on one host; programs run on another."""
    with cluster(tmp_path, "alpha", "beta") as made:
        made.tmp_path = tmp_path
        yield made


def test_training_whose_network_fails_gives_the_same_numbers(made):
    alpha, beta = made.hosts
    server = made.start_server(**SECOND)
    made.start_workers(alpha)
    undisturbed = made.run(beta, TRAINING).splitlines()
    program = made.start(beta, "-c", TRAINING, **SECOND)
    lines = [program.stdout.readline().strip() for _ in range(5)]
    beta.cut_off()
    assert "its session is kept for 300 s" in read_until(server, "is cut off")
    beta.reconnect()
    assert "is back after" in read_until(server, "client")
    code, out, err = finish(program)
    assert code == 0, err
    assert [*lines, *out.splitlines()] == undisturbed
    assert "with nothing lost" in err


def test_a_host_that_is_cut_off_for_longer_than_the_lease_loses_its_sessions(made):
    alpha, beta = made.hosts
    server = made.start_server("--lease", "1", **SECOND)
    made.start_workers(alpha)
    program = made.start(beta, "-c", HOLDING, "1", **SECOND)
    assert program.stdout.readline() == "250000.0\n"
    beta.cut_off()
    freed = read_until(server, "was freed")
    assert "its client was cut off for 1 s" in freed and "tensors (1 MB) are lost" in freed
    code, out, err = finish(program)
    assert code == 0 and "ServerLost" in out, (out, err)
    assert made.run(alpha, f"import gt; gt.connect('alpha:{PORT}'); print(sum(w.held for w in gt.workers()))") == "0\n"


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_a_server_that_is_started_again_has_no_session(made, how):
    alpha, beta = made.hosts
    server = made.start_server()
    made.start_workers(alpha)
    program = made.start(beta, "-c", HOLDING, "4")
    assert program.stdout.readline() == "250000.0\n"
    server.kill() if how == "SIGKILL" else server.terminate()
    finish(server, 20)
    made.start_server()
    code, out, err = finish(program)
    assert code == 0, err
    assert re.search("SessionLost .*has no session of before", out), out


STOLEN = f"""
import os
from pathlib import Path
from gt.core.messages import Refused, Resumed, Resume, SessionEnded
from gt.version import __version__
from gt.wire.codec import Decoder, encode
from gt.wire.connections import open_link
import sys
server, session, token = sys.argv[1:]
link = open_link("tcp://alpha:{PORT}", Path(os.environ["GT_KEYS"]), 5000, 0)
link.send(encode([Resume(__version__, server, int(session), token, 1)]))
print(Decoder(Refused | Resumed | SessionEnded).decode(link.receive())[0][0])
link.close()
"""
TOLD = f"""
import time, gt
gt.connect("alpha:{PORT}")
from gt.client import active_session
welcome = active_session.current().welcome
x = gt.ones(3)
gt.synchronize()
print(welcome.server, welcome.ident, welcome.session_secret, flush=True)
time.sleep(4)
print(x.sum().item())
"""


def test_another_key_with_the_secret_of_a_session_is_refused(made):
    alpha, beta = made.hosts
    made.start_server()
    made.start_workers(alpha)
    mine = made.tmp_path / "mine"
    mine.mkdir(mode=0o700)
    made.run_keys(made.server_host, "client", "guest", "--out", str(mine / "client.key"))
    program = made.start(beta, "-c", TOLD)
    secret = program.stdout.readline().split()
    answer = made.run(beta, STOLEN, *secret, GT_KEYS=str(mine))
    assert answer.startswith("Refused(") and "is not one of the peer that asks for it" in answer
    code, out, err = finish(program)
    assert (code, out) == (0, "3.0\n"), err
