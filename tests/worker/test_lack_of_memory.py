"""A worker whose memory runs out at any allocation lives, tells the failure on the user's line, and does the next op.

The kernel refuses the memory: a limit of the workers' address space grows step by step, so that each allocation of an
op is the first that fails in turn.
"""

import contextlib
import gc
import resource
import time

import psutil
import pytest
import torch

import gt
from gt.worker.exchange.watched_waits import IDLE_LOOKS, LOOK_SECONDS

MIB = 1 << 20
COUNT = (
    10 * MIB
)  # float32 elements: glibc takes memory of this size from the kernel, and gives it back when it is freed
STEP = 20 * MIB
STEPS = 32
UNLIMITED = resource.RLIM_INFINITY


@contextlib.contextmanager
def limited(room):
    """The workers may take so many bytes more."""
    pids = [worker.pid for worker in gt.workers()]
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_AS, (psutil.Process(pid).memory_info().vms + room, UNLIMITED))
    try:
        yield
    finally:
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_AS, (UNLIMITED, UNLIMITED))


def ready(tensor):
    gt.synchronize()
    return tensor


def given(layout, shape=(4, COUNT // 2)):
    """An argument of the op under test, complete before the limit."""
    return lambda mesh: ready(gt.distribute(torch.arange(shape[0] * shape[1]).view(shape) % 7.0, mesh, layout))


OPS = {
    "upload": (given("-, -", (1, 1)), lambda a, mesh: gt.to(torch.ones(COUNT)) + 1),
    "upload of shards": (given("-, -", (1, 1)), lambda a, mesh: gt.distribute(torch.ones(4, COUNT // 2), mesh, "x, -")),
    "result": (given("-, -", (2, COUNT // 2)), lambda a, mesh: a + 1),
    "result on shards": (given("x, -"), lambda a, mesh: a * 3),
    "several results": (given("x, -"), lambda a, mesh: a.sort(1)[0]),
    "query": (given("-, -", (2, COUNT // 2)), lambda a, mesh: a[a > 3]),
    "gather": (given("x, -"), lambda a, mesh: a.redistribute(mesh, "-, -")),
    "all-to-all": (given("x, -"), lambda a, mesh: a.redistribute(mesh, "-, x")),
    "reduction": (given("x, -"), lambda a, mesh: a.sum(0).redistribute(mesh, "-")),
    "write": (given("x, -"), lambda a, mesh: a.copy_(a.flip(0))),
    "write through a view": (given("x, -"), lambda a, mesh: a.copy_(torch.cumsum(a[:, ::2].repeat(1, 2), 1))),
    "random numbers": (given("x, -"), lambda a, mesh: torch.rand_like(a)),
    "read": (given("x, -"), lambda a, mesh: a.cpu()),
    "random numbers in place": (given("x, -"), lambda a, mesh: a.uniform_()),
}


def test_an_exchange_after_a_pause_without_any_memory_ends():
    """A thread that looks for lost members during an exchange could not begin, and its start was awaited for good."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GT_TRANSPORT", "gloo")
        gt.init(workers=2)
        mesh = gt.mesh((2,), ("x",))
        x = gt.distribute(torch.arange(5.0), mesh, "x")
        assert (x * 2).redistribute(mesh, "-").sum().item() == 20
        time.sleep((IDLE_LOOKS + 10) * LOOK_SECONDS)
        with limited(0), contextlib.suppress(RuntimeError):
            x.redistribute(mesh, "-").sum().item()
        assert (x * 3).redistribute(mesh, "-").sum().item() == 30
        gt.shutdown()


def test_a_first_read_over_the_network_starts_no_thread(monkeypatch):
    """There may be no memory for one: its start is then awaited without end."""
    monkeypatch.setenv("GT_TRANSPORT", "gloo")
    gt.init(workers=1)
    process = psutil.Process(gt.workers()[0].pid)
    x = ready(gt.ones(COUNT))
    threads = process.num_threads()
    assert x.cpu().sum() == COUNT
    assert process.num_threads() == threads
    gt.shutdown()


@pytest.fixture(scope="module", params=["shared", "gloo"])
def mesh_of_two(request):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GT_TRANSPORT", request.param)
        environment.setenv("MALLOC_ARENA_MAX", "1")  # others reserve 64 MB, which the limit of addresses does not see
        gt.init(workers=2)
        yield gt.mesh((2,), ("x",))
        gt.shutdown()


def run(name, mesh, room=None, expected=None):
    """The value of an op, or its error. A tensor that can be read after an error has the right value."""
    make, op = OPS[name]
    gc.collect()  # errors of earlier runs hold their tensors
    argument = make(mesh)
    torch.manual_seed(1)
    error = result = None
    with limited(room) if room is not None else contextlib.nullcontext():
        try:
            result = op(argument, mesh)
            gt.synchronize()
        except (RuntimeError, MemoryError) as raised:
            error = raised
    if error is None:
        return result.cpu()
    if result is not None:
        with contextlib.suppress(type(error)):
            torch.testing.assert_close(result.cpu(), expected)
    return error


@pytest.mark.parametrize("name", OPS)
def test_each_allocation_of_an_op_may_fail(mesh_of_two, name):
    mesh = mesh_of_two
    pids = [worker.pid for worker in gt.workers()]
    bystander = gt.distribute(torch.arange(8.0), mesh, "x")
    expected = run(name, mesh)
    failures = 0
    for step in range(STEPS):
        found = run(name, mesh, MIB + step * STEP, expected)
        assert bystander.sum().item() == 28, "an op of other tensors"
        assert [worker.pid for worker in gt.workers()] == pids
        if isinstance(found, torch.Tensor):
            torch.testing.assert_close(found, expected)
            break
        failures += 1
        assert "test_lack_of_memory.py" in str(found).partition("\n")[0], found
        assert "memory" in str(found)
    assert step < STEPS - 1
    assert failures or name in ("upload", "upload of shards", "read"), "only these may find memory of an earlier run"


def test_a_write_to_tensors_that_did_not_fit_fails_too_until_one_fits(mesh_of_two):
    """A layer that is made empty, and is then too large for the workers."""
    bystander = gt.distribute(torch.arange(8.0), mesh_of_two, "x")
    weight = gt.empty(1 << 20, 1 << 22, mesh=mesh_of_two, placements="x, -")
    weight.zero_()
    with pytest.raises(gt.LimitError, match="has no room for 8.8 TB more"):
        weight[0, 0].item()
    with pytest.raises(gt.LimitError):
        weight.normal_()
        gt.synchronize()
    assert bystander.sum().item() == 28


def test_a_read_without_memory_in_the_program_ends_no_worker(mesh_of_two):
    pids = [worker.pid for worker in gt.workers()]
    large = ready(gt.ones(COUNT))
    bystander = gt.distribute(torch.arange(8.0), mesh_of_two, "x")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 30 * MIB, before[1]))
    try:
        with pytest.raises(MemoryError, match=r"has no memory to read 41.9 MB: .* read parts of the tensor"):
            large.cpu()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert bystander.sum().item() == 28
    assert [worker.pid for worker in gt.workers()] == pids
    assert large.cpu().sum() == COUNT
