"""Sessions with two worker processes: values, transfers, failures, and limits on how far a client runs ahead."""

import gc

import psutil
import pytest
import torch

import gt
from gt.client import active_session
from gt.core.environment import usable_cpus


def workers():
    return {info.worker: info for info in active_session.current().welcome.workers}


def workers_of(tensor):
    return tensor.spec.mesh.workers


def over_both(value, placement):
    return gt.distribute(value, gt.mesh(2, ("x",)), placement)


def test_tensors_are_spread_over_workers_and_moved_for_ops(two_processes):
    values = [torch.randn(50, 50) for _ in range(6)]
    ours = [gt.to(value) for value in values]
    assert {workers_of(tensor) for tensor in ours} == {(0,), (1,)}
    total = sum(a @ b for a, b in zip(ours[:-1], ours[1:], strict=True))
    torch.testing.assert_close(total.cpu(), sum(a @ b for a, b in zip(values[:-1], values[1:], strict=True)))


def test_the_smaller_operand_moves_and_stays_as_a_copy(two_processes):
    large, small = gt.to(torch.ones(100, 100)), gt.to(torch.ones(100))
    while workers_of(small) == workers_of(large):
        small = gt.to(torch.ones(100))
    home = workers_of(small)
    with gt.debug.comm() as first:
        result = large + small
    with gt.debug.comm() as second:
        result = large + small
    assert (workers_of(result), workers_of(small)) == (workers_of(large), home)
    assert (first.bytes, second.bytes) == (400, 0)
    small += 1
    assert workers_of(small) == home
    with gt.debug.comm() as third:
        assert (large + small).sum().item() == 30000
    assert third.bytes == 400


@pytest.mark.parametrize("placement", [gt.Shard(0), gt.Shard(1), gt.Replicate(), gt.Partial()], ids=str)
def test_tensors_over_both_workers_compute_as_whole_ones(two_processes, placement):
    value = torch.randn(7, 5)
    ours = over_both(value, placement)
    assert workers_of(ours) == (0, 1)
    torch.testing.assert_close((ours @ ours.t()).relu().cpu(), (value @ value.t()).relu())
    ours[1:, 2] *= 3
    value[1:, 2] *= 3
    torch.testing.assert_close(ours.cpu(), value)
    torch.testing.assert_close(ours.sum(0).softmax(0).cpu(), value.sum(0).softmax(0))


def test_bytes_that_move_are_those_that_were_planned(two_processes):
    ours = over_both(torch.ones(64, 64), gt.Shard(0))
    with gt.debug.comm() as comm:
        whole = ours.redistribute(ours.spec.mesh, gt.Replicate())
        gt.synchronize()
    half = 64 * 64 * 4 // 2
    assert comm.pairs == {(0, 1): half, (1, 0): half}
    assert [(event.kind, event.axis, event.bytes) for event in comm.events] == [("all-gather", "x", 2 * half)]
    assert whole.sum().item() == 64 * 64


def test_outputs_on_two_workers_are_moved_to_one(two_processes):
    targets = [gt.zeros(()), gt.zeros(())]
    while workers_of(targets[0]) == workers_of(targets[1]):
        targets[1] = gt.zeros(())
    torch.aminmax(gt.arange(5.0), out=tuple(targets))
    assert [target.item() for target in targets] == [0.0, 4.0]


def test_a_failure_of_one_shard_is_raised_and_the_others_go_on(two_processes):
    indices = over_both(torch.tensor([0, 1, 2, 7]), gt.Shard(0))  # the last is wrong: only one worker sees it
    bad = gt.arange(3.0)[indices]
    with pytest.raises(gt.OpError, match="out of (bounds|range)"):
        bad.sum().item()
    gt.synchronize()
    assert over_both(torch.ones(4), gt.Shard(0)).sum().item() == 4


def fails_on_both(placement):
    """Every worker fails, the second one late: it has something else to do first."""
    wrong = over_both(torch.tensor([7, 8, 9, 7]), placement)
    source = over_both(torch.arange(3.0), gt.Replicate())
    large = gt.rand(1000, 1000, mesh=gt.mesh(1, ("x",), workers=[1]))
    large = large @ large
    return source[wrong]


