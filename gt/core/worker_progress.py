"""The memory in which a worker shows what it does: others of the same machine read it at any time.

It is a sequence of integers. A worker writes single ones, so a reader may see some that are a moment older than others.
"""

from __future__ import annotations

OP, SITE, STATE, SINCE, BUSY, WAITED, OPS, BYTES, RECEIVED, SENT = range(10)
"""Positions: the id of the last op begun, and its site (in a segment: the id of the segment, and the position in it);
the state and the time at which it began; nanoseconds of work and of exchanges since the start; ops run; bytes of the
tensors held; bytes received from other workers, and sent to them."""

COUNTERS = 16
PEERS_SHOWN = 64
LENGTH = COUNTERS + 2 * PEERS_SHOWN
"""The positions from COUNTERS on are pairs: a worker from which bytes were received, its number plus 1 (0: no more
pairs), and these bytes. With more peers, some are not shown."""

NBYTES = 8 * LENGTH

IDLE, RUNNING, EXCHANGING = range(3)
"""States: waiting for commands, running them, exchanging tensors with other workers, or waiting for these."""
STATE_NAMES = ("idle", "running", "exchanging")
