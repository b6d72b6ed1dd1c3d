"""Workers and machines that are lost, in the middle of everything that workers do together with others."""

import json
import re
import signal
import time

import pytest

from tests.cluster.clusters import PORT, cluster, read_until, wait_for_join
from tests.subprocesses import finish, running

pytestmark = pytest.mark.slow

LIMIT = 2.0
SILENCE = {"GT_HEARTBEAT_TIMEOUT": str(LIMIT)}
GRACE = 4.0  # for a busy machine

PROGRAM = f"""
import json, sys, time, torch, gt
gt.connect("alpha:{PORT}", min_workers=2)
mesh = gt.mesh(2, ("w",))
workers = sorted((each.host, each.worker) for each in gt.workers())  # on beta and gamma
kept, lost = [gt.distribute(torch.ones(500, 500), gt.mesh(1, ("w",), workers=[each]), "-, -") for _, each in workers]
both = gt.distribute(torch.ones(4, 4), mesh, "-, -")
(kept * 1 + lost * 1).sum().item()
gt.synchronize()

def tell(function):
    begun = time.monotonic()
    try:
        result = function()
    except gt.GTError as error:
        result = [type(error).__name__, str(error)]
    print(json.dumps([time.monotonic() - begun, result]), flush=True)

def begin():
    print("begun", flush=True)

MOMENT

tell(lambda: gt.ones(3).sum().item())
tell(lambda: kept.sum().item())
tell(lambda: both.sum().item())
tell(lambda: lost.sum().item())
"""

MOMENTS = {
    "computes": """
x = lost
for _ in range(2000):
    x = x @ lost / 500
begin()
tell(lambda: x.sum().item())
""",
    "exchanges tensors in a collective": """
x = gt.distribute(torch.ones(1000, 1000), mesh, "w, -")
begin()
tell(lambda: [(x * 1.0).sum(0).sum().item() for _ in range(100_000)])
""",
    "gives a tensor to another": """
begin()
tell(lambda: [((kept + 1) + (lost + 1)).sum().item() for _ in range(100_000)])
""",
    "takes a tensor from another": """
begin()
tell(lambda: [((lost + 1) + (kept + 1)).sum().item() for _ in range(100_000)])
""",
    "is read": """
x = gt.distribute(torch.ones(1000, 1000), mesh, "w, -")
begin()
tell(lambda: [float(x.cpu()[0, 0]) for _ in range(100_000)])
""",
    "takes an upload": """
h = torch.ones(1000, 1000)
begin()
tell(lambda: [gt.distribute(h, mesh, "w, -").sum().item() for _ in range(100_000)])
""",
}

WORKING = f"""
import torch, gt
gt.connect("alpha:{PORT}", min_workers=2)
x = torch.arange(36.0).reshape(6, 6)
cut = gt.distribute(x, gt.mesh(2, ("w",)), "w, -")
assert torch.equal((cut @ cut).cpu(), x @ x) and torch.equal(cut.sum(0).cpu(), x.sum(0))
print(sorted(each.host for each in gt.workers()))
"""

STEADY = f"""
import gt, time
gt.connect("alpha:{PORT}")
x = gt.to(gt.ones(3).cpu())
print(x.spec.mesh.workers, flush=True)
count = 0
while True:
    x = x + 1
    count += 1
    assert x.sum().item() == 3 * (1 + count)
    time.sleep(0.05)
    if count % 20 == 0:
        print("goes on", flush=True)
"""

MEETING = f"""
import json, time, torch, gt
gt.connect("alpha:{PORT}", min_workers=2)
workers = sorted((each.host, each.worker) for each in gt.workers())
x, y = [gt.distribute(torch.ones(5, 5), gt.mesh(1, ("w",), workers=[each]), "-, -") for _, each in workers]
gt.synchronize()
print("begun", flush=True)
time.sleep(0.7)
for function in (lambda: (x + y).sum().item(), lambda: gt.ones(3).sum().item()):
    begun = time.monotonic()
    try:
        result = function()
    except gt.GTError as error:
        result = [type(error).__name__, str(error)]
    print(json.dumps([time.monotonic() - begun, result]), flush=True)
"""

FENCED = f"""
import time, torch, gt
gt.connect("alpha:{PORT}", min_workers=3)
ids = [each.worker for each in gt.workers() if each.host == "gamma"]
whole = (torch.arange(250_000.0) % 7).reshape(500, 500)
x = gt.distribute(whole, gt.mesh(2, ("w",), workers=ids), "w, -")
x.sum(0).sum().item()
print("begun", flush=True)
try:
    for _ in range(100_000):
        (x * 1.0).sum(0).sum().item()
except gt.WorkerLost as error:
    print("WorkerLost", flush=True)
left = [each.worker for each in gt.workers() if each.state == "ready"]
end = time.monotonic() + 3
while time.monotonic() < end:
    y = gt.distribute(whole, gt.mesh(2, ("w",), workers=left[:2]), "w, -")
    assert torch.equal((y + y).sum(0).cpu(), (whole + whole).sum(0))
print("right")
"""

