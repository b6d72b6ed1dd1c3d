"""The command lines and the environment by which launchers start servers and workers on the machines of a cluster.

A launcher (Ray, Dask, SLURM, Kubernetes) decides where processes run; what runs there is the same for all of them, and
is said here: `worker_command` and `server_command` are lists of arguments, and `launch_environment` has the variables
that belong to both. A worker that is started once for each of several devices of a machine by torchrun or srun finds
its device itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

# glibc takes large memory in huge pages: a new result of 64 MB is written 3.5 times as fast as in small ones.
MEMORY_SETTINGS = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

# Settings of one program, or of the machine that it runs on, which workers and servers elsewhere must not inherit.
_OF_PROGRAMS = {
    "GT_WORKERS",
    "GT_SERVER",
    "GT_MIN_WORKERS",
    "GT_CONFIG",
    "GT_TRACE",
    "GT_AUTO_SHARD",
    "GT_KEYS",
    "GT_DASHBOARD_TOKEN",
}
_LOG_PREFIX = "GT_INSTRUCTION_LOG"


def worker_command(
    host: str,
    port: int,
    *,
    device: str = "",
    backend: str = "",
    threads: int = 0,
    insecure: bool = False,
    is_json: bool = False,
    python: str = sys.executable,
) -> list[str]:
    """The command of a worker that joins the server at a host and port. "" and 0 leave a choice to the worker; with
    `is_json` it prints a line when it has joined. `python` is the interpreter of the machine that it is started on."""
    command = [python, "-m", "gt.worker", "--host", host, "-p", str(port)]
    command += _option("--device", device) + _option("--backend", backend)
    command += _option("--threads", str(threads) if threads else "")
    return [*command, *(["--insecure"] if insecure else []), *(["--json"] if is_json else [])]


def server_command(
    host: str = "0.0.0.0",
    port: int = 12345,
    *,
    config: str | os.PathLike[str] = "",
    log: str | os.PathLike[str] = "",
    insecure: bool = False,
    is_json: bool = False,
    python: str = sys.executable,
) -> list[str]:
    """The command of a server that listens at an interface and port (0: any free one); with `is_json` it prints a line
    with its address when it listens."""
    command = [python, "-m", "gt.server", "--host", host, "-p", str(port)]
    command += _option("--config", os.fspath(config)) + _option("--log", os.fspath(log))
    return [*command, *(["--insecure"] if insecure else []), *(["--json"] if is_json else [])]


def _option(name: str, value: str) -> list[str]:
    return [name, value] if value else []


def launch_environment(keys: Path | str | None = None, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables for servers and workers on other machines: the settings of this process that are not those of a
    program, and the directory of keys over there (None: `~/.gt/keys` of that machine)."""
    settings = {name: value for name, value in environ.items() if name.startswith("GT_")}
    kept = {
        name: value for name, value in settings.items() if name not in _OF_PROGRAMS and not name.startswith(_LOG_PREFIX)
    }
    return {**MEMORY_SETTINGS, **kept, **({"GT_KEYS": str(keys)} if keys is not None else {})}
