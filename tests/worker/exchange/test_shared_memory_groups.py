"""Exchanges through shared memory: memory is used again, also that of a lost member, and errors end a group."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gt.sharding.spec import DeviceMesh
from gt.worker.exchange import arena
from gt.worker.exchange.member_status import SLOTS, MemberGone
from gt.worker.exchange.shared_memory_reductions import CHUNK_BYTES
from gt.worker.failed_value import FailedValue
from tests.dispatcher_harness import at, over
from tests.worker.exchange.tasks import ENGINE, FAILING, dense, task_of
from tests.worker.exchange.transports import exchanges, left

TRIO = DeviceMesh([3], ["x"], [0, 1, 2])


@pytest.fixture
def trio():
    with left(exchanges(3, "shared")) as found:
        yield found


def reduce_of(worker, value, mesh=TRIO, engine=ENGINE):
    task = task_of(worker, value, over("- + x", mesh), over("-", mesh), dense(tuple(value.shape)), engine)
    return [task]


def reduce_all(found, size=4, mesh=TRIO):
    """An all-reduce of ones by all members."""
    with ThreadPoolExecutor(len(found)) as threads:
        act = lambda worker: found[worker].begin(reduce_of(worker, torch.ones(size), mesh)).finish()[0]
        return list(threads.map(act, range(len(found))))


def test_a_sender_is_ahead_of_its_readers_by_the_number_of_slots(trio):
    reduce_all(trio)
    meta = dense((2,))
    moves = [task_of(0, torch.full((2,), float(number)), at(0), over("-", TRIO), meta) for number in range(SLOTS - 1)]
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(lambda: [trio[0].begin([move]).finish() for move in moves])
        sent.result(10)
        receive = [lambda w=w: trio[w].begin([task_of(w, None, at(0), over("-", TRIO), meta)]).finish() for w in (1, 2)]
        for number in range(SLOTS - 1):
            assert [take()[0].tolist() for take in receive] == [[number, number]] * 2


def test_memory_is_used_again(trio):
    reduce_all(trio, size=100_000)
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(40):
        reduce_all(trio, size=100_000)
    assert len(os.listdir("/proc/self/fd")) == files
    assert max(exchange._arena._top for exchange in trio) < 4 << 20


def test_a_large_value_leaves_nothing_open(trio):
    pair = DeviceMesh([2], ["x"], [0, 1])
    size = (arena.KEPT_BYTES >> 2) + 10
    files = None
    for _ in range(3):
        with ThreadPoolExecutor(2) as threads:
            value = torch.zeros(size)
            act = lambda w: trio[w].begin(
                [task_of(w, value if w == 0 else None, at(0), over("-", pair), dense((size,)))]
            )
            (_, [taken]) = [work.finish() for work in threads.map(act, (0, 1))]
            assert len(taken) == size
        del taken
        files = files or len(os.listdir("/proc/self/fd"))
        assert len(os.listdir("/proc/self/fd")) == files


def lose(found, worker):
    for exchange in found:
        exchange.lose_worker(worker)


@pytest.mark.parametrize("size", [4, 100_000, CHUNK_BYTES // 2])
def test_a_lost_member_ends_the_exchange_and_the_group(trio, size):
    reduce_all(trio)
    lose(trio, 2)
    with ThreadPoolExecutor(2) as threads:
        act = lambda worker: trio[worker].begin(reduce_of(worker, torch.ones(size))).finish()
        for waiting in [threads.submit(act, worker) for worker in (0, 1)]:
            with pytest.raises(MemberGone):
                waiting.result(10)
    for exchange in trio[:2]:
        with pytest.raises(RuntimeError, match=r"workers \(0, 1, 2\) exchange nothing any more"):
            exchange.begin(reduce_of(0, torch.ones(4)))


def test_memory_that_a_lost_member_has_not_read_is_used_again(trio, monkeypatch):
    """The others exchange more bytes than may be unread."""
    monkeypatch.setattr(arena, "MAX_OUTSTANDING", 1 << 20)
    pair = DeviceMesh([2], ["x"], [0, 1])
    reduce_all(trio)
    reduce_all(trio[:2], mesh=pair)
    for number in range(4):  # to worker 2, which never takes them
        move = task_of(0, torch.full((1000,), float(number)), at(0), over("-", TRIO), dense((1000,)))
        trio[0].begin([move]).finish()
    lose(trio, 2)
    trio[1].groups[0, 1, 2].give_up(RuntimeError("worker 2 is lost"))
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert {float(total.sum()) for total in reduce_all(trio[:2], size=50_000, mesh=pair)} == {100_000}
    assert len(os.listdir("/proc/self/fd")) <= files
    assert len(trio[0]._arena._outstanding) < 6


class Raising(type(ENGINE)):
    """An engine whose reductions fail from the n-th on."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def resolve(self, op):
        def call(*operands, **options):
            self.count -= 1
            if self.count < 0:
                raise MemoryError("no memory")
            return ENGINE.resolve(op)(*operands, **options)

        return call


@pytest.mark.parametrize("count", range(3))
def test_a_member_that_fails_in_a_chunk_fails_the_sum_of_all(trio, count):
    """The second of three chunks, or the others: never a wrong value, and the group goes on."""
    size = CHUNK_BYTES // 4 * 2 + 5
    with ThreadPoolExecutor(3) as threads:
        engines = [ENGINE, Raising(2 * count), ENGINE]
        act = lambda worker: trio[worker].begin(reduce_of(worker, torch.ones(size), engine=engines[worker])).finish()
        for (result,) in threads.map(act, range(3)):
            assert isinstance(result, FailedValue) and result.failure.message == "no memory"
    assert [total.tolist() for total in reduce_all(trio)] == [[3, 3, 3, 3]] * 3


def test_a_worker_without_shared_memory_left_fails_its_exchange_only(trio, monkeypatch):
    reduce_all(trio)
    arena_of_one = trio[1]._arena

    def refuse(nbytes):
        raise OSError("No space left on device")

    for size in (4, 100_000):
        monkeypatch.setattr(arena_of_one, "allocate", refuse)
        assert all("No space" in result.failure.message for result in reduce_all(trio, size))
        monkeypatch.undo()
        assert [total[:1].tolist() for total in reduce_all(trio, size)] == [[3.0]] * 3


def test_an_error_between_the_number_and_the_publication_ends_the_waits_of_others(trio, monkeypatch):
    reduce_all(trio)

    def refuse(*_):
        raise RuntimeError("the store has ended")

    monkeypatch.setattr(trio[0].groups[0, 1, 2], "write_failure", refuse)
    failing = [task_of(0, FAILING, over("- + x", TRIO), over("-", TRIO), dense((4,)))]
    with ThreadPoolExecutor(3) as threads:
        waiting = [
            threads.submit(lambda w=w: trio[w].begin(failing if w == 0 else reduce_of(w, torch.ones(4))).finish())
            for w in range(3)
        ]
        for each in waiting:
            with pytest.raises(RuntimeError, match="store has ended|has given up"):
                each.result(10)


def test_workers_that_leave_and_come_again_share_other_memory():
    for _ in range(3):
        with left(exchanges(3, "shared")) as found:
            assert [total.tolist() for total in reduce_all(found)] == [[3, 3, 3, 3]] * 3


def test_nothing_is_open_after_leaving():
    def run():
        with left(exchanges(3, "shared")) as found:
            reduce_all(found, size=100_000)
            port = found[0].rendezvous
            del port
        found.clear()
        return len([path for path in os.listdir("/proc/self/fd") if is_memory(path)])

    assert run() == run()


def is_memory(descriptor):
    try:
        return "memfd:gt" in os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return False
