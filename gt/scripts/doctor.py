"""`python -m gt.scripts.doctor`: checks this machine for GT, and says what to do about what is wrong."""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy
import torch
import zmq
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import gt
from gt.core.environment import usable_cpus
from gt.core.errors import GTError
from gt.core.settings import read_settings
from gt.core.tables import print_bytes
from gt.monitor.attachment import running_programs
from gt.scripts.command_line import run_tool
from gt.version import __version__
from gt.wire import shared_memory
from gt.wire.file_descriptors import open_files_limit
from gt.wire.private_files import is_private, monitor_directory
from gt.wire.server_keys import keys_directory

GOOD, WARNING, BAD = "good", "warning", "bad"
LONGEST_SOCKET = 107  # bytes of the path of a Unix socket
LEAST_SHARED = 256 << 20  # bytes of shared memory that are worth a warning
FEW_FILES = 256
SERVER_PORT = 12345  # the default of gt.server
LINK_BYTES = 32 << 20
SLOW_LINK = 200e6  # bytes a second between two workers of one machine
LINKS_SHOWN = 6
_WORKERS_REMEDY = "correct what is not good above; GT_VERBOSE=1 shows how far workers come"


class Finding(msgspec.Struct, frozen=True):
    """The result of a check. `remedy` says what to do; empty if there is nothing."""

    check: str
    level: str
    text: str
    remedy: str = ""


