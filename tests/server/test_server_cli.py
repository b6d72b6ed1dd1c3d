"""Server, workers and clients started from the command line, as in the README."""

import logging
import os
import signal
import threading
import time

import psutil
import pytest
import zmq

import gt
from gt.client import active_session
from gt.core.errors import SettingsError
from gt.core.messages import ACKNOWLEDGED_BYTES, PROTOCOL, CreateTensor, FetchTensor, Hello, Refused, Welcome
from gt.server import __main__ as server_main
from gt.version import __version__
from gt.wire.codec import Decoder, encode, header_of
from gt.wire.process_identity import this_host
from gt.wire.server_keys import find_keys
from gt.worker import __main__ as worker_main
from tests.records import INLINE, SMALL, own
from tests.subprocesses import (
    finish,
    reserved_port,
    running,
    server_keys,
    serving,
    start,
    start_server,
    wait_for_workers,
    wait_until,
)

CLIENT = """
import sys, torch, gt
seed, rounds = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(seed)
weight = torch.randn(16, 16)
ours = gt.to(weight).requires_grad_()
plain = weight.clone().requires_grad_()
for step in range(rounds):
    x = torch.randn(8, 16)
    for w, v in ((plain, x), (ours, gt.to(x))):
        w.grad = None
        (v @ w).tanh().pow(2).sum().backward()
        with torch.no_grad():
            w -= 0.01 * w.grad
            w[step % 16, :4] *= 0.5
    if step % 10 == 0:
        torch.testing.assert_close(ours.detach().cpu(), plain.detach())
    random = gt.rand(4)
torch.testing.assert_close(ours.detach().cpu(), plain.detach())
torch.manual_seed(seed)
print("right", gt.rand(3).tolist())
"""


@pytest.fixture(scope="module")
def server():
    """A server with two workers, one started before it and one after."""
    with reserved_port() as port:
        early = start("-m", "gt.worker", "--host", "localhost", "-p", str(port), "--threads", "1")
        main = start("-m", "gt.server", "-p", str(port), "--lease", "1")
        late = start("-m", "gt.worker", "--host", "localhost", "-p", str(port), "--threads", "1")
        with running(early, main, late):
            wait_for_workers(port, 2)
            yield port, main, (early, late)


def test_connect_and_compute(server):
    port, *_ = server
    gt.connect(f"localhost:{port}")
    try:
        x = gt.randn(30, 30)
        assert (x @ x).shape == (30, 30)
        assert len(active_session.current().welcome.workers) == 2
        assert {info.worker for info in active_session.current().welcome.workers} == {0, 1}
    finally:
        gt.shutdown()


def test_connect_by_environment(server):
    port, *_ = server
    code, out, err = finish(start("-c", "import gt; print(gt.ones(4).sum().item())", GT_SERVER=f"localhost:{port}"))
    assert (code, out) == (0, "4.0\n"), err


def test_five_clients_at_once_get_every_value_right(server):
    port, *_ = server
    address = {"GT_SERVER": f"127.0.0.1:{port}"}
    clients = [start("-c", CLIENT, str(seed), "60", **address) for seed in (1, 2, 3, 1, 5)]
    with running(*clients):
        results = [finish(client, 100) for client in clients]
    assert [code for code, _, _ in results] == [0] * 5, [err for *_, err in results]
    outputs = [out for _, out, _ in results]
    assert outputs[0] == outputs[3] != outputs[1]


@pytest.mark.parametrize("ending", ["", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "1 / 0"])
def test_a_client_that_leaves_frees_its_tensors(server, ending, fault):
    port, _, workers = server
    code = f"import gt; kept = [gt.ones(20_000_000) for _ in range(4)]; gt.synchronize()\n{ending}"
    before = sum(psutil.Process(worker.pid).memory_info().rss for worker in workers)
    finish(start("-c", code, GT_SERVER=f"localhost:{port}"))

    def freed():
        return sum(psutil.Process(worker.pid).memory_info().rss for worker in workers) < before + 60_000_000

    wait_until(freed, what="the return of 320 MB")
    fault("a client of a server ends, fails or is killed", "its tensors are freed, and other sessions go on")


