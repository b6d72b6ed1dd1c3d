"""Passes frames between two network devices late, with losses and at a limited rate, as `tc netem` does where a kernel
has it: `python -m tests.weak_links DEVICE DEVICE DELAY LOSS RATE`, in seconds, as a share, and in bytes a second."""

import contextlib
import heapq
import itertools
import random
import select
import socket
import sys
import time

SOL_PACKET, PACKET_VNET_HDR, PACKET_OUTGOING, ETH_P_ALL = 263, 15, 4, 3
QUEUED_BYTES = 1 << 20  # more than that is dropped, as by a router


def _open(device: str) -> socket.socket:
    """With headers that tell of checksums and segments which are left to the device."""
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    found.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    found.bind((device, 0))
    found.setblocking(False)
    return found


class _Direction:
    """Frames on their way to one device."""

    def __init__(self, target: socket.socket, delay: float, loss: float, rate: float) -> None:
        self._target, self._delay, self._loss, self._rate = target, delay, loss, rate
        self._free_at = 0.0
        self._order = itertools.count()
        self.queue: list[tuple[float, int, bytes]] = []

    def add(self, frame: bytes, random_source: random.Random) -> None:
        now = time.monotonic()
        start = max(now, self._free_at)
        if random_source.random() < self._loss or (start - now) * self._rate > QUEUED_BYTES:
            return
        self._free_at = start + len(frame) / self._rate
        heapq.heappush(self.queue, (self._free_at + self._delay, next(self._order), frame))

    def send_due(self) -> None:
        while self.queue and self.queue[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # the device is down, or its queue is full
                self._target.send(heapq.heappop(self.queue)[2])


def main(first: str, second: str, delay: str, loss: str, rate: str) -> None:
    source = random.Random(0)
    ends = [_open(first), _open(second)]
    ways = {
        end: _Direction(other, float(delay), float(loss), float(rate))
        for end, other in zip(ends, reversed(ends), strict=True)
    }
    print("ready", flush=True)
    while True:
        due = min((way.queue[0][0] for way in ways.values() if way.queue), default=time.monotonic() + 1)
        readable, _, _ = select.select([*ends, sys.stdin], [], [], max(0.0, due - time.monotonic()))
        if sys.stdin in readable:
            return  # closed
        for end in readable:
            with contextlib.suppress(OSError):
                while True:
                    frame, (_, _, kind, *_) = end.recvfrom(1 << 17)
                    if kind != PACKET_OUTGOING:
                        ways[end].add(frame, source)
        for way in ways.values():
            way.send_due()


if __name__ == "__main__":
    main(*sys.argv[1:])
