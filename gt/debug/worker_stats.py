"""Counters of the workers, and of repeated runs of ops: `gt.debug.get_worker_stats`."""

from __future__ import annotations

from typing import NamedTuple

from gt.client import active_session
from gt.core.messages import WorkerStats


class HotPaths(NamedTuple):
    """Repeated runs of ops, which are sent as one message and replayed by the workers: `segments` were found; they were
    sent `hits` times, with `ops` ops in all, while `misses` ops were sent one by one. `deviations` counts, by reason
    and line, how often the program did not go on as it had before."""

    segments: int
    hits: int
    ops: int
    misses: int
    deviations: dict[tuple[str, str], int]


class StatsOfWorkers(dict[int, WorkerStats]):
    """The counters of each worker by its number. `hot_paths` are those of this program."""

    hot_paths: HotPaths


def get_worker_stats() -> StatsOfWorkers:
    """The counters of each worker since its start, and its memory now, after all ops issued so far:
    `gt.debug.get_worker_stats()[0].bytes`; and the repeated runs of ops that this program has sent as one message:
    `gt.debug.get_worker_stats().hot_paths.hits`."""
    session = active_session.current()
    stats = StatsOfWorkers(session.read_stats().stats)
    found = session.matcher.stats()
    deviations = {(reason, session.sites.text(site)): count for (reason, site), count in found.deviations.items()}
    stats.hot_paths = HotPaths(*found[:4], deviations)
    return stats
