"""Ctrl-C ends the running op or read, and not the session; signal handlers do not break GT's own work."""

import os
import signal
import threading

import pytest

import gt
from gt.client import active_session, call_inference, interrupts
from gt.client.cached_calls import QueryCall
from gt.client.interrupts import CriticalSection, is_inside
from gt.core.errors import SessionError
from tests.subprocesses import finish, start


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt), CriticalSection():
        interrupt()
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_does_not_wait():
    done = []
    with pytest.raises(KeyboardInterrupt), CriticalSection():
        interrupt()
        done.append("a part")
        interrupt()
        done.append("the rest")
    assert done == ["a part"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_block_within_a_block_is_refused():
    """Only a signal handler or a finalizer can enter one; the block that it interrupted goes on."""
    done = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: CriticalSection().__enter__())
    try:
        with CriticalSection():
            with pytest.raises(SessionError, match="in the middle of GT's own work"):
                signal.raise_signal(signal.SIGUSR1)
            done.append("the rest")
        assert done == ["the rest"] and not is_inside()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_process_that_another_thread_forks_from_within_a_block_is_outside():
    codes = []

    def fork():
        pid = os.fork()
        if pid == 0:
            os._exit(1 if is_inside() else 0)
        codes.append(os.waitpid(pid, 0)[1])

    with CriticalSection():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert codes == [0]


def raises(number, frame):
    raise TimeoutError("of the program")


class StrikingSet(set):
    """Raises a signal in the middle of entering or leaving a block."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def add(self, ident):
        super().add(ident)
        self._strike("add")

    def discard(self, ident):
        super().discard(ident)
        self._strike("discard")

    def _strike(self, step):
        if step == self.step:
            self.step = ""
            signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize("step", ["add", "discard"])
def test_a_handler_that_raises_at_either_end_of_a_block_leaves_nothing_behind(step, monkeypatch):
    before = signal.signal(signal.SIGUSR1, raises)
    monkeypatch.setattr(interrupts, "_threads_inside", StrikingSet(step))
    try:
        with pytest.raises(TimeoutError), CriticalSection():
            pass
        assert not is_inside()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_programs_own_handler_is_called_once():
    calls = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append((number, frame is not None)))
    try:
        with CriticalSection():
            interrupt()
            assert calls == []
        assert calls == [(signal.SIGINT, True)]
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_is_left_alone():
    def work():
        with CriticalSection():
            seen.append(signal.getsignal(signal.SIGINT))

    seen = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


INTERRUPTED = """
import os, random, signal, threading, time, torch, gt
random.seed(0)
gt.init(**{mode})
x, ones = gt.zeros(200, 200), gt.ones(200, 200)
rounds = 0
def strike():
    time.sleep(random.uniform(0.01, 0.2))
    os.kill(os.getpid(), signal.SIGINT)
    assert caught.wait(20), "the interrupt was lost"
for _ in range({times}):
    caught = threading.Event()
    threading.Thread(target=strike).start()
    try:
        while True:
            x.add_((ones @ ones) / 200)
            torch._foreach_mul_([x, ones], 1.0)
            rounds += 1
            if rounds % 7 == 0:
                x.sum().item()
    except KeyboardInterrupt:
        caught.set()
    added = x[0, 0].item()
    assert x.eq(added).all() and rounds <= added <= rounds + 1, (added, rounds)
    rounds = added
print("went on", (gt.ones(3) * 2).tolist())
"""


@pytest.mark.parametrize(("mode", "times"), [({}, 8), ({"workers": 2}, 8)], ids=["embedded", "processes"])
def test_a_program_goes_on_after_interrupts(mode, times):
    code, out, err = finish(start("-c", INTERRUPTED.format(mode=mode, times=times)), 100)
    assert (code, out) == (0, "went on [2.0, 2.0, 2.0]\n"), err


SIGNALLED = """
import signal, time, torch, gt
gt.init(**{mode})
x, big, y = gt.ones(4), gt.ones(200, 200), gt.zeros(4)
outcomes = dict(right=0, refused=0)
def read(*_):
    try:
        value = (x * 2 + gt.to(torch.ones(4))).sum().item()
        assert value == 12, value
        outcomes["right"] += 1
    except gt.SessionError as error:
        assert "in the middle of GT's own work" in str(error), error
        outcomes["refused"] += 1
    signal.setitimer(signal.ITIMER_REAL, 0.003)
signal.signal(signal.SIGALRM, read)
signal.setitimer(signal.ITIMER_REAL, 0.003)
end, rounds = time.monotonic() + 60, 0
while min(outcomes.values()) < 30 and time.monotonic() < end:
    rounds += 1
    y += 1
    assert (big @ big).sum().item() == 200**3
    assert y.tolist() == [rounds] * 4
    sum(range(20000))  # the program's own work
signal.signal(signal.SIGALRM, signal.SIG_IGN)
gt.synchronize()
print(min(outcomes.values()) > 0, y.sum().item() == 4 * rounds)
"""


@pytest.mark.parametrize("mode", [{}, {"workers": 2}], ids=["embedded", "processes"])
def test_a_signal_handler_reads_in_the_programs_own_work_and_is_refused_in_gts(mode):
    code, out, err = finish(start("-c", SIGNALLED.format(mode=mode)), 100)
    assert (code, out) == (0, "True True\n"), err


FINALIZED = """
import gc, gt
gt.init()
class Reader:
    def __init__(self): self.itself = self
    def __del__(self):
        try: seen.append(x.sum().item())
        except gt.SessionError: seen.append("refused")
