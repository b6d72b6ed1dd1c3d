"""Loads `gt.launch`, which starts or joins workers for a program's first tensor.

By name, because `import gt` must load neither torch nor the client, and because the client, which needs a session for a
tensor that comes out of a pickle, may not import the package that starts workers.
"""

from __future__ import annotations

import importlib
import weakref


def load_launcher() -> None:
    importlib.import_module("gt.launch.sessions")


# Finalizers end GT and remove torch's operators. They all run in one function of atexit, which the first finalizer
# registers: here, so that functions that the program registers later run before, and may read tensors.
weakref.finalize(load_launcher, bool)
