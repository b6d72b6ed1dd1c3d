"""Tensors and ops when a worker is lost, as list comparisons."""

import msgspec
import pytest

from gt.core.messages import (
    PREVIOUS,
    CreateTensor,
    DefineOp,
    DefineScope,
    FetchTensor,
    ForgetOps,
    FreeTensors,
    Goodbye,
    Lost,
    LostLine,
    Rejected,
    RunOp,
    Synchronize,
    WorkerInfo,
    WorkerLosePeer,
)
from gt.core.meta import TensorMeta
from gt.core.signatures import PolicyRecord
from gt.dispatcher.message_queue import ToClient, ToWorkers
from gt.dispatcher.state import State
from gt.dispatcher.state_records import WorkerRecord
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.spec import DeviceMesh, ShardingSpec, whole
from tests.dispatcher.lost_workers import lost, without_workers
from tests.dispatcher_harness import (
    OP,
    PAIR,
    REQUEST,
    REQUEST2,
    A,
    B,
    C,
    D,
    E,
    answers,
    create,
    given,
    harness_with,
    kind,
    over,
    query,
    run,
    sharded_harness,
    told,
)
from tests.records import ADD, ADD_, INLINE, LARGE, RESIZE_, SMALL, ZEROS, own, signature


def test_the_loss_of_a_worker_is_told_to_every_session():
    harness = harness_with(2)
    harness.open()
    news = Lost(0, 1, 1001, "was killed", "aten.mm (train.py:3)")
    own = msgspec.structs.replace(news, lines=(LostLine(0, 1, 16, ("float32[4]",)),))
    sent = harness.lose(1, "was killed", "aten.mm (train.py:3)")
    assert [out for out in sent if isinstance(out, ToClient)] == [ToClient(1, own), ToClient(2, news)]


def test_the_loss_of_a_worker_is_told_to_every_other_worker():
    """They may wait for it in an exchange."""
    harness = harness_with(3)
    assert harness.lose(1)[0] == ToWorkers((0, 2), WorkerLosePeer(1))
    assert harness.lose(0)[0] == ToWorkers((2,), WorkerLosePeer(0))
    assert not [out for out in harness.lose(2) if isinstance(out, ToWorkers)]


def test_a_worker_is_lost_once():
    harness = harness_with(2)
    harness.lose(1)
    assert harness.lose(1) == []


def test_the_results_of_an_op_on_a_lost_tensor_are_lost():
    harness = harness_with(2)
    harness.define(OP, ADD)
    harness.lose(1)
    assert harness.tell(run(OP, (A, B), (C,)), run(OP, (C, A), (D,))) == []
    assert harness.state.missing == dict.fromkeys((B, C, D), (SMALL, 1))
    assert answers(harness.tell(FetchTensor(REQUEST, D))) == [Lost(REQUEST, 1, 1001, "was killed", "aten.mm")]


@pytest.mark.parametrize("inputs", [(A, B), (B, A)], ids=["reads a lost tensor", "writes a lost tensor"])
def test_a_failed_write_leaves_no_value_and_keeps_the_previous_one(inputs):
    harness = harness_with(2)
    harness.define(OP, ADD_)
    harness.lose(1)
    assert harness.tell(run(OP, inputs, (C,))) == []
    assert set(harness.state.tensors_of(1)) == {inputs[1], C}
    assert harness.state.missing[C] == (SMALL, 1)
    assert [previous.ident for previous in harness.state.previous_values.values()] == [
        A for _ in inputs[:1] if inputs[0] == A
    ]
    assert told(harness.tell(FreeTensors((C,)))) == (["0: free A"] if inputs[0] == A else [])


def test_after_several_failed_writes_the_previous_value_is_that_before_the_first():
    harness = harness_with(2)
    harness.define(OP, ADD_)
    harness.lose(1)
    harness.tell(run(OP, (A, B), (C,)), run(OP, (C, B), (D,)))
    assert harness.state.missing.keys() == {B, D} and harness.state.previous_values[D].ident == A
    (answer,) = answers(harness.tell(create(A)))
    assert isinstance(answer, Rejected), "workers know the value before by its old id"
    assert told(harness.close()) == ["0: WorkerEndSession"]


