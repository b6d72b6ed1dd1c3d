"""Any instructions, valid or not, with colliding ids, on workers that come and go: each is carried out whole or not at
all, every request is answered, and the same events give the same state."""

from collections import Counter
from copy import deepcopy

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gt.core.errors import ProtocolError
from gt.core.ids import FIRST_QUERY_ID, MAX_RESULTS, session_of
from gt.core.message_fields import require_ownership
from gt.core.messages import (
    BeginModule,
    BeginStep,
    CreateTensor,
    DefineOp,
    DefineProgram,
    DefineScope,
    DefineSite,
    DropCopies,
    EndStep,
    Failed,
    Fetched,
    FetchTensor,
    ForgetOps,
    FreeTensors,
    Goodbye,
    LocateTensor,
    Lost,
    NoteGradient,
    OpFailed,
    PlaceTensor,
    PublishTensor,
    Queried,
    QueryOp,
    ReadMemory,
    ReadNonFinite,
    ReadStats,
    ReadStory,
    ReadTimeline,
    ReadTraffic,
    ReadVersions,
    ReadWorkers,
    Redistribute,
    Rejected,
    RunOp,
    RunProgram,
    StoreReady,
    SubscribeTensor,
    Synchronize,
    Synchronized,
    TimelineReport,
    Traffic,
    UnpublishTensor,
)
from gt.core.signatures import MeshRecord, PolicyRecord, SpecRecord
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.message_queue import ToClient, ToWorkers
from tests.dispatcher.invariants import check_invariants
from tests.dispatcher_harness import (
    OP,
    REQUEST,
    REQUEST2,
    A,
    B,
    C,
    D,
    E,
    answers,
    create,
    harness_with,
    kind,
    query,
    run,
    told,
)
from tests.records import ADD, ADD_, FAILURE, INLINE, LARGE, NONZERO, RESIZE_, RICH, SMALL, ZEROS, own, signature

# One at a time


REQUESTS = [
    FetchTensor(REQUEST, A),
    LocateTensor(REQUEST, A),
    query(OP, (A,)),
    Synchronize(REQUEST),
    ReadTraffic(REQUEST, True),
    ReadTimeline(REQUEST, 8),
]


@pytest.mark.parametrize("again", REQUESTS, ids=kind)
def test_a_pending_request_id_is_refused(again):
    harness = harness_with()
    harness.define(OP, NONZERO)
    harness.tell(Synchronize(REQUEST))
    state = deepcopy(harness.state)
    (answer,) = harness.tell(again)
    assert "request 200 is there already" in answer.answer.reason
    assert answer.answer.request == 0, "who waits for the other one is not told that it is refused"
    assert harness.state == state
    assert harness.report(0, Synchronized(REQUEST)) == [ToClient(1, Synchronized(REQUEST))]


def test_a_request_id_whose_answers_are_still_on_their_way_is_refused():
    """A reply to the old request would be taken for a reply to the new one."""
    harness = harness_with(2)
    harness.define(OP, NONZERO)
    harness.tell(Synchronize(REQUEST))
    harness.lose(1)
    (answer,) = answers(harness.tell(query(OP, (A,))))
    assert isinstance(answer, Rejected)
    assert harness.dispatcher.waits() == {}
    assert harness.report(0, Synchronized(REQUEST)) == []
    assert told(harness.tell(query(OP, (A,))))[-1] == "0: op?(A)"


TAKEN = {
    "created again": create(A),
    "made again": run(OP, (A, B), (A,)),
    "laid out under an id that is held": Redistribute(A, B, SpecRecord(MeshRecord((1,), ("w",), (0,)), ((),)), 0),
    "one id for two results": run(own(103), (A,), (C, C)),
    "written to its own id": run(own(101), (A, B), (A,)),
    "written to the id of another": run(own(101), (A, B), (B,)),
    "written to the id of another by a query": query(own(102), (A, B), (B,)),
}


