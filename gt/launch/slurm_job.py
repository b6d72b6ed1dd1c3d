"""`python -m gt.launch.slurm_job -- train.py`: what a batch job of SLURM runs on its first node.

Starts the server and the program on this node, and workers on all nodes of the job by srun. The keys of the job are
made here, in a directory that only its user can enter and that all nodes see, and are removed when the job ends. The
job ends with the program, with its exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import msgspec

from gt.core.environment import SAFE_PATH
from gt.core.errors import GTError, SettingsError
from gt.core.settings import read_settings
from gt.launch.commands import (
    Command,
    ServerPlace,
    joining_environment,
    launch_environment,
    read_template,
    server_command,
    worker_command,
)
from gt.launch.launched_process import Announcement, end_processes, have_ended
from gt.launch.node_keys import make_node_keys
from gt.wire.addresses import LOOPBACK, NotResolved, interface_address, is_loopback, reaching_address, resolve
from gt.wire.private_files import require_private

_START_SECONDS = 60.0  # time for the server to listen
_LOSS_SECONDS = 30.0  # a program may go on this long after the end of all workers
_END_SECONDS = 20.0  # time for the parts to end: SLURM kills what is left KillWait (30 s by default) after SIGTERM
_POLL_SECONDS = 0.1
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)  # sbatch --signal=B:USR1@120 tells of the end of the time


class _Ended(Exception):
    """A signal has asked the job to end."""

    def __init__(self, number: int) -> None:
        self.number = number


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        with _signals_raised():
            return _run(options, os.environ)
    except _Ended as end:
        _say(f"the job was told to end by {signal.Signals(end.number).name}")
        return 128 + end.number
    except (GTError, NotResolved) as error:
        _say(str(error))
        return 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gt.launch.slurm_job", description="Run a program on its workers.")
    parser.add_argument("--workers-per-node", type=int, required=True)
    parser.add_argument("--min-workers", type=int, required=True)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("program", nargs="+")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    job = environ.get("SLURM_JOB_ID")
    if not job:
        raise SettingsError(
            "this runs inside a job of SLURM, and SLURM_JOB_ID is not set; submit one with: python -m gt.launch.slurm"
        )
    place = options.directory or Path.home() / ".gt" / "slurm"
    with _job_keys(place, f"{environ.get('SLURM_CLUSTER_NAME', '')}-{job}") as keys, _Parts() as parts:
        address = _own_address(environ)
        launcher = JobLauncher(options, environ)
        server = parts.start(launcher.server(address, keys), subprocess.PIPE)
        place = ServerPlace(address, _read_port(server), directory=keys)
        workers, program = [parts.start(command) for command in launcher.commands(place)]
        _forward_signals(program)
        code = _watch(program, server, workers)
        # The server tells its workers to end, and srun ends with them.
        server.terminate()
        have_ended([server, workers], _END_SECONDS)
    return code


class JobLauncher:
    """Runs the server and the program of a job on its first node, and workers on all of its nodes."""

    def __init__(self, options: argparse.Namespace, environ: Mapping[str, str]) -> None:
        self._options = options
        self._environ = environ

    def server(self, address: str, keys: Path) -> Command:
        return self._with_keys(server_command(address, 0, is_json=True), keys)

    def commands(self, place: ServerPlace) -> list[Command]:
        """The workers of all nodes, and the program."""
        chosen = {name: value for name, value in self._environ.items() if name != "GT_WORKERS"}
        defaults = {"GT_TIMEOUT": f"{self._options.timeout:g}", "PYTHONUNBUFFERED": "1"}
        joining = {**joining_environment(place, self._options.min_workers), "GT_KEYS": str(place.directory)}
        program = Command([sys.executable, *self._options.program], {**defaults, **chosen, **joining})
        workers = [*self._srun(), *after_keys(worker_command(place.host, place.port))]
        return [self._with_keys(workers, place.directory), program]

    def _srun(self) -> list[str]:
        """What starts the workers of all nodes. One that ends does not end the others, and is said."""
        workers, nodes = self._options.workers_per_node, self._environ.get("SLURM_JOB_NUM_NODES", "1")
        command = ["srun", f"--nodes={nodes}", f"--ntasks-per-node={workers}", f"--ntasks={workers * int(nodes)}"]
        cpus = self._environ.get("SLURM_CPUS_PER_TASK")  # srun does not read it any more since 22.05
        command += [f"--cpus-per-task={cpus}"] if cpus else []
        # sbatch --export=NONE is meant for the job, not for what the job tells its workers
        return [*command, "--export=ALL", "--mpi=none", "--kill-on-bad-exit=0", "--wait=0", "--label"]

    def _with_keys(self, arguments: list[str], keys: Path | None) -> Command:
        others = {name: value for name, value in self._environ.items() if not name.startswith("GT_")}
        return Command(arguments, {**others, **SAFE_PATH, **launch_environment(keys, self._environ)})


class _Parts:
    """The processes of a job, which end with it."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: Command, stdout: int | None = None) -> subprocess.Popen[bytes]:
        arguments, variables = command.arguments, command.environment
        try:
            process = subprocess.Popen(arguments, env=variables, stdin=subprocess.DEVNULL, stdout=stdout)
        except OSError as error:
            raise SettingsError(f"{arguments[0]} cannot be started: {error}; is it installed on the nodes?") from None
        self._processes.append(process)
        return process

    def __enter__(self) -> _Parts:
        return self

    def __exit__(self, *_: object) -> None:
        end_processes(self._processes, _END_SECONDS)
        for process in self._processes:
            with process:  # closes its pipes
                pass


