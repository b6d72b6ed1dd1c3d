"""Clients that share workers take turns: a client with much work does not keep the others waiting."""

import pytest

import gt
from gt.core.errors import ProtocolError
from gt.core.messages import (
    DefineOp,
    FetchTensor,
    FreeTensors,
    Goodbye,
    Progress,
    Redistribute,
    RunOp,
    Synchronize,
    WorkerCreateTensor,
    WorkerEndSession,
    WorkerFetchTensor,
    WorkerReportProgress,
)
from gt.dispatcher.fair_queue import ACTIVE_CLIENTS, ALONE_FACTOR, MAX_UNITS
from tests.dispatcher_harness import OP, PAIR, REQUEST, A, DispatcherHarness, at, create, over
from tests.records import ADD, meta, own, signature
from tests.subprocesses import finish, running, serving, start

BIG = meta(1024, 1024)


def submit(harness, *batch, session=1):
    return harness.checked(harness.dispatcher.submit(session, batch, [b""] * len(batch)))


def commands(outgoing, kind):
    return [message.command for message in outgoing if isinstance(getattr(message, "command", None), kind)]


def marks(outgoing):
    return [(message.workers, message.command.mark) for message in outgoing if is_mark(message)]


def is_mark(message):
    return isinstance(getattr(message, "command", None), WorkerReportProgress)


def harness_of(op, tensor, workers=1):
    harness = DispatcherHarness(workers)
    harness.open()
    reported(harness, submit(harness, create(A, tensor), DefineOp(OP, op)), 1000)
    return harness


def ops(count, first=1000):
    return [RunOp(OP, (A, A), (own(first + number),), (), 0, 0) for number in range(count)]


def reported(harness, outgoing, nanoseconds):
    """The messages sent after the workers report that they have reached the marks."""
    return [
        message
        for workers, mark in marks(outgoing)
        for worker in workers
        for message in harness.report(worker, Progress(mark, nanoseconds))
    ]


def test_a_client_has_a_bounded_amount_of_unfinished_work():
    harness = harness_of(ADD, meta(4))
    harness.open()
    sent = submit(harness, *ops(10_000))
    done, most = 0, 0
    while sent:
        most = max(most, len(commands(sent, RunOp)))
        done += len(commands(sent, RunOp))
        sent = reported(harness, sent, 1000)
    assert done == 10_000 and MAX_UNITS / 2 <= most <= MAX_UNITS


def test_a_client_alone_may_have_more_unfinished():
    harness = harness_of(ADD, meta(4))
    sent = submit(harness, *ops(10_000))
    assert MAX_UNITS / 2 < len(commands(sent, RunOp)) <= ALONE_FACTOR * MAX_UNITS
    sent = reported(harness, sent, 1000)
    assert MAX_UNITS < len(commands(sent, RunOp)) <= ALONE_FACTOR * MAX_UNITS


def test_instructions_stay_in_their_order():
    harness = harness_of(ADD, meta(4))
    sent, made = submit(harness, *ops(2_000)), []
    while sent:
        made += [command.outputs[0] for command in commands(sent, RunOp)]
        sent = reported(harness, sent, 1000)
    assert made == [own(1000 + number) for number in range(2_000)]


def test_slow_work_is_queued_in_smaller_amounts():
    product = signature("aten.mm.default", 2, (BIG,))
    harness = harness_of(product, BIG)
    harness.open()
    sent = submit(harness, *ops(100))
    assert len(commands(sent, RunOp)) < 3, "large tensors count for more"
    for _ in range(3):
        sent = reported(harness, sent, 10**9)
    assert len(commands(sent, RunOp)) == 1, "slow work counts for more"


def test_a_read_of_another_client_is_carried_out_at_once():
    harness = harness_of(signature("aten.mm.default", 2, (BIG,)), BIG)
    other = harness.open()
    submit(harness, *ops(100))
    sent = submit(harness, create(own(1, other)), FetchTensor(own(2, other), own(1, other)), session=other)
    assert len(commands(sent, WorkerFetchTensor)) == 1
    assert set(harness.dispatcher.waits()) == {1, 2}, "who waits for a turn is told for whom"


