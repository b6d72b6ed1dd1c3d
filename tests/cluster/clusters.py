"""A server with keys on one test host, and workers and programs on others, started as users start them."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gt import keys
from gt.wire.server_keys import CLIENT_FILE
from tests.hosts import Host, HostProgram, hosts, require_hosts
from tests.subprocesses import finish, running

PORT = 12345
SECONDS = 60


class Cluster:
    """Hosts, each with a directory of keys of its own, and a server on the first of them."""

    def __init__(self, made: list[Host], directory: Path) -> None:
        self.hosts = made
        self.server_host = made[0]
        self._directory = directory
        self.programs: list[HostProgram] = []
        self.make_keys()

    def keys_of(self, host: Host) -> Path:
        return self._directory / host.name

    def make_keys(self) -> None:
        """The three commands of docs/cluster.md, with a copy in place of scp."""
        self.run_keys(self.server_host, "server")
        key = self._directory / "team.key"
        self.run_keys(self.server_host, "client", "team", "--out", str(key))
        for host in self.hosts[1:]:
            self.install(host, key)

    def run_keys(self, host: Host, *arguments: str) -> None:
        before = os.environ["GT_KEYS"]
        os.environ["GT_KEYS"] = str(self.keys_of(host))
        try:
            assert keys.main(arguments) == 0
        finally:
            os.environ["GT_KEYS"] = before

    def install(self, host: Host, key: Path) -> None:
        self.keys_of(host).mkdir(mode=0o700, exist_ok=True)
        shutil.copy(key, self.keys_of(host) / CLIENT_FILE)

    def start(self, host: Host, *arguments: str, **environment: str) -> HostProgram:
        program = host.start(*arguments, **{"GT_KEYS": str(self.keys_of(host)), **environment})
        self.programs.append(program)
        return program

    def start_server(self, *options: str, **environment: str) -> HostProgram:
        """A server that listens when this returns."""
        arguments = ("-m", "gt.server", "--host", "0.0.0.0", "-p", str(PORT), "--json", *options)
        server = self.start(self.server_host, *arguments, **environment)
        line = server.stdout.readline()
        assert line, server.communicate()[1]
        assert json.loads(line)["port"] == PORT
        return server

    def start_worker(self, host: Host, *options: str, server: str = "", **environment: str) -> HostProgram:
        name = server or self.server_host.name
        arguments = ("-m", "gt.worker", "--host", name, "-p", str(PORT), "--threads", "1", "--json", *options)
        return self.start(host, *arguments, **environment)

    def start_workers(self, *on: Host, **environment: str) -> list[HostProgram]:
        """Workers that have joined when this returns. They join in this order, so that the first one has id 0."""
        started = []
        for host in on:
            worker = self.start_worker(host, **environment)
            wait_for_join(worker)
            started.append(worker)
        return started

    def run(self, host: Host, code: str, *arguments: str, timeout: float = SECONDS, **environment: str) -> str:
        """The output of a program that joins the server."""
        variables = {"GT_SERVER": f"{self.server_host.name}:{PORT}", "GT_TIMEOUT": "30", **environment}
        exit_code, out, err = finish(self.start(host, "-c", code, *arguments, **variables), timeout)
        assert exit_code == 0, err
        return out


def wait_for_join(worker: HostProgram) -> int:
    """The id of a worker that has just been started."""
    line = worker.stdout.readline()
    assert line, worker.communicate()[1]
    return int(json.loads(line)["worker"])


def read_until(program: HostProgram, pattern: str) -> str:
    """The first line on stderr that matches."""
    said = []
    while line := program.stderr.readline():
        said.append(line)
        if re.search(pattern, line):
            return line
    raise AssertionError(f"{pattern!r} was not said in:\n{''.join(said)}")


@contextmanager
def cluster(directory: Path, *names: str) -> Iterator[Cluster]:
    """Hosts without programs; those that run when the test ends are ended."""
    require_hosts()
    with hosts(*names) as made:
        found = Cluster(made, directory)
        try:
            yield found
        finally:
            with running(*found.programs):
                pass
