"""Logs of made-up runs, for tests of timelines."""

from gt.core.message_events import WorkerRan
from gt.core.messages import Ran, Swapped
from gt.monitor.activity import MessageSeen
from gt.monitor.chrome_trace import print_log
from tests.records import own

MS = 1_000_000  # nanoseconds


def op(worker, name, start, end, scope="", site="/home/train.py:7", swaps=()):
    """A command; times are milliseconds."""
    ran = Ran(name, 1, scope, start * MS, end * MS, tuple(swaps), 1, (own(1),), (own(int(start * 10) + 2),))
    return WorkerRan(worker, ran, site)


def gather(worker, begin, end, peer, nbytes=48, output=99, kind="all-gather"):
    """A move of which the first millisecond, before the exchange, is local."""
    swap = Swapped((begin + 1) * MS, end * MS, ((peer, nbytes),), ((peer, nbytes),), kind)
    ran = Ran("redistribute", 1, "", begin * MS, end * MS, (swap,), 1, (own(1),), (own(output),))
    return WorkerRan(worker, ran, "/home/train.py:9")


RECORDS = [
    op(0, "aten.mm.default", 0, 4, "forward"),
    op(0, "aten.relu.default", 4, 5, "forward"),
    gather(0, 5, 10, peer=1),
    op(1, "aten.mm.default", 1, 7, "forward"),
    gather(1, 7, 10, peer=0),
    op(0, "free", 10, 11),
    op(0, "aten.sum.default", 14, 15, "loss"),
    op(1, "mylib.thing.default", 10, 11),
    MessageSeen(12 * MS, "RECV", "client 1", "FetchTensor", -1, (own(5),), (), "", "train.py:12", own(40)),
    MessageSeen(15 * MS, "SEND", "client 1", "Fetched", 4, (), (), "", "", own(40)),
]


def write_log(path, records=RECORDS):
    path.write_text(print_log(records))
    return path
