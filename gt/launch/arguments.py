"""The arguments of `gt.init` and of launchers, checked together with the settings of the environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gt.core.errors import SettingsError, nearest
from gt.core.settings import BACKENDS, MAX_WORKERS, MODES, Limits, Settings, parse_limits, read_settings


def choose_settings(
    workers: int | None = None,
    mode: str | None = None,
    backend: str | None = None,
    server: str | None = None,
    min_workers: int | None = None,
    limits: str | None = None,
) -> Settings:
    """The settings of the environment, overridden by arguments, and checked together."""
    settings = read_settings()
    given: dict[str, Any] = {}
    if workers is not None:
        given |= {"workers": check_count(workers, "gt.init(workers=)"), "server": ""}
    if backend is not None:
        given["backend"] = check_choice(backend, BACKENDS, "gt.init(backend")
    if limits is not None:
        given["limits"] = _check_limits(limits)
    if server is not None:
        if workers is not None:
            raise SettingsError("gt.init() takes workers= to start some or server= to join one that has them, not both")
        given |= {"server": server, "workers": 0}
    settings = msgspec.structs.replace(settings, **given)
    default = "connected" if settings.server else "local" if settings.workers else "embedded"
    chosen = check_choice(mode, MODES, "gt.init(mode") if mode is not None else default
    if chosen == "embedded" and settings.workers > 1:
        raise SettingsError(
            f"mode='embedded' is one worker in this process, not {settings.workers}; use mode='virtual'"
        )
    if chosen == "connected" and not settings.server:
        raise SettingsError("mode='connected' needs server='localhost:PORT' or GT_SERVER")
    if chosen == "connected" and limits is not None:
        raise SettingsError("gt.init(limits=) is for workers of this program: a server is started with its limits")
    return _with_min_workers(msgspec.structs.replace(settings, mode=chosen), min_workers)


def _with_min_workers(settings: Settings, min_workers: int | None) -> Settings:
    if min_workers is None:
        return settings
    check_count(min_workers, "gt.init(min_workers=)")
    if min_workers > 1 and settings.mode != "connected":
        raise SettingsError("gt.init(min_workers=) is for a server that others start workers for: use workers=")
    return msgspec.structs.replace(settings, min_workers=min_workers)


def check_count(count: object, what: str) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise SettingsError(f"{what} takes a whole number of workers of at least 1, not {count!r}")
    if count > MAX_WORKERS:
        raise SettingsError(f"{what} takes at most {MAX_WORKERS} workers, as many as a mesh can have, not {count}")
    return count


def _check_limits(text: object) -> Limits:
    try:
        return parse_limits(str(text))
    except ValueError as error:
        raise SettingsError(f"gt.init(limits={text!r}) is not possible: {error}") from None


def check_hosts(hosts: Sequence[str], settings: Settings) -> tuple[str, ...]:
    if not hosts:
        return ()
    if settings.mode not in ("virtual", "shapes"):
        raise SettingsError(
            "gt.init(hosts=) is for workers that are on no machine of their own: use mode='virtual' or mode='shapes'. "
            "The machines of real workers are known"
        )
    if isinstance(hosts, str) or not all(isinstance(host, str) for host in hosts):
        raise SettingsError(f"gt.init(hosts=) takes the name of a machine for each worker, not {hosts!r}")
    if len(hosts) != (settings.workers or 1):
        raise SettingsError(f"gt.init(hosts=) names {len(hosts)} machines for {settings.workers or 1} workers")
    return tuple(hosts)


def check_choice(name: object, known: Sequence[str], argument: str) -> str:
    if not isinstance(name, str) or name not in known:
        raise SettingsError(f"{argument}={name!r}) is not possible; {nearest(str(name), known)}")
    return name
