"""Random programs of several clients on workers that come and go, in any order of delivery.

The workers are simulated: each runs its commands in order and fails the test on a command that it cannot run, such as
an op on a tensor that it does not hold, or that has another layout than planned. Workers wait for each other in
exchanges, so an order that deadlocks is found. A client waits for its queries, as a real one does.
"""

from collections import Counter
from itertools import count

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gt.core.ids import FIRST_QUERY_ID, MAX_RESULTS
from gt.core.messages import (
    ByteRange,
    DefineOp,
    DropCopies,
    Fetched,
    FetchTensor,
    ForgetOps,
    FreeTensors,
    Goodbye,
    Leaving,
    LocateTensor,
    Queried,
    QueryOp,
    ReadTraffic,
    Redistribute,
    Rejected,
    RunOp,
    Synchronize,
)
from gt.dispatcher import worker_drains
from gt.dispatcher.dispatcher import Dispatcher
from gt.dispatcher.message_queue import ToWorkers
from gt.sharding.spec import DeviceMesh
from gt.sharding.spec_text import parse_spec
from tests.dispatcher.invariants import check_invariants
from tests.dispatcher.simulated_worker import SimulatedWorker, part_of
from tests.dispatcher_harness import create
from tests.records import LARGE, SMALL, own, signature

ZEROS = signature("aten.zeros.default", 0, (SMALL,))
OPS = {
    "zeros": ZEROS,
    "relu": signature("aten.relu.default", 1, (SMALL,)),
    "add": signature("aten.add.Tensor", 2, (SMALL,)),
    "mul": signature("aten.mul.Tensor", 2, (SMALL,)),
    "add_": signature("aten.add_.Tensor", 2, writes=(0,), functional="aten.add.Tensor"),
    "no rule": signature("aten.no_such.default", 2, (SMALL,)),
    "no rule_": signature("aten.no_such_.default", 2, writes=(0,)),
    "two targets": signature("aten.no_such.out", 2, writes=(0, 1)),
    "nonzero": signature("aten.nonzero.default", 1),
    "resize_": signature("aten.resize_as_.default", 2, writes=(0,)),
}
QUERIES = ("nonzero", "resize_")
LAYOUTS = ("-", "x", "x", "- + x")


class Client:
    """`tensors` are the metas of its current tensors by id, `asked` its requests, and `query` the one it waits for.
    `op_ids` are its ops: one for each name and meta, as in a real client."""

    def __init__(self, session):
        self.session = session
        self.tensors = {}
        self.asked = []
        self.query = None
        self.op_ids = {}
        self._last = 100
        self.runs = count(own(FIRST_QUERY_ID, session), MAX_RESULTS)

    def next_id(self):
        self._last += 1
        return own(self._last, self.session)

    def request(self):
        self.asked.append(self.next_id())
        return self.asked[-1]

    def alike(self, meta):
        return [ident for ident, own in self.tensors.items() if own == meta]

    def renew(self, old, new):
        self.tensors = {new if ident == old else ident: meta for ident, meta in self.tensors.items()}


def someone_is_free(machine):
    return any(client.query is None for client in machine.clients.values())


METAS = st.sampled_from([SMALL, SMALL, LARGE])