@pytest.mark.parametrize(("text", "kept"), [("-", "- on 0"), ("x", "")])
def test_a_previous_value_may_be_lost_with_a_worker(text, kept):
    harness = sharded_harness(3, text)
    harness.create(B, C, D)  # D on worker 2
    harness.define(OP, ADD_)
    harness.lose(2)
    assert harness.state.missing.keys() == {B} or D in harness.state.missing
    missing = next(iter(harness.state.missing))
    harness.tell(run(OP, (A, missing), (E,)))
    assert harness.state.previous_values[E].ident == A
    harness.lose(1)
    previous = harness.state.previous_values.values()
    assert [f"{value.tensor.spec} on 0" for value in previous] == [kept] * bool(kept)


def test_a_query_on_a_missing_tensor_writes_no_value():
    harness = harness_with(2)
    harness.define(OP, RESIZE_)
    harness.lose(1)
    harness.tell(query(OP, (A, B), (C,)))
    assert answers(harness.tell(FetchTensor(REQUEST2, C))) == [Lost(REQUEST2, 1, 1001, "was killed", "aten.mm")]


def test_a_copy_replaces_a_lost_original():
    harness = harness_with(2)
    harness.define(OP, ADD)
    harness.tell(run(OP, (A, B), (C,)))  # leaves a copy of B on worker 0
    assert lost(harness.lose(1)) == ["0: define c3: redistribute", "0: c3(c1) -> B", "0: free c1", "client: Lost"]
    assert (harness.layout(B), harness.state.copies, harness.state.missing) == ("- on 0", {}, {})
    assert told(harness.tell(FetchTensor(REQUEST, B))) == ["0: fetch B"]


def test_a_lost_tensor_can_be_freed():
    harness = harness_with(2)
    harness.lose(1)
    assert harness.tell(FreeTensors((B,))) == []
    assert set(harness.state.tensors_of(1)) == {A}


def test_a_lost_worker_is_not_commanded():
    harness = harness_with(3)
    harness.lose(1)
    harness.define(OP, ADD)
    harness.tell(run(OP, (A, A), (own(6),)))
    harness.redistribute(A, own(7), "x", DeviceMesh([2], ["x"], [0, 2]))
    sent = [*harness.tell(Synchronize(REQUEST), ForgetOps((OP,))), *harness.create(C, D, E), *harness.close()]
    assert {worker for message in sent for worker in message.workers} == {0, 2}


def test_a_worker_that_leaves_is_lost_with_its_reason():
    harness = harness_with(2)
    (news,) = answers(harness.report(1, Goodbye("MemoryError: 3 GB")))
    assert (news.worker, news.pid, news.reason) == (1, 1001, "left: MemoryError: 3 GB")
    assert set(harness.state.workers) == {0}


@pytest.mark.parametrize("make", [create(C), run(OP, (), (C,))], ids=kind)
def test_a_tensor_created_without_workers_is_missing(make):
    harness = without_workers()
    harness.define(OP, ZEROS)
    harness.tell(make)
    (answer,) = answers(harness.tell(FetchTensor(REQUEST, C)))
    assert isinstance(answer, Lost) and answer.request == REQUEST


def test_plans_for_a_lost_worker_are_forgotten():
    harness = sharded_harness(3)
    harness.define(OP, ADD)
    harness.tell(run(OP, (A, A), (own(6),)))
    plans = harness.state.sessions[1].ops[OP].plans
    assert [cached.plan.workers for cached in plans.values()] == [(0, 1)]
    moves = harness.state.sessions[1].move_plans
    assert [cached.plan.workers for cached in moves.values()] == [(0, 1)]
    assert [text for text in told(harness.lose(1)) if "forget" in text] == ["0: forget c2", "0: forget c1"]
    assert plans == {} and moves == {}


