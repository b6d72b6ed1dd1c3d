"""The plugin that runs a worker of GT on each worker of a Dask cluster. Needs `distributed`, and no torch."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import msgspec
from distributed import Worker, WorkerPlugin

from gt.launch.commands import decode_command
from gt.launch.launched_process import LaunchedProcess

log = logging.getLogger("distributed.worker")  # whose output Dask's tools show


class GTWorkerPlugin(WorkerPlugin):
    """Starts a worker of GT with a worker of Dask, now or when that joins, and ends it with that, or when the plugin is
    removed. A worker of GT that ends is replaced, at most `max_restarts` times."""

    def __init__(self, name: str, command: str, max_restarts: int) -> None:
        self.name = name
        self._command = command
        self._restarts_left = max_restarts

    def setup(self, worker: Worker) -> None:
        self._lock = threading.Lock()
        self._is_ending = False
        self._threads = ["--threads", str(worker.state.nthreads)]
        self._process = self._start()

    def _start(self) -> LaunchedProcess:
        command = decode_command(self._command)
        own = msgspec.structs.replace(command, arguments=[*command.arguments, *self._threads])
        return LaunchedProcess(own, self._note_end)

    def _note_end(self, process: LaunchedProcess) -> None:
        """Replace a worker that has joined, unless its server has shut it down."""
        status = process.read_status()
        with self._lock:
            if self._is_ending or status.exit_code == 0 or status.announced is None or not self._restarts_left:
                log.warning("the worker of GT (pid %d) %s", status.pid, status.describe())
                return
            self._restarts_left -= 1
            log.warning("the worker of GT (pid %d) %s; another one is started", status.pid, status.describe())
            process.stop()
            self._process = self._start()

    async def teardown(self, worker: Worker) -> None:
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        with self._lock:
            self._is_ending = True
            self._process.stop()

    def read_status(self) -> str:
        return self._process.encode_status()


def read_status(name: str, dask_worker: Any) -> str:
    """The status of the worker of GT on a worker of Dask; "" if there is none yet. Dask gives the second argument."""
    plugin = dask_worker.plugins.get(name)
    return plugin.read_status() if isinstance(plugin, GTWorkerPlugin) else ""