class _Check(NamedTuple):
    """A check of the machine. `remedy` is what to do if the check itself fails."""

    name: str
    examine: Callable[[], Iterator[Finding]]
    remedy: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gt.scripts.doctor", description="Check this machine for GT.")
    parser.add_argument("--workers", type=int, default=2, help="start so many and measure their links (0: none)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.workers < 0:
        parser.error("--workers is a number of workers of at least 0")
    return run_tool("gt.scripts.doctor", lambda: _doctor(options))


def _doctor(options: argparse.Namespace) -> int:
    findings = list(examine(options.workers))
    if options.json:
        print(msgspec.json.encode(findings).decode())
    else:
        Console().print(_table(findings))
    return 1 if any(finding.level == BAD for finding in findings) else 0


def examine(workers: int) -> Iterator[Finding]:
    """All checks; those of worker processes only if `workers` is not 0."""
    checks = [*_CHECKS]
    if workers:
        checks.append(_Check("workers", lambda: _workers(workers), _WORKERS_REMEDY))
    for name, check, remedy in checks:
        try:
            yield from check()
        except GTError as error:  # says itself what to do
            yield Finding(name, BAD, str(error), remedy)
        except Exception as error:  # the other checks go on
            yield Finding(name, BAD, f"{type(error).__name__}: {error}", remedy)


def _table(findings: list[Finding]) -> Table:
    table = Table(title="gt doctor", title_justify="left")
    for column in ("check", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    styles = {GOOD: "green", WARNING: "yellow", BAD: "bold red"}
    for finding in findings:
        style = styles[finding.level]
        table.add_row(finding.check, f"[{style}]{finding.level}[/]", escape(finding.text), escape(finding.remedy))
    return table


def _versions() -> Iterator[Finding]:
    found = [f"gt {__version__}", f"Python {platform.python_version()}"]
    for module in (torch, numpy, msgspec, zmq):
        found.append(f"{module.__name__} {module.__version__}")
    yield Finding("versions", GOOD, ", ".join(found))
    if sys.platform != "linux":
        yield Finding("system", BAD, f"{sys.platform} is not supported", "use Linux")


def _settings() -> Iterator[Finding]:
    try:
        read_settings()
    except GTError as error:
        yield Finding("settings", BAD, str(error), "correct or unset the variable")
        return
    given = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("GT_")]
    yield Finding("settings", GOOD, ", ".join(given) or "no GT_ variable is set")


def _machine() -> Iterator[Finding]:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_AVPHYS_PAGES") * size
    text = f"{usable_cpus()} cores, {print_bytes(pages * size)} of memory, {print_bytes(free)} of it unused"
    yield Finding("processor and memory", GOOD, text)


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("devices", GOOD, "no GPU that torch can use: workers compute on the CPU")
        return
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        text = f"cuda:{number} {torch.cuda.get_device_name(number)}, {print_bytes(free)} of {print_bytes(total)} free"
        level = WARNING if free < total / 2 else GOOD
        yield Finding("devices", level, text, "see who uses it: nvidia-smi" if level == WARNING else "")


def _shared_memory() -> Iterator[Finding]:
    try:
        name, memory = shared_memory.create(1 << 16)
    except OSError as error:
        remedy = "let this user write to /dev/shm, and make it larger (docker run --shm-size=2g); sockets are slower"
        yield Finding("shared memory", WARNING, f"no memory can be shared: {error}", remedy)
        return
    place = shared_memory.path_of(name).parent
    memory.release()
    shared_memory.sweep(os.getpid())
    free = shutil.disk_usage(place).free
    text = f"{print_bytes(free)} free in {place}"
    if free < LEAST_SHARED:
        remedy = f"remove files that nobody needs from {place}, or make it larger (docker run --shm-size=2g)"
        yield Finding("shared memory", WARNING, text, remedy)
    else:
        yield Finding("shared memory", GOOD, text)


def _temporary_files() -> Iterator[Finding]:
    folder = Path(tempfile.gettempdir())
    longest = folder / "gt-monitor-4294967295" / "4194304-65535-01234567.sock"
    if len(os.fsencode(longest)) > LONGEST_SOCKET:
        yield Finding("temporary files", BAD, f"{folder} is too long a name for sockets", "set TMPDIR to a shorter one")
        return
    directory = monitor_directory()
    if directory.exists() and not is_private(directory):
        text = f"{directory} is not a private directory of this user: programs have no monitor socket"
        yield Finding("temporary files", BAD, text, f"find out who made it; remove it, or set TMPDIR ({folder} now)")
        return
    yield Finding("temporary files", GOOD, f"{folder}, {print_bytes(shutil.disk_usage(folder).free)} free")


def _keys() -> Iterator[Finding]:
    directory = keys_directory(os.environ.get("GT_KEYS", ""))
    if not directory.exists():
        yield Finding("keys", GOOD, f"no server of yours has written keys to {directory}")
    elif is_private(directory):
        yield Finding("keys", GOOD, f"the keys of servers are in {directory}")
    else:
        yield Finding("keys", BAD, f"others can enter {directory}", f"chmod 700 {directory}")


def _open_files() -> Iterator[Finding]:
    limit = open_files_limit()
    level = WARNING if limit < FEW_FILES else GOOD
    yield Finding("open files", level, f"at most {limit}", "raise it: ulimit -n 4096" if level == WARNING else "")


def _ports() -> Iterator[Finding]:
    own = [program.pid for program in running_programs() if program.port == SERVER_PORT]
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", SERVER_PORT)):
            yield Finding("ports", GOOD, f"{SERVER_PORT}, the default of gt.server, is free")
        elif own:
            yield Finding("ports", GOOD, f"your server, process {own[0]}, listens at port {SERVER_PORT}")
        else:
            remedy = "start a server at another one: python -m gt.server -p 0 chooses one that is free"
            yield Finding("ports", WARNING, f"something else listens at port {SERVER_PORT}", remedy)


def _compiler() -> Iterator[Finding]:
    found = next((name for name in (os.environ.get("CXX", ""), "g++", "clang++") if name and shutil.which(name)), "")
    if found:
        yield Finding("compiler", GOOD, f"{shutil.which(found)}, for compile: true")
    else:
        remedy = "install g++ (apt install g++) if you use compile: true; all else works without"
        yield Finding("compiler", WARNING, "there is no C++ compiler: compile: true runs ops one by one", remedy)


def _programs() -> Iterator[Finding]:
    programs = [program for program in running_programs() if program.pid != os.getpid()]
    text = "; ".join(f"{program.pid} {program.command[:60]}" for program in programs)
    yield Finding("programs", GOOD, text or "no other program of yours uses GT now")


def _workers(count: int) -> Iterator[Finding]:
    """Start workers, let them form groups, and measure the links between all pairs."""
    start = time.perf_counter()
    gt.init(workers=count)
    try:
        gt.ones(1).sum().item()
        yield Finding("workers", GOOD, f"{count} started in {time.perf_counter() - start:.1f} s")
        if count > 1:
            start = time.perf_counter()
            parts = gt.distribute(torch.ones(count), gt.mesh(count, ("all",)), "all")
            assert parts.redistribute(placements="-").sum().item() == count
            yield Finding("groups", GOOD, f"all {count} formed a group in {time.perf_counter() - start:.2f} s")
            data = torch.ones(LINK_BYTES // 4)
            yield _describe_links([(_link_speed(data, pair), pair) for pair in itertools.combinations(range(count), 2)])
    finally:
        gt.shutdown()


def _describe_links(links: list[tuple[float, tuple[int, int]]]) -> Finding:
    """The speeds of the links between all pairs of workers, the slowest first."""
    links = sorted(links)
    shown = [f"{first} to {second} {print_bytes(speed)}/s" for speed, (first, second) in links[:LINKS_SHOWN]]
    rest = [f"{len(links) - LINKS_SHOWN} more up to {print_bytes(links[-1][0])}/s"] if links[LINKS_SHOWN:] else []
    remedy = "see whether other programs use the cores, and GT_TRANSPORT" if links[0][0] < SLOW_LINK else ""
    return Finding("links", WARNING if remedy else GOOD, ", ".join(shown + rest), remedy)


def _link_speed(data: torch.Tensor, pair: tuple[int, int]) -> float:
    """Bytes a second that each of two workers receives when they exchange the halves of a tensor."""
    mesh = gt.mesh(2, ("pair",), workers=list(pair))
    best = 0.0
    for _ in range(3):
        halves = gt.distribute(data, mesh, "pair")
        gt.synchronize()
        start = time.perf_counter()
        halves.redistribute(placements="-")
        gt.synchronize()
        best = max(best, LINK_BYTES / 2 / (time.perf_counter() - start))
    return best


_CHECKS = (
    _Check("versions", _versions, "install GT again: pip install --force-reinstall gt-tensor"),
    _Check("settings", _settings, "correct or unset the variables that begin with GT_"),
    _Check("processor and memory", _machine, "let this user read /proc and /sys"),
    _Check("devices", _devices, "see whether nvidia-smi works; CUDA_VISIBLE_DEVICES= computes on the CPU"),
    _Check("shared memory", _shared_memory, "let this user write to /dev/shm"),
    _Check("temporary files", _temporary_files, "set TMPDIR to a directory that this user can write to"),
    _Check("keys", _keys, "set GT_KEYS to a directory of this user"),
    _Check("open files", _open_files, "raise the limit: ulimit -n 4096"),
    _Check("ports", _ports, "let this user open sockets of the loopback interface"),
    _Check("compiler", _compiler, "set CXX to a C++ compiler"),
    _Check("programs", _programs, "set TMPDIR to a directory that this user can write to"),
)


if __name__ == "__main__":
    sys.exit(main())