def test_a_sharded_tensor_is_lost_with_one_of_its_workers():
    harness = sharded_harness()
    assert lost(harness.lose(1)) == ["0: free A", "client: Lost"]
    assert harness.state.missing == {A: (SMALL, 1)}
    assert answers(harness.tell(FetchTensor(REQUEST, A))) == [Lost(REQUEST, 1, 1001, "was killed", "aten.mm")]


def test_a_partial_tensor_is_lost_with_one_of_its_workers():
    harness = sharded_harness(text="- + x")
    assert lost(harness.lose(0))[-2:] == ["1: free A", "client: Lost"]
    assert harness.state.missing == {A: (SMALL, 0)}


def test_a_whole_tensor_survives_on_the_other_workers():
    harness = sharded_harness(text="-")
    assert lost(harness.lose(1)) == ["client: Lost"]
    assert (harness.layout(A), harness.state.missing) == ("- on 0", {})
    assert told(harness.tell(FetchTensor(REQUEST, A))) == ["0: fetch A"]


def test_a_tensor_on_other_workers_is_not_touched():
    harness = sharded_harness(3)
    assert lost(harness.lose(2)) == ["client: Lost"]
    assert harness.layout(A) == "x on 0 1"


def with_copy():
    """A over workers 0 and 1, and c3, a copy of it on workers 2 and 3, made for an op with B."""
    harness = sharded_harness(4)
    mesh = DeviceMesh([2], ["y"], [2, 3])
    harness.create(C, meta=LARGE)
    harness.redistribute(C, B, "-", mesh)
    harness.define(OP, signature("aten.no_such.default", 2, (SMALL,)))
    harness.tell(FreeTensors((C,)), run(OP, (A, B), (C,)))
    assert harness.state.copies == {A: {over("-", mesh): given(3)}}
    return harness


def test_a_copy_replaces_a_lost_sharded_original():
    harness = with_copy()
    assert lost(harness.lose(1)) == [
        "0: free A",
        "2 3: define c5: redistribute",
        "2 3: c5(c3) -> A",
        "2 3: free c3",
        "client: Lost",
    ]
    assert (harness.layout(A), harness.state.copies, harness.state.missing) == ("- on 2 3", {}, {})


def test_a_copy_is_lost_with_one_of_its_workers():
    harness = with_copy()
    assert lost(harness.lose(3)) == ["2: free c3", "client: Lost"]
    assert (harness.layout(A), harness.layout(B), harness.state.copies) == ("x on 0 1", "- on 2", {})


def test_a_copy_that_is_left_on_some_of_its_workers_replaces_a_lost_original():
    harness = sharded_harness(3)
    harness.create(C, meta=LARGE)
    harness.redistribute(C, B, "-", DeviceMesh([3], ["y"]))
    harness.define(OP, signature("aten.no_such.default", 2, (SMALL,)))
    harness.tell(run(OP, (A, B), (D,)))
    harness.lose(1)
    assert (harness.layout(A), harness.state.copies) == ("- on 0 2", {})


@pytest.mark.parametrize(
    ("text", "lost_worker", "left", "freed"),
    [
        ("x", 1, "x on 2 3", ["0: free D"]),  # workers 0 and 1 hold what 2 and 3 hold too
        ("y", 1, "y on 0 2", ["3: free D"]),
        ("- + x", 3, "- + x on 0 1", ["2: free D"]),
        ("-", 3, "- on 0 1 2", []),
    ],
)
def test_a_tensor_of_which_other_workers_hold_all_elements_keeps_its_value(text, lost_worker, left, freed):
    harness = harness_with(4)
    harness.redistribute(A, D, text, DeviceMesh([2, 2], ["y", "x"]))
    sent = lost(harness.lose(lost_worker))
    assert harness.layout(D) == left
    assert [line for line in sent if "free D" in line] == freed


