"""Loads compiled code, with a private part of torch. tests/worker/compilation/test_loaded_code.py tries it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch

Code: TypeAlias = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def load_code(path: Path) -> Code:
    """The function in a shared library that AOTInductor has made for the CPU. Torch's compiler is not imported."""
    return torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1).run  # type: ignore[attr-defined,no-any-return]
