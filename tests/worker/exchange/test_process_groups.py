"""Workers find each other and exchange values. Members are threads that share a store, as processes do."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from gt.core.errors import ConnectionLost
from gt.core.messages import Failure
from gt.core.meta import TensorMeta
from gt.wire.process_identity import start_mark, this_host
from gt.worker.engines import make_engine
from gt.worker.exchange import process_groups, rendezvous
from gt.worker.exchange.group_backends import GlooGroup, NcclGroup, can_use_nccl
from gt.worker.exchange.interface import Swap
from gt.worker.exchange.process_groups import GroupExchange
from gt.worker.exchange.rendezvous import Member
from gt.worker.failed_value import FailedValue

META = TensorMeta((2,), (1,), 0, "float32")
ENGINE = make_engine("pytorch", "cpu")


def exchanges(count):
    """Exchanges of some workers, which have all joined the store of the first."""
    found = [GroupExchange(worker, "cpu") for worker in range(count)]
    port = found[0].host_store()
    for exchange in found:
        exchange.join_store("127.0.0.1", port, 0)
    return found


def give(exchange):
    """Worker 0 sends two numbers to worker 1."""
    if exchange._worker == 0:
        return exchange.begin(Swap((0, 1), {1: (META, torch.tensor([1.0, 2.0]))}, {}), ENGINE).finish()
    return exchange.begin(Swap((0, 1), {}, {0: META}), ENGINE).finish()


def test_the_store_listens_at_the_loopback_interface_only():
    (exchange,) = exchanges(1)
    port = exchange.rendezvous._hosted.port
    listening = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.laddr.port == port and not c.raddr]
    assert listening == ["127.0.0.1"]


def test_gloo_listens_at_the_loopback_interface_only():
    before = set(psutil.Process().net_connections("inet"))
    pair = exchanges(2)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(give, pair))
    new = [c for c in psutil.Process().net_connections("inet") if c.status == "LISTEN" and c not in before]
    assert len(new) == 3
    assert {c.laddr.ip for c in new} == {"127.0.0.1"}


def set_connect_timeout(monkeypatch, timeout):
    for module in (process_groups, rendezvous):
        monkeypatch.setattr(module, "CONNECT_TIMEOUT", timeout)


def test_a_member_may_come_late(monkeypatch):
    """The first member waits longer than connecting may take."""
    looks, late = [], threading.Event()

    def look(*process):
        looks.append(process)
        if len(looks) > 2 * 30:  # two members, and 50 ms between two looks
            late.set()
        return True

    set_connect_timeout(monkeypatch, timedelta(seconds=1))
    monkeypatch.setattr(rendezvous, "is_running", look)
    first, second = exchanges(2)
    with ThreadPoolExecutor(1) as threads:
        giving = threads.submit(give, first)
        assert late.wait(60)
        assert give(second)[0].tolist() == [1.0, 2.0]
        assert giving.result(60) == {}


def test_a_member_that_has_ended_is_not_waited_for():
    first, second = exchanges(2)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        member = Member(this_host(), process.pid, start_mark(process.pid), "")
        second.rendezvous._store.set("worker 1", rendezvous._encoder.encode(member))
        with ThreadPoolExecutor(1) as threads:
            giving = threads.submit(give, first)
            process.kill()
            with pytest.raises(RuntimeError, match=rf"worker 1 \(pid {process.pid}\) has ended"):
                giving.result(10)


def test_a_member_that_is_lost_before_it_joins_the_store_is_not_waited_for():
    first = GroupExchange(0, "cpu", look_ahead=lambda: first.lose_worker(1))
    first.join_store("127.0.0.1", first.host_store(), 0)
    with pytest.raises(RuntimeError, match=r"worker 1 is lost; workers \(0, 1\) cannot meet"):
        give(first)


def test_a_member_that_came_and_ended_is_not_connected_with():
    first, second = exchanges(2)
    second.rendezvous.new_attempt((0, 1)).set("here 1", "")
    first.lose_worker(1)
    with pytest.raises(RuntimeError, match="worker 1 is lost"):
        give(first)


def test_a_member_that_ends_while_it_connects_is_not_waited_for():
    looks = []

    def lose_at_second_look():
        looks.append(1)
        if len(looks) == 2:  # the first one is before members connect
            first.lose_worker(1)

    first = GroupExchange(0, "cpu", look_ahead=lose_at_second_look)
    first.join_store("127.0.0.1", first.host_store(), 0)
    second = GroupExchange(1, "cpu")
    second.join_store("127.0.0.1", first.rendezvous._hosted.port, 0)
    second.rendezvous.new_attempt((0, 1)).set("here 1", "")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="worker 1 is lost"):
        give(first)
    assert time.monotonic() - began < rendezvous.CONNECT_TIMEOUT.total_seconds() / 2
    second._connect(second.rendezvous._store, (0, 1))  # so that the thread of the first one ends
    for thread in threading.enumerate():
        if thread.name == "gt-connect":
            thread.join(60)


def test_a_worker_that_has_no_reason_to_wait_does_not():
    def end():
        raise ConnectionLost("this worker was told to end")

    exchange = GroupExchange(0, "cpu", look_ahead=end)
    exchange.join_store("127.0.0.1", exchange.host_store(), 0)
    with pytest.raises(ConnectionLost, match="told to end"):
        give(exchange)


def test_a_member_that_never_comes_is_given_up(monkeypatch):
    monkeypatch.setattr(rendezvous, "MEMBER_TIMEOUT", timedelta(milliseconds=10))
    first, _ = exchanges(2)
    with pytest.raises(TimeoutError, match=r"not all of workers \(0, 1\) have come"):
        give(first)


def test_members_that_could_not_be_connected_skip_the_same_exchange_and_meet_again(monkeypatch):
    """Keys that one of them left in the store do not matter."""
    pair = exchanges(2)
    connect = pair[0]._connect

    def fail_once(store, members):
        store.set("left", "behind")
        monkeypatch.setattr(pair[0], "_connect", connect)
        raise OSError("no buffer space available")

    monkeypatch.setattr(pair[0], "_connect", fail_once)
    set_connect_timeout(monkeypatch, timedelta(seconds=1))
    with ThreadPoolExecutor(2) as threads:
        for giving in [threads.submit(give, exchange) for exchange in pair]:
            with pytest.raises(RuntimeError, match="worker 0 is not connected .* OSError: no buffer space"):
                giving.result(60)
        received = list(threads.map(give, pair))
    assert received[0] == {}
    assert received[1][0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("gpus", "can"),
    [
        (["a", "b"], True),
        (["a", "b", "a"], False),  # two workers share a GPU
        (["a", ""], False),  # one computes on the CPU
        (["", ""], False),
    ],
)
def test_nccl_is_used_between_gpus_of_one_worker_each(gpus, can):
    assert can_use_nccl(gpus) == can


class FakeNccl:
    """Records its calls. The end of coalescing fills the buffers: with the header of a tensor, and ones."""

    def __init__(self, *_):
        self.calls, self.buffers = [], []

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name.strip("_"), *[arg for arg in args if not isinstance(arg, list)]))

    def recv(self, buffers, rank, tag):
        self.buffers.extend(buffers)
        self.calls.append(("recv", rank, tag))

    def _end_coalescing(self):
        self.calls.append(("end_coalescing",))
        for buffer in self.buffers:
            buffer.copy_(torch.cat([torch.zeros(8, dtype=torch.uint8), torch.ones(2).view(torch.uint8)]))
        return self

    def wait(self):
        self.calls.append(("wait",))


def test_sends_and_receives_of_nccl_are_launched_together_and_waited_for_together():
    exchange, group = GroupExchange(0, "cpu"), FakeNccl()
    exchange.groups[0, 1, 2] = NcclGroup(group, torch.device("cpu"))
    sent = (META, torch.zeros(2))
    received = exchange.begin(Swap((0, 1, 2), {1: sent, 2: sent}, {1: META}), ENGINE).finish()
    coalesced = [("start_coalescing",), ("send", 1, 0), ("send", 2, 0), ("recv", 1, 0), ("end_coalescing",)]
    assert group.calls == [*coalesced, ("wait",)]
    assert received[1].tolist() == [1.0, 1.0]
    exchange.in_flight.confirm(2)
    assert group.calls == [*coalesced, ("wait",), ("wait",)]


def test_a_group_of_gpus_is_connected_when_it_is_made(monkeypatch):
    """Members with nothing to send or to receive would otherwise never take part."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(FakeNccl, "Options", type("Options", (), {}), raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    (exchange,) = exchanges(1)
    exchange._device = torch.device("cuda:0")
    exchange.rendezvous.members[0] = Member(this_host(), 0, "", "GPU-1")
    exchange.rendezvous.require_running = lambda members: None
    group = exchange.find_group((0,))
    assert isinstance(group, NcclGroup)
    assert group._group.calls == [("eager_connect_single_device", torch.device("cuda:0"))]


def test_workers_that_share_a_gpu_exchange_through_the_memory_of_the_cpu():
    pair = exchanges(2)
    for exchange in pair:
        exchange.rendezvous.members = {worker: Member(this_host(), 0, "", "GPU-1") for worker in (0, 1)}
        exchange._device = torch.device("cuda:0")
        exchange.rendezvous.require_running = lambda members: None
    with ThreadPoolExecutor(2) as threads:
        received = list(threads.map(give, pair))
    assert received[1][0].tolist() == [1.0, 2.0]
    assert all(isinstance(exchange.groups[0, 1], GlooGroup) for exchange in pair)


def test_a_failure_travels_in_place_of_a_tensor():
    failed = FailedValue(Failure(0, "aten.mm.default", (), 0, 0, "RuntimeError", "no", ""))
    first, second = exchanges(2)
    with ThreadPoolExecutor(1) as threads:
        giving = threads.submit(lambda: first.begin(Swap((0, 1), {1: (META, failed)}, {}), ENGINE).finish())
        assert give(second)[0].failure == failed.failure
        giving.result(60)
