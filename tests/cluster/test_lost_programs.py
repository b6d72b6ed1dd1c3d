"""Programs on other machines that are lost, in the middle of everything that a program does with its workers."""

import json
import signal
import time

import pytest

from tests.cluster.clusters import PORT, cluster
from tests.subprocesses import finish, running

pytestmark = pytest.mark.slow

LIMIT = 2.0  # of silence, and then of the lease
SETTINGS = {"GT_HEARTBEAT_TIMEOUT": str(LIMIT), "GT_LEASE": str(LIMIT)}
GRACE = 4.0  # for a busy machine

PROGRAM = f"""
import torch, gt
gt.connect("alpha:{PORT}", min_workers=2)
mesh = gt.mesh(2, ("w",))
whole = torch.ones(1000, 1000)
cut = gt.distribute(whole, mesh, "w, -")
apart = [gt.distribute(whole, gt.mesh(1, ("w",), workers=[each]), "-, -") for each in mesh.workers]
gt.synchronize()
print("begun", flush=True)
try:
    while True:
        MOMENT
except gt.GTError as error:
    print(type(error).__name__)
"""

MOMENTS = {
    "its workers compute": "[(each @ each).sum().item() for each in apart]",
    "its workers exchange tensors in a collective": "(cut * 1.0).sum(0).sum().item()",
    "its workers give tensors to each other": "(apart[0] + apart[1]).sum().item()",
    "it reads a tensor": "cut.cpu()",
    "it uploads a tensor": 'gt.distribute(whole, mesh, "w, -").sum().item()',
    "it sends ops and waits for nothing": "cut = cut * 1.0",
}

ENDS = {
    "a program on another machine is killed": None,
    "the machine of a program vanishes": "ServerLost",
    "a program on another machine is stopped (SIGSTOP) for longer than its lease": "SessionLost",
}

OTHER = f"""
import time, torch, gt
gt.connect("alpha:{PORT}", min_workers=2)
cut = gt.distribute(torch.arange(36.0).reshape(6, 6), gt.mesh(2, ("w",)), "w, -")
print("begun", flush=True)
worst = 0.0
try:
    while True:
        begun = time.monotonic()
        assert cut.sum(0).sum().item() == 630.0
        worst = max(worst, time.monotonic() - begun)
        time.sleep(0.05)
except KeyboardInterrupt:
    print(worst)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A server with two workers. Another program, on the server's machine, works all the time."""
    with cluster(tmp_path_factory.mktemp("programs"), "alpha", "beta", "gamma") as made:
        alpha, beta, _ = made.hosts
        made.server = made.start_server(**SETTINGS)
        made.workers = made.start_workers(alpha, beta, **SETTINGS)
        made.other = made.start(alpha, "-c", OTHER, **SETTINGS)
        assert made.other.stdout.readline() == "begun\n", made.other.communicate()
        with running(made.other):
            yield made


def sessions(made):
    """The ids of the sessions of the server."""
    listed = made.start(made.hosts[0], "-m", "gt.scripts.sessions", "--server", f"alpha:{PORT}", "--json")
    code, out, err = finish(listed)
    assert code == 0, err
    return {json.loads(line)["session"] for line in out.splitlines()}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_program_is_lost(made, moment, how, fault):
    gamma = made.hosts[2]
    kept = sessions(made)
    program = made.start(gamma, "-c", PROGRAM.replace("MOMENT", MOMENTS[moment]), **SETTINGS)
    with running(program):
        assert program.stdout.readline() == "begun\n", program.communicate()
        time.sleep(0.5)
        (ident,) = sessions(made) - kept
        if "vanishes" in how:
            gamma.cut_off()
        else:
            program.send_signal(signal.SIGSTOP if "stopped" in how else signal.SIGKILL)
        lost_at = time.monotonic()
        while ident in sessions(made):
            assert time.monotonic() - lost_at < 2 * LIMIT + GRACE
        gamma.reconnect()
        if ENDS[how] is not None:
            program.send_signal(signal.SIGCONT)
            code, out, err = finish(program)
            assert (code, out) == (0, ENDS[how] + "\n"), err
    assert [each.poll() for each in (made.server, made.other, *made.workers)] == [None] * 4
    assert gamma.run("import os; print(os.listdir('/dev/shm'))") == "[]\n"
    fault(f"{how} while {moment}", "its tensors are freed after its lease; other programs go on")


def test_the_other_program_has_gone_on(made):
    """It was never kept waiting for as long as a silent program is waited for."""
    assert made.other.poll() is None
    made.other.send_signal(signal.SIGINT)
    code, out, err = finish(made.other)
    assert code == 0, err
    assert float(out) < LIMIT