@pytest.mark.parametrize("instruction", TAKEN.values(), ids=TAKEN.keys())
@pytest.mark.parametrize("lost", [False, True], ids=["", "with what was lost"])
def test_a_tensor_id_in_use_is_refused(instruction, lost):
    harness = harness_with(2 if lost else 1)
    split = signature("aten.split.Tensor", 1, (SMALL, SMALL))
    for op_id, op in zip((OP, own(101), own(102), own(103)), (ADD, ADD_, RESIZE_, split), strict=True):
        harness.define(op_id, op)
    if lost:
        harness.lose(1)
    state = deepcopy(harness.state)
    (message,) = harness.tell(instruction)
    assert isinstance(message.answer, Rejected) and harness.state == state
    harness.lose(0)
    harness.close()


def test_results_of_a_query_take_no_ids_of_another():
    harness = harness_with()
    harness.define(OP, NONZERO)
    harness.tell(query(OP, (A,), first=own(FIRST_QUERY_ID)))
    (answer,) = answers(harness.tell(query(OP, (A,), first=own(FIRST_QUERY_ID), request=REQUEST2)))
    assert isinstance(answer, Rejected) and "which another query may use" in answer.reason
    queried = Queried(REQUEST, (SMALL,), ())
    assert harness.report(0, queried) == [ToClient(1, queried)]


def test_a_tensor_written_by_a_query_may_be_freed_before_the_answer():
    harness = harness_with()
    harness.define(OP, RESIZE_)
    (answer,) = answers(harness.tell(query(OP, (A, B), (C,)), FreeTensors((C,)), create(C)))
    assert isinstance(answer, Rejected), "it would be taken for what the query has written"
    harness.report(0, Queried(REQUEST, (), (LARGE,)))
    assert harness.state.tensors_of(1) == [B]


def test_a_rejected_op_moves_no_input(monkeypatch):
    harness = harness_with(2)
    harness.define(OP, signature("aten.aminmax.out", 2, writes=(0, 1)))
    monkeypatch.setattr(harness.dispatcher._instructions._plan_cache, "define_on", fail)
    state = deepcopy(harness.state)
    (message,) = harness.tell(run(OP, (A, B), (C, D)))  # B would move to the mesh of A
    assert isinstance(message.answer, OpFailed)
    assert harness.state.missing.keys() == {C, D}
    assert {previous.ident for previous in harness.state.previous_values.values()} == {A, B}
    assert harness.state.sessions == state.sessions and harness.state.bytes_on == state.bytes_on


def fail(*_):
    raise ZeroDivisionError("of ours")


def test_an_error_in_a_rule_fails_its_op(monkeypatch, caplog):
    harness = harness_with()
    harness.define(OP, ADD)
    monkeypatch.setattr("gt.dispatcher.plan_cache.plan_op", fail)
    (told_,) = answers(harness.tell(run(OP, (A, B), (C,), site=3)))
    assert isinstance(told_, OpFailed)
    failure = told_.failure
    assert (failure.op, failure.inputs, failure.site) == ("aten.add.Tensor", ("float32[4]", "float32[4]"), 3)
    assert "a mistake of GT" in failure.message and "ZeroDivisionError: of ours" in failure.traceback
    assert "Traceback" in caplog.text
    monkeypatch.undo()
    assert harness.tell(run(OP, (C, A), (D,))) == [], "what depends on it fails alike, without a word"
    assert answers(harness.tell(FetchTensor(REQUEST, D))) == [Failed(REQUEST, failure)]
    assert answers(harness.tell(LocateTensor(REQUEST, A))) != []


def test_an_error_in_a_rule_answers_a_query(monkeypatch):
    harness = harness_with()
    harness.define(OP, RESIZE_)
    monkeypatch.setattr(harness.dispatcher._instructions._plan_cache, "mesh_of_query", fail)
    (answer,) = answers(harness.tell(query(OP, (A, B), (C,))))
    assert isinstance(answer, Failed) and answer.is_own_failure and "a mistake of GT" in answer.failure.message
    assert harness.state.missing.keys() == {C}


def test_a_key_error_of_gt_is_not_an_error_of_the_client(monkeypatch, caplog):
    harness = harness_with()

    def fail(*_):
        raise KeyError(7)

    monkeypatch.setattr(harness.dispatcher._requests, "wait_for_read", fail)
    (answer,) = answers(harness.tell(FetchTensor(REQUEST, A)))
    assert answer.request == REQUEST and "This is a mistake of GT" in answer.reason and "KeyError: 7" in answer.reason
    assert "FetchTensor of client 1 failed" in caplog.text and "Traceback" in caplog.text


