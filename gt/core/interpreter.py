"""The Python of GT's subprocesses: it imports from where this process imports, and from nowhere else.

An interpreter that is started with `-c` or `-m` imports from its current directory before all others, where another
user may have put a file of any name.
"""

from __future__ import annotations

import os
import sys

# -P leaves out the current directory; the variable says the same to the interpreters that torchrun or srun starts.
PYTHON = (sys.executable, "-P")
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def import_environment() -> dict[str, str]:
    """The variables by which an interpreter imports from the places of this process, in the same order. "" is a place
    of a process that was started in its current directory."""
    places = [os.path.abspath(place) for place in sys.path if isinstance(place, str)]
    expressible = [place for place in dict.fromkeys(places) if os.pathsep not in place]
    return {**SAFE_PATH, "PYTHONPATH": os.pathsep.join(expressible)}
