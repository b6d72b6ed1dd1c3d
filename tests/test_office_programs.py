"""Random programs of several clients on workers that come and go, in any order of delivery.

The workers are simulated as far as the office can know them: each does its commands in order and fails the test when it
is told something it cannot do. A client waits for its queries, as a real one does.
"""

from collections import Counter, deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gt.core.messages import (
    DefineOp,
    Fetched,
    FetchTensor,
    FreeTensors,
    Goodbye,
    LocateTensor,
    Queried,
    QueryOp,
    Rejected,
    RunOp,
    Segment,
    StoreReady,
    Synchronize,
    Synchronized,
    WorkerCreateTensor,
    WorkerDefineOp,
    WorkerEndSession,
    WorkerFetchTensor,
    WorkerFreeTensors,
    WorkerHostStore,
    WorkerJoinStore,
    WorkerQueryOp,
    WorkerRunOp,
    WorkerSynchronize,
    WorkerTransfer,
    session_of,
)
from gt.dispatcher.office import Office, ToWorker
from tests.desks import create
from tests.records import ADD, ADD_, LARGE, NONZERO, RESIZE_, SMALL, ZEROS, own

OPS = {1: ZEROS, 2: ADD, 3: ADD_}
QUERIES = {4: NONZERO, 5: RESIZE_}


class SimulatedWorker:
    """`held` and `known` are the ids and ops that a worker would have in its store."""

    def __init__(self, number):
        self.number = number
        self.inbox = deque()
        self.held = set()
        self.known = {}
        self.store = -1

    def step(self):
        """Do the next command; gives the reports it causes."""
        command = self.inbox.popleft()
        match command:
            case WorkerDefineOp(code, signature):
                assert code not in self.known
                self.known[code] = signature
            case WorkerCreateTensor():
                self.held.add(command.id)
            case WorkerRunOp() | WorkerQueryOp():
                return self._run(command)
            case WorkerTransfer(ident, _, source, _):
                assert source != self.number or ident in self.held
                self.held.add(ident)
            case WorkerFreeTensors(ids):
                assert self.held.issuperset(ids)
                self.held.difference_update(ids)
            case WorkerFetchTensor(request, ident):
                assert ident in self.held
                return [Fetched(request, Segment("", SMALL.nbytes))]
            case WorkerSynchronize(request):
                return [Synchronized(request)]
            case WorkerEndSession(session):
                self.held = {ident for ident in self.held if session_of(ident) != session}
                self.known = {code: op for code, op in self.known.items() if session_of(code) != session}
            case WorkerHostStore():
                return [StoreReady(self.number + 1)]
            case WorkerJoinStore(_, port):
                self.store = port - 1
            case _:
                raise AssertionError(f"not a command of this test: {command}")
        return []

    def _run(self, command):
        signature = self.known[command.code]
        assert self.held.issuperset(command.inputs)
        self.held.difference_update([command.inputs[place] for place in signature.writes])
        if isinstance(command, WorkerRunOp):
            self.held.update(command.outputs)
            return []
        self.held.update([*command.written, command.first])
        return [Queried(command.request, (LARGE,), (LARGE,) * len(command.written))]


class Client:
    """`tensors` are the current versions of what it holds, `asked` its requests; `query` is the one it waits for."""

    def __init__(self, session):
        self.session = session
        self.tensors = []
        self.asked = []
        self.query = None
        self._last = 100

    def next_id(self):
        self._last += 1
        return own(self._last, self.session)

    def request(self):
        self.asked.append(self.next_id())
        return self.asked[-1]


def someone_is_free(machine):
    return any(client.query is None for client in machine.clients.values())