def test_an_error_of_gt_while_a_worker_is_lost_ends_one_session_and_answers_all(monkeypatch, caplog):
    harness = harness_with(2)
    harness.open()
    harness.tell(Synchronize(REQUEST))
    harness.tell(create(own(1, 2)), create(own(2, 2)), Synchronize(own(3, 2)), session=2)
    lose_parts = harness.state.lose_parts

    def fail(idents, worker):
        return lose_parts(idents, worker) if session_of(idents[0]) == 2 else 1 // 0

    monkeypatch.setattr(harness.state, "lose_parts", fail)
    sent = harness.lose(1)
    assert [(out.session, type(out.answer)) for out in sent if isinstance(out, ToClient)] == [
        (1, Lost),
        (2, Lost),
        (1, Rejected),
        (2, Lost),
    ]
    assert harness.state.sessions.keys() == {2} and "ZeroDivisionError" in caplog.text
    (answer,) = answers(harness.dispatcher.instruct(1, [Synchronize(REQUEST)], []))
    assert isinstance(answer, Rejected) and "has ended" in answer.reason


def test_definitions_of_a_session_are_limited(monkeypatch):
    harness = harness_with()
    monkeypatch.setattr("gt.dispatcher.state.MAX_DEFINED", harness.state.sessions[1].defined_bytes + 2000)
    noted = []
    harness.dispatcher.note_rejection = lambda *what: noted.append(what[:2])
    (answer,) = answers(harness.tell(DefineSite(9, "x" * 3000, 1, "")))
    assert isinstance(answer, Rejected) and "may take" in answer.reason and noted == [(1, "limit")]
    for number in range(50):  # what is forgotten counts no more
        assert answers(harness.tell(DefineOp(own(300 + number), ADD), ForgetOps((own(300 + number),)))) == []
    told_ = answers(harness.tell(*[DefineOp(own(400 + number), ADD) for number in range(50)]))
    assert 0 < len(told_) < 50 and all(isinstance(each, Rejected) for each in told_)
    assert answers(harness.tell(LocateTensor(REQUEST, A)))[0].request == REQUEST


def test_definitions_of_a_key_are_limited_over_its_sessions(monkeypatch):
    harness = harness_with()
    state = harness.state
    for key in ("team", "team", "other"):
        harness.dispatcher.open_session("host", 1, key)
    monkeypatch.setattr("gt.dispatcher.state.MAX_DEFINED_OF_KEY", 10_000)

    def define(session):
        return answers(harness.dispatcher.instruct(session, [DefineSite(own(9, session), "x" * 6000, 1, "")], []))

    assert define(2) == []
    (refused,) = define(3)
    assert isinstance(refused, Rejected) and "all sessions of a key 10000" in refused.reason
    assert define(4) == []
    harness.dispatcher.end_session(2)
    assert define(3) == []
    for session in (3, 4):
        harness.dispatcher.end_session(session)
    assert not {"team", "other"} & state.defined_by_key.keys()


@pytest.mark.parametrize("name", ["x", "", ".", "aten.", ".add.Tensor", "aten..Tensor", "a b.c"])
@pytest.mark.parametrize("field", ["op", "functional"])
def test_a_name_that_is_not_of_an_op_is_refused(name, field):
    harness = harness_with()
    wrong = msgspec.structs.replace(ADD_, **{field: name})
    found = answers(harness.tell(DefineOp(own(300), wrong)))
    if field == "op" or name:
        (answer,) = found
        assert "is not the name of an op, such as aten.add.Tensor" in answer.reason and "mistake" not in answer.reason


# Any of them