class Programs(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.dispatcher = Dispatcher()
        self.workers = {}
        self.gone = []
        self.clients = {}
        self.answered = Counter()

    @initialize(workers=st.integers(1, 4), copy_limit=st.sampled_from([None, 0, SMALL.nbytes, LARGE.nbytes]))
    def begin(self, workers, copy_limit):
        self.dispatcher = Dispatcher(copy_limit=copy_limit)
        for _ in range(workers):
            self.join_worker()
        self.open_session()

    def some_client(self, data):
        free = [session for session, client in self.clients.items() if client.query is None]
        return self.clients[data.draw(st.sampled_from(free))]

    def deliver(self, outgoing):
        for message in outgoing:
            if isinstance(message, ToWorkers):
                for worker in message.workers:
                    self.workers[worker].inbox.append(message)
                continue
            assert not isinstance(message.answer, Rejected), message.answer
            request = getattr(message.answer, "request", 0)
            if request:
                self.answered[request] += 1
                self.take_query(self.clients[message.session], message.answer)

    def take_query(self, client, answer):
        if client.query is not None and client.query.request == answer.request:
            if isinstance(answer, Queried):
                client.tensors |= dict.fromkeys([client.query.first, *client.query.written], LARGE)
            client.query = None

    def tell(self, client, instruction, *buffers):
        self.deliver(self.dispatcher.instruct(client.session, [instruction], buffers))

    # Joins and losses

    @precondition(lambda self: len(self.workers) < 4)
    @rule()
    def join_worker(self):
        number, outgoing = self.dispatcher.join_worker("cpu", "here", 1)
        self.workers[number] = SimulatedWorker(number)
        self.deliver(outgoing)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def lose_worker(self, data):
        number = data.draw(st.sampled_from(sorted(self.workers)))
        del self.workers[number]
        self.gone.append(number)
        self.deliver(self.dispatcher.lose_worker(number, "was killed", ""))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def drain_worker(self, data):
        self.deliver(self.dispatcher.report(data.draw(st.sampled_from(sorted(self.workers))), Leaving(), None))

    @rule()
    def check_processes(self):
        self.deliver(self.dispatcher.note_process_check())

    @precondition(lambda self: len(self.clients) < 3)
    @rule()
    def open_session(self):
        client = Client(self.dispatcher.open_session("here", 1))
        self.clients[client.session] = client

    @precondition(lambda self: len(self.clients) > 1)
    @rule(data=st.data(), politely=st.booleans())
    def end_session(self, data, politely):
        client = self.clients.pop(data.draw(st.sampled_from(sorted(self.clients))))
        if politely and client.query is None:
            self.tell(client, Goodbye())
        else:
            self.deliver(self.dispatcher.end_session(client.session))

    # Instructions of clients

    @precondition(someone_is_free)
    @rule(data=st.data(), meta=METAS)
    def create_tensor(self, data, meta):
        client = self.some_client(data)
        ident = client.next_id()
        client.tensors[ident] = meta
        self.tell(client, create(ident, meta), b"")

    @precondition(someone_is_free)
    @rule(data=st.data(), name=st.sampled_from(sorted(OPS)), meta=METAS)
    def run_op(self, data, name, meta):
        client = self.some_client(data)
        op, there = OPS[name], client.alike(meta)
        if len(there) < max(len(op.writes), bool(op.args)):
            return
        inputs = data.draw(st.permutations(there))[: len(op.writes)] if len(op.writes) > 1 else []
        inputs += [data.draw(st.sampled_from(there)) for _ in op.args[len(inputs) :]]
        outputs = [client.next_id() for _ in op.outputs]
        written = [client.next_id() for _ in op.writes]
        for place, renewed in zip(op.writes, written, strict=True):
            client.renew(inputs[place], renewed)
        client.tensors |= dict.fromkeys(outputs, meta)
        op_id = self.op_id_of(client, name, meta)
        if name not in QUERIES:
            self.tell(client, RunOp(op_id, tuple(inputs), (*outputs, *written), (), 0, 0))
        else:
            request, first = client.request(), next(client.runs)
            client.query = QueryOp(request, op_id, tuple(inputs), tuple(written), first, (), 0, 0)
            self.tell(client, client.query)

    def op_id_of(self, client, name, meta):
        if (name, meta) not in client.op_ids:
            op = OPS[name]
            op_id = client.op_ids[name, meta] = client.next_id()
            self.tell(client, DefineOp(op_id, msgspec.structs.replace(op, outputs=(meta,) * len(op.outputs))))
        return client.op_ids[name, meta]

    def some_layout(self, data):
        """A layout over some workers, one of which may be lost."""
        gone = data.draw(st.sampled_from([[], [], *[[number] for number in self.gone]]))
        there = [*sorted(self.workers), *gone]
        members = data.draw(st.permutations(there))[: data.draw(st.integers(1, len(there)))]
        return parse_spec(data.draw(st.sampled_from(LAYOUTS)), DeviceMesh([len(members)], ["x"], members))

    @precondition(someone_is_free)
    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def redistribute(self, data):
        client = self.some_client(data)
        if client.tensors:
            source, target = data.draw(st.sampled_from(list(client.tensors))), client.next_id()
            client.tensors[target] = client.tensors[source]
            self.tell(client, Redistribute(source, target, self.some_layout(data).record(), 0))

    @precondition(someone_is_free)
    @precondition(lambda self: self.workers)
    @rule(data=st.data(), meta=METAS)
    def create_laid_out(self, data, meta):
        client = self.some_client(data)
        layout = self.some_layout(data).record()
        op_id, ident = client.next_id(), client.next_id()
        client.op_ids[op_id, meta] = op_id
        client.tensors[ident] = meta
        self.tell(client, DefineOp(op_id, msgspec.structs.replace(ZEROS, outputs=(meta,), layout=layout)))
        self.tell(client, RunOp(op_id, (), (ident,), (), 0, 0))

    @precondition(someone_is_free)
    @rule(data=st.data())
    def forget_ops(self, data):
        client = self.some_client(data)
        op_ids, client.op_ids = tuple(client.op_ids.values()), {}
        self.tell(client, ForgetOps(op_ids))

    @precondition(someone_is_free)
    @rule(data=st.data())
    def free_tensors(self, data):
        client = self.some_client(data)
        dead = data.draw(st.sets(st.sampled_from(list(client.tensors)))) if client.tensors else set()
        for ident in dead:
            del client.tensors[ident]
        self.tell(client, FreeTensors(tuple(sorted(dead))))

    @precondition(someone_is_free)
    @rule(data=st.data())
    def drop_copies(self, data):
        client = self.some_client(data)
        if client.tensors:
            self.tell(client, DropCopies((data.draw(st.sampled_from(list(client.tensors))),)))

    @precondition(someone_is_free)
    @rule(data=st.data(), ask=st.sampled_from([FetchTensor, LocateTensor]))
    def ask_for_a_tensor(self, data, ask):
        client = self.some_client(data)
        if client.tensors:
            self.tell(client, ask(client.request(), data.draw(st.sampled_from(list(client.tensors)))))

    @precondition(someone_is_free)
    @rule(data=st.data(), traffic=st.booleans())
    def ask_all_workers(self, data, traffic):
        client = self.some_client(data)
        request = client.request()
        self.tell(client, ReadTraffic(request, True) if traffic else Synchronize(request))

    # Work of workers

    def able(self):
        """The workers that can run their next command: in an exchange, after all living members have reached it."""
        heads = {number: worker.inbox[0] for number, worker in self.workers.items() if worker.inbox}
        return sorted(
            number
            for number, head in heads.items()
            if not head.exchanges or all(heads.get(member) is head for member in head.workers if member in self.workers)
        )

    @precondition(lambda self: self.able())
    @rule(data=st.data())
    def work(self, data):
        self.work_once(data.draw(st.sampled_from(self.able())))

    def work_once(self, number):
        head = self.workers[number].inbox[0]
        together = [member for member in head.workers if member in self.workers] if head.exchanges else [number]
        for member in together:
            for report in self.workers[member].step():
                if isinstance(report, Goodbye):
                    del self.workers[member]
                    self.gone.append(member)
                self.deliver(self.dispatcher.report(member, self.sized(member, report), None))

    def sized(self, worker, report):
        """Fill in the size of a read, which the simulated workers do not know."""
        pending = self.dispatcher.state.pending.get(report.request) if isinstance(report, Fetched) else None
        sizes = [read.nbytes for read in pending.reads if read.worker == worker] if pending is not None else []
        return Fetched(report.request, ByteRange("", sizes[0])) if sizes and sizes[0] >= 0 else report

    # Invariants

    @invariant()
    def the_state_is_consistent(self):
        check_invariants(self.dispatcher.state)

    @invariant()
    def no_request_is_answered_twice(self):
        assert all(count == 1 for count in self.answered.values())

    @invariant()
    def nothing_is_kept_that_no_client_holds(self):
        held = {ident for client in self.clients.values() for ident in client.tensors}
        assert {*self.dispatcher.state.tensors, *self.dispatcher.state.missing} == held

    @invariant()
    def nobody_waits_forever(self):
        assert self.able() or not any(worker.inbox for worker in self.workers.values())

    def teardown(self):
        for _ in range(worker_drains.CHECKS + 1):
            while able := self.able():
                self.work_once(able[0])
            self.check_processes()
        self.nobody_waits_forever()
        self.the_state_is_consistent()
        self.everything_is_answered()
        self.workers_hold_what_the_state_says()
        self.all_workers_can_exchange()

    def everything_is_answered(self):
        asked = [request for client in self.clients.values() for request in client.asked]
        assert {request: self.answered[request] for request in asked} == dict.fromkeys(asked, 1)

    def workers_hold_what_the_state_says(self):
        state = self.dispatcher.state
        for number, worker in self.workers.items():
            assert worker.held == {ident: part_of(spec) for ident, spec in self.layouts() if number in spec.mesh}
            assert worker.known.keys() == state.workers[number].known_ops
            assert worker.programs.keys() == {op_id for op_id, workers in self.programs() if number in workers}

    def layouts(self):
        """The layouts of all tensors on workers, by id."""
        state = self.dispatcher.state
        for ident, held in state.tensors.items():
            yield ident, held.spec
            yield from [(alias, spec) for spec, alias in state.copies.get(ident, {}).items()]
        yield from [(previous.ident, previous.tensor.spec) for previous in state.previous_values.values()]

    def programs(self):
        for session in self.dispatcher.state.sessions.values():
            plans = [cached for op in session.ops.values() for cached in op.plans.values()]
            told = [*plans, *session.move_plans.values()]
            yield from [(p.op_id, p.plan.workers) for p in told if p.plan.program is not None]

    def all_workers_can_exchange(self):
        assert [info.worker for info in self.dispatcher.ready_workers()] == list(self.workers)
        if len(self.workers) > 1:
            assert {worker.store for worker in self.workers.values()} <= self.workers.keys()


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(max_examples=200, stateful_step_count=50, deadline=None, report_multiple_bugs=False)
