"""Limits of a server's sessions: one client is refused, and another one does not notice."""

import resource

import psutil
import pytest

import gt
from tests.subprocesses import finish, running, serving, start, start_server, wait_for_workers

GREEDY = """
import gt, sys
kept = []
try:
    while True:
        kept.append(gt.ones(int(sys.argv[1])))
        kept[-1][0].item()
except gt.LimitError as error:
    print(str(error).splitlines()[1].strip(), len(kept))
del kept
print(gt.ones(1 << 16).sum().item())
"""
MODEST = """
import gt
x = gt.ones(64, 64)
for _ in range(200):
    x = (x @ x) / 64
print(x.sum().item())
"""


@pytest.mark.parametrize(("limits", "size", "held"), [("bytes=2MiB", 1 << 16, 8), ("tensors=500", 4, 500)])
def test_a_client_over_its_limits_is_refused_and_the_other_goes_on(limits, size, held):
    with serving(1, GT_LIMITS=limits) as port:
        programs = [start("-c", code, str(size), GT_SERVER=f"localhost:{port}") for code in (GREEDY, MODEST)]
        with running(*programs):
            greedy, modest = map(finish, programs)
    assert modest[:2] == (0, "4096.0\n"), modest
    code, out, err = greedy
    assert code == 0, err
    line, total = out.splitlines()
    assert line.startswith("issued aten.") and float(total) == 1 << 16
    assert held - 70 <= int(line.rpartition(" ")[2]) <= held + 1


def test_a_program_waits_at_its_limit_of_instructions():
    """Thousands of ops with a limit of 512: the client waits for its workers, and nothing is refused."""
    many = "import gt; x = gt.zeros(4)\nfor step in range(20000): x = x + step % 3\nprint(x.tolist())"
    with serving(1, GT_LIMITS="instructions=512", GT_HOTPATH="0") as port:
        code, out, err = finish(start("-c", many, GT_SERVER=f"localhost:{port}", GT_HOTPATH="0"))
    assert (code, out) == (0, f"{[float(sum(step % 3 for step in range(20000)))] * 4}\n"), err


def test_limits_that_cannot_be_read_end_the_server_with_code_2():
    code, _, err = finish(start("-m", "gt.server", "-p", "0", "--limits", "byte=4GiB"))
    assert code == 2 and "did you mean 'bytes'" in err


def test_a_read_without_memory_in_the_server_ends_nobody(monkeypatch):
    """The bytes of the read pass through the server."""
    monkeypatch.setenv("GT_TRANSPORT", "gloo")
    server, port = start_server()
    worker = start("-m", "gt.worker", "-p", str(port), GT_TRANSPORT="gloo")
    with running(server, worker):
        wait_for_workers(port, 1)
        gt.connect(f"localhost:{port}")
        x = gt.arange(10 << 20)
        gt.synchronize()
        used = psutil.Process(server.pid).memory_info().vms
        resource.prlimit(server.pid, resource.RLIMIT_AS, (used + (30 << 20), resource.RLIM_INFINITY))
        with pytest.raises(MemoryError, match="the server has no memory to pass 83.9 MB on") as error:
            x.cpu()
        assert error.traceback[-1].path.name == "test_limits.py"
        assert x[-3:].tolist() == [(10 << 20) - 3, (10 << 20) - 2, (10 << 20) - 1]
        resource.prlimit(server.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert x.cpu().sum() == x.sum().item()
        gt.shutdown()
