"""`gt.launch.ray`: workers as actors of a Ray cluster, in a placement group over its nodes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gt.core.environment import load_extra
from gt.core.errors import ServerLost, SettingsError, WorkerLost
from gt.core.settings import BACKENDS, Settings, read_settings
from gt.core.tracebacks import ends_on_users_line
from gt.launch.arguments import check_choice, check_count
from gt.launch.clusters import Cluster, find_server, launch, new_server, new_worker, start_server
from gt.launch.commands import Command, ServerPlace
from gt.launch.launched_process import GRACE_SECONDS, ProcessStatus, decode_status, make_directory
from gt.launch.ray_actors import ServerActor, WorkerActor, find_place
from gt.monitor.progress import open_display
from gt.wire.long_waits import LongWait

log = logging.getLogger("gt.launch")
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
ON_RAY = "ray"
_CALL = "gt.launch.ray()"
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
    module = load_extra("ray", "ray", _CALL)
    settings = read_settings()
    backend = check_choice(backend or settings.backend, BACKENDS, "gt.launch.ray(backend")
    check_choice(strategy, STRATEGIES, "gt.launch.ray(strategy")
    check_count(workers, "gt.launch.ray(workers=)")
    _check_resources(gpus_per_worker, cpus_per_worker)
    bundle = {"CPU": float(cpus_per_worker), "GPU": float(gpus_per_worker)}
    return launch(
        RayLauncher(module, workers, bundle, backend, strategy, max_restarts), server, settings, connects=connect
    )


def _check_resources(gpus: float, cpus: float) -> None:
    if not 0 <= gpus <= 1:
        raise SettingsError(
            f"gt.launch.ray(gpus_per_worker={gpus!r}): a worker uses one GPU or a part of one; start a worker for each "
            f"GPU"
        )
    if not cpus >= 0 or not cpus + gpus:
        raise SettingsError(f"gt.launch.ray(cpus_per_worker={cpus!r}): give workers a CPU or a GPU")


class RayLauncher:
    """The actors of a cluster's workers, and of its server if that is one, in their own placement group. `bundle` is
    what Ray reserves for each worker."""

    system = "Ray"

    def __init__(
        self, module: Any, workers: int, bundle: dict[str, float], backend: str, strategy: str, max_restarts: int
    ) -> None:
        self._ray = module
        self._workers = workers
        self._bundle = {name: amount for name, amount in bundle.items() if amount}
        self._backend = backend
        self._strategy = strategy
        self._max_restarts = max_restarts
        self._group: Any = None
        self._actors: list[Any] = []
        self._server: Any = None

    def open_server(self, server: str | None, settings: Settings) -> ServerPlace:
        if not self._ray.is_initialized():
            self._ray.init()
        self._require_near_program(server)
        is_actor = server == ON_RAY
        self._place([{"CPU": 1.0}] * is_actor + [self._bundle] * self._workers, settings)
        if server is None:
            return start_server(self._ray.util.get_node_ip_address(), settings)
        return self._start_server(settings) if is_actor else find_server(server, settings)

    def _require_near_program(self, server: str | None) -> None:
        """Raise SettingsError if this program is not on a node, where the workers would reach a server beside it."""
        client = getattr(self._ray.util, "client", None)
        if server is None and client is not None and client.ray.is_connected():
            raise SettingsError(
                "this program reaches Ray by a proxy (ray://), so workers may not reach a server beside it; run it "
                "with `ray job submit`, or give server='server-name:12345' or server='ray'"
            )

    def _place(self, bundles: Sequence[Mapping[str, float]], settings: Settings) -> None:
        """Reserve the resources. Raises SettingsError with what there is, if Ray does not find them in time."""
        self._group = self._ray.util.placement_group(bundles, strategy=self._strategy)
        deadline = time.monotonic() + settings.timeout
        self._warn_if_short(bundles, settings.timeout)
        with LongWait(open_display(settings.progress)) as wait:
            while not self._group.wait(_POLL_SECONDS):
                if time.monotonic() > deadline:
                    raise SettingsError(
                        f"Ray has not placed {self._describe()} within {settings.timeout:g} s: "
                        f"{self._describe_nodes()}; ask for fewer workers or less for each, add nodes, or set "
                        f"GT_TIMEOUT if Ray is to add nodes itself"
                    )
                wait.tell(lambda: f"Ray places {self._describe()}: {self._describe_nodes()}")

    def _describe(self) -> str:
        each = " and ".join(f"{amount:g} {name}" for name, amount in self._bundle.items())
        return f"{self._workers} workers with {each} each ({self._strategy})"

    def _warn_if_short(self, bundles: Sequence[Mapping[str, float]], seconds: float) -> None:
        """Say at once if all nodes together have less than is asked for. Ray may be about to add nodes."""
        total = self._ray.cluster_resources()
        asked = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in ("CPU", "GPU")}
        if any(amount > total.get(name, 0) for name, amount in asked.items()):
            told = f"{self._describe()} need {_amounts(asked)}, and {self._describe_nodes()}"
            log.warning("%s; waiting for at most %g s for Ray to add nodes", told, seconds)

    def _describe_nodes(self) -> str:
        """The resources of the nodes, and what is free of all of them."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        shown = [f"{node['NodeManagerHostname']}: {_amounts(node['Resources'])}" for node in nodes[:_MAX_NODES_NAMED]]
        more = f", and {len(nodes) - _MAX_NODES_NAMED} more" if len(nodes) > _MAX_NODES_NAMED else ""
        free = _amounts(self._ray.available_resources())
        return f"the cluster has {len(nodes)} nodes ({'; '.join(shown)}{more}), of which {free} are free"

    def _start_server(self, settings: Settings) -> ServerPlace:
        """A server as an actor. Its keys and its port are chosen here, so that they stay when Ray starts it again."""
        where = self._options(0, {"CPU": 1.0})
        task = {name: value for name, value in where.items() if name != "max_restarts"}
        host, port = self._ray.get(self._ray.remote(find_place).options(**task).remote(), timeout=settings.timeout)
        command = new_server(host, port, settings)
        self._server = self._ray.remote(ServerActor).options(**where).remote(command.to_text(), host, port)
        deadline = time.monotonic() + settings.timeout
        while (status := self._read_status(self._server, "the server")) is None or status.announced is None:
            if status is not None and status.exit_code is not None:
                raise ServerLost(f"the server at {host}:{port} cannot start: it {status.describe()}")
            if time.monotonic() > deadline:
                raise ServerLost(f"the server at {host}:{port} has not started within {settings.timeout:g} s")
            time.sleep(_POLL_SECONDS)
        keys = command.keys.for_workers()
        directory = None if settings.insecure else make_directory()
        if directory is not None:
            keys.write(directory)
        return ServerPlace(host, port, keys, directory)

    def commands(self, place: ServerPlace) -> list[Command]:
        device = "" if "GPU" in self._bundle or self._backend != "pytorch" else "cpu"
        threads = max(1, int(self._bundle.get("CPU", 0)))
        return [new_worker(place, device=device, backend=self._backend, threads=threads)] * self._workers

    def start(self, commands: Sequence[Command]) -> None:
        make, first = self._ray.remote(WorkerActor), int(self._server is not None)
        for bundle, command in enumerate(commands, first):
            self._actors.append(make.options(**self._options(bundle, self._bundle)).remote(command.to_text()))

    def _options(self, bundle: int, resources: Mapping[str, float]) -> dict[str, Any]:
        strategies = load_extra("ray.util.scheduling_strategies", "ray", _CALL)
        return {
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            "max_restarts": self._max_restarts,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(self._group, bundle),
        }

    def count(self) -> int:
        return self._workers

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
        return decode_status(text)

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


def _amounts(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPU and {resources.get('GPU', 0):g} GPU"
