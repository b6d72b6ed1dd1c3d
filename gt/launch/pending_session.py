"""`PendingSession`: a session whose worker processes are starting. The program goes on while they import torch, and
waits when it first needs them."""

from __future__ import annotations

from gt.client.host_data import copy_bytes
from gt.client.session import Session
from gt.client.torch_patches.avoided_imports import import_shape_functions
from gt.core.settings import Settings
from gt.launch.hosted_dispatcher_channel import HostedDispatcherChannel
from gt.launch.local_processes import LocalProcesses
from gt.monitor.instruction_log import open_log
from gt.monitor.progress import open_display


class PendingSession:
    """Worker processes that are starting, and the channel that their session will use."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.workers = settings.workers or 1
        self._display = open_display(settings.progress)
        self.processes = LocalProcesses(self.workers, settings)
        copy = copy_bytes if settings.shares_memory else None
        try:
            observer = open_log(settings.log)
            self.channel = HostedDispatcherChannel(
                self.processes, copy, observer, settings.heartbeat_timeout, settings.copy_limit, settings.limits
            )
        except BaseException:
            self.processes.stop()
            raise

    def open(self) -> Session:
        """The session, when all workers are ready. Raises WorkerLost if one of them has ended."""
        try:
            import_shape_functions()  # while the workers import torch
            welcome = self.channel.welcome(self.workers, self.settings.timeout, self._display)
        except BaseException:
            self.stop()
            raise
        return Session(self.channel, welcome, self.settings.auto_shard, self.settings.hot_path, self._display)

    def stop(self) -> None:
        """End the workers before a session was opened."""
        self.channel.close()
        self.processes.stop()
