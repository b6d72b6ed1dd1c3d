"""Two programs that share a tensor over a server."""

from tests.subprocesses import finish, running, serving, start

PUBLISHER = """
import gt, torch
torch.manual_seed(3)
x = gt.randn(8, 4)
before = x.tolist()
gt.publish("weights", x)
gt.subscribe("seen", timeout=30)       # the other one has it
x += 1
gt.publish("changed", x)
gt.subscribe("done", timeout=30)
print(before == gt.subscribe("weights").tolist(), x.spec)
"""
SUBSCRIBER = """
import gt, torch
traffic = sum(gt.debug.get_worker_stats()[0].received.values())
x = gt.subscribe("weights", timeout=30)
torch.manual_seed(3)
assert sum(gt.debug.get_worker_stats()[0].received.values()) == traffic
gt.publish("seen", gt.ones(1))
changed = gt.subscribe("changed", timeout=30)
y = x.requires_grad_()
(y * y).sum().backward()
try:
    x.data.add_(1)
except gt.ReadOnlyError as error:
    print("read-only")
torch.testing.assert_close(changed.cpu(), x.detach().cpu() + 1)
torch.testing.assert_close(y.grad.cpu(), 2 * x.detach().cpu())
gt.publish("done", gt.ones(1))
import time
while True:                            # the publisher ends, and its value stays here
    try:
        gt.subscribe("changed")
        time.sleep(0.05)
    except gt.PublishError:
        break
print(x.spec, float((changed - x).sum()))
"""


def test_two_programs_share_a_tensor_that_outlives_the_publisher():
    with serving(2) as port:
        programs = [start("-c", code, GT_SERVER=f"localhost:{port}") for code in (PUBLISHER, SUBSCRIBER)]
        with running(*programs):
            (code, out, err), (other_code, other_out, other_err) = map(finish, programs)
    assert (code, other_code) == (0, 0), err + other_err
    assert out == "True w, -\n"
    assert other_out == "read-only\nw, - 32.0\n"


KILLED = """
import gt, os, signal
x = gt.subscribe("weights", timeout=30)
print(x.spec.mesh.workers, flush=True)
os.kill(gt.workers()[0].pid, signal.SIGKILL)
try:
    x.tolist()
except gt.WorkerLost as error:
    print("lost")
gt.publish("noticed", gt.ones(1))
gt.subscribe("thanks", timeout=30)
"""
OWNER = """
import gt
x = gt.randn(8, 4)
gt.publish("weights", x)
gt.subscribe("noticed", timeout=30)
try:
    x.tolist()
except gt.WorkerLost as error:
    print("lost")
gt.publish("thanks", gt.ones(1))
import time
while True:                            # until the other one has ended
    try:
        gt.subscribe("noticed")
        time.sleep(0.05)
    except gt.PublishError:
        break
"""


def test_a_lost_worker_is_told_to_both():
    with serving(2) as port:
        programs = [start("-c", code, GT_SERVER=f"localhost:{port}") for code in (OWNER, KILLED)]
        with running(*programs):
            (code, out, err), (other_code, other_out, other_err) = map(finish, programs)
    assert (code, out) == (0, "lost\n"), err
    assert (other_code, other_out) == (0, "(0, 1)\nlost\n"), other_err
