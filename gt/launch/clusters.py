"""`Cluster`: workers that a launcher has started on the machines of another system, and the server that they join."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol

from gt.client import active_session
from gt.client.session import Session
from gt.core.errors import ServerLost, SessionError, WorkerLost
from gt.core.settings import Settings, parse_address, read_settings
from gt.core.tracebacks import ends_on_users_line
from gt.launch import sessions
from gt.launch.commands import Command, Launcher, ServerPlace, launch_environment, server_command, worker_command
from gt.launch.launched_process import LaunchedProcess, ProcessStatus
from gt.launch.node_keys import NodeKeys, make_node_keys, read_own_keys
from gt.monitor.progress import open_display
from gt.wire.addresses import resolve
from gt.wire.long_waits import LongWait
from gt.wire.server_keys import keys_directory

_POLL_SECONDS = 0.1
_STOPPED = "the workers were told to end by their cluster's stop()"


class ClusterLauncher(Launcher, Protocol):
    """Starts the workers of a cluster on the machines of another system, which reports on them."""

    system: str

    def open_server(self, server: str | None, settings: Settings) -> ServerPlace:
        """Have room for the workers, and the server that they are to join: a new one, or the one that a user names."""

    def start(self, commands: Sequence[Command]) -> None:
        """Have the commands of workers run."""

    def count(self) -> int:
        """How many workers there are to be."""

    def read_statuses(self) -> Mapping[str, ProcessStatus]:
        """The statuses of those that answer, by a name for people. Raises WorkerLost for one that cannot start."""

    def stop(self) -> None:
        """End all workers, and what was made for them; nothing if there are none."""


def launch(launcher: ClusterLauncher, server: str | None, settings: Settings, *, connects: bool) -> Cluster:
    """Start the workers of a launcher, wait until they have joined their server, and join it with them."""
    if connects and active_session.active is not None:
        raise SessionError(
            f"GT is running already; call gt.shutdown() before gt.launch.{launcher.system.lower()}(), or give "
            f"connect=False to start workers only"
        )
    with contextlib.ExitStack() as undo:
        undo.callback(launcher.stop)
        place = launcher.open_server(server, settings)
        cluster = Cluster(place, launcher)
        undo.callback(cluster.stop)
        launcher.start(launcher.commands(place))
        cluster.wait_for_workers(settings.timeout)
        if connects:
            cluster.connect(launcher.count())
        undo.pop_all()
    return cluster


class Cluster:
    """Workers on the machines of a Ray or Dask cluster, and the server that they have joined.

    `address` is the server's, and `keys` the directory of the keys for it, to be named by GT_KEYS in other programs of
    this machine. `stop()`, or the end of a `with` block, ends the session with this server and all workers.

    >>> with gt.launch.ray(workers=2) as cluster:
    ...     print(gt.ones(3).sum().item())
    3.0
    """

    def __init__(self, place: ServerPlace, workers: ClusterLauncher) -> None:
        self.address = place.address
        self.keys = place.directory
        self._place = place
        self._workers = workers
        self._session: Session | None = None
        self._is_stopped = False
        self._stopping = threading.Lock()
        _running[id(self)] = self

    @ends_on_users_line
    def connect(self, min_workers: int = 1) -> None:
        """Join the server from this program, once it has `min_workers`."""
        if self._is_stopped:
            raise SessionError(f"{self.address} cannot be joined: {_STOPPED}; launch the workers again")
        sessions.join(self.address, min_workers, self.keys)
        self._session = active_session.active

    def wait_for_workers(self, seconds: float) -> None:
        """Wait until all workers have joined the server. Raises WorkerLost for one that ends before, and ServerLost if
        the time is over."""
        deadline = time.monotonic() + seconds
        with LongWait(open_display(read_settings().progress)) as wait:
            while (joined := self._count_joined()) < (wanted := self._workers.count()):
                told = f"{joined} of {wanted} workers that {self._workers.system} has started have joined the server"
                if time.monotonic() > deadline:
                    raise ServerLost(
                        f"after {seconds:g} s of waiting: {told} at {self.address}; do their machines reach it, and is "
                        f"GT installed there? GT_TIMEOUT sets the limit"
                    )
                wait.tell(lambda told=told: told)  # type: ignore[misc]
                time.sleep(_POLL_SECONDS)

    def _count_joined(self) -> int:
        if self._place.process is not None and (server := self._place.process.read_status()).exit_code is not None:
            raise ServerLost(f"the server at {self.address} (pid {server.pid}) {server.describe()}")
        statuses = self._workers.read_statuses()
        for name, status in statuses.items():
            if status.announced is None and status.exit_code is not None:
                raise WorkerLost(f"the worker of {name} (pid {status.pid}) has not joined: it {status.describe()}")
        return sum(status.announced is not None for status in statuses.values())

    def stop(self) -> None:
        """End the session of this program with the server, the workers, and the server if it was started for them."""
        with self._stopping:
            if self._is_stopped:
                return
            self._is_stopped = True
        _running.pop(id(self), None)
        if self._session is not None and active_session.active is self._session:
            sessions.shutdown()
        self._session = None
        try:
            self._workers.stop()
        finally:
            if self._place.process is not None:
                self._place.process.stop()
            if self.keys is not None:
                shutil.rmtree(self.keys, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


_running: dict[int, Cluster] = {}  # kept, because a program may not keep what a launcher returns


def _stop_all() -> None:
    for cluster in list(_running.values()):
        with contextlib.suppress(Exception):  # the system that runs the workers may have ended
            cluster.stop()


weakref.finalize(_stop_all, _stop_all)  # after the functions of atexit, which may read tensors
os.register_at_fork(after_in_child=_running.clear)  # they are the parent's


def find_server(server: str, settings: Settings) -> ServerPlace:
    """A running server at `host:port`, and this user's keys for it."""
    host, port = parse_address(server)
    if settings.insecure:
        return ServerPlace(host, port, NodeKeys())
    return ServerPlace(host, port, read_own_keys(keys_directory(settings.keys), f"tcp://{resolve(host)}:{port}"))


def start_server(host: str, settings: Settings) -> ServerPlace:
    """A server beside this program, at an address of this machine that workers reach. It has its own keys, and ends
    with this program."""
    command = new_server(host, 0, settings)
    process = LaunchedProcess(command)
    try:
        status = process.wait_for_announcement(settings.timeout)
        if status.announced is None:
            how = status.describe() if status.exit_code is not None else f"said nothing for {settings.timeout:g} s"
            raise ServerLost(f"the server at {host} (pid {status.pid}) cannot start: it {how}")
    except BaseException:
        process.stop()
        raise
    directory = None if settings.insecure else process.keys
    return ServerPlace(host, status.announced.port, command.keys.for_workers(), directory, process)


def new_server(host: str, port: int, settings: Settings) -> Command:
    """A server with keys of its own, which outlast a restart."""
    arguments = server_command(host, port, insecure=settings.insecure, is_json=True)
    return Command(arguments, launch_environment(), NodeKeys() if settings.insecure else make_node_keys())


def new_worker(place: ServerPlace, *, device: str, backend: str, threads: int = 0) -> Command:
    """A worker that joins the server at a place."""
    arguments = worker_command(place.host, place.port, device=device, backend=backend, threads=threads, is_json=True)
    return Command(arguments, launch_environment(), place.keys.for_workers())