READS = {"all": lambda x: x, "sum": torch.sum, "half": lambda x: x[:2]}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("placement", [gt.Shard(0), gt.Replicate()], ids=str)
def test_a_failure_of_both_workers_that_was_read_is_not_raised_again(two_processes, placement, read):
    bad = fails_on_both(placement)
    with pytest.raises(gt.OpError, match="out of (bounds|range)"):
        READS[read](bad).tolist()
    gt.synchronize()


@pytest.mark.parametrize("placement", [gt.Shard(0), gt.Replicate()], ids=str)
def test_an_unread_failure_of_both_workers_is_raised_once(two_processes, placement):
    bad = fails_on_both(placement)
    with pytest.raises(gt.OpError, match="out of (bounds|range)"):
        gt.synchronize()
    gt.synchronize()
    with pytest.raises(gt.OpError, match="out of (bounds|range)"):
        bad.tolist()
    gt.synchronize()


def test_another_failure_of_the_same_line_is_raised_again(two_processes):
    for _ in range(3):
        fails_on_both(gt.Shard(0))
        with pytest.raises(gt.OpError, match="out of (bounds|range)"):
            gt.synchronize()
    gt.synchronize()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float64])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5)])
def test_every_kind_of_tensor_can_move(two_processes, dtype, shape):
    value = torch.ones(shape).to(dtype)
    ours = [gt.to(value) for _ in range(4)]
    base = gt.ones(64, dtype=dtype)
    for tensor in ours:
        torch.testing.assert_close(torch.logical_or(tensor, base[0]).cpu(), torch.logical_or(value, value.new_ones(())))


@pytest.mark.parametrize("size", [10, 100_000, 3_000_000])
def test_uploads_and_downloads_of_every_size(two_processes, size):
    value = torch.randn(size)
    assert torch.equal(gt.to(value).cpu(), value)
    assert torch.equal(gt.to(value)[1:].cpu(), value[1:])


def test_a_failure_travels_with_the_tensor_that_has_no_value(two_processes):
    bad = [gt.arange(3.0)[gt.tensor([7])] for _ in range(4)]
    good = [gt.ones(100, 1) for _ in range(4)]
    for tensor in [a + b for a in bad for b in good]:
        with pytest.raises(gt.OpError, match="out of bounds"):
            tensor.sum().item()
    gt.synchronize()
    assert sum(good).sum().item() == 400


def test_data_dependent_ops(two_processes):
    x = gt.tensor([0.0, 1.0, 0.0, 2.0])
    assert x.nonzero().flatten().tolist() == [1, 3]
    assert x[x > 0].tolist() == [1.0, 2.0]


def test_many_small_ops_keep_pace(two_processes):
    x = gt.zeros(4)
    for _ in range(20_000):
        x = x + 1
    assert x.tolist() == [20_000.0] * 4


def test_cores_are_divided(two_processes):
    if two_processes == "by hand":
        pytest.skip("workers that are started by hand are told how many cores to use")
    for info in workers().values():
        command = psutil.Process(info.pid).cmdline()
        assert command[command.index("--threads") + 1] == str(max(1, usable_cpus() // 2))


@pytest.mark.parametrize("rows", [2, 1 << 17], ids=["inline", "shared memory"])
def test_an_uploaded_tensor_can_grow(two_processes, rows):
    """Uploads are used where they arrive, in memory that cannot."""
    x = gt.to(torch.zeros(rows))
    with pytest.warns(UserWarning, match="resized"):
        torch.add(gt.ones(rows + 1), 1, out=x)
    assert x.shape == (rows + 1,)
    assert x.sum().item() == 2 * (rows + 1)


def test_each_worker_reports_its_ops_and_tensors(two_processes: str) -> None:
    mesh = gt.mesh(2)
    gc.collect()
    gt.synchronize()
    before = gt.debug.get_worker_stats()
    assert sorted(before) == [0, 1]
    x = gt.distribute(torch.ones(4, 8), mesh, [gt.Shard(0)])
    y = x + 1
    after = gt.debug.get_worker_stats()
    for worker in (0, 1):
        assert after[worker].ops > before[worker].ops
        assert after[worker].tensors >= before[worker].tensors + 2
        assert after[worker].bytes - before[worker].bytes >= x.shards()[worker].bytes + y.shards()[worker].bytes
        assert after[worker].restrided >= 0
    assert after[1].received[0] - before[1].received.get(0, 0) >= 64 or after[0].received[1] >= 64
    del x, y
    gc.collect()
    gt.synchronize()
    assert gt.debug.get_worker_stats()[0].bytes <= after[0].bytes
