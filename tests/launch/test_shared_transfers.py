"""Large tensors between a client and two worker processes, through shared memory that is used again."""

import os
from pathlib import Path

import pytest
import torch

import gt
from gt.client import active_session
from gt.wire import payloads
from tests.subprocesses import wait_until

SIDE = 600  # 1.4 MB
LAYOUTS = ["x, -", "-, x", "-, -", "x[0:1 1:600], -", "-, x[0:600 600:600]"]


def large(side=SIDE):
    return torch.randn(side, side)


def over_both(value, layout):
    return gt.distribute(value, gt.mesh(2, ("x",)), layout)


def own_buffers():
    return {path.name for path in Path("/dev/shm").glob(f"gt-{os.getpid()}-*")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_large_tensor_goes_to_its_shards_and_comes_back(two_processes, layout):
    value = large()
    with gt.debug.comm() as moved:
        ours = over_both(value, layout)
        assert torch.equal(ours.cpu(), value)
    assert (moved.bytes, str(ours.spec)) == (0, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_large_tensor_whose_elements_share_memory_is_copied_as_torch_copies_it(two_processes, layout):
    expanded, stepped = large()[:1].expand(SIDE, SIDE), large(2 * SIDE)[::2, ::2].t()
    for value in (expanded, stepped, large().as_strided((SIDE, SIDE), (1, 1))):
        ours = over_both(value, layout)
        assert torch.equal(ours.cpu(), value) and ours.stride() == value.clone().stride()


def test_large_partial_values_are_reduced_as_workers_reduce_them(two_processes):
    value = large()
    product = over_both(value, "-, x") @ over_both(value, "x, -")
    assert product.spec.partial == ("x",)
    with gt.debug.comm() as moved:
        read = product.cpu()
    assert moved.bytes == 0
    assert torch.equal(read, product.redistribute(placements=[gt.Replicate()]).cpu())


def test_what_was_read_is_the_callers_own(two_processes):
    value, other = large(), large()
    ours, another = over_both(value, "x, -"), over_both(other, "x, -")
    first = ours.cpu()
    second = another.cpu()
    second.zero_()
    assert torch.equal(first, value) and torch.equal(another.cpu(), other)


def test_what_was_uploaded_may_be_changed_at_once(two_processes):
    value = large()
    ours = [over_both(value.fill_(number), layout) for number, layout in enumerate(LAYOUTS * 2)]
    assert [tensor[:, 0].unique().tolist() for tensor in ours] == [[number] for number in range(len(ours))]


def test_memory_is_used_again(two_processes):
    value = large()
    over_both(value, "-, -").cpu()
    before = len(own_buffers())
    for _ in range(20):
        assert torch.equal(over_both(value, "-, -").cpu(), value)
        gt.synchronize()  # the read waits for one of the workers
    assert len(own_buffers()) <= before + 2


def test_more_memory_than_the_limit_is_not_kept(two_processes, monkeypatch):
    monkeypatch.setattr(payloads, "MAX_KEPT", 1 << 20)
    value = large()
    for layout in LAYOUTS * 2:
        assert torch.equal(over_both(value, layout).cpu(), value)
    gt.synchronize()
    active_session.current().channel._payloads._pool.reserve(1, 1 << 18)
    active_session.current().channel._payloads._pool.discard(1)
    sizes = [path.stat().st_size for path in Path("/dev/shm").glob(f"gt-{os.getpid()}-*")]
    assert sum(sizes) <= 1 << 20


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_without_shared_memory_the_parts_go_with_the_messages(two_processes, layout, monkeypatch):
    monkeypatch.setattr(payloads.SharedBufferPool, "reserve", lambda *_: None)
    value = large()
    assert torch.equal(over_both(value, layout).cpu(), value)


def test_a_program_that_only_uploads_uses_its_memory_again(two_processes):
    value = large()
    for _ in range(5):
        over_both(value, "x, -")
    wait_for_uploads()
    before = len(own_buffers())
    for _ in range(40):
        over_both(value, "x, -")
        wait_for_uploads()
    assert len(own_buffers()) <= before


def wait_for_uploads():
    """Wait until no shared buffer of an upload is in use."""
    pool = active_session.current().channel._payloads._pool
    wait_until(lambda: active_session.current().inbox.collect_now() or not pool._used)