@contextlib.contextmanager
def _job_keys(place: Path, job: str) -> Iterator[Path]:
    """A new directory with the keys of a job, for this user alone. Raises SettingsError where it cannot be made."""
    directory = place / job
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_private(place, place.lstat())
        _remove_old_keys(place, job.rpartition("-")[0])
        shutil.rmtree(directory, ignore_errors=True)  # left by the same job, if it is requeued
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise SettingsError(
            f"the keys of the job cannot be in {directory}: {error}; give a directory of your own that all nodes see "
            f"with --directory"
        ) from None
    try:
        make_node_keys("job").write(directory)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _remove_old_keys(place: Path, cluster: str) -> None:
    """Remove the keys of jobs of this cluster that have ended without removing them, because they were killed."""
    found = [path for path in place.iterdir() if path.name.rpartition("-")[0] == cluster]
    try:
        running = _output(["squeue", "--noheader", "--format=%A", f"--user={os.getuid()}"]).split()
    except SettingsError:
        return  # nobody knows which jobs run
    for path in found:
        if path.name.rpartition("-")[2] not in running:
            shutil.rmtree(path, ignore_errors=True)


def _own_address(environ: Mapping[str, str]) -> str:
    """The address at which the other nodes of the job reach this one."""
    interface = read_settings(environ).interface
    names = _output(["scontrol", "show", "hostnames", environ.get("SLURM_JOB_NODELIST", "")]).split()
    others = [name for name in names if name != environ.get("SLURMD_NODENAME")]
    if not others and not interface:
        return LOOPBACK
    if not others:
        return interface_address(interface)
    fields = dict(word.partition("=")[::2] for word in _output(["scontrol", "-o", "show", "node", others[0]]).split())
    other = resolve(fields.get("NodeAddr", others[0]))
    address = reaching_address(interface, other)
    if is_loopback(address) and not is_loopback(other):
        raise SettingsError(
            f"this node has no address at which {others[0]} ({other}) reaches it; name an interface with GT_INTERFACE"
        )
    return address


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or ""
        raise SettingsError(f"`{' '.join(command)}` has failed: {error} {said.strip()}") from None


def _read_port(server: subprocess.Popen[bytes]) -> int:
    """The port of a server, which it prints when it listens."""
    assert server.stdout is not None
    select.select([server.stdout], [], [], _START_SECONDS)
    if server.poll() is None and not select.select([server.stdout], [], [], 0)[0]:
        raise SettingsError(f"the server does not listen after {_START_SECONDS:g} s; what it says is above")
    line = server.stdout.readline()
    if not line:
        raise SettingsError(f"the server has ended with exit code {server.wait()}, and says why above")
    return msgspec.json.decode(line, type=Announcement).port


def after_keys(command: Sequence[str], seconds: int = 30) -> list[str]:
    """A command that begins when its node sees the keys of the job: a shared file system may take a while."""
    return ["sh", "-c", read_template("await_keys.sh").format(seconds=seconds), *command]


def _watch(program: subprocess.Popen[bytes], server: subprocess.Popen[bytes], workers: subprocess.Popen[bytes]) -> int:
    """The exit code of the program. A server or workers that end before it are said, and it has to end soon after: in
    this job there will be no others."""
    deadline = float("inf")
    while (code := program.poll()) is None:
        lost = [name for name, part in (("the server", server), ("all workers", workers)) if part.poll() is not None]
        if lost and deadline == float("inf"):
            deadline = time.monotonic() + _LOSS_SECONDS
            _say(f"{' and '.join(lost)} ended before the program; it is ended in {_LOSS_SECONDS:g} s if it goes on")
        if time.monotonic() > deadline:
            end_processes([program], _END_SECONDS)
            return 1
        time.sleep(_POLL_SECONDS)
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _signals_raised() -> Iterator[None]:
    """Raise _Ended at the first signal to end; later ones are left out, while the parts of the job are ended."""

    def end(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise _Ended(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _forward_signals(program: subprocess.Popen[bytes]) -> None:
    for number in _FORWARDED:
        signal.signal(number, lambda received, frame: program.send_signal(received))


def _say(text: str) -> None:
    print(f"gt.launch.slurm: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