class Programs(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.office = Office()
        self.workers = {}
        self.clients = {}
        self.answered = Counter()

    @initialize(workers=st.integers(1, 4))
    def begin(self, workers):
        for _ in range(workers):
            self.join_worker()
        self.open_session()

    def some_client(self, data):
        free = [session for session, client in self.clients.items() if client.query is None]
        return self.clients[data.draw(st.sampled_from(free))]

    def deliver(self, outgoing):
        for message in outgoing:
            if isinstance(message, ToWorker):
                self.workers[message.worker].inbox.append(message.command)
                continue
            assert not isinstance(message.answer, Rejected), message.answer
            request = getattr(message.answer, "request", 0)
            if request:
                self.answered[request] += 1
                self.take_query(self.clients[message.session], message.answer)

    def take_query(self, client, answer):
        if client.query is not None and client.query.request == answer.request:
            client.tensors += [client.query.first] if isinstance(answer, Queried) else []
            client.query = None

    def tell(self, client, instruction, *buffers):
        self.deliver(self.office.instruct(client.session, [instruction], buffers))

    # Comings and goings

    @precondition(lambda self: len(self.workers) < 4)
    @rule()
    def join_worker(self):
        number, outgoing = self.office.join_worker("cpu", "here", 1)
        self.workers[number] = SimulatedWorker(number)
        self.deliver(outgoing)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def lose_worker(self, data):
        number = data.draw(st.sampled_from(sorted(self.workers)))
        del self.workers[number]
        self.deliver(self.office.lose_worker(number, "was killed", ""))

    @precondition(lambda self: len(self.clients) < 3)
    @rule()
    def open_session(self):
        client = Client(self.office.open_session("here", 1))
        self.clients[client.session] = client
        for number, signature in (OPS | QUERIES).items():
            self.tell(client, DefineOp(own(number, client.session), signature))

    @precondition(lambda self: len(self.clients) > 1)
    @rule(data=st.data(), politely=st.booleans())
    def end_session(self, data, politely):
        client = self.clients.pop(data.draw(st.sampled_from(sorted(self.clients))))
        if politely and client.query is None:
            self.tell(client, Goodbye())
        else:
            self.deliver(self.office.end_session(client.session))

    # What clients ask for

    @precondition(someone_is_free)
    @rule(data=st.data(), meta=st.sampled_from([SMALL, LARGE]))
    def create_tensor(self, data, meta):
        client = self.some_client(data)
        client.tensors.append(client.next_id())
        self.tell(client, create(client.tensors[-1], meta), b"")

    @precondition(someone_is_free)
    @rule(data=st.data())
    def run_op(self, data):
        client = self.some_client(data)
        number = data.draw(st.sampled_from(sorted(OPS | QUERIES if client.tensors else {1: ZEROS})))
        signature = (OPS | QUERIES)[number]
        inputs = [data.draw(st.sampled_from(client.tensors)) for _ in signature.args]
        written = [client.next_id() for _ in signature.writes]
        outputs = [client.next_id() for _ in signature.outputs]
        for place, renewed in zip(signature.writes, written, strict=True):
            client.tensors[client.tensors.index(inputs[place])] = renewed
        client.tensors += outputs
        code = own(number, client.session)
        if number in OPS:
            self.tell(client, RunOp(code, tuple(inputs), (*outputs, *written), (), 0, 0))
        else:
            request, first = client.request(), client.next_id()
            client.query = QueryOp(request, code, tuple(inputs), tuple(written), first, (), 0, 0)
            self.tell(client, client.query)

    @precondition(someone_is_free)
    @rule(data=st.data())
    def free_tensors(self, data):
        client = self.some_client(data)
        dead = data.draw(st.sets(st.sampled_from(client.tensors))) if client.tensors else set()
        client.tensors = [ident for ident in client.tensors if ident not in dead]
        self.tell(client, FreeTensors(tuple(sorted(dead))))

    @precondition(someone_is_free)
    @rule(data=st.data(), ask=st.sampled_from([FetchTensor, LocateTensor]))
    def ask_for_a_tensor(self, data, ask):
        client = self.some_client(data)
        if client.tensors:
            self.tell(client, ask(client.request(), data.draw(st.sampled_from(client.tensors))))

    @precondition(someone_is_free)
    @rule(data=st.data())
    def synchronize(self, data):
        client = self.some_client(data)
        self.tell(client, Synchronize(client.request()))

    # What workers do

    @precondition(lambda self: any(worker.inbox for worker in self.workers.values()))
    @rule(data=st.data())
    def work(self, data):
        busy = sorted(number for number, worker in self.workers.items() if worker.inbox)
        self.work_once(data.draw(st.sampled_from(busy)))

    def work_once(self, number):
        for report in self.workers[number].step():
            self.deliver(self.office.report(number, report, None))

    # What always holds

    @invariant()
    def the_state_is_consistent(self):
        self.office.state.validate()

    @invariant()
    def no_request_is_answered_twice(self):
        assert all(count == 1 for count in self.answered.values())

    @invariant()
    def nothing_is_kept_that_no_client_holds(self):
        held = {ident for client in self.clients.values() for ident in client.tensors}
        assert self.office.state.metas.keys() == held

    def teardown(self):
        while any(worker.inbox for worker in self.workers.values()):
            for number, worker in self.workers.items():
                if worker.inbox:
                    self.work_once(number)
        self.the_state_is_consistent()
        self.everything_is_answered()
        self.workers_hold_what_the_state_says()
        self.all_workers_can_meet()

    def everything_is_answered(self):
        asked = [request for client in self.clients.values() for request in client.asked]
        assert {request: self.answered[request] for request in asked} == dict.fromkeys(asked, 1)

    def workers_hold_what_the_state_says(self):
        homes = self.office.state.homes
        for number, worker in self.workers.items():
            assert worker.held == {ident for ident, at in homes.items() if number in at}
            assert worker.known.keys() == self.office.state.workers[number].known

    def all_workers_can_meet(self):
        assert [info.worker for info in self.office.ready_workers()] == list(self.workers)
        if len(self.workers) > 1:
            assert {worker.store for worker in self.workers.values()} <= self.workers.keys()


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(max_examples=200, stateful_step_count=50, deadline=None, report_multiple_bugs=False)
