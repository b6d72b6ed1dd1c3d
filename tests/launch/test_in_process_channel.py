"""An embedded worker shares the user's process: torch's modes and settings do not leak from one to the other."""

import sys
import threading

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import gt

pytestmark = pytest.mark.usefixtures("anywhere")


@pytest.fixture
def default_dtype():
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


def test_the_default_dtype(default_dtype):
    before = gt.zeros(2)
    halves = gt.arange(3) / 2
    default_dtype(torch.float64)
    assert (gt.zeros(2) + torch.zeros(2)).dtype == torch.float64
    assert (gt.arange(3) / 2).dtype == torch.float64
    assert halves.tolist() == [0.0, 0.5, 1.0]
    assert before.cpu().dtype == torch.float32
    for _ in range(3):  # the first call, and what was learned from it
        assert (gt.arange(3) / 3).tolist() == (torch.arange(3) / 3).tolist()
        assert gt.arange(3).sqrt().tolist() == torch.arange(3).sqrt().tolist()
    assert torch.get_default_dtype() == torch.float64


def torch_state():
    return (
        str(torch._C._dispatch_tls_local_include_set()),
        str(torch._C._dispatch_tls_local_exclude_set()),
        torch._C._is_torch_function_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
    )


def test_a_read_leaves_torchs_state_as_it_was(default_dtype):
    for scope in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu"), torch.device("cpu"), gt.device()):
        with scope:
            before = torch_state()
            (gt.ones(3) + 1).tolist()
            assert torch_state() == before
    default_dtype(torch.float64)
    before = torch_state()
    (gt.ones(3) + 1).tolist()
    assert torch_state() == before


def test_autocast_around_a_read():
    x = gt.ones(4, 4)
    y = x @ x
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert y.cpu().dtype == torch.float32
        assert y.sum().item() == 64


def test_modes_around_a_read():
    x = gt.ones(4, 4)
    with FlopCounterMode(display=False) as counter:
        y = (x @ x).sum()
        assert y.item() == 64
    assert counter.get_total_flops() == 2 * 4**3
    with gt.device():
        assert not isinstance(x.t().cpu(), gt.Tensor)
        assert not isinstance(gt.zeros(0, 3).cpu(), gt.Tensor)
        assert x.numpy().sum() == 16
    with torch.device("meta"):
        assert (x + 1).sum().item() == 32


def test_inference_mode_around_a_flush():
    x = gt.ones(3)
    y = x * 2
    with torch.inference_mode():
        assert y.tolist() == [2.0, 2.0, 2.0]
    y += 1
    assert y.tolist() == [3.0, 3.0, 3.0]


def test_the_worker_draws_nothing_from_the_programs_generator():
    torch.manual_seed(0)
    gt.ones(3).tolist()
    torch.nn.functional.rrelu(gt.ones(3), training=True)
    state = torch.get_rng_state()
    gt.synchronize()
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_share_a_session():
    results = {}

    def work(number):
        x = gt.full((8,), float(number))
        for step in range(300):
            x = x + 1
            x[number] += 1
            if step % 10 == 0:
                assert len(x.nonzero()) == 8
                gt.synchronize()
        results[number] = x.tolist()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads take turns between any two steps
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    finally:
        sys.setswitchinterval(interval)
    assert set(results) == set(range(4))
    for number, values in results.items():
        assert values == [number + 300.0 + (300 if place == number else 0) for place in range(8)]


def test_an_idle_outbox_is_sent():
    session = gt.ones(1)._ref.session
    x = gt.ones(3) + 1
    deadline = threading.Event()
    for _ in range(200):
        if not session.outbox.queue:
            break
        deadline.wait(0.01)
    assert not session.outbox.queue
    assert x.tolist() == [2.0, 2.0, 2.0]
