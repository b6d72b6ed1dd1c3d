"""`python -m gt.launch.kubernetes`: the manifests of a server, its workers and programs on Kubernetes.

`keys` prints the secrets, with keys that are made in memory; `cluster` the server, the workers and what they may reach;
`job` a program that uses them. kubectl takes them from a pipe. They are those of `templates/kubernetes.yaml`, whose
`$names` get the values of the options.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from string import Template
from typing import Any, TypeAlias

import msgspec
import yaml

from gt.core.command_options import positive
from gt.core.environment import SAFE_PATH
from gt.core.errors import GTError, SettingsError
from gt.launch.commands import (
    Command,
    ServerPlace,
    joining_environment,
    launch_environment,
    read_template,
    server_command,
    worker_command,
)
from gt.launch.node_keys import make_node_keys
from gt.wire.server_keys import CLIENT_FILE

Value: TypeAlias = Any  # of a manifest: what YAML holds
PORT = 12345
HEALTH_PORT = 12346
KEYS = "/etc/gt/keys"
_KEY_NAME = "cluster"
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
        image = None if options.command == "keys" else options.image
        values = {"name": options.name, "namespace": options.namespace, "image": image, "keys": KEYS, **found}
    except GTError as error:
        print(f"gt.launch.kubernetes: {error}", file=sys.stderr)
        return 1
    manifests = fill(yaml.safe_load(read_template("kubernetes.yaml"))[options.command], values)
    print(yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False), end="")
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
    pods.add_argument("--workers", type=positive, required=True, help="how many workers; a job waits for all of them")
    pods.add_argument(
        "--python", type=_argument, default="python", help="the interpreter in the image (default: python)"
    )
    commands.add_parser("keys", parents=[common], help="the secrets, with new keys")
    making = commands.add_parser("cluster", parents=[common, pods], help="the server and its workers")
    making.add_argument("--gpus-per-worker", type=int, choices=(0, 1), default=0, help="default: 0, workers use CPUs")
    making.add_argument("--workers-per-pod", type=positive, default=1, help="e.g. one for each GPU (default: 1)")
    making.add_argument("--cpus-per-worker", type=positive, help="CPUs that are asked for, and threads")
    making.add_argument("--memory-per-worker", type=_matching(_QUANTITY), metavar="BYTES", help="for example 16Gi")
    making.add_argument("--shared-memory", type=_matching(_QUANTITY), metavar="BYTES", help="at most, of /dev/shm")
    running = commands.add_parser("job", parents=[common, pods], help="a program that uses them")
    running.add_argument("--timeout", type=positive, default=600, help="seconds to wait for workers (default: 600)")
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


def secrets(options: argparse.Namespace) -> dict[str, Value]:
    """The key of the server with the client key that it lets in, and that client key."""
    files = {name: msgspec.json.encode(key).decode() for name, key in make_node_keys(_KEY_NAME).records().items()}
    client = {CLIENT_FILE: files.pop(CLIENT_FILE)}
    return {"server_keys": {name.rpartition("/")[2]: text for name, text in files.items()}, "client_keys": client}


def cluster(options: argparse.Namespace) -> dict[str, Value]:
    """The pods of the server and of the workers."""
    each = options.workers_per_pod
    if options.workers % each:
        raise SettingsError(
            f"{options.workers} workers cannot be in pods of {each}; choose --workers as a multiple of "
            f"--workers-per-pod"
        )
    launcher = PodLauncher(options)
    (worker,) = launcher.commands(launcher.place)
    return {
        **_pod("server", launcher.server()),
        **_pod("worker", worker),
        "port": PORT,
        "health_port": HEALTH_PORT,
        "pods": options.workers // each,
        "resources": _resources(options, each),
        "shared_memory": options.shared_memory,
    }


def job(options: argparse.Namespace) -> dict[str, Value]:
    """The pod of a program that waits for all workers."""
    launcher = PodLauncher(options)
    (program,) = launcher.commands(launcher.place)
    return _pod("program", program)


class PodLauncher:
    """Runs a server, workers or a program in pods, as options say."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.place = ServerPlace(f"{options.name}-server", PORT)

    def server(self) -> Command:
        command = server_command("0.0.0.0", PORT, python=self._options.python)
        return Command([*command, "--health-port", str(HEALTH_PORT)], _environment(SAFE_PATH))

    def commands(self, place: ServerPlace) -> list[Command]:
        """What each pod of workers runs, or that of the program."""
        options = self._options
        if options.command == "job":
            limits = {"GT_TIMEOUT": str(options.timeout), "PYTHONUNBUFFERED": "1"}
            environment = _environment({**joining_environment(place, options.workers), **limits})
            return [Command([options.python, options.program, *options.arguments], environment)]
        command = worker_command(place.host, place.port, threads=options.cpus_per_worker or 0, python=options.python)
        if (each := options.workers_per_pod) > 1:  # torchrun gives each of them its GPU
            run = [options.python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={each}"]
            command = [*run, *command[1:]]
        return [Command(command, _environment(SAFE_PATH))]


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    # The user has no home and no name in the image; libraries ask for both.
    return {**launch_environment(KEYS, {}), "HOME": "/tmp", "USER": "gt", **variables}


def _pod(role: str, command: Command) -> dict[str, Value]:
    """The values of the pods that run a command."""
    arguments = [
        part.replace("$", "$$") for part in command.arguments
    ]  # Kubernetes reads $(NAME) as a variable, $$ as $
    variables = [{"name": name, "value": value} for name, value in command.environment.items()]
    return {f"{role}_command": arguments, f"{role}_environment": variables}


def _resources(options: argparse.Namespace, each: int) -> Value:
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
    return {"requests": asked, "limits": limits} if asked or limits else None


def fill(template: Value, values: Mapping[str, Value]) -> Value:
    """A part of a template with values for its `$names`, and without the keys whose value is None."""
    if isinstance(template, dict):
        filled = {key: fill(part, values) for key, part in template.items()}
        return {key: value for key, value in filled.items() if value is not None}
    if isinstance(template, list):
        return [fill(part, values) for part in template]
    if not isinstance(template, str):
        return template
    name = re.fullmatch("[$]([a-z_]+)", template)
    return values[name[1]] if name else Template(template).substitute(values)


if __name__ == "__main__":
    sys.exit(main())