def test_errors_of_one_client_do_not_touch_another(server, fault):
    port, *_ = server
    gt.connect(f"localhost:{port}")
    try:
        good = gt.ones(3)
        code, _, err = finish(
            start("-c", "import gt; print(gt.ones(3)[gt.tensor([9])])", GT_SERVER=f"localhost:{port}")
        )
        assert code == 1
        assert "out of bounds" in err
        gt.synchronize()
        assert good.sum().item() == 3
        fault("an op of another program on the same server fails", "nothing: only that program is told")
    finally:
        gt.shutdown()


@pytest.fixture
def raw(server):
    """A peer that sends frames of the test."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        endpoint = f"tcp://127.0.0.1:{server[0]}"
        keys = find_keys(server_keys(), endpoint)
        socket.setsockopt(zmq.LINGER, 0)
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = [
            key.encode() for key in (keys.server, keys.public, keys.secret)
        ]
        socket.connect(endpoint)
        yield socket


def ask(socket, frames):
    socket.send_multipart(frames)
    assert socket.poll(5000), "the server does not answer"
    return Decoder(Welcome | Refused).decode(socket.recv_multipart())[0][0]


def test_another_protocol_version_is_refused_with_both_named(raw):
    hello = encode([Hello("9.9", "client", this_host(), 1)])
    answer = ask(raw, [b"GT\x63\x00" + hello[0][4:]])
    assert isinstance(answer, Refused)
    assert f"protocol {PROTOCOL}" in answer.reason
    assert "99" in answer.reason
    assert __version__ in answer.reason


@pytest.mark.parametrize("frames", [[b"junk"], [header_of(b"--") + b"\xff\xff"], [header_of(b"")], []])
def test_junk_is_refused_and_harms_no_peer(raw, server, frames, fault):
    if frames:
        assert isinstance(ask(raw, frames), Refused)
        fault("a peer sends noise", "it is refused with a reason; three times, and it is not heard any more")
    test_connect_and_compute(server)


def test_another_sessions_tensor_is_refused(raw, server):
    gt.connect(f"localhost:{server[0]}")
    try:
        secret = gt.full((2,), 42.0)
        gt.synchronize()
        welcome = ask(raw, encode([Hello(__version__, "client", this_host(), psutil.Process().pid)]))
        assert isinstance(welcome, Welcome)
        answer = ask(raw, encode([FetchTensor((welcome.ident << 40) + 1, secret._ref.id)]))
        assert isinstance(answer, Refused)
        assert "not its own" in answer.reason
        assert secret.tolist() == [42.0, 42.0]
    finally:
        gt.shutdown()


def test_a_client_that_claims_to_be_elsewhere_is_known_to_have_left(raw, server):
    """Its pid means nothing here: its session ends a lease after its connection."""
    gt.connect(f"localhost:{server[0]}")
    try:

        def held():
            return sum(stats.bytes for stats in gt.debug.get_worker_stats().values())

        before = held()
        welcome = ask(raw, encode([Hello(__version__, "client", "another machine", 1)]))
        raw.send_multipart(encode([CreateTensor(own(1, welcome.ident), SMALL, INLINE, None, 0)], [[bytes(16)]]))
        wait_until(lambda: held() > before, what="the tensor")
        raw.close()
        wait_until(lambda: held() == before, what="the end of the session")
    finally:
        gt.shutdown()


def test_a_server_that_other_machines_reach_needs_a_key(tmp_path):
    code, _, err = finish(start("-m", "gt.server", "--host", "0.0.0.0", "-p", "0", GT_KEYS=str(tmp_path / "keys")))
    assert code == 1
    assert "needs a key" in err and "python -m gt.keys server" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("module", ["gt.server", "gt.worker"])
def test_a_setting_that_cannot_be_used_is_a_message(module, monkeypatch):
    monkeypatch.setenv("GT_TIMEOUT", "soon")
    code, _, err = finish(start("-m", module, "-p", "0"), 60)
    assert code == 2 and err.startswith(f"{module}: GT_TIMEOUT='soon' cannot be used"), err


@pytest.mark.parametrize(
    ("main", "options", "problem"),
    [
        (server_main.main, ["-p", "70000"], "-p/--port: '70000': expected a port from 0 to 65535"),
        (server_main.main, ["-p", "-1"], "-p/--port: '-1': expected a port from 0 to 65535"),
        (server_main.main, ["--health-port", "70000"], "--health-port: '70000': expected a port"),
        (server_main.main, ["--lease", "nan"], "--lease: 'nan': expected seconds"),
        (server_main.main, ["--limits", "bytes=0"], "--limits: 'bytes=0': bytes=0: expected at least 1 byte"),
        (worker_main.main, ["-p", "0"], "-p/--port: '0': expected a port from 1 to 65535"),
        (worker_main.main, ["--threads", "-1"], "--threads: '-1': expected a whole number"),
        (worker_main.main, ["--memory", "1.5G"], "--memory: '1.5G': expected a number of bytes"),
    ],
)
def test_an_option_that_cannot_be_used_is_a_message(monkeypatch, capsys, main, options, problem):
    monkeypatch.setattr("sys.argv", ["gt", *options])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert problem in capsys.readouterr().err


def test_an_address_of_another_machine_is_named(tmp_path):
    code, _, err = finish(start("-m", "gt.server", "--host", "10.99.99.99", "-p", "0", "--insecure"))
    assert code == 1 and "is an address of this machine, or 0.0.0.0" in err and "Traceback" not in err


def test_a_port_in_use_is_an_error(server):
    code, _, err = finish(start("-m", "gt.server", "-p", str(server[0])))
    assert code == 1
    assert "is another server running there?" in err


def test_connecting_without_a_server_times_out_with_a_hint(monkeypatch):
    monkeypatch.setenv("GT_TIMEOUT", "1")
    with reserved_port() as port, pytest.raises(gt.ServerLost, match="python -m gt.server"):
        gt.connect(f"localhost:{port}")


def test_a_server_without_workers_says_so(monkeypatch):
    with serving() as port:
        monkeypatch.setenv("GT_TIMEOUT", "3")
        with pytest.raises(gt.ServerLost, match="0 of 1 workers have joined.*python -m gt.worker"):
            gt.connect(f"localhost:{port}")


def test_a_program_waits_for_the_workers_of_the_environment(monkeypatch):
    """So that a launcher can tell it: the program itself is the same everywhere."""
    with serving() as port:
        for name, value in {"GT_TIMEOUT": "2", "GT_SERVER": f"localhost:{port}", "GT_MIN_WORKERS": "7"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(gt.ServerLost, match="0 of 7 workers have joined"):
            gt.init()
        with pytest.raises(gt.ServerLost, match="0 of 5 workers have joined"):
            gt.init(min_workers=5)


@pytest.fixture
def pair():
    """A session at a server with one worker, which a test may kill."""
    main, port = start_server()
    worker = start("-m", "gt.worker", "-p", str(port))
    with running(main, worker):
        gt.connect(f"localhost:{port}")
        yield main, worker
        gt.shutdown()


def test_a_killed_worker_is_an_error_for_its_client(pair, fault):
    _, worker = pair
    x = gt.ones(3).exp()
    gt.synchronize()
    worker.kill()
    worker.communicate()
    with pytest.raises(gt.WorkerLost, match="ended without a goodbye.*aten.exp") as error:
        while True:
            x.tolist()
    fault("a worker of a server is killed", error.value)


def test_a_server_that_goes_away_is_an_error_at_the_next_read(pair, fault):
    main, _ = pair
    x = gt.ones(3)
    assert x.sum().item() == 3
    main.kill()
    begun = time.monotonic()
    ended = rf"pid {main.pid}\) has ended; the session and its tensors are lost"
    with pytest.raises(gt.ServerLost, match=ended) as error:
        x.sum().item()
    fault("a server is killed", error.value)
    assert time.monotonic() - begun < 10
    with pytest.raises(gt.ServerLost):
        gt.ones(2).tolist()


def test_a_worker_that_gets_sigterm_while_its_server_ends_exits_with_code_0():
    main, port = start_server()
    worker = start("-m", "gt.worker", "-p", str(port))
    with running(main, worker):
        wait_for_workers(port, 1)
        worker.send_signal(signal.SIGSTOP)
        worker.send_signal(signal.SIGTERM)
        main.send_signal(signal.SIGTERM)
        assert finish(main, 15)[0] == 0
        worker.send_signal(signal.SIGCONT)
        code, _, err = finish(worker, 15)
        assert (code, "Traceback" in err) == (0, False), err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_server_and_worker_stop_cleanly_on_a_signal(number):
    main, port = start_server()
    worker = start("-m", "gt.worker", "-p", str(port))
    with running(main, worker):
        wait_for_workers(port, 1)
        worker.send_signal(number)
        main.send_signal(number)
        code, _, err = finish(worker, 15)
        assert code in (0, 130), err
        code, _, err = finish(main, 15)
        assert code == 0
        assert "Traceback" not in err


def test_a_server_without_a_port_prints_the_port_that_it_chose():
    main, port = start_server()
    with running(main):
        assert f"GT server at tcp://127.0.0.1:{port}; workers join with: python -m gt.worker -p {port}" in (
            main.stderr.readline()
        )


def test_a_worker_ends_with_its_server(fault):
    main, port = start_server()
    worker = start("-m", "gt.worker", "-p", str(port))
    with running(main, worker):
        wait_for_workers(port, 1)
        main.kill()
        main.communicate()
        code, _, err = finish(worker, 15)
        assert code == 1
        assert "has ended" in err
        fault("the workers of a server that is killed", f"end with exit code {code}")


def test_a_server_prints_the_death_of_a_worker_by_default():
    main, port = start_server()
    worker = start("-m", "gt.worker", "-p", str(port))
    with running(main, worker):
        wait_for_workers(port, 1)
        worker.kill()
        worker.communicate()
        said = ""
        while "worker 0" not in said:
            said = main.stderr.readline()
            assert said, "the server has ended"
        assert "has ended without a goodbye" in said


def test_a_log_in_a_pipe_that_nobody_reads_is_refused(tmp_path):
    path = tmp_path / "server.log"
    os.mkfifo(path)
    with pytest.raises(SettingsError, match="cannot be written"), server_main._logged_to(path):
        pass


def test_the_log_file_does_not_grow_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(server_main, "MAX_LOG", 1000)
    path = tmp_path / "server.log"
    with server_main._logged_to(path):
        for number in range(200):
            logging.getLogger("gt.dispatcher").info("client %d joined", number)
    assert {each.name for each in tmp_path.iterdir()} == {"server.log", "server.log.1"}
    assert all(each.stat().st_size <= 1000 for each in tmp_path.iterdir())
    assert "client 199 joined" in path.read_text()


def test_a_program_that_waited_for_workers_is_sent_as_much_as_any_other():
    main, port = start_server()
    with running(main):
        late = threading.Timer(1.5, lambda: started.append(start("-m", "gt.worker", "-p", str(port))))
        started = []
        late.start()
        gt.connect(f"localhost:{port}")
        late.join()
        with running(*started):
            x = gt.ones(15_000)  # small enough that its bytes count as those of messages
            for _ in range(ACKNOWLEDGED_BYTES // x.nbytes + 20):
                assert x.tolist()[0] == 1
            gt.shutdown()
