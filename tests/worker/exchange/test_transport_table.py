"""Every transport gives what virtual workers get: for each kind of step, reduction and dtype, at sizes around the
limits, for values in other memory formats, and on both engines."""

import numpy as np
import pytest
import torch

from gt.core.meta import ITEM_BYTES, TensorMeta
from gt.sharding.spec import DeviceMesh, compute_local_shape
from gt.worker.engines import NumPyEngine
from gt.worker.exchange.process_groups import NATIVE_SUMS
from gt.worker.exchange.shared_memory_reductions import CHUNK_BYTES, ONE_SHOT_BYTES
from gt.worker.moves import Mover, run_moves
from tests.dispatcher_harness import at, over
from tests.worker.exchange.tasks import ENGINE, dense, fail
from tests.worker.exchange.transports import PROCESS_TRANSPORTS, run_over

FLOATS = ("float32", "float64", "bfloat16", "float16")
DTYPES = (*FLOATS, "int8", "uint8", "int32", "int64", "bool", "complex64")
REDUCTIONS = ("sum", "prod", "max", "min", "and", "or")
SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0, 0.0)
MESHES = {count: DeviceMesh([count], ["x"], list(range(count))) for count in (2, 3, 4)}


def can_reduce(reduction, dtype):
    if reduction in ("and", "or"):
        return dtype == "bool"
    return not (reduction in ("max", "min") and dtype == "complex64")


def random_values(shape, dtype, seed):
    """Values of a dtype, floats with some that are special."""
    source = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.rand(shape, generator=source) < 0.5
    if not kind.is_floating_point and not kind.is_complex:
        return torch.randint(-1000, 1000, shape, generator=source).to(kind)
    values = torch.randn(shape, generator=source, dtype=torch.float64).to(kind)
    if kind.is_floating_point:
        flat = values.view(-1)
        for number, special in enumerate(SPECIAL):
            flat[number + seed :: 97] = special
    return values


class Case:
    """One move: the parts of workers before it."""

    def __init__(self, shape, dtype, source, target, stride=None):
        self.meta = TensorMeta(shape, stride, 0, dtype) if stride else dense(shape, dtype)
        self.source, self.target = source, target
        shapes = {worker: compute_local_shape(source, shape, worker) for worker in source.mesh.workers}
        self.parts = {worker: random_values(size, dtype, worker) for worker, size in shapes.items()}
        if not source.partial:  # replicas are equal
            whole = random_values(shape, dtype, 7)
            self.parts = {
                worker: whole[tuple(slice(*each) for each in box_of(source, shape, worker))].clone()
                for worker in source.mesh.workers
            }

    def __str__(self):
        return f"{self.meta}: {self.source} on {self.source.mesh} to {self.target} on {self.target.mesh}"


def box_of(spec, shape, worker):
    return [spec.intervals(shape, dim)[worker if spec.dims[dim] else 0] for dim in range(len(shape))]


def results_of(transport, cases, engine=ENGINE):
    """The parts that each worker has after each case."""

    def work(worker):
        found = []
        for case in cases:
            value = case.parts.get(worker)
            if isinstance(engine, NumPyEngine) and value is not None:
                value = value.numpy().copy()
            elif value is not None:
                value = value.clone()
            mover = Mover(engine, worker, case.meta, case.source, case.target)
            (result,) = yield from run_moves([mover], [value], fail)
            found.append(torch.as_tensor(result) if isinstance(result, np.ndarray) else result)
        return found

    workers = sorted({worker for case in cases for spec in (case.source, case.target) for worker in spec.mesh.workers})
    return run_over(transport, {worker: work(worker) for worker in workers})


