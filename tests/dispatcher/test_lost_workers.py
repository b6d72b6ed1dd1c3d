"""Lost workers and joining workers, as list comparisons."""

import msgspec
import pytest

from gt.core.errors import ProtocolError
from gt.core.messages import (
    FORMER,
    CreateTensor,
    DefineOp,
    DefineScope,
    DefineSite,
    Failed,
    FetchTensor,
    ForgetOps,
    FreeTensors,
    Goodbye,
    Joined,
    LocateTensor,
    Lost,
    OpFailed,
    Queried,
    ReadTraffic,
    Rejected,
    RunOp,
    StoreReady,
    Synchronize,
    Synchronized,
    Traffic,
    WorkerCreateTensor,
    WorkerHostStore,
    WorkerInfo,
    WorkerJoinStore,
    WorkerLosePeer,
)
from gt.core.meta import TensorMeta
from gt.core.signatures import PolicyRecord
from gt.dispatcher.message_queue import ToClient, ToWorkers
from gt.dispatcher.session_records import WorkerRecord
from gt.dispatcher.state import NAMES_KEPT, State
from gt.dispatcher.tensor_records import TensorRecord
from gt.sharding.spec import DeviceMesh, ShardingSpec, whole
from tests.dispatcher_harness import (
    OP,
    PAIR,
    REQUEST,
    REQUEST2,
    A,
    B,
    C,
    D,
    DispatcherHarness,
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
from tests.records import ADD, ADD_, FAILURE, INLINE, LARGE, NONZERO, RESIZE_, SMALL, ZEROS, own, signature


def lost(outgoing):
    """Messages as text, without those that make workers forget programs and those that tell them of the loss."""
    return [text for text in told(outgoing) if "forget" not in text and "WorkerLosePeer" not in text]


STORE = WorkerJoinStore("127.0.0.1", 40000, 0)


def test_the_loss_of_a_worker_is_told_to_every_session():
    harness = harness_with(2)
    harness.open()
    news = Lost(0, 1, 1001, "was killed", "aten.mm (train.py:3)")
    sent = harness.lose(1, "was killed", "aten.mm (train.py:3)")
    assert [out for out in sent if isinstance(out, ToClient)] == [ToClient(1, news), ToClient(2, news)]


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


@pytest.mark.parametrize("request_", [FetchTensor(REQUEST, B), query(OP, (B,)), Synchronize(REQUEST)], ids=kind)
def test_a_request_that_waits_for_a_lost_worker_fails_at_once(request_):
    harness = harness_with(2)
    harness.define(OP, NONZERO)
    harness.tell(request_)
    assert answers(harness.lose(1))[0] == Lost(REQUEST, 1, 1001, "was killed", "aten.mm")
    if isinstance(request_, Synchronize):
        assert harness.report(0, Synchronized(REQUEST)) == []


@pytest.mark.parametrize("request_", [FetchTensor(REQUEST, B), LocateTensor(REQUEST, B), query(OP, (B,))], ids=kind)
def test_a_request_for_a_lost_tensor_names_the_worker(request_):
    harness = harness_with(2)
    harness.define(OP, NONZERO)
    harness.lose(1)
    assert harness.tell(request_) == [ToClient(1, Lost(REQUEST, 1, 1001, "was killed", "aten.mm"))]


def test_the_results_of_an_op_on_a_lost_tensor_are_lost():
    harness = harness_with(2)
    harness.define(OP, ADD)
    harness.lose(1)
    assert harness.tell(run(OP, (A, B), (C,)), run(OP, (C, A), (D,))) == []
    assert harness.state.missing == dict.fromkeys((B, C, D), (SMALL, 1))
    assert answers(harness.tell(FetchTensor(REQUEST, D))) == [Lost(REQUEST, 1, 1001, "was killed", "aten.mm")]


@pytest.mark.parametrize("inputs", [(A, B), (B, A)], ids=["reads a lost tensor", "writes a lost tensor"])
def test_a_failed_write_leaves_no_value_and_keeps_the_former_one(inputs):
    harness = harness_with(2)
    harness.define(OP, ADD_)
    harness.lose(1)
    assert harness.tell(run(OP, inputs, (C,))) == []
    assert set(harness.state.tensors_of(1)) == {inputs[1], C}
    assert harness.state.missing[C] == (SMALL, 1)
    assert [former.ident for former in harness.state.former_values.values()] == [
        A for _ in inputs[:1] if inputs[0] == A
    ]
    assert told(harness.tell(FreeTensors((C,)))) == (["0: free A"] if inputs[0] == A else [])


def test_after_several_failed_writes_the_former_value_is_that_before_the_first():
    harness = harness_with(2)
    harness.define(OP, ADD_)
    harness.lose(1)
    harness.tell(run(OP, (A, B), (C,)), run(OP, (C, B), (D,)))
    assert harness.state.missing.keys() == {B, D} and harness.state.former_values[D].ident == A
    (answer,) = answers(harness.tell(create(A)))
    assert isinstance(answer, Rejected), "workers know the value before by its old id"
    assert told(harness.close()) == ["0: WorkerEndSession"]


@pytest.mark.parametrize(("text", "kept"), [("-", "- on 0"), ("x", "")])
def test_a_former_value_may_be_lost_with_a_worker(text, kept):
    harness = sharded_harness(3, text)
    harness.create(B, C, D)  # D on worker 2
    harness.define(OP, ADD_)
    harness.lose(2)
    assert harness.state.missing.keys() == {B} or D in harness.state.missing
    missing = next(iter(harness.state.missing))
    harness.tell(run(OP, (A, missing), (E,)))
    assert harness.state.former_values[E].ident == A
    harness.lose(1)
    assert [f"{former.tensor.spec} on 0" for former in harness.state.former_values.values()] == [kept] * bool(kept)


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


def test_the_current_op_of_a_worker_is_described_with_its_line():
    harness = harness_with(2)
    harness.define(OP, ADD)
    harness.tell(DefineSite(1, "train.py", 12, "step"), run(OP, (A, B), (C,), site=1))
    describe = harness.dispatcher.describe_op
    assert describe(OP, 1) == "aten.add.Tensor (train.py:12)"
    assert describe(given(2), 1) == "redistribute (train.py:12)"  # a move of B for it
    assert describe(OP, 99) == "aten.add.Tensor"


def test_a_program_is_named_by_its_op():
    harness = sharded_harness()
    harness.define(OP, signature("aten.relu.default", 1, (SMALL,)))
    harness.tell(run(OP, (A,), (B,)))
    assert harness.dispatcher.describe_op(given(2), 0) == "aten.relu.default"


def test_an_op_that_was_forgotten_is_still_named():
    """A worker may be at it for long after that: in an exchange with the worker that is lost."""
    harness = harness_with(2)
    harness.define(OP, ADD)
    harness.tell(DefineSite(1, "train.py", 12, "step"), run(OP, (A, B), (C,), site=1))
    harness.lose(1)
    assert harness.dispatcher.describe_op(given(2), 1) == "redistribute (train.py:12)"
    harness.tell(ForgetOps((OP,)))
    assert harness.dispatcher.describe_op(OP, 1) == "aten.add.Tensor (train.py:12)"


def test_the_names_of_forgotten_ops_are_bounded():
    harness = harness_with()
    for op_id in range(OP, OP + NAMES_KEPT + 1):
        harness.define(op_id, ADD)
    harness.tell(ForgetOps(tuple(range(OP, OP + NAMES_KEPT + 1))))
    assert harness.dispatcher.describe_op(OP, 0) == "an op that was forgotten"
    assert harness.dispatcher.describe_op(OP + NAMES_KEPT, 0) == "aten.add.Tensor"


def test_a_worker_without_commands_has_no_current_op():
    assert harness_with().dispatcher.describe_op(0, 0) == ""


def test_the_current_op_may_be_of_a_session_that_has_ended():
    harness = harness_with()
    harness.close()
    assert harness.dispatcher.describe_op(OP, 1) == "an op of a session that has ended"


def without_workers():
    harness = harness_with(2)
    harness.lose(1)
    harness.lose(0)
    return harness


@pytest.mark.parametrize("make", [create(C), run(OP, (), (C,))], ids=kind)
def test_a_tensor_created_without_workers_is_missing(make):
    harness = without_workers()
    harness.define(OP, ZEROS)
    harness.tell(make)
    (answer,) = answers(harness.tell(FetchTensor(REQUEST, C)))
    assert isinstance(answer, Lost) and answer.request == REQUEST


@pytest.mark.parametrize("request_", [Synchronize(REQUEST), query(OP, ())], ids=kind)
def test_a_request_without_any_worker_is_answered(request_):
    harness = without_workers()
    harness.define(OP, signature("aten.tensor", 0))
    (answer,) = answers(harness.tell(request_))
    assert isinstance(answer, Lost) and answer.request == REQUEST


def test_a_worker_that_joins_after_all_were_lost_gets_work():
    harness = without_workers()
    harness.join()
    assert [message.workers for message in harness.create(C)] == [(2,)]


def test_one_worker_needs_no_store():
    harness = DispatcherHarness(0)
    assert harness.join() == []
    assert [info.worker for info in harness.dispatcher.ready_workers()] == [0]


def test_two_workers_meet_at_a_store_that_one_hosts():
    harness = DispatcherHarness(0)
    harness.join()
    assert harness.join() == [ToWorkers((0,), WorkerHostStore())]
    assert harness.join() == []
    assert [info.worker for info in harness.dispatcher.ready_workers()] == [0]
    assert harness.report(0, StoreReady(40000)) == [ToWorkers((0, 1, 2), STORE)]
    assert [info.worker for info in harness.dispatcher.ready_workers()] == [0, 1, 2]


def test_a_worker_gets_no_work_before_it_knows_the_store():
    harness = harness_with(1)
    harness.join()
    assert [message.workers for message in harness.create(C, D)] == [(0,), (0,)]


def test_a_worker_that_joins_later_is_told_the_store_and_gets_work():
    harness = harness_with(2)
    assert harness.join() == [ToWorkers((2,), STORE), ToClient(1, Joined(WorkerInfo(2, "cpu", "here", 1002)))]
    assert [message.workers for message in harness.create(C)] == [(2,)]


def test_ids_of_workers_are_not_used_again():
    harness = DispatcherHarness(2)
    harness.lose(1)
    harness.join()
    assert set(harness.state.workers) == {0, 2}


def test_another_worker_hosts_the_store_when_its_host_is_lost():
    harness = DispatcherHarness(3)
    assert harness.lose(0) == [ToWorkers((1, 2), WorkerLosePeer(0)), ToWorkers((1,), WorkerHostStore())]
    store = WorkerJoinStore("127.0.0.1", 40001, 1)
    assert harness.report(1, StoreReady(40001)) == [ToWorkers((1, 2), store)]


def test_a_worker_left_alone_becomes_ready():
    harness = DispatcherHarness(0)
    harness.join()
    harness.join()
    harness.lose(0)  # before it could report the store
    assert [info.worker for info in harness.dispatcher.ready_workers()] == [1]


@pytest.mark.parametrize("lost", [(0,), (1, 0), (0, 1)], ids=str)
def test_a_newcomer_is_not_sent_to_the_store_of_a_lost_worker(lost):
    harness = DispatcherHarness(2)
    for worker in lost:
        harness.lose(worker)
    assert ToWorkers((2,), STORE) not in harness.join()


def test_one_worker_gets_the_work_while_a_new_store_is_started():
    harness = DispatcherHarness(0)
    for _ in range(3):
        harness.join()
    harness.open()
    harness.lose(0)  # before it could report the store
    assert [type(message.command) for message in harness.create(A)] == [WorkerCreateTensor]


def test_plans_for_a_lost_worker_are_forgotten():
    harness = sharded_harness(3)
    harness.define(OP, ADD)
    harness.tell(run(OP, (A, A), (own(6),)))
    plans = harness.state.sessions[1].ops[OP].plans
    assert [cached.plan.workers for cached in plans.values()] == [(0, 1)]
    moves = harness.state.sessions[1].moves
    assert [cached.plan.workers for cached in moves.values()] == [(0, 1)]
    assert [text for text in told(harness.lose(1)) if "forget" in text] == ["0: forget c2", "0: forget c1"]
    assert plans == {} and moves == {}


# Meshes


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


def query_of_two():
    """A query that writes to a tensor which is whole on two workers."""
    harness = sharded_harness(text="-")
    harness.define(OP, RESIZE_)
    harness.create(B)
    assert told(harness.tell(query(OP, (A, B), (C,))))[-1] == "0 1: op?(A, c2) -> C"
    return harness


def test_a_query_goes_on_with_the_workers_that_are_left():
    harness = query_of_two()
    assert lost(harness.lose(1)) == ["0: free c2", "client: Lost"]  # news, and not an answer
    queried = Queried(REQUEST, (SMALL,), (LARGE,))
    assert answers(harness.report(0, queried)) == [queried]
    assert [harness.layout(ident) for ident in (C, D)] == ["- on 0", "- on 0"]
    assert harness.state.meta(C) == LARGE


def test_a_query_ends_with_the_loss_of_the_last_worker_that_is_waited_for():
    harness = query_of_two()
    queried = Queried(REQUEST, (SMALL,), (LARGE,))
    assert harness.report(0, queried) == []
    assert answers(harness.lose(1))[0] == queried
    assert [harness.layout(ident) for ident in (C, D)] == ["- on 0", "- on 0"]


def test_a_worker_that_was_heard_already_may_be_lost():
    harness = query_of_two()
    queried = Queried(REQUEST, (SMALL,), (LARGE,))
    harness.report(1, queried)
    harness.lose(1)
    assert answers(harness.report(0, queried)) == [queried]
    assert harness.layout(D) == "- on 0"


@pytest.mark.parametrize("first", [0, 1])
def test_a_query_fails_where_any_worker_fails(first):
    harness = query_of_two()
    replies = [Queried(REQUEST, (SMALL, LARGE), (SMALL,)), Failed(REQUEST, FAILURE)]
    assert harness.report(0, replies[first]) == []
    assert told(harness.report(1, replies[1 - first])) == ["0 1: free D, E", "client: Failed"]
    assert not {D, E} & harness.state.tensors.keys()


def test_another_answer_to_a_query_is_refused():
    harness = query_of_two()
    with pytest.raises(ProtocolError, match="Synchronized is not an answer to a query"):
        harness.report(0, Synchronized(REQUEST))
    queried = Queried(REQUEST, (SMALL, LARGE), (SMALL,))
    assert harness.report(0, queried) == []
    assert answers(harness.report(1, queried)) == [queried]


def test_traffic_cannot_be_read_from_a_lost_worker():
    harness = harness_with(2)
    harness.tell(ReadTraffic(REQUEST, True))
    assert answers(harness.lose(1))[0] == Lost(REQUEST, 1, 1001, "was killed", "aten.mm")
    assert harness.report(0, Traffic(REQUEST, {})) == []


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


def test_a_worker_that_becomes_ready_is_told_to_every_session():
    harness = harness_with(2)
    assert answers(harness.join()) == [Joined(WorkerInfo(2, "cpu", "here", 1002))]
    harness.lose(0)
    assert answers(harness.join()) == [], "it cannot exchange tensors before there is a store"
    joined = answers(harness.report(1, StoreReady(40001)))
    assert [news.worker.worker for news in joined] == [2, 3]


def test_a_tensor_that_the_user_has_not_placed_is_made_by_the_workers_that_are_left():
    harness = harness_with(2)
    auto = PolicyRecord(PAIR.record(), lead=(("x",),), pins=False)
    placed = msgspec.structs.replace(auto, pins=True)
    harness.tell(DefineScope(1, "auto", auto), DefineScope(2, "mine", placed), DefineOp(OP, ZEROS))
    harness.lose(1)
    for scope, ident in ((1, C), (2, D)):
        harness.tell(RunOp(OP, (), (ident,), (), scope, 0))
    harness.tell(CreateTensor(E, SMALL, INLINE, 1, 0), buffers=[b""])
    assert harness.layout(C) == harness.layout(E) == "- on 0"
    assert D in harness.state.missing, "workers that a user names are not replaced by others"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("-", ["0: fetch A"]),
        (
            "x",
            [
                "0 1: revive A -> c2",
                "0 1: define c4: redistribute",
                "0+1: c4(c2) -> c3",
                "0: fetch c3",
                "0 1: free c2",
                "0: free c3",
            ],
        ),
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
    assert told(harness.tell(FetchTensor(REQUEST, own(9), FORMER))) == read
    assert isinstance(answers(harness.tell(FetchTensor(REQUEST2, missing, FORMER)))[0], Lost)


FAILED_EXCHANGE = msgspec.structs.replace(FAILURE, op="exchange", site=7, origin=own(9), peers=(0, 1))


def test_an_exchange_that_fails_before_the_loss_is_known_is_the_loss():
    harness = harness_with(2)
    harness.tell(FetchTensor(REQUEST, A))
    assert harness.report(0, OpFailed(1, FAILED_EXCHANGE)) == [] == harness.report(0, Failed(REQUEST, FAILED_EXCHANGE))
    assert harness.dispatcher.note_process_check() == []
    lost = Lost(REQUEST, 1, 1001, "was killed", "aten.mm", 7)
    assert answers(harness.lose(1)) == [lost, Lost(0, 1, 1001, "was killed", "aten.mm")]
    harness.tell(FetchTensor(REQUEST2, A))
    assert answers(harness.report(0, Failed(REQUEST2, FAILED_EXCHANGE))) == [
        msgspec.structs.replace(lost, request=REQUEST2)
    ]
    assert harness.report(0, OpFailed(1, FAILED_EXCHANGE)) == []


def test_a_failed_exchange_without_a_lost_worker_is_told_after_a_few_checks():
    harness = harness_with(2)
    harness.tell(FetchTensor(REQUEST, A))
    failures = [OpFailed(1, FAILED_EXCHANGE), Failed(REQUEST, FAILED_EXCHANGE)]
    assert [harness.report(0, failure) for failure in failures] == [[], []]
    assert [answers(harness.dispatcher.note_process_check()) for _ in range(5)] == [[], [], [], failures, []]
    harness.tell(FetchTensor(REQUEST2, A))
    again = Failed(REQUEST2, FAILED_EXCHANGE)
    assert answers(harness.report(0, again)) == [again]
