"""`gt.launch.dask`: a worker of GT on each worker of a Dask cluster."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from gt.core.environment import load_extra
from gt.core.errors import ServerLost, SettingsError, WorkerLost
from gt.core.settings import BACKENDS, Settings, read_settings
from gt.core.tracebacks import ends_on_users_line
from gt.launch.arguments import check_choice
from gt.launch.clusters import Cluster, find_server, launch, new_worker, start_server
from gt.launch.commands import Command, ServerPlace
from gt.launch.launched_process import ProcessStatus, decode_status
from gt.wire.addresses import LOOPBACK, reaching_address, resolve

_EXTRA = ("dask", "gt.launch.dask()")


@ends_on_users_line
def dask(
    client: Any,
    *,
    server: str | None = None,
    backend: str | None = None,
    device: str = "",
    max_restarts: int = 3,
    connect: bool = True,
) -> Cluster:
    """Start a worker on each worker of a Dask cluster, and join them: `gt.launch.dask(Client("scheduler:8786"))`. Dask
    workers that come later get one too. Needs `pip install 'gt-tensor[dask]'`.

    - `client`: a `distributed.Client` that is not asynchronous
    - `server`: without it, a server is started beside this program; "server-name:12345" is one that runs already
    - `backend`: the engine of the workers, "pytorch" or "numpy"
    - `device`: "cpu", or "cuda"; without it a GPU if the Dask worker sees one
    - `max_restarts`: how often a worker that has ended is started again on the same Dask worker
    - `connect`: whether this program joins the workers, as `gt.connect` does

    Returns a `gt.launch.Cluster`, whose `stop()`, or the end of a `with` block, ends the workers of GT and leaves those
    of Dask. Waits for workers, for at most GT_TIMEOUT seconds.

    >>> from distributed import Client
    >>> with Client(n_workers=2, threads_per_worker=1) as client, gt.launch.dask(client) as cluster:
    ...     print(len(gt.workers()))
    2
    """
    module = load_extra("distributed", *_EXTRA)
    if not isinstance(client, module.Client):
        raise SettingsError(
            f"gt.launch.dask() takes a distributed.Client, not {client!r:.80}; for example "
            f'gt.launch.dask(distributed.Client("scheduler:8786"))'
        )
    if client.asynchronous:
        raise SettingsError("gt.launch.dask() waits for workers, so its client must not be asynchronous")
    settings = read_settings()
    chosen = check_choice(backend or settings.backend, BACKENDS, "gt.launch.dask(backend")
    return launch(DaskLauncher(client, chosen, device, max_restarts), server, settings, connects=connect)


class DaskLauncher:
    """The plugin of a Dask cluster that runs a cluster's workers."""

    system = "Dask"

    def __init__(self, client: Any, backend: str, device: str, max_restarts: int) -> None:
        self._client = client
        self._backend = backend
        self._device = device
        self._max_restarts = max_restarts
        self._plugins = load_extra("gt.launch.dask_plugin", *_EXTRA)
        self._name = ""  # of the plugin, once it is registered

    def open_server(self, server: str | None, settings: Settings) -> ServerPlace:
        self._wait_for_dask_workers(settings.timeout)
        here = reaching_address(settings.interface, _scheduler_host(self._client))
        return start_server(here, settings) if server is None else find_server(server, settings)

    def _wait_for_dask_workers(self, seconds: float) -> None:
        """Wait until Dask has a worker; which of them come later does not matter."""
        scheduler = self._client.scheduler.address
        try:
            self._client.wait_for_workers(1, timeout=seconds)
        except TimeoutError:
            raise ServerLost(
                f"after {seconds:g} s of waiting: the Dask cluster at {scheduler} has no workers; start some with "
                f"`dask worker {scheduler}`, or set GT_TIMEOUT to wait longer"
            ) from None

    def commands(self, place: ServerPlace) -> list[Command]:
        """That of the worker on each worker of Dask, also of those that come later."""
        return [new_worker(place, device=self._device, backend=self._backend)]

    def start(self, commands: Sequence[Command]) -> None:
        (command,) = commands
        self._name = f"gt-{secrets.token_hex(8)}"
        plugin = self._plugins.GTWorkerPlugin(self._name, command.to_text(), self._max_restarts)
        try:
            self._client.register_plugin(plugin, name=self._name)
        except Exception as error:  # whatever failed on a worker of Dask, such as the import of GT
            raise WorkerLost(f"no worker of GT can be started on the workers of Dask: {error!r}") from error

    def count(self) -> int:
        return max(1, len(self._client.scheduler_info(n_workers=-1)["workers"]))

    def read_statuses(self) -> dict[str, ProcessStatus]:
        found = self._client.run(self._plugins.read_status, self._name, on_error="ignore")
        texts = {f"Dask worker {address}": text for address, text in found.items() if isinstance(text, str) and text}
        return {name: decode_status(text) for name, text in texts.items()}

    def stop(self) -> None:
        name, self._name = self._name, ""
        if name and self._client.status == "running":
            self._client.unregister_worker_plugin(name)


def _scheduler_host(client: Any) -> str:
    """The address of the machine of Dask's scheduler; workers are reached by the interface that reaches it."""
    protocol, _, rest = client.scheduler.address.rpartition("://")
    return LOOPBACK if protocol in ("inproc", "unix") else resolve(rest.rpartition(":")[0])
