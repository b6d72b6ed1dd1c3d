"""Tasks of moves for tests of transports."""

from gt.core.messages import Failure
from gt.core.meta import TensorMeta, contiguous_strides
from gt.worker.engines import PyTorchEngine
from gt.worker.exchange.interface import MoveTask
from gt.worker.failed_value import FailedValue
from gt.worker.moves import Mover

ENGINE = PyTorchEngine()
FAILING = FailedValue(Failure(0, "aten.mm.default", (), 0, 1, "RuntimeError", "no value", ""))


def fail(op, values, error):
    return FailedValue(Failure(0, op, (), 0, 1, type(error).__name__, str(error), ""))


def dense(shape, dtype="float32"):
    return TensorMeta(shape, contiguous_strides(shape), 0, dtype)


def step_of(worker, meta, source, target):
    """One worker's view of a move of one step."""
    (step,) = Mover(ENGINE, worker, meta, source, target).steps
    return step


def task_of(worker, value, source, target, meta=None, engine=ENGINE):
    """A worker's task in a move of one step; `meta` is that of two floats unless given."""
    return MoveTask(engine, step_of(worker, meta or dense((2,)), source, target), value, fail)