SLOWLY = f"""
import torch, gt
gt.connect("alpha:{PORT}", min_workers=2)
whole = (torch.arange(1_000_000.0) % 7).reshape(1000, 1000)
x = gt.distribute(whole, gt.mesh(2, ("w",)), "w, -")  # 2 MB for each
for _ in range(3):
    assert torch.equal(x.sum(0).cpu(), whole.sum(0))
assert torch.equal((x + 1).cpu(), whole + 1)
print("right")
"""

LISTING = f"""
import time, gt
gt.connect("alpha:{PORT}", min_workers=2)
states = lambda: {{each.host: each.state for each in gt.workers()}}
print(states()["gamma"], flush=True)
while states().get("gamma") == "ready":
    time.sleep(0.1)
print(states().get("gamma"))
"""

LEFT = """
import os
processes = [each for each in os.listdir("/proc") if each.isdigit() and int(each) not in (1, os.getpid(), os.getppid())]
commands = [open(f"/proc/{each}/cmdline").read() for each in processes]
print([each for each in commands if "gt." in each], os.listdir("/dev/shm"))
"""

SILENT = "was silent for 2 s (GT_HEARTBEAT_TIMEOUT): its machine or network is down, or it was stopped"
CLOSED = "is gone: its connection was closed (it was killed, or has crashed)"
ENDS = {
    "the machine of a worker vanishes while the worker": SILENT,
    "a worker on another machine is stopped (SIGSTOP) while it": SILENT,
    "a worker on another machine is killed while it": CLOSED,
}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """A server on the first host; workers are started by the tests. The programs run on the server's host."""
    with cluster(tmp_path_factory.mktemp("faults"), "alpha", "beta", "gamma") as made:
        made.server = made.start_server(**SILENCE)
        (made.steady,) = made.start_workers(made.hosts[1], **SILENCE)
        yield made


@pytest.fixture
def victim(hosts):
    """A worker on the last host."""
    (worker,) = hosts.start_workers(hosts.hosts[2], **SILENCE)
    yield worker
    hosts.hosts[2].reconnect()
    with running(worker):
        pass


def end(cluster_, worker, how):
    if "vanishes" in how:
        cluster_.hosts[2].cut_off()
    else:
        worker.send_signal(signal.SIGSTOP if "stopped" in how else signal.SIGKILL)


def come_back(cluster_, worker, how):
    """The same worker begins anew, or another one takes its place. Returns the one that has joined."""
    if "killed" in how:
        return cluster_.start_workers(cluster_.hosts[2], **SILENCE)[0]
    cluster_.hosts[2].reconnect()
    worker.send_signal(signal.SIGCONT)
    assert "joins again without its tensors" in read_until(worker, "joins again")
    wait_for_join(worker)
    return worker


def told(program, count):
    """The results that a program tells, with the seconds that each took."""
    lines = [program.stdout.readline() for _ in range(count)]
    assert all(lines), program.communicate()
    return [json.loads(line) for line in lines]


def loss_in(text):
    """The loss of a worker as the table tells it: ids of workers differ between runs."""
    found = re.search(r"worker (\d+) \(pid.*", text, re.DOTALL)
    return f"`WorkerLost`: {found[0].replace(f'worker {found[1]}', 'worker 1')}"


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_worker_is_lost(hosts, victim, moment, how, fault):
    made, alpha = hosts, hosts.hosts[0]
    program = made.start(alpha, "-c", PROGRAM.replace("MOMENT", MOMENTS[moment]), **SILENCE)
    assert program.stdout.readline() == "begun\n", program.communicate()
    time.sleep(1)
    end(made, victim, how)
    (seconds, error), (_, new), (_, kept), (_, both), (_, lost) = told(program, 5)
    assert seconds < LIMIT + GRACE
    code, _, err = finish(program)
    assert code == 0, err
    kind, text = error
    assert kind == "WorkerLost" and ENDS[how] in text and " on gamma " in text
    assert re.search(r"its last op was [\w.]+ \(<string>:\d+\)", text)
    assert "Lost are " in text and "float32[500, 500]" in text
    assert [new, kept, both] == [3.0, 250_000.0, 16.0] and lost[0] == "WorkerLost"
    fault(f"{how} {moment}", loss_in(text))
    with running(come_back(made, victim, how)):
        assert made.run(alpha, WORKING) == "['beta', 'gamma']\n"


def test_a_worker_that_hosts_the_store_is_lost_before_others_have_met_there(tmp_path, fault):
    """The other worker waits for the store, over a connection that stays open."""
    with cluster(tmp_path, "alpha", "beta", "gamma") as made:
        alpha, beta, gamma = made.hosts
        made.start_server(**SILENCE)
        hosting, _ = made.start_workers(gamma, beta, **SILENCE)
        program = made.start(alpha, "-c", MEETING, **SILENCE)
        assert program.stdout.readline() == "begun\n", program.communicate()
        gamma.cut_off()
        (seconds, error), (_, new) = told(program, 2)
        assert seconds < LIMIT + GRACE and error[0] == "WorkerLost" and new == 3.0
        fault("the machine that hosts the store of process groups vanishes, and others wait for it", loss_in(error[1]))
        come_back(made, hosting, "vanishes")
        assert made.run(alpha, WORKING) == "['beta', 'gamma']\n"


