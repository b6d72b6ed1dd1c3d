"""Keys in a directory that is made as Kubernetes mounts a secret: files of root behind links, read by a group."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gt.wire.server_keys import new_client_key, new_server_key
from tests.subprocesses import ROOT

GROUP = 4242  # fsGroup
NOBODY = 65534
pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="only root can mount, and start a process of another user"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="there is no `unshare` (package util-linux)"),
]

# kubelet: a tmpfs with mode 1777 and the group, files in a dated directory, `..data` that leads there, a link for each
# name, and read-only mounting in the container. The group may read files (| 0440), and enter directories (| 02550).
MOUNT = """
import encodings.idna, json, os, pathlib, signal, subprocess, sys, threading
import gt.server.__main__
from gt.core.errors import SettingsError
from gt.wire.server_keys import read_authorized, read_client_key, read_server_key

volume, options = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", volume], check=True)
dated = volume / "..2026_01_01_00_00_00.1"
(dated / "authorized").mkdir(parents=True)
(volume / "..data").symlink_to(dated.name)
for name, text in options["files"].items():
    (dated / name).write_text(text)
    top = pathlib.Path(name).parts[0]
    if not (volume / top).is_symlink():
        (volume / top).symlink_to(f"..data/{top}")
for path in [volume, *volume.rglob("*")]:
    os.chown(path, 0, options["group"], follow_symlinks=False)
    if path.is_symlink():
        continue
    os.chmod(path, (0o2755 if path.is_dir() else options["mode"]) if path != volume else 0o3777)
for path in (dated / name for name in options["files"]):
    os.chown(path, options["owner"], options["group"])
if options["read_only"]:
    subprocess.run(["mount", "-o", "remount,ro,bind", volume], check=True)
os.setgroups(options["groups"])
os.setgid(options["user"])
os.setuid(options["user"])
if options.get("serves"):
    os.environ["GT_KEYS"] = str(volume)
    sys.argv = ["gt.server", "--host", "0.0.0.0", "-p", "0", "--json"]
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    sys.exit(gt.server.__main__.main())
try:
    found = read_server_key(volume), read_client_key(volume), read_authorized(volume)
    print(json.dumps([found[0].public, found[1].public, found[2]]))
except SettingsError as error:
    print(error)
"""


@pytest.fixture
def place():
    """A directory that another user can enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def read_mounted(place, **changes):
    """What a process reads of a mounted secret, or why it does not."""
    server = new_server_key()
    client = new_client_key("cluster", server)
    files = {
        "server.key": json.dumps({"public": server.public, "secret": server.secret}),
        "client.key": json.dumps(
            {"name": "cluster", "server": server.public, "public": client.public, "secret": client.secret}
        ),
        "authorized/cluster": json.dumps({"public": client.public}),
    }
    options = {
        "group": GROUP,
        "groups": [GROUP],
        "user": NOBODY,
        "owner": 0,
        "mode": 0o440,
        "read_only": True,
        "serves": False,
    }
    place.chmod(0o755)
    (place / "keys").mkdir()
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", MOUNT, place / "keys",
         json.dumps({"files": files, **options, **changes})],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), json.dumps([server.public, client.public, {client.public: "cluster"}])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"group": GROUP, "groups": [7, GROUP]},
        {"user": GROUP, "groups": []},  # fsGroup is the group of the user
        {"user": 0, "groups": [], "mode": 0o400},
    ],
)
def test_keys_of_a_mounted_secret_are_read(place, changes):
    said, keys = read_mounted(place, **changes)
    assert said == keys


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": 0o444},  # everybody can read it
        {"mode": 0o460},  # the group could write it
        {"read_only": False},  # somebody could replace the links
        {"owner": 1000},  # not made by root
        {"mode": 0o404, "groups": []},
    ],
)
def test_files_that_others_may_have_are_refused(place, changes):
    said, _ = read_mounted(place, **changes)
    assert "out of reach of others" in said or "cannot be read" in said, said


@pytest.mark.parametrize("changes", [{}, {"user": 0, "groups": [], "mode": 0o400}])
def test_a_server_runs_with_keys_where_it_cannot_write(place, changes):
    said, _ = read_mounted(place, serves=True, **changes)
    assert json.loads(said)["encrypted"] is True
