"""`python -m gt.launch.kubernetes`: the manifests of a server, its workers and programs on Kubernetes.

`keys` prints the secrets, with keys that are made in memory; `cluster` the server, the workers and what they may reach;
`job` a program that uses them. kubectl takes them from a pipe.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import yaml

from gt.core.environment import SAFE_PATH
from gt.core.errors import GTError, SettingsError
from gt.launch.worker_commands import launch_environment, server_command, worker_command
from gt.wire.server_keys import AUTHORIZED, CLIENT_FILE, SERVER_FILE, AuthorizedKey, new_client_key, new_server_key

Manifest: TypeAlias = dict[str, Any]
PORT = 12345
HEALTH_PORT = 12346
KEYS = "/etc/gt/keys"
USER = 1000  # id of user and group, which need not exist in the image
_KEY_NAME = "cluster"
_GRACE_SECONDS = 45  # more than the 30 s for which a server drains
_NAME = "[a-z]([a-z0-9-]{0,38}[a-z0-9])?"
_IMAGE = "[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}"
_QUANTITY = "[0-9]+([.][0-9]+)?(m|[kMGTP]i?)?"


class _Dumper(yaml.SafeDumper):
    """Writes repeated values in full each time, without YAML aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        if options.command == "keys" and sys.stdout.isatty():
            raise SettingsError(
                "secret keys are not printed to a terminal; pass them on with: python -m gt.launch.kubernetes keys | "
                "kubectl create -f -"
            )
        found = {"keys": secrets, "cluster": cluster, "job": job}[options.command](options)
    except GTError as error:
        print(f"gt.launch.kubernetes: {error}", file=sys.stderr)
        return 1
    print(yaml.dump_all(found, Dumper=_Dumper, sort_keys=False), end="")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gt.launch.kubernetes", description="Print manifests for Kubernetes; kubectl takes them."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--name", type=_matching(_NAME), default="gt", help="of the cluster (default: gt)")
    common.add_argument("--namespace", type=_matching(_NAME), help="default: kubectl's")
    pods = argparse.ArgumentParser(add_help=False)
    pods.add_argument(
        "--image",
        type=_matching(_IMAGE),
        required=True,
        help="an image with Python, GT and torch, and the program of a job",
    )
    pods.add_argument("--workers", type=_count, required=True, help="how many workers; a job waits for all of them")
    pods.add_argument(
        "--python", type=_argument, default="python", help="the interpreter in the image (default: python)"
    )
    commands.add_parser("keys", parents=[common], help="the secrets, with new keys")
    making = commands.add_parser("cluster", parents=[common, pods], help="the server and its workers")
    making.add_argument("--gpus-per-worker", type=int, choices=(0, 1), default=0, help="default: 0, workers use CPUs")
    making.add_argument("--workers-per-pod", type=_count, default=1, help="e.g. one for each GPU (default: 1)")
    making.add_argument("--cpus-per-worker", type=_count, help="CPUs that are asked for, and threads")
    making.add_argument("--memory-per-worker", type=_matching(_QUANTITY), metavar="BYTES", help="for example 16Gi")
    making.add_argument("--shared-memory", type=_matching(_QUANTITY), metavar="BYTES", help="at most, of /dev/shm")
    running = commands.add_parser("job", parents=[common, pods], help="a program that uses them")
    running.add_argument("--timeout", type=_count, default=600, help="seconds to wait for workers (default: 600)")
    running.add_argument("program", type=_argument, help="a Python file of the image, or -m MODULE after --")
    running.add_argument("arguments", type=_text, nargs=argparse.REMAINDER, help="of the program")
    return parser.parse_args(arguments)


def _matching(pattern: str) -> Any:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form {pattern}")
        return text

    return check


