"""Worker processes find each other and choose a transport. Members are threads that share a store, as processes do."""

import contextlib
import os
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
from gt.wire.process_identity import start_mark, this_host
from gt.worker.exchange import ProcessExchange, futex, group_backends, process_exchange, rendezvous
from gt.worker.exchange.group_backends import GlooGroup, NcclGroup
from gt.worker.exchange.process_groups import ProcessGroup
from gt.worker.exchange.rendezvous import Member
from gt.worker.exchange.shared_memory_groups import SharedMemoryGroup
from tests.dispatcher_harness import at, over
from tests.worker.exchange.tasks import FAILING, task_of
from tests.worker.exchange.test_process_groups import FakeNccl
from tests.worker.exchange.transports import PROCESS_TRANSPORTS, exchanges, left


def give(exchange, value=None):
    """Worker 0 sends two numbers to worker 1."""
    value = torch.tensor([1.0, 2.0]) if value is None else value
    worker = exchange.rendezvous._worker
    (result,) = exchange.begin([task_of(worker, value if worker == 0 else None, at(0), at(1))]).finish()
    return result


def both_give(pair):
    with ThreadPoolExecutor(2) as threads:
        given, taken = [threads.submit(give, exchange) for exchange in pair]
        assert given.result(60) is None
        assert taken.result(60).tolist() == [1.0, 2.0]


@pytest.fixture(params=PROCESS_TRANSPORTS)
def pair(request):
    """Two workers that have not met."""
    with left(exchanges(2, request.param)) as found:
        yield found


def test_the_store_listens_at_the_loopback_interface_only():
    with left(exchanges(1)) as (exchange,):
        port = exchange.rendezvous._hosted.port
        found = psutil.Process().net_connections("inet")
        assert [c.laddr.ip for c in found if c.laddr.port == port and not c.raddr] == ["127.0.0.1"]


def test_gloo_listens_at_the_loopback_interface_only():
    before = set(psutil.Process().net_connections("inet"))
    with left(exchanges(2, "gloo")) as found:
        both_give(found)
        new = [c for c in psutil.Process().net_connections("inet") if c.status == "LISTEN" and c not in before]
    assert len(new) == 3
    assert {c.laddr.ip for c in new} == {"127.0.0.1"}


def test_members_that_outnumber_their_cpus_do_not_wait_actively(one_cpu):
    with left(exchanges(2, "shared")) as found:
        both_give(found)
        peers = [peer for exchange in found for peer in exchange.find_group((0, 1))._peers.values()]
        assert [peer._spins for peer in peers] == [False, False]


# Meeting


def test_a_member_may_come_late(monkeypatch, pair):
    """The first member waits longer than connecting may take."""
    looks, late = [], threading.Event()

    def look(*process):
        looks.append(process)
        if len(looks) > 2 * 30:  # two members, and 50 ms between two looks
            late.set()
        return True

    set_connect_timeout(monkeypatch, timedelta(seconds=1))
    monkeypatch.setattr(rendezvous, "is_running", look)
    first, second = pair
    with ThreadPoolExecutor(1) as threads:
        giving = threads.submit(give, first)
        assert late.wait(60)
        assert give(second).tolist() == [1.0, 2.0]
        assert giving.result(60) is None


def set_connect_timeout(monkeypatch, timeout):
    for module in (process_exchange, rendezvous):
        monkeypatch.setattr(module, "CONNECT_TIMEOUT", timeout)


def test_a_member_that_has_ended_is_not_waited_for(pair):
    first, second = pair
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        member = Member(this_host(), process.pid, start_mark(process.pid), "")
        second.rendezvous._store.set("worker 1", rendezvous._encoder.encode(member))
        with ThreadPoolExecutor(1) as threads:
            giving = threads.submit(give, first)
            process.kill()
            with pytest.raises(RuntimeError, match=rf"worker 1 \(pid {process.pid}\) has ended"):
                giving.result(10)


def test_a_member_that_is_lost_before_it_joins_the_store_is_not_waited_for():
    first = ProcessExchange(0, "cpu", look_ahead=lambda: first.lose_worker(1))
    first.join_store("127.0.0.1", first.host_store(), 0)
    with pytest.raises(RuntimeError, match=r"worker 1 is lost; workers \(0, 1\) cannot meet"):
        give(first)