def test_no_client_waits_for_a_lost_worker():
    harness = DispatcherHarness(2)
    harness.open()
    submit(harness, create(A, BIG), Redistribute(A, own(2), over("x, -", PAIR).record(), 0), DefineOp(OP, ADD))
    sent = submit(harness, *ops(3_000), Synchronize(REQUEST))
    assert not harness.state.pending
    for workers, mark in marks(sent):
        for worker in set(workers) - {1}:
            sent += harness.report(worker, Progress(mark, 1000))
    sent = harness.lose(1)
    while sent:
        sent = reported(harness, sent, 1000)
    assert harness.dispatcher.waits() in ({}, {1: {0}})


def test_a_client_that_leaves_does_not_wait_for_its_turn():
    harness = harness_of(ADD, meta(4))
    sent = submit(harness, *ops(5_000))
    left = submit(harness, *ops(5, 9000), Goodbye())
    assert [type(message.command) for message in left] == [WorkerEndSession]
    assert reported(harness, sent, 1000) == [] and harness.dispatcher.waits() == {}


def test_a_mark_that_a_worker_was_not_given_is_refused():
    harness = harness_of(ADD, meta(4), workers=2)
    sent = submit(harness, *ops(5_000))
    (((worker,), mark), *_) = marks(sent)
    for liar, told in ((1 - worker, mark), (worker, 10**9)):
        with pytest.raises(ProtocolError, match="was not given mark"):
            harness.report(liar, Progress(told, 1))
    assert harness.report(worker, Progress(mark, 1)) != []
    assert harness.report(worker, Progress(mark, 1)) == []


def test_a_mark_is_sent_for_a_share_of_the_allowance_not_for_each_turn():
    harness = harness_of(ADD, meta(4))
    sent = []
    for turn in range(200):
        now = submit(harness, *ops(10, 1000 + 10 * turn))
        sent += now
        reported(harness, now, 1000)
    assert len(commands(sent, RunOp)) == 2_000 and 2 <= len(marks(sent)) < 20


def test_a_client_that_is_no_longer_alone_is_not_stuck_with_work_that_has_no_mark():
    harness = harness_of(ADD, meta(4))
    for _ in range(400):  # its allowance grows to the largest
        sent = submit(harness, *ops(100, 20_000))
        reported(harness, sent, 1000)
        submit(harness, FreeTensors(tuple(own(20_000 + number) for number in range(100))))
    turn = 0
    while not marks(sent):
        sent, turn = submit(harness, *ops(100, 70_000 + 100 * turn)), turn + 1
    reported(harness, sent, 1000)
    unmarked = submit(harness, *ops(2 * int(MAX_UNITS), 2000))
    assert marks(unmarked) == [] and len(commands(unmarked, RunOp)) == 2 * MAX_UNITS, "a quarter of 32 allowances"
    harness.open()
    sent = submit(harness, *ops(3_000, 10_000))
    assert commands(sent, RunOp) == [] and len(marks(sent)) == 1
    done = 0
    while sent := reported(harness, sent, 1000):
        done += len(commands(sent, RunOp))
    assert done == 3_000


def keyed(harness, count, key):
    return [harness.dispatcher.open_session("here", 1, key) for _ in range(count)]


def crowd(harness, sessions, count):
    """Commands of sessions that each submit large products, as they are sent; the workers report nothing."""
    sent = []
    for session in sessions:
        op = DefineOp(own(1, session), signature("aten.mm.default", 2, (BIG,)))
        made = [RunOp(own(1, session), (own(2, session),) * 2, (own(3 + n, session),), (), 0, 0) for n in range(count)]
        sent += submit(harness, op, create(own(2, session), BIG), *made, session=session)
    return sent


def test_many_clients_of_a_key_have_a_bounded_amount_of_unfinished_work():
    harness = DispatcherHarness(1)
    sent = crowd(harness, keyed(harness, 100, "team"), 10)
    assert len(commands(sent, WorkerCreateTensor)) <= 2 * ACTIVE_CLIENTS
    (other,) = keyed(harness, 1, "other")
    read = submit(harness, create(own(1, other)), FetchTensor(own(2, other), own(1, other)), session=other)
    assert len(commands(read, WorkerFetchTensor)) == 1
    done = 0
    while sent:
        done, sent = done + len(commands(sent, RunOp)), reported(harness, sent, 10**6)
    assert done == 1000 and harness.dispatcher.queued() == {}


