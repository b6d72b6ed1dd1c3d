"""Loads `gt.launch`, which starts or joins workers for a program's first tensor.

By name, because `import gt` must load neither torch nor the client, and because the client, which needs a session for a
tensor that comes out of a pickle, may not import the package that starts workers.
"""

from __future__ import annotations

import importlib


def load_launcher() -> None:
    importlib.import_module("gt.launch.sessions")
