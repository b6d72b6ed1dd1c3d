"""Starts and ends the session of a program: `gt.init`, `gt.connect`, `gt.gpu_workers`, `gt.shutdown`, first tensor."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gt.client import active_session
from gt.client.compilation import compiled_function
from gt.client.interrupts import defer, is_inside
from gt.client.issued_ops import SessionCaptures
from gt.client.optimizer_step_hooks import register_step_hooks
from gt.client.session import FORKED, Session
from gt.client.session_reads import read_workers
from gt.client.tensor import Tensor
from gt.client.torch_patches.torch_compile import patch_compile
from gt.client.transfers import copy_bytes
from gt.core.errors import SessionError
from gt.core.settings import Settings, parse_address, read_settings
from gt.core.tables import WorkerList, short_site
from gt.core.tracebacks import ends_on_users_line
from gt.debug.traces import Trace
from gt.launch.arguments import check_count, check_hosts, choose_settings
from gt.launch.hosted_dispatcher_channel import HostedDispatcherChannel
from gt.launch.in_process_channel import InProcessChannel
from gt.launch.local_processes import LocalProcesses
from gt.launch.program_captures import ProgramCaptures
from gt.launch.shapes_channel import ShapesChannel
from gt.monitor.monitor_socket import MonitorSocket
from gt.monitor.progress import open_display
from gt.signals.registry import registry
from gt.web_dashboard.start import start_dashboard
from gt.wire import shared_memory
from gt.wire.process_identity import host_name
from gt.wire.server_keys import keys_directory
from gt.wire.socket_channel import SocketChannel
from gt.wire.stderr_logging import configure_logging

if TYPE_CHECKING:
    from gt.web_dashboard.http_server import Dashboard

TRACE_LIMIT = 1 << 20  # messages in the trace of GT_TRACE, and commands of each worker
_ENDED = "GT was shut down, and its tensors with it; call gt.init() to start again"


class _LaunchState:
    """The worker processes of this program, and the number of workers that its first tensor starts. `start` leads to
    workers whose session was not needed yet; `closed_because` is why no session is opened before `gt.init`. `monitor`
    is the socket that tools attach to; `trace` is that of GT_TRACE. `channel` leads to the dispatcher, if this process
    runs it."""

    def __init__(self) -> None:
        self.workers_wanted = 0
        self.start: HostedDispatcherChannel | None = None
        self.processes: LocalProcesses | None = None
        self.closed_because = ""
        self.monitor: MonitorSocket | None = None
        self.trace: Trace | None = None
        self.channel: InProcessChannel | HostedDispatcherChannel | None = None
        self.dashboard: Dashboard | None = None

    def is_running(self) -> bool:
        return active_session.active is not None or self.start is not None


_state = _LaunchState()
_inherited: list[HostedDispatcherChannel] = []  # kept after a fork: to free them would touch the parent's sockets


@ends_on_users_line
def init(
    workers: int | None = None,
    *,
    mode: str | None = None,
    backend: str | None = None,
    server: str | None = None,
    min_workers: int | None = None,
    hosts: Sequence[str] = (),
    limits: str | None = None,
) -> None:
    """Start GT. Without arguments: as the environment says, or with one worker in this process.

    `workers=4` starts four worker processes, for which the first use of GT waits; `mode="virtual"` makes them inside
    this process; `mode="shapes"` plans for workers that do not exist, and computes nothing; `server="localhost:12345"`
    joins a running server, and waits until it has `min_workers` (default: GT_MIN_WORKERS, or 1). `hosts=` names the
    machine of each virtual worker, or of each one that does not exist: plans are then those for several machines.
    `limits="bytes=4GiB,tensors=10000"` are the most bytes that the program may hold on each of its own workers, and the
    most tensors; a server has its own limits.

    >>> gt.init(workers=4, mode="virtual", hosts=["a", "b", "a", "b"])
    >>> gt.randn(8, 2).spec.mesh.workers
    (0, 2, 1, 3)
    """
    with active_session.connecting:  # another thread may start GT too, or wait for its workers
        _require_no_session()
        if workers is None and server is None:
            workers = _state.workers_wanted or None
        settings = choose_settings(workers, mode, backend, server, min_workers, limits)
        _start(settings, check_hosts(hosts, settings))


def join(address: str, min_workers: int, keys: Path | None) -> None:
    """`gt.connect`, with the keys of a directory (None: as GT_KEYS says)."""
    with active_session.connecting:
        _require_no_session()
        settings = choose_settings(server=address, min_workers=min_workers)
        _start(settings if keys is None else msgspec.structs.replace(settings, keys=str(keys)))


def _require_no_session() -> None:
    if _state.is_running():
        raise SessionError("GT is running already; call gt.shutdown() first, or gt.init() before the first tensor")


def _start(settings: Settings, hosts: Sequence[str] = ()) -> None:
    configure_logging(settings)
    _state.closed_because = ""
    _prepare(settings)
    if settings.mode == "local":
        _state.start = HostedDispatcherChannel(settings)
    else:
        active_session.activate(_open(settings, hosts))


@ends_on_users_line
def connect(address: str, min_workers: int | None = None) -> None:
    """Join a running server, which may be on another machine: `gt.connect("server-name:12345", min_workers=4)`. Waits
    until the server has `min_workers` (default: GT_MIN_WORKERS, or 1), for at most GT_TIMEOUT seconds, and shows the
    reason.

    >>> gt.connect("localhost:12345")
    >>> gt.ones(3).sum().item()
    3.0
    """
    parse_address(address)  # an empty one would not be a server for gt.init()
    init(server=address, min_workers=min_workers)


@ends_on_users_line
def gpu_workers(count: int) -> None:
    """Set how many worker processes the first tensor starts, with a GPU or a share of the CPU's cores each.

    >>> gt.gpu_workers(2)
    >>> gt.randn(4, 4).spec.mesh.size
    2
    """
    if _state.is_running():
        raise SessionError("gt.gpu_workers() must come before the first tensor: GT is running already")
    _state.workers_wanted = check_count(count, "gt.gpu_workers")
    _state.closed_because = ""


def shutdown() -> None:
    """End the session, and the processes that were started for it. In a signal handler that interrupts GT itself, this
    happens when GT is done.

    >>> gt.init(workers=2, mode="virtual")
    >>> gt.shutdown()
    >>> gt.init()
    """
    if is_inside():
        defer(shutdown)
        return
    session = active_session.active
    _end_trace()
    active_session.activate(None)
    _state.closed_because = _ENDED
    dashboard, _state.dashboard = _state.dashboard, None
    if dashboard is not None:
        dashboard.close()
    _state.channel = None
    monitor, _state.monitor = _state.monitor, None
    if monitor is not None:
        monitor.close()
    _state.workers_wanted = 0
    registry.set_defaults("")
    start, _state.start = _state.start, None
    try:
        if session is not None:
            session.close(_ENDED)
        if start is not None:
            start.stop()
    finally:
        processes, _state.processes = _state.processes, None
        if processes is not None:
            processes.stop()


@ends_on_users_line
def synchronize() -> None:
    """Wait until all ops so far are done. Raises a failure that no read has raised yet.

    >>> y = gt.randn(100, 100) @ gt.randn(100, 100)
    >>> gt.synchronize()
    """
    active_session.current().synchronize()


@ends_on_users_line
def workers() -> WorkerList:
    """The workers that have joined: `worker` (the id), `host`, `pid`, `device`, `memory` (the bytes of the device),
    `held` (the bytes of tensors on it) and `state` of each: `ready`, `joining`, `busy` (with the same commands for more
    than a second), `stopped`, or `silent for 3 s`. The list prints as a table.

    >>> gt.init(workers=2, mode="virtual")
    >>> [(each.worker, each.device, each.state) for each in gt.workers()]
    [(0, 'cpu', 'ready'), (1, 'cpu', 'ready')]
    """
    listed = read_workers(active_session.current()).workers
    here = host_name()
    return WorkerList(each if each.host else msgspec.structs.replace(each, host=here) for each in listed)


@ends_on_users_line
def dashboard(port: int = 0) -> Dashboard:
    """Serve a web page that shows what this program does, at a port of this machine (0: any free one):
    `print(gt.dashboard().url)`. It ends with `gt.shutdown()`, or with `.close()`. A dashboard that is open is returned
    again.

    >>> dashboard = gt.dashboard()
    >>> dashboard.url.startswith("http://127.0.0.1:")
    True
    >>> dashboard.close()
    """
    session = active_session.current()
    settings = read_settings()
    if not session.computes:
        raise SessionError("a dashboard shows workers, and mode='shapes' has none; use mode='virtual'")
    if _state.channel is None:
        raise SessionError(
            "the workers of this program are those of a server, which other programs use too: start the server with "
            "`python -m gt.server --dashboard 8787`, and open the address that it prints"
        )
    shown = _state.dashboard
    if shown is not None and shown.is_open:
        if port in (0, shown.port):
            return shown
        raise SessionError(f"a dashboard is open at port {shown.port} already; call its close() to open one at {port}")
    view, token = _state.channel.view, settings.dashboard_token
    _state.dashboard = start_dashboard(view, port, token, session.note_quiet_threads)
    return _state.dashboard


def _connect_lazily() -> Session:
    if _state.closed_because:
        raise SessionError(_state.closed_because)
    if _state.start is not None:
        return _finish_start(_state.start)
    settings = choose_settings(_state.workers_wanted or None)
    configure_logging(settings)
    _prepare(settings)
    return _open(settings)


def _finish_start(start: HostedDispatcherChannel) -> Session:
    """Wait for workers that are starting. After a failure GT stays closed: an op that is tried again after `except`
    must not run on another worker."""
    _state.start, _state.processes = None, start.processes
    try:
        return _observed(start.open(), start, start.settings)
    except BaseException as error:
        _state.processes = None
        reason = str(error) or type(error).__name__  # KeyboardInterrupt has no text
        _state.closed_because = f"GT could not start: {reason}; call gt.init() to try again"
        raise


def _prepare(settings: Settings) -> None:
    registry.current()  # raises for an invalid GT_CONFIG now, even if no scope is ever entered
    if settings.mode in ("local", "connected"):
        shared_memory.sweep_dead()


def _open(settings: Settings, hosts: Sequence[str] = ()) -> Session:
    if settings.mode == "local":
        return _finish_start(HostedDispatcherChannel(settings))
    if settings.mode == "connected":
        return _open_connected(settings)
    if settings.mode == "shapes":
        shapes = ShapesChannel(settings.workers or 1, settings, hosts)
        session = Session(shapes, shapes.welcome(), settings.auto_shard, settings.hot_path, computes=False)
        return _observed(session, shapes, settings)
    channel = InProcessChannel(settings.workers or 1, settings.backend, settings, hosts)
    display = open_display(settings.progress)
    session = Session(channel, channel.welcome(), settings.auto_shard, settings.hot_path, display)
    for executor in channel.executors:
        executor.name_site = lambda site: short_site(session.sites.text(site)) if site else ""
    return _observed(session, channel, settings)


def _observed(
    session: Session, channel: InProcessChannel | ShapesChannel | HostedDispatcherChannel | None, settings: Settings
) -> Session:
    """Let tools look at a session, from outside if this process runs the dispatcher, behind `channel`. Begins the trace
    of GT_TRACE."""
    if channel is None:
        session.captures = SessionCaptures(session)
    else:
        session.captures = ProgramCaptures(session, channel.with_dispatcher)
        _state.channel = None if isinstance(channel, ShapesChannel) else channel
        _state.monitor = MonitorSocket(session.captures, channel.read_status, note_threads=session.note_quiet_threads)
    if settings.trace:
        _state.trace = Trace(settings.trace, TRACE_LIMIT)
        _state.trace.begin(session)
    return session


def _end_trace() -> None:
    trace, _state.trace = _state.trace, None
    if trace is None:
        return
    try:
        trace.end()
    except Exception as error:  # the program has ended well: its trace must not change that
        print(f"gt: the trace of GT_TRACE is lost: {error}", file=sys.stderr)


def _open_connected(settings: Settings) -> Session:
    """A session with a running server."""
    host, port = parse_address(settings.server)
    channel = SocketChannel(
        f"tcp://{host}:{port}",
        copy_bytes if settings.shares_memory else None,
        None if settings.insecure else keys_directory(settings.keys),
        settings.heartbeat_timeout,
    )
    display = open_display(settings.progress)
    try:
        welcome = channel.greet(settings.min_workers, settings.timeout, display)
        if welcome.signals:
            registry.set_defaults(welcome.signals, welcome.signals_file)
    except BaseException:
        channel.close()
        raise
    if settings.instruction_log:
        print(f"gt: {_log_notice(settings, welcome.instruction_log)}", file=sys.stderr)
    session = Session(channel, welcome, settings.auto_shard, settings.hot_path, display)
    session.note_quiet_threads(1)  # the one that looks after the connection
    return _observed(session, None, settings)


def _log_notice(settings: Settings, path: str) -> str:
    """Tells a program with GT_INSTRUCTION_LOG that the server it joins writes the log, to `path` or not at all."""
    name = f"GT_INSTRUCTION_LOG={settings.instruction_log} is not written by this program, which joins a server:"
    if path:
        return f"{name} the server at {settings.server} logs the instructions of all its clients to {path}"
    return f"{name} set it where the server at {settings.server} is started, to log the instructions of all its clients"


def _leave_to_parent() -> None:
    """After a fork: leave the parent's worker processes, its monitor socket, its dashboard and its trace alone."""
    _state.processes = None
    _state.channel = None
    dashboard, _state.dashboard = _state.dashboard, None
    if dashboard is not None:
        dashboard.leave_to_parent()
    _state.trace = None
    monitor, _state.monitor = _state.monitor, None
    if monitor is not None:
        monitor.close()
    if _state.start is not None:
        _inherited.append(_state.start)
        _state.start = None
        _state.closed_because = FORKED


active_session.set_connector(_connect_lazily)
register_step_hooks()
patch_compile(compiled_function.compile, Tensor)
weakref.finalize(shutdown, shutdown)  # after the functions of atexit, which may read tensors
os.register_at_fork(after_in_child=_leave_to_parent)
