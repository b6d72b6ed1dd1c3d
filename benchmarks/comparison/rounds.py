"""Runs of peers as processes of their own, in turns: each round runs every variant of a workload once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.comparison.catalog import PEERS, Variant
from benchmarks.comparison.environments import Unavailable, python_of

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS, QUICK_LIMIT_SECONDS = 240, 60


@dataclass
class Result:
    """What a variant gave in each round, or the reason why it gave nothing. Rounds hold, by case, `samples` and
    `extras`."""

    variant: Variant
    rounds: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    reason: str = ""


Run = Callable[[str, Variant], dict[str, Any]]


def run_rounds(workload: str, variants: list[Variant], rounds: int, run: Run) -> list[Result]:
    """A variant that fails is not tried again."""
    results = [Result(variant) for variant in variants]
    for number in range(rounds):
        for result in results:
            if result.reason:
                continue
            print(f"{workload}, round {number + 1} of {rounds}: {result.variant.label}", file=sys.stderr, flush=True)
            start = time.monotonic()
            try:
                found = run(workload, result.variant)
            except Unavailable as error:
                result.reason = str(error)
                print(f"  skipped: {error}", file=sys.stderr, flush=True)
            else:
                result.rounds.append(found["cases"])
                result.versions = found["versions"]
                print(f"  {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return results


class PeerRunner:
    """Runs variants in the environments of their peers."""

    def __init__(self, build: Path, *, quick: bool) -> None:
        self._build = build
        self._quick = quick
        self._unavailable: dict[str, str] = {}

    def run(self, workload: str, variant: Variant) -> dict[str, Any]:
        """The JSON of the peer. Raises Unavailable."""
        if variant.way == "compiled" and not shutil.which(os.environ.get("CXX", "c++")):
            raise Unavailable("there is no C++ compiler")
        command = [self._python(variant.peer), "-m", f"benchmarks.comparison.peers.{PEERS[variant.peer].module}"]
        command += [workload, "--workers", str(variant.workers), "--way", variant.way, *["--quick"] * self._quick]
        limit = QUICK_LIMIT_SECONDS if self._quick else LIMIT_SECONDS
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            code, out, talk = run_limited(command, self._environment(folder), limit)
        if code != 0:
            raise Unavailable(f"it was not done after {limit} s" if code is None else f"it failed: {last_line(talk)}")
        return json.loads(out.strip().splitlines()[-1])

    def _python(self, peer: str) -> str:
        if peer in self._unavailable:
            raise Unavailable(self._unavailable[peer])
        try:
            return python_of(peer, self._build)
        except Unavailable as error:
            self._unavailable[peer] = str(error)
            raise

    def _environment(self, folder: str) -> dict[str, str]:
        """NumPy's products run on one thread in each chunk and actor. Compiled code is kept between rounds, other files
        go to `folder`."""
        return os.environ | {
            "PYTHONPATH": str(ROOT),
            "OPENBLAS_NUM_THREADS": "1",
            "JAX_PLATFORMS": "cpu",
            "TORCHINDUCTOR_CACHE_DIR": str((self._build / "inductor").absolute()),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": folder,
            "TMPDIR": folder,
        }


def run_limited(command: list[str], environment: dict[str, str], limit: float) -> tuple[int | None, str, str]:
    """The exit code (None: it took too long), stdout and stderr of a program. All processes of its group are ended."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        out, talk = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, "", ""
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, out, talk


def last_line(talk: str) -> str:
    lines = [line.strip() for line in talk.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return ((errors or lines)[-1] if lines else "no message")[:200]
