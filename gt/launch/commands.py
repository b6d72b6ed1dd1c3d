"""What launchers have in common: a launcher turns the place of a server into commands, and has them run somewhere.

A launcher (Ray, Dask, SLURM, Kubernetes) decides where processes run; what runs there is the same for all of them, and
is said here: `worker_command` and `server_command` are lists of arguments, and `launch_environment` has the variables
that belong to both. A worker that is started once for each of several devices of a machine by torchrun or srun finds
its device itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from gt.launch.node_keys import NodeKeys

if TYPE_CHECKING:
    from gt.launch.launched_process import LaunchedProcess

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
_TEMPLATES = Path(__file__).parent / "templates"


class Command(msgspec.Struct, frozen=True):
    """A server, a worker or a program that a launcher starts on a machine: the arguments, the variables that are added
    to those of the machine, and the keys that are written there for it. It passes to that machine as text."""

    arguments: list[str]
    environment: dict[str, str] = {}
    keys: NodeKeys = NodeKeys()

    def to_text(self) -> str:
        return msgspec.json.encode(self).decode()


def decode_command(text: str) -> Command:
    return msgspec.json.decode(text, type=Command)


class ServerPlace(NamedTuple):
    """A server that workers join: its address, the keys to join it with, and the directory where this program
    finds them (None: as GT_KEYS says). `process` is the server, if it was started beside this program."""

    host: str
    port: int
    keys: NodeKeys = NodeKeys()
    directory: Path | None = None
    process: LaunchedProcess | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class Launcher(Protocol):
    """Has commands run on the machines of another system."""

    def commands(self, place: ServerPlace) -> Sequence[Command]:
        """What the system runs for a server at a place: its workers, and maybe the program."""


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
    options = {"--device": device, "--backend": backend, "--threads": str(threads or "")}
    return _command(python, "gt.worker", host, port, options, {"--insecure": insecure, "--json": is_json})


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
    options = {"--config": os.fspath(config), "--log": os.fspath(log)}
    return _command(python, "gt.server", host, port, options, {"--insecure": insecure, "--json": is_json})


def _command(
    python: str, module: str, host: str, port: int, options: Mapping[str, str], flags: Mapping[str, bool]
) -> list[str]:
    chosen = [part for option in options.items() if option[1] for part in option]
    return [python, "-m", module, "--host", host, "-p", str(port), *chosen, *[name for name in flags if flags[name]]]


def launch_environment(keys: Path | str | None = None, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables for servers and workers on other machines: the settings of this process that are not those of a
    program, and the directory of keys over there (None: `~/.gt/keys` of that machine)."""
    settings = {name: value for name, value in environ.items() if name.startswith("GT_")}
    kept = {
        name: value for name, value in settings.items() if name not in _OF_PROGRAMS and not name.startswith(_LOG_PREFIX)
    }
    return {**MEMORY_SETTINGS, **kept, **({"GT_KEYS": str(keys)} if keys is not None else {})}


def joining_environment(place: ServerPlace, min_workers: int) -> dict[str, str]:
    """The variables by which a program joins the server at a place."""
    return {"GT_SERVER": place.address, "GT_MIN_WORKERS": str(min_workers)}


def read_template(name: str) -> str:
    """A file in which a launcher writes its commands: a batch script, or manifests."""
    return (_TEMPLATES / name).read_text()
