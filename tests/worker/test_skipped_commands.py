"""Programs of ended sessions, left in the middle of any of their steps: the exchanges of all workers stay in step."""

import threading

import pytest
import torch

from gt.core.messages import RunOp, WorkerDefineProgram
from gt.sharding.spec import local_slices
from gt.worker.engines import make_engine
from gt.worker.executor import Executor
from gt.worker.failed_value import FailedValue
from tests.records import own
from tests.worker.exchange.transports import PROCESS_TRANSPORTS, exchanges, left
from tests.worker.test_early_moves import SIZE, plan_of

PRODUCT, A, B, RESULT = 90, 1, 2, 60


class Left(BaseException):
    """Raised where a thread would be left in the middle of an op."""


def prepared(worker, exchange, plan, parts):
    """An executor with this worker's parts of the operands, for two sessions."""
    executor = Executor(worker, make_engine("pytorch"), exchange, None, owns_buffers=True)
    for session in (1, 2):
        program = WorkerDefineProgram(own(PRODUCT, session), "aten.matmul.default", plan.program)
        executor.run([program], [])
        for ident, part in zip((A, B), parts, strict=True):
            executor.tensors[own(ident, session)] = part
    return executor


def product(session):
    inputs = own(A, session), own(B, session)
    return RunOp(own(PRODUCT, session), inputs, (own(RESULT, session),), (), 0, 0)


def run(executor):
    """The product of session 1, which may be left, and then that of session 2, by another thread."""
    with torch.inference_mode():
        try:
            executor.run([product(1), product(2)], [])
        except Left:
            executor.skipped.sessions.add(1)
            executor.resume()


def run_all(executors):
    threads = [threading.Thread(target=run, args=(executor,)) for executor in executors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def computing_steps(executor):
    return [step for step in executor.ops[own(PRODUCT)]._steps if hasattr(step, "_run")]


@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
@pytest.mark.parametrize("algo", ["ring", "summa"])
def test_a_program_that_is_left_takes_part_in_its_other_exchanges(algo, transport):
    values = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    plan, specs = plan_of(algo, 2)
    (_, spec) = plan.results[0]
    with left(exchanges(2, transport)) as found:
        executors = []
        for worker, exchange in enumerate(found):
            boxes = [local_slices(layout, (SIZE, SIZE), worker) for layout in specs]
            parts = [value[box].clone() for value, box in zip(values, boxes, strict=True)]
            executors.append(prepared(worker, exchange, plan, [parts[position] for position, _ in plan.sources]))
        steps = computing_steps(executors[0])
        assert len(steps) > 1
        for step in steps:
            step._run, whole = leave, step._run
            run_all(executors)
            step._run = whole
            assert isinstance(executors[0].tensors.pop(own(RESULT)), FailedValue)
            executors[1].tensors.pop(own(RESULT))
            for worker, executor in enumerate(executors):
                found = executor.tensors.pop(own(RESULT, 2))
                torch.testing.assert_close(found, (values[0] @ values[1])[local_slices(spec, (SIZE, SIZE), worker)])
                executor.skipped.sessions.clear()


def leave(values, scalars):
    raise Left
