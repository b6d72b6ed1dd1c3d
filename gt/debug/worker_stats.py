"""Counters of the workers, and of repeated runs of ops: `gt.debug.get_worker_stats`."""

from __future__ import annotations

from typing import NamedTuple

from gt.client import active_session
from gt.client.session_reads import read_stats
from gt.core.messages import WorkerStats


class HotPaths(NamedTuple):
    """Repeated runs of ops, which are sent as one message and replayed by the workers: `segments` were found; they were
    sent `hits` times, with `ops` ops in all, while `misses` ops were sent one by one. `deviations` counts, by reason
    and line, how often the program did not go on as it had before.

    >>> gt.debug.get_worker_stats().hot_paths.hits
    0
    """

    segments: int
    hits: int
    ops: int
    misses: int
    deviations: dict[tuple[str, str], int]


class CacheHits(NamedTuple):
    """How often something was found that had been worked out before, and how often it was not.

    >>> y = gt.ones(2) + 1
    >>> gt.debug.get_worker_stats().call_cache
    CacheHits(hits=0, misses=2)
    """

    hits: int
    misses: int


class StatsOfWorkers(dict[int, WorkerStats]):
    """The counters of each worker by its number. `hot_paths` are those of this program, and so are `call_cache`: the
    shapes and the definition of a call, in this process; and `plan_cache`: the layouts and moves of an op, in the
    dispatcher. Each op of the program needs both.

    >>> list(gt.debug.get_worker_stats())
    [0]
    """

    hot_paths: HotPaths
    call_cache: CacheHits
    plan_cache: CacheHits


def get_worker_stats() -> StatsOfWorkers:
    """The counters of each worker since its start, and its memory now, after all ops issued so far:
    `gt.debug.get_worker_stats()[0].bytes`; and the repeated runs of ops that this program has sent as one message:
    `gt.debug.get_worker_stats().hot_paths.hits`.

    >>> x = gt.ones(100)
    >>> gt.debug.get_worker_stats()[0].bytes
    400
    """
    session = active_session.current()
    answer = read_stats(session)
    stats = StatsOfWorkers(sorted(answer.stats.items()))
    found = session.matcher.stats()
    deviations = {(reason, session.sites.text(site)): count for (reason, site), count in found.deviations.items()}
    stats.hot_paths = paths = HotPaths(*found[:4], deviations)
    ops = paths.ops + paths.misses
    stats.call_cache = _cache_hits(ops, session.calls_inferred)
    stats.plan_cache = _cache_hits(ops, answer.plans_made)
    return stats


def _cache_hits(ops: int, misses: int) -> CacheHits:
    """Of the cache that each op looks into. Moves and ops that only this process runs miss it too."""
    return CacheHits(max(0, ops - misses), misses)
