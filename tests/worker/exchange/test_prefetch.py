"""Receives begin early: for the next command of a batch that receives, one at a time."""

import pytest
import torch

import gt
from gt.core.messages import FreeTensors, RunOp
from gt.core.signatures import Move, OpProgram, Whole
from gt.sharding.spec import DeviceMesh
from gt.sharding.spec_text import parse_spec
from gt.worker.bound_op_programs import BoundOpProgram
from gt.worker.engines import make_engine
from gt.worker.exchange.prefetch import ReceivePrefetch
from tests.dispatcher_harness import PAIR, at
from tests.records import ADD, SMALL, own

ENGINE = make_engine("pytorch")
AS_IT_IS, GET, SEND, TWICE, LATER = map(own, range(1, 6))


def over(text):
    return parse_spec(text, PAIR)


def program(*moves):
    steps = [Move(n, n + 1, SMALL, source.record(), target.record()) for n, (source, target) in enumerate(moves)]
    return OpProgram(tuple(steps), (0,), (len(moves),))


def kernel(worker, *moves):
    return BoundOpProgram(ENGINE, worker, "redistribute", program(*moves))


@pytest.mark.parametrize(
    ("worker", "moves", "receives"),
    [
        (1, [(at(0), at(1))], [{0: 16}]),
        (0, [(at(0), at(1))], [{}]),
        (0, [(over("x"), over("-"))], [{1: 8}]),
        (1, [(over("- + x"), over("-"))], [{0: 16}]),
        (0, [(over("-"), over("x"))], []),  # everybody has its part already
        (0, [(at(0), at(0))], []),
        (1, [(at(0), at(1)), (at(1), at(0))], None),
    ],
)
def test_a_program_knows_its_one_exchange(worker, moves, receives):
    steps = kernel(worker, *moves).exchanges
    assert (steps and [step.received for step in steps]) == receives


def test_a_program_without_moves_exchanges_nothing():
    whole = OpProgram((Whole(ADD, (0, 1), (2,)),), (0, 1), (2,))
    assert BoundOpProgram(ENGINE, 0, "aten.add.Tensor", whole).exchanges == []


KERNELS = {
    AS_IT_IS: object(),
    GET: kernel(1, (at(0), at(1))),
    SEND: kernel(1, (at(1), at(0))),
    TWICE: kernel(1, (at(0), at(1)), (at(1), at(0))),
}
(NEXT,) = KERNELS[GET].exchanges


def run(code):
    return RunOp(code, (), (), (), 0, 0)


@pytest.mark.parametrize(
    ("codes", "found"),
    [
        ([AS_IT_IS, GET], NEXT),
        ([AS_IT_IS, SEND, GET], NEXT),
        ([AS_IT_IS, SEND], None),
        ([AS_IT_IS, TWICE, GET], None),
        ([AS_IT_IS, LATER, GET], None),  # not defined yet
        ([GET, AS_IT_IS], None),  # begun already
        ([AS_IT_IS], None),
    ],
)
def test_the_next_receiving_command_is_found(codes, found):
    prefetch = ReceivePrefetch()
    following = prefetch.follow([run(code) if code else FreeTensors((own(9),)) for code in codes])
    next(following)
    assert prefetch.next_receive(KERNELS) == found


def test_each_receive_is_returned_once():
    prefetch = ReceivePrefetch()
    codes = [GET, TWICE, GET, GET]
    told = []
    for _ in prefetch.follow([run(code) for code in codes]):
        told.append(prefetch.next_receive(KERNELS))
    assert told == [None, NEXT, NEXT, None]


def on(worker):
    return DeviceMesh([1], ["w"], [worker])


def test_failures_among_prefetched_tensors_keep_their_positions(two_processes):
    wrong, right = gt.tensor([7]), gt.tensor([1])
    wrong, right = wrong.redistribute(on(0), "-"), right.redistribute(on(0), "-")
    source = gt.to(torch.arange(3.0)).redistribute(on(0), "-")
    made = [source[wrong if number % 3 == 1 else right] + number for number in range(12)]
    moved = [tensor.redistribute(on(1), "-") for tensor in made]
    back = [(tensor * 2).redistribute(on(0), "-") for tensor in moved]
    for number, tensor in enumerate(back):
        if number % 3 == 1:
            with pytest.raises(gt.OpError, match="out of bounds"):
                tensor.tolist()
        else:
            assert tensor.tolist() == [2.0 * (1 + number)]
    gt.synchronize()
