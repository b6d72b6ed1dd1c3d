"""A virtual environment for each peer that needs one, made under the build directory at the first run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.comparison.catalog import PEERS

INSTALL_SECONDS = 600


class Unavailable(Exception):
    """A peer that cannot run here; the text says why."""


def python_of(peer: str, build: Path) -> str:
    """The interpreter that runs a peer. Raises Unavailable if its environment cannot be made."""
    requirements = PEERS[peer].requirements
    if not requirements:
        return sys.executable
    folder = (build / peer).absolute()
    python, stamp = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join(requirements)
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"making the environment of {peer}: {', '.join(requirements)}", file=sys.stderr, flush=True)
        _run([sys.executable, "-m", "venv", "--clear", str(folder)], peer)
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements], peer)
        stamp.write_text(wanted)
    return str(python)


def _run(command: list[str], peer: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{peer} was not installed in {INSTALL_SECONDS} s") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"{peer} cannot be installed: {last}") from None
