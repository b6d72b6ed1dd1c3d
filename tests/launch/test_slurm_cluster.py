"""Programs as jobs of a real SLURM with two nodes on this machine: `make test-slurm`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import psutil
import pytest
import torch

from gt.wire.addresses import interfaces, is_loopback
from tests.launch.slurm_cluster import SlurmCluster, require_slurm, slurm_cluster
from tests.subprocesses import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RESULT = """
import json, os, pathlib, sys
import gt

x = gt.arange(32.0).reshape(8, 4)
keys = pathlib.Path(os.environ["GT_KEYS"])
found = {
    "sum": (x @ x.T).sum().item(),
    "arguments": sys.argv[1:],
    "pids": [worker.pid for worker in gt.workers()],
    "keys": str(keys),
    "modes": sorted({oct(path.stat().st_mode & 0o777) for path in [keys, *keys.rglob("*")]}),
    "secrets": [json.loads((keys / name).read_text())["secret"] for name in ("client.key", "server.key")],
}
for pid in found["pids"]:
    environment = pathlib.Path(f"/proc/{pid}/environ").read_text().split(chr(0))
    found.setdefault("gpus", []).extend(line for line in environment if line.startswith("CUDA_VISIBLE_DEVICES="))
    found.setdefault("seen", []).extend([*environment, pathlib.Path(f"/proc/{pid}/cmdline").read_text()])
found["seen"] += [f"{name}={value}" for name, value in os.environ.items()]
print("FOUND", json.dumps(found))
raise SystemExit(3)
"""

KILLED = """
import os, signal
import gt

x = gt.ones(8, 4)
assert x.sum().item() == 32
victim = gt.workers()[-1]
os.kill(victim.pid, signal.SIGKILL)
try:
    while True:
        (x + 1).sum().item()
except gt.WorkerLost as error:
    print("LOST", error)
"""

ENDLESS = """
import signal, time
import gt

signal.signal(signal.SIGUSR1, lambda *_: print("TOLD", flush=True))
print("SUM", gt.ones(8, 4).sum().item(), flush=True)
while True:
    time.sleep(1)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    require_slurm()
    with slurm_cluster() as made:
        yield made


@contextlib.contextmanager
def nothing_left(cluster: SlurmCluster) -> Iterator[None]:
    """A job leaves no process, no keys and no shared memory behind."""
    before = cluster.abandoned_memory()
    yield
    wait_until(lambda: not cluster.processes(), what="the end of the processes of the job")
    assert cluster.keys() == []
    assert cluster.abandoned_memory() <= before


def own_interface() -> str:
    """An address off loopback, where a server needs keys that last: packets to it do not leave this machine."""
    return next((address for _, address in interfaces() if not is_loopback(address)), "127.0.0.1")


def test_a_program_runs_on_the_workers_of_all_nodes(cluster):
    cluster.write("train.py", RESULT)
    with nothing_left(cluster):
        done = cluster.launch("--nodes", "2", "--gpus-per-node", "2", "--wait", "train.py", "--lr", "a b")
    job, said = done.stdout.strip(), cluster.output(done.stdout.strip())
    assert done.returncode == 3, (done.stderr, said)
    assert cluster.job(job)["ExitCode"] == "3:0"
    (line,) = [line for line in said.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    x = torch.arange(32.0).reshape(8, 4)
    assert (found["sum"], found["arguments"]) == ((x @ x.T).sum().item(), ["--lr", "a b"])
    assert len(set(found["pids"])) == 4 and found["gpus"] == ["CUDA_VISIBLE_DEVICES=0,1"] * 4
    assert found["modes"] == ["0o600", "0o700"]
    batch = cluster.run("scontrol", "write", "batch_script", job, "-").stdout
    assert "gt.launch.slurm_job" in batch
    for secret in found["secrets"]:
        assert not any(secret in text for text in [*found["seen"], batch, done.stderr])
    assert "exit code 1" not in said and "has ended" not in said  # all parts ended well


def test_a_worker_that_is_killed_is_said(cluster):
    cluster.write("killed.py", KILLED)
    with nothing_left(cluster):
        options = [
            "--nodes=2",
            "--workers-per-node=2",
            "--sbatch=--export=PATH,PYTHONPATH,HOME,SLURM_CONF,GT_INTERFACE",
        ]
        code, said = cluster.run_job(*options, "killed.py", GT_INTERFACE=own_interface())
    assert code == 0, said
    assert f"GT server at tcp://{own_interface()}:" in said
    assert "LOST " in said
    assert any("task" in line and "Killed" in line for line in said.splitlines()), said


def test_a_cancelled_job_leaves_nothing_behind(cluster):
    cluster.write("endless.py", ENDLESS)
    with nothing_left(cluster):
        job = cluster.launch("--nodes", "2", "--workers-per-node", "1", "endless.py").stdout.strip()
        wait_until(lambda: "SUM 32.0" in cluster.output(job), 90, "the first result")
        assert len(cluster.keys()) == 1
        cluster.run("scancel", "--batch", "--signal=USR1", job)
        wait_until(lambda: "TOLD" in cluster.output(job), what="the signal that is passed on")
        cluster.run("scancel", job)
        assert cluster.wait_for_end(job)["JobState"] == "CANCELLED"
    assert "told to end by SIGTERM" in cluster.output(job)


def test_a_job_of_which_the_first_process_is_killed_leaves_no_process(cluster):
    """Its keys are removed by the next job."""
    cluster.write("endless.py", ENDLESS)
    job = cluster.launch("--workers-per-node", "1", "endless.py").stdout.strip()
    wait_until(lambda: "SUM 32.0" in cluster.output(job), 90, "the first result")
    (first,) = [each for each in cluster.processes() if "gt.launch.slurm_job" in each.cmdline()]
    first.kill()
    cluster.wait_for_end(job)
    wait_until(lambda: not cluster.processes(), what="the end of the processes of the job")
    assert len(cluster.keys()) == 1
    cluster.write("nothing.py", "")
    with nothing_left(cluster):
        assert cluster.run_job("nothing.py")[0] == 0


def test_a_program_waits_for_its_workers_with_a_limit(cluster):
    cluster.write("waiting.py", "import gt; gt.ones(3).sum().item()")
    with nothing_left(cluster):
        code, said = cluster.run_job("--min-workers", "9", "--timeout", "3", "waiting.py")
    assert code == 1 and "of 9 workers" in said, said


def test_a_job_that_slurm_refuses_is_an_error(cluster):
    cluster.write("train.py", RESULT)
    done = cluster.launch("--partition", "nowhere", "train.py")
    assert done.returncode == 1 and "invalid partition" in done.stderr and "sbatch has refused" in done.stderr


def test_no_daemon_outlives_the_tests():
    require_slurm()
    before = set(psutil.Process().children())
    with slurm_cluster() as made:
        started = set(psutil.Process().children()) - before
        assert sorted(each.name() for each in started) == ["munged", "slurmctld", "slurmd", "slurmd"]
    assert not any(each.is_running() for each in started)
    assert not made.directory.exists()