def test_work_of_clients_that_have_left_counts_for_their_key_until_it_is_done():
    harness = DispatcherHarness(1)
    keyed(harness, 2, "other")
    sent = []  # the marks of clients that have left are reported too, and mean nothing
    for session in keyed(harness, 100, "team"):
        sent += crowd(harness, [session], 1)
        harness.close(session)
    assert 0 < len(commands(sent, WorkerCreateTensor)) <= 2 * ACTIVE_CLIENTS
    (last,) = keyed(harness, 1, "team")
    more = crowd(harness, [last], 1)
    assert not commands(more, WorkerCreateTensor)
    while not any(own(3, last) in command.outputs for command in commands(sent, RunOp)):
        sent = reported(harness, sent, 10**6)
        assert sent


def test_keys_take_turns_and_then_their_clients():
    harness = harness_of(ADD, meta(4))
    few, many = keyed(harness, 1, "few"), keyed(harness, 20, "many")
    for session in (*many, *few):
        for op in ops(3):
            harness.dispatcher._fair_queue.add(session, [op], [])
    turns = [harness.dispatcher._fair_queue.next().session for _ in range(4)]
    assert turns == [many[0], few[0], many[1], many[2]]


def test_a_slow_op_on_one_worker_does_not_keep_a_key_from_another():
    harness = DispatcherHarness(2)
    ran = []
    for worker, session in enumerate(keyed(harness, 2, "team")):
        x, y = own(2, session), own(3, session)
        made = [RunOp(own(1, session), (y,) * 2, (own(4 + n, session),), (), 0, 0) for n in range(9)]
        op = DefineOp(own(1, session), signature("aten.mm.default", 2, (BIG,)))
        move = Redistribute(x, y, at(worker, 2).record(), 0)
        sent = submit(harness, op, create(x, BIG), move, session=session)
        while marks(sent):
            sent = reported(harness, sent, 10**6)
        ran.append(commands(submit(harness, *made, session=session), RunOp))
    assert all(ran)


# With real processes

HEAVY_OPS = 400
HEAVY = """
import gt
gt.connect("localhost:{port}")
x = gt.randn(1200, 1200)
for _ in range({ops}):
    y = x @ x
print("issued", flush=True)
y.sum().item()
"""

EXCHANGING = """
import gt
gt.connect("localhost:{port}")
mesh = gt.mesh(2, ("x",))
total = 0
for step in range(20):
    a = gt.ones(8, 8, mesh=mesh, placements="x, -")
    b = gt.ones(8, 8, mesh=mesh, placements="-, x")
    total += (a @ b.T.contiguous() + (a * b).sum()).sum().item()
print(total)
"""


@pytest.fixture
def port(request):
    with serving(request.param) as port:
        yield port


@pytest.mark.parametrize("port", [1], indirect=True)
def test_a_light_client_does_not_wait_for_a_heavy_one(port):
    gt.connect(f"localhost:{port}")
    small = gt.ones(8)
    small.sum().item()
    heavy = start("-c", HEAVY.format(port=port, ops=HEAVY_OPS))
    with running(heavy):
        assert heavy.stdout.readline() == "issued\n"
        waits = [ops_during_read(small) for _ in range(5)]
        assert heavy.poll() is None, "the heavy client should be at work for longer than this"
        assert max(waits) < HEAVY_OPS / 10, waits
        heavy.kill()
    gt.shutdown()


def ops_during_read(tensor):
    """Ops of all clients that the worker runs while a client computes and reads a value."""
    before = gt.debug.get_worker_stats()[0].ops
    (tensor + 1).sum().item()
    return gt.debug.get_worker_stats()[0].ops - before


@pytest.mark.parametrize("port", [2], indirect=True)
def test_two_clients_that_both_exchange_tensors_do_not_deadlock(port):
    clients = [start("-c", EXCHANGING.format(port=port)) for _ in range(2)]
    with running(*clients):
        results = [finish(client, 100) for client in clients]
    assert [code for code, _, _ in results] == [0, 0], results
    assert results[0][1] == results[1][1] == f"{20 * (8 * 64 + 64 * 64.0)}\n"
