"""gt.compile: an interrupt of a skipped call leaves the step of an optimizer done or not begun."""

import signal
import sys

import pytest
import torch

import gt
from gt.client.compilation import replayable_call


@pytest.fixture(autouse=True)
def one_worker():
    gt.init()
    yield
    gt.shutdown()


class Training:
    def __init__(self):
        torch.manual_seed(0)
        self.weight = gt.ones(3).requires_grad_()
        self.optimizer = torch.optim.Adam([self.weight], lr=0.1)
        self.step = gt.compile(self.run, check_every=1 << 20)

    def run(self, x):
        self.optimizer.zero_grad()
        loss = torch.nn.functional.dropout((self.weight * x).square(), 0.5).sum()
        loss.backward()
        self.optimizer.step()
        return loss

    def count(self):
        return int(self.optimizer.state[self.weight]["step"])


class Interrupt:
    """Inside `with`, raises SIGINT at the n-th line that a skipped call runs. `is_raised` tells whether it has."""

    def __init__(self, line):
        self.left = line
        self.is_raised = False

    def _trace(self, frame, event, argument):
        if event == "line" and self._is_in_run(frame) and not self.is_raised:
            self.left -= 1
            if self.left < 0:
                self.is_raised = True
                signal.raise_signal(signal.SIGINT)
        return self._trace

    def _is_in_run(self, frame):
        while frame is not None:
            if frame.f_code is replayable_call.ReplayableCall.run.__code__:
                return True
            frame = frame.f_back
        return False

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)


@pytest.mark.slow
def test_an_interrupt_at_any_line_leaves_counts_and_updates_in_step():
    """The weights after n steps are those of a training without interrupts, and the random numbers too."""
    x = gt.ones(3)
    eager, training = Training(), Training()
    history = []
    torch.manual_seed(1)
    for _ in range(1000):
        eager.run(x)
        history.append((eager.weight.tolist(), torch.get_rng_state()))
        if len(history) > 5 + 900:
            break
    torch.manual_seed(1)
    for _ in range(7):
        training.step(x)
    assert training.step.checked == 2
    line, interrupted = 0, 0
    while True:
        with Interrupt(line) as interrupt:
            try:
                training.step(x)
            except KeyboardInterrupt:
                interrupted += 1
        weight, state = history[training.count() - 1]
        assert training.weight.tolist() == weight, f"line {line}"
        assert torch.equal(torch.get_rng_state(), state), f"line {line}"
        if not interrupt.is_raised:
            break
        line += 1
    assert interrupted == line > 30


@pytest.mark.parametrize("size", [1, 1000])
def test_a_plain_tensor_that_is_filled_with_the_same_and_later_with_another_content(size):
    rate = torch.full((size,), 0.5)
    function = gt.compile(lambda x: x * (1 - rate))
    for number in range(10):
        rate.fill_(0.25 if number == 8 else 0.5)
        assert torch.equal(function(gt.ones(2, size)).cpu(), torch.ones(2, size) * (1 - rate)), number
    assert function.skipped >= 3, function.reasons
