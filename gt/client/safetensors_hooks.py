"""Hooks into safetensors and transformers, which save and load GT tensors."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

# Functions of safetensors that read the bytes of one tensor, by the versions that have them.
_READERS = {"safetensors.torch": ("_to_ndarray", "_tobytes")}


def patch_safetensors(tensor_type: Any) -> None:
    """Make safetensors, if it is loaded, read copies of GT tensors. Called when the storage of a tensor is asked
    for, which safetensors does before it writes a tensor, so that the order of imports does not matter."""
    for module_name, names in _READERS.items():
        module = sys.modules.get(module_name)
        for name in names if module is not None else ():
            read = getattr(module, name, None)
            if read is not None and not hasattr(read, "reads_gt"):
                setattr(module, name, _reading_copies(read, tensor_type))


def _reading_copies(read: Callable[..., Any], tensor_type: Any) -> Callable[..., Any]:
    @functools.wraps(read)
    def read_copy(tensor: Any, *args: Any) -> Any:
        return read(tensor.detach().cpu() if isinstance(tensor, tensor_type) else tensor, *args)

    read_copy.reads_gt = True  # type: ignore[attr-defined]
    return read_copy


class LoadOneByOne:
    """Lets `from_pretrained` of transformers read each weight from its file when it is moved to GT. Its threads would
    read ahead, until the whole model is in this process."""

    _SETTING = "HF_DEACTIVATE_ASYNC_LOAD"

    def __enter__(self) -> None:
        self._before = os.environ.get(self._SETTING)
        if self._before is None:
            os.environ[self._SETTING] = "1"

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            os.environ.pop(self._SETTING, None)
