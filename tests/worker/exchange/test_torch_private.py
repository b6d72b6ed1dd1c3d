"""Canaries for the private parts of torch.distributed: each message says what breaks in GT where torch changes one."""

from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from gt.worker.exchange import torch_private as private


def listening():
    found = psutil.Process().net_connections("inet")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == "LISTEN"}


def test_a_gloo_group_listens_at_the_given_interface_only():
    before = listening()
    group = private.make_gloo_group(dist.HashStore(), 0, 1, "127.0.0.1", timedelta(seconds=10))
    new = listening() - before
    assert {ip for ip, _ in new} == {"127.0.0.1"}, "process_groups.py: other machines could connect to workers"
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait(timedelta(seconds=10))
    assert tensor.tolist() == [1, 1]


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_nccl_has_coalescing_and_a_timeout():
    message = "group_backends.py: sends and receives between GPUs would wait for each other"
    assert hasattr(dist.ProcessGroupNCCL, "_start_coalescing"), message
    assert hasattr(dist.ProcessGroupNCCL, "_end_coalescing"), message
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(hours=1)
    assert options._timeout == timedelta(hours=1), "process_groups.py: groups of GPUs would end after ten minutes"
