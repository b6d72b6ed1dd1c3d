"""Hooks that give the inputs of a model and the results of its modules the layouts of the `model` section.

A layout is no value: the tensor keeps its id, and autograd does not see the hook. The gradient of a result gets the
same layout when autograd has computed it."""

from __future__ import annotations

from typing import Any

import torch

from gt.client import active_session
from gt.client.storage import TensorRef
from gt.client.tensor import Tensor, to_gt
from gt.client.torch_patches.pytree import tree_leaves, tree_map
from gt.sharding.spec import DeviceMesh, ShardingSpec
from gt.sharding.view_layouts import base_layout
from gt.signals.config import AxesPerDim
from gt.signals.resolution import resolve_activation


class ActivationLayout:
    """A layout of tensors over a mesh."""

    def __init__(self, dims: AxesPerDim, mesh: DeviceMesh) -> None:
        self._dims = dims
        self._mesh = mesh

    def spec_for(self, shape: torch.Size) -> ShardingSpec | None:
        return resolve_activation(self._dims, self._mesh, shape)

    def place(self, tensor: torch.Tensor) -> None:
        """Give a tensor the layout, if it can have it."""
        spec = self.spec_for(tensor.shape) if isinstance(tensor, Tensor) else None
        if spec is not None:
            place(tensor._ref, spec)  # type: ignore[attr-defined]


def place(ref: TensorRef, spec: ShardingSpec) -> None:
    """Give a tensor a layout, for good; a view by way of its base. Views that no layout of the base fits stay."""
    storage = ref.storage
    if ref.path is None:
        storage.session.place(storage, spec)
        return
    layout = base_layout(ref.path.steps, storage.geometry.meta(), spec)
    if layout is not None:
        storage.session.place(storage, layout)


class OutputHook:
    """The hook of a module whose results have a layout."""

    def __init__(self, layout: ActivationLayout) -> None:
        self._layout = layout

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and not tensor._ref.storage.is_parameter:
                self._layout.place(tensor)
                if tensor.grad_fn is not None:  # hooks of leaves, which a module may give back, would stay on them
                    tensor.register_hook(self._layout.place)


class InputHook:
    """The hook of a model whose inputs have a layout. Plain tensors are uploaded in it."""

    def __init__(self, layout: ActivationLayout) -> None:
        self._layout = layout

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(self._placed, (args, kwargs))

    def _placed(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or active_session.active is None:
            return value
        spec = self._layout.spec_for(value.shape)
        if spec is None:
            return value
        if isinstance(value, Tensor):
            place(value._ref, spec)
            return value
        return to_gt(value, spec)
