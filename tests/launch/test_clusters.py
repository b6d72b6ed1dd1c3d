"""What every launcher of a cluster gets from `launch`: shown with one that starts workers on this machine."""

import fnmatch
import subprocess
import tomllib

import pytest

import gt
from gt.core.settings import Settings
from gt.launch import clusters
from gt.launch.launched_process import LaunchedProcess
from tests.launch.launched import are_gone, compute, listed
from tests.subprocesses import ROOT


class LocalLauncher:
    """Two workers on this machine."""

    system = "Local"

    def __init__(self, backend="numpy"):
        self._backend = backend
        self.processes = []

    def open_server(self, server, settings):
        return clusters.start_server("127.0.0.1", settings)

    def commands(self, place):
        return [clusters.new_worker(place, device="", backend=self._backend)] * self.count()

    def start(self, commands):
        self.processes += [LaunchedProcess(command) for command in commands]

    def count(self):
        return 2

    def read_statuses(self):
        return {f"process {number}": process.read_status() for number, process in enumerate(self.processes)}

    def stop(self):
        while self.processes:
            self.processes.pop().stop()


SETTINGS = Settings(timeout=60)


def test_a_launcher_of_a_few_lines_makes_a_cluster():
    launcher = LocalLauncher()
    with clusters.launch(launcher, None, SETTINGS, connects=True) as cluster:
        assert compute()
        pids = [each.pid for each in listed()]
        assert len(pids) == 2 and cluster.keys.is_dir()
    assert are_gone(pids) and not cluster.keys.exists()
    with pytest.raises(gt.SessionError, match="launch the workers again") as caught:
        cluster.connect()
    assert str(caught.traceback[-1].path) == __file__


def test_what_was_started_ends_when_a_worker_cannot_start():
    launcher = LocalLauncher("abacus")
    with pytest.raises(gt.WorkerLost, match=r"(?s)worker of process \d .* has not joined: it ended .*abacus"):
        clusters.launch(launcher, None, SETTINGS, connects=True)
    assert launcher.processes == []


def test_a_running_session_is_refused_before_anything_is_started():
    gt.init()
    with pytest.raises(gt.SessionError, match=r"gt.shutdown\(\) before gt.launch.local\(\), or give connect=False"):
        clusters.launch(LocalLauncher(), None, SETTINGS, connects=True)
    gt.shutdown()


def test_every_file_of_the_package_is_in_its_wheels():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = subprocess.run(["git", "ls-files", "gt"], cwd=ROOT, capture_output=True, text=True, check=True)
    data = [name.removeprefix("gt/") for name in files.stdout.split() if not name.endswith((".py", ".md"))]
    patterns = settings["package-data"]["gt"]
    assert [name for name in data if not any(fnmatch.fnmatch(name, each) for each in patterns)] == []
    assert "launch/templates/kubernetes.yaml" in data
