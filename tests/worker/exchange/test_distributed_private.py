"""Canaries for the private parts of torch.distributed: each message says what breaks in GT where torch changes one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from gt.worker.exchange import distributed_private as private


def listening():
    found = psutil.Process().net_connections("inet")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == "LISTEN"}


SECOND = timedelta(seconds=1)
LONG = timedelta(seconds=60)


def gloo_pair(connect_timeout=LONG):
    """Two members of a Gloo group, which are threads."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        make = private.make_gloo_group
        made = [threads.submit(make, store, rank, 2, "127.0.0.1", connect_timeout, LONG) for rank in (0, 1)]
        return [each.result(60) for each in made]


def run_both(pair, call):
    """Call a function of rank and group in two threads."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(call, (0, 1), pair))


def test_a_gloo_group_listens_at_the_given_interface_only():
    before = listening()
    group = private.make_gloo_group(dist.HashStore(), 0, 1, "127.0.0.1", timedelta(seconds=10), LONG)
    new = listening() - before
    assert {ip for ip, _ in new} == {"127.0.0.1"}, "process_groups.py: other machines could connect to workers"
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait(timedelta(seconds=10))
    assert tensor.tolist() == [1, 1]


def test_a_collective_waits_longer_than_connecting_may_take():
    pair = gloo_pair(connect_timeout=SECOND)
    work = pair[0].allreduce([torch.ones(2)])
    for _ in range(8):
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait(SECOND / 4)
    message = "process_exchange.py: a worker that computes for a minute would fail the exchange of all others"
    assert not work.is_completed(), message
    pair[1].allreduce([torch.ones(2)]).wait(LONG)
    work.wait(LONG)


def test_a_wait_that_times_out_can_be_repeated():
    pair = gloo_pair()
    tensor = torch.ones(2)
    work = pair[0].allreduce([tensor])
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(SECOND / 100)
    pair[1].allreduce([torch.ones(2)]).wait(LONG)
    work.wait(LONG)
    assert tensor.tolist() == [2, 2], "process_groups.py: a collective could not look for lost members while it waits"


@pytest.mark.parametrize("aborting", [0, 1])
def test_an_aborted_group_ends_the_collectives_of_its_members(aborting):
    pair = gloo_pair()
    run_both(pair, lambda rank, group: group.allreduce([torch.ones(2)]).wait(LONG))
    work = pair[0].allreduce([torch.ones(2)])
    private.abort_gloo_group(pair[aborting])
    with pytest.raises(RuntimeError):
        work.wait(LONG)
    message = "process_groups.py: members that do not neighbour a lost one would wait for an hour"
    assert work.is_completed(), message


def test_bytes_are_gathered_in_the_order_of_ranks():
    def gather(rank, group):
        rows = torch.zeros(4, dtype=torch.uint8)
        private.all_gather_bytes(group, rows, torch.full((2,), rank + 1, dtype=torch.uint8)).wait(LONG)
        return rows.tolist()

    assert run_both(gloo_pair(), gather) == [[1, 1, 2, 2]] * 2, "collective_works.py: boxes of the wrong members"


def test_every_member_gives_each_member_its_share_of_bytes():
    def exchange(rank, group):
        rows = torch.zeros(4, dtype=torch.uint8)
        mine = torch.arange(4, dtype=torch.uint8) + 10 * rank
        private.all_to_all_bytes(group, rows, mine).wait(LONG)
        return rows.tolist()

    received = run_both(gloo_pair(), exchange)
    assert received == [[0, 1, 10, 11], [2, 3, 12, 13]], "collective_works.py: boxes of the wrong members"


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_nccl_has_coalescing_and_a_timeout():
    message = "group_backends.py: sends and receives between GPUs would wait for each other"
    assert hasattr(dist.ProcessGroupNCCL, "_start_coalescing"), message
    assert hasattr(dist.ProcessGroupNCCL, "_end_coalescing"), message
    names = ("abort", "_allgather_base", "alltoall_base", "eager_connect_single_device")
    assert [name for name in names if not hasattr(dist.ProcessGroupNCCL, name)] == [], "group_backends.py"
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(hours=1)
    assert options._timeout == timedelta(hours=1), "process_groups.py: groups of GPUs would end after ten minutes"
