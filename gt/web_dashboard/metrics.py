"""The metrics of `/metrics`, for Prometheus: read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gt.core.errors import MEANINGS
from gt.core.program_view import ProgramView, SessionState, WorkerState
from gt.core.worker_progress import STATE_NAMES

_NANOSECOND = 1e-9

# by metric: its help, the field of a worker or session, and the factor to its unit
_WORKER_COUNTERS = {
    "gt_worker_ops": ("Ops that a worker has run.", "ops", 1),
    "gt_worker_busy_seconds": ("Seconds that a worker has computed.", "busy", _NANOSECOND),
    "gt_worker_exchange_seconds": ("Seconds that a worker has exchanged tensors or waited.", "waited", _NANOSECOND),
    "gt_worker_received_bytes": ("Bytes that a worker has received from others.", "received", 1),
    "gt_worker_sent_bytes": ("Bytes that a worker has sent to others.", "sent", 1),
}
_WORKER_GAUGES = {
    "gt_worker_tensor_bytes": ("Bytes of the tensors that a worker holds.", "nbytes", 1),
    "gt_worker_memory_bytes": ("Bytes of the memory of a worker's device, 0 if not known.", "memory", 1),
}
_SESSION_GAUGES = {
    "gt_session_tensors": ("Tensors of a session.", "tensors", 1),
    "gt_session_tensor_bytes": ("Bytes of a session's tensors on all workers.", "nbytes", 1),
    "gt_session_queued_instructions": ("Instructions of a session that wait for their turn.", "queued", 1),
    "gt_session_pending_requests": ("Requests of a session that workers have not answered.", "requests", 1),
}


class ProgramCollector(Collector):
    """Gives the metrics of a program."""

    def __init__(self, view: ProgramView) -> None:
        self._view = view

    def describe(self) -> Iterable[Metric]:
        """Nothing is read when the collector is registered."""
        return ()

    def collect(self) -> Iterator[Metric]:
        status = self._view.read_status()
        yield from _families(CounterMetricFamily, _WORKER_COUNTERS, "worker", status.workers)
        yield from _families(GaugeMetricFamily, _WORKER_GAUGES, "worker", status.workers)
        yield from _families(GaugeMetricFamily, _SESSION_GAUGES, "session", status.sessions)
        yield _states(status.workers)
        yield self._traffic()
        failures = self._view.read_failures()
        yield CounterMetricFamily("gt_failed_ops", "Ops that failed.", failures.count)
        yield CounterMetricFamily("gt_lost_workers", "Workers that were lost.", len(failures.lost))
        yield GaugeMetricFamily("gt_workers", "Workers that are connected.", len(status.workers))
        yield _refusals(status.refused)

    def _traffic(self) -> Metric:
        family = CounterMetricFamily(
            "gt_traffic_bytes", "Bytes from one worker to another.", labels=["sender", "receiver"]
        )
        for pair in self._view.read_traffic():
            family.add_metric([str(pair.sender), str(pair.receiver)], pair.nbytes)
        return family


def _families(
    kind: Any, metrics: Mapping[str, tuple[str, str, float]], label: str, records: Iterable[WorkerState | SessionState]
) -> Iterator[Metric]:
    for name, (text, field, factor) in metrics.items():
        family = kind(name, text, labels=[label])
        for record in records:
            family.add_metric([str(getattr(record, label))], getattr(record, field) * factor)
        yield family


def _states(workers: Iterable[WorkerState]) -> Metric:
    family = GaugeMetricFamily("gt_worker_state", "1 for the state that a worker is in.", labels=["worker", "state"])
    for worker in workers:
        for state in dict.fromkeys((*STATE_NAMES, worker.state)):
            family.add_metric([str(worker.worker), state], float(state == worker.state))
    return family


def _refusals(counts: Mapping[str, int]) -> Metric:
    """Every kind, also those of which there was none: a rate needs a first value."""
    family = CounterMetricFamily("gt_refused", "Keys, frames, messages and ops that were refused.", labels=["kind"])
    for kind in MEANINGS:
        family.add_metric([kind], counts.get(kind, 0))
    return family


class Metrics:
    """Metrics of GT in a separate registry: the program may have its own."""

    def __init__(self, view: ProgramView) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(ProgramCollector(view))

    def text(self) -> bytes:
        return generate_latest(self._registry)
