"""The pods of the manifests for Kubernetes, as processes on test hosts: the same commands, variables and keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts import hosts, require_hosts
from tests.launch.test_kubernetes import kinds, pods, run
from tests.subprocesses import finish, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
IMAGE = ["--image", "train", "--workers", "2"]
PROGRAM = "import gt; x = gt.ones(8, 4); print((x @ x.T).sum().item(), sorted(w.host for w in gt.workers()))"
HEALTH = """
import urllib.request
print(urllib.request.urlopen("http://gt-server:12346/health", timeout=5).read().decode())
"""


@pytest.fixture(autouse=True)
def _possible() -> None:
    require_hosts()


class Pod:
    """A pod of a template: its command, and its variables with the keys of its secret in a directory."""

    def __init__(self, template: dict, secrets: dict, place: Path) -> None:
        (container,) = template["spec"]["containers"]
        self.command = container["command"][1:]
        volume = next(each["secret"] for each in template["spec"]["volumes"] if each["name"] == "keys")
        texts = secrets["Secret", volume["secretName"]]["stringData"]
        paths = {item["key"]: item["path"] for item in volume.get("items", [])} or {name: name for name in texts}
        for key, path in paths.items():
            file = place / path
            file.parent.mkdir(mode=0o700, exist_ok=True)
            file.touch(mode=0o600)
            file.write_text(texts[key])
        self.environment = {each["name"]: each["value"] for each in container["env"]} | {"GT_KEYS": str(place)}

    def start(self, host):
        return host.start(*self.command, **self.environment)


def test_a_job_runs_on_the_workers_of_the_cluster(tmp_path):
    made = run(["cluster", *IMAGE]) + run(["job", *IMAGE, "--", "-c", PROGRAM])
    secrets = kinds(run(["keys"]))
    places = [tmp_path / name for name in ("server", "worker", "client")]
    for place in places:
        place.mkdir(mode=0o700)
    server, worker, client = [Pod(each, secrets, place) for each, place in zip(pods(made), places, strict=True)]
    with hosts("gt-server", "gt-worker-0", "gt-worker-1", "gt-client") as (first, second, third, last):
        serving = server.start(first)
        workers = [worker.start(second), worker.start(third)]
        with running(serving, *workers):
            code, out, err = finish(client.start(last), 90)
            assert (code, out) == (0, "256.0 ['gt-worker-0', 'gt-worker-1']\n"), err
            assert last.run(HEALTH) == "ok\n\n"
            workers[0].terminate()  # as Kubernetes ends a pod
            assert workers[0].wait(20) == 0
            serving.terminate()
            assert serving.wait(40) == 0
            assert workers[1].wait(20) == 0
