"""Reads of a session: the values, versions and layouts of tensors, and what workers have counted and recorded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gt.client.interrupts import CriticalSection
from gt.client.session import Session
from gt.client.storage import Storage, TensorRef, intern_geometry
from gt.client.torch_patches.dispatch import unintercepted
from gt.client.transfers import assemble, tensor_of_bytes
from gt.core.messages import (
    CURRENT,
    ByteRange,
    FetchTensor,
    Located,
    LocateTensor,
    MemoryRead,
    MoreRoomNeeded,
    NonFiniteRead,
    ReadMemory,
    ReadNonFinite,
    ReadStats,
    ReadStory,
    ReadVersions,
    ReadWorkers,
    StatsRead,
    StoryRead,
    TensorRead,
    VersionSpan,
    VersionsRead,
    WorkersRead,
)
from gt.core.meta import contiguous_strides
from gt.core.tables import print_bytes
from gt.sharding.spec import ShardingSpec, compute_local_shape, spec_of
from gt.wire.client_channel import Received
from gt.wire.codec import Buffer
from gt.wire.payloads import require_memory
from gt.wire.shared_memory import SHARE_BYTES

# Tensors


def fetch(ref: TensorRef, version: int = CURRENT) -> torch.Tensor:
    """The value of a tensor as a plain one; waits until it is computed. `version` selects an earlier value."""
    value = _fetch(ref, version)
    if ref.session.check_value is not None:
        ref.session.check_value(value)
    return value


@unintercepted
def _fetch(ref: TensorRef, version: int) -> torch.Tensor:
    session = ref.session
    session.require_open()
    session.require_values(f"the value of a tensor of shape {list(ref.geometry.shape)} is read")
    if session.call_log is not None:
        session.call_log.note_read(ref.geometry)
    storage = ref if isinstance(ref, Storage) else session.derive(ref)
    is_direct = session.embedded and version == CURRENT and not session.is_traced
    if is_direct and (data := _read_directly(session, storage)) is not None:
        return assemble((data,), None, ref.geometry, is_shared=False)
    read, layout = _read(session, storage, version, ref.geometry.nbytes)
    return assemble(read.buffers, layout, ref.geometry, read.is_shared)


@unintercepted
def fetch_part(ref: TensorRef, worker: int) -> tuple[torch.Tensor, ShardingSpec]:
    """The part of a tensor that a worker holds as a plain one, and the layout that it is a part of."""
    session = ref.session
    session.require_open()
    session.require_values(f"the part of worker {worker} of a tensor of shape {list(ref.geometry.shape)} is read")
    storage = ref if isinstance(ref, Storage) else session.derive(ref)
    read, layout = _read(session, storage, CURRENT, ref.geometry.nbytes, worker)
    assert layout is not None, "that of a part is told"
    shape = torch.Size(compute_local_shape(layout, tuple(ref.geometry.shape), worker))
    geometry = intern_geometry(shape, contiguous_strides(shape), 0, ref.geometry.dtype)
    return tensor_of_bytes(read.buffers[0], geometry, copies=read.is_shared), layout


def _read_directly(session: Session, storage: Storage) -> Buffer | None:
    """The bytes of a tensor of the worker in this process; None if a request is necessary."""
    session.outbox.flush()
    session.inbox.require_accepted()
    with CriticalSection():
        data = session.channel.read_directly(storage.id)
    if data is not None:
        session.outbox.tape.append(FetchTensor(0, storage.id))
    return data


def _read(
    session: Session, storage: Storage, version: int, nbytes: int, worker: int | None = None
) -> tuple[Received, ShardingSpec | None]:
    """Read a tensor, or the part of one worker, with room for `nbytes`."""
    request = next(session.ids)
    site = session.sites.current()
    place = ByteRange("", nbytes) if nbytes >= SHARE_BYTES else None
    if place is not None:
        _require_memory(nbytes)
    session.outbox.submit(lambda ids: FetchTensor(request, ids[0], version, site, place, worker), [storage])
    read = session.wait_for(request, site)
    if isinstance(read.answer, MoreRoomNeeded):
        return _read(session, storage, version, read.answer.nbytes, worker)
    assert isinstance(read.answer, TensorRead)
    return read, None if read.answer.layout is None else spec_of(read.answer.layout)


def _require_memory(nbytes: int) -> None:
    """Raise MemoryError if this process cannot take the bytes of a tensor, and put them together."""
    try:
        require_memory(2 * nbytes)
    except MemoryError as error:
        raise MemoryError(
            f"this process has no memory to read {print_bytes(nbytes)}: {error}; read parts of the tensor, or free "
            f"memory of the program"
        ) from None


def read_versions(session: Session, storages: Sequence[Storage]) -> tuple[VersionSpan, ...]:
    """For each tensor, the VersionSpan of its readable values."""
    session.require_open()
    request = next(session.ids)
    session.outbox.submit(lambda ids: ReadVersions(request, ids), storages)
    answer = session.answer(request).answer
    assert isinstance(answer, VersionsRead)
    return answer.spans


def locate(ref: TensorRef) -> ShardingSpec:
    """The layout of a tensor; for a view, the layout that its value would have."""
    return locate_copies(ref)[0]


def locate_copies(ref: TensorRef, *, is_planning: bool = False) -> list[ShardingSpec]:
    """The layout of a tensor, and then of each copy that exists of it. With `is_planning` only the layout of an op
    depends on them, which changes no value: gt.compile need not know of this read."""
    session = ref.session
    storage = ref if isinstance(ref, Storage) else session.derive(ref)
    request = next(session.ids)
    outbox = session.outbox.unrecorded if is_planning else session.outbox
    outbox.submit(lambda ids: LocateTensor(request, ids[0]), [storage])
    answer = session.answer(request).answer
    assert isinstance(answer, Located)
    return [spec_of(answer.layout), *map(spec_of, answer.copies)]


def read_story(storage: Storage) -> StoryRead:
    """What the dispatcher remembers of a tensor."""
    session = storage.session
    session.require_open()
    session.outbox.flush()  # the dispatcher remembers earlier batches
    request = next(session.ids)
    session.outbox.submit(lambda ids: ReadStory(request, ids[0]), [storage])
    answer = session.answer(request).answer
    assert isinstance(answer, StoryRead)
    return answer


# Workers


def read_stats(session: Session) -> StatsRead:
    """Counters of each worker, and the memory it holds."""
    session.outbox.flush()  # frees the tensors that were collected
    return session.ask(ReadStats, StatsRead)


def read_workers(session: Session) -> WorkersRead:
    """The workers that have joined."""
    session.outbox.flush()  # likewise
    return session.ask(ReadWorkers, WorkersRead)


def read_memory(session: Session, watch: bool) -> MemoryRead:
    """The memory that tensors of this session took on each worker; `watch`: record it from now on."""
    session.outbox.flush()  # frees the tensors that were collected
    return session.ask(lambda request: ReadMemory(request, watch), MemoryRead)


def read_non_finite(session: Session, watch: bool, infinity: bool) -> NonFiniteRead:
    """The commands that have made NaN, or `infinity`; `watch`: workers look for them from now on."""
    return session.ask(lambda request: ReadNonFinite(request, watch, infinity), NonFiniteRead)
