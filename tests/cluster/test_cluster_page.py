"""The commands and the program of docs/cluster.md do what the page says."""

import re
import shlex
import shutil

import pytest

from tests.cluster.clusters import PORT, read_until
from tests.hosts import hosts, require_hosts
from tests.subprocesses import ROOT, finish, running

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "cluster.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
(PROGRAM,) = re.findall(r"```python cluster\n(.*?)```", PAGE, re.DOTALL)


def find(beginning):
    (command,) = [line for line in COMMANDS if line.startswith(beginning)]
    return shlex.split(command)


def test_the_commands_of_the_page_make_a_cluster(tmp_path):
    require_hosts()
    with hosts("server-name", "node1") as (server_host, node):
        homes = {host.name: {"HOME": str(tmp_path / host.name), "GT_KEYS": ""} for host in (server_host, node)}
        for name in homes:
            (tmp_path / name / ".gt" / "keys").mkdir(parents=True, mode=0o700)
            (tmp_path / name / ".gt" / "keys").chmod(0o700)
        making = [find("python -m gt.keys server"), find("python -m gt.keys client")]
        making[1][-1] = str(tmp_path / making[1][-1])  # tests have no directory of their own
        for _, *arguments in making:
            code, _, err = finish(server_host.start(*arguments, **homes["server-name"]))
            assert code == 0, err
        _, source, target = find("scp")
        machine, _, path = target.partition(":")
        shutil.copy(tmp_path / source, tmp_path / machine / path)

        _, *serving = find("python -m gt.server --host 0.0.0.0")
        server = server_host.start(*serving, **homes["server-name"])
        _, *working = find("python -m gt.worker --host server-name")
        workers = [node.start(*working, **homes["node1"]) for _ in range(2)]
        with running(server, *workers):
            assert f"workers join with: {shlex.join(find('python -m gt.worker --host server-name'))}" in read_until(
                server, "workers join with"
            )
            assert read_until(server, "programs join with") == f'programs join with: gt.connect("server-name:{PORT}")\n'
            code, out, err = finish(node.start("-c", PROGRAM, **homes["node1"]))
            assert code == 0, err
            lines = out.splitlines()
            assert lines[0] == "torch.Size([1000, 1000])"
            assert [line.split()[:2] for line in lines[1:]] == [["id", "host"], ["0", "node1"], ["1", "node1"]]
            _, *listing = find("python -m gt.scripts.workers")
            assert finish(node.start(*listing, **homes["node1"]))[1].splitlines()[0] == lines[1]


def test_insecure_servers_of_private_networks_warn(tmp_path):
    require_hosts()
    with hosts("server-name", "node1") as (server_host, node):
        _, *arguments = find("python -m gt.server --host 10.0.0.7")
        arguments[arguments.index("10.0.0.7")] = server_host.address
        server = server_host.start(*arguments, GT_KEYS=str(tmp_path / "keys"))
        worker = node.start("-m", "gt.worker", "--host", "server-name", "--insecure", GT_KEYS=str(tmp_path / "none"))
        with running(server, worker):
            assert "anybody who reaches this port" in read_until(server, "WARNING")
            assert "neither encrypted nor authenticated" in read_until(worker, "WARNING")
            environment = {"GT_INSECURE": "1", "GT_SERVER": f"server-name:{PORT}", "GT_KEYS": str(tmp_path / "none")}
            assert node.run("import gt; print(gt.ones(3).sum().item())", **environment) == "3.0\n"