def _text(text: str) -> str:
    """An argument of a program, which a manifest can hold if it is Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not UTF-8, as manifests are") from None
    return text


def _argument(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return _text(text)


def _count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def secrets(options: argparse.Namespace) -> list[Manifest]:
    """The key of the server with the client key that it lets in, and that client key. They are two secrets, because
    workers and programs must not have the server's."""
    server = new_server_key()
    client = new_client_key(_KEY_NAME, server)
    of_server = {SERVER_FILE: server, _KEY_NAME: AuthorizedKey(client.public)}
    return [
        _secret(options, "server-keys", of_server),
        _secret(options, "client-key", {CLIENT_FILE: client}),
    ]


def _secret(options: argparse.Namespace, part: str, records: dict[str, Any]) -> Manifest:
    texts = {name: msgspec.json.encode(record).decode() for name, record in records.items()}
    return _object(options, "v1", "Secret", part, {"type": "Opaque", "stringData": texts})


def cluster(options: argparse.Namespace) -> list[Manifest]:
    if options.workers % options.workers_per_pod:
        raise SettingsError(
            f"{options.workers} workers cannot be in pods of {options.workers_per_pod}; choose --workers as a multiple "
            f"of --workers-per-pod"
        )
    return [
        _policy(options, "server", [{"from": [_peers(options)], "ports": [{"port": PORT, "protocol": "TCP"}]}]),
        _policy(options, "worker", [{"from": [_peers(options, "worker")]}]),
        _policy(options, "client", []),
        _service(options, "server", {"ports": [{"name": "gt", "port": PORT, "targetPort": "gt"}]}),
        _service(options, "worker", {"clusterIP": "None"}),
        _server(options),
        _workers(options),
    ]


def job(options: argparse.Namespace) -> list[Manifest]:
    """A program that waits for all workers. The job has a new name each time that kubectl creates it."""
    environment = {
        "GT_SERVER": f"{options.name}-server:{PORT}",
        "GT_MIN_WORKERS": str(options.workers),
        "GT_TIMEOUT": str(options.timeout),
        "PYTHONUNBUFFERED": "1",
    }
    container = _container(options, [options.python, options.program, *options.arguments], environment)
    template = _pod(options, "client", container, _mounted_secret(options, "client-key"), {"restartPolicy": "Never"})
    found = _object(options, "batch/v1", "Job", "client", {"spec": {"backoffLimit": 0, "template": template}})
    found["metadata"] = {"generateName": f"{found['metadata'].pop('name')}-", **found["metadata"]}
    return [found]


def _object(options: argparse.Namespace, version: str, kind: str, part: str, rest: Manifest) -> Manifest:
    metadata = {"name": f"{options.name}-{part}", "labels": _labels(options)}
    if options.namespace:
        metadata["namespace"] = options.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _labels(options: argparse.Namespace, component: str = "") -> dict[str, str]:
    found = {"app.kubernetes.io/name": "gt", "app.kubernetes.io/instance": options.name}
    return {**found, "app.kubernetes.io/component": component} if component else found


def _selector(options: argparse.Namespace, component: str = "") -> Manifest:
    return {"matchLabels": _labels(options, component)}


def _peers(options: argparse.Namespace, component: str = "") -> Manifest:
    return {"podSelector": _selector(options, component)}


def _policy(options: argparse.Namespace, component: str, ingress: list[Manifest]) -> Manifest:
    """Who may connect to the pods of a component. What these connect to themselves is not restricted."""
    spec = {"podSelector": _selector(options, component), "policyTypes": ["Ingress"], "ingress": ingress}
    return _object(options, "networking.k8s.io/v1", "NetworkPolicy", component, {"spec": spec})


def _service(options: argparse.Namespace, component: str, spec: Manifest) -> Manifest:
    chosen = {"selector": _labels(options, component), **spec}
    return _object(options, "v1", "Service", component, {"spec": chosen})


