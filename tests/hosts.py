"""Hosts that tests make themselves: each has its own address, hostname, processes and `/dev/shm`.

A test host is a set of namespaces of the kernel. All hosts of a test are ports of one bridge, in a network namespace of
the test's own, so that no packet leaves it. Everything is gone when the test ends, and also if its process is killed.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.forked_programs import CAN_FORK, ForkedProgram
from tests.subprocesses import ROOT, finish, program_server, wait_until

NETWORK = "10.99.0"
_TOOLS = ("unshare", "nsenter", "ip")
_SWITCH = 'ip link set lo up && ip link add bridge type bridge && ip link set bridge up && echo "ready" && exec cat'
# Processes of a host see its own pids, names and shared memory only. The first one ends when its input is closed, and
# the kernel then ends all others.
_HOST = """
mount -t tmpfs -o mode=1777 tmpfs /dev/shm && mount --bind "$2/hosts" /etc/hosts &&
mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf && hostname "$1" && ip link set lo up && echo ready && exec cat
"""


class HostProgram:
    """A program on a test host, with the interface of `subprocess.Popen`. `pid` is the one that the test sees."""

    def __init__(self, program: ForkedProgram) -> None:
        self._program = program
        self.args = program.args
        self.stdout, self.stderr = program.stdout, program.stderr
        self.pid = 0
        self.poll, self.wait, self.communicate = program.poll, program.wait, program.communicate
        wait_until(self._has_begun, what=f"the start of {program.args}")

    def _has_begun(self) -> bool:
        assert self._program.poll() is None, self._program.communicate()[1]
        children = psutil.Process(self._program.pid).children()
        self.pid = children[0].pid if children else 0
        return self.pid != 0

    @property
    def returncode(self) -> int | None:
        return self._program.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(15)

    def kill(self) -> None:
        self.send_signal(9)


class Host:
    """A test host. `pid` is its first process."""

    def __init__(self, name: str, address: str, pid: int, switch: int) -> None:
        self.name = name
        self.address = address
        self.pid = pid
        self._switch = switch

    def start(self, *arguments: str, **environment: str) -> HostProgram:
        """A program on this host, `-c code` or `-m module`, with torch imported already."""
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        return HostProgram(program_server().start(arguments, variables, self.pid))

    def run(self, code: str, *arguments: str, timeout: float = 60, **environment: str) -> str:
        """The output of a Python program, which must succeed."""
        exit_code, out, err = finish(self.start("-c", code, *arguments, **environment), timeout)
        assert exit_code == 0, err
        return out

    def cut_off(self) -> None:
        """Pull the cable."""
        _in_network(self._switch, "ip", "link", "set", f"to-{self.name}", "down")

    def limit_rate(self, rate: str) -> None:
        """Let the host send no faster than `rate`, such as "100mbit"; skips the test where that is not permitted."""
        if shutil.which("tc") is None:
            pytest.skip("there is no `tc`, which makes slow links (package iproute2)")
        try:
            _in_network(self.pid, *f"tc qdisc replace dev eth0 root tbf rate {rate} burst 64kb latency 400ms".split())
        except RuntimeError as error:
            pytest.skip(f"slow links cannot be made: {error}")

    def reconnect(self) -> None:
        _in_network(self._switch, "ip", "link", "set", f"to-{self.name}", "up")

    @contextmanager
    def weak_link(self, delay: float = 0.0, loss: float = 0.0, rate: float = 1e12) -> Iterator[None]:
        """Frames from and to this host are late by `delay` seconds, a share `loss` of them is lost, and `rate` bytes a
        second pass in each direction."""
        port, bridged, weak = f"to-{self.name}", f"br-{self.name}", f"we-{self.name}"
        _in_network(self._switch, *f"ip link add {bridged} type veth peer name {weak}".split())
        for device in (bridged, weak):
            _in_network(self._switch, *f"ip link set {device} up".split())
        program = [sys.executable, "-m", "tests.weak_links", port, weak, str(delay), str(loss), str(rate)]
        try:
            with _kept([*_entering(self._switch), *program]):
                _in_network(self._switch, *f"ip link set {port} nomaster".split())
                _in_network(self._switch, *f"ip link set {bridged} master bridge".split())
                yield
        finally:
            _in_network(self._switch, *f"ip link del {bridged}".split())
            _in_network(self._switch, *f"ip link set {port} master bridge".split())


def require_hosts() -> None:
    """Skip a test where hosts cannot be made."""
    if problem := _problem():
        pytest.skip(problem)


@functools.cache
def _problem() -> str:
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"there is no `{missing[0]}`, which makes test hosts (packages iproute2 and util-linux)"
    if not CAN_FORK:
        return "programs on test hosts are forked, which this system cannot do"
    try:
        with hosts("one"):
            return ""
    except (RuntimeError, AssertionError, OSError) as error:
        return f"test hosts cannot be made: {error}"


@contextmanager
def hosts(*names: str) -> Iterator[list[Host]]:
    """Hosts that reach each other at 10.99.0.1, 10.99.0.2, ... and by their names."""
    with ExitStack() as stack:
        files = stack.enter_context(_system_files(names))
        switch = stack.enter_context(_kept(["unshare", "--user", "--map-root-user", "--net", "sh", "-c", _SWITCH]))
        made = [stack.enter_context(_host(name, number, switch, files)) for number, name in enumerate(names, start=1)]
        yield made


@contextmanager
def _system_files(names: Sequence[str]) -> Iterator[Path]:
    """Files of `/etc` in place of the machine's: names are looked up in no other place."""
    directory = Path(tempfile.mkdtemp(prefix="gt-hosts-"))
    lines = [f"{NETWORK}.{number} {name}" for number, name in enumerate(names, start=1)]
    (directory / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    (directory / "nsswitch.conf").write_text("hosts: files\npasswd: files\ngroup: files\n")
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@contextmanager
def _host(name: str, number: int, switch: int, files: Path) -> Iterator[Host]:
    namespaces = ["--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
    with _kept([*_entering(switch), "unshare", *namespaces, "sh", "-c", _HOST, "sh", name, str(files)]) as outer:
        (first,) = psutil.Process(outer).children()
        port, address = f"to-{name}", f"{NETWORK}.{number}"
        _in_network(switch, *f"ip link add {port} type veth peer name eth0 netns {first.pid}".split())
        _in_network(switch, *f"ip link set {port} master bridge up".split())
        _in_network(first.pid, *f"ip addr add {address}/24 dev eth0".split())
        _in_network(first.pid, "ip", "link", "set", "eth0", "up")
        yield Host(name, address, first.pid, switch)


@contextmanager
def _kept(command: Sequence[str]) -> Iterator[int]:
    """The pid of a process that prints `ready`, and then lives as long as its input is open."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdin and process.stdout and process.stderr
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(process.stderr.read().strip())
        yield process.pid
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        process.stderr.close()


def _entering(pid: int) -> list[str]:
    """The command that runs another one in the network of a process."""
    return ["nsenter", f"--target={pid}", "--user", "--net", "--preserve-credentials"]


def _in_network(pid: int, *command: str) -> None:
    done = subprocess.run([*_entering(pid), *command], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
