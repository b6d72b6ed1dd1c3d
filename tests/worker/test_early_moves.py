"""Moves within a program begin before the products that do not need them; and rounds never hold a whole operand."""

import pytest
import torch

from gt.core.meta import TensorMeta, contiguous_strides
from gt.core.signatures import AlgorithmRequest, Input, Signature
from gt.dispatcher.planner import plan_op
from gt.sharding.op_calls import OpCall
from gt.sharding.rules import rule_of
from gt.sharding.rules.support.product_algorithms import PRODUCT_ALGORITHMS
from gt.sharding.schedules import ScheduleProblem, find_schedule, schedule_cost
from gt.sharding.spec import DeviceMesh, local_slices
from gt.sharding.spec_text import parse_spec
from gt.sharding.strategies import OpOperand, OpResult
from gt.worker.bound_op_programs import BoundOpProgram
from gt.worker.engines import make_engine
from gt.worker.exchange.interface import EarlyTasks
from tests.worker.exchange.transports import TRANSPORTS, run_over

SIZE = 64
ALGORITHMS = {"ring": ("x, -", "x, -"), "cannon": ("x, -", "-, x"), "summa": ("x, -", "-, x")}
MATRIX = TensorMeta((SIZE, SIZE), contiguous_strides((SIZE, SIZE)), 0, "float32")


def plan_of(algo, workers=4, panel=0):
    """The plan of a product on a mesh, and the layouts of its operands."""
    mesh = DeviceMesh((workers,), ("x",))
    specs = [parse_spec(text, mesh) for text in ALGORITHMS[algo]]
    request = AlgorithmRequest(algo, panel)
    signature = Signature(
        "aten.matmul.default", (Input(0), Input(1)), {}, ((), ()), (), (MATRIX,), (0,), algorithm=request
    )
    return plan_op(signature, (MATRIX, MATRIX), specs, mesh), specs


def planned_memory(algo, panel):
    """The memory that the cost of the schedule says."""
    mesh = DeviceMesh((4,), ("x",))
    operands = [OpOperand(MATRIX.shape, 4, parse_spec(text, mesh), ()) for text in ALGORITHMS[algo]]
    call = OpCall("aten.matmul.default", (Input(0), Input(1)), {}, (MATRIX, MATRIX), (MATRIX,))
    problem = ScheduleProblem(rule_of(call), tuple(operands), OpResult(MATRIX.shape, 4, None), mesh, panel)
    schedule = find_schedule(algo, PRODUCT_ALGORITHMS, problem)
    return schedule_cost(schedule, problem.operands, problem.result).memory


def computations(plan, specs, values, trace):
    engine = make_engine("pytorch")
    for worker in plan.workers:
        bound = BoundOpProgram(engine, worker, "aten.matmul.default", plan.program)
        parts = [
            value[local_slices(spec, value.shape, worker)].clone() for value, spec in zip(values, specs, strict=True)
        ]
        inputs = [parts[position] for position, _ in plan.sources]
        yield worker, trace(worker, bound.run(inputs, (), fail), inputs)


def check(plan, results, values):
    """Each worker has its part of the product."""
    (_, spec) = plan.results[0]
    for worker, (found, _) in results.items():
        expected = (values[0] @ values[1])[local_slices(spec, (SIZE, SIZE), worker)]
        torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


def fail(op, values, error):
    raise error


def untraced(worker, computation, inputs):
    return computation


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_products_in_rounds_are_the_same_over_all_transports(algo, transport):
    values = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    plan, specs = plan_of(algo)
    results = run_over(transport, dict(computations(plan, specs, values, untraced)))
    check(plan, results, values)


class LateWork:
    """The results of an exchange, and the registers that a computation has had when it began and when it finished."""

    def __init__(self, computation, results):
        self._computation = computation
        self._results = results
        self.before = self._registers()
        self.after = set()

    def _registers(self):
        return set(self._computation.gi_frame.f_locals["registers"])

    def finish(self):
        self.after = self._registers()
        return self._results


@pytest.mark.parametrize(
    ("algo", "workers", "exchanges"),
    [("ring", 2, 1), ("ring", 4, 3), ("cannon", 4, 2), ("summa", 2, 1), ("summa", 4, 3)],
)
def test_the_moves_of_each_next_round_begin_before_the_product_of_this_one(algo, workers, exchanges):
    """Cannon's algorithm has two rounds on four workers, and shifts along both axes between them."""
    works = []

    def trace(worker, computation, inputs):
        tasks = next(computation)
        while True:
            reply = yield tasks
            if isinstance(tasks, EarlyTasks):
                reply = LateWork(computation, reply)
                works.append(reply)
            try:
                tasks = computation.send(reply)
            except StopIteration as end:
                return end.value

    values = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    plan, specs = plan_of(algo, workers)
    results = run_over("memory", dict(computations(plan, specs, values, trace)))
    check(plan, results, values)
    assert len(works) == workers * exchanges
    assert all(work.after - work.before for work in works), "a product, or a sum"


@pytest.mark.parametrize(("algo", "panel"), [("ring", 0), ("cannon", 0), ("summa", 4), ("summa", 16)])
def test_no_worker_holds_a_whole_operand(algo, panel):
    """The bytes of all tensors of a program but its inputs, at each exchange, on four workers."""
    most = 0

    def trace(worker, computation, inputs):
        nonlocal most
        own = {id(value) for value in inputs}
        results = None
        while True:
            try:
                tasks = next(computation) if results is None else computation.send(results)
            except StopIteration as end:
                return end.value
            registers = computation.gi_frame.f_locals["registers"]
            held = {id(value): value.nbytes for value in registers.values() if value is not None}
            most = max(most, sum(nbytes for ident, nbytes in held.items() if ident not in own))
            results = yield tasks

    plan, specs = plan_of(algo, panel=panel)
    run_over("memory", dict(computations(plan, specs, (torch.ones(SIZE, SIZE), torch.ones(SIZE, SIZE)), trace)))
    quarter = MATRIX.nbytes // 4
    windows = {"ring": 2 * quarter, "cannon": 4 * quarter}.get(algo, 2 * SIZE * max(panel, 1) * 4)
    assert 0 < most <= windows + 2 * quarter, "windows of this round and the next one, a product and the sum"
    assert most <= planned_memory(algo, panel)
