"""An op that fails on one worker, at each position of a training step: the same values fail over every transport, and
all others are what virtual workers get."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional

import gt
from gt.core.messages import FreeTensors, RunOp, WorkerBeginStep, WorkerCreateTensor, WorkerEndSession
from gt.launch.in_process_channel import InProcessChannel
from gt.worker.engines import PyTorchEngine
from gt.worker.exchange import InProcessExchange
from gt.worker.exchange.in_process_exchange import run_interleaved
from gt.worker.executor import Executor
from gt.worker.failed_value import FailedValue
from tests.worker.exchange.transports import PROCESS_TRANSPORTS, kept_exchanges

HIDDEN = 160  # a gradient of 80 KB, which workers share out
LAYOUTS = {
    "data parallel": ("x, -", "-, -", "-, -"),
    "tensor parallel": ("-, -", "x, -", "-, x"),
}


class FailingEngine(PyTorchEngine):
    """Ops of commands fail while it `is_armed`; those of exchanges, which are resolved when they run, do not."""

    is_running = False
    is_armed = False

    def resolve(self, op):
        function = super().resolve(op)
        return function if self.is_running else self._failing(function)

    def shortcut(self, op, values, scalars=()):
        was, self.is_running = self.is_running, True
        try:
            return self._failing(super().shortcut(op, values, scalars))
        finally:
            self.is_running = was

    def _failing(self, function):
        def call(*args, **kwargs):
            if self.is_armed:
                raise MemoryError("injected")
            return function(*args, **kwargs)

        return call


class Script:
    """The commands of a program, as `(workers, command, bytes)`: those with several workers exchange tensors."""

    def __init__(self):
        self.entries = []

    def record(self, monkeypatch):
        run, run_exchange = Executor.run, InProcessChannel._run_exchange

        def note_run(executor, commands, buffers):
            buffers = list(buffers)
            copies = iter([bytes(buffer) for buffer in buffers])
            for command in commands:
                if type(command) not in (FreeTensors, WorkerEndSession):  # so that everything can be compared
                    data = next(copies) if isinstance(command, WorkerCreateTensor) else None
                    self.entries.append(((executor.worker,), command, data))
            return run(executor, commands, buffers)

        def note_exchange(channel, message):
            self.entries.append((tuple(message.workers), message.command, None))
            return run_exchange(channel, message)

        monkeypatch.setattr(Executor, "run", note_run)
        monkeypatch.setattr(InProcessChannel, "_run_exchange", note_exchange)

    def of(self, worker):
        return [(command, data) for workers, command, data in self.entries if worker in workers]

    @property
    def tokens(self):
        """Tensors by which workers agree on steps: whether they have failed matters, and not their elements."""
        return {command.token for _, command, _ in self.entries if isinstance(command, WorkerBeginStep)}

    def ops(self, worker):
        """The positions among a worker's commands of those that run an op."""
        return [position for position, (command, _) in enumerate(self.of(worker)) if type(command) is RunOp]


def export(nbytes, is_shared, write):
    data = memoryview(bytearray(nbytes))
    write(data)
    return "", data


def run_in_process(script, failing, position):
    executors = [
        Executor(worker, FailingEngine(), InProcessExchange(), export, owns_buffers=False) for worker in (0, 1)
    ]
    done = [0, 0]
    with PyTorchEngine().isolated():
        for workers, command, data in script.entries:
            for worker in workers:
                executors[worker].engine.is_running = type(command) is RunOp
                executors[worker].engine.is_armed = worker == failing and done[worker] == position
                done[worker] += 1
            if len(workers) == 1:
                executors[workers[0]].run([command], [data] if data is not None else [])
            else:
                run_interleaved({worker: executors[worker].start(command) for worker in workers})
    return [executor.tensors for executor in executors]