seen, x = [], gt.ones(4)
for _ in range(3):
    Reader()
    gc.collect()
print(seen)
"""


def test_a_finalizer_reads_in_the_programs_own_work():
    assert finish(start("-c", FINALIZED))[:2] == (0, "[4.0, 4.0, 4.0]\n")


PROMPT = """
import os, signal, threading, time, gt
gt.init(workers=1)
x = gt.randn(1500, 1500)
for _ in range(200): x = (x @ x) * 1e-3
def strike():
    time.sleep(1)
    begun.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)
begun = []
threading.Thread(target=strike).start()
try: x.sum().item()
except KeyboardInterrupt: print(time.monotonic() - begun[0] < 1)
os._exit(0)
"""


def test_the_first_interrupt_ends_a_wait_promptly():
    assert finish(start("-c", PROMPT))[:2] == (0, "True\n")


SHUT_DOWN = """
import signal, sys, time, gt
gt.init(**{mode})
def stop(*_):
    gt.shutdown()
    if {leaves}:
        sys.exit(3)
signal.signal(signal.SIGALRM, stop)
x, big = gt.ones(4), gt.ones(200, 200)
signal.setitimer(signal.ITIMER_REAL, {seconds})
while True:
    x += 1
    (big @ big).sum().item()
"""


@pytest.mark.parametrize("mode", [{}, {"workers": 1}], ids=["embedded", "processes"])
@pytest.mark.parametrize("seconds", [0.05, 0.1003])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_signal_handler_may_shut_down(mode, seconds, leaves):
    code, _, err = finish(start("-c", SHUT_DOWN.format(mode=mode, seconds=seconds, leaves=leaves)), 60)
    assert (code == 3 and not err) if leaves else (code == 1 and "SessionError" in err), err


SLOW_HANDLER = """
import signal, time, gt
gt.init(**{mode})
x, y, reads = gt.ones(4), gt.zeros(4), 0
def read(*_):
    global reads
    time.sleep(0.03)  # the outbox is flushed meanwhile, because it is idle
    try:
        assert x.sum().item() == 4
        reads += 1
    except gt.SessionError:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0.002)
signal.signal(signal.SIGALRM, read)
signal.setitimer(signal.ITIMER_REAL, 0.002)
end, rounds = time.monotonic() + 40, 0
while reads < 30 and time.monotonic() < end:
    y += 1
    rounds += 1
signal.signal(signal.SIGALRM, signal.SIG_IGN)
print(reads > 0, y[0].item() == rounds)
"""


@pytest.mark.parametrize("mode", [{}, {"workers": 1}], ids=["embedded", "processes"])
def test_a_slow_signal_handler_and_an_idle_flush_do_not_wait_for_each_other(mode):
    code, out, err = finish(start("-c", SLOW_HANDLER.format(mode=mode)), 60)
    assert (code, out) == (0, "True True\n"), err


@pytest.fixture
def usr1():
    """Sets the handler of SIGUSR1 for a test, in a session."""
    gt.init()
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda action: signal.signal(signal.SIGUSR1, lambda number, frame: action())
    signal.signal(signal.SIGUSR1, before)
    gt.shutdown()


def strike_in_inference(monkeypatch, fails=()):
    """Raises SIGUSR1 in the middle of the first inference. Those of the named ops, in order, fail."""
    original, left, struck = call_inference.run_shape_function, list(fails), []

    def run(func, args, kwargs):
        if not struck:
            struck.append(func)
            signal.raise_signal(signal.SIGUSR1)
        if left and str(func) == left[0]:
            left.pop(0)
            raise ImportError("of a module that is only partly imported")
        return original(func, args, kwargs)

    monkeypatch.setattr(call_inference, "run_shape_function", run)


def queries():
    return [call for call in active_session.current().cached_calls.values() if isinstance(call, QueryCall)]


def test_a_handler_issues_an_op_in_the_middle_of_an_inference(usr1, monkeypatch):
    base, made = gt.ones(3), []
    usr1(lambda: made.append(base.exp()))
    strike_in_inference(monkeypatch)
    assert base.sin().tolist() == pytest.approx([0.8414709] * 3)
    assert made[0].tolist() == pytest.approx([2.7182818] * 3)


def test_an_op_of_a_handler_that_torch_cannot_infer_is_refused_and_can_be_repeated(usr1, monkeypatch):
    base, errors = gt.ones(3), []

    def handler():
        with pytest.raises(SessionError, match="set a flag") as found:
            base.exp()
        errors.append(found.value)

    usr1(handler)
    strike_in_inference(monkeypatch, ["aten.exp.default", "aten.sin.default"])
    assert base.sin().tolist() == pytest.approx([0.8414709] * 3)
    assert base.exp().tolist() == pytest.approx([2.7182818] * 3)
    assert len(errors) == 1 and not queries()


def test_a_query_of_a_handler_in_a_block_is_refused_before_it_is_queued(usr1):
    base = gt.ones(3)
    base.nonzero()
    gt.synchronize()
    with CriticalSection(), pytest.raises(SessionError, match="nothing can be read"):
        base.nonzero()
    assert not active_session.current().outbox.queue
