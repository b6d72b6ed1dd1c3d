"""Private parts of torch.distributed for workers. tests/worker/exchange/test_distributed_private.py tries each."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_UNUSED_TAG = 1  # sends have the tag 0


def make_gloo_group(
    store: dist.Store, rank: int, size: int, interface: str, connect_timeout: timedelta, timeout: timedelta
) -> Any:
    """A Gloo group that listens at one interface. Groups made by torch's public functions listen at others too. Members
    must be connected within `connect_timeout`; a collective may take as long as `timeout`."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = connect_timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=interface)]
    group = dist.ProcessGroupGloo(store, rank, size, options)
    group.set_timeout(timeout)
    return group


def make_nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def abort_gloo_group(group: Any) -> None:
    """Close all connections, so that members which wait in a collective get an error. The group's own `abort` leaves
    them open; a receive that times out closes them."""
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


def start_coalescing(group: Any) -> None:
    """Collect the sends and receives that follow, instead of launching each by itself."""
    group._start_coalescing()


def end_coalescing(group: Any) -> Any:
    """Launch the collected sends and receives; returns the work that is done with the last of them."""
    return group._end_coalescing()


def all_gather_bytes(group: Any, rows: torch.Tensor, mine: torch.Tensor) -> Any:
    """Every member gets the bytes of all members, in the order of ranks."""
    return group._allgather_base(rows, mine)


def all_to_all_bytes(group: Any, rows: torch.Tensor, mine: torch.Tensor) -> Any:
    """Every member gives each member an equal share of its bytes, and gets one from each."""
    return group.alltoall_base(rows, mine, [], [], dist.AllToAllOptions())
