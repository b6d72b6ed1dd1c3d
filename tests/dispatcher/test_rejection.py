"""Instructions with unknown ids, or that do not fit the signature of their op, are rejected."""

import pytest
from msgspec.structs import replace

from gt.core.messages import FetchTensor, Located, LocateTensor, Lost, Rejected
from gt.core.signatures import AlgorithmRequest, MeshRecord
from tests.dispatcher_harness import (
    OP,
    OP2,
    REQUEST,
    REQUEST2,
    A,
    B,
    C,
    D,
    E,
    answers,
    at,
    harness_with,
    kind,
    query,
    run,
)
from tests.records import ADD, ADD_, RESIZE_, signature


@pytest.mark.parametrize(
    "instruction",
    [
        run(OP, (A, E), (C,)),
        run(OP2, (A, B), (C,)),
        query(OP, (A, E)),
        query(OP2, (A,)),
        FetchTensor(REQUEST, E),
        LocateTensor(REQUEST, E),
    ],
    ids=kind,
)
def test_an_unknown_id_is_rejected(instruction):
    harness = harness_with()
    harness.define(OP, ADD)
    (answer,) = answers(harness.tell(instruction))
    assert isinstance(answer, Rejected)
    assert answer.request == getattr(instruction, "request", 0)
    assert type(instruction).__name__ in answer.reason


def test_instructions_after_a_rejected_one_are_carried_out():
    harness = harness_with()
    batch = [FetchTensor(REQUEST, E), LocateTensor(REQUEST2, A)]
    sent = harness.dispatcher.instruct(1, batch, [])
    assert answers(sent)[1:] == [Located(REQUEST2, at(0).record())]


BOTH = signature("aten.x", 2, writes=(0, 1))


def by_algorithm(*workers):
    """ADD on a mesh of these workers."""
    return replace(ADD, algorithm=AlgorithmRequest("", 0, MeshRecord((2,), ("x",), workers)))


MISFITS = {
    "an output is missing": (ADD, run(OP, (A, B), ())),
    "an output too many": (ADD, run(OP, (A, B), (C, D))),
    "the new version is missing": (ADD_, run(OP, (A, B), ())),
    "a new version too many": (ADD_, run(OP, (A, B), (C, D))),
    "nothing to write to": (ADD_, run(OP, (), (C,))),
    "writes beyond its inputs": (signature("aten.x", 2, writes=(2,)), run(OP, (A, B), (C,))),
    "writes the same twice": (signature("aten.x", 2, writes=(0, 0)), run(OP, (A, B), (C, D))),
    "the new version of a query is missing": (RESIZE_, query(OP, (A, B), ())),
    "a new version of a query too many": (RESIZE_, query(OP, (A, B), (C, D))),
    "two new versions of one tensor": (BOTH, run(OP, (A, A), (C, D))),
    "two new versions of one tensor by a query": (BOTH, query(OP, (A, A), (C, D))),
    "one id for two new versions": (BOTH, query(OP, (A, B), (C, C))),
    "an algorithm on an unknown worker": (by_algorithm(0, 99), run(OP, (A, B), (C,))),
    "an algorithm on no mesh": (by_algorithm(0, 0, 0), run(OP, (A, B), (C,))),
}


@pytest.mark.parametrize(("defined", "instruction"), MISFITS.values(), ids=MISFITS.keys())
def test_an_op_that_does_not_fit_its_signature_is_rejected(defined, instruction):
    harness = harness_with()
    harness.define(OP, defined)
    (answer,) = answers(harness.tell(instruction))
    assert isinstance(answer, Rejected)
    assert harness.state.tensors.keys() == {A, B}, "what is rejected changes nothing"


def test_two_new_versions_of_one_tensor_are_rejected_for_a_cached_plan_too():
    harness = harness_with()
    harness.define(OP, BOTH)
    harness.tell(run(OP, (A, B), (C, D)))
    (answer,) = answers(harness.tell(run(OP, (C, C), (A, B))))
    assert isinstance(answer, Rejected) and "one tensor at two positions" in answer.reason


def test_an_op_on_a_lost_and_an_unknown_tensor_is_refused():
    harness = harness_with(2)
    harness.define(OP, ADD_)
    harness.lose(1)
    harness.tell(run(OP, (E, B), (C,)))
    (answer,) = answers(harness.tell(FetchTensor(REQUEST, C)))
    assert isinstance(answer, Lost | Rejected)