def test_a_member_that_came_and_ended_is_not_connected_with(pair):
    first, second = pair
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

    others = {*threading.enumerate()}
    first = ProcessExchange(0, "cpu", lose_at_second_look, "gloo")
    first.join_store("127.0.0.1", first.host_store(), 0)
    second = ProcessExchange(1, "cpu", transport="gloo")
    second.join_store("127.0.0.1", first.rendezvous._hosted.port, 0)
    second.rendezvous.new_attempt((0, 1)).set("here 1", "")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="worker 1 is lost"):
        first.find_group((0, 1))
    assert time.monotonic() - began < rendezvous.CONNECT_TIMEOUT.total_seconds() / 2
    with contextlib.suppress(RuntimeError):  # the first one may have left meanwhile
        second._connect(second.rendezvous._store, (0, 1), ["", ""])  # so that the thread of the first one ends
    for exchange in (first, second):
        exchange.leave()
    for thread in {*threading.enumerate()} - others:
        if thread.name == "exchange-connect":
            thread.join(60)


def test_a_worker_that_has_joined_connects_without_another_thread(monkeypatch):
    """There may be no memory for one: `Thread.start` then waits without end."""
    with left(exchanges(2, "gloo")) as found:
        stores = [exchange.rendezvous.new_attempt((0, 1)) for exchange in found]
        monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail(f"{thread.name} is started"))
        for exchange, store in zip(found, stores, strict=True):
            store.set("here", "")
            assert exchange.rendezvous.connect_running((0, 1), lambda part: part.check(["none"])) is False


def test_a_worker_that_has_no_reason_to_wait_does_not():
    def end():
        raise ConnectionLost("this worker was told to end")

    exchange = ProcessExchange(0, "cpu", look_ahead=end)
    exchange.join_store("127.0.0.1", exchange.host_store(), 0)
    with pytest.raises(ConnectionLost, match="told to end"):
        give(exchange)


def test_a_member_that_never_comes_is_given_up(monkeypatch, pair):
    monkeypatch.setattr(rendezvous, "MEMBER_TIMEOUT", timedelta(milliseconds=10))
    with pytest.raises(TimeoutError, match=r"not all of workers \(0, 1\) have come"):
        give(pair[0])


@pytest.mark.parametrize("pair", ["gloo"], indirect=True)
def test_members_that_could_not_be_connected_skip_the_same_exchange_and_meet_again(monkeypatch, pair):
    """Keys that one of them left in the store do not matter."""
    connect = pair[0]._connect

    def fail_once(store, members, nonces):
        store.set("left", "behind")
        monkeypatch.setattr(pair[0], "_connect", connect)
        raise OSError("no buffer space available")

    monkeypatch.setattr(pair[0], "_connect", fail_once)
    set_connect_timeout(monkeypatch, timedelta(seconds=1))
    with ThreadPoolExecutor(2) as threads:
        for giving in [threads.submit(give, exchange) for exchange in pair]:
            with pytest.raises(RuntimeError, match="worker 0 is not connected .* OSError: no buffer space"):
                giving.result(60)
    both_give(pair)


def test_a_failed_meeting_leaves_no_file_open(monkeypatch, pair):
    first, _ = pair
    monkeypatch.setattr(rendezvous, "MEMBER_TIMEOUT", timedelta(milliseconds=10))

    def attempt():
        with pytest.raises(TimeoutError):
            give(first)
        return len(os.listdir("/proc/self/fd"))

    assert attempt() == attempt()


# The choice of a transport


@pytest.mark.parametrize(
    ("transport", "kind"), [("", SharedMemoryGroup), ("shared", SharedMemoryGroup), ("gloo", ProcessGroup)], ids=str
)
def test_cpu_workers_of_one_machine_share_memory_unless_they_are_told_otherwise(transport, kind):
    with left(exchanges(2, transport)) as pair:
        both_give(pair)
        assert {type(exchange.groups[0, 1]) for exchange in pair} == {kind}


def test_workers_where_one_cannot_map_the_others_memory_use_gloo(monkeypatch, caplog):
    with left(exchanges(2)) as pair:
        monkeypatch.setattr(pair[1], "_map", refuse_to_map)
        both_give(pair)
        assert all(isinstance(exchange.groups[0, 1].backend, GlooGroup) for exchange in pair)
    assert "workers (0, 1) do not share memory: worker 1 cannot map the memory of worker 0: denied" in caplog.text


def refuse_to_map(worker, descriptor, *, spins):
    raise PermissionError("denied")