@pytest.mark.parametrize("text", ["x y", "x + y"])
def test_a_tensor_of_which_one_worker_holds_elements_alone_is_lost_with_it(text):
    harness = harness_with(4)
    harness.redistribute(A, D, text, DeviceMesh([2, 2], ["y", "x"]))
    assert "0 2 3: free D" in lost(harness.lose(1))
    assert D in harness.state.missing


def test_an_op_on_a_lost_tensor_loses_its_results_and_keeps_the_other_inputs():
    harness = sharded_harness(3)
    harness.create(B, C)
    harness.define(OP, ADD)
    harness.lose(1)
    assert harness.tell(run(OP, (B, A), (D,))) == []
    assert harness.state.missing.keys() == {A, D}


@pytest.mark.parametrize("text", ["x", "-", "- + x"])
def test_a_tensor_redistributed_to_a_lost_worker_is_missing(text):
    harness = harness_with(2)
    harness.define(OP, msgspec.structs.replace(ZEROS, layout=over(text).record()))
    harness.tell(run(OP, (), (C,)))
    harness.lose(1)
    assert harness.redistribute(A, D, text) == []
    assert harness.tell(run(OP, (), (E,))) == []
    assert {D, E} <= harness.state.missing.keys()
    assert answers(harness.tell(FetchTensor(REQUEST, E))) == [Lost(REQUEST, 1, 1001, "was killed", "aten.mm")]


def test_a_copy_that_holds_some_of_a_tensor_does_not_take_its_place():
    state = State()
    for worker in (0, 1):
        state.workers[worker] = WorkerRecord(
            WorkerInfo(worker, "cpu", "here", 1), DeviceMesh([1], ["w"], [worker]), True
        )
    meta = TensorMeta((9,), (1,), 0, "float32")
    mesh, other = [worker.solo_mesh for worker in state.workers.values()]
    some = ShardingSpec(other, [["w"]], cuts=[((0, 8),)])
    state.add_tensor(A, TensorRecord.of(meta, whole(mesh, 1)))
    state.add_copy(A, some, B)
    losses = state.lose_parts(state.tensors_on(0)[1], 0)
    assert losses.promoted == [] and losses.useless == [(B, other)]
    assert state.missing == {A: (meta, 0)}


def test_a_tensor_that_the_user_has_not_placed_is_made_by_the_workers_that_are_left():
    harness = harness_with(2)
    auto = PolicyRecord(PAIR.record(), lead=(("x",),), places=False)
    placed = msgspec.structs.replace(auto, places=True)
    harness.tell(DefineScope(1, "auto", auto), DefineScope(2, "mine", placed), DefineOp(OP, ZEROS))
    harness.lose(1)
    for scope, ident in ((1, C), (2, D)):
        harness.tell(RunOp(OP, (), (ident,), (), scope, 0))
    harness.create(E)
    harness.tell(CreateTensor(own(6), SMALL, INLINE, over("x").record(), 0), buffers=[b""])
    assert harness.layout(C) == harness.layout(E) == "- on 0"
    assert {D, own(6)} <= harness.state.missing.keys(), "workers that a user names are not replaced by others"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("-", ["0: fetch A"]),
        ("x", ["0: fetch A", "1: fetch A"]),
    ],
)
def test_the_value_before_a_write_that_cannot_be_done_is_read_if_that_is_asked_for(text, read):
    harness = sharded_harness(3, text)
    harness.create(B, C, D)
    (missing,) = [ident for ident in (B, C, D) if harness.layout(ident) == "- on 2"]
    harness.define(OP, ADD_)
    harness.lose(2)
    harness.tell(run(OP, (A, missing), (own(9),)))
    assert isinstance(answers(harness.tell(FetchTensor(REQUEST, own(9))))[0], Lost)
    assert told(harness.tell(FetchTensor(REQUEST, own(9), PREVIOUS))) == read
    assert isinstance(answers(harness.tell(FetchTensor(REQUEST2, missing, PREVIOUS)))[0], Lost)