def _server(options: argparse.Namespace) -> Manifest:
    command = [*server_command("0.0.0.0", PORT, python=options.python), "--health-port", str(HEALTH_PORT)]
    probe = {"httpGet": {"path": "/health", "port": "health"}, "timeoutSeconds": 5}
    container = {
        **_container(options, command, SAFE_PATH),
        "ports": [{"name": "gt", "containerPort": PORT}, {"name": "health", "containerPort": HEALTH_PORT}],
        "readinessProbe": {**probe, "periodSeconds": 5},
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
    }
    keys = _mounted_secret(options, "server-keys", {SERVER_FILE: SERVER_FILE, _KEY_NAME: f"{AUTHORIZED}/{_KEY_NAME}"})
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # two servers would share the workers between them
        "selector": _selector(options, "server"),
        "template": _pod(options, "server", container, keys, {}),
    }
    return _object(options, "apps/v1", "Deployment", "server", {"spec": spec})


def _workers(options: argparse.Namespace) -> Manifest:
    each = options.workers_per_pod
    command = worker_command(
        f"{options.name}-server", PORT, threads=options.cpus_per_worker or 0, python=options.python
    )
    if each > 1:  # torchrun gives each of them its GPU
        run = [options.python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={each}"]
        command = [*run, *command[1:]]
    container = {**_container(options, command, SAFE_PATH), **_resources(options, each)}
    spec = {
        "serviceName": f"{options.name}-worker",
        "replicas": options.workers // each,
        "podManagementPolicy": "Parallel",
        "selector": _selector(options, "worker"),
        "template": _pod(options, "worker", container, _mounted_secret(options, "client-key"), {}),
    }
    return _object(options, "apps/v1", "StatefulSet", "worker", {"spec": spec})


def _resources(options: argparse.Namespace, each: int) -> Manifest:
    """What a pod of `each` workers asks for."""
    asked: dict[str, str | int] = {}
    if options.cpus_per_worker:
        asked["cpu"] = options.cpus_per_worker * each
    if options.memory_per_worker:
        number, unit = re.fullmatch("([0-9.]+)(.*)", options.memory_per_worker).groups()  # type: ignore[union-attr]
        asked["memory"] = f"{float(number) * each:g}{unit}"
    limits = {name: value for name, value in asked.items() if name == "memory"}
    if options.gpus_per_worker:
        limits["nvidia.com/gpu"] = each
    return {"resources": {"requests": asked, "limits": limits}} if asked or limits else {}


def _container(options: argparse.Namespace, command: list[str], environment: dict[str, str]) -> Manifest:
    # The user has no home and no name in the image; libraries ask for both.
    variables = {**launch_environment(KEYS, {}), "HOME": "/tmp", "USER": "gt", **environment}
    return {
        "name": "gt",
        "image": options.image,
        "command": [part.replace("$", "$$") for part in command],  # Kubernetes reads $(NAME) as a variable, $$ as $
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "keys", "mountPath": KEYS, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "temporary", "mountPath": "/tmp"},
        ],
    }


def _mounted_secret(options: argparse.Namespace, part: str, paths: dict[str, str] | None = None) -> Manifest:
    """The volume of a secret. The group of the pod may read it, as Kubernetes adds: its files belong to root."""
    secret: Manifest = {"secretName": f"{options.name}-{part}", "defaultMode": 0o400}
    if paths:
        secret["items"] = [{"key": key, "path": path} for key, path in paths.items()]
    return secret


def _pod(options: argparse.Namespace, component: str, container: Manifest, keys: Manifest, rest: Manifest) -> Manifest:
    memory: Manifest = {"medium": "Memory"}
    if component == "worker" and options.shared_memory:
        memory["sizeLimit"] = options.shared_memory
    spec = {
        # Kubernetes would add variables such as GT_SERVER_PORT for the service, which are no settings of GT.
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **rest,
        "containers": [container],
        "volumes": [
            {"name": "keys", "secret": keys},
            {"name": "shared-memory", "emptyDir": memory},
            {"name": "temporary", "emptyDir": {}},
        ],
    }
    return {"metadata": {"labels": _labels(options, component)}, "spec": spec}


if __name__ == "__main__":
    sys.exit(main())
