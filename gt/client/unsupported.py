"""Errors for tensors and ops that GT does not support, with the remedy."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import NoReturn

import torch

from gt.client.torch_patches.op_registry import OpOverload, schema_of
from gt.core.errors import SessionError

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor")


def require_strided(tensor: torch.Tensor) -> None:
    """Raises NotImplementedError: torch's operators would replace a TypeError by one that names neither GT nor the
    remedy."""
    if tensor.is_nested:
        raise NotImplementedError(
            "GT tensors do not mix with nested tensors: GT holds strided tensors; make it one first, with "
            "torch.nested.to_padded_tensor(tensor, 0.0)"
        )
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"GT tensors do not mix with tensors of layout {tensor.layout}: GT holds strided tensors; make it one "
            f"first, with tensor.to_dense()"
        )


def require_values(tensor: torch.Tensor) -> None:
    """Raise for a tensor of device "meta"."""
    if tensor.is_meta:
        raise NotImplementedError(
            "a tensor of device 'meta' has no values that could be moved to GT; make one there, with "
            "gt.empty(tensor.shape, dtype=tensor.dtype), or give a module memory with module.to_empty(device='cpu'), "
            "then gt.to(module), and load its weights"
        )


def refuse_other_processes(kind: type[torch.Tensor]) -> None:
    """Let `multiprocessing` refuse the tensors of a class that holds no memory: torch would send its storage."""
    ForkingPickler.register(kind, _refuse_to_send)


def _refuse_to_send(tensor: torch.Tensor) -> NoReturn:
    raise SessionError(
        "a GT tensor cannot be sent to another process, because a session belongs to one process; send tensor.cpu(). "
        "Let the dataset of a data loader hold plain tensors and move its batches to GT, or use num_workers=0"
    )


def refuse_op(func: OpOverload) -> None:
    """Raise for ops that no worker can run: those that make nested tensors, and those of process groups."""
    if schema_of(func).name == "aten::_nested_tensor_from_tensor_list":
        raise NotImplementedError(
            "nested tensors of GT tensors are not possible: GT holds strided tensors; pad them, with "
            "torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)"
        )
    if func.namespace in _COLLECTIVES:
        raise NotImplementedError(
            f"torch.distributed ({func}) does not work on GT tensors, nor do DistributedDataParallel and FSDP: one "
            f"program uses all of GT's workers. Start them with gt.init(workers=N) and cut the batch or the weights "
            f"instead, with gt.shard(x, gt.mesh(N)) or a configuration (docs/sharding.md, docs/strategies.md); to "
            f"exchange a value with other programs, use tensor.cpu()"
        )
