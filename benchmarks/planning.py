"""What planning costs: a cached op, and a matrix product on a 2-D mesh that is new, with 8 and with 200 workers.

    python benchmarks/planning.py

No workers run: the dispatcher plans and its messages are dropped. The aims are 5 us and 2 ms, however many workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gt.core.messages import ByteRange, CreateTensor, DefineOp, FreeTensors, Redistribute, RunOp
from gt.core.meta import TensorMeta, contiguous_strides
from gt.core.signatures import Input, Signature
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.planner import plan_op
from gt.sharding.spec import DeviceMesh, ShardingSpec

SESSION = 1 << 40
MESHES = {8: (2, 4), 200: (10, 20)}


def best(function: Callable[[], object], count: int, repeats: int = 7) -> float:
    """Microseconds of CPU for one call: planning waits for nothing."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(count):
            function()
        times.append((time.process_time() - start) / count)
    return min(times) * 1e6


def meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, contiguous_strides(shape), 0, "float32")


def product(m: int, k: int, n: int) -> Signature:
    return Signature("aten.mm.default", (Input(0), Input(1)), {}, ((), ()), (), (meta(m, n),), (0,))


def cached(workers: int) -> float:
    """A product whose plan is known, from the instruction to the command."""
    dispatcher = Dispatcher()
    for _ in range(workers):
        dispatcher.join_worker("cpu", "here", 1)
    for worker in dispatcher.state.workers:
        dispatcher.make_ready(worker)
    session = dispatcher.open_session("here", 1)
    mesh = DeviceMesh(MESHES[workers], ("x", "y"))
    layouts = [ShardingSpec(mesh, (("x",), ())), ShardingSpec(mesh, ((), ("y",)))]
    setup: list[object] = [DefineOp(SESSION + 1, product(400, 300, 200))]
    for place, (shape, layout) in enumerate(zip([(400, 300), (300, 200)], layouts, strict=True)):
        described = meta(*shape)
        setup.append(CreateTensor(SESSION + 10 + place, described, ByteRange("", described.nbytes), None, 0))
        setup.append(Redistribute(SESSION + 10 + place, SESSION + 20 + place, layout.record(), 0))
    dispatcher.instruct(session, setup, [b"", b""])  # type: ignore[arg-type]
    ids = iter(range(SESSION + 100, SESSION + 10_000_000))

    def plan() -> float:
        """Seconds of CPU for an op; what it makes is freed without being counted."""
        batch = [RunOp(SESSION + 1, (SESSION + 20, SESSION + 21), (next(ids),), (), 0, 0) for _ in range(500)]
        start = time.process_time()
        dispatcher.instruct(session, batch, [])
        seconds = time.process_time() - start
        dispatcher.instruct(session, [FreeTensors(tuple([op.outputs[0] for op in batch]))], [])
        return seconds / len(batch)

    return min([plan() for _ in range(20)]) * 1e6


def new(workers: int) -> float:
    """A product of shapes that were never seen, both operands cut along both axes."""
    mesh = DeviceMesh(MESHES[workers], ("x", "y"))
    blocks = ShardingSpec(mesh, (("x",), ("y",)))
    sizes = iter(range(400, 10_000_000))

    def plan() -> object:
        m = next(sizes)
        return plan_op(product(m, 300, 200), [meta(m, 300), meta(300, 200)], [blocks, blocks], mesh)

    plan()
    return best(plan, 20)


def main() -> None:
    for workers in MESHES:
        print(f"{workers:>4} workers   cached op {cached(workers):6.2f} us   new product {new(workers) / 1000:6.2f} ms")


if __name__ == "__main__":
    main()
