"""Workers as actors of a real Ray cluster of two nodes on this machine, at loopback."""

import os
import sys

import pytest

import gt
from tests.launch.launched import are_gone, compute, kill, listed, parent_of
from tests.subprocesses import finish, running, serving, start, wait_until
from tests.test_docs import LAUNCHED_PROGRAMS
from tests.test_docstrings import DOCSTRINGS, LAUNCHING, run_example

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
    pytest.mark.skipif(sys.platform != "linux", reason="reads the parents of processes"),
]


@pytest.fixture(scope="module")
def ray():
    """Ray with a head of 1 CPU and a node of 2 CPUs."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # addresses are those of loopback
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        module = pytest.importorskip("ray", reason="Ray is not installed: make test-launchers")
        cluster_utils = pytest.importorskip("ray.cluster_utils")
        made = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        made.add_node(num_cpus=2)
        module.init(address=made.address, log_to_driver=False)
        yield module
        module.shutdown()
        made.shutdown()


def test_workers_on_two_nodes_are_replaced_when_one_of_them_or_an_actor_is_killed(ray):
    with gt.launch.ray(workers=3) as cluster:
        workers = listed()
        (group,) = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
        assert len(set(group["bundles_to_node_id"].values())) == 2
        assert compute()
        kill(workers[0].pid, 3)  # its actor ends with it
        assert compute()
        kill(parent_of(listed()[0]), 3)  # its worker ends with it
        assert compute()
        pids = [each.pid for each in workers + listed()]
        keys = cluster.keys
        assert keys.is_dir()
    assert are_gone(pids) and not keys.exists()
    wait_until(lambda: ray.available_resources().get("CPU") == 3, what="the return of the resources")


def test_a_server_that_is_an_actor_is_started_again_at_the_same_address(ray):
    cluster = gt.launch.ray(workers=2, server="ray", max_restarts=-1)
    with cluster:
        assert compute()
        server = ray.get(cluster._workers._server.read_status.remote())
        before = {each.pid for each in listed()}
        os.kill(int(server.split('"pid":')[1].split(",")[0]), 9)
        with pytest.raises(gt.ServerLost):
            while True:
                gt.ones(3).sum().item()
        gt.shutdown()
        cluster.connect(min_workers=2)
        assert compute()
        pids = {each.pid for each in listed()}
    assert are_gone(before | pids)
    with pytest.raises(gt.SessionError, match="launch the workers again"):
        cluster.connect()


def test_more_than_the_cluster_has_is_refused_with_what_it_has(ray, monkeypatch, caplog):
    monkeypatch.setenv("GT_TIMEOUT", "1")
    with pytest.raises(gt.SettingsError, match=r"2 workers with 1 CPU and 1 GPU each .* 2 nodes .*: 2 CPU and 0 GPU"):
        gt.launch.ray(workers=2, gpus_per_worker=1)
    assert "need 2 CPU and 2 GPU, and the cluster has 2 nodes" in caplog.text
    wait_until(lambda: ray.available_resources().get("CPU") == 3, what="the return of the resources")


def test_workers_join_a_server_that_runs_already(ray):
    with serving(0) as port, gt.launch.ray(workers=1, server=f"localhost:{port}", connect=False) as cluster:
        assert cluster.address == f"127.0.0.1:{port}" and cluster.keys is None
        gt.connect(cluster.address)
        assert compute()
        gt.shutdown()


def test_a_worker_that_cannot_start_is_named_with_its_output(ray, monkeypatch):
    monkeypatch.setenv("GT_INTERFACE", "nosuch0")
    with pytest.raises(gt.GTError, match=r"nosuch0"):
        gt.launch.ray(workers=1)


PROGRAM = """
import os, sys, ray, gt
ray.init(address=sys.argv[1], log_to_driver=False)
gt.launch.ray(workers=2)  # nobody keeps what this returns
import gc; gc.collect()
print(gt.ones(3).sum().item(), *[each.pid for each in gt.workers()], flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_a_program_that_ends_leaves_no_workers(ray, how):
    program = start("-c", PROGRAM, ray.get_runtime_context().gcs_address, how)
    with running(program):
        code, out, err = finish(program, 120)
    assert code == (0 if how == "ended" else -9), err
    total, *pids = out.split()
    assert total == "3.0"
    wait_until(lambda: are_gone(map(int, pids)), 30, "the end of the workers")


@pytest.mark.parametrize("name", sorted(name for name in LAUNCHING if "gt.launch.ray(" in DOCSTRINGS[name]))
def test_the_example_of_a_public_name_runs(name, ray):
    assert run_example(name, DOCSTRINGS[name]) == ""


def test_the_program_of_the_page_runs(ray, capsys):
    (program,) = [snippet for snippet in LAUNCHED_PROGRAMS if snippet.info == "python ray"]
    exec(compile(program.code, "train.py", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == "torch.Size([1000, 1000])\n2\n"
