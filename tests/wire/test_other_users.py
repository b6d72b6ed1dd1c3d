"""Other users of the machine, and other sessions, can neither join a server nor read its keys and shared buffers."""

import contextlib
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
import zmq
from zmq.utils import z85

import gt
from gt.client import active_session
from gt.core.errors import SettingsError
from gt.core.messages import ByteRange, CreateTensor, FetchTensor, Located, LocateTensor, Refused, Rejected
from gt.dispatcher.message_queue import ToClient
from gt.launch.local_processes import LocalProcesses
from gt.wire import shared_memory
from gt.wire.authentication import AcceptedKeys, authenticate
from gt.wire.codec import MAX_FRAME
from gt.wire.private_files import monitor_directory
from gt.wire.process_identity import this_host
from gt.wire.server_keys import find_keys, make_keys, remove_keys, write_keys
from gt.worker.exchange import ProcessExchange
from tests.dispatcher.recording_server import RecordingServer, hello
from tests.records import INLINE, SMALL, own
from tests.subprocesses import running, server_keys, start, start_server, wait_for_workers, wait_until

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
ENDPOINT = "tcp://127.0.0.1:12345"
BECOME = f"""
import os, socket, sys, zmq
from zmq.utils.monitor import recv_monitor_message
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""


def as_nobody(program, *arguments, imports=""):
    """Run a program as another user; gives its output. It becomes that user after its imports, because other users may
    not be able to read the interpreter's files."""
    run = subprocess.run(
        [sys.executable, "-c", f"{imports}\n{BECOME}{program}", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.fixture(scope="module")
def server():
    """A server with a worker."""
    main, port = start_server()
    with running(main, start("-m", "gt.worker", "-p", str(port), "--threads", "1")):
        wait_for_workers(port, 1)
        yield main, port


JOIN = """
endpoint, key = sys.argv[1:]
socket = zmq.Context().socket(zmq.DEALER)
if key:
    socket.curve_serverkey = key.encode()
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
events = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
socket.connect(endpoint)
print({zmq.EVENT_HANDSHAKE_SUCCEEDED: "let in"}.get(recv_monitor_message(events)["event"], "kept out"))
sys.stdout.flush()
os._exit(0)
"""


@needs_root
@pytest.mark.parametrize("knows", ["nothing", "another key", "the server's public key"])
def test_another_user_cannot_join_a_server(server, knows, fault):
    _, port = server
    endpoint = f"tcp://127.0.0.1:{port}"
    keys = find_keys(server_keys(), endpoint)
    other = zmq.curve_keypair()[0].decode()
    key = {"nothing": "", "another key": other, "the server's public key": keys.server}[knows]
    assert as_nobody(JOIN, endpoint, key) == "kept out"
    fault(
        f"another user connects to a server and knows {knows}", "the handshake fails; nothing is read of what he sends"
    )


@needs_root
def test_another_user_cannot_read_the_keys(server, fault):
    _, port = server
    (path,) = server_keys().glob(f"*-{port}")
    read = "try: print(open(sys.argv[1]).read())\nexcept OSError as error: print(type(error).__name__)"
    happened = as_nobody(read, path)
    assert happened == "PermissionError"
    fault("another user reads the keys of a server", f"`{happened}`")


@needs_root
def test_another_user_cannot_reach_the_dispatcher_of_local_workers(monkeypatch, fault):
    started = []
    begin = LocalProcesses.__init__
    monkeypatch.setattr(
        LocalProcesses, "__init__", lambda self, *arguments: (started.append(self), begin(self, *arguments))[1]
    )
    gt.init(workers=1)
    try:
        path = started[0].endpoint.removeprefix("ipc://")
        assert Path(path).is_socket()
        connect = (
            "try: socket.socket(socket.AF_UNIX).connect(sys.argv[1])\n"
            "except OSError as error: print(type(error).__name__)"
        )
        happened = as_nobody(connect, path)
        assert happened == "PermissionError"
        fault("another user connects to the socket of local workers", f"`{happened}`")
    finally:
        gt.shutdown()


READ = """
import errno
def attempt(name, act):
    try:
        print(name, repr(act())[:80])
    except OSError as error:
        print(name, errno.errorcode.get(error.errno, type(error).__name__))
pid, buffer, keys, sockets = sys.argv[1:]
attempt("descriptors", lambda: os.listdir(f"/proc/{pid}/fd"))
attempt("environment", lambda: open(f"/proc/{pid}/environ").read())
attempt("memory", lambda: open(f"/proc/{pid}/mem", "rb").read(1))
attempt("buffer", lambda: open(buffer, "rb").read(1))
attempt("removal", lambda: os.unlink(buffer))
attempt("keys", lambda: os.listdir(keys))
attempt("sockets", lambda: os.listdir(sockets))
"""


@needs_root
def test_another_user_reads_nothing_of_a_program_and_its_workers():
    """Its descriptors, among them those of shared memory, its environment, its memory, its shared buffers, the keys of
    servers, and the sockets of its monitor."""
    gt.init(workers=1)
    name, _ = shared_memory.create(16)
    path = shared_memory.path_of(name)
    try:
        (worker,) = gt.workers()
        for pid in (os.getpid(), worker.pid):
            found = as_nobody(READ, pid, path, server_keys(), monitor_directory())
            answers = dict(line.split(maxsplit=1) for line in found.splitlines())
            assert answers.keys() == {"descriptors", "environment", "memory", "buffer", "removal", "keys", "sockets"}
            assert set(answers.values()) <= {"EACCES", "EPERM"}, answers
    finally:
        path.unlink()
        gt.shutdown()


ASK = """
paths = "/ /metrics /api/status.json /api/program.json /api/timeline.json /events /health /metrics?token=x"
for path in paths.split():
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    print(path, answer.status, answer.read().decode().strip()[:40])
"""


@needs_root
def test_another_user_sees_nothing_on_a_dashboard(embedded):
    """Without its token: `/health` says that it is there, and nothing else is told."""
    found = as_nobody(ASK, gt.dashboard().port, imports="import encodings.idna, http.client").splitlines()
    assert [line for line in found if " 403 This dashboard needs its token." not in line] == ["/health 200 ok"]
    assert len(found) == 8


STORE = """
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
print(b"".join(key.encode() + store.get(key) for key in store.list_keys()).hex())
"""


@needs_root
def test_another_user_reads_nothing_in_the_store_of_workers(tmp_path):
    """The store of torch listens at loopback, and tells all that is in it: that is encrypted."""
    exchange = ProcessExchange(0, "cpu")
    port = exchange.host_store()
    exchange.join_store("127.0.0.1", port, 0, "token of the store")
    exchange.rendezvous.require_store().set("failure", "a text about the user's data")
    found = bytes.fromhex(as_nobody(STORE, port, imports="import torch.distributed as dist"))
    assert found and b"user's data" not in found and b"failure" not in found and this_host().encode() not in found


@needs_root
@pytest.mark.parametrize("plant", ["a directory", "a link", "a file"])
def test_what_another_user_has_planted_is_not_used(tmp_path, plant, monkeypatch):
    """In the directory for temporary files, where all users may write."""
    place = tmp_path / "tmp"
    place.mkdir()
    place.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", None)
    planted = monitor_directory()
    assert planted.is_relative_to(place) or not str(planted).startswith(str(place))
    if not planted.is_relative_to(place):
        pytest.skip("sockets of monitors are elsewhere")
    if plant == "a directory":
        planted.mkdir(0o777)
        planted.chmod(0o777)
        os.chown(planted, NOBODY, NOBODY)
    elif plant == "a link":
        (place / "elsewhere").mkdir()
        planted.symlink_to(place / "elsewhere")
        os.chown(planted, NOBODY, NOBODY, follow_symlinks=False)
    else:
        planted.write_text("")
        os.chown(planted, NOBODY, NOBODY)
    gt.init(workers=1)
    try:
        assert gt.ones(3).sum().item() == 3
        assert not list(place.rglob("*.sock")), "no socket where somebody else may enter"
    finally:
        gt.shutdown()


def test_only_a_client_with_the_key_is_authenticated():
    question = [b"1.0", b"7", b"gt", b"127.0.0.1", b"", b"CURVE", b"k" * 32]
    keys = AcceptedKeys(z85.encode(b"k" * 32).decode(), None)
    assert authenticate(question, keys)[:3] == [b"1.0", b"7", b"200"]
    for other in (
        [*question[:6], b"x" * 32],
        [*question[:5], b"NULL"],
        [*question[:5], b"PLAIN", b"a", b"b"],
        [],
        [b"1.0"],
    ):
        assert authenticate(other, keys)[2] == b"400"


# Keys


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "keys"


def test_keys_are_found_by_their_port_and_are_private(directory):
    _, keys = make_keys()
    write_keys(directory, ENDPOINT, keys)
    assert find_keys(directory, ENDPOINT) == keys
    assert find_keys(directory, "tcp://127.0.0.1:999") is None and find_keys(directory, "ipc:///x") is None
    (path,) = directory.iterdir()
    assert [stat.S_IMODE(place.stat().st_mode) for place in (directory, path)] == [0o700, 0o600]


def test_keys_of_a_server_that_is_gone_are_not_found_and_are_replaced(directory):
    _, keys = make_keys()
    write_keys(directory, ENDPOINT, msgspec.structs.replace(keys, mark="1"))
    assert find_keys(directory, ENDPOINT) is None
    write_keys(directory, ENDPOINT, keys)
    assert find_keys(directory, ENDPOINT) == keys


def test_a_server_removes_its_own_keys_only(directory):
    (_, mine), (_, others) = make_keys(), make_keys()
    write_keys(directory, ENDPOINT, others)
    remove_keys(directory, ENDPOINT, mine)
    assert find_keys(directory, ENDPOINT) == others
    remove_keys(directory, ENDPOINT, others)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("change", ["open directory", "open file", "another owner", "no keys", "a link"])
def test_keys_that_others_could_have_written_are_refused(directory, change):
    _, keys = make_keys()
    write_keys(directory, ENDPOINT, keys)
    (path,) = directory.iterdir()
    if change == "another owner":
        if os.getuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(directory, NOBODY, NOBODY)
    elif change == "a link":
        path.rename(directory / "elsewhere")
        path.symlink_to(directory / "elsewhere")
    elif change == "no keys":
        path.write_text("{}")
    else:
        (directory if "directory" in change else path).chmod(0o755)
    with pytest.raises(SettingsError):
        find_keys(directory, ENDPOINT)


def test_a_server_ends_with_a_hint_where_keys_cannot_be_private(tmp_path):
    tmp_path.chmod(0o777)
    process = start("-m", "gt.server", "-p", "0", GT_KEYS=str(tmp_path))
    with running(process):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "mode 777" in err and "GT_KEYS" in err and "Traceback" not in err


def test_a_server_that_was_killed_and_started_again_is_found(monkeypatch, fault):
    main, port = start_server()
    worker = start("-m", "gt.worker", "-p", str(port), "--threads", "1", GT_HEARTBEAT_TIMEOUT="5")
    with running(main, worker):
        wait_for_workers(port, 1)
        main.kill()
        main.communicate(timeout=30)
        worker.communicate(timeout=30)
        monkeypatch.setenv("GT_TIMEOUT", "1")
        with pytest.raises(gt.ServerLost, match="no server of this user answers"):
            gt.connect(f"localhost:{port}")
        again = start("-m", "gt.server", "-p", str(port))
        with running(again, start("-m", "gt.worker", "-p", str(port), "--threads", "1")):
            wait_for_workers(port, 1)
            fault(
                "a server is killed and started again",
                "its old keys are ignored; clients and workers find the new ones",
            )


# Shared buffers


def test_a_shared_buffer_is_known_by_its_sessions_secret(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "_DIRECTORY", tmp_path)
    name, _ = shared_memory.create(8, session_secret="ours")
    assert shared_memory.is_made_with(name, "ours")
    assert not shared_memory.is_made_with(name, "theirs") and not shared_memory.is_made_with(name, "")
    number = int(name.split("-")[2])
    assert not shared_memory.is_made_with(name.replace(f"-{number}-", f"-{number + 1}-"), "ours")
    assert not shared_memory.is_made_with("", "ours") and not shared_memory.is_made_with(
        shared_memory.create(8)[0], "ours"
    )


def test_a_session_cannot_take_the_shared_buffer_of_another(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(shared_memory, "_DIRECTORY", tmp_path)
    server = RecordingServer()
    with contextlib.closing(server):
        server.hear(b"worker", hello("worker"))
        (victim,) = server.hear(b"victim", hello("client"))
        (thief,) = server.hear(b"thief", hello("client"))
        assert victim.session_secret and victim.session_secret != thief.session_secret
        name, _ = shared_memory.create(16, session_secret=victim.session_secret)
        create = CreateTensor(own(1, thief.ident), SMALL, ByteRange(name, 16), None, 0)
        (refused,) = server.hear(b"thief", create)
        assert "is not one of session 2" in refused.reason and (tmp_path / name).exists()
        server.hear(b"thief", CreateTensor(own(1, thief.ident), SMALL, INLINE, None, 0), payloads=[[bytes(16)]])
        fetch = FetchTensor(own(2, thief.ident), own(1, thief.ident), place=ByteRange(name, 16))
        (written,) = server.hear(b"thief", fetch)
        assert written.reason == refused.reason, "a thief cannot have a worker write to it either"
        server.hear(b"victim", CreateTensor(own(1, victim.ident), SMALL, ByteRange(name, 16), None, 0))
        (answer,) = server.hear(b"victim", LocateTensor(own(2), own(1)))
        assert isinstance(answer, Located)
        fault(
            "a session names the shared buffer of another's upload", "refused: " + refused.reason.split(" (server")[0]
        )


# Limits


def greeting(mechanism):
    """How a connection of ZeroMQ begins."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize("mechanism", [b"CURVE", b"NULL"])
def test_frames_without_a_handshake_cost_the_server_little(server, mechanism, fault):
    main, port = server
    before = psutil.Process(main.pid).memory_info().rss
    with contextlib.ExitStack() as stack:
        for size in [1 << 26] * 30 + [MAX_FRAME] * 30:
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):  # it is disconnected
                stranger.sendall(greeting(mechanism) + b"\x06" + struct.pack(">Q", size) + bytes(size // 2))
        assert psutil.Process(main.pid).memory_info().rss - before < 100e6
        fault("60 strangers begin frames of up to 64 MB", "the server takes less than 100 MB for all of them")
    wait_for_workers(port, 1)


def test_a_client_that_takes_nothing_is_given_a_limited_amount(server, fault):
    """120 reads of 16 MB in one small message."""
    main, port = server
    gt.connect(f"localhost:{port}")
    try:
        session = active_session.current()
        worker = psutil.Process(session.welcome.workers[0].pid)
        x = gt.to(torch.ones(1 << 22))
        gt.synchronize()
        channel = session.channel
        idents = [next(session.ids) for _ in range(120)]
        before = shutil.disk_usage("/dev/shm").used + worker.memory_info().rss
        channel.send([FetchTensor(ident, x._ref.id) for ident in idents], [])
        wait_until(lambda: channel._link._socket.poll(0), what="the first answer")
        most = 0
        for _ in range(20):
            most = max(most, shutil.disk_usage("/dev/shm").used + worker.memory_info().rss - before)
            assert not main.poll()
        assert most < 500e6
        assert [bytes(session.inbox.wait(ident).buffers[0][:4]) for ident in idents] == [struct.pack("f", 1)] * 120
        fault("120 reads of 16 MB in one message", "all are answered; less than 500 MB of them exist at a time")
    finally:
        gt.shutdown()


def test_a_session_that_makes_the_server_hold_too_much_is_ended(monkeypatch, fault):
    monkeypatch.setattr("gt.dispatcher.backpressure.MAX_UNREAD", 0)
    monkeypatch.setattr("gt.dispatcher.backpressure.MAX_QUEUED", 5)
    server = RecordingServer()
    with contextlib.closing(server):
        server.hear(b"worker", hello("worker"))
        server.hear(b"client", hello("client"))
        for number in range(0, 6, 2):
            told = server.hear(b"client", *[FetchTensor(own(number + more), own(99)) for more in (0, 1)])
        assert [type(message) for message in told] == [Refused] and "6 instructions with 0 bytes wait" in told[0].reason
        assert b"client" not in server.peers.by_identity
        fault("a client takes no answers and asks for more without end", "its session is ended, and it is told why")


def test_a_failed_read_no_longer_counts(monkeypatch):
    server = RecordingServer()
    with contextlib.closing(server):
        server.hear(b"worker", hello("worker"))
        server.hear(b"client", hello("client"))
        server.peers.by_identity[b"client"].backpressure.begin(own(1), 1 << 30)
        assert server.hear(b"client", FetchTensor(own(2), own(99))) == []
        server.delivery.send([ToClient(1, Rejected(own(1), "gone"))])
        server._check(server.peers.by_identity[b"client"])
        server.client_messages.proceed()
        assert [type(message) for to, message in server.sent if to == b"client"] == [Rejected, Rejected]