def test_workers_where_one_has_no_memory_to_share_use_gloo(monkeypatch, caplog):
    with left(exchanges(2)) as pair:
        monkeypatch.setattr(pair[0], "_new_status", lambda: None)
        both_give(pair)
        assert all(isinstance(exchange.groups[0, 1].backend, GlooGroup) for exchange in pair)


def test_workers_without_ordered_writes_use_gloo(monkeypatch):
    monkeypatch.setattr(futex, "_system_call", None)
    with left(exchanges(2)) as pair:
        both_give(pair)
        assert all(isinstance(exchange.groups[0, 1], ProcessGroup) for exchange in pair)


def test_a_forced_transport_that_is_not_possible_fails_on_all_members(monkeypatch):
    with left(exchanges(2, "shared")) as pair:
        monkeypatch.setattr(pair[1], "_map", refuse_to_map)
        check_both_fail(pair, "GT_TRANSPORT=shared, but workers .* cannot share memory")


def test_nccl_without_gpus_fails_on_all_members():
    with left(exchanges(2, "nccl")) as pair:
        check_both_fail(pair, "GT_TRANSPORT=nccl needs a GPU for each")


def test_workers_with_different_transports_fail_instead_of_waiting(monkeypatch):
    set_connect_timeout(monkeypatch, timedelta(seconds=1))
    with left(exchanges(2, "shared")) as pair:
        pair[1]._transport = "gloo"
        check_both_fail(pair, "is not connected with the others")


def check_both_fail(pair, reason):
    with ThreadPoolExecutor(2) as threads:
        for giving in [threads.submit(give, exchange) for exchange in pair]:
            with pytest.raises(RuntimeError, match=reason):
                giving.result(60)


def test_a_group_of_gpus_is_connected_when_it_is_made(monkeypatch):
    """Members with nothing to send or to receive would otherwise never take part."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(FakeNccl, "Options", type("Options", (), {}), raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(process_exchange, "CommunicationStream", lambda device: None)
    monkeypatch.setattr(group_backends, "SpareMemory", lambda device: None)
    (exchange,) = exchanges(1)
    exchange._device = torch.device("cuda:0")
    exchange.rendezvous.members[0] = Member(this_host(), 0, "", "GPU-1")
    exchange.rendezvous.require_running = lambda members: None
    backend = exchange.find_group((0,)).backend
    assert isinstance(backend, NcclGroup)
    assert backend._group.calls == [("eager_connect_single_device", torch.device("cuda:0"))]


def test_workers_that_share_a_gpu_exchange_through_the_memory_of_the_cpu():
    with left(exchanges(2)) as pair:
        for exchange in pair:
            exchange.rendezvous.members = {worker: Member(this_host(), 0, "", "GPU-1") for worker in (0, 1)}
            exchange._device = torch.device("cuda:0")
            exchange.rendezvous.require_running = lambda members: None
        both_give(pair)
        assert all(isinstance(exchange.groups[0, 1].backend, GlooGroup) for exchange in pair)


# Exchanges


def test_a_failure_travels_in_place_of_a_tensor(pair):
    first, second = pair
    with ThreadPoolExecutor(1) as threads:
        giving = threads.submit(give, first, FAILING)
        assert give(second).failure == FAILING.failure
        assert giving.result(60) is None


@pytest.mark.parametrize("pair", ["gloo"], indirect=True)
def test_a_collective_ends_when_a_member_is_lost_and_so_does_its_group(pair):
    """As where the dispatcher gives up a worker that is stopped."""
    both_give(pair)
    reduced = [task_of(0, torch.ones(2), over("- + x"), over("-"))]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: pair[0].begin(reduced).finish())
        pair[0].lose_worker(1)
        with pytest.raises(RuntimeError, match="worker 1 is lost"):
            waiting.result(10)
    with pytest.raises(RuntimeError, match="exchange nothing any more: worker 1 is lost"):
        pair[0].begin(reduced)


def test_the_worker_that_hosts_the_store_is_required_too(pair):
    assert pair[1].required_workers((1, 2)) == (1, 2, 0)


def test_workers_that_have_left_meet_again_under_other_ids(pair):
    """As workers do that were given up by mistake: nothing of the former groups is used."""
    both_give(pair)
    for exchange in pair:
        exchange.leave()
        assert exchange.groups == {}
    with left(exchanges(2, pair[0]._transport)) as again:
        both_give(again)
