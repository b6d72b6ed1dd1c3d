"""A worker refuses what does not fit into its memory, and says who holds it."""

import numpy as np
import pytest
import torch

import gt
from gt.core.errors import LimitError
from gt.core.tables import print_bytes
from gt.worker.engines import ENGINES, make_engine
from gt.worker.engines.host_memory_size import available_memory, host_memory
from gt.worker.failed_value import FailedValue
from gt.worker.memory_guard import LARGE_BYTES, MemoryGuard
from tests.records import FAILURE, own
from tests.subprocesses import finish, running, start, start_server, wait_for_workers

MIB = 1 << 20
LIMIT = 16 * MIB


@pytest.fixture(params=ENGINES)
def engine(request):
    return make_engine(request.param)


def value(engine, nbytes):
    made = np.zeros(nbytes, np.uint8)
    return made if type(engine).__name__ == "NumPyEngine" else torch.from_numpy(made)


def test_what_fits_is_reserved_and_what_does_not_names_the_holders(engine):
    tensors = {own(1, 1): value(engine, 8 * MIB), own(1, 2): value(engine, 4 * MIB), own(2, 2): FailedValue(FAILURE)}
    guard = MemoryGuard(3, engine, tensors, LIMIT)
    guard.reserve(4 * MIB)
    with pytest.raises(LimitError, match="worker 3 has no room for 8.39 MB more: 4.19 MB are left") as raised:
        guard.reserve(8 * MIB)
    assert "session 1 8.39 MB, session 2 4.19 MB" in str(raised.value)
    del tensors[own(1, 1)]
    guard.reserve(8 * MIB)


def test_memory_that_tensors_share_counts_once(engine):
    shared = value(engine, 8 * MIB)
    guard = MemoryGuard(0, engine, {own(1): shared, own(2): shared}, LIMIT)
    assert guard.held_by_session() == {1: 8 * MIB}
    guard.reserve(8 * MIB)


def test_the_memory_is_looked_at_only_when_half_of_what_was_left_is_given_away(engine, monkeypatch):
    looks = []
    guard = MemoryGuard(0, engine, {}, LIMIT)
    monkeypatch.setattr(guard, "held_by_session", lambda: looks.append(1) or {})
    for _ in range(8):
        guard.reserve(MIB)
    assert len(looks) == 1
    guard.reserve(MIB)
    assert len(looks) == 2


def test_small_results_cost_nothing(engine):
    guard = MemoryGuard(0, engine, {}, LIMIT)
    assert guard.reserving(LARGE_BYTES - 1, abs) is abs
    assert guard.reserving(LARGE_BYTES, abs)(-1) == 1


@pytest.mark.parametrize(
    "error", [MemoryError("of NumPy"), RuntimeError("DefaultCPUAllocator: can't allocate memory"), OSError("other")]
)
def test_errors_of_allocators_say_who_holds_the_memory(engine, error):
    found = MemoryGuard(0, engine, {}, LIMIT).explained(error)
    if isinstance(error, OSError):
        assert found is error
    else:
        assert isinstance(found, LimitError) and "tensors hold nothing" in str(found) and found.__cause__ is error


def test_the_errors_of_gpus_are_turned_into_the_same(engine):
    found = MemoryGuard(0, engine, {}, LIMIT).explained(torch.cuda.OutOfMemoryError("CUDA out of memory"))
    assert isinstance(found, LimitError) and "CUDA out of memory" in str(found)


def test_the_memory_of_the_machine():
    assert 0 < available_memory() <= host_memory()


def test_a_tensor_larger_than_the_machine_is_refused_and_the_session_goes_on(anywhere):
    x = gt.zeros(1 << 44, dtype=torch.uint8)
    with pytest.raises(gt.LimitError, match="no room for") as raised:
        x.sum().item()
    assert "test_memory_guard.py" in str(raised.value).splitlines()[0]
    assert gt.ones(3).sum().item() == 3


CLIENT = """
import gt, sys
kept = []
try:
    for step in range(100):
        kept.append(gt.full((int(sys.argv[1]),), step, dtype=gt.uint8))
        kept[-1][:1].item()
except gt.LimitError as error:
    print(len(kept) - 1, str(error).replace(chr(10), " "))
assert [int(x[:1].item()) for x in kept[:-1]] == list(range(len(kept) - 1))
del kept
print(gt.ones(int(sys.argv[1]), dtype=gt.uint8).sum().item())
print(gt.workers())
"""


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("nbytes", [MIB, LARGE_BYTES // 2])
def test_a_worker_with_a_limit_refuses_what_is_over_it(backend, nbytes):
    server, port = start_server()
    memory = 8 * nbytes if nbytes >= LARGE_BYTES else 32 * nbytes
    worker = start("-m", "gt.worker", "-p", str(port), "--backend", backend, "--memory", str(memory))
    with running(server, worker):
        wait_for_workers(port, 1)
        code, out, err = finish(start("-c", CLIENT, str(nbytes), GT_SERVER=f"localhost:{port}"))
    assert code == 0, err
    refused, total, *listed = out.splitlines()
    fitting, _, text = refused.partition(" ")
    assert int(fitting) in (7, 8) if nbytes >= LARGE_BYTES else 30 <= int(fitting) < 99
    assert "has no room for" in text and "tensors hold session " in text
    assert int(total) == nbytes
    assert "memory" in listed[0] and print_bytes(memory) in listed[1]


def test_a_copy_that_had_no_room_is_made_when_there_is(four_workers, monkeypatch):
    mesh = gt.mesh(2, ("x",))
    x, w = gt.distribute(torch.ones(2048, 512), mesh, "x, -"), gt.to(torch.ones(512, 512))
    assert w.sum().item() == 512**2
    reserve, left = MemoryGuard.reserve, [1]

    def refuse_once(guard, nbytes):
        if nbytes >= MIB and left:
            left.pop()
            raise LimitError("no room")
        reserve(guard, nbytes)

    monkeypatch.setattr(MemoryGuard, "reserve", refuse_once)
    product = x @ w
    with pytest.raises(LimitError, match="no room"):
        product.sum().item()
    assert (x @ w).sum().item() == 2048 * 512**2