CODES = st.sampled_from([OP, own(101), own(102)])
IDS = st.sampled_from([A, B, C, D, E])
SOME = st.lists(IDS, max_size=3).map(tuple)
ASKS = st.sampled_from([REQUEST, REQUEST2, own(202)])
WORKERS = st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)
SCOPES = st.sampled_from([0, 0, 0, 1, 2])
AXES = st.sampled_from([(), (), ("x",), ("y",)])
MESHES = WORKERS.map(lambda workers: MeshRecord((len(workers),), ("x",), tuple(workers)))
DIMS = st.lists(AXES, max_size=2).map(tuple)
LAYOUTS = st.builds(SpecRecord, MESHES, DIMS, st.sampled_from([(), ("x",)]))
POLICIES = st.builds(PolicyRecord, MESHES, lead=DIMS, tail=DIMS, places=st.booleans())
SIGNATURES = st.sampled_from(
    [ZEROS, ADD, ADD_, NONZERO, RESIZE_, RICH, signature("aten.x", 2, (SMALL,), writes=(1, 0))]
)
NAMES = st.sampled_from(["weights", "x"])
FIRSTS = st.sampled_from([own(FIRST_QUERY_ID), own(FIRST_QUERY_ID + MAX_RESULTS), own(FIRST_QUERY_ID + 1)])

PROGRAMS = st.sampled_from([own(110), own(111), OP])
SLOTS = st.lists(st.integers(0, 4), max_size=3).map(tuple)
SLOT = st.integers(0, 6)


INTERLEAVED = st.one_of(
    st.builds(NoteGradient, IDS, IDS, st.just(0)),
    st.builds(DropCopies, SOME),
    st.builds(PlaceTensor, IDS, LAYOUTS, st.just(0)),
    st.builds(BeginModule, st.integers(0, 3), SOME, st.integers(0, 3), SOME, st.just(0)),
)
STEPS = st.one_of(
    st.builds(RunOp, CODES, SLOTS, SLOTS, SLOTS, SCOPES, st.integers(0, 1)),
    st.builds(NoteGradient, SLOT, SLOT, st.just(0)),
    st.builds(DropCopies, SLOTS),
    st.builds(PlaceTensor, SLOT, LAYOUTS, st.just(0)),
    st.builds(BeginModule, st.integers(0, 3), SLOTS, st.integers(0, 3), SLOTS, st.just(0)),
)
DEFINITIONS = st.builds(
    DefineProgram, PROGRAMS, st.integers(0, 3), st.integers(0, 1), st.lists(STEPS, max_size=3).map(tuple)
)


@st.composite
def chains(draw):
    """Valid ops, with any instructions between them."""
    ops = [RunOp(OP, inputs, (slot,), (), 0, 0) for slot, inputs in ((2, (0, 1)), (3, (2, 0)), (4, (3, 1)))]
    others = STEPS.filter(lambda step: not isinstance(step, RunOp))
    between = [draw(st.lists(others, max_size=1)) for _ in ops]
    steps = [step for op, more in zip(ops, between, strict=True) for step in (op, *more)]
    return DefineProgram(own(110), 2, 0, tuple(steps))


INSTRUCTIONS = st.one_of(
    DEFINITIONS,
    chains(),
    INTERLEAVED,
    st.builds(RunProgram, PROGRAMS, IDS, SOME, st.just(()), SLOTS),
    st.builds(RunProgram, st.just(own(110)), st.just(C), st.just((A, B)), st.just(()), SLOTS),
    st.builds(CreateTensor, IDS, st.sampled_from([SMALL, LARGE]), st.just(INLINE), st.none() | LAYOUTS, st.just(0)),
    st.builds(RunOp, CODES, SOME, SOME, st.just(()), SCOPES, st.just(0)),
    st.builds(QueryOp, ASKS, CODES, SOME, SOME, FIRSTS, st.just(()), SCOPES, st.just(0)),
    st.builds(Redistribute, IDS, IDS, LAYOUTS, st.just(0)),
    st.builds(FreeTensors, SOME),
    st.builds(FetchTensor, ASKS, IDS, st.booleans()),
    st.builds(LocateTensor, ASKS, IDS),
    st.builds(Synchronize, ASKS),
    st.builds(ReadTraffic, ASKS, st.booleans()),
    st.builds(ReadTimeline, ASKS, st.just(4)),
    st.builds(DefineOp, CODES, SIGNATURES),
    st.builds(ForgetOps, st.lists(CODES, max_size=2).map(tuple)),
    st.builds(DefineSite, st.just(1), st.just("train.py"), st.just(3), st.just("")),
    st.builds(DefineScope, st.sampled_from([1, 2]), st.just("s"), POLICIES),
    st.builds(PublishTensor, ASKS, IDS, NAMES, st.sampled_from([(), ("*",)])),
    st.builds(UnpublishTensor, ASKS, NAMES),
    st.builds(SubscribeTensor, ASKS, IDS, NAMES),
    st.builds(BeginStep, IDS, SOME, SOME, st.just(0)),
    st.builds(EndStep, IDS),
    st.builds(ReadVersions, ASKS, SOME),
    st.builds(ReadStory, ASKS, IDS),
    st.builds(ReadWorkers, ASKS),
    st.builds(ReadStats, ASKS),
    st.builds(ReadMemory, ASKS, st.booleans()),
    st.builds(ReadNonFinite, ASKS, st.booleans(), st.booleans()),
    st.just(Goodbye()),
)
REPORTS = st.one_of(
    st.builds(Synchronized, ASKS),
    st.builds(Fetched, ASKS, st.just(INLINE)),
    st.builds(Queried, ASKS, st.sampled_from([(), (SMALL,), (1, LARGE)]), st.sampled_from([(), (LARGE,)])),
    st.builds(Failed, ASKS, st.just(FAILURE)),
    st.builds(Traffic, ASKS, st.just({})),
    st.builds(TimelineReport, ASKS, st.just(()), st.just(0)),
    st.just(StoreReady(40000)),
)
EVENTS = st.one_of(
    st.tuples(st.just("instruct"), INSTRUCTIONS),
    st.tuples(st.just("instruct"), INSTRUCTIONS),
    st.tuples(st.just("instruct"), INSTRUCTIONS),
    st.tuples(st.just("report"), st.integers(0, 3), REPORTS),
    st.tuples(st.just("lose"), st.integers(0, 3)),
    st.tuples(st.just("join")),
)


