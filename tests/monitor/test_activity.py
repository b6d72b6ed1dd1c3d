"""Activity between two statuses: shares of time, rates, and the mix of ops."""

from gt.core.program_view import ProgramStatus, WorkerState
from gt.monitor.activity import ActivityMeter

SECOND = 1_000_000_000


def status(seconds, **worker):
    state = {"state": "idle", "op": "aten.mm.default", "since": int(seconds * SECOND), **worker}
    return ProgramStatus(int(seconds * SECOND), 7, (WorkerState(0, "here", 8, "cpu", 1000, **state),), ())


def test_rates_are_those_since_the_status_before():
    meter = ActivityMeter()
    (first,) = meter.add(status(10, busy=5 * SECOND, ops=100)).workers
    assert (first.busy, first.ops_per_second) == (0.0, 0.0)
    (row,) = meter.add(status(12, busy=6 * SECOND, waited=SECOND, ops=300, received=4000, sent=200)).workers
    assert (row.busy, row.exchanging, row.ops_per_second) == (0.5, 0.5, 100.0)
    assert (row.received_per_second, row.sent_per_second) == (2000.0, 100.0)


def test_a_command_that_goes_on_counts_before_its_end():
    meter = ActivityMeter()
    meter.add(status(10))
    (row,) = meter.add(status(12, state="running", since=11 * SECOND)).workers
    assert (row.busy, row.seconds) == (0.5, 1.0)
    (row,) = meter.add(status(14, state="exchanging", since=11 * SECOND, waits_for=(1,))).workers
    assert (row.busy, row.exchanging, row.waits_for) == (0.0, 1.0, (1,))


def test_a_worker_that_joins_again_has_no_negative_rates():
    meter = ActivityMeter()
    meter.add(status(10, ops=1000, busy=9 * SECOND))
    (row,) = meter.add(status(11, ops=5)).workers
    assert (row.ops_per_second, row.busy) == (0.0, 0.0)


def test_the_mix_counts_ops_of_workers_that_are_at_work():
    meter = ActivityMeter()
    for op, state in (("aten.mm", "running"), ("aten.mm", "running"), ("aten.add", "exchanging"), ("aten.sum", "idle")):
        activity = meter.add(status(10, op=op, state=state))
    assert activity.op_mix == {"aten.mm": 2 / 3, "aten.add": 1 / 3}