def run_in_threads(script, failing, position, transport):
    """Each worker runs its commands in three batches: those before the one that fails, that one, and the others."""

    exchanges = kept_exchanges(transport)

    def work(worker):
        engine = FailingEngine()
        executor = Executor(worker, engine, exchanges[worker], export, owns_buffers=False)
        entries = script.of(worker)
        place = position if worker == failing else len(entries) // 2
        with engine.isolated():
            for part in (entries[:place], entries[place : place + 1], entries[place + 1 :]):
                engine.is_armed = (
                    worker == failing and part is not None and len(part) == 1 and part[0] is entries[place]
                )
                for run in _by_kind(part):
                    engine.is_running = type(run[0][0]) is RunOp
                    executor.run([command for command, _ in run], [data for _, data in run if data is not None])
        return executor.tensors

    with ThreadPoolExecutor(2) as threads:
        return [each.result(60) for each in [threads.submit(work, worker) for worker in (0, 1)]]


def _by_kind(entries):
    """Entries in batches of commands that all run ops or all do not: ops are bound while none runs."""
    batches = []
    for entry in entries:
        if batches and (type(batches[-1][-1][0]) is RunOp) == (type(entry[0]) is RunOp):
            batches[-1].append(entry)
        else:
            batches.append([entry])
    return batches


def assert_same(script, found, expected, transport, label):
    for worker in (0, 1):
        assert found[worker].keys() == expected[worker].keys(), label
        for ident, value in expected[worker].items():
            got = found[worker][ident]
            assert isinstance(got, FailedValue) == isinstance(value, FailedValue), f"{label}: worker {worker}, {ident}"
            if isinstance(value, FailedValue):
                assert (got.failure.message, got.failure.op) == (value.failure.message, value.failure.op), label
            elif ident in script.tokens:
                continue
            elif transport == "shared":
                assert torch.equal(got, value), f"{label}: worker {worker}, {ident}"
            else:
                torch.testing.assert_close(got, value, msg=f"{label}: worker {worker}, {ident}")


@pytest.fixture(scope="module")
def scripts():
    """The commands of two training steps, for each layout."""
    made = {}
    for name, specs in LAYOUTS.items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            gt.init(workers=2, mode="virtual")
            made[name] = Script()
            made[name].record(monkeypatch)
            try:
                train(*specs)
            finally:
                gt.shutdown()
    return made


def train(batch, first, second):
    torch.manual_seed(1)
    mesh = gt.mesh(2, ("x",))
    inputs = gt.distribute(torch.randn(8, 128), mesh, batch)
    weights = [torch.randn(HIDDEN, 128) / 10, torch.randn(4, HIDDEN) / 10]
    specs = (first, second)
    weights = [gt.distribute(w, mesh, spec).requires_grad_() for w, spec in zip(weights, specs, strict=True)]
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = (functional.relu(inputs @ weights[0].t()) @ weights[1].t()).square().mean()
        loss.backward()
        optimizer.step()
    assert loss.item() > 0
    gt.synchronize()


def check_positions(script, transport, failing, positions):
    has_failed = False
    for position in positions:
        expected = run_in_process(script, failing, position)
        has_failed |= any(isinstance(value, FailedValue) for values in expected for value in values.values())
        command = script.of(failing)[position][0]
        label = f"op {command.op_id} at position {position} of worker {failing} over {transport}"
        assert_same(script, run_in_threads(script, failing, position, transport), expected, transport, label)
    assert has_failed


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
def test_without_a_failure_values_are_those_of_virtual_workers(scripts, layout, transport):
    script = scripts[layout]
    expected = run_in_process(script, 1, -1)
    values = [value for values in expected for value in values.values()]
    assert len(values) > 50 and not any(isinstance(value, FailedValue) for value in values)
    assert_same(script, run_in_threads(script, 2, 0, transport), expected, transport, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
def test_a_failure_at_some_positions(scripts, layout, transport):
    check_positions(scripts[layout], transport, 1, scripts[layout].ops(1)[1::17])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_at_every_position(scripts, layout, transport, failing):
    check_positions(scripts[layout], transport, failing, scripts[layout].ops(failing))
