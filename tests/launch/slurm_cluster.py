"""A SLURM cluster on this machine, for tests: munged, slurmctld, and a slurmd for each of several nodes.

Everything that the daemons write is in a directory of the test's own. They listen at loopback, and are ended by their
ids. Debian's packages are slurm-wlm and munge; the daemons have to be started by root.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.subprocesses import ROOT, wait_until

_TOOLS = ("munged", "slurmctld", "slurmd", "slurmstepd", "sbatch", "srun", "scontrol", "squeue", "scancel")
_SBIN = ("/usr/sbin", "/usr/local/sbin")  # not in the PATH of everybody
NODES = ("node1", "node2")

_CONFIGURATION = """
ClusterName=gt-test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
CredType=cred/munge
SlurmctldPort={controller_port}
SlurmctldPidFile={directory}/slurmctld.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdPidFile={directory}/%n.pid
SlurmdLogFile={directory}/%n.log
SlurmdSpoolDir={directory}/spool-%n
StateSaveLocation={directory}/state
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PrologFlags=NoHold
ReturnToService=2
KillWait=5
InactiveLimit=0
MinJobAge=300
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """`environment` lets SLURM's commands find the cluster."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(directory / "slurm.conf"),
            "PATH": os.pathsep.join([os.environ["PATH"], *_SBIN]),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HOME": str(directory / "home"),
        }

    def run(self, *command: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env={**self.environment, **environment},
            cwd=self.directory / "work",
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def launch(self, *arguments: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        """`python -m gt.launch.slurm`."""
        return self.run(sys.executable, "-m", "gt.launch.slurm", *arguments, timeout=timeout, **environment)

    def run_job(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """The exit code and the output of a job, when it has ended."""
        done = self.launch(*arguments, **environment)
        assert done.returncode == 0, done.stderr
        job = done.stdout.strip()
        return int(self.wait_for_end(job, 120)["ExitCode"].partition(":")[0]), self.output(job)

    def write(self, name: str, text: str) -> None:
        """A file in the directory in which jobs begin."""
        (self.directory / "work" / name).write_text(text)

    def keys(self) -> list[Path]:
        """The directories of the keys of jobs."""
        return list((self.directory / "home" / ".gt" / "slurm").iterdir())

    def abandoned_memory(self) -> set[Path]:
        """Shared buffers of GT whose processes have ended."""
        return {path for path in Path("/dev/shm").glob("gt-*") if not psutil.pid_exists(int(path.name.split("-")[1]))}

    def output(self, job: str) -> str:
        """What a job has printed so far."""
        path = self.directory / "work" / f"slurm-{job}.out"
        return path.read_text() if path.exists() else ""

    def job(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        text = self.run("scontrol", "--oneliner", "show", "job", job).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait_for_end(self, job: str, timeout: float = 60) -> dict[str, str]:
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        wait_until(lambda: self.job(job).get("JobState") in ended, timeout, f"the end of job {job}")
        return self.job(job)

    def processes(self) -> list[psutil.Process]:
        """The processes of jobs, whichever daemon has started them."""
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
            except psutil.Error:
                continue
            if environment.get("SLURM_CONF") == self.environment["SLURM_CONF"] and "SLURM_JOB_ID" in environment:
                found.append(process)
        return found


def require_slurm() -> None:
    """Skip a test where no cluster can be started."""
    missing = [tool for tool in _TOOLS if _which(tool) is None]
    if missing:
        pytest.skip(f"there is no `{missing[0]}` (packages slurm-wlm and munge): `make test-slurm` installs them")
    if os.getuid() != 0:
        pytest.skip("the daemons of SLURM have to be started by root")


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", ""), *_SBIN]))


@contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    with ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="gt-slurm-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        directory.chmod(0o755)  # munged refuses sockets in directories that others cannot reach
        for name in ("munge", "state", "work", "home"):
            (directory / name).mkdir(mode=0o755)
        cluster = SlurmCluster(directory)
        _configure(directory)
        stack.enter_context(_munged(directory))
        stack.enter_context(_daemon(cluster, "slurmctld", "-f", str(directory / "slurm.conf"), "-D"))
        for name in NODES:
            stack.enter_context(_daemon(cluster, "slurmd", "-f", str(directory / "slurm.conf"), "-D", "-N", name))
        try:
            wait_until(lambda: _are_idle(cluster), 30, "the start of the nodes of SLURM")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{_logs(directory)}") from None
        yield cluster


def _logs(directory: Path) -> str:
    """What the daemons have said."""
    return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(directory.glob("*.[lo][ou][gt]")))


def _are_idle(cluster: SlurmCluster) -> bool:
    states = cluster.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()
    return states == ["idle"] * len(NODES)


def _configure(directory: Path) -> None:
    ports = _free_ports(1 + len(NODES))
    host = socket.gethostname().partition(".")[0]
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=1000 "
        f"Gres=gpu:2 State=UNKNOWN"
        for name, port in zip(NODES, ports[1:], strict=True)
    ]
    text = _CONFIGURATION.format(
        host=host, directory=directory, controller_port=ports[0], nodes="\n".join(nodes), names=",".join(NODES)
    )
    (directory / "slurm.conf").write_text(text)
    # devices that every machine has, in place of GPUs
    (directory / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def _free_ports(count: int) -> list[int]:
    found = [socket.socket() for _ in range(count)]
    try:
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]
    finally:
        for each in found:
            each.close()


@contextmanager
def _munged(directory: Path) -> Iterator[None]:
    place = directory / "munge"
    key = place / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    options = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    files = [f"--{option}={place / name}" for option, name in options.items()]
    with _running([_which("munged"), "--foreground", "--origin=127.0.0.1", *files], dict(os.environ), place / "out"):
        wait_until((place / "socket").exists, what="the socket of munged")
        yield


@contextmanager
def _daemon(cluster: SlurmCluster, program: str, *options: str) -> Iterator[None]:
    output = cluster.directory / f"{program}-{options[-1].rpartition('/')[2]}.out"
    with _running([_which(program), *options], cluster.environment, output):
        yield


@contextmanager
def _running(command: Sequence[str | None], environment: dict[str, str], output: Path) -> Iterator[None]:
    assert command[0] is not None
    with output.open("wb") as file:
        process = subprocess.Popen(
            [str(word) for word in command], env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
