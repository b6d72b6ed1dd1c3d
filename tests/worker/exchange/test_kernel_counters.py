"""The bytes that GT counts are those that pass the loopback interface, within headers and flags."""

import json
import subprocess
import sys

import pytest

from tests.subprocesses import ROOT

HEADERS = 0.03  # of the bytes: those of TCP and Gloo, flags, and messages of the store
WAYS = {
    "gloo all-reduce",
    "gloo all-to-all and all-gather",
    "gloo all-gather",
    "gloo all-to-all",
    "gloo point-to-point",
}
OWN_NETWORK = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def require_own_network():
    """Skip a test where other programs use the same loopback interface."""
    try:
        tried = subprocess.run([*OWN_NETWORK, "true"], capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        pytest.skip("there is no `unshare`, which makes network namespaces")
    if tried.returncode:
        pytest.skip(f"a network namespace cannot be made: {tried.stderr.strip()}")


def test_gt_counts_the_bytes_that_the_kernel_counts(monkeypatch):
    require_own_network()
    monkeypatch.setenv("GT_TRANSPORT", "gloo")
    command = [*OWN_NETWORK, sys.executable, "-m", "tests.worker.exchange.counted_program"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    counts = json.loads(ran.stdout)
    assert {way for _, _, ways in counts.values() for way in ways} >= WAYS
    for name, (counted, passed, _) in counts.items():
        assert counted >= 1 << 19, f"{name}: {counted} bytes"
        assert counted <= passed <= counted * (1 + HEADERS), f"{name}: {counted} bytes, and {passed} passed"
