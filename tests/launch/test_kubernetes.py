"""Manifests for Kubernetes: against its schemas, and against each other."""

import io
import json
import os
import re
import shlex
import sys

import pytest
import yaml

from gt.core.settings import read_settings
from gt.launch import kubernetes
from gt.server import __main__ as server_main
from gt.wire.server_keys import AuthorizedKey, ClientKey, ServerKey
from gt.worker import __main__ as worker_main
from tests.subprocesses import ROOT

IMAGE = ["--image", "registry.example/train:1", "--workers", "8"]
ELSEWHERE = ["--name", "team-a", "--namespace", "research"]
COMMANDS = {
    "keys": ["keys"],
    "keys elsewhere": ["keys", *ELSEWHERE],
    "cluster": ["cluster", *IMAGE],
    "cluster elsewhere": ["cluster", *IMAGE, *ELSEWHERE],
    "cluster of GPUs": ["cluster", *IMAGE, "--gpus-per-worker", "1", "--workers-per-pod", "4", "--cpus-per-worker", "6",
                        "--memory-per-worker", "1.5Gi", "--shared-memory", "8Gi"],
    "job": ["job", *IMAGE, "train.py", "--lr", "3"],
    "job elsewhere": ["job", *IMAGE, *ELSEWHERE, "--", "-m", "team.train", "--", "x"],
}  # fmt: skip


def run(arguments):
    """The manifests that a command prints."""
    before, sys.stdout = sys.stdout, io.StringIO()
    try:
        assert kubernetes.main(arguments) == 0
        return list(yaml.safe_load_all(sys.stdout.getvalue()))
    finally:
        sys.stdout = before


def kinds(manifests):
    return {(each["kind"], each["metadata"].get("name", "")): each for each in manifests}


def pods(manifests):
    return [each["spec"]["template"] for each in manifests if "template" in each.get("spec", {})]


@pytest.mark.parametrize("version", ["1.25", "1.29", "1.33", "1.37"])
@pytest.mark.parametrize("name", COMMANDS)
def test_manifests_are_valid_by_the_schemas_of_kubernetes(name, version):
    validate = pytest.importorskip("kubernetes_validate", reason="`make test-kubernetes` installs the schemas")
    for manifest in run(COMMANDS[name]):
        validate.validate(manifest, version, strict=True)


def test_a_cluster_has_its_parts():
    assert list(kinds(run(COMMANDS["cluster"]))) == [
        ("NetworkPolicy", "gt-server"),
        ("NetworkPolicy", "gt-worker"),
        ("NetworkPolicy", "gt-client"),
        ("Service", "gt-server"),
        ("Service", "gt-worker"),
        ("Deployment", "gt-server"),
        ("StatefulSet", "gt-worker"),
    ]


@pytest.mark.parametrize("place", ["", " elsewhere"])
def test_names_lead_to_what_exists(place):
    """Secrets and their keys, volumes, ports, services, and the labels of pods."""
    made = run(COMMANDS["keys" + place]) + run(COMMANDS["cluster" + place]) + run(COMMANDS["job" + place])
    found = kinds(made)
    assert {each["metadata"].get("namespace") for each in made} == {"research" if place else None}
    templates = pods(made)
    assert len(templates) == 3
    for template in templates:
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        (container,) = template["spec"]["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        secret = volumes["keys"]["secret"]
        keys = found["Secret", secret["secretName"]]["stringData"]
        assert {item["key"] for item in secret.get("items", [])} <= set(keys)
        for probe in ("readinessProbe", "livenessProbe"):
            if probe in container:
                assert container[probe]["httpGet"] == {"path": "/health", "port": "health"}
                assert "health" in {port["name"] for port in container["ports"]}
    labels = [template["metadata"]["labels"] for template in templates]
    selectors = [each["spec"]["selector"] for each in made if each["kind"] == "Service"]
    selectors += [each["spec"]["podSelector"]["matchLabels"] for each in made if each["kind"] == "NetworkPolicy"]
    for selector in selectors:
        assert len([each for each in labels if selector.items() <= each.items()]) == 1
    for each in made:
        if each["kind"] in ("Deployment", "StatefulSet"):
            chosen, own = each["spec"]["selector"]["matchLabels"], each["spec"]["template"]["metadata"]["labels"]
            assert chosen == own
    stateful = next(each for each in made if each["kind"] == "StatefulSet")
    assert ("Service", stateful["spec"]["serviceName"]) in found


def test_only_workers_reach_workers():
    policies = kinds(run(COMMANDS["cluster"]))
    component = "app.kubernetes.io/component"
    (rule,) = policies["NetworkPolicy", "gt-worker"]["spec"]["ingress"]
    assert [peer["podSelector"]["matchLabels"][component] for peer in rule["from"]] == ["worker"]
    (rule,) = policies["NetworkPolicy", "gt-server"]["spec"]["ingress"]
    assert rule["ports"] == [{"port": 12345, "protocol": "TCP"}]
    assert [peer["podSelector"]["matchLabels"] for peer in rule["from"]] == [
        {"app.kubernetes.io/name": "gt", "app.kubernetes.io/instance": "gt"}
    ]
    assert policies["NetworkPolicy", "gt-client"]["spec"]["ingress"] == []


@pytest.mark.parametrize("name", ["cluster", "cluster of GPUs", "job"])
def test_pods_have_no_rights_that_they_do_not_need(name):
    """The `restricted` standard of Kubernetes for the security of pods, and a root file system that is read-only."""
    for template in pods(run(COMMANDS[name])):
        spec, (container,) = template["spec"], template["spec"]["containers"]
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] and pod["runAsUser"] > 0 and pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert spec["automountServiceAccountToken"] is False
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes["keys"]["secret"]["defaultMode"] == 0o400 and "fsGroup" in pod
        assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"
        assert all(mount["readOnly"] for mount in container["volumeMounts"] if mount["name"] == "keys")
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)


