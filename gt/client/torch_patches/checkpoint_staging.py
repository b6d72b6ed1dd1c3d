"""Makes `torch.distributed.checkpoint.async_save` take plain copies of GT tensors, which it writes in the background.

Torch copies the storages of a state dict by their addresses, before it starts the thread that writes them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

_MODULE = "torch.distributed.checkpoint._state_dict_stager"


def patch_staging(tensor_type: type[torch.Tensor]) -> None:
    """Patch torch's module if it is loaded, and otherwise once it is: it takes a second to import."""
    if _MODULE in sys.modules:
        _patch(sys.modules[_MODULE], tensor_type)
    else:
        sys.meta_path.insert(0, _PatchingFinder(tensor_type))  # type: ignore[arg-type]


class _PatchingFinder:
    """Finds the module by the finders after it, and patches it when it has been executed."""

    def __init__(self, tensor_type: type[torch.Tensor]) -> None:
        self._tensor_type = tensor_type

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name != _MODULE:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._patching(spec.loader.exec_module)  # type: ignore[assignment]
        return spec

    def _patching(self, execute: Callable[[Any], None]) -> Callable[[Any], None]:
        def execute_and_patch(module: Any) -> None:
            execute(module)
            _patch(module, self._tensor_type)

        return execute_and_patch


def _patch(module: Any, tensor_type: type[torch.Tensor]) -> None:
    copy_by_address = module.StateDictStager._offload_tensor

    @functools.wraps(copy_by_address)
    def copy(stager: Any, tensor: torch.Tensor, memo: dict[int, Any], non_blocking: bool = False) -> torch.Tensor:
        if not isinstance(tensor, tensor_type):
            return copy_by_address(stager, tensor, memo, non_blocking)  # type: ignore[no-any-return]
        return memo.setdefault(id(tensor), tensor.detach().cpu())  # type: ignore[no-any-return]

    module.StateDictStager._offload_tensor = copy
