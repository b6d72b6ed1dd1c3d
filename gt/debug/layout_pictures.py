"""Where the parts of a tensor lie: `gt.visualize_sharding`."""

from __future__ import annotations

import builtins
import math

from rich.console import Console

from gt.client.tensor import Tensor
from gt.monitor.sharding_picture import HeldPart, ShardingPicture
from gt.sharding.spec import ShardingSpec, local_box


def visualize_sharding(tensor: Tensor) -> ShardingPicture:
    """Show where the parts of a tensor lie: a coloured table in a terminal, HTML in a notebook. Replicas have one
    colour. Returns the picture: `gt.visualize_sharding(x).save("x.svg")`, or `.png`."""
    picture = sharding_picture(tuple(tensor.shape), tensor.itemsize, tensor.spec)
    if not _is_in_notebook():
        Console().print(picture)
    return picture


def sharding_picture(shape: tuple[int, ...], itemsize: int, spec: ShardingSpec) -> ShardingPicture:
    """The picture of a layout."""
    mesh = spec.mesh
    kind = "" if spec.kind == "sum" else f" ({spec.kind})"
    partial = " ".join(spec.partial) + kind if spec.partial else ""
    numbers: dict[object, int] = {}
    parts = []
    for worker in mesh.workers:
        box = local_box(spec, shape, worker)
        along = tuple(mesh.coordinate(worker)[mesh.axis_names.index(axis)] for axis in spec.partial)
        number = numbers.setdefault((box, along), len(numbers))
        coordinate = " ".join(f"{axis}={at}" for axis, at in zip(mesh.axis_names, mesh.coordinate(worker), strict=True))
        nbytes = itemsize * math.prod(stop - start for start, stop in box)
        parts.append(HeldPart(worker, coordinate or "-", number, box, nbytes, partial))
    text = f"{'x'.join(map(str, shape)) or 'scalar'} as [{spec}] on mesh {mesh}"
    return ShardingPicture(text, shape, parts)


def _is_in_notebook() -> bool:
    shell = getattr(builtins, "get_ipython", None)
    return shell is not None and type(shell()).__name__ == "ZMQInteractiveShell"