def test_keys_are_two_secrets_and_fit_together():
    server, client = [each["stringData"] for each in run(COMMANDS["keys"])]
    own = ServerKey(**json.loads(server["server.key"]))
    given = ClientKey(**json.loads(client["client.key"]))
    assert list(client) == ["client.key"]  # workers do not get the server's
    assert (given.server, AuthorizedKey(**json.loads(server["cluster"])).public) == (own.public, given.public)
    assert run(COMMANDS["keys"]) != run(COMMANDS["keys"])


def test_keys_are_not_shown_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert kubernetes.main(["keys"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "| kubectl create -f -" in err


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["cluster", "job"])
def test_the_environment_has_settings_of_gt(name):
    for template in pods(run(COMMANDS[name])):
        variables = {each["name"]: each["value"] for each in template["spec"]["containers"][0]["env"]}
        assert read_settings(variables).keys == "/etc/gt/keys"
        # else Kubernetes adds GT_SERVER_PORT=tcp://... for a service that is called gt-server
        assert template["spec"]["enableServiceLinks"] is False


def test_a_job_tells_a_program_where_its_workers_are():
    (job,) = run(COMMANDS["job"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    settings = read_settings({each["name"]: each["value"] for each in container["env"]})
    assert (settings.server, settings.min_workers, settings.timeout) == ("gt-server:12345", 8, 600)
    assert container["command"] == ["python", "train.py", "--lr", "3"]
    assert job["metadata"]["generateName"] == "gt-client-"
    (elsewhere,) = run(COMMANDS["job elsewhere"])
    assert elsewhere["spec"]["template"]["spec"]["containers"][0]["command"][1:] == ["-m", "team.train", "--", "x"]


def test_commands_are_those_of_servers_and_workers(monkeypatch):
    _, _, _, _, _, server, workers = run(COMMANDS["cluster of GPUs"])
    (container,) = server["spec"]["template"]["spec"]["containers"]
    monkeypatch.setattr(sys, "argv", container["command"][2:])
    options = server_main._parse()
    assert (options.host, options.port, options.health_port) == ("0.0.0.0", 12345, 12346)
    (container,) = workers["spec"]["template"]["spec"]["containers"]
    command = container["command"]
    assert " ".join(command[:7]) == "python -m torch.distributed.run --standalone --nproc-per-node=4 -m gt.worker"
    options = worker_main._parse(command[7:], read_settings({}))
    assert (options.host, options.port, options.threads) == ("gt-server", 12345, 6)
    assert workers["spec"]["replicas"] == 2
    assert container["resources"] == {
        "requests": {"cpu": 24, "memory": "6Gi"},
        "limits": {"memory": "6Gi", "nvidia.com/gpu": 4},
    }


def test_the_commands_of_the_page_fit_together():
    page = (ROOT / "docs" / "cluster.md").read_text()
    commands = re.findall(r"^python -m gt.launch.kubernetes (.*) \| kubectl", page, re.MULTILINE)
    secrets, cluster, job = [run(shlex.split(command)) for command in commands]
    (container,) = pods(job)[0]["spec"]["containers"]
    assert read_settings({each["name"]: each["value"] for each in container["env"]}).min_workers == 4
    assert cluster[-1]["spec"]["replicas"] == 4
    named = {each["metadata"]["name"] for each in secrets}
    assert named == {pod["spec"]["volumes"][0]["secret"]["secretName"] for pod in pods(cluster)}


def test_workers_that_do_not_fill_their_pods_are_an_error(capsys):
    assert kubernetes.main(["cluster", *IMAGE, "--workers-per-pod", "3"]) == 1
    assert "8 workers cannot be in pods of 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["cluster", "--workers", "1"],
        ["cluster", "--image", "x", "--workers", "0"],
        ["keys", "--name", "Team_A"],
        ["keys", "--namespace", "a\nb"],
        ["cluster", *IMAGE, "--memory-per-worker", "much"],
        ["cluster", *IMAGE, "--gpus-per-worker", "2"],
        [],
    ],
)
def test_wrong_arguments_are_a_matter_of_usage(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        kubernetes.main(arguments)


def test_nothing_is_written(tmp_path, monkeypatch):
    """Keys are made in memory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GT_KEYS", str(tmp_path / "keys"))
    run(COMMANDS["keys"])
    assert os.listdir(tmp_path) == []


def test_arguments_reach_the_program_as_they_are():
    arguments = ["$(HOME)", "$$", "a $b", "quote\"'", "line\nbreak", "é", ""]
    (job,) = run(["job", *IMAGE, "train.py", *arguments])
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert [part.replace("$$", "$") for part in command] == ["python", "train.py", *arguments]
    assert not any(re.search(r"(?<!\$)(\$\$)*\$\(", part) for part in command)  # an odd number of $ is a variable


@pytest.mark.parametrize(
    "arguments",
    [
        ["cluster", "--image", "", "--workers", "1"],
        ["cluster", "--image", "a b", "--workers", "1"],
        ["cluster", "--image", "a\nb", "--workers", "1"],
        ["job", *IMAGE, ""],
        ["job", *IMAGE, "caf\udce9.py"],
        ["job", *IMAGE, "train.py", "caf\udce9"],
    ],
)
def test_what_a_manifest_cannot_hold_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        kubernetes.main(arguments)
    assert ended.value.code == 2 and "error: argument" in capsys.readouterr().err