def bits(tensor, case):
    """The bytes of a tensor, all NaN alike. Torch's maximum of 0.0 and -0.0 is either, by the place in the tensor."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    if tensor.dtype.is_floating_point:
        tensor = torch.where(tensor.isnan(), torch.nan, tensor).to(tensor.dtype)
    if case.source.kind in ("max", "min"):
        tensor = torch.where(tensor == 0, 0, tensor)
    return tensor.contiguous().flatten().view(torch.uint8)


def rounds(transport, case):
    """Whether the group itself adds, in an order of its own."""
    return transport == "gloo" and case.source.kind == "sum" and case.meta.dtype in NATIVE_SUMS


def check(transport, cases, engine=ENGINE):
    """Compare a transport with virtual workers; where these may differ, two runs with each other."""
    expected, found = [results_of(way, cases, engine) for way in ("memory", transport)]
    again = results_of(transport, cases, engine) if any(rounds(transport, case) for case in cases) else found
    for worker, parts in expected.items():
        for case, part, got, repeated in zip(cases, parts, found[worker], again[worker], strict=True):
            if part is None:
                assert got is None, case
                continue
            assert (got.shape, got.dtype, got.stride()) == (part.shape, part.dtype, part.stride()), case
            assert torch.equal(bits(got, case), bits(repeated, case)), f"{case} is not repeated bit for bit"
            if rounds(transport, case):
                torch.testing.assert_close(got, part, equal_nan=True, rtol=1e-5, atol=1e-5, msg=str(case))
            else:
                assert torch.equal(bits(got, case), bits(part, case)), str(case)
            if case.target.is_whole:
                assert torch.equal(
                    bits(got, case), bits(found[case.target.mesh.workers[0]][cases.index(case)], case)
                ), str(case)


def sizes(dtype, count):
    """Around the limits: none, one, fewer than members, one shot."""
    limit = ONE_SHOT_BYTES // ITEM_BYTES[dtype]
    return (0, 1, count - 1, 5 * count + 1, limit, limit + 1)


@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
@pytest.mark.parametrize("count", MESHES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions(transport, count, reduction):
    mesh = MESHES[count]
    check(
        transport,
        [
            Case((size,), dtype, over(f"- + x:{reduction}", mesh), target)
            for dtype in DTYPES
            if can_reduce(reduction, dtype)
            for size in sizes(dtype, count)
            for target in (over("-", mesh), over("x", mesh), at(0))
            if size < 100 or target.is_whole
        ],
    )


@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
@pytest.mark.parametrize("count", MESHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_moves_without_reduction(transport, count, dtype):
    mesh = MESHES[count]
    irregular = " ".join(f"{number}:{number + 1}" for number in range(count - 1))
    cases = [Case((size,), dtype, over("x", mesh), over("-", mesh)) for size in sizes(dtype, count)]
    for rows, columns in ((2 * count, 3 * count), (2 * count + 1, count - 1), (count, 128 * count)):
        cut = over(f"x[{irregular} {count - 1}:{rows}], -", mesh)
        specs = [over(text, mesh) for text in ("x, -", "-, x", "-, -")]
        specs += [cut, at(0, 2), at(1, 2)]
        cases += [Case((rows, columns), dtype, source, target) for source in specs for target in specs]
    check(transport, cases)


@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_vectors_of_several_chunks(transport, dtype):
    size = CHUNK_BYTES // ITEM_BYTES[dtype] + 3
    check(transport, [Case((size,), dtype, over("- + x", MESHES[3]), over("-", MESHES[3]))])


@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool", "complex64"])
def test_numpy(transport, dtype):
    mesh = MESHES[3]
    reduction = "or" if dtype == "bool" else "sum"
    partial = over(f"- + x:{reduction}", mesh)
    cases = [Case((size,), dtype, partial, target) for size in sizes(dtype, 3) for target in (over("-", mesh), at(1))]
    cases += [Case((size,), dtype, over("x", mesh), over("-", mesh)) for size in sizes(dtype, 3)]
    cases += [Case((6, 9), dtype, over("x, -", mesh), over("-, x", mesh))]
    check(transport, cases, NumPyEngine())


CHANNELS_LAST = (60, 1, 15, 3)  # of (2, 3, 4, 5)


@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
@pytest.mark.parametrize("scale", [1, 64])  # of the batch: in one shot, and shared out
@pytest.mark.parametrize("target", ["-, -, -, -", "x, -, -, -", "-, -, x, -"])
@pytest.mark.parametrize("source", ["- , -, -, - + x", "x, -, -, -", "-, -, x, -"])
def test_memory_formats_and_values_with_gaps(transport, scale, source, target):
    """Values are in the memory format of the tensor, or have gaps, and results are always in that format."""
    shape = (4 * scale, 3, 4, 5)
    cases = [Case(shape, "float32", over(source), over(target), stride) for stride in (None, CHANNELS_LAST)]
    with_gaps = Case(shape, "float32", over(source), over(target), CHANNELS_LAST)
    with_gaps.parts = {worker: torch.stack([part, part], dim=-1)[..., 0] for worker, part in with_gaps.parts.items()}
    check(transport, [*cases, with_gaps])
