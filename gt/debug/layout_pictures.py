"""Where the parts of a tensor lie: `gt.visualize_sharding`."""

from __future__ import annotations

import builtins

import torch
from rich.console import Console

from gt.client.tensor import Tensor
from gt.core.errors import LayoutError
from gt.core.tracebacks import ends_on_users_line
from gt.monitor.sharding_picture import ShardingPicture
from gt.sharding.held_parts import HERE, HeldPart, describe_held, held_parts
from gt.sharding.spec import DeviceMesh, ShardingSpec


@ends_on_users_line
def visualize_sharding(tensor: torch.Tensor | DeviceMesh) -> ShardingPicture:
    """Show where the parts of a tensor lie: a coloured grid of the mesh in a terminal, HTML in a notebook. Replicas
    have one colour. A mesh is shown as its grid of workers, and a plain tensor as what this process holds. Returns the
    picture: `gt.visualize_sharding(x).save("x.svg")`, or `.png`.

    >>> gt.init(workers=2, mode="virtual")
    >>> picture = gt.visualize_sharding(gt.randn(4, 2))
    4x2 as [..., -] on mesh ...
    >>> picture.save("x.svg")
    """
    if isinstance(tensor, DeviceMesh):
        picture = _mesh_picture(tensor)
    elif isinstance(tensor, Tensor):
        picture = sharding_picture(tuple(tensor.shape), tensor.itemsize, tensor.spec)
    elif isinstance(tensor, torch.Tensor):
        picture = _plain_picture(tensor)
    else:
        raise LayoutError(f"gt.visualize_sharding shows a tensor or a mesh, not {type(tensor).__name__}")
    if not _is_in_notebook():
        Console().print(picture)
    return picture


def sharding_picture(shape: tuple[int, ...], itemsize: int, spec: ShardingSpec) -> ShardingPicture:
    """The picture of a layout."""
    return ShardingPicture(describe_held(shape, spec), shape, held_parts(shape, itemsize, spec), spec.mesh.shape[-1:])


def _mesh_picture(mesh: DeviceMesh) -> ShardingPicture:
    """A mesh as a tensor with an element on each worker."""
    parts = held_parts(mesh.shape, 0, ShardingSpec(mesh, [(axis,) for axis in mesh.axis_names]))
    return ShardingPicture(f"mesh {mesh}", mesh.shape, parts, mesh.shape[-1:], has_slices=False)


def _plain_picture(tensor: torch.Tensor) -> ShardingPicture:
    shape = tuple(tensor.shape)
    part = HeldPart(HERE, "-", 0, tuple([(0, size) for size in shape]), tensor.nbytes, "")
    return ShardingPicture(f"{'x'.join(map(str, shape)) or 'scalar'}, a plain tensor", shape, [part], (1,))


def _is_in_notebook() -> bool:
    shell = getattr(builtins, "get_ipython", None)
    return shell is not None and type(shell()).__name__ == "ZMQInteractiveShell"
