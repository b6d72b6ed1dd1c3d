"""Records of requests that workers have not answered yet. `State` owns and changes them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from gt.core.messages import (
    ByteRange,
    Failed,
    Fetched,
    MemoryReport,
    NonFiniteReport,
    Queried,
    Stats,
    Synchronized,
    TimelineReport,
    Traffic,
    Uploaded,
    Versions,
)
from gt.core.meta import TensorMeta
from gt.sharding.spec import DeviceMesh, ShardingSpec
from gt.wire.codec import Buffer

Reply: TypeAlias = (
    Fetched
    | Uploaded
    | Queried
    | Failed
    | Synchronized
    | Versions
    | Traffic
    | Stats
    | MemoryReport
    | NonFiniteReport
    | TimelineReport
)
"""A report by which a worker answers a request."""


class ReadPart(NamedTuple):
    """A part of a tensor that a worker was asked for: its size, -1 if unknown, and the client's memory for it, if
    any."""

    worker: int
    nbytes: int
    place: ByteRange | None = None


class PendingRequest(NamedTuple):
    """A request that workers have not answered yet.

    `waiting_for` are the workers whose reply is missing, `expects` the kinds of replies they may send, `replies` those
    that have arrived, with the bytes beside them. With `is_answered` the client was already told of a lost worker, and
    the replies still on their way are dropped. `version_ids` are the tensors of a ReadVersions. Of a read: its parts,
    and the layout that they are of, None for a whole tensor. Of a query: the `mesh` that runs it, the `first` id of its
    results, and the new ids and previous metas of the tensors it writes.
    """

    waiting_for: frozenset[int]
    expects: tuple[type[Reply], ...]
    replies: tuple[tuple[int, Reply], ...] = ()
    buffers: tuple[tuple[int, Buffer], ...] = ()
    reads: tuple[ReadPart, ...] = ()
    layout: ShardingSpec | None = None
    is_answered: bool = False
    mesh: DeviceMesh | None = None
    first: int = 0
    written: tuple[tuple[int, TensorMeta], ...] = ()
    version_ids: tuple[int, ...] = ()