def test_sessions_without_tensors_there_go_on(hosts, fault):
    made, (alpha, _, gamma) = hosts, hosts.hosts
    steady = made.start(alpha, "-c", STEADY, **SILENCE)
    assert steady.stdout.readline(), steady.communicate()
    (worker,) = made.start_workers(gamma, **SILENCE)
    with running(worker, steady):
        gamma.cut_off()
        read_until(made.server, r"worker \d+ \(pid \d+\) on gamma was silent")
        steady.stdout.readline()
        assert [steady.stdout.readline() for _ in range(2)] == ["goes on\n"] * 2
        gamma.reconnect()
    fault("the machine of a worker vanishes, and a program has no tensors there", "nothing: it goes on")


def test_a_stopped_worker_that_comes_back_does_no_harm(hosts, fault):
    """It shares memory with another worker, in the middle of an exchange; that one goes on with others meanwhile."""
    made, (alpha, _, gamma) = hosts, hosts.hosts
    stopped, other = made.start_workers(gamma, gamma, **SILENCE)
    with running(stopped, other):
        program = made.start(alpha, "-c", FENCED, **SILENCE)
        assert program.stdout.readline() == "begun\n", program.communicate()
        time.sleep(0.5)
        stopped.send_signal(signal.SIGSTOP)
        assert program.stdout.readline() == "WorkerLost\n", program.communicate()
        stopped.send_signal(signal.SIGCONT)
        code, out, err = finish(program)
        assert (code, out) == (0, "right\n"), err
        assert "joins again without its tensors" in read_until(stopped, "joins again")
    fault(
        "a worker that was stopped in an exchange comes back after it was given up",
        "it joins again with nothing; what the others do meanwhile is right",
    )


def test_the_list_of_workers_tells_of_a_silent_one(hosts, victim):
    made, (alpha, _, gamma) = hosts, hosts.hosts
    program = made.start(alpha, "-c", LISTING, **SILENCE)
    assert program.stdout.readline() == "ready\n", program.communicate()
    gamma.cut_off()
    code, out, err = finish(program)
    assert code == 0, err
    assert re.fullmatch(r"silent for [12] s\n", out)


WEAK_LINKS = {
    "frames are 200 ms late and 5 % of them are lost": {"delay": 0.2, "loss": 0.05},
    "1 MB a second pass": {"rate": 1e6},
}


@pytest.mark.parametrize("weakness", WEAK_LINKS)
def test_nobody_is_given_up_over_a_weak_link(tmp_path, weakness, fault):
    """With the default limit of silence."""
    with cluster(tmp_path, "alpha", "beta", "gamma") as made:
        alpha, beta, gamma = made.hosts
        made.start_server()
        workers = made.start_workers(beta, gamma)
        with gamma.weak_link(**WEAK_LINKS[weakness]):
            assert made.run(alpha, SLOWLY, timeout=90) == "right\n"
        for worker in workers:
            worker.terminate()
        assert all("joins again" not in finish(worker)[2] for worker in workers)
    fault(f"the link of a worker's machine is weak: {weakness}", "the results are right, and nobody is given up")


def test_workers_of_a_server_that_is_killed_join_its_successor(tmp_path, fault):
    with cluster(tmp_path, "alpha", "beta", "gamma") as made:
        server = made.start_server(**SILENCE)
        workers = made.start_workers(*made.hosts[1:], **SILENCE)
        assert made.run(made.hosts[0], WORKING) == "['beta', 'gamma']\n"
        server.kill()
        for worker in workers:
            assert "joins again without its tensors" in read_until(worker, "joins again")
        finish(server)
        made.start_server(**SILENCE)
        assert sorted(map(wait_for_join, workers)) == [0, 1]
        assert made.run(made.hosts[0], WORKING) == "['beta', 'gamma']\n"
        fault("a server is killed, and another one started: its workers on other machines", "join it with nothing")


def test_nothing_is_left_on_any_host(tmp_path, fault):
    with cluster(tmp_path, "alpha", "beta", "gamma") as made:
        server = made.start_server(**SILENCE)
        workers = made.start_workers(*made.hosts[1:], **SILENCE)
        program = made.start(made.hosts[2], "-c", STEADY, **SILENCE)
        assert program.stdout.readline(), program.communicate()
        program.kill()
        workers[0].kill()
        for each in (program, workers[0]):
            finish(each)
        read_until(server, r"on beta is gone: its connection was closed")
        workers[1].terminate()
        assert finish(workers[1])[0] == 0
        server.terminate()
        assert finish(server)[0] == 0
        for host in made.hosts:
            assert host.run(LEFT) == "[] []\n"
        fault("a worker and a program on other machines are killed", "no process, shared buffer or directory is left")
