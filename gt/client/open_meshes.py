"""`gt.open_mesh`: the mesh of the calls inside a `with` that name none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from gt.client.layouts import mesh, require_workers
from gt.sharding.spec import DeviceMesh

_open: ContextVar[DeviceMesh | None] = ContextVar("open_mesh", default=None)


@contextlib.contextmanager
def open_mesh(
    shape: int | Sequence[int] | DeviceMesh,
    axis_names: Sequence[str] = (),
    workers: Sequence[int] = (),
    name: str = "",
) -> Iterator[DeviceMesh]:
    """`with gt.open_mesh((2, 4), ("dp", "tp")) as mesh:` is gt.mesh for the calls inside: wherever `placements=` or
    `out=` is given without `mesh=`, and for tensors that the functions of gt.distributed lay out. A mesh that exists
    may be given in place of a shape. The innermost one counts, in this thread.

    >>> gt.init(workers=4, mode="virtual")
    >>> with gt.open_mesh((2, 2), ("dp", "tp")):
    ...     x = gt.ones(4, 6, placements="dp, tp")
    >>> x.spec
    ShardingSpec('dp, tp' on (dp=2, tp=2))
    """
    opened = require_workers(shape) if isinstance(shape, DeviceMesh) else mesh(shape, axis_names, workers, name)
    token = _open.set(opened)
    try:
        yield opened
    finally:
        _open.reset(token)


def current_mesh() -> DeviceMesh | None:
    """The mesh of the innermost open_mesh; None outside of any."""
    return _open.get()
