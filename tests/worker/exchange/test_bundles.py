"""Several moves side by side are one exchange, and each of them fails by itself."""

import pytest
import torch

from gt.sharding.spec import DeviceMesh
from gt.worker.failed_value import FailedValue
from gt.worker.moves import Mover, run_moves
from tests.dispatcher_harness import over
from tests.worker.exchange.tasks import ENGINE, FAILING, dense, fail
from tests.worker.exchange.transports import PROCESS_TRANSPORTS, TRANSPORTS, kept_exchanges, run_over

TRIO = DeviceMesh([3], ["x"], [0, 1, 2])
GRID = DeviceMesh([2, 2], ["a", "b"], [0, 1, 2, 3])
PARTIAL, WHOLE, CUT = (over(text, TRIO) for text in ("- + x", "-", "x"))
LARGE = (30_000,)
MIXED = [
    ((6,), "float32", PARTIAL, WHOLE),
    (LARGE, "float32", PARTIAL, WHOLE),
    ((7,), "float64", PARTIAL, WHOLE),
    (LARGE, "bfloat16", PARTIAL, WHOLE),
    ((9,), "int64", over("- + x:max", TRIO), WHOLE),
    ((6,), "float32", CUT, WHOLE),
    ((8,), "int8", CUT, WHOLE),
    ((6,), "float32", PARTIAL, CUT),
    ((6, 6), "uint8", over("x, -", TRIO), over("-, x", TRIO)),
    ((5, 4), "bool", over("x, -", TRIO), over("-, x", TRIO)),
]
BUCKET = [(shape, "float32", PARTIAL, WHOLE) for shape in ((5,), LARGE, (0,), (21,), (1,))]


def parts_of(moves, worker):
    generator = torch.Generator().manual_seed(worker)
    made = []
    for shape, dtype, source, _ in moves:
        local = [stop - start for start, stop in local_box_of(source, shape, worker)]
        made.append(torch.randint(0, 50, local, generator=generator).to(getattr(torch, dtype)))
    return made


def local_box_of(spec, shape, worker):
    return [spec.intervals(shape, dim)[worker if spec.dims[dim] else 0] for dim in range(len(shape))]


def run_bundle(transport, moves, failing=(), together=True):
    """The parts of each worker after moves; `failing` are pairs of worker and position without a value."""

    def work(worker):
        movers = [Mover(ENGINE, worker, dense(shape, dtype), *specs) for shape, dtype, *specs in moves]
        values = parts_of(moves, worker)
        values = [FAILING if (worker, position) in failing else value for position, value in enumerate(values)]
        if together:
            return (yield from run_moves(movers, values, fail))
        results = []
        for mover, value in zip(movers, values, strict=True):
            results += yield from run_moves([mover], [value], fail)
        return results

    return run_over(transport, {worker: work(worker) for worker in range(3)})


def assert_same(found, expected):
    for worker, parts in expected.items():
        for got, part in zip(found[worker], parts, strict=True):
            assert isinstance(got, FailedValue) == isinstance(part, FailedValue)
            if isinstance(part, FailedValue):
                assert got.failure == part.failure
            else:
                assert got.dtype == part.dtype and torch.equal(got, part)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("moves", [MIXED, BUCKET], ids=["mixed", "bucket"])
def test_moves_side_by_side_give_what_they_give_one_by_one(transport, moves):
    assert_same(run_bundle(transport, moves), run_bundle("memory", moves, together=False))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("moves", [MIXED, BUCKET], ids=["mixed", "bucket"])
@pytest.mark.parametrize("worker", [0, 2])
def test_a_failure_fails_its_own_task_only(transport, moves, worker):
    for position in range(len(moves)):
        failing = {(worker, position)}
        assert_same(run_bundle(transport, moves, failing), run_bundle("memory", moves, failing, together=False))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_failures_of_several_workers_fail_their_own_tasks(transport):
    failing = {(0, 0), (1, 1), (2, 3), (0, 3), (1, 5)}
    assert_same(run_bundle(transport, MIXED, failing), run_bundle("memory", MIXED, failing, together=False))


def counts(transport, run):
    """The ways that worker 0 went in a run."""
    exchange = kept_exchanges(transport)[0]
    before = exchange.ways()
    run()
    return {way: count - before.get(way, 0) for way, count in exchange.ways().items() if count != before.get(way, 0)}


@pytest.mark.parametrize(
    ("transport", "ways"), [("shared", {"shared memory": 1}), ("gloo", {"gloo all-reduce": 1})], ids=str
)
def test_a_bucket_is_one_exchange(transport, ways):
    assert counts(transport, lambda: run_bundle(transport, BUCKET)) == ways


def test_moves_of_several_kinds_are_one_exchange_of_each_way():
    ways = counts("gloo", lambda: run_bundle("gloo", MIXED))
    assert ways == {
        "gloo all-reduce": 1,
        "gloo all-to-all and all-gather": 1,
        "gloo all-gather": 1,
        "gloo all-to-all": 1,
        "gloo point-to-point": 1,
    }


@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
def test_moves_along_different_axes_are_exchanges_of_their_own_groups(transport):
    """Groups overlap in members; every worker is in one of each axis."""
    moves = [
        ((4, 4), "float32", over("-, - + a", GRID), over("-, -", GRID)),
        ((4, 4), "float32", over("-, - + b", GRID), over("-, -", GRID)),
        ((4, 4), "float32", over("-, - + a b", GRID), over("-, -", GRID)),
        ((4, 4), "float32", over("a, b", GRID), over("b, a", GRID)),
        ((4, 4), "float32", over("a, b", GRID), over("-, -", GRID)),
    ]

    def work(worker):
        movers = [Mover(ENGINE, worker, dense(shape, dtype), *specs) for shape, dtype, *specs in moves]
        values = [torch.full(mover.steps[0].before.shape, 2.0**worker) for mover in movers]
        return (yield from run_moves(movers, values, fail))

    found, expected = [run_over(way, {worker: work(worker) for worker in range(4)}) for way in (transport, "memory")]
    assert_same(found, expected)
