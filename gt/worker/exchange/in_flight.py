"""Tensors on their way to other workers.

A sender goes on at once: it must not wait until the receiver has come as far, or the stages of a pipeline run one after
the other. The bytes stay until they were received. A process group tells that only to who waits for it, so it is asked
when the answer is known, and when too many bytes are on their way.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

log = logging.getLogger("gt.worker")

IN_FLIGHT = 1 << 27  # bytes that may be on their way


class _Parcel(NamedTuple):
    peer: int
    works: Sequence[Any]
    buffers: Sequence[torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum([buffer.nbytes for buffer in self.buffers])


class InFlightSends:
    """`wait` blocks until a work is done, or raises. An error here is not of the tensor that is being exchanged: it is
    logged, and who receives from a peer that is gone is told by that."""

    def __init__(self, wait: Callable[[Any], None], limit: int = IN_FLIGHT) -> None:
        self.nbytes = 0
        self._wait = wait
        self._limit = limit
        self._parcels: deque[_Parcel] = deque()

    def __len__(self) -> int:
        return len(self._parcels)

    def add(self, peer: int, works: Sequence[Any], buffers: Sequence[torch.Tensor]) -> None:
        parcel = _Parcel(peer, works, buffers)
        self._parcels.append(parcel)
        self.nbytes += parcel.nbytes

    def make_room(self, nbytes: int) -> None:
        """Wait for the oldest parcels until so many bytes may be added. Workers exchange in one order, so the receivers
        come to what was sent before without anything that this worker has yet to do."""
        while self._parcels and self.nbytes + nbytes > self._limit:
            self._finish(self._parcels.popleft())

    def confirm(self, peer: int, *, but: int = 0) -> None:
        """A peer has sent something, which it does after it has received all that it was sent before. The last `but` of
        that it may not have received: they belong to the same exchange."""
        received = sum([parcel.peer == peer for parcel in self._parcels]) - but
        for _ in range(len(self._parcels)):
            parcel = self._parcels.popleft()
            if parcel.peer == peer and received > 0:
                received -= 1
                self._finish(parcel)
            else:
                self._parcels.append(parcel)

    def _finish(self, parcel: _Parcel) -> None:
        self.nbytes -= parcel.nbytes
        try:
            for work in parcel.works:
                self._wait(work)
        except Exception as error:
            log.warning("a tensor did not reach worker %d: %s", parcel.peer, error)
