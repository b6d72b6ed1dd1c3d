"""Bound ops and programs as lists of calls: the calls of an op give what the op gives."""

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import gt
from gt.core.meta import TensorMeta
from gt.core.signatures import Input, Move, OpProgram, Signature, Whole
from gt.worker.bound_op_programs import BoundOpProgram
from gt.worker.bound_ops import BoundOp, UnavailableOp
from gt.worker.compilation.flattened_ops import CannotFlatten, FlattenedOp, flatten_op
from gt.worker.engines.pytorch_engine import PyTorchEngine
from tests.dispatcher_harness import at

ENGINE = PyTorchEngine("cpu")
META = TensorMeta((4,), (1,), 0, "float32")


def signature(op: str, *, writes: tuple[int, ...] = (), count: int = 1) -> Signature:
    outputs = () if writes else (META,)
    return Signature(op, tuple(map(Input, range(count))), {}, (), writes, outputs, tuple(range(len(outputs))))


def test_an_op_is_one_call() -> None:
    bound = BoundOp(ENGINE, signature("aten.add.Tensor", count=2))
    flattened = flatten_op(bound, 2)
    (call,) = flattened.calls
    assert (call.signature, call.inputs, call.outputs) == (bound.signature, (0, 1), (2,))
    assert flattened.gives == (2,)


def test_the_output_for_a_written_tensor_is_the_written_input() -> None:
    flattened = flatten_op(BoundOp(ENGINE, signature("aten.add_.Tensor", writes=(0,), count=2)), 2)
    assert flattened.calls[0].outputs == ()
    assert flattened.gives == (0,)


def test_the_registers_of_a_program_are_numbered_by_inputs_and_results() -> None:
    neg, exp = signature("aten.neg.default"), signature("aten.exp.default")
    program = OpProgram((Whole(neg, (7,), (3,)), Whole(exp, (3,), (5,))), (7,), (5, 3))
    flattened = flatten_op(BoundOpProgram(ENGINE, 0, "aten.neg.default", program), 1)
    assert [(call.inputs, call.outputs) for call in flattened.calls] == [((0,), (1,)), ((1,), (2,))]
    assert flattened.gives == (2, 1)


def test_an_op_that_the_worker_does_not_have_has_no_calls() -> None:
    with pytest.raises(CannotFlatten, match="does not have it"):
        flatten_op(UnavailableOp(signature("aten.neg.default"), RuntimeError("none")), 1)


def test_an_exchange_has_no_calls() -> None:
    moved = OpProgram((Move(0, 1, META, at(0).record(), at(1).record()),), (0,), (1,))
    with pytest.raises(CannotFlatten, match="a step of kind Move"):
        flatten_op(BoundOpProgram(ENGINE, 0, "redistribute", moved), 1)


SHARDED = {
    "pointwise": lambda x, w: x.tanh() * 2.0 + 1.0,
    "a product": lambda x, w: x @ w,
    "views": lambda x, w: x.view(8, 2, 2).transpose(1, 2) + 1.0,
    "a norm": lambda x, w: torch.nn.functional.layer_norm(x, (4,)),
    "a write": lambda x, w: (x * 1.0).add_(x, alpha=0.5),
    "a cast in place": lambda x, w: (x * 1.0).gt_(0.0),
    "several results": lambda x, w: torch.stack(x.max(1).values.split(8)),
}


class Ran(NamedTuple):
    """A run of a program: its inputs before it, and its results."""

    program: BoundOpProgram
    inputs: list[torch.Tensor]
    scalars: tuple[float, ...]
    results: list[torch.Tensor]


@pytest.fixture
def ran(no_signals: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ran]]:
    """The programs that run meanwhile, on rows sharded over two workers."""
    seen: list[Ran] = []
    original = BoundOpProgram.run

    def run(self: BoundOpProgram, inputs: Any, scalars: Any, *rest: Any) -> Generator[Any, Any, Any]:
        before = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
        results, untouched = yield from original(self, inputs, scalars, *rest)
        seen.append(Ran(self, before, scalars, [result.clone() for result in results]))
        return results, untouched

    monkeypatch.setattr(BoundOpProgram, "run", run)
    gt.init(workers=2, mode="virtual")
    gt.register_config("rows", gt.SignalConfig(shard=gt.ShardConfig(axis=0, workers=[0, 1])))
    yield seen
    gt.shutdown()


@torch.inference_mode()
def run_calls(flattened: FlattenedOp, inputs: list[torch.Tensor], scalars: tuple[float, ...]) -> list[torch.Tensor]:
    registers = dict(enumerate(inputs))
    for call in flattened.calls:
        made = BoundOp(ENGINE, call.signature).call([registers[number] for number in call.inputs], scalars)
        registers.update(zip(call.outputs, made, strict=False))
    return [registers[number] for number in flattened.gives]


@pytest.mark.parametrize("case", SHARDED)
def test_the_calls_of_a_program_give_what_the_program_gives(case: str, ran: list[Ran]) -> None:
    with gt.signal.context("rows"):
        SHARDED[case](gt.to(torch.randn(8, 4)), gt.to(torch.randn(4, 4))).cpu()
    compared = 0
    for program, inputs, scalars, expected in ran:
        try:
            flattened = flatten_op(program, len(inputs))
        except CannotFlatten:
            continue
        torch.testing.assert_close(run_calls(flattened, inputs, scalars), expected, check_stride=False)
        compared += 1
    assert compared
