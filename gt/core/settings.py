"""Settings from environment variables."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from gt.core.errors import SettingsError, nearest

MIN_INSTRUCTIONS = 1 << 9  # a client sends instructions in batches of half of that
MIN_TENSORS = 256  # a client frees small tensors in groups of a quarter of that, and these count until then


class Limits(msgspec.Struct, frozen=True):
    """The limits of a session: `bytes` of tensors and their copies on each worker, `tensors` that it may hold, and
    `instructions` that it may have sent before earlier ones are done. None: as many as there is room for."""

    bytes: int | None = None
    tensors: int | None = None
    instructions: int | None = None

    @property
    def counts_tensors(self) -> bool:
        """Whether the tensors of each session have to be counted."""
        return self.bytes is not None or self.tensors is not None


def parse_bytes(text: str) -> int:
    """A number of bytes, such as 1000, 512M or 8GiB: units are powers of 1024."""
    found = re.fullmatch("([0-9]{1,15})([KMGT]?)(I?B)?", text.strip().upper())
    if found is None:
        raise ValueError("expected a number of bytes such as 1000, 512M or 8GiB")
    return int(found[1]) << 10 * " KMGT".index(found[2] or " ")


def _parse_count(text: str, least: int) -> int:
    if not re.fullmatch("[0-9]{1,15}", text.strip()) or int(text) < least:
        raise ValueError(f"expected a whole number of at least {least}, since clients send and free in groups")
    return int(text)


def _parse_held_bytes(text: str) -> int:
    nbytes = parse_bytes(text)
    if not 0 < nbytes < 1 << 63:
        raise ValueError("expected at least 1 byte, and less than 8 EiB; without bytes= there is no limit")
    return nbytes


_PARSERS: dict[str, Callable[[str], int]] = {
    "bytes": _parse_held_bytes,
    "tensors": partial(_parse_count, least=MIN_TENSORS),
    "instructions": partial(_parse_count, least=MIN_INSTRUCTIONS),
}


def parse_limits(text: str) -> Limits:
    """Limits such as `bytes=4GiB,tensors=10000,instructions=5000`; each may be left out."""
    found: dict[str, int] = {}
    for item in filter(None, map(str.strip, text.split(","))):
        name, equals, value = item.partition("=")
        name = name.strip()
        if not equals or name not in _PARSERS:
            hint = nearest(name, _PARSERS) if equals else "for example bytes=4GiB,tensors=10000,instructions=5000"
            raise ValueError(f"{item!r} is not a limit; {hint}")
        if name in found:
            raise ValueError(f"{name} is given twice")
        try:
            found[name] = _PARSERS[name](value)
        except ValueError as error:
            raise ValueError(f"{item}: {error}") from None
    return Limits(**found)


BACKENDS = ("pytorch", "numpy")
TRANSPORTS = ("shared", "gloo", "nccl")
LOG_FORMATS = ("text", "jsonl")
STRATEGIES = ("bytes", "cost")
MAX_LEASE = 7 * 86400.0
MAX_WORKERS = 1 << 16
MODES = ("embedded", "local", "virtual", "shapes", "connected")


class HotPathSettings(msgspec.Struct, frozen=True):
    """Whether repeated runs of ops are sent as segments; `shortest`: the fewest ops of one; `repetitions`: how often a
    run is seen before it is one."""

    is_on: bool = True
    shortest: int = 8
    repetitions: int = 2


DEFAULT_HOT_PATH = HotPathSettings()


class LogSettings(msgspec.Struct, frozen=True):
    """The instruction log: without a `path` there is none. A file of more than `max_bytes` is put aside and a new one
    begun (None: never)."""

    path: str = ""
    format: str = "text"
    max_bytes: int | None = None


class CompileSettings(msgspec.Struct, frozen=True):
    """How workers compile. `is_automatic`: runs of ops that repeat often are compiled without a signal that asks for
    it; `seconds`: the limit for one of them; `niceness`: that of the process that compiles."""

    is_automatic: bool = False
    seconds: float = 300.0
    niceness: int = 19


class Settings(msgspec.Struct, frozen=True):
    """All settings of a process. `workers` 0, `mode` "", `transport` "", and None for `auto_shard`, `copy_limit`,
    `limits` and `instruction_log_bytes` mean that the user gave no value."""

    workers: int = 0
    server: str = ""
    min_workers: int = 1
    backend: str = "pytorch"
    mode: str = ""
    instruction_log: str = ""
    instruction_log_format: str = "text"
    instruction_log_bytes: int | None = None
    trace: str = ""
    config: str = ""
    auto_shard: bool | None = None
    copy_limit: int | None = None
    limits: Limits | None = None
    verbose: bool = False
    progress: bool = True
    debug_client: bool = False
    debug_dispatcher: bool = False
    debug_worker: bool = False
    debug_compile: bool = False
    auto_compile: bool = False
    compile_timeout: float = 300.0
    compile_nice: int = 19
    check_geometry: bool = False
    transport: str = ""
    strategy: str = "bytes"
    full_traceback: bool = False
    timeout: float = 60.0
    heartbeat_timeout: float = 5.0
    lease: float = 300.0
    drain: float = 5.0
    keys: str = ""
    insecure: bool = False
    interface: str = ""
    dashboard_token: str = ""
    hotpath: bool = True
    hotpath_min_seq: int = 8
    hotpath_threshold: int = 2

    @property
    def hot_path(self) -> HotPathSettings:
        return HotPathSettings(self.hotpath, self.hotpath_min_seq, self.hotpath_threshold)

    @property
    def log(self) -> LogSettings:
        return LogSettings(self.instruction_log, self.instruction_log_format, self.instruction_log_bytes)

    @property
    def compiling(self) -> CompileSettings:
        return CompileSettings(self.auto_compile, self.compile_timeout, self.compile_nice)

    @property
    def shows_workers(self) -> bool:
        """Whether the logs of workers are shown."""
        return self.verbose or self.debug_worker or self.debug_compile

    @property
    def shares_memory(self) -> bool:
        """Whether processes of one machine may pass tensors in shared memory."""
        return self.transport in ("", "shared")


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("expected 1 or 0")


def _optional_flag(text: str) -> bool | None:
    return _flag(text) if text else None


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError("expected a whole number of at least 1")
    return int(text)


def _worker_count(text: str) -> int:
    if _count(text) > MAX_WORKERS:
        raise ValueError(f"expected at most {MAX_WORKERS}")
    return int(text)


def _seconds(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise ValueError("expected a positive number of seconds")
    return float(text)


def parse_lease(text: str) -> float:
    """The seconds of a lease."""
    if not 0 <= float(text) <= MAX_LEASE:
        raise ValueError(f"expected seconds from 0 to {MAX_LEASE:g}")
    return float(text)


def _niceness(text: str) -> int:
    if not 0 <= int(text) <= 19:
        raise ValueError("expected a whole number from 0 to 19")
    return int(text)


def _optional_bytes(text: str) -> int | None:
    return parse_bytes(text) if text else None


def _optional_file_bytes(text: str) -> int | None:
    """At least one byte: a file holds a line, however small its limit."""
    nbytes = _optional_bytes(text)
    if nbytes == 0:
        raise ValueError("expected at least 1 byte, for example 10M")
    return nbytes


def _token(text: str) -> str:
    if text and not re.fullmatch("[A-Za-z0-9_-]{16,256}", text):
        raise ValueError("expected 16 to 256 letters, digits, _ and -")
    return text


def _log_format(text: str) -> str:
    if text not in LOG_FORMATS:
        raise ValueError(f"expected one of {', '.join(LOG_FORMATS)}")
    return text


def _backend(text: str) -> str:
    if text not in BACKENDS:
        raise ValueError(f"expected one of {', '.join(BACKENDS)}")
    return text


def _strategy(text: str) -> str:
    if text not in STRATEGIES:
        raise ValueError(f"expected one of {', '.join(STRATEGIES)}")
    return text


def _transport(text: str) -> str:
    if text and text not in TRANSPORTS:
        raise ValueError(f"expected one of {', '.join(TRANSPORTS)}")
    return text


_VARIABLES: dict[str, tuple[str, Callable[[str], object]]] = {
    "GT_WORKERS": ("workers", _worker_count),
    "GT_SERVER": ("server", str),
    "GT_MIN_WORKERS": ("min_workers", _worker_count),
    "GT_BACKEND": ("backend", _backend),
    "GT_INSTRUCTION_LOG": ("instruction_log", str),
    "GT_INSTRUCTION_LOG_FORMAT": ("instruction_log_format", _log_format),
    "GT_INSTRUCTION_LOG_BYTES": ("instruction_log_bytes", _optional_file_bytes),
    "GT_TRACE": ("trace", str),
    "GT_CONFIG": ("config", str),
    "GT_AUTO_SHARD": ("auto_shard", _optional_flag),
    "GT_COPY_LIMIT": ("copy_limit", _optional_bytes),
    "GT_LIMITS": ("limits", parse_limits),
    "GT_VERBOSE": ("verbose", _flag),
    "GT_PROGRESS": ("progress", _flag),
    "GT_DEBUG_CLIENT": ("debug_client", _flag),
    "GT_DEBUG_DISPATCHER": ("debug_dispatcher", _flag),
    "GT_DEBUG_WORKER": ("debug_worker", _flag),
    "GT_CHECK_GEOMETRY": ("check_geometry", _flag),
    "GT_TRANSPORT": ("transport", _transport),
    "GT_STRATEGY": ("strategy", _strategy),
    "GT_FULL_TRACEBACK": ("full_traceback", _flag),
    "GT_TIMEOUT": ("timeout", _seconds),
    "GT_HEARTBEAT_TIMEOUT": ("heartbeat_timeout", _seconds),
    "GT_LEASE": ("lease", parse_lease),
    "GT_DRAIN": ("drain", _seconds),
    "GT_KEYS": ("keys", str),
    "GT_INSECURE": ("insecure", _flag),
    "GT_INTERFACE": ("interface", str),
    "GT_DASHBOARD_TOKEN": ("dashboard_token", _token),
    "GT_AUTO_COMPILE": ("auto_compile", _flag),
    "GT_COMPILE_TIMEOUT": ("compile_timeout", _seconds),
    "GT_COMPILE_NICE": ("compile_nice", _niceness),
    "GT_DEBUG_COMPILE": ("debug_compile", _flag),
    "GT_HOTPATH": ("hotpath", _flag),
    "GT_HOTPATH_MIN_SEQ": ("hotpath_min_seq", _count),
    "GT_HOTPATH_THRESHOLD": ("hotpath_threshold", _count),
}

_SECRET = ("GT_DASHBOARD_TOKEN",)  # values that no message shows
_REPLACED = {"GT_SHARED_MEMORY": "GT_TRANSPORT"}


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from `GT_*` variables. An invalid value raises SettingsError; an unknown name is a warning."""
    found: dict[str, object] = {}
    for name, text in environ.items():
        if not name.startswith("GT_"):
            continue
        if name not in _VARIABLES:
            hint = f"use {_REPLACED[name]}" if name in _REPLACED else nearest(name, _VARIABLES)
            warnings.warn(f"{name} is not a setting of GT and is ignored; {hint}", stacklevel=2)
            continue
        field, parse = _VARIABLES[name]
        try:
            found[field] = parse(text)
        except ValueError as error:
            shown = "..." if name in _SECRET else repr(text)
            raise SettingsError(f"{name}={shown} cannot be used: {error}") from None
    return msgspec.structs.replace(Settings(), **found)


def shows_full_tracebacks(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether GT_FULL_TRACEBACK is on. Read when an exception is raised, because there may be no session."""
    try:
        return _flag(environ.get("GT_FULL_TRACEBACK", ""))
    except ValueError:
        return True


def parse_address(text: str) -> tuple[str, int]:
    """The host and port of a server's address, `host:port`."""
    if not isinstance(text, str) or "://" in text:
        raise SettingsError(f"{text!r} is not an address of a server; write host:port, for example localhost:12345")
    host, colon, port = text.rpartition(":")
    if not colon or not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise SettingsError(f"{text!r} is not an address of a server; write host:port, for example localhost:12345")
    return check_host(host), int(port)


def check_host(host: str) -> str:
    """A host by its name or IPv4 address. Raises SettingsError for text that cannot be one."""
    if ":" in host:
        raise SettingsError(f"{host!r} is an address of IPv6, at which GT does not listen: use a name or IPv4 address")
    if not re.fullmatch("[A-Za-z0-9_.-]{1,253}", host):
        raise SettingsError(f"{host!r} is not the name or IPv4 address of a host; for example localhost or 10.0.0.7")
    return "127.0.0.1" if host == "localhost" else host
