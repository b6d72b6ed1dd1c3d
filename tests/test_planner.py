"""Where an op runs and what moves first, as text: `a:16@0,1` is a tensor of 16 bytes on workers 0 and 1, `a!` is
written, and a plan is `worker, tensor source->target, ...`."""

import copy

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gt.core.messages import WorkerInfo
from gt.dispatcher.planner import LostInput, NoWorkers, least_loaded, plan_op
from gt.dispatcher.state import State, Worker
from tests.records import meta


def arrange(held, workers=3):
    state = State({number: Worker(WorkerInfo(number, "cpu", "here", number)) for number in range(workers)})
    for text in held.split():
        name, _, rest = text.partition(":")
        size, _, homes = rest.partition("@")
        first, *copies = map(int, homes.split(","))
        state.place(ord(name), meta(int(size), dtype="uint8"), first)
        for worker in copies:
            state.copy(ord(name), worker)
    state.validate()
    return state


def plan(state, op):
    inputs = [ord(text[0]) for text in op.split()]
    worker, moves = plan_op(state, inputs, [place for place, text in enumerate(op.split()) if text.endswith("!")])
    return ", ".join([str(worker), *[f"{chr(ident)} {source}->{target}" for ident, source, target in moves]])


@pytest.mark.parametrize(
    ("held", "op", "expected"),
    [
        ("a:16@1 b:16@1", "a b", "1"),  # together: nothing moves
        ("a:16@1", "a a", "1"),
        ("a:16@0 b:8@1", "a b", "0, b 1->0"),  # apart: the smaller moves
        ("a:8@0 b:16@1", "a b", "1, a 0->1"),
        ("a:8@0 b:16@1", "b a", "1, a 0->1"),
        ("a:16@2 b:16@1", "a b", "1, a 2->1"),  # equal: they meet at the lowest id
        ("a:8@0 b:6@1 c:6@1", "a b c", "1, a 0->1"),  # two small ones outweigh a larger
        ("a:8@0 b:4@1 c:4@2", "a b c", "0, b 1->0, c 2->0"),
        ("a:8@0 b:6@1", "a b b", "0, b 1->0"),  # used twice, moved and counted once
        ("a:16@0,1 b:8@1", "a b", "1"),  # a copy is as good as the original
        ("a:16@1,0 b:8@0", "a b", "0"),
        ("a:8@1,2 b:16@0", "a b", "0, a 1->0"),  # moved from the original
        ("a:8@0,1 b:8@1,0", "a b", "0"),
        ("a:0@0 b:8@1", "a b", "1, a 0->1"),  # empty tensors cost nothing, and are moved all the same
    ],
)
def test_an_op_runs_where_the_fewest_bytes_move(held, op, expected):
    assert plan(arrange(held), op) == expected


@pytest.mark.parametrize(
    ("held", "op", "expected"),
    [
        ("a:16@1 b:8@1", "a! b", "1"),
        ("a:8@0 b:16@1", "a! b", "0, b 1->0"),  # however large the other is
        ("a:8@0 b:16@1", "b a!", "0, b 1->0"),
        ("a:8@0 b:16@1", "a! b!", "0, b 1->0"),  # of two, the first
        ("a:8@2 b:16@1,2", "a! b", "2"),
    ],
)
def test_an_op_that_writes_runs_where_its_target_is(held, op, expected):
    assert plan(arrange(held), op) == expected


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ("", "0"),
        ("a:8@0", "1"),
        ("a:8@0 b:8@1", "2"),
        ("a:8@0 b:6@1 c:7@2", "1"),
        ("a:8@0,1,2", "0"),  # copies count too
    ],
)
def test_an_op_without_inputs_runs_on_the_least_loaded_worker(held, expected):
    assert plan(arrange(held), "") == expected


def test_a_worker_that_is_not_ready_gets_no_work():
    state = arrange("a:8@0")
    state.workers[1].ready = False
    assert least_loaded(state) == 2


def test_no_workers_is_said():
    with pytest.raises(NoWorkers):
        least_loaded(arrange("", workers=0))


@pytest.mark.parametrize("op", ["a", "b a", "a! b", "b! a", "a z"])
def test_a_lost_input_is_named(op):
    state = arrange("a:8@1 b:8@0")
    state.lose_worker(1)
    with pytest.raises(LostInput) as lost:
        plan(state, op)
    assert (lost.value.ident, lost.value.worker) == (ord("a"), 1)


def test_a_copy_elsewhere_is_used_when_the_original_is_lost():
    state = arrange("a:8@1,2")
    state.lose_worker(1)
    assert plan(state, "a") == "2"


@pytest.mark.parametrize("op", ["z", "a z", "a! z", "z! a"])
def test_an_unknown_input_is_named(op):
    with pytest.raises(KeyError, match=str(ord("z"))):
        plan(arrange("a:8@0"), op)


WORKERS = 4
HOMES = st.lists(st.integers(0, WORKERS - 1), min_size=1, unique=True).map(lambda homes: ",".join(map(str, homes)))
TENSORS = st.lists(st.tuples(st.integers(0, 20), HOMES), min_size=1, max_size=6)
ARRANGEMENTS = TENSORS.map(lambda held: " ".join(f"{chr(97 + n)}:{size}@{at}" for n, (size, at) in enumerate(held)))


@st.composite
def situations(draw):
    """A state, maybe after losses, the inputs of an op, and those of them that it writes."""
    held = draw(ARRANGEMENTS)
    state = arrange(held, WORKERS)
    for worker in draw(st.sets(st.integers(0, WORKERS - 1), max_size=WORKERS - 1)):
        state.lose_worker(worker)
    inputs = draw(st.lists(st.sampled_from([ord(text[0]) for text in held.split()]), max_size=4))
    places = st.sets(st.integers(0, len(inputs) - 1)) if inputs else st.just(set())
    return state, inputs, sorted(draw(places))


def plan_if_possible(state, inputs, writes):
    assume(not state.lost.keys() & set(inputs))
    return plan_op(state, inputs, writes)


@given(situations())
def test_planning_changes_nothing(situation):
    before = copy.deepcopy(situation)
    try:
        plan_op(*situation)
    except LostInput:
        pass
    assert situation == before


@given(situations())
def test_after_the_moves_every_input_is_where_the_op_runs(situation):
    state, inputs, _ = situation
    worker, moves = plan_if_possible(*situation)
    assert worker in state.workers
    for ident, source, target in moves:
        assert source in state.homes[ident] and target == worker
        state.copy(ident, target)
    state.validate()  # nothing was moved to where it was already
    assert all(worker in state.homes[ident] for ident in inputs)


@given(situations())
def test_no_other_worker_would_need_fewer_bytes(situation):
    state, inputs, _ = situation
    _, moves = plan_if_possible(state, inputs, [])

    def missing(worker):
        return sum(state.metas[ident].nbytes for ident in set(inputs) if worker not in state.homes[ident])

    assert sum(state.metas[move.ident].nbytes for move in moves) == min(map(missing, state.workers))
