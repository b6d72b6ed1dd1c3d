"""Servers and workers that launchers start: they end with the process that has started them, and leave no files."""

import os
import re
import stat
import sys

import pytest

import gt
from gt.core.settings import Settings
from gt.launch import clusters
from gt.launch.commands import Command, decode_command, launch_environment, worker_command
from gt.launch.launched_process import LaunchedProcess
from gt.launch.node_keys import NodeKeys, make_node_keys, read_own_keys
from gt.wire.server_keys import read_authorized, read_client_key, read_server_key
from tests.launch.launched import are_gone
from tests.subprocesses import finish, reserved_port, running, start_interpreter, wait_until


def test_keys_pass_as_text_into_private_files(tmp_path):
    keys = make_node_keys()
    for name, own in (("server", keys), ("worker", keys.for_workers())):
        decode_command(Command([], {}, own).to_text()).keys.write(tmp_path / name)
    assert read_server_key(tmp_path / "server") == keys.server
    assert list(read_authorized(tmp_path / "server")) == [keys.client.public]
    assert read_client_key(tmp_path / "worker") == keys.client
    assert [path.name for path in (tmp_path / "worker").iterdir()] == ["client.key"]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "worker", tmp_path / "worker" / "client.key")]
    assert modes == [0o700, 0o600]


def test_without_encryption_there_are_no_keys(tmp_path):
    NodeKeys().write(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_missing_key_for_a_server_elsewhere_is_named(tmp_path):
    with pytest.raises(gt.SettingsError, match=r"client key for the server at tcp://10.0.0.7:1.*gt.keys client NAME"):
        read_own_keys(tmp_path, "tcp://10.0.0.7:1")


def test_a_server_beside_the_program_lets_in_those_with_its_key_and_removes_its_files():
    place = clusters.start_server("127.0.0.1", Settings(timeout=30))
    process = place.process
    try:
        assert place.keys.server is None  # it does not leave the server's machine
        command = worker_command(place.host, place.port, backend="numpy", is_json=True)
        worker = LaunchedProcess(Command(command, launch_environment(), place.keys))
        status = worker.wait_for_announcement(60)
        assert status.announced is not None and status.announced.device == "cpu", status.describe()
        worker.stop()
        stranger = LaunchedProcess(Command(command, launch_environment(), make_node_keys().for_workers()))
        assert stranger.wait_for_announcement(2).announced is None
        stranger.stop()
    finally:
        process.stop()
    files = [process.directory, worker.directory, stranger.directory]
    assert not any(path.exists() for path in files)
    assert are_gone([process.read_status().pid, status.pid])


def test_a_process_that_cannot_start_tells_why():
    ended = []
    process = LaunchedProcess(Command([sys.executable, "-m", "gt.worker", "--backend", "abacus"]), ended.append)
    assert process.wait_for_announcement(60).exit_code == 2
    wait_until(lambda: ended == [process], what="the note of its end")
    assert re.match(r"(?s)ended with exit code 2; it said:.*abacus", process.read_status().describe())
    process.stop()


def test_a_worker_that_no_server_answers_ends_at_its_limit():
    with reserved_port() as port:
        process = LaunchedProcess(Command(worker_command("127.0.0.1", port), launch_environment()), limit=0.5)
        wait_until(lambda: process.read_status().exit_code is not None, 60, "the end of the worker")
        assert "it was not ready within 0.5 s, and was ended" in process.read_status().output
        process.stop()


def test_a_server_that_cannot_listen_is_an_error_with_its_reason():
    with pytest.raises(gt.ServerLost, match=r"(?s)server at 192.0.2.1.* exit code 1; it said:.*cannot listen at"):
        clusters.start_server("192.0.2.1", Settings(timeout=30))


PROGRAM = """
import os, sys
from gt.core.settings import Settings
from gt.launch.clusters import start_server
place = start_server("127.0.0.1", Settings(timeout=30))
print(place.process.read_status().pid, place.process.directory, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_server_ends_with_a_program_that_is_killed():
    program = start_interpreter("-c", PROGRAM)
    with running(program):
        _, out, err = finish(program)
    assert out, err
    pid, directory = out.split()
    wait_until(lambda: are_gone([int(pid)]) and not os.path.exists(directory), what="the end of the server")


@pytest.mark.parametrize(("module", "call"), [("ray", "ray(workers=2)"), ("distributed", "dask(None)")])
def test_a_launcher_whose_library_is_missing_says_what_to_install(module, call, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    extra = call.partition("(")[0]
    with pytest.raises(
        gt.SettingsError, match=rf"gt.launch.{extra}\(\) needs {module}: pip install 'gt-tensor\[{extra}]'"
    ):
        eval(f"gt.launch.{call}")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"workers": 0}, "at least 1"),
        ({"workers": True}, "whole number"),
        ({"workers": 2, "gpus_per_worker": 2}, "start a worker for each GPU"),
        ({"workers": 2, "cpus_per_worker": 0}, "a CPU or a GPU"),
        ({"workers": 2, "strategy": "PAK"}, "PACK"),
        ({"workers": 2, "backend": "torch"}, "pytorch"),
    ],
)
def test_what_cannot_be_asked_of_ray_is_refused_before_anything_starts(arguments, says, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", sys)  # nothing of it is used
    with pytest.raises(gt.SettingsError, match=says):
        gt.launch.ray(**arguments)


def test_a_name_that_launch_does_not_have_is_told():
    with pytest.raises(AttributeError, match="it has Cluster, dask, ray"):
        gt.launch.slrum
