"""Loads packages that only some tools need, and that `pip install gt-tensor` does not install."""

from __future__ import annotations

import importlib
from typing import Any

from gt.core.errors import SettingsError


def load_extra(module: str, extra: str, purpose: str) -> Any:
    """A module of an extra. Raises SettingsError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise SettingsError(f"{purpose} needs {package}: pip install 'gt-tensor[{extra}]'") from None
