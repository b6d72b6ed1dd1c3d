"""Where the parts of a tensor lie: `gt.visualize_sharding`."""

from __future__ import annotations

import builtins

from rich.console import Console

from gt.client.tensor import Tensor
from gt.monitor.sharding_picture import ShardingPicture
from gt.sharding.held_parts import describe_held, held_parts
from gt.sharding.spec import ShardingSpec


def visualize_sharding(tensor: Tensor) -> ShardingPicture:
    """Show where the parts of a tensor lie: a coloured table in a terminal, HTML in a notebook. Replicas have one
    colour. Returns the picture: `gt.visualize_sharding(x).save("x.svg")`, or `.png`.

    >>> gt.init(workers=2, mode="virtual")
    >>> picture = gt.visualize_sharding(gt.randn(4, 2))
    4x2 as [..., -] on mesh ...
    >>> picture.save("x.svg")
    """
    picture = sharding_picture(tuple(tensor.shape), tensor.itemsize, tensor.spec)
    if not _is_in_notebook():
        Console().print(picture)
    return picture


def sharding_picture(shape: tuple[int, ...], itemsize: int, spec: ShardingSpec) -> ShardingPicture:
    """The picture of a layout."""
    return ShardingPicture(describe_held(shape, spec), shape, held_parts(shape, itemsize, spec))


def _is_in_notebook() -> bool:
    shell = getattr(builtins, "get_ipython", None)
    return shell is not None and type(shell()).__name__ == "ZMQInteractiveShell"
