"""Moves of tensors from one layout to another, over every transport."""

import copy

import numpy as np
import pytest
import torch

from gt.core.messages import Failure
from gt.core.meta import TensorMeta, contiguous_strides
from gt.sharding.spec import DeviceMesh, compute_local_shape, local_slices, whole
from gt.sharding.spec_text import parse_spec
from gt.worker.engines import NumPyEngine, PyTorchEngine
from gt.worker.failed_value import FailedValue
from gt.worker.moves import Mover, run_moves
from tests.dispatcher_harness import PAIR, at, over
from tests.worker.exchange.transports import TRANSPORTS, run_over

ENGINES = {"pytorch": PyTorchEngine(), "numpy": NumPyEngine()}
FAILING = FailedValue(Failure(0, "aten.mm.default", (), 0, 1, "RuntimeError", "no value", ""))
OTHER = DeviceMesh([2], ["y"], [1, 2])
MANY = DeviceMesh([2, 2], ["a", "b"], [2, 0, 3, 1])


class Broken(PyTorchEngine):
    """An engine that has no memory left."""

    def empty(self, *operands):
        raise MemoryError("no memory")

    copy = empty

    def resolve(self, op):
        return self.empty


def fail(op, values, error):
    return FailedValue(Failure(0, op, (), 0, 1, type(error).__name__, str(error), ""))


def move(parts, shape, source, target, engines=None, dtype="float32", transport="memory"):
    """The parts that workers hold after a move, given those before. Each worker overwrites both parts when it is done,
    so that memory shared by mistake shows."""
    meta = TensorMeta(shape, contiguous_strides(shape), 0, dtype)
    after = {}

    def work(worker):
        engine = (engines or {}).get(worker, ENGINES["pytorch"])
        mover = Mover(engine, worker, meta, source, target)
        (result,) = yield from run_moves([mover], [parts.get(worker)], fail)
        after[worker] = result if isinstance(result, FailedValue) else copy.deepcopy(result)
        for tensor in (result, parts.get(worker)):
            if isinstance(tensor, torch.Tensor | np.ndarray):
                tensor[...] = 77

    workers = dict.fromkeys((*source.mesh.workers, *target.mesh.workers))
    run_over(transport, {worker: work(worker) for worker in workers})
    return after


def cut(value, spec):
    """The parts of a value; of a partial one, all but the first addend are zero."""
    parts = {w: value[local_slices(spec, tuple(value.shape), w)].clone() for w in spec.mesh.workers}
    for worker, part in parts.items():
        along = dict(zip(spec.mesh.axis_names, spec.mesh.coordinate(worker), strict=True))
        if any(along[axis] for axis in spec.partial):
            part.zero_()
    return parts


def layouts(size):
    return [
        at(0), at(1), over("-"), over("x"), over(f"x[0:1 1:{size}]"), over("- + x"), over("y", OTHER),
        over("- + y", OTHER), over("a b", MANY), over("b + a", MANY), whole(MANY, 1),
    ]  # fmt: skip


CHANGES = [
    pytest.param(size, source, target, id=f"{size}: {source} on {source.mesh} to {target} on {target.mesh}")
    for size in (1, 5)
    for source in layouts(size)
    for target in layouts(size)
    if not target.partial
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("size", "source", "target"), CHANGES)
def test_every_worker_gets_its_part_and_no_other_gets_anything(transport, engine, size, source, target):
    """Each part has memory of its own: writes to old or new parts of other workers do not reach it."""
    value = torch.arange(1.0, size + 1)
    parts = cut(value, source)
    if engine == "numpy":
        parts = {worker: part.numpy() for worker, part in parts.items()}
    after = move(parts, (size,), source, target, dict.fromkeys(range(4), ENGINES[engine]), transport=transport)
    expected = cut(value, target)
    assert {worker for worker, part in after.items() if part is not None} == expected.keys()
    for worker, part in expected.items():
        assert torch.equal(torch.as_tensor(after[worker]), part)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
@pytest.mark.parametrize("text", ["x", "-", "- + x"])
def test_an_empty_tensor_is_moved_without_an_exchange(shape, text):
    dims = [text.partition(" +")[0], *["-"] * (len(shape) - 1)]
    source = parse_spec(", ".join(dims) + (" + x" if "+" in text else ""), PAIR)
    after = {}
    meta = TensorMeta(shape, contiguous_strides(shape), 0, "float32")
    for worker in (0, 1):
        part = torch.zeros(compute_local_shape(source, shape, worker))
        work = run_moves([Mover(ENGINES["pytorch"], worker, meta, source, whole(PAIR, len(shape)))], [part], fail)
        with pytest.raises(StopIteration) as done:
            next(work)
        (after[worker],) = done.value.value
    assert [tuple(part.shape) for part in after.values()] == [shape, shape]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("source", [over("x"), over("- + x")], ids=str)
@pytest.mark.parametrize("target", [over("-"), over("x"), at(0), over("y", OTHER)], ids=str)
def test_a_failure_reaches_every_worker_that_needs_the_value(transport, source, target):
    parts = {0: FAILING, 1: torch.ones(compute_local_shape(source, (4,), 1))}
    after = move(parts, (4,), source, target, transport=transport)
    failures = [part.failure for part in after.values() if isinstance(part, FailedValue)]
    assert failures and set(failures) == {FAILING.failure}
    assert {worker for worker, part in after.items() if part is not None} == set(target.mesh.workers)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("source", [over("x"), over("- + x"), over("-")], ids=str)
@pytest.mark.parametrize("target", [over("-"), over("x"), at(0), over("x[0:3 3:4]")], ids=str)
def test_a_worker_without_memory_does_not_keep_the_others_waiting(transport, source, target):
    after = move(cut(torch.ones(4), source), (4,), source, target, {0: Broken()}, transport=transport)
    assert isinstance(after[0], FailedValue) and "no memory" in after[0].failure.message


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_narrow_dtypes_are_accumulated_in_wider_ones(dtype):
    """256 + 8 * 1 in bfloat16, addend by addend, stays 256."""
    mesh = DeviceMesh([9], ["x"], list(range(9)))
    kind = getattr(torch, dtype)
    big = 256.0 if dtype == "bfloat16" else 2048.0
    parts = {worker: torch.tensor([1.0 if worker else big], dtype=kind) for worker in range(9)}
    after = move(parts, (1,), over("- + x", mesh), over("-", mesh), dtype=dtype)
    assert {float(part) for part in after.values()} == {big + 8}


@pytest.mark.parametrize("kind", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
def test_a_value_that_is_made_partial_and_reduced_is_unchanged(kind, dtype):
    value = torch.tensor([1, 2, 3, 4, 5], dtype=getattr(torch, dtype))
    partial = over(f"- + x:{kind}")
    parts = move(cut(value, over("x")), (5,), over("x"), partial, dtype=dtype)
    after = move(parts, (5,), partial, at(1), dtype=dtype)
    assert after[0] is None and torch.equal(after[1], value)