def carry_out(dispatcher, event):
    """Check and carry out an instruction as the server does."""
    match event:
        case ("instruct", instruction):
            if 1 not in dispatcher.state.sessions:
                return []
            require_ownership(1, instruction)
            return dispatcher.instruct(1, [instruction], [b""])
        case ("report", worker, report):
            if worker not in dispatcher.state.workers:
                return []
            try:
                return dispatcher.report(worker, report, b"")
            except ProtocolError as error:
                return dispatcher.lose_worker(worker, str(error), "")
        case ("lose", worker):
            return dispatcher.lose_worker(worker, "was killed", "")
    return dispatcher.join_worker("cpu", "here", 1)[1] if dispatcher.state.workers_joined < 4 else []


def begin():
    dispatcher = Dispatcher()
    for _ in range(2):
        dispatcher.join_worker("cpu", "here", 1)
    dispatcher.report(0, StoreReady(40000), None)
    dispatcher.open_session("here", 1)
    return dispatcher


@settings(max_examples=300)
@given(events=st.lists(EVENTS, max_size=40))
@example(events=[("instruct", create(A)), ("lose", 0), ("instruct", create(A)), ("lose", 1)])
def test_any_instruction_is_carried_out_whole_or_not_at_all(events):
    dispatcher, history = begin(), []
    asked, answered = Counter(), Counter()
    for event in [*events, *[("lose", worker) for worker in range(4)]]:
        before = deepcopy(dispatcher.state)
        sent = carry_out(dispatcher, event)
        check_invariants(dispatcher.state)
        history.append(sent)
        replies = answers(sent)
        assert "mistake of GT" not in repr(replies)
        is_segment = event[0] == "instruct" and isinstance(event[1], RunProgram)  # a batch of instructions
        if any(isinstance(reply, Rejected) for reply in replies) and not is_segment:
            assert dispatcher.state == before and not any(isinstance(message, ToWorkers) for message in sent)
        asked.update(dispatcher.state.pending.keys() - before.pending.keys())
        asked.update([reply.request for reply in replies if is_answered_at_once(reply, before)])
        answered.update([reply.request for reply in replies if getattr(reply, "request", 0)])
    assert dispatcher.state.pending == {}
    if 1 in dispatcher.state.sessions:
        assert asked == answered, "each request that was accepted has one answer"
    again = begin()
    for event, sent in zip([*events, *[("lose", worker) for worker in range(4)]], history, strict=True):
        assert carry_out(again, event) == sent
    assert again.state == dispatcher.state


def is_answered_at_once(reply, before):
    request = getattr(reply, "request", 0)
    return request and (request not in before.pending or before.pending[request].is_answered)
