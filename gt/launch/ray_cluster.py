"""`gt.launch.ray`: workers as actors of a Ray cluster, in a placement group over its nodes."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gt.core.environment import load_extra
from gt.core.errors import ServerLost, SettingsError, WorkerLost, nearest
from gt.core.settings import BACKENDS, Settings, read_settings
from gt.core.tracebacks import ends_on_users_line
from gt.launch.clusters import Cluster, ServerPlace, find_server, require_no_session, start_server
from gt.launch.launched_process import GRACE_SECONDS, ProcessStatus
from gt.launch.node_keys import NodeKeys, make_node_keys, write_node_keys
from gt.launch.ray_actors import ServerActor, WorkerActor, find_place
from gt.launch.worker_commands import launch_environment, server_command, worker_command
from gt.monitor.progress import open_display
from gt.wire.long_waits import LongWait

log = logging.getLogger("gt.launch")
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
ON_RAY = "ray"
_STATUS_SECONDS = 5.0  # time for the answer of an actor
_POLL_SECONDS = 0.5
_MAX_NODES_NAMED = 8


@ends_on_users_line
def ray(
    workers: int,
    *,
    gpus_per_worker: float = 0,
    cpus_per_worker: float = 1,
    server: str | None = None,
    backend: str | None = None,
    strategy: str = "PACK",
    max_restarts: int = 3,
    connect: bool = True,
) -> Cluster:
    """Start workers on the nodes of a Ray cluster, and join them: `gt.launch.ray(workers=16, gpus_per_worker=1)`. Each
    worker is an actor in a placement group, and Ray starts it again if it ends. Needs `pip install 'gt-tensor[ray]'`.

    - `gpus_per_worker`, `cpus_per_worker`: what Ray reserves for each worker, which uses one GPU or a part of one
    - `server`: without it, a server is started beside this program; "ray" makes it an actor too, started again by Ray;
      "server-name:12345" is one that runs already
    - `backend`: the engine of the workers, "pytorch" or "numpy"
    - `strategy`: that of the placement group; "PACK" uses few nodes
    - `max_restarts`: how often Ray starts an actor again; -1: always
    - `connect`: whether this program joins the workers, as `gt.connect` does

    Returns a `gt.launch.Cluster`, whose `stop()`, or the end of a `with` block, ends all of this. Waits for workers to
    be placed and to join, for at most GT_TIMEOUT seconds each.

    >>> with gt.launch.ray(workers=2) as cluster:
    ...     print(len(gt.workers()))
    2
    """
    module = load_extra("ray", "ray", "gt.launch.ray()")
    settings = read_settings()
    request = _Request(workers, gpus_per_worker, cpus_per_worker, backend or settings.backend, strategy, max_restarts)
    request.check()
    if connect:
        require_no_session("gt.launch.ray()")
    if not module.is_initialized():
        module.init()
    _require_near_program(module, server)
    group = RayWorkers(module, request)
    try:
        group.place(settings, has_server=server == ON_RAY)
        place = _open_server(module, group, server, settings)
        cluster = Cluster(place, group)
    except BaseException:
        group.stop()
        raise
    try:
        group.start(place)
        cluster.wait_for_workers(settings.timeout)
        if connect:
            cluster.connect(workers)
    except BaseException:
        cluster.stop()
        raise
    return cluster


class _Request(msgspec.Struct, frozen=True):
    """What a user asks of Ray."""

    workers: int
    gpus: float
    cpus: float
    backend: str
    strategy: str
    max_restarts: int

    def check(self) -> None:
        if not isinstance(self.workers, int) or isinstance(self.workers, bool) or self.workers < 1:
            raise SettingsError(f"gt.launch.ray(workers={self.workers!r}) takes a whole number of at least 1")
        if not 0 <= self.gpus <= 1:
            raise SettingsError(
                f"gt.launch.ray(gpus_per_worker={self.gpus!r}): a worker uses one GPU or a part of one; start a worker "
                f"for each GPU"
            )
        if not self.cpus >= 0 or not self.cpus + self.gpus:
            raise SettingsError(f"gt.launch.ray(cpus_per_worker={self.cpus!r}): give workers a CPU or a GPU")
        for name, value, known in (
            ("strategy", self.strategy, STRATEGIES),
            ("backend", self.backend, BACKENDS),
        ):
            if value not in known:
                raise SettingsError(f"gt.launch.ray({name}={value!r}) is not possible; {nearest(str(value), known)}")

    @property
    def bundle(self) -> dict[str, float]:
        asked = {"CPU": float(self.cpus), "GPU": float(self.gpus)}
        return {name: amount for name, amount in asked.items() if amount}

    def describe(self) -> str:
        each = " and ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())
        return f"{self.workers} workers with {each} each ({self.strategy})"


class RayWorkers:
    """The actors of a cluster's workers, and of its server if that is one, in their own placement group."""

    system = "Ray"

    def __init__(self, module: Any, request: _Request) -> None:
        self._ray = module
        self._request = request
        self._group: Any = None
        self._actors: list[Any] = []
        self._server: Any = None
        self._has_server = False

    def place(self, settings: Settings, *, has_server: bool) -> None:
        """Reserve the resources. Raises SettingsError with what there is, if Ray does not find them in time."""
        self._has_server = has_server
        bundles = [{"CPU": 1.0}] * has_server + [self._request.bundle] * self._request.workers
        self._group = self._ray.util.placement_group(bundles, strategy=self._request.strategy)
        deadline = time.monotonic() + settings.timeout
        self._warn_if_short(bundles, settings.timeout)
        with LongWait(open_display(settings.progress)) as wait:
            while not self._group.wait(_POLL_SECONDS):
                if time.monotonic() > deadline:
                    raise SettingsError(
                        f"Ray has not placed {self._request.describe()} within {settings.timeout:g} s: "
                        f"{self._describe_nodes()}; ask for fewer workers or less for each, add nodes, or set "
                        f"GT_TIMEOUT if Ray is to add nodes itself"
                    )
                wait.tell(lambda: f"Ray places {self._request.describe()}: {self._describe_nodes()}")

    def _warn_if_short(self, bundles: Sequence[Mapping[str, float]], seconds: float) -> None:
        """Say at once if all nodes together have less than is asked for. Ray may be about to add nodes."""
        total = self._ray.cluster_resources()
        asked = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in ("CPU", "GPU")}
        if any(amount > total.get(name, 0) for name, amount in asked.items()):
            told = f"{self._request.describe()} need {_amounts(asked)}, and {self._describe_nodes()}"
            log.warning("%s; waiting for at most %g s for Ray to add nodes", told, seconds)

    def _describe_nodes(self) -> str:
        """The resources of the nodes, and what is free of all of them."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        shown = [f"{node['NodeManagerHostname']}: {_amounts(node['Resources'])}" for node in nodes[:_MAX_NODES_NAMED]]
        more = f", and {len(nodes) - _MAX_NODES_NAMED} more" if len(nodes) > _MAX_NODES_NAMED else ""
        free = _amounts(self._ray.available_resources())
        return f"the cluster has {len(nodes)} nodes ({'; '.join(shown)}{more}), of which {free} are free"

    def start_server(self, settings: Settings) -> ServerPlace:
        """A server as an actor. Its keys and its port are chosen here, so that they stay when Ray starts it again."""
        keys = NodeKeys() if settings.insecure else make_node_keys()
        where = self._options(0, {"CPU": 1.0})
        task = {name: value for name, value in where.items() if name != "max_restarts"}
        host, port = self._ray.get(self._ray.remote(find_place).options(**task).remote(), timeout=settings.timeout)
        command = server_command(host, port, insecure=settings.insecure, is_json=True)
        make = self._ray.remote(ServerActor).options(**where).remote
        self._server = make(command, keys.to_text(), launch_environment(), host, port)
        deadline = time.monotonic() + settings.timeout
        while (status := self._read_status(self._server, "the server")) is None or status.announced is None:
            if status is not None and status.exit_code is not None:
                raise ServerLost(f"the server at {host}:{port} cannot start: it {status.describe()}")
            if time.monotonic() > deadline:
                raise ServerLost(f"the server at {host}:{port} has not started within {settings.timeout:g} s")
            time.sleep(_POLL_SECONDS)
        return ServerPlace(host, port, keys.for_workers(), None if settings.insecure else _write_keys(keys))

    def start(self, place: ServerPlace) -> None:
        """Start the actors of all workers, which join a server."""
        request = self._request
        command = worker_command(
            place.host,
            place.port,
            device="" if request.gpus or request.backend != "pytorch" else "cpu",
            backend=request.backend,
            threads=max(1, int(request.cpus)),
            is_json=True,
        )
        keys, environment = place.keys.for_workers().to_text(), launch_environment()
        make = self._ray.remote(WorkerActor)
        for number in range(request.workers):
            options = self._options(number + self._has_server, request.bundle)
            self._actors.append(make.options(**options).remote(command, keys, environment))

    def _options(self, bundle: int, resources: Mapping[str, float]) -> dict[str, Any]:
        strategies = load_extra("ray.util.scheduling_strategies", "ray", "gt.launch.ray()")
        return {
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            "max_restarts": self._request.max_restarts,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(self._group, bundle),
        }

    def count(self) -> int:
        return self._request.workers

    def read_statuses(self) -> dict[str, ProcessStatus]:
        names = [f"actor {number} of Ray" for number in range(len(self._actors))]
        found = {name: self._read_status(actor, name) for name, actor in zip(names, self._actors, strict=True)}
        return {name: status for name, status in found.items() if status is not None}

    def _read_status(self, actor: Any, name: str) -> ProcessStatus | None:
        """The status of an actor's process; None if it does not answer now. Raises WorkerLost if it never will."""
        errors = self._ray.exceptions
        try:
            text = self._ray.get(actor.read_status.remote(), timeout=_STATUS_SECONDS)
        except (errors.GetTimeoutError, errors.ActorUnavailableError):
            return None
        except errors.RayError as error:
            raise WorkerLost(f"{name} cannot run: {error}") from None
        return msgspec.json.decode(text, type=ProcessStatus)

    def stop(self) -> None:
        """End workers first, then the server, then give back the resources."""
        if self._ray.is_initialized():
            self._stop_actors(self._actors)
            self._stop_actors([self._server] if self._server is not None else [])
            if self._group is not None:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._ray.util.remove_placement_group(self._group)
        self._actors, self._server, self._group = [], None, None

    def _stop_actors(self, actors: Sequence[Any]) -> None:
        errors = self._ray.exceptions
        stops = [actor.stop.remote() for actor in actors]
        if stops:
            self._ray.wait(stops, num_returns=len(stops), timeout=GRACE_SECONDS + _STATUS_SECONDS)
        for actor in actors:
            with contextlib.suppress(errors.RayError, ValueError):
                self._ray.kill(actor, no_restart=True)


def _open_server(module: Any, group: RayWorkers, server: str | None, settings: Settings) -> ServerPlace:
    if server is None:
        return start_server(module.util.get_node_ip_address(), settings)
    return group.start_server(settings) if server == ON_RAY else find_server(server, settings)


def _require_near_program(module: Any, server: str | None) -> None:
    """Raise SettingsError if this program is not on a node, where the workers would reach a server beside it."""
    client = getattr(module.util, "client", None)
    if server is None and client is not None and client.ray.is_connected():
        raise SettingsError(
            "this program reaches Ray by a proxy (ray://), so workers may not reach a server beside it; run it with "
            "`ray job submit`, or give server='server-name:12345' or server='ray'"
        )


def _write_keys(keys: NodeKeys) -> Path:
    """A private directory with the keys of this program for a server of another node."""
    directory = Path(tempfile.mkdtemp(prefix="gt-"))
    write_node_keys(directory, keys.for_workers().to_text())
    return directory


def _amounts(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPU and {resources.get('GPU', 0):g} GPU"
