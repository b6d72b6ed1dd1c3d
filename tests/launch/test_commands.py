"""The commands by which launchers start servers and workers are ones that these accept."""

import sys

import pytest

from gt.launch import kubernetes, slurm_job
from gt.launch.commands import ServerPlace, launch_environment, server_command, worker_command
from gt.launch.dask_cluster import DaskLauncher
from gt.launch.ray_cluster import RayLauncher
from gt.server import __main__ as server
from gt.worker import __main__ as worker


def test_a_worker_command_is_understood_by_a_worker():
    command = worker_command("head", 7000, device="cuda:1", backend="numpy", threads=3, insecure=True, is_json=True)
    assert command[:3] == [sys.executable, "-m", "gt.worker"]
    found = worker._parse(command[3:], worker.read_settings())
    assert (found.host, found.port, found.device, found.backend) == ("head", 7000, "cuda:1", "numpy")
    assert (found.threads, found.insecure, found.json) == (3, 1, True)


def test_a_worker_command_leaves_choices_to_the_worker():
    assert worker_command("head", 7000, python="python3")[2:] == ["gt.worker", "--host", "head", "-p", "7000"]


def test_a_server_command_is_understood_by_a_server(monkeypatch):
    command = server_command("10.0.0.7", 0, config="signals.yaml", log="server.log", is_json=True)
    assert command[:3] == [sys.executable, "-m", "gt.server"]
    monkeypatch.setattr(sys, "argv", ["gt.server", *command[3:]])
    found = server._parse()
    assert (found.host, found.port, found.json, found.insecure) == ("10.0.0.7", 0, True, 0)
    assert (str(found.config), str(found.log)) == ("signals.yaml", "server.log")


def test_other_machines_get_the_settings_of_workers_and_the_place_of_their_keys():
    ours = {"GT_TRANSPORT": "gloo", "GT_SERVER": "a:1", "GT_INSTRUCTION_LOG_BYTES": "1", "GT_KEYS": "k", "HOME": "h"}
    found = launch_environment("/there", ours)
    assert {name: found[name] for name in found if name.startswith("GT_")} == {
        "GT_TRANSPORT": "gloo",
        "GT_KEYS": "/there",
    }
    assert "GT_KEYS" not in launch_environment(None, ours)
    assert "HOME" not in found


JOB = ["--workers-per-node=2", "--min-workers=2", "--", "train.py"]
PODS = ["cluster", "--image", "train", "--workers", "2"]
LAUNCHERS = {
    "ray": lambda: RayLauncher(None, 2, {"CPU": 1.0}, "numpy", "PACK", 3),
    "dask": lambda: DaskLauncher(None, "numpy", "", 3),
    "slurm": lambda: slurm_job.JobLauncher(slurm_job._parse(JOB), {}),
    "kubernetes": lambda: kubernetes.PodLauncher(kubernetes._parse(PODS)),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_workers_of_every_launcher_join_the_server_at_its_place(name):
    if name == "dask":
        pytest.importorskip("distributed", reason="Dask is not installed: make test-launchers")
    command = LAUNCHERS[name]().commands(ServerPlace("head", 7000))[0]
    module = command.arguments.index("gt.worker")
    found = worker._parse(command.arguments[module + 1 :], worker.read_settings())
    assert (found.host, found.port) == ("head", 7000)
    assert command.environment["GLIBC_TUNABLES"]  # what all workers have in their environment
