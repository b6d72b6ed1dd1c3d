"""Tensors that were sent and may not have arrived.

A sender does not wait for its receiver, or the stages of a pipeline would run one after the other. Its buffers stay
alive until the receiver has them. A process group blocks when it is asked about that, so it is asked only once the
receiver must have the tensor, or when too many bytes are in flight.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

log = logging.getLogger("gt.worker")

MAX_IN_FLIGHT = 1 << 27  # bytes


class _Send(NamedTuple):
    peer: int
    works: Sequence[Any]
    buffers: Sequence[torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


class InFlightSends:
    """`wait` blocks until a work of the process group is done, or raises. Such an error is logged only: it belongs to
    an earlier exchange, and a receive from the same peer fails as well."""

    def __init__(self, wait: Callable[[Any], None], limit: int = MAX_IN_FLIGHT) -> None:
        self.nbytes = 0
        self._wait = wait
        self._limit = limit
        self._sends: deque[_Send] = deque()

    def __len__(self) -> int:
        return len(self._sends)

    def add(self, peer: int, works: Sequence[Any], buffers: Sequence[torch.Tensor]) -> None:
        send = _Send(peer, works, buffers)
        self._sends.append(send)
        self.nbytes += send.nbytes

    def reserve(self, nbytes: int) -> None:
        """Wait for the oldest sends until so many bytes may be added.

        This cannot deadlock: all workers exchange in one order, so a receiver gets to an earlier send without anything
        that this worker has yet to do.
        """
        while self._sends and self.nbytes + nbytes > self._limit:
            self._finish(self._sends.popleft())

    def confirm(self, peer: int, *, except_last: int = 0) -> None:
        """A value has come from a peer, which by then has received everything sent to it before. The `except_last`
        newest sends belong to the same exchange as that value, so the peer may not have them."""
        received = sum(send.peer == peer for send in self._sends) - except_last
        for _ in range(len(self._sends)):
            send = self._sends.popleft()
            if send.peer == peer and received > 0:
                received -= 1
                self._finish(send)
            else:
                self._sends.append(send)

    def _finish(self, send: _Send) -> None:
        self.nbytes -= send.nbytes
        try:
            for work in send.works:
                self._wait(work)
        except Exception as error:
            log.warning("a tensor did not reach worker %d: %s", send.peer, error)
