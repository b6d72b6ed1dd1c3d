"""The memory in which a worker shows what it does: others of the same machine read it at any time.

It is a sequence of integers. A worker writes single ones, so a reader may see some that are a moment older than others.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

OP, SITE, STATE, SINCE, BUSY, WAITED, OPS, BYTES, RECEIVED, SENT = range(10)
"""Positions: the id of the last op begun, and its site (in a program: the id of the program, and the position in it);
the state and the time at which it began; nanoseconds of work and of exchanges since the start; ops run; bytes of the
tensors held; bytes received from other workers, and sent to them."""

MEMBERS = 10
"""From here to COUNTERS: the workers of the last exchange, each as a bit."""

COUNTERS = 16
PEERS_SHOWN = 64
LENGTH = COUNTERS + 2 * PEERS_SHOWN
"""The positions from COUNTERS on are pairs: a worker from which bytes were received, its number plus 1 (0: no more
pairs), and these bytes. With more peers, some are not shown."""

NBYTES = 8 * LENGTH

IDLE, RUNNING, EXCHANGING = range(3)
"""States: waiting for commands, running them, exchanging tensors with other workers, or waiting for these."""
STATE_NAMES = ("idle", "running", "exchanging")

_BITS = 62  # bits of a word that are used
_ALL = array("q", [-1] * (COUNTERS - MEMBERS))


@lru_cache(maxsize=256)
def member_words(members: tuple[int, ...]) -> array[int]:
    """The words from MEMBERS on for an exchange among these workers. Where numbers are too large, all are members."""
    words = array("q", bytes(8 * len(_ALL)))
    for worker in members:
        word, bit = divmod(worker, _BITS)
        if word >= len(words):
            return _ALL
        words[word] |= 1 << bit
    return words


def is_member(cell: Sequence[int], worker: int) -> bool:
    """Whether a worker takes part in the last exchange of the worker that shows `cell`."""
    word, bit = divmod(worker, _BITS)
    return cell[min(MEMBERS + word, COUNTERS - 1)] >> bit & 1 == 1
